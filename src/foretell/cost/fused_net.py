"""The network of `foretell.cost.fused` in numpy, from exported weights.

Each node starts from its op's vector and its features. In every layer it hears from what it reads
and from what reads it: the mean and the largest of their messages, each with the edge's features.
What remains is pooled over the region's nodes, joined with what is known of the whole, and two
dense layers tell ln(measured/formula) and its spread. Several networks trained from different
starts answer together, by their mean.

`foretell_lab.fused.network` is the same network on PyTorch Geometric; a test holds both equal.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from foretell import portable
from foretell.compiled import H2, I1, compiled
from foretell.cost.fused_features import Features
from foretell.cost.fused_regions import Regions
from foretell.cost.products import dense

Floats = npt.NDArray[np.float32]
Whole = npt.NDArray[np.int64]
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
    told = dense(edge, weights[f"edge{layer}.weight"])
    parts = [h]
    for way, near, far in (
        ("down", regions.source, regions.target),
        ("up", regions.target, regions.source),
    ):
        sent = dense(h, weights[f"{way}{layer}.weight"])
        mean, most = np.zeros((2, len(h), sent.shape[1]), np.float32)
        _gather(sent, told, near, far, mean, most)
        parts += [mean, most]
    return _dense(weights, f"join{layer}", np.concatenate(parts, axis=1))


@compiled
def _gather(sent: H2, told: H2, near: I1, far: I1, mean: H2, most: H2) -> None:
    """Mean and largest of the messages to each node, from the near to the far end of each edge."""
    count = np.zeros(len(mean), np.float32)
    for e in range(len(near)):
        count[far[e]] += 1
        for k in range(sent.shape[1]):
            message = max(sent[near[e], k] + told[e, k], np.float32(0))
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
    mean = weights[f"{name}.mean"]  # features younger than the network come last: not asked
    given = (values[:, : len(mean)].astype(np.float32) - mean) / weights[f"{name}.std"]
    return np.asarray(np.clip(given, -6.0, 6.0), np.float32)


def _dense(weights: Weights, name: str, x: Floats) -> Floats:
    return dense(x, weights[f"{name}.weight"], weights[f"{name}.bias"])


def _relu(x: Floats) -> Floats:
    return np.maximum(x, 0)


def _layers(weights: Weights) -> int:
    return sum(name.startswith("join") and name.endswith("weight") for name in weights)
