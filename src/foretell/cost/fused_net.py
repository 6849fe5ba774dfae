"""The network of `foretell.cost.fused` in plain numpy, from exported weights.

Each node starts from its op's vector and its features. In every layer it hears from what it reads
and from what reads it: the mean and the largest of their messages, each with the edge's features.
What remains is pooled over the region's nodes, joined with what is known of the whole, and two
dense layers tell ln(measured/formula) and its spread. Several networks trained from different
starts answer together, by their mean.

`foretell.pytorch.fused.network` is the same network on PyTorch Geometric; a test holds both equal.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from foretell.cost.fused_features import Features
from foretell.cost.fused_regions import Regions

Floats = npt.NDArray[np.float32]
Whole = npt.NDArray[np.int64]
Weights = Mapping[str, Floats]


def answer(weights: Weights, regions: Regions, given: Features) -> tuple[Floats, Floats]:
    """Mean and spread of ln(measured/formula) for each region, by one network."""
    node = _scaled(weights, "node", given.node)
    edge = given.edge.astype(np.float32)
    h = _relu(_dense(weights, "enter", np.concatenate([weights["op"][given.op], node], axis=1)))
    back = np.argsort(regions.source, kind="stable")
    for layer in range(_layers(weights)):
        h = h + _relu(_heard(weights, f"{layer}", h, edge, regions, back))
    pooled = _pooled(h, regions.first)
    whole = _scaled(weights, "whole", given.whole)
    x = np.concatenate([pooled, whole], axis=1)
    x = _relu(_dense(weights, "first", x))
    x = _relu(_dense(weights, "second", x))
    out = _dense(weights, "out", x)
    return out[:, 0], np.exp(np.clip(out[:, 1], -5.0, 1.0))


def _heard(
    weights: Weights, layer: str, h: Floats, edge: Floats, regions: Regions, back: Whole
) -> Floats:
    """What each node makes of itself and its neighbours on both sides."""
    count = len(h)
    e = edge @ weights[f"edge{layer}.weight"].T
    down = _relu((h @ weights[f"down{layer}.weight"].T)[regions.source] + e)
    up = _relu((h @ weights[f"up{layer}.weight"].T)[regions.target] + e)[back]
    parts = [
        h,
        *_gathered(down, regions.target, count),
        *_gathered(up, regions.source[back], count),
    ]
    return _dense(weights, f"join{layer}", np.concatenate(parts, axis=1))


def _gathered(messages: Floats, to: Whole, count: int) -> tuple[Floats, Floats]:
    """Mean and largest of the messages to each node; `to` is sorted."""
    width = messages.shape[1]
    mean, most = np.zeros((count, width), np.float32), np.zeros((count, width), np.float32)
    if len(to):
        start = np.flatnonzero(np.diff(to, prepend=-1))
        many = np.diff(start, append=len(to))[:, None].astype(np.float32)
        mean[to[start]] = np.add.reduceat(messages, start, axis=0) / many
        most[to[start]] = np.maximum.reduceat(messages, start, axis=0)
    return mean, most


def _pooled(h: Floats, first: Whole) -> Floats:
    """Sum (in tens), mean and largest over each region's nodes."""
    total = np.add.reduceat(h, first[:-1], axis=0)
    many = np.diff(first)[:, None].astype(np.float32)
    return np.concatenate(
        [total / 10, total / many, np.maximum.reduceat(h, first[:-1], axis=0)], axis=1
    )


def _scaled(weights: Weights, name: str, values: npt.NDArray[np.float64]) -> Floats:
    given = (values.astype(np.float32) - weights[f"{name}.mean"]) / weights[f"{name}.std"]
    return np.asarray(np.clip(given, -6.0, 6.0), np.float32)


def _dense(weights: Weights, name: str, x: Floats) -> Floats:
    made: Floats = x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]
    return made


def _relu(x: Floats) -> Floats:
    return np.maximum(x, 0)


def _layers(weights: Weights) -> int:
    return sum(name.startswith("join") and name.endswith("weight") for name in weights)
