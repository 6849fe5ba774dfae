"""What a fused op costs: thousands of regions at once, corrected by regions measured on the
device.

    price = fused_price(regions, device)
    price.seconds, price.sigma

Tried in this order: networks trained on measured regions (→ `foretell.cost.fused_network`), whose
mean corrects the formula, and the formula alone (→ `foretell.cost.fused_formula`) where no network
ships for the kind of device or the caller wants none. `sigma` is the spread of ln(real/priced):
exp(±1.2816 · sigma) holds 80 %. On a device the network was not trained on, what it sees are ratios
to that device's rates and sigma is the formula's own on devices it was not fitted to, if larger.
Where regions were measured on the device itself, prices are
corrected by them.

A region is columns, see `foretell.cost.fused_regions`; which ops may share one is given by
`foretell.cost.fusion_class`.

`foretell bench --fused` writes corrections of one device into a file: ln(measured/priced) as a sum
over the kinds of cost a region has (starts, memory, arithmetic, long reductions, matmuls: each by
its share of the formula's time). The environment variable FORETELL_FUSED names such a file for
every price of a process; it counts for the device it was measured on and no other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell import portable
from foretell.cluster.node import Device
from foretell.cost import fused_formula
from foretell.cost.fused_formula import shares
from foretell.cost.fused_lower import Lowered
from foretell.cost.fused_network import Features, Weights, answer, features
from foretell.cost.fused_regions import Regions, distinct
from foretell.cost.fusion_class import KIND_CODE, KINDS, WORDS
from foretell.cost.kernel import Price
from foretell.errors import InputError
from foretell.io import read_toml

Array = npt.NDArray[np.float64]
VARIABLE = "FORETELL_FUSED"
TUNED_KINDS = ("start", "memory", "compute", "lone", "product", "kernels")


# The device each sort of network was trained on.
_TRAINED = {"gpu": "h200", "kernel": "h200", "cpu": "epyc-core"}
_CHUNK = 1024  # regions answered at once, to keep what is held small
# How much wider the spread is on a device without measured fused regions: what the kernel formula
# shows between devices it was fitted to and others (`tables/kernel.toml`, sigma, elementwise).
_ELSEWHERE = 0.12
_FILES = {"gpu": "fused_net.npz", "kernel": "fused_net_kernel.npz", "cpu": "fused_net_cpu.npz"}


@dataclass(frozen=True)
class Tuning:
    """Corrections of one device: a factor's logarithm by kind of cost, and the spread left."""

    device: str
    factors: Mapping[str, float]
    sigma: float
    readings: int


def factor(regions: Regions, device: Device, tuning: Tuning) -> Array:
    """How many times as long as priced each region takes."""
    found: Array = portable.exp(
        portable.product(
            cost_shares(regions, device), np.array([tuning.factors[k] for k in TUNED_KINDS])
        )
    )
    return found


def cost_shares(regions: Regions, device: Device) -> Array:
    """The share of each kind of cost in a region's formula, and its kernels as a logarithm."""
    parts, kernels = shares(device, regions)
    total = np.sum([parts[name] for name in TUNED_KINDS[:-1]], axis=0)
    many = portable.log(np.maximum(kernels, 1.0))
    return np.stack([*(parts[name] / total for name in TUNED_KINDS[:-1]), many], axis=1)


@cache
def load(path: Path) -> Tuning:
    """The tuning in a file that `foretell bench --fused` wrote."""
    try:
        found = read_toml(path)
        factors = {name: float(found["factors"][name]) for name in TUNED_KINDS}
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


@cache
def networks(sort: str = "gpu") -> tuple[tuple[Weights, ...], Array]:
    """The shipped networks of a sort, and the factors their spreads take: own times known, not."""
    path = files("foretell.cost").joinpath("tables", _FILES.get(sort, "none"))
    if not path.is_file():
        return (), np.ones(2)
    with np.load(BytesIO(path.read_bytes())) as arrays:
        members = sorted({n.partition("/")[0] for n in arrays.files} - {"scale", "words"})
        found = tuple(_member(arrays, member) for member in members)
        return found, arrays["scale"].astype(float)


def _member(arrays: Mapping[str, npt.NDArray[Any]], member: str) -> Weights:
    mine = [name for name in arrays if name.startswith(f"{member}/")]
    found = {name.partition("/")[2]: arrays[name].astype(np.float32) for name in mine}
    order = {str(word): row for row, word in enumerate(arrays["words"])}
    return found | {"op": found["op"][[order.get(w, order["other"]) for w in WORDS]]}


def fused_price(
    regions: Regions, device: Device, *, learned: bool = True, tuning: Tuning | None = None
) -> Price:
    """Seconds and spread of each region on a device; `tuning` counts for its own device alone."""
    tuning = tuning or named()
    if tuning is not None and tuning.device != device.name:
        tuning = None
    seconds, sigma = np.zeros(len(regions)), np.zeros(len(regions))
    for rows in _batches(regions.is_written):
        part = regions.take(rows)
        found = _tuned(part, device, _price(part, device, learned), tuning)
        seconds[rows], sigma[rows] = found
    return Price(seconds, sigma)


def _batches(written: npt.NDArray[np.bool_]) -> Iterator[npt.NDArray[np.int64]]:
    """Rows to ask together: not too many, and regions apart from kernels as written."""
    for sort in (False, True):
        rows = np.flatnonzero(written == sort)
        yield from (rows[at : at + _CHUNK] for at in range(0, len(rows), _CHUNK))


def _tuned(regions: Regions, device: Device, price: Price, tuning: Tuning | None) -> Price:
    if tuning is None:
        return price
    seconds = price.seconds * factor(regions, device, tuning)
    return Price(seconds, np.full(len(regions), tuning.sigma))


def _price(regions: Regions, device: Device, learned: bool) -> Price:
    made = fused_formula.kernels_of(device, regions)
    if made is not None and learned and networks("gpu")[0]:
        rows, which = distinct(made.regions)  # many regions share kernels: each is priced once
        each = _price(made.regions.take(rows), device, learned)
        found = Price(each.seconds[which], each.sigma[which])
        return _summed(made, found, device, len(regions))
    sort = fused_formula.sort_of(device, regions)
    members, scale = networks(sort)
    if not learned or not members:
        seconds = fused_formula.seconds(device, regions)
        return Price(seconds, np.full(len(regions), _formula_sigma(device, sort)))
    priced = _by_network(regions, features(device, regions), members, scale)
    if device.name == _TRAINED[sort]:
        return priced
    return Price(priced.seconds, portable.hypot(priced.sigma, _ELSEWHERE))


def _summed(made: Lowered, price: Price, device: Device, count: int) -> Price:
    """Prices of regions from those of their kernels; a library's kernel costs its own time."""
    parts = fused_formula.terms(
        device,
        fused_formula.walk_of(device, made.regions).region,
        fused_formula.constants_of(device, "gpu"),
    )
    ready = made.library & (parts["product"] > 0)
    each = np.where(ready, parts["product"], np.where(made.known > 0, made.known, price.seconds))
    seconds = np.asarray(np.bincount(made.of, each, count), float)
    square = np.bincount(made.of, (each * price.sigma) ** 2, count)
    return Price(seconds, np.sqrt(square) / np.maximum(seconds, 1e-12))


def _by_network(
    regions: Regions, given: Features, members: tuple[Weights, ...], scale: Array
) -> Price:
    """The formula, corrected by the mean of the networks."""
    answers = [answer(weights, regions, given) for weights in members]
    middle = np.mean([m for m, _ in answers], axis=0)
    inside = np.mean([s for _, s in answers], axis=0)
    sigma = inside * scale[np.where(_knows_own(regions), 0, 1)]
    return Price(given.formula * portable.exp(middle.astype(float)), sigma.astype(float))


def _knows_own(regions: Regions) -> npt.NDArray[np.bool_]:
    """Regions whose every op has a time of its own."""
    op = KIND_CODE[regions.op] != KINDS.index("input")
    missing = np.bincount(regions.region, op & np.isnan(regions.seconds), len(regions))
    return np.asarray(missing == 0)


def _formula_sigma(device: Device, sort: str) -> float:
    found = fused_formula.shipped()[sort]["sigma"]
    fitted = device.name == found["fitted_on"]
    return float(found["seen"] if fitted else portable.hypot(found["seen"], _ELSEWHERE))
