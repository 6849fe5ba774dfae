"""Blocks and recompute split over a chain of stages, each with its own mesh and memory.

With t[s][i, j] the seconds of blocks i to j on stage s, under the least recompute that fits there,
and a bound B on the busiest stage,

    f[s][j] = min over i < j of f[s−1][i] + t[s][i, j], where t[s][i, j] ≤ B

is the shortest chain (Alpa's inter-operator program, arXiv 2201.12023, section 5.1), and with m
micro-batches its step takes about f + (m−1)·max t. B goes from the least possible upwards.

Pipelines over unlike devices: each kind of device has stages of its own, split its own way.

For a micro-batch of b samples and a bottleneck of T seconds, a kind of device that is cut into n
stages, each of tp × dp ranks, takes n·min(⌊T / t⌋, c) blocks, with t the seconds of one block there
and c the blocks that fit into memory. The least T at which all kinds together take the whole model
is found by bisection; every kind uses the cut that takes most at that T, or one of fewer stages
that still suffices at a little more. Blocks and recompute of the most promising chains are then
split by a dynamic program (→ `.partition`). What comes out is predicted like any other plan
(→ `foretell.predict`), so that a poor guess costs time and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, pairwise, permutations
from typing import NamedTuple

import numpy as np

from foretell import portable
from foretell.cluster import Cluster, Level
from foretell.cost.collective import price
from foretell.errors import ForetellError
from foretell.plan import Plan
from foretell.plan.check import RESOLVED
from foretell.plan.costs import (
    ROUNDING,
    Costs,
    cell_of,
    copy_seconds,
    costs,
    layer_seconds,
    room,
    stage,
    stage_memory,
)
from foretell.plan.framework import resolved, slowdown
from foretell.plan.layer_cost import Array, layouts
from foretell.plan.plan import Segment, blocks_of, micro_samples, plan_of_segments, segments
from foretell.plan.prices import reducing, reduction, tied_bytes, unlike_replicas, updating
from foretell.plan.program import last_stage
from foretell.workload import Workload

SLACK_OF_KINDS = (1.0, 1.05, 1.15, 1.3, 1.6)  # of the least bottleneck
MOST_KINDS = 4
MOST_STAGES, MOST_WIDTH = 16, 16  # of one kind of device; tensor-parallel ranks
MOST_MICRO = 12  # sizes of a micro-batch that are tried
PARTITIONED = 96  # chains of which blocks and recompute are split by the dynamic program
IN_FLIGHT = 4  # micro-batches a stage is taken to hold when options are compared


SLACK = (1.0, 1.03, 1.1, 1.25)  # of the least bottleneck: fewer blocks on the first stages
MOST_CELLS = 4e6  # layers × ranges of blocks: beyond that no range is looked at
MODES = ("none", "selective", "full")


@dataclass(frozen=True)
class Option:
    """One kind of device cut into stages: seconds of the mean block and blocks that fit."""

    ranks: tuple[int, ...]
    stages: int
    tp: int
    each: int  # samples of one replica at a time
    block: float
    fitting: int

    @property
    def dp(self) -> int:
        """Replicas of a stage."""
        return len(self.ranks) // self.stages // self.tp

    def takes(self, bottleneck: float) -> int:
        """Blocks it can have at so many seconds a micro-batch."""
        return self.stages * min(int(bottleneck / self.block), self.fitting)

    def meshes(self, plain: Plan) -> list[Mesh]:
        """Its stages."""
        width = len(self.ranks) // self.stages
        own = plain.but(
            dp=self.dp, tp=self.tp, sp=self.tp > 1, zero=plain.zero if self.dp > 1 else 0,
            micro_batch=self.each,
        )  # fmt: skip
        firsts = range(0, len(self.ranks), width)
        return [Mesh(self.ranks[at : at + width], own) for at in firsts]


Options = dict[tuple[int, ...], dict[int, list[Option]]]


def kinds(cluster: Cluster) -> list[tuple[int, ...]]:
    """Ranks of each kind of device, the fastest kind first, whatever their order in the file."""
    found: dict[tuple[str, int], list[int]] = {}
    for rank, device in enumerate(cluster.devices):
        size = int((cluster.nodes == cluster.nodes[rank]).sum())
        found.setdefault((device.name, size), []).append(rank)
    order = sorted(
        found, key=lambda k: (-cluster.devices[found[k][0]].peak("bf16"), -len(found[k]), k)
    )
    return [tuple(found[k]) for k in order[:MOST_KINDS]]


def pipelines(
    workload: Workload, cluster: Cluster, common: Plan,
    accepts: Callable[[Plan], bool] = lambda plan: True,
) -> list[tuple[float, Plan]]:  # fmt: skip
    """Plans of unlike stages, each with a rough guess of its step; the shortest guess first."""
    common, every = resolved_common(common, workload), kinds(cluster)
    chains: dict[object, tuple[float, list[Mesh], Plan]] = {}
    for zero in (1, 0):
        plain = common.but(zero=zero)
        options = {ranks: options_of(ranks, plain, workload, cluster) for ranks in every}
        for count in range(1, len(every) + 1):
            for some in combinations(every, count):
                for guess, meshes, _ in _chains(some, options, plain, workload):
                    key = tuple(meshes)
                    if key not in chains or guess < chains[key][0]:
                        chains[key] = guess, meshes, plain
    order = sorted(chains, key=lambda key: chains[key][0])  # of equal guesses the first one found
    ranked = [chains[key] for key in order]
    parts = Partitioner(workload, cluster)
    parts.price([mesh for _, meshes, _ in ranked[:PARTITIONED] for mesh in meshes], common)
    found: dict[str, tuple[float, Plan]] = {}
    for _, meshes, plain in ranked[:PARTITIONED]:
        one = parts.best(meshes, plain)
        if one is not None and accepts(one[1]):
            found.setdefault(str(one[1]), one)
    return sorted(found.values(), key=lambda one: (one[0], str(one[1])))


def resolved_common(plan: Plan, workload: Workload) -> Plan:
    """What all segments share, made explicit as for a model that is split."""
    resolved_plan = resolved(plan.but(pp=2), workload)
    return plan.but(**{name: getattr(resolved_plan, name) for name in RESOLVED})


def _chains(
    some: Sequence[tuple[int, ...]], options: Options, plain: Plan, workload: Workload
) -> Iterator[tuple[float, list[Mesh], Plan]]:
    """Chains over some kinds of device."""
    for b in _micro_batches(plain.global_batch):
        offered = [options[ranks].get(b, []) for ranks in some]
        if all(offered):
            yield from _cuts(offered, b, plain, workload)


def _micro_batches(batch: int) -> list[int]:
    """Samples of a micro-batch: divisors of the batch, spread over all sizes where too many."""
    found = divisors(batch)
    if len(found) <= MOST_MICRO:
        return found
    picked = np.unique(np.linspace(0, len(found) - 1, MOST_MICRO).round().astype(int))
    return [found[i] for i in picked.tolist()]


def options_of(
    ranks: tuple[int, ...], plain: Plan, workload: Workload, cluster: Cluster
) -> dict[int, list[Option]]:
    """Every way to cut one kind of device, by the samples of a micro-batch."""
    node = int((cluster.nodes == cluster.nodes[ranks[0]]).sum())
    cuts = [
        (b, n, tp, len(ranks) // n // tp)
        for tp in divisors(node)
        if tp <= min(MOST_WIDTH, workload.most("tp")) and len(ranks) % tp == 0
        for n in divisors(len(ranks) // tp)
        if n <= min(MOST_STAGES, workload.num_blocks)
        for b in _micro_batches(plain.global_batch)
        if b % (len(ranks) // n // tp) == 0
    ]
    if not cuts:
        return {}
    machines = cluster.subset(ranks)
    plans = [
        plain.but(dp=dp, tp=tp, sp=tp > 1, pp=n, micro_batch=b // dp, zero=min(plain.zero, dp - 1))
        for b, n, tp, dp in cuts
    ]
    priced = costs(plans, workload, machines)
    blocks = _blocks(priced, workload)
    fitting = _fitting(priced, workload, machines)
    found: dict[int, list[Option]] = {}
    for i, (b, n, tp, dp) in enumerate(cuts):
        if fitting[i] > 0:
            one = Option(ranks, n, tp, b // dp, float(blocks[i]), int(fitting[i]))
            found.setdefault(b, []).append(one)
    return found


def divisors(n: int) -> list[int]:
    """Every number that divides another, the least first."""
    return [d for d in range(1, n + 1) if n % d == 0]


def _mean_block(workload: Workload) -> Array:
    """How much of each layer the mean block is."""
    many = np.array([x.times if x.is_block else 0 for x in workload.layers], float)
    out: Array = many / many.sum()
    return out


def _blocks(priced: Costs, workload: Workload) -> Array:
    """Seconds of the mean block, forward and backward."""
    took = [
        np.sum(layer_seconds(priced, at, workload), axis=0) for at in range(len(workload.layers))
    ]
    return portable.product(np.array(took).T, _mean_block(workload))


def _fitting(priced: Costs, workload: Workload, machines: Cluster) -> Array:
    """Blocks that fit on one stage when all of them are recomputed."""
    plans = [p.but(recompute="full") for p in priced.plans.plans]
    full = replace(priced, plans=layouts(plans), share=np.ones(len(plans)))
    times = np.repeat(_mean_block(workload)[:, None], len(plans), axis=1)
    last = np.array([p.pp - 1.0 for p in plans])
    held = stage_memory(full, times, workload, last)
    state = held.parameters + held.gradients + held.optimizers
    left = room(machines) / ROUNDING - held.workspace - held.buffers
    out: Array = np.floor(np.maximum(left, 0.0) / (state + IN_FLIGHT * held.each))
    return out


def _cuts(
    offered: list[list[Option]], b: int, plain: Plan, workload: Workload
) -> Iterator[tuple[float, list[Mesh], Plan]]:
    """Chains at the least bottleneck and a little more, in every order of the kinds."""
    least = _least(offered, workload.num_blocks)
    if not math.isfinite(least):
        return
    chosen = {
        tuple(_fewest_stages(offered, least * s, workload.num_blocks)) for s in SLACK_OF_KINDS
    }
    turns = plain.global_batch // b
    for picked in sorted(chosen):
        for order in permutations(picked) if len(picked) < 4 else (picked, picked[::-1]):
            options = [offered[k][i] for k, i in order]
            stages = sum(o.stages for o in options)
            if stages <= workload.num_blocks:
                guess = _rough(options, workload.num_blocks, turns)
                yield guess, [m for o in options for m in o.meshes(plain)], plain


def _rough(options: Sequence[Option], blocks: int, turns: int) -> float:
    """Seconds of a chain whose stages are all equally busy."""
    period = blocks / sum(o.stages / o.block for o in options)
    return period * (turns - 1 + sum(o.stages for o in options))


def _least(offered: list[list[Option]], blocks: int) -> float:
    """The least bottleneck at which all kinds together take the model; inf where none suffices."""
    low, high = 0.0, blocks * max(o.block for some in offered for o in some)
    if sum(max(o.takes(high) for o in some) for some in offered) < blocks:
        return math.inf
    for _ in range(40):
        middle = (low + high) / 2
        enough = sum(max(o.takes(middle) for o in some) for some in offered) >= blocks
        low, high = (low, middle) if enough else (middle, high)
    return high


def _fewest_stages(
    offered: list[list[Option]], bottleneck: float, blocks: int
) -> Iterator[tuple[int, int]]:
    """For each kind the option of fewest stages that leaves enough to the others."""
    most = [max(o.takes(bottleneck) for o in some) for some in offered]
    spare = sum(most) - blocks
    for k, some in enumerate(offered):
        good = [i for i, o in enumerate(some) if o.takes(bottleneck) >= most[k] - max(spare, 0)]
        good = [i for i in good if some[i].takes(bottleneck) >= some[i].stages] or good
        best = min(good, key=lambda i: (some[i].stages, -some[i].takes(bottleneck), some[i].tp))
        spare -= most[k] - some[best].takes(bottleneck)
        yield k, best


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
        turns = whole.global_batch // micro_samples(stages[0].plan)
        for one in stages:  # before the tables are made of them
            for mode in MODES if not one.plan.shares else ():
                self._priced_layers(one, mode)
        ends_at = len(stages) - 1
        tables = [
            self.table(one, _in_flight(one.plan, s, turns), (s == 0, s == ends_at))
            for s, one in enumerate(stages)
        ]
        took = [table.seconds for table in tables]
        least = least_bottleneck(took)
        if not np.isfinite(least):
            return None
        cuts = {shortest(took, least * slack) for slack in SLACK}
        hops = [self._send(a, b) for a, b in pairwise(stages)]
        guess, ends = min((_took(_each(took, ends), hops, turns), ends) for ends in cuts)
        rows = chained(meshes, tables, ends)
        guess += max(self._after(one, row) for one, row in zip(stages, rows, strict=True))
        found = plan_of_segments(whole, rows)
        return (guess + self._tied(stages, whole)) * slowdown(found, self.cluster), found

    def guess(self, plan: Plan) -> float:
        """A rough guess of the step of a pipeline, its blocks and recompute as they are."""
        if self._is_large:
            return 0.0
        rows = rows_of(plan, self.workload)
        whole = common_of(plan, meshes(rows), self.workload)
        stages = [explicit(mesh, whole, len(rows)) for mesh in meshes(rows)]
        turns = whole.global_batch // micro_samples(stages[0].plan)
        ends = np.cumsum([row.blocks for row in rows]).tolist()
        each = [
            self._seconds(one, row, end) for one, row, end in zip(stages, rows, ends, strict=True)
        ]
        hops = [self._send(a, b) for a, b in pairwise(stages)]
        after = max(self._after(one, row) for one, row in zip(stages, rows, strict=True))
        took = _took(each, hops, turns) + after + self._tied(stages, whole)
        return took * slowdown(plan, self.cluster)

    def fits(self, plan: Plan) -> bool:
        """Whether every stage of a pipeline seems to have room; where nothing is known it has."""
        if self._is_large or plan.groups or plan.sync or plan.stages or not plan.micro_batch:
            return True
        try:
            rows = rows_of(plan, self.workload)
            whole = common_of(plan, meshes(rows), self.workload)
            stages = [explicit(mesh, whole, len(rows)) for mesh in meshes(rows)]
            turns = whole.global_batch // micro_samples(stages[0].plan)
            ends = np.cumsum([row.blocks for row in rows]).tolist()
            return all(
                self._has_room(one, row, end, _in_flight(one.plan, at, turns))
                for at, (one, row, end) in enumerate(zip(stages, rows, ends, strict=True))
            )
        except ForetellError:
            return True

    def _has_room(self, mesh: Mesh, row: Segment, end: int, flying: int) -> bool:
        """Whether blocks up to one fit on a stage that holds so many micro-batches at once."""
        mode, share = row.plan.recompute, (row.plan.recompute_layers or row.blocks) / row.blocks
        if mesh.plan.shares or row.plan.offload:
            return True
        times = self.times[:, end - row.blocks, end]
        plain, again = self._priced_layers(mesh, "none"), self._priced_layers(mesh, mode)
        kept = plain.kept + share * (again.kept - plain.kept)
        held = float(np.sum(times * (plain.state + flying * kept)))
        held += float(np.max(np.where(times > 0, again.moment, 0.0)))
        return held <= room(self.cluster.part(mesh.ranks)) / ROUNDING

    def _seconds(self, mesh: Mesh, row: Segment, end: int) -> float:
        """Seconds of one micro-batch on a stage, forward and backward."""
        if mesh.plan.shares:
            return max(self._seconds(one, row, end) for one in self._replicas(mesh))
        times, mode = self.times[:, end - row.blocks, end], row.plan.recompute
        once = portable.product(self._priced_layers(mesh, "none").seconds[None], times)
        if mode == "none":
            return float(once[0])
        again = portable.product(self._priced_layers(mesh, mode).seconds[None], times)
        share = (row.plan.recompute_layers or row.blocks) / row.blocks
        return float(once[0] + share * (again[0] - once[0]))

    def price(self, meshes: Sequence[Mesh], common: Plan) -> None:
        """Work out what layers cost on many meshes at once."""
        wanted: dict[object, list[Mesh]] = {}
        for mesh in dict.fromkeys(meshes):
            for one in self._replicas(explicit(mesh, common_of(common, [mesh], self.workload), 2)):
                wanted.setdefault(self._machines(one), []).append(one)
        for machines, some in wanted.items():
            cells = {cell_of(one.plan): one for one in some}
            new = [cell for cell in cells if (cell, machines) not in self._costs]
            if new:
                where = self.cluster.part(cells[new[0]].ranks)
                found = costs(new, self.workload, where)
                for k, cell in enumerate(new):
                    self._costs[cell, machines] = found.take(np.array([k]))

    def _replicas(self, mesh: Mesh) -> list[Mesh]:
        """One mesh of each kind of replica that a stage with uneven shares has, most samples first.

        Sharded parameters are taken to be gathered at no cost.
        """
        if not mesh.plan.shares:
            return [mesh]
        found = unlike_replicas(mesh.ranks, mesh.plan, self.cluster)
        less = {"zero": 2} if mesh.plan.zero == 3 else {}
        some = [Mesh(ranks, plan.but(**less)) for ranks, plan in found]
        return sorted(some, key=lambda one: -one.plan.micro_batch)

    def uneven(self, mesh: Mesh, samples: int, turns: int) -> Mesh | None:
        """A mesh whose replicas share so many samples by their speed; None where that is even."""
        plan = mesh.plan.but(shares=(), micro_batch=max(samples // mesh.plan.dp, 1))
        inner, c = len(mesh.ranks) // plan.dp, self.cluster
        if samples < plan.dp or len({c.devices[rank].name for rank in mesh.ranks}) == 1:
            return None
        if plan.ep > 1 or plan.filter * plan.channel > 1 or plan.spatial:
            return None
        less = plan.but(zero=min(plan.zero, 2), global_batch=plan.micro_batch * plan.dp)
        whole = common_of(less, [mesh], self.workload)
        firsts = range(0, len(mesh.ranks), inner)
        some = [explicit(Mesh(mesh.ranks[k : k + inner], less), whole, plan.pp) for k in firsts]
        shares = _shares([self._whole_model(one) for one in some], samples)
        if len(set(shares)) == 1:
            return None
        own = plan.but(
            shares=tuple(n * turns for n in shares), micro_batch=max(shares),
            global_batch=samples * turns,
        )  # fmt: skip
        return Mesh(mesh.ranks, own)

    def _whole_model(self, mesh: Mesh) -> float:
        """Seconds of the whole model, forward and backward, if all of it were here."""
        times = np.array([float(layer.times) for layer in self.workload.layers])
        return float(portable.product(self._priced_layers(mesh, "none").seconds[None], times)[0])

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
        """What its layers cost, as columns of one plan; of the replica with most samples."""
        mesh = self._replicas(mesh)[0]
        key = cell_of(mesh.plan), self._machines(mesh)
        if key not in self._costs:
            self.price([mesh], mesh.plan)
        return self._costs[key].of(mesh.plan.but(recompute=mode, recompute_layers=0), self.cluster)

    def table(self, mesh: Mesh, flying: int, ends: tuple[bool, bool]) -> Table:
        """Every range of blocks on one stage that holds so many micro-batches at once."""
        if mesh.plan.shares:
            return _slowest([self.table(one, flying, ends) for one in self._replicas(mesh)])
        key = mesh.plan, self._machines(mesh), flying, ends
        if key not in self._tables:
            rates = {mode: self._priced_layers(mesh, mode) for mode in MODES}
            limit = room(self.cluster.part(mesh.ranks)) / ROUNDING
            self._tables[key] = _table(self.times, rates, flying, limit, ends)
        return self._tables[key]

    def _priced_layers(self, mesh: Mesh, mode: str) -> _Rates:
        """Every layer alone: its seconds, and what it makes a rank hold."""
        key = mesh.plan, self._machines(mesh), mode
        if key not in self._rates:
            many = len(self.workload.layers)
            columns = self._priced(mesh, mode).take(np.zeros(many, np.intp))
            machines = self.cluster.part(mesh.ranks) if mesh.plan.zero == 3 else self.cluster
            once, last = np.eye(many), np.full(many, float(mesh.plan.pp - 1))
            copied = copy_seconds(columns, self.workload, machines)
            took = stage(columns, once, self.workload, machines, copied)
            held = stage_memory(columns, once, self.workload, last)
            state = held.parameters + held.gradients + held.optimizers
            moment = (held.workspace + held.buffers) * np.ones(many)
            self._rates[key] = _Rates(took.both, state, held.each * np.ones(many), moment)
        return self._rates[key]

    def _send(self, first: Mesh, then: Mesh) -> float:
        """Seconds to send a micro-batch on: of the rank that has most to send or receive."""
        key = first.plan, then.plan, self._machines(first), self._machines(then)
        if key not in self._ends:
            block = next(i for i, layer in enumerate(self.workload.layers) if layer.is_block)
            both = [
                self._priced(one, "none").layer_memories[block].output_bytes[0]
                for one in (first, then)
            ]
            levels = self._between(first, then)
            self._ends[key] = float(price("send", np.array([max(both)]), levels).seconds[0])
        return self._ends[key]

    def _tied(self, stages: Sequence[Mesh], whole: Plan) -> float:
        """Seconds to add up the gradients of weights that the first and last stage share."""
        first, last = stages[0], stages[-1]
        size = tied_bytes(self._priced(first, "none"), self.workload)
        if first is last or not size[0] or not last_stage(whole.but(pp=len(stages), segments=())):
            return 0.0
        return float(price("all_reduce", size, self._between(first, last)).seconds[0])

    def _between(self, first: Mesh, then: Mesh) -> tuple[Level, ...]:
        """The links that ranks of two stages share when each exchanges with one of the other."""
        pairs, nodes = list(zip(first.ranks, then.ranks, strict=False)), self.cluster.nodes
        local = int((nodes[list(first.ranks)] == nodes[first.ranks[0]]).sum())
        return self.cluster.levels(pairs[0], pairs[1 : min(local, len(pairs))])

    def _after(self, mesh: Mesh, row: Segment) -> float:
        """Seconds of gradient reduction and update of one stage behind its last backward."""
        key = mesh.plan, self._machines(mesh), row.blocks, row.plan.recompute
        if key not in self._ends:
            c = self._priced(mesh, row.plan.recompute)
            blocks = np.array([float(x.is_block * x.times) for x in self.workload.layers])
            times = (blocks * row.blocks / blocks.sum())[:, None]
            where = self.cluster.part(mesh.ranks)
            one = stage(c, times, self.workload, where, copy_seconds(c, self.workload, where))
            took = reduction(c, one, times, self.workload, where, reducing(c, one, where))
            took += updating(c, one, where)
            self._ends[key] = float(took[0])
        return self._ends[key]

    @cached_property
    def times(self) -> Array:
        """How often each layer runs in every range of blocks: layers × first × last."""
        return _ranges(self.workload)


def rows_of(plan: Plan, workload: Workload) -> list[Segment]:
    """The stages of a pipeline, each with its blocks and ranks."""
    if plan.segments:
        return list(segments(plan, workload))
    each, ranks = plan.ranks // plan.pp, plan.placement or tuple(range(plan.ranks))
    own = plan.but(pp=1, layers=(), placement=(), chunks=1, schedule="1f1b", actions=())
    return [
        Segment(blocks, ranks[s * each : (s + 1) * each], own)
        for s, blocks in enumerate(blocks_of(plan, workload))
    ]


def meshes(rows: Sequence[Segment]) -> list[Mesh]:
    """Stages without their blocks."""
    return [Mesh(row.ranks, row.plan) for row in rows]


def explicit(mesh: Mesh, whole: Plan, stages: int) -> Mesh:
    """A stage with what all of them share."""
    names = (*RESOLVED, "global_batch", "compile", "schedule", "optimizer_kernels", "bucket_mb")
    shared = {name: getattr(whole, name) for name in (*names, "overlap", "grad_dtype")}
    return Mesh(mesh.ranks, mesh.plan.but(**shared, pp=stages, layers=(), segments=()))


def _in_flight(plan: Plan, at: int, turns: int) -> int:
    """Micro-batches that a stage holds at once."""
    return turns if plan.schedule == "gpipe" else min(plan.pp - at, turns)


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


def _slowest(tables: Sequence[Table]) -> Table:
    """What replicas that wait for each other take, and the most that any of them runs again."""
    found = tables[0]
    for one in tables[1:]:
        more = (one.modes > found.modes) | (one.modes == found.modes) & (one.counts > found.counts)
        found = Table(
            np.maximum(found.seconds, one.seconds),
            np.where(more, one.modes, found.modes),
            np.where(more, one.counts, found.counts),
        )
    return found


def _shares(each: Sequence[float], samples: int) -> list[int]:
    """Samples of ranks that take so long for as many: their part, what is left to who ends first.

    Every rank has one at least.
    """
    total = sum(1 / took for took in each)
    found = [max(int(samples / took / total), 1) for took in each]
    while sum(found) != samples:
        step = 1 if sum(found) < samples else -1
        ends = [
            (n + (step > 0)) * took if step > 0 or n > 1 else 0.0
            for n, took in zip(found, each, strict=True)
        ]
        found[ends.index(min(ends) if step > 0 else max(ends))] += step
    return found


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
    resolved_plan = common.but(zero=max(m.plan.zero for m in meshes), pp=len(meshes), segments=())
    resolved_plan = resolved(resolved_plan, workload)
    return common.but(**{name: getattr(resolved_plan, name) for name in RESOLVED})


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


def _each(took: list[Array], ends: tuple[int, ...]) -> list[float]:
    """Seconds of every stage of a chain, one micro-batch."""
    firsts = (0, *ends[:-1])
    return [float(t[a, b]) for t, a, b in zip(took, firsts, ends, strict=True)]


def _took(each: list[float], hops: list[float], turns: int) -> float:
    """Seconds of the chain: all of it once, and its period for every other micro-batch.

    The last k stages hold k micro-batches, which bounds how often a new one can start (1F1B).
    """
    behind, period = 0.0, max(each)
    for k, seconds in enumerate(reversed(each), 1):
        behind += seconds + (2 * hops[-k + 1] if k > 1 else 0.0)
        period = max(period, behind / k)
    return behind + (turns - 1) * period
