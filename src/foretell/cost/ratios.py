"""How much longer or shorter an operator takes in another number format or memory layout.

Read off the shipped tables of what was measured (→ `foretell.pytorch.bench`): every row that was
measured both ways gives one ratio, and a shape in between is told by the rows nearest to it, in
the logarithms of its sizes:

    ratio = exp( Σ wᵢ ln rᵢ ),   wᵢ ∝ 1 / (NEAR² + distanceᵢ²)   over the `NEIGHBOURS` nearest

A ratio carries over between devices of one generation far better than a time does: what the format
does to the bytes and to the arithmetic is the same, and what the kernel wastes mostly cancels.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import numpy as np

from foretell.graph.columns import Array

NEIGHBOURS = 6
NEAR = 0.12  # rows nearer than this (in ln of a size) count alike
SHIPPED = "h200"  # the device whose table knows every format
Sizes = Mapping[str, Array]


@dataclass(frozen=True)
class Way:
    """A number format and a memory layout, as the table calls them."""

    dtype: str
    layout: str = ""  # empty: whichever the row has


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of one op and direction that were measured both ways."""

    op: str
    keys: tuple[str, ...]
    places: Array  # (rows, features)
    ratio: Array  # logarithms
    seconds: Array  # the first way, logarithms

    def near(self, sizes: Sizes) -> tuple[Array, Array, Array]:
        """ln ratio, its spread, and ln seconds the first way, at each asked shape."""
        asked = places(self.op, self.keys, sizes)
        distance = np.sqrt(((asked[:, None, :] - self.places[None]) ** 2).sum(axis=-1))
        order = np.argsort(distance, axis=1, kind="stable")[:, :NEIGHBOURS]
        weight = 1 / (NEAR**2 + np.take_along_axis(distance, order, 1) ** 2)
        weight /= weight.sum(axis=1, keepdims=True)
        found = self.ratio[order]
        mean = (weight * found).sum(axis=1)
        spread = np.sqrt((weight * (found - mean[:, None]) ** 2).sum(axis=1))
        nearest = np.take_along_axis(distance, order, 1)[:, 0]
        seconds = (weight * self.seconds[order]).sum(axis=1)
        return mean, np.hypot(spread, 0.03 + 0.05 * nearest), seconds


class Ratio(NamedTuple):
    """How many times as long shapes take another way."""

    factor: Array
    sigma: Array  # spread of its logarithm
    seconds: Array  # the first way, roughly: to weigh parts of one operator


def ratios(op: str, direction: str, sizes: Sizes, source: Way, target: Way) -> Ratio | None:
    """What the second way makes of each shape; None where no row was measured both ways."""
    rows = _rows(op, direction, source, target)
    if rows is None:
        return None
    mean, spread, seconds = rows.near(sizes)
    return Ratio(np.exp(mean), spread, np.exp(seconds))


@cache
def _rows(op: str, direction: str, source: Way, target: Way) -> Rows | None:
    before, after = (_measured(op, direction, way) for way in (source, target))
    both = [key for key in before if key in after]
    if not both:
        return None
    shapes = [dict(_pairs(shape)) for shape, _ in both]
    keys = tuple(sorted({k for shape in shapes for k in shape}))
    sizes = {k: np.array([shape.get(k, 1.0) for shape in shapes]) for k in keys}
    ratio = np.log([after[key] / before[key] for key in both])
    seconds = np.log([before[key] for key in both])
    return Rows(op, keys, places(op, keys, sizes), ratio, seconds)


def places(op: str, keys: Sequence[str], sizes: Sizes) -> Array:
    """Where shapes lie among each other: logarithms of what decides how fast a kernel is."""
    features = FEATURES.get(op, _plain)(sizes, keys)
    return np.stack(np.broadcast_arrays(*features), axis=-1)


def _plain(sizes: Sizes, keys: Sequence[str]) -> list[Array]:
    return [_log(sizes.get(k, np.ones(1))) for k in keys]


def _product(sizes: Sizes, keys: Sequence[str]) -> list[Array]:
    """A product's sizes, and on how many numbers its rows are aligned: 16 bytes or fewer."""
    m, n, k = (np.asarray(sizes[key], float) for key in ("m", "n", "k"))
    batch = np.asarray(sizes.get("b", np.ones(1)), float)
    aligned = [1.5 * _aligned(size) for size in (m, n, k)]
    return [_log(batch), _log(m), _log(n), _log(k), *aligned]


def _aligned(size: Array) -> Array:
    """ln of the largest of 1, 2, 4, 8 that divides a size."""
    whole = np.maximum(np.rint(size).astype(np.int64), 1)
    found: Array = np.log(np.minimum(whole & -whole, 8).astype(float))
    return found


def _convolution(sizes: Sizes, keys: Sequence[str]) -> list[Array]:
    """Pixels, channels a group, taps and stride; a group of one channel is another kernel."""
    one = np.ones(1)
    n, c, k, groups = (np.asarray(sizes.get(key, one), float) for key in ("n", "c", "k", "groups"))
    side = np.asarray(sizes["h"], float) * np.asarray(sizes["w"], float) * sizes.get("t", one)
    stride = np.asarray(sizes.get("stride", one), float)
    lone = 3.0 * ((groups > 1) & (c <= groups))
    taps = np.asarray(sizes["r"], float) * np.asarray(sizes["s"], float)
    wide = 0.5 * (_aligned(c / groups) + _aligned(k / groups))
    return [
        _log(n * side / stride**2), 0.4 * _log(side), _log(c / groups), _log(k / groups),
        0.5 * _log(groups), lone, 1.5 * _log(taps), _log(stride), wide,
    ]  # fmt: skip


def _channels(sizes: Sizes, keys: Sequence[str]) -> list[Array]:
    """Statistics over a channel: how many channels, and how long each is."""
    n, c, h, w = (np.asarray(sizes.get(key, np.ones(1)), float) for key in ("n", "c", "h", "w"))
    return [_log(c), _log(n * h * w), 0.5 * _log(h * w)]


FEATURES = {
    "linear": _product,
    "bmm": _product,
    "conv2d": _convolution,
    "conv3d": _convolution,
    "convt2d": _convolution,
    "batch_norm": _channels,
}


def _measured(op: str, direction: str, way: Way) -> dict[tuple[str, str], float]:
    """Seconds by shape, and by layout where the way leaves it open."""
    found = {}
    for name, where, dtype, layout, shape, seconds in _table(SHIPPED):
        if (name, where, dtype) == (op, direction, way.dtype) and way.layout in ("", layout):
            found[shape, "" if way.layout else layout] = seconds
    return found


@cache
def _table(device: str) -> Sequence[tuple[str, str, str, str, str, float]]:
    path = files("foretell.cost").joinpath("tables", "measured", f"{device}.csv.gz")
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    return [
        (r["op"], r["direction"], r["dtype"], r["layout"], r["shape"], float(r["device_seconds"]))
        for r in csv.DictReader(lines)
        if r["device_seconds"]
    ]


def _pairs(shape: str) -> list[tuple[str, float]]:
    pairs = (part.partition("=") for part in shape.split(";"))
    return [(key, float(value)) for key, _, value in pairs]


def _log(values: Array) -> Array:
    found: Array = np.log(np.maximum(np.asarray(values, float), 1e-3))
    return found
