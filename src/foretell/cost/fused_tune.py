"""Prices of fused ops corrected by a few hundred regions measured on the user's own device.

    tuning = fitted(regions, seconds, device)
    write(tuning, Path("bench/fused.toml"))
    fused_price(regions, device, tuning=tuning)

`foretell bench --fused` does the first two. What is fitted is ln(measured/priced) as a sum over the
kinds of cost a region has (starts, memory, arithmetic, long reductions, matmuls: each by its share
of the formula's time), held near zero, so that a few hundred readings are enough and what was not
met keeps its price. The environment variable FORETELL_FUSED names such a file for every price of a
process; it counts for the device it was measured on and no other.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from foretell import portable
from foretell.cluster.device import Device
from foretell.cost.fused_formula import shares
from foretell.cost.fused_regions import Regions
from foretell.errors import InputError
from foretell.io import read_toml, write_text

Array = npt.NDArray[np.float64]
VARIABLE = "FORETELL_FUSED"
KINDS = ("start", "memory", "compute", "lone", "product", "kernels")
_HELD = 4.0  # readings' worth of belief that a price is right already
_PARTS = 5  # of the readings, each judged by a fit to the others
_FAR = 0.3  # beyond this, in logarithms, a reading counts less
_EIGHTY = 1.2816  # standard deviations that hold 80 % of a normal distribution


@dataclass(frozen=True)
class Tuning:
    """Corrections of one device: a factor's logarithm by kind of cost, and the spread left."""

    device: str
    factors: Mapping[str, float]
    sigma: float
    readings: int


def fitted(regions: Regions, seconds: Array, priced: Array, device: Device) -> Tuning:
    """Corrections that bring prices near what was measured."""
    if len(seconds) < 2 * _PARTS:
        raise InputError(
            f"{len(seconds)} measured regions are too few to correct prices by",
            hint=f"measure {2 * _PARTS} or more",
        )
    shares, wanted = _shares(regions, device), portable.log(seconds / priced)
    found = _solved(shares, wanted)
    left = left_over(regions, seconds, priced, device)
    sigma = float(np.quantile(np.abs(left), 0.8) / _EIGHTY)
    factors = {name: round(float(f), 4) for name, f in zip(KINDS, found, strict=True)}
    return Tuning(device.name, factors, round(sigma, 4), len(wanted))


def left_over(regions: Regions, seconds: Array, priced: Array, device: Device) -> Array:
    """ln(measured/corrected) of each reading, corrected by a fit to others alone."""
    shares, wanted = _shares(regions, device), portable.log(seconds / priced)
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


def factor(regions: Regions, device: Device, tuning: Tuning) -> Array:
    """How many times as long as priced each region takes."""
    found: Array = portable.exp(
        portable.product(_shares(regions, device), np.array([tuning.factors[k] for k in KINDS]))
    )
    return found


def _shares(regions: Regions, device: Device) -> Array:
    parts, kernels = shares(device, regions)
    total = np.sum([parts[name] for name in KINDS[:-1]], axis=0)
    many = portable.log(np.maximum(kernels, 1.0))
    return np.stack([*(parts[name] / total for name in KINDS[:-1]), many], axis=1)


def write(tuning: Tuning, path: Path) -> None:
    """A tuning as a file."""
    lines = [
        f'device = "{tuning.device}"',
        f"sigma = {tuning.sigma}",
        f"readings = {tuning.readings}",
    ]
    lines += ["", "[factors]", *(f"{name} = {value}" for name, value in tuning.factors.items())]
    write_text(path, "\n".join(lines) + "\n")


@cache
def load(path: Path) -> Tuning:
    """The tuning in a file that `foretell bench --fused` wrote."""
    try:
        found = read_toml(path)
        factors = {name: float(found["factors"][name]) for name in KINDS}
        return Tuning(found["device"], factors, float(found["sigma"]), int(found["readings"]))
    except (KeyError, TypeError, ValueError) as why:  # TOML's own error is a ValueError
        raise InputError(
            f"cannot read corrections of fused ops from `{path}`: {why}",
            hint="`foretell bench --fused` writes such a file",
        ) from None


def named() -> Tuning | None:
    """The tuning that the environment names."""
    path = os.environ.get(VARIABLE)
    return load(Path(path)) if path else None
