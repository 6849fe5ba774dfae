"""The network that prices a fused region: what it sees of it, and its answer in numpy.

Sizes are logarithms of bytes against the second-level cache and of places against the lanes, times
are logarithms against the formula's, so that a network trained on one device can be used for
another. Among them are the blocks that Inductor (torch 2.11) cuts a kernel into, each a program on
one unit: a reduction's block has so many rows and so many places of each; what does not fit is a
turn of a loop, and sizes are rounded up to powers of two (`triton_heuristics`).

Each node starts from its op's vector and its features. In every layer it receives from what it
reads and from what reads it the mean and the largest of their messages, each with the edge's
features. What remains is pooled over the region's nodes, joined with features of the whole, and two
dense layers answer ln(measured/formula) and its spread. Several networks trained from different
starts answer together, by their mean. `foretell_lab.fused.network` is the same network on PyTorch
Geometric; a test holds both equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from foretell import portable
from foretell.cluster.node import Device
from foretell.compiled import H2, I1, compiled
from foretell.cost.fused_formula import (
    Constants,
    by_name,
    constants_of,
    from_walk,
    kind_of_device,
    sort_of,
    terms,
    walk_of,
    weights,
)
from foretell.cost.fused_regions import DTYPES, Regions, Walk
from foretell.cost.fusion_class import KIND_CODE, KINDS
from foretell.cost.learned import dense
from foretell.cost.limits import SIZES

Array = npt.NDArray[np.float64]
_POINTS = 1024.0  # places of a block without reductions
_ROW, _COLUMN = 1024, 64  # longest reductions held in one block: along rows, down columns
_HELD = 4096  # places of a block that holds its rows
_MANY, _MOST, _FEWER = 10, 2048.0, 1024.0  # loads that spare registers; places of a row in a block


class Blocks(NamedTuple):
    """Of each kernel: programs, turns of their loop, and places visited for each that counts."""

    programs: Array
    turns: Array
    padded: Array
    held: npt.NDArray[np.bool_]


def blocks(rows: Array, inner: Array, down: npt.NDArray[np.bool_], loads: Array) -> Blocks:
    """Of kernels with so many results of `inner` places each; `loads` counts what enters."""
    x, r = _power(rows), _power(inner)
    held = (inner > 1) & np.where(down, r <= _COLUMN, r <= _ROW)
    wide, long = np.where(down, _down(x, r, loads, held), _along(x, r, loads, held))
    wide = np.minimum(np.where(inner > 1, wide, _POINTS), x)
    long = np.minimum(np.where(inner > 1, long, 1.0), r)
    programs, turns = np.ceil(rows / wide), np.ceil(inner / long)
    padded = programs * wide * turns * long / np.maximum(rows * inner, 1.0)
    return Blocks(programs, turns, padded, held)


def _power(values: Array) -> Array:
    return portable.two_above(np.maximum(values, 1.0))


def _along(x: Array, r: Array, loads: Array, held: npt.NDArray[np.bool_]) -> Array:
    """Rows and places of a block that reduces along rows."""
    several = np.where(x // 8 < 128, 1.0, np.minimum(_ROW // r, 8.0))
    most = np.where((x >= 1024) & (loads >= _MANY), _FEWER, _MOST)
    wide = np.where(held, np.where(r >= 256, several, 8.0), np.where(r <= 2048, 2.0, 1.0))
    return np.stack([wide, np.where(held, r, np.minimum(r, most))])


def _down(x: Array, r: Array, loads: Array, held: npt.NDArray[np.bool_]) -> Array:
    """Columns and places of a block that reduces down columns."""
    few, some = x <= 1024, x // 4096 <= 8
    heavy = (loads >= 4) & (r > 128)
    many = np.clip(_power(x // 4096), 64.0, 256.0)
    wide = np.select([few, some, heavy], [np.clip(x // 128, 2.0, 8.0), 16.0, 32.0], many)
    rest = np.where(heavy, np.where(r >= 2048, 64.0, 32.0), 512.0 // many)
    long = np.select([few, some], [np.minimum(r, 64.0), 32.0], rest)
    kept = np.select([b * r <= _HELD for b in (128.0, 32.0, 8.0)], [128.0, 32.0, 8.0], 1.0)
    return np.stack([np.where(held, np.minimum(kept, x), wide), np.where(held, r, long)])


Whole = npt.NDArray[np.int64]
_SIZE = np.array([float(SIZES[d]) for d in DTYPES])
_LANES = 2048.0  # threads a unit holds
NODE_FEATURES, EDGE_FEATURES = 29, 5
_SHARES = ("start", "memory", "compute", "lone", "product")


class Features(NamedTuple):
    """Inputs of the network, and the formula's seconds that its answer scales."""

    op: npt.NDArray[np.int64]
    node: Array
    edge: Array
    whole: Array
    formula: Array


def features(device: Device, regions: Regions, constants: Constants | None = None) -> Features:
    """What the network sees, of all regions at once."""
    c = constants or constants_of(device, sort_of(device, regions))
    walk = walk_of(device, regions)
    formula = from_walk(device, walk.region, c)
    return Features(
        regions.op,
        nodes(device, regions, walk, formula),
        edges(regions),
        whole(device, regions, walk.region, formula, c),
        formula,
    )


def nodes(device: Device, regions: Regions, walk: Walk, formula: Array) -> Array:
    """One row a node."""
    size = _SIZE[regions.dtype]
    lanes = device.units * _LANES
    own = regions.seconds / formula[regions.region]
    rows = regions.looped / np.maximum(regions.inner, 1.0)
    kind, inner = KIND_CODE[regions.op], np.maximum(regions.inner, 1.0)
    stream = regions.elements * size / (device.memory_bandwidth * formula[regions.region])
    found = [
        _log(regions.elements * size / device.l2),
        _log(regions.looped / lanes),
        _log(regions.inner) / 2,
        _log(rows / lanes),
        _log(regions.last) / 2,
        _log(regions.writes / device.l2) * (regions.writes > 0),
        (regions.writes > 0).astype(float),
        np.where(np.isnan(own) | (own <= 0), 0.0, portable.log(np.maximum(own, 1e-4))),
        (~np.isnan(own) & (own > 0)).astype(float),
        portable.log(np.maximum(stream, 1e-5)) / 2,
        portable.log(weights(sort_of(device, regions))[regions.op]) / 2,
        walk.node[:, 0] / 2,
        walk.node[:, 1] / 2,
        walk.node[:, 2],
        _aligned(regions.last),
        _aligned(regions.inner),
        portable.log2(portable.two_above(inner) / inner),
        (regions.inner > 1024).astype(float),
        *((regions.across == a).astype(float) for a in (1, 2)),
        *((size == s).astype(float) for s in (1.0, 2.0, 8.0)),
        *((kind == KINDS.index(k)).astype(float) for k in ("input", "pointwise", "view", "norm")),
        (kind == KINDS.index("reduction")).astype(float),
        _aged(device, regions),
    ]
    return np.stack(found, axis=1)


def _aged(device: Device, regions: Regions) -> Array:
    """How much was touched since each entering tensor was, against the cache; 1 for never."""
    if regions.since is None:
        return np.zeros(len(regions.op))
    return np.minimum(regions.since / device.l2, 4.0) / 4


def edges(regions: Regions) -> Array:
    """One row an edge."""
    ratio = regions.elements[regions.source] / np.maximum(regions.looped[regions.target], 1.0)
    same = regions.dtype[regions.source] == regions.dtype[regions.target]
    found = [
        *((regions.pattern == p).astype(float) for p in range(3)),
        _log(ratio) / 4,
        same.astype(float),
    ]
    return np.stack(found, axis=1)


def whole(device: Device, regions: Regions, walk: Array, formula: Array, c: Constants) -> Array:
    """One row a region."""
    w = by_name(device, walk)
    parts = terms(device, walk, c)
    region, count = regions.region, len(regions)
    own = np.bincount(region, np.nan_to_num(regions.seconds), count)
    known = (
        np.bincount(region, np.isnan(regions.seconds) & (KIND_CODE[regions.op] != 0), count) == 0
    )
    kinds = [np.bincount(region, KIND_CODE[regions.op] == k, count) for k in range(len(KINDS))]
    lanes = device.units * _LANES
    found = [
        portable.log(formula / device.floor),
        *(portable.log(np.maximum(parts[name] / formula, 1e-3)) / 2 for name in _SHARES),
        *(
            portable.log1p(16 * w[name] / device.l2)
            for name in ("read", "fresh", "reread", "written", "turned")
        ),
        _log(w["places"] / lanes),
        portable.log1p(w["lone"]) / 4,
        w["kernels"] / 4,
        w["levels"] / 2,
        w["random"] / np.maximum(w["places"], 1.0),
        w["odd"] / np.maximum(w["places"], 1.0),
        w["halves"] / np.maximum(w["places"], 1.0) / 4,
        portable.log(np.maximum(w["work"] / np.maximum(w["places"], 1.0), 0.5)) / 2,
        np.where(known & (own > 0), portable.log(np.maximum(own / formula, 1e-3)), 0.0),
        (known & (own > 0)).astype(float),
        *(portable.log1p(k) for k in kinds),
        np.bincount(region, regions.writes > 0, count) / 4,
    ]
    if kind_of_device(device) == "cpu":
        found += [*_nests(w), *_longest(regions, _at_longest(regions), lanes), *_widest(regions)]
    elif regions.is_written.all():
        at = _at_longest(regions)
        found += [np.ones(count), *_longest(regions, at, lanes), *_widest(regions)]
        found += _cut(device, regions, at, w["places"])
    return np.stack(found, axis=1)


def _nests(w: dict[str, Array]) -> list[Array]:
    """What a CPU's loop nests have besides, against the places they visit."""
    places = np.maximum(w["places"], 1.0)
    names = ("columns", "chained", "asked", "told", "joined")
    shares = [portable.log1p(w[name] / places) for name in names]
    return [*shares, portable.log1p(16 * w["lone"] / places), portable.log1p(w["given"])]


def _longest(regions: Regions, at: Whole, lanes: float) -> list[Array]:
    """Of each region's longest reduction: its length, rows, padding, and whether it is turned."""
    inner, rows = regions.inner[at], regions.looped[at] / np.maximum(regions.inner[at], 1.0)
    padded = portable.two_above(np.maximum(inner, 1.0))
    return [
        _log(inner),
        _log(rows / lanes) * (inner > 1),
        portable.log2(padded / np.maximum(inner, 1.0)),
        (inner > 1024).astype(float),
        (regions.across[at] > 0).astype(float),
        portable.log2(np.clip(inner, 1.0, 1024.0)) / 10,
    ]


def _at_longest(regions: Regions) -> Whole:
    """The node of each region's longest reduction."""
    order = np.lexsort((regions.looped, regions.inner, regions.region))
    return np.asarray(order[regions.first[1:] - 1])  # the last of each region in that order


def _cut(device: Device, regions: Regions, at: Whole, places: Array) -> list[Array]:
    """How each kernel's longest reduction is cut into blocks."""
    inner, enters = regions.inner[at], KIND_CODE[regions.op] == KINDS.index("input")
    rows = np.where(inner > 1, regions.looped[at] / np.maximum(inner, 1.0), places)
    reduces = (regions.inner > 1) & ~enters
    loads = np.bincount(regions.region, enters | reduces, len(regions)).astype(float)
    made = blocks(rows, inner, regions.across[at] > 0, loads)
    waves = made.programs / device.units
    return [
        _log(waves),
        portable.log2(made.turns) / 4,
        portable.log2(np.maximum(made.padded, 1.0)),
        made.held.astype(float),
        np.where(waves > 1, np.ceil(waves) / np.maximum(waves, 1.0), 1.0),
        portable.log2(np.maximum(made.turns * loads, 1.0)) / 4,
    ]


def _widest(regions: Regions) -> list[Array]:
    """How many large tensors enter, and how wide loads fit the narrowest of them."""
    enters = KIND_CODE[regions.op] == KINDS.index("input")
    size = np.where(enters, regions.elements, 0.0)
    most = np.maximum.reduceat(size, regions.first[:-1])
    large = enters & (regions.elements * 4 >= most[regions.region])
    narrow = np.where(large, _aligned(regions.last), 1.0)
    count = np.bincount(regions.region, large, len(regions))
    return [
        np.minimum.reduceat(narrow, regions.first[:-1]),
        count / 4,
        _log(np.minimum.reduceat(np.where(large, regions.last, 2.0**30), regions.first[:-1])),
    ]


def _aligned(extent: Array) -> Array:
    """How wide a load fits a row: 0 for odd ones, 1 for multiples of 32."""
    whole = np.maximum(extent, 1.0).astype(np.int64)
    return np.asarray(portable.log2(np.minimum(whole & -whole, 32)) / 5, float)


def _log(values: Array) -> Array:
    return np.asarray(portable.log2(np.maximum(values, 2.0**-20)) / 4, float)


Floats = npt.NDArray[np.float32]
Weights = Mapping[str, Floats]


def answer(weights: Weights, regions: Regions, given: Features) -> tuple[Floats, Floats]:
    """Mean and spread of ln(measured/formula) for each region, by one network."""
    node = _scaled(weights, "node", given.node)
    edge = given.edge.astype(np.float32)
    h = _relu(_dense(weights, "enter", np.concatenate([weights["op"][given.op], node], axis=1)))
    for layer in range(_layers(weights)):
        h = h + _relu(_heard(weights, f"{layer}", h, edge, regions))
    pooled = _pooled(h, regions.first)
    whole = _scaled(weights, "whole", given.whole)
    x = np.concatenate([pooled, whole], axis=1)
    x = _relu(_dense(weights, "first", x))
    x = _relu(_dense(weights, "second", x))
    out = _dense(weights, "out", x)
    return out[:, 0], portable.exp(np.clip(out[:, 1], -5.0, 1.0)).astype(np.float32)


def _heard(weights: Weights, layer: str, h: Floats, edge: Floats, regions: Regions) -> Floats:
    """What each node makes of itself and its neighbours on both sides."""
    edges = dense(edge, weights[f"edge{layer}.weight"])
    parts = [h]
    for way, near, far in (
        ("down", regions.source, regions.target),
        ("up", regions.target, regions.source),
    ):
        sent = dense(h, weights[f"{way}{layer}.weight"])
        mean, most = np.zeros((2, len(h), sent.shape[1]), np.float32)
        _gather(sent, edges, near, far, mean, most)
        parts += [mean, most]
    return _dense(weights, f"join{layer}", np.concatenate(parts, axis=1))


@compiled
def _gather(sent: H2, edges: H2, near: I1, far: I1, mean: H2, most: H2) -> None:
    """Mean and largest of the messages to each node, from the near to the far end of each edge."""
    count = np.zeros(len(mean), np.float32)
    for e in range(len(near)):
        count[far[e]] += 1
        for k in range(sent.shape[1]):
            message = max(sent[near[e], k] + edges[e, k], np.float32(0))
            mean[far[e], k] += message
            most[far[e], k] = max(most[far[e], k], message)
    for n in range(len(mean)):
        if count[n] > 0:
            for k in range(sent.shape[1]):
                mean[n, k] /= count[n]


def _pooled(h: Floats, first: Whole) -> Floats:
    """Sum (in tens), mean and largest over each region's nodes."""
    total = np.add.reduceat(h, first[:-1], axis=0)
    many = np.diff(first)[:, None].astype(np.float32)
    return np.concatenate(
        [total / 10, total / many, np.maximum.reduceat(h, first[:-1], axis=0)], axis=1
    )


def _scaled(weights: Weights, name: str, values: npt.NDArray[np.float64]) -> Floats:
    mean = weights[f"{name}.mean"]  # features newer than the network come last: not used
    given = (values[:, : len(mean)].astype(np.float32) - mean) / weights[f"{name}.std"]
    return np.asarray(np.clip(given, -6.0, 6.0), np.float32)


def _dense(weights: Weights, name: str, x: Floats) -> Floats:
    return dense(x, weights[f"{name}.weight"], weights[f"{name}.bias"])


def _relu(x: Floats) -> Floats:
    return np.maximum(x, 0)


def _layers(weights: Weights) -> int:
    return sum(name.startswith("join") and name.endswith("weight") for name in weights)
