"""How much longer or shorter an operator takes in another number format or memory layout.

Read off the shipped tables of what was measured (→ `foretell_lab.bench`): every row that was
measured both ways gives one ratio, and a shape in between is given by the rows nearest to it, in
the logarithms of its sizes:

    ratio = exp( Σ wᵢ ln rᵢ ),   wᵢ ∝ 1 / (NEAR² + distanceᵢ²)²   over the `NEIGHBOURS` nearest

A ratio carries over between devices of one generation far better than a time does: what the format
does to the bytes and to the arithmetic is the same, and what the kernel wastes mostly cancels. On
the measured device itself the time of the second way is as good a witness (`times`), and a better
one where the first way has kernels that are fast or slow for reasons of their own.
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

from foretell import portable
from foretell.graph.graph import Array

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
        """ln ratio, its spread, and ln seconds the first way, at each requested shape."""
        order, weight, nearest = _nearest(places(self.op, self.keys, sizes), self.places)
        mean, spread = _mean(self.ratio[order], weight, nearest)
        return mean, spread, (weight * self.seconds[order]).sum(axis=1)


def _nearest(wanted: Array, known: Array) -> tuple[Array, Array, Array]:
    """The rows nearest to each requested point, their weights, and the distance of the first."""
    distance = np.sqrt(((wanted[:, None, :] - known[None]) ** 2).sum(axis=-1))
    order = np.argsort(distance, axis=1, kind="stable")[:, :NEIGHBOURS]
    ranked = np.take_along_axis(distance, order, 1)
    weight = 1 / (NEAR**2 + ranked**2) ** 2
    return order, weight / weight.sum(axis=1, keepdims=True), ranked[:, 0]


def _mean(found: Array, weight: Array, nearest: Array) -> tuple[Array, Array]:
    """The weighted mean of logarithms, and how far it may be off."""
    mean = (weight * found).sum(axis=1)
    spread = np.sqrt((weight * (found - mean[:, None]) ** 2).sum(axis=1))
    return mean, portable.hypot(spread, 0.03 + 0.05 * nearest)


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
    return Ratio(portable.exp(mean), spread, portable.exp(seconds))


class Times(NamedTuple):
    """How long shapes take one way on the measured device."""

    seconds: Array
    sigma: Array  # spread of its logarithm


def times(op: str, direction: str, sizes: Sizes, way: Way) -> Times | None:
    """The time of each shape one way: work by its rate at the rows nearest to it."""
    known = _timed(op, direction, way)
    if known is None or op not in WORK:
        return None
    order, weight, nearest = _nearest(places(op, known.keys, sizes), known.places)
    mean, spread = _mean(known.seconds[order] - known.work[order], weight, nearest)
    return Times(portable.exp(mean + portable.log(WORK[op](sizes))), spread)


@dataclass(frozen=True, eq=False)
class _Timed:
    """Rows of one op and direction one way: places, and logarithms of time and work."""

    keys: tuple[str, ...]
    places: Array
    seconds: Array
    work: Array


@cache
def _timed(op: str, direction: str, way: Way) -> _Timed | None:
    found = _measured(op, direction, way)
    if not found or op not in WORK:
        return None
    keys, sizes = _sizes([shape for shape, _ in found])
    seconds = portable.log(list(found.values()))
    return _Timed(keys, places(op, keys, sizes), seconds, portable.log(WORK[op](sizes)))


UNSAID = {"dropout": 0.0, "mask": 0.0}  # what a row without these sizes has; one of all others


def _sizes(shapes: Sequence[str]) -> tuple[tuple[str, ...], dict[str, Array]]:
    """Every size that some shape names, of all of them; what is usual where it is not named."""
    parsed = [dict(_pairs(shape)) for shape in shapes]
    keys = tuple(sorted({k for shape in parsed for k in shape}))
    return keys, {k: np.array([shape.get(k, UNSAID.get(k, 1.0)) for shape in parsed]) for k in keys}


@cache
def _rows(op: str, direction: str, source: Way, target: Way) -> Rows | None:
    before, after = (_measured(op, direction, way) for way in (source, target))
    both = [key for key in before if key in after]
    if not both:
        return None
    keys, sizes = _sizes([shape for shape, _ in both])
    ratio = portable.log([after[key] / before[key] for key in both])
    seconds = portable.log([before[key] for key in both])
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
    found: Array = portable.log(np.minimum(whole & -whole, 8).astype(float))
    return found


def _convolution(sizes: Sizes, keys: Sequence[str]) -> list[Array]:
    """Pixels, channels a group, taps and stride; a group of one channel is another kernel.

    A single tap is a matmul with pixels along its rows, so that it matters how they are aligned.
    """
    one = np.ones(1)
    n, c, k, groups = (np.asarray(sizes.get(key, one), float) for key in ("n", "c", "k", "groups"))
    side, taps = _side(sizes), _taps(sizes)
    stride = np.asarray(sizes.get("stride", one), float)
    lone = 3.0 * ((groups > 1) & (c <= groups))
    wide = 0.5 * (_aligned(c / groups) + _aligned(k / groups))
    return [
        _log(n * side / stride**2), 0.4 * _log(side), _log(c / groups), _log(k / groups),
        0.5 * _log(groups), lone, 1.5 * _log(taps), _log(stride), wide,
        1.5 * _aligned(side) * ((taps == 1) & (stride == 1)),
    ]  # fmt: skip


def _recurrent(sizes: Sizes, keys: Sequence[str]) -> list[Array]:
    """A step of time is a matmul: samples, numbers and their alignment; then how many of them."""
    b, n, s, layers = (np.asarray(sizes[key], float) for key in ("b", "n", "s", "layers"))
    return [_log(b), _log(n), 1.5 * _aligned(n), 0.3 * _log(s), 0.3 * _log(layers)]


def _attention(sizes: Sizes, keys: Sequence[str]) -> list[Array]:
    """Heads of all samples, words and numbers of a head; a mask is another kernel's."""
    causal, dropout, mask = (_flag(sizes, key) for key in ("causal", "dropout", "mask"))
    words = 0.5 * (_log(sizes["s"]) + _log(sizes.get("sk", sizes["s"])))
    heads = 0.5 * _log(np.asarray(sizes["b"], float) * sizes["h"])
    return [heads, words, _log(sizes["d"]), causal, dropout, 2.0 * mask]


def _flag(sizes: Sizes, key: str) -> Array:
    return np.asarray(sizes.get(key, np.zeros(1)), float)


def _side(sizes: Sizes) -> Array:
    """Pixels of an image, of whichever of its three sides it has."""
    one = np.ones(1)
    t, h, w = (np.asarray(sizes.get(key, one), float) for key in ("t", "h", "w"))
    found: Array = t * h * w
    return found


def _taps(sizes: Sizes) -> Array:
    """Numbers of one filter and channel; one over volumes is r deep, s high and s wide."""
    one = np.ones(1)
    r, s = (np.asarray(sizes.get(key, one), float) for key in ("r", "s"))
    found: Array = r * s * (s if "t" in sizes else one)
    return found


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
    "lstm": _recurrent,
    "gru": _recurrent,
    "attention": _attention,
}


# Seconds that work takes at round figures of the device: what rates of neighbours are relative to.
FLOPS, BYTES, START = 4e14, 3.5e12, 2e-6
TILE = 128  # words that a block of attention takes
BLOCKS = 264  # that it runs at a time: two on each of its processors


def _product_work(sizes: Sizes) -> Array:
    one = np.ones(1)
    m, n, k, b = (np.asarray(sizes.get(key, one), float) for key in ("m", "n", "k", "b"))
    moved = 2 * b * (m * k + k * n + m * n)
    return np.asarray(2 * b * m * n * k / FLOPS + moved / BYTES + START)


def _convolution_work(sizes: Sizes) -> Array:
    one = np.ones(1)
    n, c, k, groups = (np.asarray(sizes.get(key, one), float) for key in ("n", "c", "k", "groups"))
    side, taps = _side(sizes), _taps(sizes)
    out = n * side / np.asarray(sizes.get("stride", one), float) ** 2
    moved = 2 * (n * side * c + out * k)
    return np.asarray(2 * out * k * c / groups * taps / FLOPS + moved / BYTES + START)


def _channel_work(sizes: Sizes) -> Array:
    """A channel is a block's: with few of them most of the device has nothing to do."""
    n, c, h, w = (np.asarray(sizes.get(key, np.ones(1)), float) for key in ("n", "c", "h", "w"))
    return np.asarray(6 * n * np.maximum(c, BLOCKS) * h * w / BYTES + START)


def _attention_work(sizes: Sizes) -> Array:
    """A block takes a tile of `s` along all of `sk`; a causal one skips half, but for its tiles."""
    b, h, s, d = (np.asarray(sizes[key], float) for key in ("b", "h", "s", "d"))
    sk = np.asarray(sizes.get("sk", s), float)
    skipped = _flag(sizes, "causal") * 0.5 * (1 - np.minimum(TILE / s, 1))
    idle = np.maximum(BLOCKS / 2 / (b * h * np.ceil(s / TILE)), 1)
    seconds = 4 * s * sk * (1 - skipped) * idle / FLOPS + 4 * (s + sk) / BYTES
    return np.asarray(b * h * d * seconds + 2 * START)


def _recurrent_work(sizes: Sizes) -> Array:
    """Step by step: two kernels, and the weights of each of four gates read once."""
    b, n, s, layers = (np.asarray(sizes[key], float) for key in ("b", "n", "s", "layers"))
    each = 4 * n**2 * (2 / BYTES + 4 * b / FLOPS) + 2 * START
    return np.asarray(s * layers * each)


WORK = {
    "attention": _attention_work,
    "lstm": _recurrent_work,
    "gru": _recurrent_work,
    "linear": _product_work,
    "bmm": _product_work,
    "conv2d": _convolution_work,
    "conv3d": _convolution_work,
    "batch_norm": _channel_work,
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
    """Rows of the sweep, and those read off traced steps (`benchmarks/trace_rows.py`)."""
    tables = files("foretell.cost").joinpath("tables")
    paths = (
        tables.joinpath("measured", f"{device}.csv.gz"),
        tables.joinpath(f"traced_{device}.csv.gz"),
    )
    texts = (gzip.decompress(path.read_bytes()).decode() for path in paths)
    return [
        (r["op"], r["direction"], r["dtype"], r["layout"], r["shape"], float(r["device_seconds"]))
        for text in texts
        for r in csv.DictReader(text.splitlines())
        if r["device_seconds"]
    ]


def _pairs(shape: str) -> list[tuple[str, float]]:
    pairs = (part.partition("=") for part in shape.split(";"))
    return [(key, float(value)) for key, _, value in pairs]


def _log(values: Array) -> Array:
    found: Array = portable.log(np.maximum(np.asarray(values, float), 1e-3))
    return found
