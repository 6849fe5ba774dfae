"""How long a fused step takes; its plan, written and read back; what every command says of it.

An evaluation simulates both lanes of the step once. Where no buckets are given, the best ones for
these groups are found on the way (→ `lanes.packed`).

What a kernel of several ops costs, asked in batches and remembered.

    seconds(region) = Σ own seconds of its ops · model(region) / Σ model(op by itself)

The model (→ `foretell.cost.fused`) tells how much shorter ops are together than apart; their own
prices, which may be measured, tell how long they are apart. So a region of one op costs what the op
costs, and an error the model makes alike on both sides of the fraction drops out.

Layers that repeat ask for the same regions: each different one is priced once.

How short a step could be at best: what is left to gain.

    proven    no plan of the space is shorter. Ops that nothing may be fused with take their own
              seconds, all others none; a gradient is there when such ops among all it depends on
              have run, r(j); what was not there before r(j) is sent behind it, S(j), with one start
              and the least slope:

                  max( Σ seconds, max over j of  r(j) + start + slope · bytes of S(j) )

    overlap   max(compute, wire): the paper's full overlap, nothing waits for anything. Compute is
              that of the shortest fusion the search found, the wire one message of all gradients.
    bound     the same, but no gradient leaves before it is there in that fusion: what messages
              alone can still gain.

To compute belongs what the host adds that launches the kernels: of ops that cannot be fused in what
is proven. The update is added to all three, unless it runs message by message. Sharded, the wire
also carries every parameter once, before or while ops run, and what is proven holds for either way.

What `foretell predict` prints for such a plan is what the planner that found it printed.

A way to fuse as a graph: what the simulator simulates, and what a report shows.

The lanes of `foretell.search.fusion.lanes` are this graph's lanes; a test holds both to the same
seconds.

A way to fuse as a plan, and back: regions and buckets by name, with the model's fingerprint.

A region lists the ops of one kernel; an op written with `*` behind it is recomputed there for
its reader, and stays where it is too. Buckets list parameters in the order they are sent.

Seconds of a fused step as every command reports them.

The lanes of the search know kernels and messages. What a framework's host, a board's power limit
and a precision add is in the price by layers (→ `foretell.predict`), and a fused step keeps the
share of it that the lanes say:

    step = predicted step of eager DDP · lanes of the fused step / lanes of eager DDP

So a plan that fuses nothing takes what `predict` says of plain data parallelism.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import nan
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from foretell import portable
from foretell.cluster import Cluster
from foretell.cost.fused import fused_price
from foretell.cost.fused_regions import assembled
from foretell.errors import InputError, unknown
from foretell.graph import Graph
from foretell.plan import Plan
from foretell.plan.costs import room
from foretell.plan.framework import Running, resolved, running
from foretell.plan.plan import COPY, named_ops
from foretell.plan.program import Piece as Part
from foretell.plan.program import Program, ResolvedStep, StageTasks, graph_of_program
from foretell.predict import Prediction, predict_many
from foretell.search.fusion.lanes import best_messages, communication, ends, ends_waiting, seconds
from foretell.search.fusion.problem import (
    NEAR,
    Memory,
    OpNode,
    Problem,
    Reference,
    bucket_starts,
    from_workload,
    problem_of_graph,
)
from foretell.search.fusion.state import Fusion, edge_fits, fused, require_legal, unfused
from foretell.workload import Workload
from foretell.workload.captured import from_graph

Array = npt.NDArray[np.float64]
Node = tuple[Any, ...]


Whole = npt.NDArray[np.int64]
# torch/nn/parallel/distributed.py: 25 MiB, the first bucket 1 MiB so that sending starts early.
DDP, DDP_FIRST = 25.0 * 2**20, 1.0 * 2**20
# Bytes at which a message of gathered parameters is closed: the best of these is taken.
GATHERED = (0.0, 2.0**20, 2.0**22, 2.0**24, 2.0**26, float("inf"))


class Prices:
    """Prices of regions of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.known: dict[Any, float] = {}
        self.apart: dict[int, float] = {}  # model's seconds of single ops, by their look
        self.queries = 0

    def many(self, groups: Sequence[tuple[Fusion, int]]) -> list[float]:
        """Seconds of groups, each of a state of its own: one question to the model for all."""
        alike, ops, device = self.problem.alike, self.problem.ops, self.problem.device
        found = [self._short(state, g) for state, g in groups]
        keys: list[Any] = [None] * len(groups)
        todo: dict[Any, tuple[tuple[int, ...], Any]] = {}
        for k, (state, g) in enumerate(groups):
            if found[k] is None:
                mine, keys[k], row = region(state, g)
                if keys[k] not in self.known:
                    todo[keys[k]] = (mine, row)
        self.queries += len(todo)
        fresh = {i for mine, _ in todo.values() for i in mine}
        single = {alike[i]: i for i in fresh if alike[i] not in self.apart}
        rows = [
            [single_op_region(self.problem, i) for i in single.values()],
            [row for _, row in todo.values()],
        ]
        apart, took = (
            fused_price(assembled(some), device, learned=self.problem.learned).seconds.tolist()
            if some
            else []
            for some in rows
        )
        self.apart |= dict(zip(single, apart, strict=True))
        for (key, (mine, _)), together in zip(todo.items(), took, strict=True):
            own, each = (sum(ops[i].seconds for i in mine), sum(self.apart[alike[i]] for i in mine))
            self.known[key] = own * together / each if each > 0 else own
        return [self.known[key] if s is None else s for s, key in zip(found, keys, strict=True)]

    def _short(self, state: Fusion, g: int) -> float | None:
        """The price where no model need be asked."""
        if all(state.is_dead(i) for i in state.of(g)):
            return 0.0
        if g in state.members:
            return None
        edges = [edge for _, edge in self.problem.reads[g]]
        return None if state.copied[edges].any() else self.problem.ops[g].seconds


def region(state: Fusion, g: int) -> tuple[tuple[int, ...], Any, Any]:
    """The ops of a group with its copies, a key of its look, and its nodes and edges."""
    problem = state.problem
    own = [i for i in state.of(g) if not state.is_dead(i)]
    ops = sorted({*own, *state.copies(g)})
    return (tuple(ops), *_region_row(problem, ops, {i: state.leaves(i) for i in own}))


def single_op_region(problem: Problem, i: int) -> Any:
    """Nodes and edges of one op that writes what it makes."""
    return _region_row(problem, [i], {i: True})[1]


def _region_row(problem: Problem, ops: list[int], leaves: dict[int, bool]) -> tuple[Any, Any]:
    """Key and row of a region: entering tensors where they are first read, then ops in order."""
    nodes: list[Node] = []
    edges: list[tuple[int, int, int]] = []
    look: list[Any] = []
    place: dict[int, int] = {}
    for i in ops:
        op, sources = problem.ops[i], []
        for j, edge in problem.reads[i]:
            if j not in place:
                made, is_near = problem.ops[j], ops[0] - j <= NEAR
                place[j] = len(nodes)
                nodes.append(_entering(made.elements, made.dtype, made.last, is_near))
                look.append((made.elements, made.dtype, made.last, is_near))
            sources.append((place[j], int(problem.pattern[edge])))
        for entry in op.entries:
            sources.append((len(nodes), entry.pattern))
            nodes.append(_entering(entry.elements, entry.dtype, op.last, False))
        place[i] = len(nodes)
        nodes.append(_node(op, op.bytes if leaves.get(i) else 0.0))
        edges += [(s, place[i], p) for s, p in sources]
        look.append((problem.alike[i], leaves.get(i, False), tuple(sources)))
    return tuple(look), (nodes, edges)


def _entering(elements: float, dtype: str, last: float, is_near: bool) -> Node:
    word = "fresh" if is_near else "input"
    return (word, dtype, elements, elements, 1.0, 0, last, 0.0, 0.0, nan)


def _node(op: OpNode, writes: float) -> Node:
    return (
        op.word, op.dtype, op.elements, op.looped, op.inner, op.across, op.last, writes, op.flops,
        op.seconds,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Buckets:
    """Gradients that are sent together, in the order they are sent."""

    first: Whole  # bucket b has member[first[b]:first[b + 1]]
    member: Whole
    parts: Whole  # messages of each bucket

    def __len__(self) -> int:
        return len(self.first) - 1

    def lists(self) -> list[list[int]]:
        """The gradients of each bucket."""
        return [
            self.member[a:b].tolist() for a, b in zip(self.first[:-1], self.first[1:], strict=True)
        ]

    def but(self, bucket: int, parts: int) -> Buckets:
        """One bucket in so many messages."""
        changed = self.parts.copy()
        changed[bucket] = parts
        return Buckets(self.first, self.member, changed)

    @property
    def key(self) -> bytes:
        """The same for two that send alike."""
        return self.first.tobytes() + self.member.tobytes() + self.parts.tobytes()


def buckets_of(lists: Sequence[Sequence[int]], parts: Sequence[int] | None = None) -> Buckets:
    """Buckets from one list of gradients each."""
    first = np.concatenate([[0], np.cumsum([len(b) for b in lists])]).astype(np.int64)
    member = np.array([g for b in lists for g in b], np.int64)
    return Buckets(first, member, np.array(parts or [1] * len(lists), np.int64))


@dataclass(frozen=True, eq=False)
class Scored:
    """A way to run the step, and how long it takes."""

    fusion: Fusion
    cost: Array  # seconds of each group
    end: Array  # of each group
    compute: float  # end of the last op
    ready: Array  # of each gradient
    buckets: Buckets
    comm_end: float  # end of the last message
    step: float
    gathers: Buckets | None = None  # parameters gathered together, where gradients are sharded
    before: float = 0.0  # seconds of the micro-batches before the last
    launches: float = 0.0  # seconds that the host adds

    @property
    def launch(self) -> float:
        """Seconds that one kernel less to launch saves, about."""
        reference = self.fusion.problem.reference
        if reference is None:
            return 0.0
        host = reference.host * self.fusion.num_groups * self.fusion.problem.repeats
        share = host / (self.compute + self.launches)
        return reference.host * float(portable.power(share, reference.exponent - 1))


@dataclass
class Evaluator:
    """Simulations steps of one problem, and counts how often."""

    problem: Problem
    by_message: bool = False  # the update of a bucket runs as soon as it is through
    sharded: bool = False  # gradients reduced to an owner each, parameters gathered in the forward
    evaluations: int = 0
    prices: Prices = field(init=False)

    def __post_init__(self) -> None:
        self.prices = Prices(self.problem)

    def score(
        self, fusion: Fusion, buckets: Buckets | None = None, cost: Array | None = None
    ) -> Scored:
        """Simulate the step once."""
        self.evaluations += 1
        problem = self.problem
        if cost is None:
            groups, cost = np.unique(fusion.group).tolist(), np.zeros(len(problem))
            cost[groups] = self.prices.many([(fusion, g) for g in groups])
        end = np.zeros(len(problem))
        gathers, busy, before = None, 0.0, 0.0
        if self.sharded:
            gathers, compute, busy = self._gathered(fusion, cost, end)
        else:
            compute = float(ends(fusion.order, cost, end, 0))
        if problem.repeats > 1:  # all micro-batches but the last: nothing of them is sent
            one = float(ends(fusion.order, cost, end, 0))
            before = compute + (problem.repeats - 2) * one
            end, compute = end + before, before + one
        ready = np.maximum(end[fusion.group[problem.producer]], busy)
        if buckets is None:
            buckets = best_buckets(problem, ready, self.laws)
        return self._scored(fusion, cost, end, compute, ready, buckets, gathers, before)

    @property
    def laws(self) -> Array:
        """What the messages of the backward cost."""
        wire = self.problem.wire
        return wire.halves[0] if self.sharded else wire.laws

    @property
    def update(self) -> float:
        """Seconds of the optimizer on one rank."""
        return self.problem.update / (self.problem.wire.ranks if self.sharded else 1)

    def _gathered(self, fusion: Fusion, cost: Array, end: Array) -> tuple[Buckets, float, float]:
        """Parameters as they are read, in the best messages; the ends of compute and wire."""
        found: dict[float, tuple[Buckets, Array]] = {}
        for most in GATHERED:
            gathers = gather_buckets(fusion, most)
            wait = parameter_waits(fusion, gathers, self.problem.wire.halves[1])
            last = float(ends_waiting(fusion.order, cost, wait, end))
            found.setdefault(last, (gathers, wait))
        gathers, wait = found[min(found)]
        compute = float(ends_waiting(fusion.order, cost, wait, end))
        return gathers, compute, float(wait.max())

    def sent(self, scored: Scored, buckets: Buckets) -> Scored:
        """The same groups with other buckets: the compute lane stands."""
        self.evaluations += 1
        s = scored
        return self._scored(
            s.fusion, s.cost, s.end, s.compute, s.ready, buckets, s.gathers, s.before
        )

    def after(
        self, scored: Scored, fusion: Fusion, touched: Sequence[int], buckets: Buckets | None = None
    ) -> Scored:
        """A state a move away, of which only some groups have another price."""
        cost = scored.cost.copy()
        cost[list(touched)] = self.prices.many([(fusion, g) for g in touched])
        return self.score(fusion, buckets, cost)

    def _scored(
        self, fusion: Fusion, cost: Array, end: Array, compute: float, ready: Array,
        buckets: Buckets, gathers: Buckets | None, before: float,
    ) -> Scored:  # fmt: skip
        problem, many = self.problem, len(buckets)
        comm_end, done = np.zeros(many), np.zeros(many)
        step = communication(
            ready, problem.sizes, buckets.first, buckets.member, buckets.parts, self.laws,
            compute, self.update, self.by_message, comm_end, done, 0,
        )  # fmt: skip
        last = float(comm_end[-1]) if many else 0.0
        launches = _launches(fusion, compute)
        step = float(step) + launches
        return Scored(
            fusion, cost, end, compute, ready, buckets, last, step, gathers, before, launches
        )


def _launches(fusion: Fusion, compute: float) -> float:
    """What launching the kernels adds to a step: (computeᵖ + hostᵖ)^(1/p) − compute."""
    reference = fusion.problem.reference
    if reference is None:
        return 0.0
    host = reference.host * fusion.num_groups * fusion.problem.repeats
    p = reference.exponent
    both = portable.power(compute, p) + portable.power(host, p)
    return float(portable.power(both, 1 / p)) - compute


def gather_buckets(fusion: Fusion, most: float) -> Buckets:
    """Parameters in the order the groups that read them run, in messages closed at a size."""
    problem = fusion.problem
    place = np.zeros(len(problem), np.int64)
    place[fusion.order] = np.arange(len(fusion.order))
    order = np.argsort(place[fusion.group[problem.used]], kind="stable")
    return _sized_buckets(problem, order.tolist(), most, most)


def parameter_waits(fusion: Fusion, gathers: Buckets, laws: Array) -> Array:
    """How long each group waits for the parameters it is the first to read."""
    problem, now = fusion.problem, 0.0
    wait = np.zeros(len(problem))
    for bucket in gathers.lists():
        now += seconds(float(problem.sizes[bucket].sum()), laws)
        wait[fusion.group[problem.used[bucket]]] = now
    return wait


def best_buckets(problem: Problem, ready: Array, laws: Array | None = None) -> Buckets:
    """The messages of neighbouring gradients that are through soonest."""
    order = np.argsort(ready, kind="stable")
    begins, _ = best_messages(
        ready[order], problem.sizes[order], problem.wire.laws if laws is None else laws
    )
    first = np.append(begins, len(order))
    return Buckets(first, order, np.ones(len(begins), np.int64))


def sized_buckets(
    problem: Problem, ready: Array, most: float, first: float | None = None
) -> Buckets:
    """Messages of neighbouring gradients, closed at a size; the first may be smaller."""
    order = np.argsort(ready, kind="stable").tolist()
    return _sized_buckets(problem, order, most, most if first is None else first)


def _sized_buckets(problem: Problem, order: list[int], most: float, first: float) -> Buckets:
    """Gradients in an order, in buckets that are closed when they reach a size."""
    firsts = bucket_starts(problem.sizes[order].tolist(), most, first)
    return Buckets(np.array([*firsts, len(order)]), np.array(order), np.ones(len(firsts), np.int64))


def own_buckets(problem: Problem, ready: Array) -> Buckets:
    """Every gradient a message of its own, in the order they become ready."""
    return buckets_of([[g] for g in np.argsort(ready, kind="stable").tolist()])


def ddp(judge: Evaluator) -> Scored:
    """Eager ops and DDP's buckets."""
    start = judge.score(unfused(judge.problem))
    return judge.sent(start, sized_buckets(judge.problem, start.ready, DDP, DDP_FIRST))


class Bounds(NamedTuple):
    """Seconds of a step."""

    proven: float
    overlap: float
    bound: float


def bounds(judge: Evaluator, shortest: Scored) -> Bounds:
    """The bounds of a problem, two of them for the fusion whose ops are shortest."""
    ways = [Evaluator(judge.problem, judge.by_message, s) for s in {False, judge.sharded}]
    least = _launch_bound(judge.problem)
    return Bounds(
        min(
            max(proven_bound(way), least) + (0.0 if way.by_message else way.update) for way in ways
        ),
        *bounds_of_kernels(judge, shortest),
    )


def bounds_of_kernels(judge: Evaluator, scored: Scored) -> tuple[float, float]:
    """Full overlap, and the best messages there could be, with the kernels of one fusion."""
    update = 0.0 if judge.by_message else judge.update
    none = np.zeros(len(judge.problem.sizes))
    compute = judge.problem.repeats * float(scored.cost[scored.fusion.order].sum())
    overlap = max(compute, _communication_bound(judge, none)) + update
    return overlap + scored.launches, bound_of_ops(judge, scored) + scored.launches


def _launch_bound(problem: Problem) -> float:
    """What compute and the launches of kernels that cannot be fused take at the least."""
    if problem.reference is None:
        return 0.0
    p, free = problem.reference.exponent, free_ops(problem)
    kernels = int((~free).sum()) + bool(free.any())
    compute = problem.repeats * float(fixed_seconds(problem).sum())
    host = problem.reference.host * kernels * problem.repeats
    return float(portable.power(portable.power(compute, p) + portable.power(host, p), 1 / p))


def bound_of_ops(judge: Evaluator, shortest: Scored) -> float:
    """The last of the bounds alone: what a search asks for again and again."""
    update = 0.0 if judge.by_message else judge.update
    return max(shortest.compute, _communication_bound(judge, shortest.ready)) + update


def proven_bound(judge: Evaluator) -> float:
    """What no plan of the space is below, the update left out."""
    problem = judge.problem
    least = fixed_seconds(problem)
    behind = _ancestors(problem)
    before = (problem.repeats - 1) * float(least.sum())
    ready = np.array([before + least[_bits(behind[g.op])].sum() for g in problem.gradients])
    return max(before + float(least.sum()), _communication_bound(judge, ready))


def fixed_seconds(problem: Problem) -> Array:
    """Own seconds of ops that nothing may be fused with or copied into; none for all others."""
    return np.where(free_ops(problem), 0.0, [op.seconds for op in problem.ops])


def free_ops(problem: Problem) -> npt.NDArray[np.bool_]:
    """Which ops may be fused with another."""
    free = np.zeros(len(problem), bool)
    for edge in range(len(problem.source)):
        if edge_fits(problem, edge):
            free[[problem.source[edge], problem.target[edge]]] = True
    return free


def _ancestors(problem: Problem) -> list[int]:
    """For each op those it depends on, itself included, as the bits of a number."""
    found: list[int] = []
    for i in range(len(problem)):
        mine = 1 << i
        for j, _ in problem.reads[i]:
            mine |= found[j]
        found.append(mine)
    return found


def _bits(number: int) -> npt.NDArray[np.int64]:
    raw = np.frombuffer(number.to_bytes(number.bit_length() // 8 + 1, "little"), np.uint8)
    return np.flatnonzero(np.unpackbits(raw, bitorder="little"))


def _communication_bound(judge: Evaluator, ready: Array) -> float:
    """The soonest that all gradients can be through, each sent when it is there or later."""
    sizes = judge.problem.sizes
    order = np.argsort(ready, kind="stable")
    later = np.cumsum(sizes[order][::-1])[::-1]
    start, slope = _cheapest_law(judge.laws)
    soonest = float((ready[order] + start + slope * later).max())
    if not judge.sharded:
        return soonest
    first, each = _cheapest_law(judge.problem.wire.halves[1])
    total = float(sizes.sum())
    return max(soonest, first + each * total + start + slope * total)


def _cheapest_law(laws: Array) -> tuple[float, float]:
    return float(laws[:, 0].min()), float(laws[:, 1].min())


_ALONE = ("tp", "pp", "cp", "filter", "channel", "height", "width", "depth")


def lower(judge: Evaluator, scored: Scored, stretch: float = 1.0) -> Graph:
    """One step: groups on a stream, messages on the wire, updates behind them."""
    problem = judge.problem
    facts = {"workload": problem.model, "ranks": problem.wire.ranks}
    return graph_of_program(_program(judge, scored, stretch), facts)


def _program(judge: Evaluator, scored: Scored, stretch: float) -> Program:
    """The step, every task so many times what the lanes of the search give it."""
    out, first = Program(), np.zeros(1, np.int64)
    compute, wire = out.lane(0, "compute", "compute"), out.lane(0, "wire", "comm")
    pieces = [*_gathers(judge, scored), *_groups(judge, scored)]
    out.chains.append([p._replace(seconds=stretch * p.seconds) for p in pieces])
    out.stages.append(StageTasks(0, (compute,), wire, first, first, first, first))
    problem, fusion = judge.problem, scored.fusion
    place = {g: k + bool(scored.before) for k, g in enumerate(fusion.order.tolist())}
    op = "reduce_scatter" if scored.gathers else "all_reduce"
    share, sent = judge.update / max(float(problem.sizes.sum()), 1.0), list[tuple[int, float]]()
    for bucket, parts in zip(scored.buckets.lists(), scored.buckets.parts.tolist(), strict=True):
        size = float(problem.sizes[bucket].sum()) / int(parts)
        made = max(place[int(fusion.group[problem.producer[k]])] for k in bucket)
        for _ in range(int(parts)):
            message = out.end(
                "collective", op, 0, (wire,), stretch * float(seconds(size, judge.laws)),
                "communicate", stages=(0,), parts=(made,), comm_bytes=size,
                name=_message_name(scored, bucket), group=f"0-{problem.wire.ranks - 1}",
            )  # fmt: skip
            sent.append((message, share * size))
    for message, each in sent if judge.by_message else [(sent[-1][0], judge.update)]:
        last = out.end(
            "kernel", "optimizer", 0, (compute,), stretch * each, "update", name="update",
            behind=(message,),
        )  # fmt: skip
    if scored.launches:
        out.end(
            "host", "launch", 0, (compute,), stretch * scored.launches, "update", behind=(last,),
            name="waiting for the host to launch kernels",
        )  # fmt: skip
    return out


def _gathers(judge: Evaluator, scored: Scored) -> list[Part]:
    """Parameters that come while the forward runs."""
    problem, out = judge.problem, list[Part]()
    for bucket in scored.gathers.lists() if scored.gathers else []:
        size = float(problem.sizes[bucket].sum())
        took, group = float(seconds(size, problem.wire.halves[1])), f"0-{problem.wire.ranks - 1}"
        out.append(
            Part("collective", "all_gather", took, after=(), comm_bytes=size, phase="communicate",
                  name=_message_name(scored, bucket), group=group)
        )  # fmt: skip
    return out


def _groups(judge: Evaluator, scored: Scored) -> list[Part]:
    """Kernels in their order, each after those it reads and the last gather of its parameters."""
    fusion, problem = scored.fusion, scored.fusion.problem
    there, ahead = dict[int, int](), scored.gathers.lists() if scored.gathers else []
    out: list[Part] = []
    if scored.before:  # parameters were there for the first of them
        name = "micro-batches before the last"
        out.append(Part("kernel", "fused", scored.before, after=(), name=name, phase="forward"))
    else:
        for at, bucket in enumerate(ahead):
            there |= dict.fromkeys(fusion.group[problem.used[bucket]].tolist(), at)
    place: dict[int, int] = {}
    for g in fusion.order.tolist():
        ops, here = [problem.ops[i] for i in fusion.of(g)], len(ahead) + len(out)
        waits = {place[a] for a in _groups_read(fusion, g)} | ({there[g]} if g in there else set())
        out.append(
            Part("kernel", "fused" if len(ops) > 1 else ops[0].word, float(scored.cost[g]),
                  after=tuple(here - a for a in sorted(waits)),
                  name=" + ".join(op.name for op in ops),
                  phase="backward" if ops[0].side else "forward")
        )  # fmt: skip
        place[g] = here
    return out


def _groups_read(fusion: Fusion, g: int) -> set[int]:
    """Groups that a group reads from; through a copy, those the copy reads from."""
    problem = fusion.problem
    rows = (row for i in (*fusion.of(g), *fusion.copies(g)) for row in problem.reads[i])
    return {int(fusion.group[j]) for j, edge in rows if not fusion.copied[edge]} - {g}


def _message_name(scored: Scored, bucket: list[int]) -> str:
    names = [scored.fusion.problem.gradients[k].name for k in bucket]
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"


def plan_of(scored: Scored) -> Plan:
    """The plan that runs a step so, on every rank of the wire."""
    problem, fusion = scored.fusion.problem, scored.fusion
    edges = fusion.copied.nonzero()[0].tolist()
    copying = {int(fusion.group[problem.target[e]]) for e in edges if fusion.is_copied(e)}
    regions = tuple(
        tuple(problem.ops[i].name for i in fusion.of(g))
        + tuple(f"{problem.ops[i].name}{COPY}" for i in sorted(fusion.copies(g)))
        for g in sorted({*fusion.members, *copying})
    )
    buckets = tuple(
        tuple(problem.gradients[k].name for k in bucket) for bucket in scored.buckets.lists()
    )
    late = tuple(problem.ops[i].name for i in fusion.late.nonzero()[0].tolist())
    parts = scored.buckets.parts
    return Plan(
        dp=problem.wire.ranks,
        zero=2 if scored.gathers else 0,
        recompute="full" if problem.recompute else "none",
        regions=regions,
        late=late,
        buckets=buckets,
        parts=tuple(parts.tolist()) if parts.max(initial=1) > 1 else (),
        model=problem.made_for(named_ops(regions, late)),
    )


def fusion_of(plan: Plan, problem: Problem) -> Fusion:
    """The state a plan stands for, or an error that says what is wrong with it."""
    _require_model(plan, problem)
    places = {op.name: i for i, op in enumerate(problem.ops)}
    own = [[n for n in region if not n.endswith(COPY)] for region in plan.regions]
    for name, times in Counter(n for region in own for n in region).items():
        if name not in places:
            raise unknown("op in a region of the plan", name, places)
        if times > 1:
            raise InputError(
                f"`{name}` is in {times} regions of the plan",
                hint=f"name it once; write `{name}{COPY}` where it is to be recomputed",
            )
    groups = [tuple(places[n] for n in region) for region in own]
    copies = [e for r in plan.regions for e in _copied_edges(r, places, problem)]
    state = fused(problem, groups, copies)
    return require_legal(state.put_off(_late(plan, places)) if plan.late else state)


def _late(plan: Plan, places: Mapping[str, int]) -> list[int]:
    for name in plan.late:
        if name not in places:
            raise unknown("op that the plan puts off", name, places)
    return [places[name] for name in plan.late]


def _copied_edges(
    region: tuple[str, ...], places: Mapping[str, int], problem: Problem
) -> list[int]:
    """The edges from a region's copies to those of its ops and copies that read them."""
    inside = {places[n.removesuffix(COPY)] for n in region if n.removesuffix(COPY) in places}
    found: list[int] = []
    for name in (n.removesuffix(COPY) for n in region if n.endswith(COPY)):
        if name not in places:
            raise unknown("op in a region of the plan", name, places)
        edges = [edge for reader, edge in problem.readers[places[name]] if reader in inside]
        if not edges:
            raise InputError(f"nothing in the region {'+'.join(region)} reads `{name}`")
        # A reader whose loop a copy does not fit reads what was written to memory.
        found += [e for e in edges if edge_fits(problem, e)] or edges
    return found


def buckets_from(plan: Plan, problem: Problem) -> Buckets:
    """The buckets of a plan; every gradient is in one of them."""
    _require_model(plan, problem)
    places = {g.name: k for k, g in enumerate(problem.gradients)}
    held = Counter(name for bucket in plan.buckets for name in bucket)
    for name, times in held.items():
        if name not in places:
            raise unknown("parameter in a bucket of the plan", name, places)
        if times > 1:
            raise InputError(f"`{name}` is in {times} buckets of the plan", hint="send it once")
    left = [name for name in places if name not in held]
    if left:
        raise InputError(
            f"`{left[0]}` is in no bucket of the plan"
            + f", nor {len(left) - 1} more" * (len(left) > 1),
            hint="list every trained parameter in one bucket",
        )
    if plan.parts and (len(plan.parts) != len(plan.buckets) or min(plan.parts) < 1):
        raise InputError(
            f"the parts of {len(plan.buckets)} buckets are {list(plan.parts)}",
            hint="give each bucket one part or more",
        )
    return buckets_of([[places[n] for n in bucket] for bucket in plan.buckets], plan.parts)


def _require_model(plan: Plan, problem: Problem) -> None:
    own = problem.made_for(named_ops(plan.regions, plan.late))
    if plan.model and plan.model != own:
        raise InputError(
            f"the plan was made for model {plan.model}; `{problem.model}` is {own}",
            hint="plan again for this model, batch and number format",
        )


def workload_of(model: Workload | Graph) -> Workload:
    """The layers of a model; those a captured step is cut into."""
    return from_graph(model) if isinstance(model, Graph) else model


def eager_plan(workload: Workload, plan: Plan | None = None) -> Plan:
    """Plain DDP in the precision a plan asks for: what a fused plan is made from."""
    plan = plan or Plan()
    eager = Plan(
        framework=plan.framework or "ddp", precision=plan.precision, dtype=plan.dtype,
        optimizer=plan.optimizer, optimizer_kernels=plan.optimizer_kernels,
        grad_dtype=plan.grad_dtype,
    )  # fmt: skip
    return resolved(eager, workload)


def run_of(workload: Workload, plan: Plan | None = None) -> Running:
    """The framework profile that a fused plan of a workload runs under."""
    return running(eager_plan(workload, plan))


def eager_plans(problem: Problem, workload: Workload, plan: Plan | None = None) -> list[Plan]:
    """The step of a problem while nothing is fused: in plain DDP, then sharded where it is."""
    samples = problem.samples or workload.batch
    eager = eager_plan(workload, plan).but(
        dp=problem.wire.ranks,
        recompute="full" if problem.recompute else "none",
        micro_batch=samples,
        global_batch=samples * problem.repeats * problem.wire.ranks,
    )
    return [eager, *([eager.but(zero=problem.zero)] if problem.zero else [])]


def with_reference(problem: Problem, eager: Sequence[Prediction], cluster: Cluster) -> Problem:
    """The problem with what `predict` says of its eager plans: time and memory."""
    plain, run = eager[0], running(eager[0].plan)
    host = run.issue_seconds("elementwise", False) * cluster.calibration.host
    reference = Reference(plain.step, host, run.profile.exponent, plain.away)
    kept = unfused(problem).held - problem.held
    return replace(problem, reference=reference, held=eager[-1].peak - kept, room=room(cluster))


def scale_of(problem: Problem) -> float:
    """Reported seconds of a step over those of its lanes; 1 where nothing else is known."""
    if problem.reference is None:
        return 1.0
    return problem.reference.seconds / ddp(Evaluator(problem)).step


def fuses(plan: Plan) -> bool:
    """Whether a plan says what becomes of single ops or messages: more than layers and sizes."""
    made = bool(plan.model) and bool(plan.buckets) and not plan.sync and not plan.groups
    said = plan.regions or plan.late or plan.parts or plan.update == "by-message"
    return bool(said) or (made and _is_plain(plan))


def _is_plain(plan: Plan) -> bool:
    """Whether only data is split."""
    degrees = plan.degrees()
    return all(degrees.get(axis, 1) == 1 for axis in _ALONE) and not plan.stages


@dataclass(frozen=True, eq=False)
class FusedStep(ResolvedStep):
    """A plan of fused ops and messages of its own, evaluated."""

    judge: Evaluator
    scored: Scored

    @classmethod
    def of(
        cls, plan: Plan, problem: Problem, model: Workload | Graph, cluster: Cluster
    ) -> FusedStep:
        """The step of a plan that splits nothing but data."""
        judge, scored = evaluated(plan, problem)
        workload = workload_of(_with_batch(plan, model))
        return cls(_resolved_plan(plan, workload), workload, cluster, judge, scored)

    @property
    def advice(self) -> str:
        """What to do where it does not fit."""
        return "accumulate more micro-batches, recompute, or zero=2"

    @property
    def away(self) -> dict[str, float]:
        """How far the step is from what was measured while nothing is fused."""
        assert self.judge.problem.reference is not None
        return self.judge.problem.reference.away

    @property
    def slowdown(self) -> float:
        """What the step that it is scaled by has already."""
        return 1.0

    def program(self, detail: str) -> Program:
        """The step with what a framework's host and a board's power limit add."""
        return _program(self.judge, self.scored, scale_of(self.judge.problem))

    def memory(self) -> tuple[float, float, dict[str, float]]:
        """Bytes of a rank, how many are missing there, and what they are."""
        held, problem = self.scored.fusion.held, self.judge.problem
        parts = {"state": problem.held, "activations": held - problem.held}
        return held, max(held - problem.room, 0.0), parts


def evaluated(plan: Plan, problem: Problem) -> tuple[Evaluator, Scored]:
    """The way to fuse that a plan says, simulated."""
    judge = Evaluator(problem, plan.update == "by-message", plan.zero == 2)
    buckets = buckets_from(plan, problem) if plan.buckets else None
    return judge, judge.score(fusion_of(plan, problem), buckets)


def require_plain(plan: Plan, cluster: Cluster) -> None:
    """Raise where a plan of fused ops splits more than data."""
    beside = [f"{axis}={n}" for axis, n in plan.degrees().items() if n > 1 and axis != "dp"]
    beside += [f for f in ("sync", "stages", "groups", "shares", "whatifs") if getattr(plan, f)]
    beside += [f"zero={plan.zero}"] if plan.zero not in (0, 2) else []
    beside += [f"recompute={plan.recompute}"] if plan.recompute not in ("none", "full") else []
    if beside:
        raise InputError(
            f"fused ops or messages of a plan beside {', '.join(beside)}",
            hint="they are priced for a plain data-parallel step",
        )
    if plan.dp != cluster.size:
        raise InputError(
            f"dp={plan.dp} makes {plan.dp} ranks; `{cluster.name}` has {cluster.size}",
            hint="a plan of fused ops is made for all ranks of its cluster",
        )


def _with_batch(plan: Plan, model: Workload | Graph) -> Workload | Graph:
    """The workload with the samples a rank has in the plan."""
    if isinstance(model, Graph) or not plan.global_batch:
        return model
    return replace(model, batch=plan.global_batch // plan.dp)


def problem_of(plan: Plan, model: Workload | Graph, cluster: Cluster) -> Problem:
    """The step of a plan, with matmuls open to a compiler where it fuses any."""
    model = _with_batch(plan, model)
    if isinstance(model, Graph):
        make = partial(problem_of_graph, model, cluster, learned=True, zero=plan.zero)
    else:
        held, run = _memory(plan, model), run_of(model, plan)
        make = partial(from_workload, model, cluster, learned=True, memory=held, run=run)
    problem = make(epilogue=False)
    kinds = dict(zip((op.name for op in problem.ops), problem.kinds, strict=True))
    inside = (name.removesuffix(COPY) for region in plan.regions for name in region)
    if any(kinds.get(name) == "template" for name in inside):
        problem = make(epilogue=True)
    workload = workload_of(model)
    plans = eager_plans(problem, workload, plan)
    return with_reference(problem, predict_many(plans, workload, cluster, advises=False), cluster)


def _memory(plan: Plan, model: Workload) -> Memory:
    """What the plan does to fit into memory."""
    repeats = model.batch // plan.micro_batch if plan.micro_batch else 1
    if plan.micro_batch and model.batch % plan.micro_batch:
        raise InputError(
            f"{model.batch} samples of a rank in micro-batches of {plan.micro_batch}",
            hint="give a micro-batch that divides them",
        )
    return Memory(repeats, plan.recompute == "full", plan.zero)


def _resolved_plan(plan: Plan, workload: Workload) -> Plan:
    """The plan with the batch, framework and precision that it runs in."""
    named = eager_plan(workload, plan)
    return plan.but(
        global_batch=plan.global_batch or workload.batch * plan.dp,
        framework=named.framework, precision=named.precision, dtype=named.dtype,
        optimizer=named.optimizer,
    )  # fmt: skip
