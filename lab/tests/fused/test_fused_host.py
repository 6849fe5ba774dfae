"""Regions on one core: compiled many to a library, read in rounds, fitted and learned from."""

import json
import time
from random import Random

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from foretell.cost import fused  # noqa: E402
from foretell.cost.fused_regions import NESTED, nested  # noqa: E402
from foretell_lab.fused import data as fused_data  # noqa: E402
from foretell_lab.fused import host, host_build, host_fit, host_make  # noqa: E402
from foretell_lab.fused.build import graph_of, real_entry  # noqa: E402
from foretell_lab.fused.gather import measured_regions  # noqa: E402
from foretell_lab.fused.host_clock import Clock, Item, op_items  # noqa: E402
from foretell_lab.fused.region import Entry, Op, Region, dumps  # noqa: E402
from foretell_lab.fused.tuning import one_core  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own tracing deprecates itself


def gelu_of_sum(rows: int = 64) -> Region:
    entries = (Entry((rows, 32), (32, 1), "float32"), Entry((32,), (1,), "float32"))
    add = Op("aten.add.Tensor", [["%", 0, -1], ["%", 1, -1]], {})
    return Region("test", entries, (add, Op("aten.gelu.default", [["%", 2, -1]], {})), ((3, -1),))


def test_rounds_confirm_one_another():
    assert host.agreed([1.0]) is None
    assert host.agreed([1.0, 1.2]) is None
    assert host.agreed([1.2, 1.0, 1.05]) == pytest.approx(0.05)


def test_a_region_is_what_two_rounds_agree_on():
    rows = [
        {"at": 0, "round": 0, "loops": 2, "s": 1.05e-4, "alone": [3e-5, 5e-5]},
        {"at": 0, "round": 1, "loops": 2, "s": 1.00e-4},
        {"at": 1, "round": 0, "loops": 1, "s": 1.0e-4},
        {"at": 1, "round": 1, "loops": 1, "s": 2.0e-4},
        {"at": 2, "why": "no"},
    ]
    (only,) = host.merged(rows)
    assert only.pop("notes") == []
    assert only == {"at": 0, "s": 1e-4, "spread": 0.05, "kernels": 2, "alone": [3e-5, 5e-5]}
    assert [row["at"] for row in host.merged(rows, confirmed=False)] == [0, 1]


def test_a_clock_reads_by_turns_until_it_is_sure():
    ran: list[str] = []
    items = [Item(lambda name=name: ran.append(name), None, 1 << 20, at)
             for at, name in enumerate("ab")]  # fmt: skip
    Clock().passes(items, 2, 5)
    assert ran[:4] == ["a", "b", "a", "b"]
    assert all(2 <= len(item.read) <= 5 for item in items)
    assert all(item.read == sorted(item.read) for item in items)


def test_each_op_alone_finds_its_tensors():
    region = gelu_of_sum()
    entries = [real_entry(e, "cpu") for e in region.entries]
    items = op_items(0, region, entries)
    torch.testing.assert_close(items[0][1].run(), entries[0] + entries[1])
    assert items[0][1].moved == 4 * (64 * 32 * 2 + 32)
    assert len({name for name, _ in items}) == 2


def test_kernels_of_a_block_keep_their_own_names():
    block = host_build.wrapped([(0, gelu_of_sum()), (1, gelu_of_sum(128))])
    assert [row.why for row in block.rows] == ["", ""]
    assert [row.loops for row in block.rows] == [1, 1]
    source = host_build._source(block)
    assert len(block.kernels) == 2
    for key in block.kernels:
        assert source.count(f"void  {key}(") == 1
        assert f'{{"{key}", {key}_py' in source


def test_what_takes_long_is_not_made_for_a_core():
    small, large = gelu_of_sum(), gelu_of_sum(1 << 20)
    assert host_make.short([small, large]) == [small]
    assert host_make.short([]) == []


def test_a_model_gets_a_part_of_its_batch():
    whole = [host_make.MODELS["gated"](Random(3), "fp32")[1][0].shape[0]]
    parts = [host_make._smaller("gated", Random(3), "fp32")[1][0].shape[0] for _ in range(2)]
    assert parts[0] == parts[1] <= whole[0]


def test_the_formula_on_tensors_is_the_formula():
    data = fused_data.shipped("cpu")
    some, core = data.regions.take(range(60)), one_core()
    c, weights = fused.constants_by_sort()["cpu"]["constants"], fused.weights("cpu")
    values = torch.log(torch.tensor([c[name] for name in host_fit.GUESS], dtype=torch.float64))
    work = torch.tensor(host_fit.places_by_op(some) @ weights)
    walk = torch.tensor(nested(some, weights).region)
    mine = host_fit._seconds(core, walk, work, values).numpy()
    np.testing.assert_allclose(
        mine, fused.fused_price(some, core, learned=False).seconds, rtol=1e-3
    )
    assert walk.shape[1] == len(NESTED)


def test_a_correction_that_helps_by_half_is_halved():
    pytest.importorskip("torch_geometric")
    from foretell_lab.fused.train import _scale, shrunk

    middle = np.linspace(-1, 1, 41)
    assert shrunk((middle, np.ones(41), 0.5 * middle)) == pytest.approx(0.5)
    arrays = {"0/out.weight": np.ones((2, 3)), "0/out.bias": np.ones(2), "0/first.bias": np.ones(2)}
    _scale(arrays, 0.5)
    assert arrays["0/out.weight"].tolist() == [[0.5] * 3, [1.0] * 3]
    assert arrays["0/out.bias"].tolist() == [0.5, 1.0]
    assert arrays["0/first.bias"].tolist() == [1.0, 1.0]


@pytest.mark.slow
def test_a_library_runs_its_regions_as_torch_does():
    regions = [gelu_of_sum(), gelu_of_sum(128)]
    block = host_build.wrapped(list(enumerate(regions)))
    runs = host_build.runs(block, host_build.build(block)())
    for at, region in enumerate(regions):
        entries = [real_entry(e, "cpu") for e in region.entries]
        torch.testing.assert_close(runs[at](list(entries))[0], graph_of(region, "cpu")(*entries)[0])


@pytest.mark.slow
def test_regions_are_measured_and_gone_on_with(tmp_path):
    path, out = str(tmp_path / "regions.txt"), tmp_path / "out.jsonl"
    with open(path, "w") as file:
        file.write("\n".join(dumps(gelu_of_sum(n)) for n in (64, 4096)) + "\n")
    job = host.HostJob(path, str(out), time.time() + 200, rounds=1)
    host.measure_host(job)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(row["at"] for row in rows) == [0, 1]
    assert all(row["s"] > 0 and len(row["alone"]) == 2 for row in rows)
    assert len(measured_regions([(path, str(out))])) == 2
