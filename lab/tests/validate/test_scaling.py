"""Data parallelism against published throughputs: bounds on what is predicted."""

from pathlib import Path

import numpy as np
import pytest

from foretell.errors import InputError
from foretell.simulate import simulate
from foretell_lab.validate.scaling import report
from foretell_lab.validate.scaling_tables import even_step

TRUTH = Path(__file__).resolve().parents[3].parent / "shared" / "truth"


@pytest.fixture(scope="module")
def scored():
    if not (TRUTH / "tables").is_dir():
        pytest.skip(f"no measured data at {TRUTH}")
    return report(TRUTH)


def test_an_even_step_is_as_long_as_predicted():
    step = even_step(0.3, 1e6)
    assert simulate(step).seconds == pytest.approx(0.3)
    assert step.buffers.bytes.sum() == pytest.approx(1e6)


@pytest.mark.truth
def test_of_a_traced_model(scored):
    errors = np.array([r["error"] for r in scored["rows"] if "framework" in r])
    assert len(errors) == 11
    assert np.median(np.abs(errors)) < 0.015
    assert np.abs(errors).max() < 0.04


@pytest.mark.truth
def test_of_rows_nothing_was_fitted_to(scored):
    errors = np.array([r["error"] for r in scored["rows"] if r.get("group") == "mxnet"])
    assert len(errors) == 12
    assert np.median(np.abs(errors)) < 0.03
    assert np.abs(errors).max() < 0.08


def test_no_rows(tmp_path):
    with pytest.raises(InputError):
        report(tmp_path)
