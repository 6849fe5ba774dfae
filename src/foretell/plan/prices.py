"""What stages of a plan in any syntax take and hold: the prices that its lowering reads.

A stage is layers, each so many times, on some ranks under a plan of its own. Stages are priced
together: layers once for every kind of machines and way to split them, stages as columns of that.
What was priced for a workload on a cluster is kept, as searches ask again and again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from foretell.cluster import Cluster
from foretell.graph.groups import group_text
from foretell.plan.check import micro_batches
from foretell.plan.costs import (
    Copied,
    Costs,
    Memory,
    Stage,
    cell_of,
    copied_layers,
    costs,
    grad_width,
    joined,
    layer_seconds,
    rerun_share,
    room,
    stage,
    stage_memory,
)
from foretell.plan.estimate import (
    Messages,
    messages,
    output_bytes_of,
    reducing,
    regather_bytes,
    regathering,
    updating,
)
from foretell.plan.layer_cost import Array, layer_costs, layouts
from foretell.plan.order import is_split
from foretell.plan.plan import Plan, stride
from foretell.workload import Workload

# Prices of one cell on machines of one kind, with what they were worked out for.
_Key = tuple[int, int, object, Plan]
_KNOWN: dict[_Key, tuple[Workload, Cluster, Cluster, Costs]] = {}
_MOST_KNOWN = 4096
MOST = 64  # parts of a backward: finer ones change nothing that can be seen


class StageLayers(NamedTuple):
    """Layers on ranks, before they are priced."""

    plan: Plan  # of these ranks alone; its degrees multiply to their number
    ranks: tuple[int, ...]  # of the whole cluster, in mesh order
    times: Sequence[float]  # how often each layer of the workload runs there
    number: int = 0  # of the stage in its pipeline


@dataclass(frozen=True)
class StageColumns:
    """What stages on machines alike cost and hold, a column a stage."""

    costs: Costs
    times: Array  # how often each layer runs: layers × stages
    workload: Workload
    cluster: Cluster  # what their collectives see
    copied: Copied  # what gathers and casts of parameters add to each layer
    cost: Stage  # what one micro-batch costs
    memory: Memory  # what a rank of each holds
    devices: Cluster | None = None  # whose memory it is, where not all of those

    @property
    def room(self) -> float:
        """Bytes the smallest device has for tensors."""
        return room(self.devices or self.cluster)

    @cached_property
    def layers(self) -> tuple[Array, Array]:
        """Forward and backward seconds of every layer, once: layers × stages."""
        return seconds_by_layer(self.costs, self.workload, self.copied)

    @cached_property
    def weight_seconds(self) -> Array:
        """What of each layer's backward can wait, once: layers × stages."""
        return np.minimum(np.array(self.costs.weight_gradients), self.layers[1])

    @cached_property
    def brief(self) -> Array:
        """Bytes that are there only while the forward of a layer runs: of the largest."""
        pairs = zip(self.costs.layer_memories, self.times, strict=True)
        return np.asarray(np.max([held.brief * (n > 0) for held, n in pairs], axis=0))

    @cached_property
    def reduce_seconds(self) -> Array:
        """Reducing the gradients."""
        return reducing(self.costs, self.cost, self.cluster)

    @cached_property
    def reduce_bytes(self) -> Array:
        """Bytes of the gradients."""
        return self.cost.weights * grad_width(self.costs)

    @cached_property
    def messages(self) -> Messages:
        """In which messages gradients go."""
        return messages(self.costs, self.cost, self.times, self.workload)

    @cached_property
    def update_seconds(self) -> Array:
        """The optimizer."""
        return updating(self.costs, self.cost, self.cluster)

    @cached_property
    def regather_seconds(self) -> Array:
        """Parameters handed back after the update."""
        return regathering(self.costs, self.cost, self.cluster)

    @property
    def regather_bytes(self) -> Array:
        """Bytes of those parameters."""
        return regather_bytes(self.costs, self.cost)


def seconds_by_layer(c: Costs, workload: Workload, copied: Copied) -> tuple[Array, Array]:
    """Forward and backward seconds of every layer, once: layers × plans."""
    found = [layer_seconds(c, at, workload) for at in range(len(workload.layers))]
    if copied:
        found = [(a + x, b + y) for (a, b), (x, y) in zip(found, copied, strict=True)]
    found[-1] = found[-1][0], found[-1][1] + c.turn
    return np.array([one for one, _ in found]), np.array([other for _, other in found])


@dataclass(frozen=True)
class PricedStage:
    """One stage: its ranks, its own plan, and what its layers cost and hold there."""

    index: int
    ranks: tuple[int, ...]  # of the whole cluster, in mesh order
    plan: Plan
    costs: Costs
    workload: Workload
    cluster: Cluster  # what its collectives see
    columns: StageColumns
    column: int = 0  # which of them is this stage's
    replicas: tuple[StageColumns, ...] = ()  # one of each kind, where these have unlike samples

    @property
    def rank(self) -> int:
        """The rank that stands for all of the stage."""
        return self.ranks[0]

    @property
    def forward(self) -> float:
        """Seconds of one micro-batch."""
        return float(self.columns.cost.forward[self.column])

    @property
    def backward(self) -> float:
        """Seconds of one micro-batch, both gradients."""
        return float(self.columns.cost.backward[self.column])

    @cached_property
    def layers(self) -> list[float]:
        """How often each layer runs there."""
        return [float(n) for n in self.columns.times[:, self.column]]

    @cached_property
    def weight_seconds(self) -> list[float]:
        """What each layer's weight gradients take, once, where the backward is in two."""
        apart = self.costs.weight_gradients if is_split(self.plan) else ()
        return [float(seconds[0]) for seconds in apart]

    @property
    def copied(self) -> Copied:
        """What gathers and casts of parameters add to each layer, once; empty where nothing."""
        mine = slice(self.column, self.column + 1)
        return [(ahead[mine], back[mine]) for ahead, back in self.columns.copied]

    @cached_property
    def memory(self) -> Memory:
        """What the fullest rank holds; where one lacks room, the one that lacks most."""
        each = vars(self._fullest.memory)
        return Memory(**{name: v[self.column : self.column + 1] for name, v in each.items()})

    @cached_property
    def _fullest(self) -> StageColumns:
        some = self.replicas or (self.columns,)
        peaks = [float(one.memory.peak[self.column]) for one in some]
        over = [peak - one.room for peak, one in zip(peaks, some, strict=True)]
        return some[int(np.argmax(over if max(over) > 0 else peaks))]

    @cached_property
    def output_bytes(self) -> float:
        """Bytes the rank with most samples sends on of one micro-batch."""
        some = [one.costs for one in self.replicas] or [self.costs]
        return max(float(output_bytes_of(one, self.workload)[0]) for one in some)

    @cached_property
    def sent_in(self) -> Array:
        """The share of its gradients in each of their messages, equal ones where they are many."""
        sizes = self.columns.messages.take(np.array([self.column])).sizes()
        return sizes if len(sizes) <= MOST else np.full(MOST, 1 / MOST)

    @property
    def groups(self) -> dict[str, str]:
        """The ranks that its first rank communicates with, by axis."""
        step, plan = stride(self.plan, "tp"), self.plan
        tp = group_text(self.ranks[step * i] for i in range(plan.tp))
        return {"tp": tp} | ({"dp": self.group} if plan.cp == 1 else {})

    @property
    def group(self) -> str:
        """Its data-parallel ranks."""
        step = stride(self.plan, "dp")
        return group_text(self.ranks[step * i] for i in range(self.plan.dp))

    @property
    def room(self) -> float:
        """Bytes that rank has for tensors."""
        return self._fullest.room


def priced_stages(
    unpriced: Sequence[StageLayers],
    workload: Workload,
    cluster: Cluster,
    known: Costs | None = None,
) -> list[PricedStage]:
    """Stages priced on the machines of their ranks; `known` are prices of all on the cluster."""
    kinds: dict[object, list[int]] = {}
    for i, one in enumerate(unpriced):
        kinds.setdefault(None if known else _kind(cluster, one.ranks), []).append(i)
    out: dict[int, PricedStage] = {}
    for rows in kinds.values():
        some = [unpriced[i] for i in rows]
        keys = {} if known else _keys(some, workload, cluster)
        if missing := _missing(keys):
            part, cells = _part(cluster, some[0].ranks), [key[-1] for key in missing]
            layers = layer_costs(workload, part, layouts(cells).cells()[0])
            table = costs(cells, workload, part, layers=layers)
            for k, key in enumerate(missing):
                _KNOWN[key] = workload, cluster, part, table.take(np.array([k]))
        machines = _KNOWN[keys[some[0].plan]][2] if keys else cluster
        found = {plan: _KNOWN[key][3].of(plan, machines) for plan, key in keys.items()}
        if known:
            found[some[0].plan] = known
        each, times = _columns(some, found, workload)
        numbers, copied = (
            np.array([float(s.number) for s in some]),
            copied_layers(each, workload, machines),
        )
        cost = stage(each, times, workload, machines, copied)
        held = stage_memory(each, times, workload, numbers)
        columns = StageColumns(each, times, workload, machines, copied, cost, held)
        for k, (i, one) in enumerate(zip(rows, some, strict=True)):
            own = each.take(np.array([k])) if one.plan.recompute_layers else found[one.plan]
            out[i] = PricedStage(
                one.number, one.ranks, one.plan, own, workload, machines, columns, k
            )
    return [out[i] for i in range(len(unpriced))]


def _keys(some: Sequence[StageLayers], workload: Workload, cluster: Cluster) -> dict[Plan, _Key]:
    """What prices of stages on machines alike are kept by."""
    kind = id(workload), id(cluster), _kind(cluster, some[0].ranks)
    return {one.plan: (*kind, cell_of(one.plan)) for one in some}


def _missing(keys: dict[Plan, _Key]) -> list[_Key]:
    """Those that are to be priced; all of them where room is made for them."""
    every = list(dict.fromkeys(keys.values()))
    missing = [key for key in every if key not in _KNOWN]
    if missing and len(_KNOWN) + len(missing) >= _MOST_KNOWN:
        _KNOWN.clear()
        return every
    return missing


def _columns(
    some: Sequence[StageLayers], found: dict[Plan, Costs], workload: Workload
) -> tuple[Costs, Array]:
    """Prices of stages on machines alike side by side, and how often each runs each layer."""
    number = {plan: k for k, plan in enumerate(found)}
    which = np.array([number[one.plan] for one in some])
    each = joined(list(found.values()))
    if len(some) > 1 or len(found) > 1:
        each = each.take(which)
    if any(one.plan.recompute_layers for one in some):
        is_block = [layer.is_block for layer in workload.layers]
        blocks = [sum(n for n, mine in zip(s.times, is_block, strict=True) if mine) for s in some]
        shares = [rerun_share(s.plan, round(n)) for s, n in zip(some, blocks, strict=True)]
        each = replace(each, share=np.array(shares))
    return each, np.array([one.times for one in some], float).T


def uneven_stage(one: StageLayers, workload: Workload, cluster: Cluster) -> PricedStage:
    """A stage whose replicas have unlike samples: all wait for the one that takes longest."""
    machines = _part(cluster, one.ranks)
    every = tuple(
        replace(
            found.columns,
            cluster=machines,
            devices=found.cluster,
            copied=(copied := copied_layers(found.columns.costs, workload, machines)),
            cost=stage(found.columns.costs, found.columns.times, workload, machines, copied),
        )
        for ranks, plan in unlike_replicas(one.ranks, one.plan, cluster)
        for found in priced_stages([one._replace(plan=plan, ranks=ranks)], workload, cluster)
    )
    slow = max(every, key=lambda column: float(column.cost.both[0]))
    return PricedStage(
        one.number, one.ranks, one.plan, slow.costs, workload, machines, slow, 0, every
    )


def unlike_replicas(
    ranks: tuple[int, ...], plan: Plan, cluster: Cluster
) -> Iterator[tuple[tuple[int, ...], Plan]]:
    """Of each kind of replica of an uneven stage the one with most samples, its plan as if even."""
    inner, turns = len(ranks) // plan.dp, micro_batches(plan)
    found: dict[object, tuple[int, tuple[int, ...]]] = {}
    for k, samples in enumerate(plan.shares):
        some, each = ranks[k * inner : (k + 1) * inner], -(-samples // turns)
        kind = cluster.devices[some[0]].name if inner == 1 else _kind(cluster, some)
        if each > found.get(kind, (0, ()))[0]:
            found[kind] = each, found.get(kind, (0, some))[1]
    for each, some in found.values():
        whole = each * turns * plan.dp
        yield some, plan.but(micro_batch=each, shares=(), global_batch=whole)


@lru_cache(maxsize=1024)
def _part(cluster: Cluster, ranks: tuple[int, ...]) -> Cluster:
    return cluster.part(ranks)


def _kind(cluster: Cluster, ranks: tuple[int, ...]) -> object:
    """What two sets of ranks have in common that see the same machines."""
    if len(ranks) == 1:
        return int(cluster.kinds[cluster.nodes[ranks[0]]]), cluster.devices[ranks[0]].name
    nodes, slots = cluster.nodes[list(ranks)], cluster.slots[list(ranks)]
    return cluster.kinds[nodes].tobytes(), (nodes - nodes[0]).tobytes(), slots.tobytes()
