"""The bars: layouts and memory against runs of others."""

from pathlib import Path

import numpy as np
import pytest

from foretell_lab.validate.layouts import SOURCES, predicted
from foretell_lab.validate.oracle import _memory, ranking, spearman, summary
from foretell_lab.validate.peaks import left_out

TRUTH = Path(__file__).resolve().parents[3].parent / "shared" / "truth"
pytestmark = [
    pytest.mark.truth,
    pytest.mark.skipif(not TRUTH.is_dir(), reason="no measured data beside the project"),
]


def rows(name, every=1):
    return predicted(list(SOURCES[name](TRUTH))[::every])


def errors(name):
    return summary(np.array([r.error for r in rows(name)]))


def test_some_rows_of_each():
    for name, every, median in (("vtrain", 48, 0.10), ("mosaic", 14, 0.10), ("megatron", 5, 0.10)):
        e = summary(np.array([r.error for r in rows(name, every)]))
        assert e["rows"] >= 5
        assert e["median"] <= median


@pytest.mark.slow
def test_vtrain():
    found = rows("vtrain")
    e = summary(np.array([r.error for r in found]))
    assert e["rows"] == 1440
    assert e["median"] <= 0.05
    assert e["p90"] <= 0.18
    order = ranking(found)
    assert order["spearman_least"] >= 0.97
    assert order["best_found"] >= 0.85


@pytest.mark.slow
def test_megatron():
    e = errors("megatron")
    assert e["rows"] == 22
    assert e["mean"] <= 0.06
    assert e["worst"] <= 0.15


@pytest.mark.slow
def test_mosaic():
    e = errors("mosaic")
    assert e["rows"] == 139
    assert e["median"] <= 0.06


def test_memory():
    found, left = _memory(TRUTH)
    e = summary(np.array([error for _, error in found]))
    assert e["rows"] >= 409
    assert left <= 20
    assert sum(left_out(TRUTH).values()) == left  # each for a reason
    assert e["median"] <= 0.03
    assert e["p90"] <= 0.12


def test_ranks_are_compared_with_ties():
    assert spearman(np.array([1.0, 2, 3]), np.array([10.0, 20, 30])) == pytest.approx(1)
    assert spearman(np.array([1.0, 2, 2, 3]), np.array([4.0, 3, 3, 1])) == pytest.approx(-1)
