"""Captured steps against steps that were run: time and memory, with bounds."""

from pathlib import Path

import numpy as np
import pytest

from foretell_lab.validate import capture

TRUTH = Path(__file__).resolve().parents[3].parent / "shared" / "truth"
pytestmark = [
    pytest.mark.truth,
    pytest.mark.slow,
    pytest.mark.skipif(not (TRUTH / "h200").is_dir(), reason="no measured data beside the project"),
]


@pytest.fixture(scope="module")
def rows():
    return capture.report(TRUTH)["rows"]


def test_steps_bound_by_their_device(rows):
    base = [abs(r["error"]) for r in rows if r["variant"] == "base"]
    assert len(base) == 6
    assert np.mean(base) < 0.08
    assert max(base) < 0.15


def test_memory(rows):
    """VGG-16 is told apart: cuDNN took gigabytes of workspace there, which nobody knows before."""
    others = [abs(r["peak_error"]) for r in rows if r["model"] != "vgg16"]
    assert np.median(others) < 0.05
    assert max(others) < 0.12


def test_a_step_is_never_predicted_far_too_long(rows):
    assert max(r["error"] for r in rows) < 0.15
