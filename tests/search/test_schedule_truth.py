"""The shared placements: never worse than what Tessel and a plain CP-SAT model found on them."""

import json
from pathlib import Path

import pytest

from foretell.search.schedule import load, schedule

TRUTH = Path(__file__).resolve().parents[2].parent / "shared" / "truth"
PLACEMENTS = sorted((TRUTH / "schedules").glob("*.json"))
pytestmark = [
    pytest.mark.truth,
    pytest.mark.skipif(not PLACEMENTS, reason=f"no placements in {TRUTH}"),
]
# where the authors give no memory: that of their scripts for a like placement
MEMORY = {"alphafold_4dev_train": 4, "finetune_4dev_train": 6, "kshape_8dev_train": 10,
          "mllm_4dev_train": 6, "xshape_6dev_train": 6, "xshape_8dev_train": 8}  # fmt: skip


def memory_of(path):
    settings = json.loads(path.read_text())["upstream_settings"]
    return MEMORY.get(path.stem) or settings[0]["memory"]


def recorded(name, memory):
    """Period and makespans that others reached with this much memory or less."""
    baseline = json.loads((TRUTH / "schedules_baseline.json").read_text())
    for row in baseline["tessel"]:
        case = f"{row['placement']}_{row['ndevs']}dev_{'train' if row['train'] else 'infer'}"
        if case == name and row.get("solution") and row["memory"] <= memory:
            ends = {n: min(m["concat"], m["asap"]) for n, m in row["makespan"].items()}
            yield row["period"], ends
    for row in baseline["cpsat_modulo"]:
        if row["case"] == name and row["M"] <= memory:
            yield row["P"], row["asap"]


LONG = ("xshape_6dev_train", "xshape_8dev_train")  # seconds each
EACH = [
    pytest.param(path, marks=pytest.mark.slow) if path.stem in LONG else path for path in PLACEMENTS
]


@pytest.mark.parametrize("path", EACH, ids=lambda p: p.stem)
def test_no_worse_than_anyone(path):
    memory = memory_of(path)
    problem = load(path)
    for num in (8, 128):
        found = schedule(problem, num, memory, work=2)
        assert found.proven
        assert found.per_micro_batch == max(problem.work)
        for period, ends in recorded(path.stem, memory):
            assert found.per_micro_batch <= period
            assert found.makespan <= ends.get(str(num), found.makespan)


def test_the_period_for_every_memory():
    """The exact table of one micro-batch a pattern, made apart with another model."""
    rows = json.loads((TRUTH / "schedules_baseline.json").read_text())["cpsat_period_vs_memory"]
    tight = [r for r in rows if r["status"] == "OPT" and r["NR"] in (6, 8)]
    assert len(tight) > 15
    for row in tight:
        problem = load(TRUTH / "schedules" / f"{row['case']}.json")
        found = schedule(problem, 1, row["M"], unroll=1, work=2)
        assert found.period == row["P"], row
        assert found.proven_unroll in (None, 1)
