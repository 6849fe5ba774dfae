"""Corrections of fused prices fitted to regions measured on one device (→ `foretell.cost.fused`).

What is fitted is ln(measured/priced) as a sum over the kinds of cost a region has, held near zero,
so that a few hundred readings are enough and what was not met keeps its price.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from foretell import portable
from foretell.cluster.node import Device
from foretell.cluster.read import devices
from foretell.cost.fused import TUNED_KINDS, Tuning, cost_shares
from foretell.cost.fused_regions import Regions
from foretell.errors import InputError
from foretell.io import write_text

Array = npt.NDArray[np.float64]
_HELD = 4.0  # readings' worth of belief that a price is right already
_PARTS = 5  # of the readings, each judged by a fit to the others
_FAR = 0.3  # beyond this, in logarithms, a reading counts less
_EIGHTY = 1.2816  # standard deviations that hold 80 % of a normal distribution


def one_core() -> Device:
    """The processor core of the CPU set: a share of its socket, as one thread sees it."""
    # A core of this generation streams some 20 GB/s alone, and starts a loop nest in microseconds.
    socket = devices()["epyc-7742"]
    core = replace(socket, name="epyc-core", units=1, memory_bandwidth=2e10)
    return replace(core, l2=32 * 2.0**20, floor=5e-6)


def fitted(regions: Regions, seconds: Array, priced: Array, device: Device) -> Tuning:
    """Corrections that bring prices near what was measured."""
    if len(seconds) < 2 * _PARTS:
        raise InputError(
            f"{len(seconds)} measured regions are too few to correct prices by",
            hint=f"measure {2 * _PARTS} or more",
        )
    shares, wanted = cost_shares(regions, device), portable.log(seconds / priced)
    found = _solved(shares, wanted)
    left = left_over(regions, seconds, priced, device)
    sigma = float(np.quantile(np.abs(left), 0.8) / _EIGHTY)
    factors = {name: round(float(f), 4) for name, f in zip(TUNED_KINDS, found, strict=True)}
    return Tuning(device.name, factors, round(sigma, 4), len(wanted))


def left_over(regions: Regions, seconds: Array, priced: Array, device: Device) -> Array:
    """ln(measured/corrected) of each reading, corrected by a fit to others alone."""
    shares, wanted = cost_shares(regions, device), portable.log(seconds / priced)
    part, left = np.arange(len(wanted)) % _PARTS, np.zeros(len(wanted))
    for k in range(_PARTS):
        mine = part == k
        left[mine] = wanted[mine] - shares[mine] @ _solved(shares[~mine], wanted[~mine])
    return left


def _solved(shares: Array, wanted: Array) -> Array:
    """Least squares held near zero; readings far off count less."""
    trust = np.ones(len(wanted))
    found: Array = np.zeros(shares.shape[1])
    for _ in range(4):
        left = shares.T * trust
        held = left @ shares + _HELD * np.eye(shares.shape[1])
        found = np.asarray(np.linalg.solve(held, left @ wanted), float)
        trust = np.minimum(1.0, _FAR / np.maximum(np.abs(wanted - shares @ found), 1e-9))
    return found


def write(tuning: Tuning, path: Path) -> None:
    """A tuning as a file."""
    lines = [
        f'device = "{tuning.device}"',
        f"sigma = {tuning.sigma}",
        f"readings = {tuning.readings}",
    ]
    lines += ["", "[factors]", *(f"{name} = {value}" for name, value in tuning.factors.items())]
    write_text(path, "\n".join(lines) + "\n")
