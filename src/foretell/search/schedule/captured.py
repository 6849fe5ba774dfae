"""A captured training step as layers that can be dealt out: its modules, priced device by device.

A layer is a module up to its first number (`h.3`, `layer1.0`) or its first name, in the order of
forward; tasks without a module belong to the layer before them, the loss to the last. Time comes
from the prices of its kernels, memory from its buffers: what is born in forward and dies in
backward is kept; parameters, gradients and optimizer state stay. What is handed on is whatever
later layers read of earlier ones. A step's batch is one micro-batch. Layers are not split: nobody
has captured how.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from foretell.cluster import Cluster
from foretell.cost.price import price
from foretell.errors import InfeasibleError, InputError
from foretell.graph import BufferKind, Graph, Kind, Phase
from foretell.plan.layouts import Array
from foretell.plan.place_costs import Prices, Rates
from foretell.plan.plan import Plan
from foretell.workload import Layer, Tensor, Workload

Ints = NDArray[np.int64]
_AHEAD = (Phase.FORWARD, Phase.LOSS)
_STATE = (BufferKind.GRADIENT, BufferKind.OPTIMIZER)


@dataclass(frozen=True)
class Captured(Prices):
    """Prices of a captured step: known for single ranks, whatever their device."""

    graph: Graph | None = None
    _units: Ints = field(default_factory=lambda: np.zeros(0, np.int64), repr=False)

    @property
    def widths(self) -> tuple[int, ...]:
        return (1,)

    def rates(self, ranks: Sequence[int]) -> Rates:
        """Every layer on one rank."""
        if len(ranks) > 1:
            raise InfeasibleError(
                f"a captured step on {len(ranks)} ranks: how its layers are split is not known",
                hint="take shape v, or a built-in model",
            )
        name = self.cluster.devices[ranks[0]].name
        if name not in self._known:
            assert self.graph is not None
            priced = price(self.graph, self.cluster.subset(ranks))
            self._known[name] = _rates(self.graph, priced.seconds, self._units, self.workload)
        return self._known[name]


def captured(graph: Graph, cluster: Cluster) -> Captured:
    """The layers of a captured step and their prices on a cluster."""
    names = _named(graph)
    order = list(dict.fromkeys(n for n in names[_forward(graph)].tolist() if n))
    if not order:
        raise InputError(
            "the graph does not say which module its kernels belong to",
            hint="capture it with `foretell capture train.py:model`",
        )
    units = _units(graph, names, order)
    title = str(graph.facts.get("captured", "a captured step"))
    layers = tuple(Layer(n, (), Tensor("handed", ()), {}) for n in order)
    workload = Workload(title, layers, dtype="fp32")
    plan = Plan(micro_batch=1, global_batch=1, stack="ddp")
    return Captured(plan, workload, cluster, graph=graph, _units=units)


def _forward(graph: Graph) -> NDArray[np.bool_]:
    ahead: NDArray[np.bool_] = (graph.kind == Kind.KERNEL) & np.isin(graph.phase, _AHEAD)
    return ahead


def _named(graph: Graph) -> NDArray[np.str_]:
    """The layer that each task names."""
    short = {i: _unit(text) for i, text in enumerate(graph.names)}
    return np.array([short[int(i)] for i in graph.layer])


def _unit(module: str) -> str:
    parts = module.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[: number + 1])


def _units(graph: Graph, names: NDArray[np.str_], order: list[str]) -> Ints:
    """The number of each task's layer: what names none goes with the task before it."""
    place = {name: i for i, name in enumerate(order)}
    found = np.array([place.get(str(n), -1) for n in names])
    last, out = 0, np.zeros(len(found), np.int64)
    for i, (unit, phase) in enumerate(zip(found.tolist(), graph.phase.tolist(), strict=True)):
        if unit >= 0:
            last = unit
        elif phase == Phase.LOSS:
            last = len(order) - 1
        out[i] = last
    return out


def _rates(graph: Graph, seconds: Array, units: Ints, workload: Workload) -> Rates:
    size = len(workload.layers)
    kernel = graph.kind == Kind.KERNEL
    back = kernel & (graph.phase == Phase.BACKWARD)
    born = graph.buffers.born
    makers = np.unique(born[(graph.buffers.kind == BufferKind.GRADIENT) & (born >= 0)])
    gives = np.isin(np.arange(graph.size), makers) & back
    owned = _owned(graph, workload)
    total = float(graph.buffers.bytes[np.isin(graph.buffers.kind, _STATE)].sum())
    weights = _summed(seconds, gives, units, size)
    return Rates(
        forward=_summed(seconds, _forward(graph), units, size),
        inputs=_summed(seconds, back, units, size) - weights,
        weights=weights,
        kept=_kept(graph, units, size),
        handed=_handed(graph, units, size),
        brief=np.zeros(size),
        elements=owned / 4.0,
        parameters=owned,
        trained=owned * total / max(float(owned.sum()), 1.0),
        is_block=np.ones(size),
    )


def _summed(values: Array, which: NDArray[np.bool_], units: Ints, size: int) -> Array:
    return np.bincount(units[which], weights=values[which], minlength=size).astype(float)


def _owned(graph: Graph, workload: Workload) -> Array:
    """Bytes of the parameters of each layer."""
    place = {layer.name: i for i, layer in enumerate(workload.layers)}
    out = np.zeros(len(place))
    mine = np.flatnonzero(graph.buffers.kind == BufferKind.PARAMETER)
    for i in mine.tolist():
        unit = _unit(graph.names[int(graph.buffers.name[i])])
        out[place.get(unit, 0)] += float(graph.buffers.bytes[i])
    return out


def _kept(graph: Graph, units: Ints, size: int) -> Array:
    """Bytes born in a layer's forward that die in backward."""
    b = graph.buffers
    both = (b.kind == BufferKind.ACTIVATION) & (b.born >= 0) & (b.dies >= 0)
    ahead = np.isin(graph.phase[b.born], _AHEAD) & (graph.phase[b.dies] == Phase.BACKWARD)
    return _summed(b.bytes, both & ahead, units[b.born], size)


def _handed(graph: Graph, units: Ints, size: int) -> Array:
    """Bytes of each layer and those before it that layers behind it read."""
    b, edges = graph.buffers, graph.edges
    made: Array = np.zeros(graph.size)
    is_made = (b.kind == BufferKind.ACTIVATION) & (b.born >= 0)
    np.maximum.at(made, b.born[is_made], b.bytes[is_made])
    forward = _forward(graph)
    task, first = edges.waiting, edges.after
    used = forward[task] & forward[first] & (units[first] < units[task])
    until = np.zeros(graph.size, np.int64)
    np.maximum.at(until, first[used], units[task[used]])
    out = np.zeros(size)
    for i in np.unique(first[used]).tolist():
        out[units[i] : until[i]] += made[i]
    return out
