"""How long a step takes, given what is fused and what is sent together.

An evaluation simulates both lanes of the step once. Where no buckets are given, the best ones for
these groups are found on the way (→ `lanes.packed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from foretell import portable
from foretell.search.fusion.lanes import ends, ends_waiting, packed, seconds, talk
from foretell.search.fusion.prices import Prices
from foretell.search.fusion.problem import Problem
from foretell.search.fusion.state import Fusion

Array = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]


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
        return self._told(fusion, cost, end, compute, ready, buckets, gathers, before)

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
        return self._told(s.fusion, s.cost, s.end, s.compute, s.ready, buckets, s.gathers, s.before)

    def after(
        self, scored: Scored, fusion: Fusion, touched: Sequence[int], buckets: Buckets | None = None
    ) -> Scored:
        """A state a move away, of which only some groups have another price."""
        cost = scored.cost.copy()
        cost[list(touched)] = self.prices.groups(fusion, touched)
        return self.score(fusion, buckets, cost)

    def _told(
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


# Bytes at which a message of gathered parameters is closed: the best of these is taken.
GATHERED = (0.0, 2.0**20, 2.0**22, 2.0**24, 2.0**26, float("inf"))


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
