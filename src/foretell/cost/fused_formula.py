"""How long a fused region takes, from what its kernels move and compute: the network's fallback.

    seconds = start · (1 + more · (kernels − 1))
            + (memoryᵖ + computeᵖ + loneᵖ)^(1/p) + product

    memory    latency, and what memory must move over its bandwidth joined (a norm of power `join`)
              with what the second-level cache must: fresh tensors, small results and what is read
              again may stay there
    compute   elementary operations over the vector lanes' rate, more in bf16 and in odd rows
    lone      the longest reduction that too few units share
    product   a matmul's own time where known, else its roofline

Constants (`tables/fused.toml`) are fitted per kind of device to measured regions; they are shares
of the device's own rates, so another device needs its preset and nothing else. On a CPU the terms
have the same names and another meaning, see `foretell.cost.fused_host`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell import portable
from foretell.cluster.node import Device
from foretell.cost import fused_host
from foretell.cost.fused_host import NESTED, nested
from foretell.cost.fused_lower import Lowered, lowered
from foretell.cost.fused_regions import WALKED, WEIGHT, Regions, Walk, walked
from foretell.cost.fusion_class import WORDS

Array = npt.NDArray[np.float64]
Constants = Mapping[str, float]


@cache
def shipped() -> dict[str, dict[str, Any]]:
    """Constants and spreads by sort: `gpu`, `kernel` (as the compiler wrote it) and `cpu`."""
    text = files("foretell.cost").joinpath("tables", "fused.toml").read_text("utf-8")
    return tomllib.loads(text) | {"cpu": fused_host.shipped()}


@cache
def weights(sort: str) -> Array:
    """Elementary operations of one place by op: fitted where measured often, else guessed."""
    fitted, guesses = (
        shipped()[sort]["weights"],
        fused_host.HOST_WEIGHT if sort == "cpu" else WEIGHT,
    )
    return np.array([fitted.get(word, guess) for word, guess in zip(WORDS, guesses, strict=True)])


def kind_of_device(device: Device) -> str:
    """Whether a device is a `gpu` or a `cpu`."""
    return "cpu" if device.vendor == "cpu" or device.arch == "x86" else "gpu"


def sort_of(device: Device, regions: Regions) -> str:
    """Which constants regions take: those of their device, or of kernels written for it."""
    kind = kind_of_device(device)
    as_written = len(regions) and regions.is_written.all() and not regions.lowered
    return "kernel" if kind == "gpu" and as_written else kind


def kernels_of(device: Device, regions: Regions) -> Lowered | None:
    """The kernels a GPU's compiler would make of regions; none where they are kernels already."""
    if kind_of_device(device) == "cpu" or regions.is_written.all():
        return None
    return lowered(regions, float(device.units))


def constants_of(device: Device, sort: str = "") -> Constants:
    """The fitted constants for a device."""
    found: Constants = shipped()[sort or kind_of_device(device)]["constants"]
    return found


def walk_of(device: Device, regions: Regions) -> Walk:
    """What the kernels of each region, or on a CPU its loop nests, move and compute."""
    sort = sort_of(device, regions)
    if sort == "cpu":
        return nested(regions, weights(sort))
    return walked(regions, float(device.units), weights(sort))


def by_name(device: Device, walk: Array) -> dict[str, Array]:
    """What a walk found, by name."""
    names = NESTED if kind_of_device(device) == "cpu" else WALKED
    return dict(zip(names, walk.T, strict=True))


def seconds(device: Device, regions: Regions, constants: Constants | None = None) -> Array:
    """Time of each region; regions and hand-written kernels are priced apart."""
    found = constants or constants_of(device, sort_of(device, regions))
    made = kernels_of(device, regions)
    if made is None:
        return from_walk(device, walk_of(device, regions).region, found)
    parts = terms(device, walk_of(device, made.regions).region, found)
    ready = made.library & (parts["product"] > 0)
    each = np.where(ready, parts["product"], _together(parts, found))
    return _by_region(made, each, len(regions))


def from_walk(device: Device, walk: Array, c: Constants) -> Array:
    """Time from what a walk found."""
    parts = terms(device, walk, c)
    if kind_of_device(device) == "cpu":
        return np.asarray(fused_host.total(parts, c), float)
    return _together(parts, c)


def _together(parts: Mapping[str, Array], c: Constants) -> Array:
    p = c["overlap"]
    terms = sum(portable.power(parts[name], p) for name in ("memory", "compute", "lone"))
    busy = portable.power(terms, 1 / p)
    out: Array = parts["start"] + busy + parts["product"]
    return out


def shares(device: Device, regions: Regions) -> tuple[dict[str, Array], Array]:
    """The terms of each region's formula, over all its kernels, and how many it has."""
    c = constants_of(device, sort_of(device, regions))
    made = kernels_of(device, regions)
    walk = walk_of(device, regions if made is None else made.regions).region
    parts = terms(device, walk, c)
    if made is None:
        return parts, by_name(device, walk)["kernels"]
    ready = made.library & (parts["product"] > 0)
    counted = {n: np.where(ready & (n != "product"), 0.0, parts[n]) for n in parts}
    found = {n: _by_region(made, counted[n], len(regions)) for n in parts}
    return found, _by_region(made, np.ones(len(made.of)), len(regions))


def _by_region(made: Lowered, each: Array, count: int) -> Array:
    return np.asarray(np.bincount(made.of, each, count), float)


def terms(device: Device, walk: Array, c: Constants) -> dict[str, Array]:
    """The terms of the formula, in seconds."""
    w = by_name(device, walk)
    if kind_of_device(device) == "cpu":
        return fused_host.terms(device, w, c)
    cycles = device.units * device.clock
    kernels = np.maximum(w["kernels"], 1.0)
    start = device.floor * c["start"] * (1 + c["more"] * (kernels - 1))
    work = w["work"] + c["half"] * w["halves"] + c["odd"] * w["odd"]
    return {
        "start": np.where(w["kernels"] > 0, start, 0.0),
        "memory": _memory(device, w, c),
        "compute": np.maximum(work / (cycles * c["rate"]), 1e-12),
        "lone": np.maximum(w["lone"] * c["lone"] / device.clock, 1e-12),
        "product": _product(device, w, c),
    }


def _memory(device: Device, w: Mapping[str, Array], c: Constants) -> Array:
    stream = device.memory_bandwidth * c["stream"]
    fresh = w["fresh"] * _missed(w["fresh"] + 0.5 * w["written"], c["keep"] * device.l2, c)
    left = c["keep_written"] * device.l2
    written = w["written"] * _missed(w["written"] + 0.5 * w["fresh"], left, c)
    again = w["reread"] * _missed(w["read"] + w["written"], c["again"] * device.l2, c)
    cold = (w["read"] - w["fresh"]) + fresh + written + again + c["turned"] * w["turned"]
    moved = w["read"] + w["written"] + w["reread"]
    both = portable.power(cold / stream, c["join"])
    both = both + portable.power(moved / (stream * c["cache"]), c["join"])
    ramp = 1 - portable.exp(-moved / (c["ramp"] * device.l2))
    out: Array = device.floor * c["latency"] * ramp + portable.power(both, 1 / c["join"]) + 1e-12
    return out


def _missed(size: Array, kept: float, c: Constants) -> Array:
    """The share of so many bytes that the cache does not hold."""
    return np.asarray(1 - 1 / (1 + portable.power(size / kept, c["steep"])))


def _product(device: Device, w: Mapping[str, Array], c: Constants) -> Array:
    """A product's own time, or its roofline where it is unknown."""
    dtype = "bf16" if "bf16" in device.flops else "fp32"
    roofline = w["product"] / (device.peak(dtype) * c["peak"]) + w["operand"] / (
        device.memory_bandwidth * c["stream"]
    )
    guessed = np.where(w["product"] > 0, roofline + device.floor, 0.0)
    return np.where(w["own"] > 0, w["own"], guessed)
