"""Kernels as the compiler writes them: noted, told in columns, gathered; and corrections fitted."""

import json
import multiprocessing
import time
from dataclasses import replace
from math import nan

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from foretell.cluster.read import devices  # noqa: E402
from foretell.cost.fused_kernels import lowered  # noqa: E402
from foretell.cost.fused_regions import WORDS, assembled  # noqa: E402
from foretell.errors import InputError  # noqa: E402
from foretell_lab.fused import bench, matched, steps  # noqa: E402
from foretell_lab.fused import data as fused_data  # noqa: E402
from foretell_lab.fused import gather_steps as gather_steps_module  # noqa: E402
from foretell_lab.fused.build import compiled  # noqa: E402
from foretell_lab.fused.gather import gather, joined, measured_regions  # noqa: E402
from foretell_lab.fused.gather_steps import gather_steps  # noqa: E402
from foretell_lab.fused.kernels import noted  # noqa: E402
from foretell_lab.fused.region import Entry, Op, Region, dumps  # noqa: E402
from foretell_lab.fused.templates import _size  # noqa: E402
from foretell_lab.fused.written import parts  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def softmax_of_sum(rows: int = 64, cols: int = 48) -> Region:
    entries = (Entry((rows, cols), (cols, 1), "float32"), Entry((cols,), (1,), "float32"))
    add = Op("aten.add.Tensor", [["%", 0, -1], ["%", 1, -1]], {})
    softmax = Op("aten._softmax.default", [["%", 2, -1], 1, False], {})
    return Region("test", entries, (add, softmax), ((3, -1),))


@pytest.fixture(scope="module")
def notes():
    with noted() as found:
        compiled(softmax_of_sum(), "cpu")
    return found


def test_a_compiler_s_kernels_are_noted_with_what_they_read(notes):
    loops = [loop for note in notes for loop in note["loops"]]
    assert {note["kind"] for note in notes} == {"loops"}
    assert {read[0] for loop in loops for read in loop["reads"]} >= {"arg0_1", "arg1_1"}
    assert sum(bool(loop["how"]) for loop in loops) >= 2  # the largest, and the sum
    json.dumps(notes)  # plain data


def test_nothing_is_noted_afterwards(notes):
    before = len(notes)
    compiled(softmax_of_sum(32, 16), "cpu")
    assert len(notes) == before


def test_a_kernel_s_columns_tell_sizes_rows_and_what_leaves(notes):
    found = parts(notes, [1e-6] * len(notes), "arg0_1", nan)
    regions = assembled([(p.nodes, p.edges) for p in found])
    words = [WORDS[o] for o in regions.op]
    assert words.count("fresh") >= 1
    assert regions.inner.max() == 48
    assert regions.looped.max() == 64 * 48
    assert regions.writes.sum() >= 64 * 48 * 4
    assert np.all(regions.source < regions.target)


def loop(how: str, reads: list, writes: list, ops: list) -> dict:
    return {"n": 8, "r": 4, "sizes": [[8], [4]], "how": how, "hint": "INNER", "ops": ops,
            "reads": reads, "writes": writes}  # fmt: skip


def test_the_same_computed_twice_is_one_node():
    read = ["arg0_1", "float32", 32, [[32, 1]], 0, [0]]
    ops = [["exp", "float32", []], ["sum", "float32", [0]]]
    twice = [
        loop("sum", [read], [[f"buf{i}", "float32", 8, [[8, 1]], 0, [], 1]], ops) for i in (0, 1)
    ]
    (part,) = parts([{"kind": "loops", "loops": twice}], [1e-6], "", nan)
    assert [node[0] for node in part.nodes] == ["input", "exp", "sum"]
    assert part.nodes[2][7] == 2 * 8 * 4  # both results leave


def test_what_finishes_a_split_sum_has_not_the_ops_before_it():
    read = ["buf0", "float32", 32, [[32, 1]], 0, []]
    ops = [["exp", "float32", []], ["sum", "float32", [0]]]
    last = loop("sum", [read], [["buf1", "float32", 8, [[8, 1]], 0, [], 1]], ops)
    (part,) = parts([{"kind": "loops", "loops": [last]}], [1e-6], "", nan)
    assert [node[0] for node in part.nodes] == ["input", "sum"]


def test_a_tensor_is_fresh_until_a_cache_s_worth_was_touched():
    def stream(name: str, source: str, count: int) -> dict:
        read = [source, "float32", count, [[count, 1]], 0, [0]]
        made = [name, "float32", count, [[count, 1]], 0, [], 1]
        return {"kind": "loops", "loops": [
            loop("", [read], [made], [["exp", "float32", []]])
            | {"n": count, "r": 1, "sizes": [[count], []]}
        ]}  # fmt: skip

    run = [stream("buf0", "arg0_1", 1000), stream("buf1", "buf0", 1000),
           stream("buf2", "arg1_1", 1 << 24), stream("buf3", "buf0", 1000)]  # fmt: skip
    found = parts(run, [1e-6] * 4, "arg0_1", nan)
    assert [p.nodes[0][0] for p in found] == ["fresh", "fresh", "input", "input"]


@pytest.fixture
def results(tmp_path, notes):
    (tmp_path / "r.txt").write_text(dumps(softmax_of_sum()) + "\n")
    row = {"at": 0, "s": 2e-6, "spread": 0.01, "kernels": len(notes), "notes": notes,
           "names": ["triton_per_fused_0"] * len(notes), "parts": [1e-6] * len(notes)}  # fmt: skip
    (tmp_path / "r.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({"at": 0, "why": "no"}))
    return str(tmp_path / "r.txt"), str(tmp_path / "r.jsonl")


def test_regions_and_their_kernels_are_gathered(results, tmp_path, notes):
    assert gather([results], tmp_path / "one.npz") == 1 + len(notes)
    gather([results], tmp_path / "two.npz", tmp_path / "one.npz")
    found = fused_data.read((tmp_path / "two.npz").read_bytes())
    assert found.regions.is_written.tolist() == ([False] + [True] * len(notes)) * 2
    assert set(found.family) == {"test"}
    one = fused_data.read((tmp_path / "one.npz").read_bytes())
    assert len(joined(one, one)) == len(found)
    assert len(measured_regions([results])) == 1


def test_the_last_file_counts_and_own_times_are_kept(results, tmp_path, notes):
    row = json.loads((tmp_path / "r.jsonl").read_text().splitlines()[0])
    for name, seconds, alone in (("old", 4e-5, [1e-6, 2e-6]), ("new", 3e-6, None)):
        made = row | {"s": seconds} | ({"alone": alone} if alone else {})
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(made) + "\n")
    pairs = [(results[0], str(tmp_path / f"{name}.jsonl")) for name in ("old", "new")]
    found = measured_regions(pairs)
    assert found.seconds.tolist() == [3e-6]
    assert np.nansum(found.regions.seconds) == pytest.approx(3e-6)
    # of a hurried file only what takes long is kept, and no kernels
    assert gather(pairs[:1], tmp_path / "long.npz", hurried=1) == 1
    assert gather(pairs[::-1], tmp_path / "both.npz", hurried=1) == 1 + len(notes)


def test_nothing_measured_is_said(tmp_path):
    (tmp_path / "r.txt").write_text(dumps(softmax_of_sum()) + "\n")
    (tmp_path / "r.jsonl").write_text(json.dumps({"at": 0, "why": "no"}) + "\n")
    with pytest.raises(InputError, match="nothing was measured"):
        measured_regions([(str(tmp_path / "r.txt"), str(tmp_path / "r.jsonl"))])


def test_steps_are_gathered_with_what_libraries_took(tmp_path, notes):
    product = {
        "kind": "extern", "op": "aten.mm.out", "ops": [["mm", "float32", [], [4, 4]]],
        "reads": [["arg0_1", "float32", 16]], "writes": [["buf9", "float32", 16]],
    }  # fmt: skip
    ran = [["gemm", 0, 500], *[["triton_per_0", 600 + i, 100] for i in range(len(notes))]]
    row = {
        "model": "m",
        "plan": "p",
        "s": 1e-6,
        "host": 1e-7,
        "ran": ran,
        "notes": [product, *notes],
    }
    (tmp_path / "s.jsonl").write_text(json.dumps(row) + "\n")
    assert gather_steps(str(tmp_path / "s.jsonl"), tmp_path / "steps") == 1
    (step,) = json.loads((tmp_path / "steps.json").read_text())
    assert step["extern"] == [["aten.mm.out(float32:16)->4x4", pytest.approx(5e-7)]]
    found = fused_data.read((tmp_path / "steps.npz").read_bytes())
    assert set(found.family) == {"m/p"}
    assert len(found) == len(notes)


def test_a_library_s_helping_kernels_belong_to_the_one_they_help():
    ran = [("Memset (Device)", 1.0), ("gemm", 10.0), ("splitKreduce", 2.0), ("gemm", 20.0)]
    assert gather_steps_module._grouped(ran) == [13.0, 20.0]
    assert gather_steps_module._grouped([("Memset (Device)", 1.0)]) == [1.0]


def test_a_step_with_mixed_reductions_is_kept_without_its_kernels_times(tmp_path, notes):
    mixed = [notes[0] | {"mixed": 1}, *notes[1:]]
    row = {"model": "m", "plan": "p", "s": 1e-6, "host": 0.0, "ran": [["triton_0", 0, 9]]}
    (tmp_path / "s.jsonl").write_text(json.dumps(row | {"notes": [*mixed, *notes]}) + "\n")
    assert gather_steps(str(tmp_path / "s.jsonl"), tmp_path / "steps") == 1
    assert np.isnan(fused_data.read((tmp_path / "steps.npz").read_bytes()).seconds).all()
    (tmp_path / "s.jsonl").write_text(json.dumps(row | {"notes": [*notes, *notes]}) + "\n")
    with pytest.raises(InputError, match="no step"):
        gather_steps(str(tmp_path / "s.jsonl"), tmp_path / "steps")


def test_what_a_loop_does_of_a_product_is_to_add_its_bias():
    read = ["buf0", "float32", 32, [[32, 1]], 0, [0]]
    made = [["buf1", "float32", 32, [[32, 1]], 0, [], 1]]
    bias = loop("", [read], made, [["convolution", "float32", []]])
    (part,) = parts([{"kind": "loops", "loops": [bias]}], [1e-6], "", nan)
    assert [node[0] for node in part.nodes] == ["input", "add"]


def test_a_step_that_fails_or_is_late_costs_itself_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "CASES", (("no such model", 0, "fp32"),))
    monkeypatch.setattr(steps, "PLANS", {"default": {}})
    out = tmp_path / "s.jsonl"
    steps.steps(str(out), "cpu", 120.0, 1)
    (row,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert "no such model" in row["why"]
    worker = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    worker.start()
    assert steps._goes_on(worker, time.time() + 60)
    assert not steps._goes_on(worker, 0.0)


def test_the_largest_tile_that_fits_is_taken():
    class Tile:
        def __init__(self, m: int, n: int, k: int) -> None:
            self.block_m, self.block_n, self.block_k, self.num_warps = m, n, k, 4

    tiles = [Tile(32, 32, 16), Tile(128, 128, 32), Tile(128, 128, 64), Tile(256, 128, 64)]
    assert max(tiles, key=_size) is tiles[2]


def test_corrections_are_fitted_written_and_reported(tmp_path):
    data = fused_data.shipped("h200")
    rows = np.flatnonzero(data.held_out & ~data.regions.is_written)[:300]
    some = data.take(rows)
    some = replace(some, seconds=1.6 * some.seconds)
    answer = bench.tuned(some, devices()["h200"], tmp_path / bench.FILE)
    assert answer["fused_regions"] == 300
    assert answer["fused_error_tuned"] < 0.6 * answer["fused_error"]
    assert (tmp_path / bench.FILE).is_file()


def test_regions_to_correct_by_are_small_enough():
    chosen = bench.regions_for(6, 2**20, quick=True)
    assert len(chosen) == 6
    assert max(bench._entering(r) for r in chosen) <= 2**20


@pytest.mark.slow
def test_a_quick_bench_measures_and_writes(tmp_path):
    answer = bench.bench(tmp_path, "cpu", 240.0, quick=True)
    assert answer["fused_regions"] >= 10
    assert (tmp_path / bench.FILE).read_text().startswith('device = "')


def test_kernels_run_in_the_order_predicted():
    """Of training regions with several kernels that were predicted, told apart by their sizes."""
    data, h200 = fused_data.shipped("h200"), devices()["h200"]
    written = data.regions.is_written
    rows = np.flatnonzero(~written & ~data.held_out)[::3]
    found = lowered(data.regions.take(rows), float(h200.units))
    mine, theirs = (matched._figures(h200, r) for r in (found.regions, data.regions))
    same = []
    for r, row in enumerate(rows.tolist()):
        answer = np.flatnonzero(found.of == r)
        true = np.arange(row + 1, min(row + 1 + len(answer), len(data)))
        if len(answer) == data.kernels[row] > 1 and written[true].all():
            a, b = matched._paired(mine[answer], theirs[true])
            same.append(bool(np.all(np.diff(b[np.argsort(a)]) > 0)))
    assert len(same) > 1000
    assert np.mean(same) > 0.93  # 96 %; 83 % in the order of their first loops
