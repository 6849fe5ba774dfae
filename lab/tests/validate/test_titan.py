"""Runs in four dims and two formats on up to 512 devices, foretold from one run on eight."""

import numpy as np
import pytest

from foretell_lab.validate import titan


def test_one_run_tells_of_the_boards_and_of_nothing_else():
    known = titan.fitted()
    assert 1.05 < known.compute < 1.6  # 500 W and slower memory than the preset's
    for name in ("host", "talk", "alpha", "beta", "inside"):
        assert getattr(known, name) == pytest.approx(1.0, abs=0.01)


@pytest.mark.slow
def test_the_others_are_foretold():
    found = list(titan.foretold())
    wrong = np.abs([told / real - 1 for _, real, told in found])
    assert len(wrong) == 13
    assert np.median(wrong) < 0.10
    assert wrong.max() < 0.20
