"""ParaDL's logs and measured epochs, and single-device steps of built-in workloads."""

from pathlib import Path

import numpy as np
import pytest

from foretell_lab.validate import chainer, workloads
from foretell_lab.validate.paradl import outputs

TRUTH = Path(__file__).resolve().parents[3].parent / "shared" / "truth"
needs_truth = pytest.mark.skipif(not TRUTH.is_dir(), reason="no measured data beside the project")


@pytest.mark.truth
@needs_truth
def test_every_output_of_the_oracle_within_a_hundredth():
    found = outputs(TRUTH)
    assert len(found) == 253
    assert max(abs(x.compute) for x in found) < 0.01
    comm = np.array([x.communication for x in found])
    assert np.isnan(comm).sum() == 42  # the two strategies whose code slips
    assert np.nanmax(np.abs(comm)) < 0.01
    assert np.nanmax([abs(x.memory) for x in found]) < 0.01


def test_measured_epochs_of_split_layers():
    """One scale of each way to split layers; `test_measured_epochs` has them all."""
    for strategy in ("filter", "channel", "data+spatial"):
        ranks, measured = next(iter(chainer.EPOCHS["resnet50"][strategy].items()))
        plan = chainer.plan_of(strategy, "resnet50", ranks)
        steps = chainer.SAMPLES / plan.global_batch
        answer = steps * chainer.step(strategy, "resnet50", ranks)
        assert answer == pytest.approx(measured, rel=0.4), strategy


@pytest.mark.slow
def test_measured_epochs():
    values = chainer.report()["values"]
    assert values["rows"] >= 0.90
    assert values["data"] >= 0.95
    assert values["filter"] >= 0.75
    assert values["channel"] >= 0.75
    assert values["ranked"] == 1


@pytest.mark.truth
@needs_truth
@pytest.mark.parametrize(
    ("source", "median"),
    [
        ("nvidia", 0.13),
        pytest.param("scaling", 0.10, marks=pytest.mark.slow),
        pytest.param("lambda", 0.09, marks=pytest.mark.slow),
    ],
)
def test_boards_of_others(source, median):
    found = list(workloads.SOURCES[source](TRUTH))
    assert len(found) > 30
    assert workloads.summary(found)["median"] <= median
