"""How long a step takes, given what is fused and what is sent together; prices asked in batches.

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
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import nan
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from foretell import portable
from foretell.cost.fused import fused_price
from foretell.cost.fused_regions import Regions, assembled
from foretell.search.fusion.lanes import ends, ends_waiting, packed, seconds, talk
from foretell.search.fusion.problem import NEAR, Piece, Problem
from foretell.search.fusion.state import Fusion, edge_fits

Array = npt.NDArray[np.float64]
Node = tuple[Any, ...]


Whole = npt.NDArray[np.int64]
# Bytes at which a message of gathered parameters is closed: the best of these is taken.
GATHERED = (0.0, 2.0**20, 2.0**22, 2.0**24, 2.0**26, float("inf"))


class Prices:
    """Prices of regions of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.known: dict[Any, float] = {}
        self.apart: dict[int, float] = {}  # model's seconds of single ops, by their look
        self.asked = 0

    def groups(self, state: Fusion, groups: Sequence[int]) -> list[float]:
        """Seconds of some groups of a state."""
        return self.many([(state, g) for g in groups])

    def many(self, asked: Sequence[tuple[Fusion, int]]) -> list[float]:
        """Seconds of groups, each of a state of its own: one question to the model for all."""
        found = [self._short(state, g) for state, g in asked]
        todo: dict[Any, tuple[tuple[int, ...], Any]] = {}
        keys: list[Any] = [None] * len(asked)
        for k, (state, g) in enumerate(asked):
            if found[k] is None:
                ops, key, row = region(state, g)
                keys[k] = key
                if key not in self.known:
                    todo[key] = (ops, row)
        self._ask(todo)
        return [self.known[key] if s is None else s for s, key in zip(found, keys, strict=True)]

    def all(self, state: Fusion) -> Array:
        """Seconds of every group, by its number."""
        cost = np.zeros(len(self.problem))
        reps = np.unique(state.group).tolist()
        cost[reps] = self.groups(state, reps)
        return cost

    def _short(self, state: Fusion, g: int) -> float | None:
        """The price where no model need be asked."""
        if all(state.is_dead(i) for i in state.of(g)):
            return 0.0
        if g in state.members:
            return None
        edges = [edge for _, edge in self.problem.reads[g]]
        return None if state.copied[edges].any() else self.problem.ops[g].seconds

    def _ask(self, todo: dict[Any, tuple[tuple[int, ...], Any]]) -> None:
        if not todo:
            return
        self.asked += len(todo)
        self._ask_apart({i for ops, _ in todo.values() for i in ops})
        together = self._model([row for _, row in todo.values()])
        for (key, (ops, _)), took in zip(todo.items(), together.tolist(), strict=True):
            own = sum(self.problem.ops[i].seconds for i in ops)
            apart = sum(self.apart[self.problem.alike[i]] for i in ops)
            self.known[key] = own * took / apart if apart > 0 else own

    def _ask_apart(self, ops: Iterable[int]) -> None:
        todo = {self.problem.alike[i]: i for i in ops if self.problem.alike[i] not in self.apart}
        if todo:
            rows = [alone(self.problem, i) for i in todo.values()]
            self.apart |= dict(zip(todo, self._model(rows).tolist(), strict=True))

    def _model(self, rows: list[Any]) -> Array:
        return model_seconds(assembled(rows), self.problem)


def model_seconds(regions: Regions, problem: Problem) -> Array:
    """What the model of fused regions says: the network where asked for, else the formula."""
    return fused_price(regions, problem.device, learned=problem.learned).seconds


def region(state: Fusion, g: int) -> tuple[tuple[int, ...], Any, Any]:
    """The ops of a group with its copies, a key of its look, and its nodes and edges."""
    problem = state.problem
    own = [i for i in state.of(g) if not state.is_dead(i)]
    ops = sorted({*own, *state.copies(g)})
    return (tuple(ops), *_drawn(problem, ops, {i: state.leaves(i) for i in own}))


def alone(problem: Problem, i: int) -> Any:
    """Nodes and edges of one op that writes what it makes."""
    return _drawn(problem, [i], {i: True})[1]


def _drawn(problem: Problem, ops: list[int], leaves: dict[int, bool]) -> tuple[Any, Any]:
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


def _node(op: Piece, writes: float) -> Node:
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
    through: float  # end of the last message
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
        cost = self.prices.all(fusion) if cost is None else cost
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
            wait = waits(fusion, gathers, self.problem.wire.halves[1])
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
        cost[list(touched)] = self.prices.groups(fusion, touched)
        return self.score(fusion, buckets, cost)

    def _scored(
        self, fusion: Fusion, cost: Array, end: Array, compute: float, ready: Array,
        buckets: Buckets, gathers: Buckets | None, before: float,
    ) -> Scored:  # fmt: skip
        problem, many = self.problem, len(buckets)
        through, done = np.zeros(many), np.zeros(many)
        step = talk(
            ready, problem.sizes, buckets.first, buckets.member, buckets.parts, self.laws,
            compute, self.update, self.by_message, through, done, 0,
        )  # fmt: skip
        last = float(through[-1]) if many else 0.0
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
    return _closed(problem, order.tolist(), most, most)


def waits(fusion: Fusion, gathers: Buckets, laws: Array) -> Array:
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
    begins, _ = packed(
        ready[order], problem.sizes[order], problem.wire.laws if laws is None else laws
    )
    first = np.append(begins, len(order))
    return Buckets(first, order, np.ones(len(begins), np.int64))


def sized_buckets(
    problem: Problem, ready: Array, most: float, first: float | None = None
) -> Buckets:
    """Messages of neighbouring gradients, closed at a size; the first may be smaller."""
    order = np.argsort(ready, kind="stable").tolist()
    return _closed(problem, order, most, most if first is None else first)


def _closed(problem: Problem, order: list[int], most: float, first: float) -> Buckets:
    """Gradients in an order, in buckets that are closed when they reach a size."""
    lists: list[list[int]] = [[]]
    held, limit = 0.0, first
    for g in order:
        lists[-1].append(g)
        held += problem.sizes[g]
        if held >= limit:
            lists.append([])
            held, limit = 0.0, most
    return buckets_of([b for b in lists if b])


def own_buckets(problem: Problem, ready: Array) -> Buckets:
    """Every gradient a message of its own, in the order they become ready."""
    return buckets_of([[g] for g in np.argsort(ready, kind="stable").tolist()])


class Bounds(NamedTuple):
    """Seconds of a step."""

    proven: float
    overlap: float
    bound: float


def bounds(judge: Evaluator, shortest: Scored) -> Bounds:
    """The bounds of a problem, two of them for the fusion whose ops are shortest."""
    ways = [Evaluator(judge.problem, judge.by_message, s) for s in {False, judge.sharded}]
    least = _launched(judge.problem)
    return Bounds(
        min(max(proven(way), least) + (0.0 if way.by_message else way.update) for way in ways),
        *of_kernels(judge, shortest),
    )


def of_kernels(judge: Evaluator, scored: Scored) -> tuple[float, float]:
    """Full overlap, and the best messages there could be, with the kernels of one fusion."""
    update = 0.0 if judge.by_message else judge.update
    none = np.zeros(len(judge.problem.sizes))
    compute = judge.problem.repeats * float(scored.cost[scored.fusion.order].sum())
    overlap = max(compute, _through(judge, none)) + update
    return overlap + scored.launches, conditional(judge, scored) + scored.launches


def _launched(problem: Problem) -> float:
    """What compute and the launches of kernels that cannot be fused take at the least."""
    if problem.reference is None:
        return 0.0
    p, free = problem.reference.exponent, free_ops(problem)
    kernels = int((~free).sum()) + bool(free.any())
    compute = problem.repeats * float(fixed_seconds(problem).sum())
    host = problem.reference.host * kernels * problem.repeats
    return float(portable.power(portable.power(compute, p) + portable.power(host, p), 1 / p))


def conditional(judge: Evaluator, shortest: Scored) -> float:
    """The last of the bounds alone: what a search asks for again and again."""
    update = 0.0 if judge.by_message else judge.update
    return max(shortest.compute, _through(judge, shortest.ready)) + update


def proven(judge: Evaluator) -> float:
    """What no plan of the space is below, the update left out."""
    problem = judge.problem
    least = fixed_seconds(problem)
    behind = _ancestors(problem)
    before = (problem.repeats - 1) * float(least.sum())
    ready = np.array([before + least[_bits(behind[g.op])].sum() for g in problem.gradients])
    return max(before + float(least.sum()), _through(judge, ready))


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


def _through(judge: Evaluator, ready: Array) -> float:
    """The soonest that all gradients can be through, each sent when it is there or later."""
    sizes = judge.problem.sizes
    order = np.argsort(ready, kind="stable")
    later = np.cumsum(sizes[order][::-1])[::-1]
    start, slope = _least(judge.laws)
    soonest = float((ready[order] + start + slope * later).max())
    if not judge.sharded:
        return soonest
    first, each = _least(judge.problem.wire.halves[1])
    total = float(sizes.sum())
    return max(soonest, first + each * total + start + slope * total)


def _least(laws: Array) -> tuple[float, float]:
    return float(laws[:, 0].min()), float(laws[:, 1].min())
