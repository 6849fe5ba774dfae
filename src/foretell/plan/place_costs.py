"""What a freely placed stage costs and holds, and what its messages take.

Layers are priced for the very ranks of a stage: as many ways split as it has ranks, over the links
between them, at the pace of the slowest of their devices. Backward is told apart: the gradient of
the input (with what is run again) and that of the weights, whose matmuls can wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from foretell.cluster import Cluster
from foretell.cost import collective, kernel
from foretell.plan.costs import Costs, costs, layer_parts, weight_gradients
from foretell.plan.framework import running
from foretell.plan.layer_cost import slower
from foretell.plan.layouts import Array
from foretell.plan.memory import ROUNDING, USABLE, Memory, stage_memory
from foretell.plan.plan import Plan
from foretell.plan.stage_placement import StagePlacement
from foretell.portable import product
from foretell.workload import Workload
from foretell.workload.op import BYTES

_CHUNK = 2.0**21  # bytes of a block of PyTorch's allocator


@dataclass(frozen=True)
class Rates:
    """Every layer once, for one micro-batch, on one set of ranks; seconds, and bytes of a rank."""

    forward: Array
    inputs: Array  # gradient of the input
    weights: Array  # gradient of the weights
    kept: Array  # from forward to backward
    handed: Array  # to the next layer: all that is kept where forward runs again
    brief: Array  # only while it runs
    elements: Array  # of weights
    parameters: Array  # bytes of them
    trained: Array  # bytes of gradients and optimizer state besides
    is_block: Array  # 1 or 0


class PlacedStageCost(NamedTuple):
    """One stage and one micro-batch: seconds, and bytes of each of its ranks."""

    forward: float
    inputs: float
    weights: float
    kept: float  # from forward to backward
    brief: float  # while forward runs
    moment: float  # while backward runs: what was dropped and is made again
    parameters: float
    trained: float
    elements: float  # of weights that are trained

    @property
    def backward(self) -> float:
        """Both gradients."""
        return self.inputs + self.weights


@dataclass(frozen=True)
class Prices:
    """One model on one cluster; prices of a set of ranks are worked out once a kind of set."""

    plan: Plan  # checked: micro-batch, program and formats are its own
    workload: Workload
    cluster: Cluster
    _known: dict[object, Rates] = field(default_factory=dict, repr=False)

    def rates(self, ranks: Sequence[int]) -> Rates:
        """Every layer on these ranks."""
        group = tuple(ranks)
        alike = (self.cluster.levels(group), tuple(self.cluster.devices[r].name for r in group))
        if alike not in self._known:
            self._known[alike] = _rates(self, group)
        return self._known[alike]


def _rates(prices: Prices, ranks: tuple[int, ...]) -> Rates:
    workload = prices.workload
    c = _costs(prices, workload, ranks)
    held = [_alone(c, workload, at) for at in range(len(workload.layers))]
    parts = [layer_parts(c, at, workload) for at in range(len(workload.layers))]
    both = _column([back.seconds(c.bend) for _, back in parts])
    both[-1] += float(c.turn[0])  # what the host does beside the loss
    alone = _costs(prices, weight_gradients(workload), ranks)
    weights = np.minimum(_column([cost.backward.kernels for cost in alone.layers]), both)
    return Rates(
        forward=_column([ahead.seconds(c.bend) for ahead, _ in parts]),
        inputs=both - weights,
        weights=weights,
        kept=_column([h.kept for h in c.holdings]),
        handed=_column([h.handed for h in c.holdings]),
        brief=_column([h.brief for h in c.holdings]),
        elements=_column([h.weights + h.experts for h in c.holdings]),
        parameters=_column([m.parameters for m in held]),
        trained=_column([m.gradients + m.optimizers for m in held]),
        is_block=np.array([float(layer.is_block) for layer in workload.layers]),
    )


def _costs(prices: Prices, workload: Workload, ranks: tuple[int, ...]) -> Costs:
    plain = {"pp": 1, "dp": 1, "stages": (), "actions": (), "recompute": "none", "schedule": "1f1b"}
    plan = prices.plan.but(tp=len(ranks), **plain)
    device = slower([prices.cluster.devices[r] for r in ranks], plan.dtype or "bf16")
    return costs([plan], workload, prices.cluster.subset(ranks), device)


def _alone(c: Costs, workload: Workload, at: int) -> Memory:
    """What one layer makes its rank hold for good."""
    times = np.zeros((len(workload.layers), 1))
    times[at] = 1.0
    return stage_memory(c, times, workload, np.zeros(1))


def _column(values: Sequence[Array]) -> Array:
    return np.array([float(np.ravel(v)[0]) for v in values])


def bill(prices: Prices, place: StagePlacement) -> PlacedStageCost:
    """What a stage costs and holds."""
    r, times = prices.rates(place.ranks), np.array(place.times, float)
    blocks, again = times * r.is_block, float("recompute" in place.ways)
    trains = float("frozen" not in place.ways)
    kept = float(product(times - again * blocks, r.kept) + product(again * blocks, r.handed))
    dropped = float(np.max((r.kept + r.brief) * (blocks > 0))) * again
    return PlacedStageCost(
        forward=float(product(times, r.forward)),
        inputs=float(product(times, r.inputs) + product(again * blocks, r.forward)),
        weights=float(product(times, r.weights)) * trains,
        kept=_rounded(kept),
        brief=_rounded(float(np.max(r.brief * (times > 0)))),
        moment=_rounded(dropped),
        parameters=ROUNDING * float(product(times, r.parameters)),
        trained=ROUNDING * float(product(times, r.trained)) * trains,
        elements=float(product(times, r.elements)) * trains,
    )


def _rounded(size: float) -> float:
    """Bytes as the allocator gives them out: whole blocks."""
    return float(np.ceil(ROUNDING * size / _CHUNK)) * _CHUNK


def room(prices: Prices, rank: int) -> float:
    """Bytes a device has for tensors."""
    return float(prices.cluster.devices[rank].memory) * USABLE


def message(
    prices: Prices, first: StagePlacement, then: StagePlacement, layers: Sequence[int]
) -> float:
    """Seconds until the ranks of one stage have what another hands them."""
    missing = [r for r in then.ranks if r not in first.ranks]
    if not missing:
        return 0.0
    size = float(sum(prices.rates(first.ranks).handed[i] for i in layers))
    if len(missing) > len(first.ranks):
        group = prices.cluster.levels((first.ranks[0], *missing))
        return float(collective.price("broadcast", size, group).seconds)
    pairs = list(zip(first.ranks, missing, strict=False))
    groups = [
        prices.cluster.levels(pair, pairs[:at] + pairs[at + 1 :]) for at, pair in enumerate(pairs)
    ]
    return max(float(collective.price("send", size, group).seconds) for group in groups)


def offloading(prices: Prices, rank: int, size: float) -> float:
    """Seconds to move bytes between a device and its host."""
    return size / prices.cluster.host_bandwidth(rank)


def updating(prices: Prices, rank: int, elements: float) -> float:
    """Seconds of the optimizer on one rank."""
    if not elements:
        return 0.0
    size, n = running(prices.plan).update * elements, np.array([elements])
    device = prices.cluster.devices[rank]
    found = kernel.seconds(device, "optimizer", "fp32", {"n": n}, bytes=np.array([size]))
    learned = prices.cluster.calibration
    return float(found.seconds[0]) * learned.compute * learned.update


def tying(prices: Prices, ranks: Sequence[int], elements: float) -> float:
    """Seconds to add up the gradients of weights that several ranks have."""
    plan = prices.plan
    width = BYTES[plan.grad_dtype or running(plan).grad_dtype]
    group = prices.cluster.levels(tuple(ranks))
    return float(collective.price("all_reduce", elements * width, group).seconds)
