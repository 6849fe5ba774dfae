"""The price chain: who is asked, who answers, and what is kept of the answer."""

import gzip

import numpy as np
import pytest
from tests.transformer import transformer

from foretell.cluster import load
from foretell.cost import kernel, price, prices, work_of
from foretell.cost.price import CollectiveFormula, CopyFormula, KernelFormula, Measured, normal
from foretell.cost.price import load as load_table
from foretell.cost.price import table as measured_table
from foretell.errors import InputError, UnmodelledError
from foretell.graph import Builder, Kind, Source

A100 = load("dgx-a100:nodes=1")


def one(**columns):
    make = Builder()
    make.task(lane=make.lane("s", kind="compute"), **columns)
    return make.graph()


def test_every_device_task_gets_a_price_and_its_source():
    graph = price(transformer(ranks=2, layers=1), A100)
    device = np.isin(graph.kind, (Kind.KERNEL, Kind.COLLECTIVE))
    assert (graph.seconds[device] > 0).all()
    assert set(graph.source[device]) == {Source.FORMULA, Source.LEARNED}
    assert set(graph.source[graph.select(op="gemm")]) == {Source.LEARNED}
    assert (graph.sigma[device] > 0).all()
    assert graph.history == ("price:on=dgx-a100:nodes=1",)


def test_what_was_given_or_measured_stays():
    graph = one(kind="kernel", op="gemm", shape="m=8,n=8,k=8", seconds=1.0)
    assert price(graph, A100) is graph
    assert price(graph, A100, again=True).seconds[0] < 1e-3


def test_the_first_that_knows_answers():
    graph = one(kind="kernel", op="gemm", shape="m=64,k=64,n=64", dtype="bf16")
    table = Measured({("a100-80", "gemm", "bf16", normal("m=64,n=64,k=64")): (1.5e-5, 0.01)})
    priced = price(graph, A100, [table, KernelFormula()])
    assert priced[0].seconds == 1.5e-5
    assert priced[0].source == "measured"
    assert priced[0].sigma == pytest.approx(0.01)
    other = one(kind="kernel", op="gemm", shape="m=64,k=64,n=65", dtype="bf16")
    assert price(other, A100, [table, KernelFormula()])[0].source == "formula"


def test_equal_work_is_asked_once():
    graph = transformer(ranks=8, layers=6)
    tasks = graph.select(kind=("kernel", "collective"))
    work, number = work_of(graph, tasks, A100)
    assert len(work) < 20
    assert len(number) == len(tasks)
    for name in ("flops", "bytes"):
        np.testing.assert_array_equal(getattr(work, name)[number], graph.column(name)[tasks])
    assert [work.op[k] for k in number] == [graph[int(t)].op for t in tasks]


def test_a_rank_is_priced_on_its_own_device():
    mixed = load("tag")
    make = Builder()
    for rank in range(mixed.size):
        lane = make.lane("s", rank=rank, kind="compute")
        shape = "m=4096,n=4096,k=4096"
        make.task(kind="kernel", op="gemm", shape=shape, dtype="fp32", rank=rank, lane=lane)
    graph = price(make.graph(), mixed)
    by_device = {}
    for rank in range(mixed.size):
        by_device.setdefault(mixed.devices[rank].name, set()).add(graph.seconds[rank])
    assert all(len(times) == 1 for times in by_device.values())
    assert len({min(times) for times in by_device.values()}) == len(by_device) > 1


def test_copies_and_collectives():
    copies = one(kind="copy", op="h2d", bytes=1e9)
    spent = price(copies, A100, [CopyFormula()]).seconds[0]
    assert spent == pytest.approx(1e9 / A100.host_bandwidth(0), rel=0.01)
    ring = one(kind="collective", op="all_reduce", comm_bytes=1e9, group="0-7")
    spent = price(ring, A100, [CollectiveFormula()]).seconds[0]
    assert 2 * 7 / 8 * 1e9 / 300e9 < spent < 4 * 7 / 8 * 1e9 / 300e9


def test_no_model_knows_it():
    with pytest.raises(UnmodelledError, match="no price for kernel `mystery`") as error:
        price(one(kind="kernel", op="mystery"), A100)
    assert "kernel formula" in error.value.message
    assert "seconds" in error.value.hint


def test_what_was_measured_on_an_h200_comes_first():
    h200 = load("h200")
    table = measured_table("h200").table
    (device, op, dtype, shape), (seconds, _) = next(iter(sorted(table.items())))
    assert (device, op) == ("h200", "gemm")
    known = price(one(kind="kernel", op="gemm", shape=shape, dtype=dtype), h200)
    assert (known[0].source, known[0].seconds) == ("measured", seconds)
    other = price(one(kind="kernel", op="gemm", shape="m=4099,n=4099,k=4099", dtype="bf16"), h200)
    assert other[0].source != "measured"


def test_measured_products_are_near_their_formula():
    """The same work by another road: a slip in m, n, k would be off by far more."""
    table = measured_table("h200").table
    big = [(k, s) for k, (s, _) in sorted(table.items()) if s > 2e-4 and k[2] == "bf16"][:200]
    shapes, times = [k[3] for k, _ in big], np.array([s for _, s in big])
    formula = kernel.seconds(load("h200").devices[0], "gemm", "bf16", shapes).seconds
    assert len(big) > 20
    assert np.median(np.abs(formula / times - 1)) < 0.25


def test_a_cluster_too_small():
    with pytest.raises(InputError, match="the graph has rank 15, the cluster only 8 ranks"):
        price(transformer(ranks=16, layers=1), A100)


def test_prices_can_be_had_without_a_new_graph():
    graph = transformer(ranks=1, layers=1)
    tasks = graph.select(op="gemm")
    seconds, _, source = prices(graph, tasks, A100)
    assert len(seconds) == len(tasks)
    assert set(source) == {Source.LEARNED}


def test_a_table_from_a_file(tmp_path):
    text = 'device,op,dtype,shape,seconds\nx,gemm,fp32,"n=2,m=1",2e-3\nx,gemm,fp32,"m=1,n=2",4e-3\n'
    path = tmp_path / "table.csv.gz"
    path.write_bytes(gzip.compress(text.encode()))
    table = load_table(path)
    assert table.table == {("x", "gemm", "fp32", "m=1,n=2"): (3e-3, 0.03)}


BAD = {
    "no column": "op,dtype\n",
    "not a time": "device,op,dtype,shape,seconds\nx,gemm,fp32,,soon\n",
    "negative": "device,op,dtype,shape,seconds\nx,gemm,fp32,,-1\n",
    "nan": "device,op,dtype,shape,seconds\nx,gemm,fp32,,nan\n",
    "short row": "device,op,dtype,shape,seconds\nx,gemm\n",
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_table(what, tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(BAD[what])
    with pytest.raises(InputError, match=r"table\.csv"):
        load_table(path)


def test_a_table_that_is_not_there_or_not_text(tmp_path):
    with pytest.raises(InputError, match="cannot read"):
        load_table(tmp_path / "none.csv")
    path = tmp_path / "table.csv"
    path.write_bytes(b"\x1f\x8bnot gzip after all")
    with pytest.raises(InputError):
        load_table(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not text"):
        load_table(path)
