"""Collective prices against measured collectives: the bars, on every system that was measured."""

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from foretell_lab.validate.collective_runs import read
from foretell_lab.validate.collective_systems import machine_of
from foretell_lab.validate.collectives import Accuracy, accuracy, lines, main, summary

TRUTH = Path(__file__).resolve().parents[3].parent / "shared" / "truth"
pytestmark = [
    pytest.mark.truth,
    pytest.mark.skipif(not (TRUTH / "comm").is_dir(), reason=f"no measured data in {TRUTH}"),
]
# NCCL took the slower of ring and tree there at most sizes: see docs/concepts/collectives.md.
BADLY_CHOSEN = ("vidur", "a100_dgx", "all_reduce", 2, 2, "≥1 MiB")


@pytest.fixture(scope="module")
def found() -> list[Accuracy]:
    return accuracy(TRUTH)


def pooled(found: list[Accuracy], op: str, size: str) -> dict[str, float]:
    pools = defaultdict(list)
    for a in found:
        if a.op == op and a.size == size:
            pools[f"{a.source} {a.system}"].append(np.abs(a.errors))
    return {name: float(np.median(np.concatenate(parts))) for name, parts in pools.items()}


def test_every_row_is_scored(found):
    """All 50 462 rows but the 11 that end an epoch, which are no collective."""
    assert sum(a.rows for a in found) == 50_451
    assert not read(TRUTH / "comm")[1]


def test_large_all_reduce_on_every_system(found):
    errors = pooled(found, "all_reduce", "≥1 MiB")
    assert len(errors) == 11
    assert {name: e for name, e in errors.items() if e > 0.12} == {}


def test_small_all_reduce_on_every_system(found):
    errors = pooled(found, "all_reduce", "<1 MiB")
    assert len(errors) == 9
    assert {name: e for name, e in errors.items() if e > 0.25} == {}


def test_large_all_reduce_in_every_group(found):
    large = [a for a in found if a.op == "all_reduce" and a.size == "≥1 MiB"]
    assert [a.key for a in large if a.error > 0.12] == [BADLY_CHOSEN]


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_to_all"])
def test_other_collectives(found, op):
    for size, bar in (("<1 MiB", 0.25), ("≥1 MiB", 0.20)):
        assert {name: e for name, e in pooled(found, op, size).items() if e > bar} == {}


def test_groups_the_fit_did_not_see(found):
    """Fits without a group size, a range of sizes or the system itself keep most in bounds."""
    large = [a for a in found if a.op == "all_reduce" and a.size == "≥1 MiB" and a.held_out]
    for fold, share in (("ranks", 0.75), ("sizes", 0.85), ("system", 0.55)):
        good = [a.held_out[fold] <= 0.12 for a in large]
        assert np.mean(good) >= share, fold


def test_stated_intervals_hold(found):
    rows = np.array([a.rows for a in found])
    covered = np.array([a.covered for a in found])
    assert np.average(covered, weights=rows) >= 0.8
    assert np.mean(covered >= 0.6) > 0.85  # and not by a few large groups alone


def test_the_command_prints_every_group(found, capsys):
    main([str(TRUTH)])
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) == len(found) + len(list(summary(found))) + 2
    assert next(iter(lines(found))) in printed


def test_machines_are_recognised_by_name_and_words():
    assert machine_of("RTX 2080 Ti", "PCIe Gen3 x16, P2P disabled (SHM)").kind == "memory"
    assert machine_of("L40S", "PCIe Gen4 x16").levels(4, 1)[0].bandwidth == 24e9
    assert machine_of("H200", "NVSwitch; InfiniBand NDR").levels(8, 2)[1].bandwidth == 384e9
    assert [level.sizes for level in machine_of("a100_pairwise").levels(4, 1)] == [(2, 2), (2,)]
