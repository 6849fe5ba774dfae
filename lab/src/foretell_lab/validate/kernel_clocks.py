"""What a source's clock shows for a kernel that takes some time on the device.

CUDA events around one eager call start with the dispatch and cannot end before the host has
recorded the second event: the reading is max(floor, share · floor + kernel), where the floor is the
host's own time for the call (→ `floor`). Kernels below the floor are invisible: those readings say
what the host took, and are told apart by `sees`. Other sources add a fixed delay a call.
"""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

import numpy as np
import numpy.typing as npt

from foretell_lab.validate.kernel_truth import Measured

Array = npt.NDArray[np.float64]
Clocks = Mapping[str, float]

SEEN = 1.5  # a reading this many floors long is mostly kernel


@cache
def shipped() -> Clocks:
    """The fitted clocks, written by `benchmarks/fit_kernels.py`."""
    text = (files("foretell_lab.validate") / "tables/kernel_clocks.toml").read_text("utf-8")
    clocks: dict[str, float] = tomllib.loads(text)["clocks"]
    return clocks


def floor(clocks: Clocks, measured: Measured) -> float:
    """Seconds the host took for the call: the shortest readings, or what is usual where few."""
    if measured.source != "neusight":
        return 0.0
    usual = clocks[f"floor_{_kind(measured)}"]
    return min(measured.shortest, 2.5 * usual) if measured.shortest else usual


def reads(clocks: Clocks, measured: Measured, seconds: Array) -> Array:
    """What the clock shows for each reading."""
    if measured.source == "neusight":
        least = floor(clocks, measured)
        return np.maximum(least, clocks[f"share_{_kind(measured)}"] * least + seconds)
    if measured.source == "deepbench":
        return clocks["delay_deepbench"] + seconds
    if measured.source == "models":
        return clocks["delay_models"] * (1 + (measured.call == "backward")) + seconds
    return seconds


def sees(clocks: Clocks, measured: Measured) -> npt.NDArray[np.bool_]:
    """Which readings are of the kernel rather than of the host."""
    return measured.seconds > SEEN * floor(clocks, measured)


def burst(clocks: Clocks, measured: Measured) -> float:
    """Seconds a board exceeds its power in short benchmarks; none inside a model."""
    return clocks["burst"] if measured.source in ("neusight", "deepbench") else 0.0


def _kind(measured: Measured) -> str:
    return measured.call if measured.op in ("gemm", "conv") else measured.op
