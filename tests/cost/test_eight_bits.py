"""Which linear layers are faster in fp8, beside what was measured on an H200."""

import json
from pathlib import Path

import numpy as np
import pytest

from foretell.cluster.read import load
from foretell.cost.eight_bits import saved

H200 = load("h200:gpus=1").devices[0]
MEASURED = Path(__file__).parents[2] / "benchmarks/measured/fp8_layers_h200.json"
LAYERS = json.loads(MEASURED.read_text())["rows"]


@pytest.mark.parametrize("row", LAYERS, ids=lambda row: f"{row['rows']}x{row['in']}x{row['out']}")
def test_layers_gain_about_what_was_measured(row):
    gain = row["bf16"]["wall_s"] - row["fp8"]["wall_s"]
    predicted = float(saved(H200, row["rows"], row["in"], row["out"])[0])
    assert predicted < 0 or gain > 0  # none is chosen that is slower so
    if min(row["in"], row["out"]) * row["rows"] >= 16384 * 8192 / 2 and gain > 1e-3:
        assert predicted == pytest.approx(gain, rel=0.35)


def test_narrow_layers_and_odd_sizes_gain_nothing():
    found = saved(H200, np.array([64, 8192, 16384]), np.array([768, 256, 4096]), 8192 - 8)
    assert (found < 0).all()
    assert saved(H200, 64, 768, 768)[0] < 0
