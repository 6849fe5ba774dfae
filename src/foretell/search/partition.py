"""Blocks and recompute split over a chain of stages, each with its own mesh and memory.

With t[s][i, j] the seconds of blocks i to j on stage s, under the least recompute that fits there,
and a bound B on the busiest stage,

    f[s][j] = min over i < j of f[s−1][i] + t[s][i, j], where t[s][i, j] ≤ B

is the shortest chain (Alpa's inter-operator program, arXiv 2201.12023, section 5.1), and with m
micro-batches its step takes about f + (m−1)·max t. B goes from the least possible upwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from foretell.cluster import Cluster
from foretell.cost.collective import price
from foretell.plan import Plan
from foretell.plan.check import RESOLVED
from foretell.plan.costs import Costs, cell_of, costs, stage
from foretell.plan.framework import resolved
from foretell.plan.layouts import Array
from foretell.plan.memory import ROUNDING, Memory, room, stage_memory
from foretell.plan.reduction_and_update import reduction, updating
from foretell.plan.segments import Segment, written
from foretell.workload import Workload

SLACK = (1.0, 1.03, 1.1, 1.25)  # of the least bottleneck: fewer blocks on the first stages
MOST_CELLS = 4e6  # layers × ranges of blocks: beyond that no range is looked at
MODES = ("none", "selective", "full")


@dataclass(frozen=True)
class Mesh:
    """A stage before it has blocks: its ranks and the plan it follows."""

    ranks: tuple[int, ...]
    plan: Plan  # degrees, ZeRO, micro-batch of one replica


@dataclass(frozen=True)
class _Rates:
    """Seconds and bytes of every layer, once, on one mesh in one mode of recompute."""

    seconds: Array
    state: Array  # parameters, gradients and optimizer state
    kept: Array  # activations of one micro-batch
    moment: Array  # workspace and buffers: the largest of a stage's layers counts


class Table(NamedTuple):
    """Every range of blocks on one stage: seconds, mode of recompute and blocks that it is for."""

    seconds: Array
    modes: Array
    counts: Array


@dataclass
class Partitioner:
    """Chains of one workload on one cluster; what was priced is kept."""

    workload: Workload
    cluster: Cluster
    _costs: dict[object, Costs] = field(default_factory=dict)
    _rates: dict[object, _Rates] = field(default_factory=dict)
    _tables: dict[object, Table] = field(default_factory=dict)
    _ends: dict[object, float] = field(default_factory=dict)

    def best(self, meshes: Sequence[Mesh], common: Plan) -> tuple[float, Plan] | None:
        """The shortest chain over these meshes and a rough guess of its step; None if none fits."""
        if len(meshes) > self.workload.num_blocks or self._is_large:
            return None
        whole = common_of(common, meshes, self.workload)
        stages = [explicit(mesh, whole, len(meshes)) for mesh in meshes]
        turns = whole.global_batch // (stages[0].plan.micro_batch * stages[0].plan.dp)
        tables = [self._stage(one, s, turns) for s, one in enumerate(stages)]
        took = [table.seconds for table in tables]
        least = least_bottleneck(took)
        if not np.isfinite(least):
            return None
        cuts = {shortest(took, least * slack) for slack in SLACK}
        hops = [self._hop(a, b) for a, b in pairwise(stages)]
        guess, ends = min((_guess(took, hops, ends, turns), ends) for ends in cuts)
        rows = chained(meshes, tables, ends)
        after = max(self._after(one, row) for one, row in zip(stages, rows, strict=True))
        return guess + after, written(whole, rows)

    def price(self, meshes: Sequence[Mesh], common: Plan) -> None:
        """Work out what layers cost on many meshes at once."""
        wanted: dict[object, list[Mesh]] = {}
        for mesh in dict.fromkeys(meshes):
            one = explicit(mesh, common_of(common, [mesh], self.workload), 2)
            wanted.setdefault(self._machines(one), []).append(one)
        for machines, some in wanted.items():
            cells = {cell_of(one.plan): one for one in some}
            new = [cell for cell in cells if (cell, machines) not in self._costs]
            if new:
                where = self.cluster.subset(cells[new[0]].ranks)
                found = costs(new, self.workload, where)
                for k, cell in enumerate(new):
                    self._costs[cell, machines] = found.take(np.array([k]))

    @property
    def _is_large(self) -> bool:
        return len(self.workload.layers) * self.workload.num_blocks**2 > MOST_CELLS

    def _machines(self, mesh: Mesh) -> object:
        """What meshes have in common on which a layer costs the same."""
        c, ranks = self.cluster, list(mesh.ranks)
        inner = ranks[: mesh.plan.tp * mesh.plan.cp]
        nodes = c.nodes[inner]
        local = int((c.nodes[ranks] == nodes[0]).sum())
        devices = tuple(sorted({c.devices[rank].name for rank in ranks}))
        same = (nodes - nodes[0]).tobytes(), c.slots[inner].tobytes()
        return devices, local, c.kinds[nodes].tobytes(), same, mesh.plan.ep > 1 and mesh.ranks

    def _priced(self, mesh: Mesh, mode: str) -> Costs:
        """What its layers cost, as columns of one plan."""
        key = cell_of(mesh.plan), self._machines(mesh)
        if key not in self._costs:
            self.price([mesh], mesh.plan)
        return self._costs[key].of(mesh.plan.but(recompute=mode, recompute_layers=0))

    def _stage(self, mesh: Mesh, at: int, turns: int) -> Table:
        pp = mesh.plan.pp
        flying = turns if mesh.plan.schedule == "gpipe" else min(pp - at, turns)
        return self.table(mesh, flying, (at == 0, at == pp - 1))

    def table(self, mesh: Mesh, flying: int, ends: tuple[bool, bool]) -> Table:
        """Every range of blocks on one stage that holds so many micro-batches at once."""
        key = mesh.plan, self._machines(mesh), flying, ends
        if key not in self._tables:
            rates = {mode: self._rated(mesh, mode) for mode in MODES}
            limit = room(self.cluster.subset(mesh.ranks)) / ROUNDING
            self._tables[key] = _table(self.times, rates, flying, limit, ends)
        return self._tables[key]

    def _rated(self, mesh: Mesh, mode: str) -> _Rates:
        """Every layer alone: its seconds, and what it makes a rank hold."""
        key = mesh.plan, self._machines(mesh), mode
        if key not in self._rates:
            priced, many = self._priced(mesh, mode), len(self.workload.layers)
            columns = priced.take(np.zeros(many, np.intp))
            machines = self.cluster.subset(mesh.ranks) if mesh.plan.zero == 3 else self.cluster
            self._rates[key] = _rates(columns, self.workload, machines)
        return self._rates[key]

    def _hop(self, first: Mesh, then: Mesh) -> float:
        """Seconds to send a micro-batch on: of the rank that has most to send or receive."""
        key = first.plan, then.plan, self._machines(first), self._machines(then)
        if key not in self._ends:
            block = next(i for i, layer in enumerate(self.workload.layers) if layer.is_block)
            both = [self._priced(one, "none").holdings[block].handed[0] for one in (first, then)]
            pairs = list(zip(first.ranks, then.ranks, strict=False))
            nodes = self.cluster.nodes
            local = int((nodes[list(first.ranks)] == nodes[first.ranks[0]]).sum())
            levels = self.cluster.levels(pairs[0], pairs[1 : min(local, len(pairs))])
            self._ends[key] = float(price("send", np.array([max(both)]), levels).seconds[0])
        return self._ends[key]

    def _after(self, mesh: Mesh, row: Segment) -> float:
        """Seconds of gradient reduction and update of one stage behind its last backward."""
        key = mesh.plan, self._machines(mesh), row.blocks, row.plan.recompute
        if key not in self._ends:
            c = self._priced(mesh, row.plan.recompute)
            blocks = np.array([float(x.is_block * x.times) for x in self.workload.layers])
            times = (blocks * row.blocks / blocks.sum())[:, None]
            where = self.cluster.subset(mesh.ranks)
            one = stage(c, times, self.workload, where)
            took = reduction(c, one, times, self.workload, where) + updating(c, one, where)
            self._ends[key] = float(took[0])
        return self._ends[key]

    @cached_property
    def times(self) -> Array:
        """How often each layer runs in every range of blocks: layers × first × last."""
        return _ranges(self.workload)


def explicit(mesh: Mesh, whole: Plan, stages: int) -> Mesh:
    """A stage with what all of them share."""
    names = (*RESOLVED, "global_batch", "compile", "schedule", "optimizer_kernels", "bucket_mb")
    shared = {name: getattr(whole, name) for name in (*names, "overlap", "grad_dtype")}
    return Mesh(mesh.ranks, mesh.plan.but(**shared, pp=stages, layers=(), segments=()))


def _table(
    times: Array, rates: dict[str, _Rates], flying: int, limit: float, ends: tuple[bool, bool]
) -> Table:
    """Seconds of every range of blocks under the least recompute that fits."""
    plain, size = rates["none"], times.shape[1]
    first, last = np.indices((size, size))
    blocks = np.maximum(last - first, 1)
    allowed = (first < last) & ((first == 0) == ends[0]) & ((last == size - 1) == ends[1])
    state, kept = _summed(times, plain.state), flying * _summed(times, plain.kept)
    least = _summed(times, plain.seconds)
    fits = state + kept + _largest(times, plain.moment) <= limit
    best = np.where(allowed & fits, least, np.inf)
    modes, counts = np.zeros(best.shape, int), np.zeros(best.shape, int)
    for k, mode in enumerate(MODES[1:], 1):
        again = rates[mode]
        saved = kept - flying * _summed(times, again.kept)
        over = state + kept + _largest(times, again.moment) - limit
        share = np.divide(over, saved, out=np.full(best.shape, 2.0), where=saved > 0)
        need = np.clip(np.ceil(share * blocks - 1e-9), 1, blocks + 1)
        extra = _summed(times, again.seconds - plain.seconds)
        took = np.where(allowed & (need <= blocks), least + extra * need / blocks, np.inf)
        better = took < best
        best, modes = np.where(better, took, best), np.where(better, k, modes)
        counts = np.where(better, need, counts).astype(int)
    return Table(best, modes, counts)


def chained(
    meshes: Sequence[Mesh], tables: Sequence[Table], ends: tuple[int, ...]
) -> list[Segment]:
    """The chain in segments."""
    rows, low = [], 0
    for mesh, table, high in zip(meshes, tables, ends, strict=True):
        mode, again = MODES[int(table.modes[low, high])], int(table.counts[low, high])
        many = 0 if again == high - low else again
        own = mesh.plan.but(recompute=mode, recompute_layers=many)
        rows.append(Segment(high - low, mesh.ranks, own))
        low = high
    return rows


def common_of(common: Plan, meshes: Sequence[Mesh], workload: Workload) -> Plan:
    """What all stages share, made explicit as `check` does it."""
    asked = common.but(zero=max(m.plan.zero for m in meshes), pp=len(meshes), segments=())
    asked = resolved(asked, workload.most("tp") > 1, workload.dtype)
    return common.but(**{name: getattr(asked, name) for name in RESOLVED})


def _ranges(workload: Workload) -> Array:
    """Blocks in a row; other layers are where the block before them is, the first ones in front."""
    many = workload.num_blocks
    first, last = np.meshgrid(np.arange(many + 1), np.arange(many + 1), indexing="ij")
    out, at = [], 0
    for layer in workload.layers:
        if layer.is_block:
            inside = np.minimum(last, at + layer.times) - np.maximum(first, at)
            out.append(np.maximum(inside, 0).astype(float))
            at += layer.times
        else:
            home = first == 0 if at == 0 else (first < at) & (at <= last)
            out.append(np.where(home, float(layer.times), 0.0))
    return np.array(out)


def _rates(columns: Costs, workload: Workload, machines: Cluster) -> _Rates:
    """Rates from prices with one column for every layer."""
    many = len(workload.layers)
    once, plan = np.eye(many), columns.plans.plans[0]
    found = stage(columns, once, workload, machines)
    held: Memory = stage_memory(columns, once, workload, np.full(many, float(plan.pp - 1)))
    ones = np.ones(many)
    return _Rates(
        found.both,
        held.parameters + held.gradients + held.optimizers,
        held.each * ones,
        (held.workspace + held.buffers) * ones,
    )


def _summed(times: Array, each: Array) -> Array:
    out: Array = np.tensordot(each, times, axes=1)
    return out


def _largest(times: Array, each: Array) -> Array:
    out: Array = np.max(np.where(times > 0, each[:, None, None], 0.0), axis=0)
    return out


def least_bottleneck(took: list[Array]) -> float:
    """Seconds of the busiest stage, at the least."""
    reach = np.full(took[0].shape[0], np.inf)
    reach[0] = 0.0
    for table in took:
        reach = np.min(np.maximum(reach[:, None], table), axis=0)
    return float(reach[-1])


def shortest(took: list[Array], bound: float) -> tuple[int, ...]:
    """Where each stage ends: the shortest chain whose busiest stage is within a bound."""
    reach = np.full(took[0].shape[0], np.inf)
    reach[0] = 0.0
    came = []
    for table in took:
        every = reach[:, None] + np.where(table <= bound * (1 + 1e-12), table, np.inf)
        came.append(np.argmin(every, axis=0))
        reach = np.min(every, axis=0)
    ends = [took[0].shape[0] - 1]
    for back in reversed(came[1:]):
        ends.append(int(back[ends[-1]]))
    return tuple(reversed(ends))


def _guess(took: list[Array], hops: list[float], ends: tuple[int, ...], turns: int) -> float:
    """Seconds of the chain: all of it once, and its period for every other micro-batch.

    The last k stages hold k micro-batches, which bounds how often a new one can start (1F1B).
    """
    firsts = (0, *ends[:-1])
    each = [float(t[a, b]) for t, a, b in zip(took, firsts, ends, strict=True)]
    behind, period = 0.0, max(each)
    for k, seconds in enumerate(reversed(each), 1):
        behind += seconds + (2 * hops[-k + 1] if k > 1 else 0.0)
        period = max(period, behind / k)
    return behind + (turns - 1) * period
