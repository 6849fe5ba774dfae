"""The clock a board settles at when a whole step runs for ever within its power limit.

Short benchmarks run at the nominal clock. In training the board averages its power over the step:
with tₜ seconds of matrix kernels that use E joules of dynamic energy at the nominal clock, tₛ of
kernels bound by memory and tᵢ idle, the relative clock u ≤ 1 solves

    tₜ/u·(S − W) + E·u^(a−1) + tₛ·(P − W) + tᵢ·(S − W) = 0                              → `clock`

S static power, P power while streaming, W the limit, a the exponent. Matrix kernels then take 1/u
times as long; memory keeps its pace. S grows with the units of a chip and P with the bandwidth of
its memory, so that a board capped below its design power has less left for its matrix units.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.cluster.device import Device

Array = npt.NDArray[np.float64]
LOWEST = 0.3  # of the nominal clock: no board was seen below
STEPS = 40  # halvings of the interval: 1e-12 of the clock


@cache
def table() -> dict[str, dict[str, Any]]:
    """Power constants by device architecture."""
    text = files("foretell.cost").joinpath("tables", "power.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def joules(device: Device, dtype: str, kind: str = "") -> float:
    """Dynamic energy of one flop of the matrix units; 0 where the architecture has no row.

    `kind` is what else than a matmul runs on them: `attention`, `flash2`.
    """
    row: Mapping[str, Any] = table().get(device.arch, {})
    if dtype in ("fp32", "fp64"):
        return 0.0
    return float(row.get("joules", 0.0)) * float(row.get(kind or dtype, 1.0))


def clock(device: Device, matrix: Array, energy: Array, streaming: Array, idle: Array) -> Array:
    """Relative clock of each step, from seconds at the nominal clock and joules."""
    row = table().get(device.arch)
    if row is None or not device.watts:
        return np.ones_like(matrix)
    limit = device.watts
    static = row["static"] * device.units
    other = static + row["byte"] * device.memory_bandwidth
    fixed = streaming * (other - limit) + idle * (static - limit)
    power = row["exponent"] - 1

    def excess(u: Array) -> Array:
        out: Array = matrix / u * (static - limit) + energy * u**power + fixed
        return out

    low, high = np.full_like(matrix, LOWEST), np.ones_like(matrix)
    free = excess(high) <= 0
    for _ in range(STEPS):
        middle = (low + high) / 2
        hot = excess(middle) > 0
        low, high = np.where(hot, low, middle), np.where(hot, middle, high)
    return np.where(free, 1.0, low)
