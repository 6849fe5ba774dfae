"""What the network sees of a region: nodes, edges and the whole, as ratios to the device's rates.

Sizes are logarithms of bytes against the second-level cache and of places against the lanes,
times are logarithms against the formula's, so that what was learned on one device can be asked of
another.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from foretell import portable
from foretell.cluster.device import Device
from foretell.cost.fused_blocks import blocks
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
from foretell.cost.fused_regions import DTYPES, Regions
from foretell.cost.fused_walk import Walk
from foretell.cost.fusion_class import KIND_CODE, KINDS
from foretell.cost.limits import SIZES

Array = npt.NDArray[np.float64]
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
