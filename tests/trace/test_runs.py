"""What numpy also has, without what it loads for it: the same bits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from foretell.trace.runs import distinct, median, quantile
from tests.trace.kineto import Kineto, training_step

NUMBERS = st.lists(st.floats(-1e3, 1e3) | st.integers(-3, 3).map(float), min_size=2).map(np.array)


@given(NUMBERS)
def test_they_are_those_of_numpy(values: np.ndarray) -> None:
    np.testing.assert_array_equal(distinct(values), np.unique(values))
    assert median(values) == np.median(values)
    for share in (0.01, 0.3, 0.77):
        assert quantile(values, share) == np.quantile(values, share)


def test_a_median_of_what_is_no_number_is_none() -> None:
    assert np.isnan(median(np.array([1.0, np.nan, 2.0])))


READ = """
import sys
from foretell.simulate import simulate
from foretell.trace import read
simulate(read(sys.argv[1], memory=False).graph).critical_path()
print([m for m in ("numpy.ma", "numba", "tarfile", "foretell.memory.read") if m in sys.modules])
"""


def test_reading_a_trace_loads_nothing_that_it_does_not_need(tmp_path: Path) -> None:
    k = Kineto()
    for number in range(12):
        training_step(k, 1000.0 * number, number)
    path = k.write(tmp_path / "t.json")
    command = [sys.executable, "-c", READ, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
