"""How right prices of fused regions are."""

import numpy as np
import pytest

from foretell_lab.fused import data as fused_data
from foretell_lab.validate import fused as validated


@pytest.mark.slow
def test_the_network_beats_the_formula_on_models_it_has_not_seen():
    data = fused_data.shipped("h200")
    kept = data.take(np.flatnonzero(data.held_out))
    found = {(f.what, f.by): f for f in validated.accuracy(kept)}
    what = "regions of models kept out"
    network, formula = (found[what, by] for by in ("network", "formula"))
    assert network.readings > 1900
    assert network.median < 0.05  # 3.8 %
    assert network.near > 0.9  # 90.5 %, the goal
    assert network.median < 0.8 * formula.median
    assert 0.75 <= network.covered <= 0.93
    blind = found[what, "network, own times unknown"]
    assert blind.median < formula.median
    kernel, plain = (found["kernels of models kept out", by] for by in ("network", "formula"))
    assert kernel.median < 0.9 * plain.median
    assert 0.75 <= kernel.covered <= 0.93


@pytest.mark.slow
def test_the_report_prints_every_group():
    text = validated.report(None)["text"]
    for word in (
        "llama",
        "swin",
        "rnn",
        "unet",
        "formula",
        "measured twice",
        "CPU",
        "kernels",
        "step",
    ):
        assert word in text
