"""A correction to the formula for kernels on devices that were measured densely.

Boosted trees predict ln(measured/formula) from the shape, how it falls on tiles and units, and what
the formula answers. They are trained by `benchmarks/fit_kernels.py` and answer in plain numpy from
`tables/kernel_learned.npz`. They pass (nan) on a device, op or format they were not trained on, and
on shapes outside the box of shapes they saw there, so that the formula answers instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from io import BytesIO

import numpy as np
import numpy.typing as npt

from foretell import portable
from foretell.cluster.node import Device
from foretell.compiled import H2, compiled
from foretell.cost import kernel
from foretell.cost.kernel import Price, Shapes
from foretell.cost.shape import columns

Floats = npt.NDArray[np.float32]


Array = npt.NDArray[np.float64]
# The sizes of a shape; a box of their logarithms bounds what a device was measured on.
SIZES = {"gemm": ("b", "m", "n", "k"), "conv": ("n", "c", "h", "w", "k", "r", "s", "stride", "pad")}
_FLAGS = {
    "gemm": ("ta", "tb"),
    "conv": ("groups",),
    "conv_dgrad": ("groups",),
    "conv_wgrad": ("groups",),
}
_ONE = {"b", "groups", "stride"}  # what a shape may leave out, being 1
_TILES = (32.0, 64.0, 128.0)


def dense(x: Floats, weight: Floats, bias: Floats | None = None) -> Floats:
    """What a layer makes of [..., in]: weights are [out, in]."""
    rows = np.ascontiguousarray(x, np.float32).reshape(-1, x.shape[-1])
    out = np.zeros((len(rows), len(weight)), np.float32)
    _add(rows, np.ascontiguousarray(weight.T, np.float32), out)
    if bias is not None:
        out += bias
    return out.reshape(*x.shape[:-1], len(weight))


@compiled
def _add(x: H2, weight: H2, out: H2) -> None:
    """out += x · weight, the inner dimension first to last."""
    for i in range(x.shape[0]):
        for k in range(x.shape[1]):
            one = x[i, k]
            if one != 0:
                for j in range(out.shape[1]):
                    out[i, j] += one * weight[k, j]


SIZES |= {"conv_dgrad": SIZES["conv"], "conv_wgrad": SIZES["conv"]}


@dataclass(frozen=True)
class Trees:
    """Complete binary trees of one depth: node i has children 2i+1 (at most) and 2i+2 (above)."""

    feature: npt.NDArray[np.int16]  # trees × inner nodes
    above: npt.NDArray[np.float32]  # trees × inner nodes
    leaf: npt.NDArray[np.float32]  # trees × leaves
    low: Array  # box: the least of each size
    high: Array
    sigma: float  # spread of ln(measured/priced) on ranges left out of training

    def predict(self, rows: Array) -> Array:
        """The sum of all trees for each row of features."""
        inner = self.feature.shape[1]
        total, every = np.zeros(len(rows)), np.arange(len(rows))
        for feature, above, leaf in zip(self.feature, self.above, self.leaf, strict=True):
            node = np.zeros(len(rows), np.intp)
            while node[0] < inner:
                node = 2 * node + 1 + (rows[every, feature[node]] > above[node])
            total += leaf[node - inner]
        return total


@cache
def shipped() -> Mapping[str, Trees]:
    """Trees by `device op dtype`; empty where none beat the formula."""
    path = files("foretell.cost").joinpath("tables", "kernel_learned.npz")
    if not path.is_file():
        return {}
    with np.load(BytesIO(path.read_bytes())) as arrays:
        keys = sorted({name.rpartition("/")[0] for name in arrays.files})
        return {key: _trees(arrays, key) for key in keys}


def _trees(arrays: Mapping[str, npt.NDArray[np.float32]], key: str) -> Trees:
    low, high = arrays[f"{key}/box"].astype(float)
    return Trees(
        feature=arrays[f"{key}/feature"].astype(np.int16),
        above=arrays[f"{key}/above"],
        leaf=arrays[f"{key}/leaf"],
        low=low,
        high=high,
        sigma=float(arrays[f"{key}/sigma"]),
    )


def seconds(
    device: Device,
    op: str | Sequence[str],
    dtype: str | Sequence[str],
    shape: Shapes,
    *,
    trees: Mapping[str, Trees] | None = None,
) -> Price:
    """Time of each kernel that lies where the trees were trained; nan elsewhere."""
    known = shipped() if trees is None else trees
    length = kernel.length_of(op, dtype, shape)
    asked = columns(shape or {}, length)
    out, sigma = np.full(length, np.nan), np.full(length, np.nan)
    for (name, kind), rows in kernel.groups_of(op, dtype, length):
        mine = known.get(f"{device.name} {name} {kind}")
        if mine is None or not set(SIZES[name]) - _ONE - {"pad"} <= set(asked):
            continue
        part = {k: v[rows] for k, v in asked.items()}
        inside = rows[_inside(mine, name, part)]
        if len(inside):
            part = {k: v[inside] for k, v in asked.items()}
            formula = kernel.seconds(device, name, kind, part).seconds
            out[inside] = formula * portable.exp(
                mine.predict(features(device, name, part, formula))
            )
            sigma[inside] = mine.sigma
    return Price(out, sigma)


def _inside(trees: Trees, op: str, shape: Mapping[str, Array]) -> npt.NDArray[np.bool_]:
    sizes = logs(op, shape)
    inside: npt.NDArray[np.bool_] = np.all(
        (sizes >= trees.low - 1e-6) & (sizes <= trees.high + 1e-6), axis=1
    )
    return inside


def logs(op: str, shape: Mapping[str, Array]) -> Array:
    """log2 of one plus each size of a shape: a padding may be 0."""
    length = len(next(iter(shape.values())))
    return portable.log2(1 + np.stack([_column(shape, key, length) for key in SIZES[op]], axis=1))


def _column(shape: Mapping[str, Array], key: str, length: int) -> Array:
    usual = 1.0 if key in _ONE else 0.0
    if key not in shape:
        return np.full(length, usual)
    values = np.asarray(shape[key], float)
    missing = values != values
    return np.where(missing, usual, values)


def features(device: Device, op: str, shape: Mapping[str, Array], formula: Array) -> Array:
    """What the trees look at: sizes, remainders on tiles, waves over units, the formula."""
    length = len(formula)
    get = {key: _column(shape, key, length) for key in (*SIZES[op], *_FLAGS[op])}
    if op == "gemm":
        rows, cols, deep, many = get["m"], get["n"], get["k"], get["b"]
    else:
        out = np.floor((get["h"] + 2 * get["pad"] - get["r"]) / get["stride"]) + 1
        rows, cols, many = get["n"] * out * out, get["k"], get["groups"]
        deep = get["c"] / get["groups"] * get["r"] * get["s"]
    work = 2 * many * rows * cols * deep
    found = [*logs(op, shape).T, *(get[k] for k in _FLAGS[op])]
    found += [portable.log2(formula), portable.log2(work / formula), portable.log2(rows / cols)]
    for tile in _TILES:
        found += [np.mod(rows, tile) / tile, np.mod(cols, tile) / tile]
    for tile in _TILES[1:]:
        blocks = many * np.ceil(rows / tile) * np.ceil(cols / tile) / device.units
        found += [portable.log2(blocks), blocks - np.floor(blocks)]
    found += [np.mod(deep, 8.0), np.mod(cols, 8.0)]
    if op != "gemm":
        found += [np.mod(get["h"], 4.0), np.mod(get["h"], 8.0)]
    return np.stack(found, axis=1)
