"""The shortest repeating pattern: modulo scheduling by a solver, and exactly over states.

A repeating pattern by modulo scheduling: every block once for each micro-batch it advances.

With period `P`, block `b` of the k-th repetition starts at `o_b + P·(q_b + k)`, `0 ≤ o_b < P`: `o`
is its place in the ring of time, `q` its lap. In a block graph with copies for each micro-batch
advanced:

    a, b on one device:  o_a + t_a ≤ o_b, o_b + t_b ≤ o_a + P, or the reverse → `_add_device_order`
    b waits for a:       q_b − q_a ≥ c + [o_b < o_a + r] + [o_b + P < o_a + r],
                         where t_a + lag = c·P + r,  0 ≤ r < P                       → `_add_wait`
    memory of device d:  Σ_c change_c · ([c before b] − q_c) + rise_b ≤ capacity_d
                                                                               → `_add_memory_limit`

The last sum is what the device holds as `b` starts, in every repetition: all changes of a
micro-batch cancel, so the number of the repetition falls out. For a fixed `P` everything is
linear, and what is feasible for `P` stays so for `P + 1` (same `o`, same `q`): one infeasible
period rules out all below it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product
from math import ceil, lcm
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretell.search.schedule.integer_problem import (
    MAX_UNROLL,
    Budget,
    IntegerProblem,
    Status,
    residences,
    solve,
    solver,
    with_copies,
)

Goal = Literal["any", "latency", "residence", "early"]
_AMOUNTS = 1 << 20  # amounts of memory told apart where a goal weighs them
GOALS: tuple[Goal, ...] = ("any", "latency", "residence", "early")  # each completes differently


@dataclass(frozen=True)
class Repetend:
    """A pattern that advances `unroll` micro-batches every `period` ticks."""

    period: int
    unroll: int
    start: tuple[int, ...]  # ticks, of copy j of block i at i * unroll + j

    @property
    def laps(self) -> tuple[int, ...]:
        """How many periods each block starts late."""
        return tuple(s // self.period for s in self.start)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where in the ring each block starts."""
        return tuple(s % self.period for s in self.start)


@dataclass(frozen=True)
class _PatternModel:
    """The solver's model and its variables."""

    cp: Any
    ticks: IntegerProblem  # with copies
    period: int
    offset: list[Any]
    lap: list[Any]
    before: dict[tuple[int, int], Any]  # (a, b) on a common device: a starts first in the ring


def solve_pattern(
    base: IntegerProblem, unroll: int, period: int, goal: Goal, budget: Budget, limit: float
) -> tuple[Status, Repetend | None]:
    """A pattern of this period, the best for a goal; or the news that there is none."""
    ticks = with_copies(base, unroll)
    if any(t > period for t in ticks.time):
        return "none", None
    model = _pattern_model(ticks, unroll, period)
    _set_objective(model, goal)
    status, engine = solve(model.cp, budget, limit)
    if status in ("none", "unknown"):
        return status, None
    value = engine.value
    start = [value(o) + period * value(q) for o, q in zip(model.offset, model.lap, strict=True)]
    return status, Repetend(period, unroll, tuple(start))


def _pattern_model(ticks: IntegerProblem, unroll: int, period: int) -> _PatternModel:
    num = len(ticks.time)
    cp = solver().CpModel()
    most = 2 * num + sum(lag for waits in ticks.after for _, lag in waits) // period
    offset = [cp.new_int_var(0, period - 1, "") for _ in range(num)]
    lap = [cp.new_int_var(-most, most, "") for _ in range(num)]
    model = _PatternModel(cp, ticks, period, offset, lap, {})
    # the ring may be turned, so one block is pinned; the last of the longest makes proofs shortest
    longest = max(range(0, num, unroll), key=lambda i: (ticks.time[i], i))
    cp.add(offset[longest] == 0)
    for root in _free_lap_roots(ticks, unroll):
        cp.add(lap[root] == 0)
    _add_device_order(model)
    is_path = all(len(a) <= 1 for a in ticks.after) and all(len(f) <= 1 for f in ticks.followers)
    for i, waits in enumerate(ticks.after):
        for j, lag in waits:
            _add_wait(model, i, j, lag, is_path)
    _add_copy_order(model, unroll)
    for device in range(len(ticks.capacity)):
        _add_memory_limit(model, device)
    return model


def _free_lap_roots(ticks: IntegerProblem, unroll: int) -> list[int]:
    """One block of each part of the graph that may run a lap later without any change."""
    part = list(range(len(ticks.time)))
    ties = [(i, j) for i, waits in enumerate(ticks.after) for j, _ in waits]
    ties += [(i, i - i % unroll) for i in part]  # copies take turns
    for _ in part:
        for i, j in ties:
            part[i] = part[j] = min(part[i], part[j])
    return [
        root  # whose part takes and gives back as much on every device
        for root in sorted(set(part))
        if not any(sum(c for i, _, c in held if part[i] == root) for held in ticks.held)
    ] or [0]


def _add_device_order(model: _PatternModel) -> None:
    ticks, cp, o, period = model.ticks, model.cp, model.offset, model.period
    pairs = sorted({(a, b) for on in ticks.by_device for a in on for b in on if a < b})
    for a, b in pairs:
        first = cp.new_bool_var("")
        model.before[a, b], model.before[b, a] = first, ~first
        for x, y, literal in ((a, b, first), (b, a, ~first)):
            gap = cp.add_linear_constraint(o[y] - o[x], ticks.time[x], period - ticks.time[y])
            gap.only_enforce_if(literal)


def _add_wait(model: _PatternModel, block: int, on: int, lag: int, is_path: bool) -> None:
    """On a path nothing is gained by waiting longer than needed: offsets fix the laps."""
    cp, o, period = model.cp, model.offset, model.period
    laps = model.lap[block] - model.lap[on]
    whole, rest = divmod(model.ticks.time[on] + lag, period)
    if not lag and (on, block) in model.before:
        needed: Any = model.before[block, on]
        whole, rest = 0, 0
    else:
        one, two = cp.new_bool_var(""), cp.new_bool_var("")
        cp.add_implication(two, one)
        for literal, turn in ((one, 0), (two, period)):
            cp.add(o[block] - o[on] >= rest - turn).only_enforce_if(~literal)
            if is_path:
                cp.add(o[block] - o[on] < rest - turn).only_enforce_if(literal)
        needed = one + two
    cp.add(laps == whole + needed) if is_path else cp.add(laps >= whole + needed)


def _add_copy_order(model: _PatternModel, unroll: int) -> None:
    """Copies of a block start in their order: any schedule can be renamed so."""
    for i in range(0, len(model.lap), unroll):
        for j in range(unroll if unroll > 1 else 0):
            a, b = i + j, i + (j + 1) % unroll
            turn = 1 if j == unroll - 1 else 0
            model.cp.add(model.lap[b] + turn - model.lap[a] >= model.before[b, a])


def _add_memory_limit(model: _PatternModel, device: int) -> None:
    room, held = model.ticks.capacity[device], model.ticks.held[device]
    if room is None:
        return
    for block, rise, _ in held:
        if rise > 0:
            others = sum(c * model.before[i, block] for i, _, c in held if i != block and c)
            laps = sum(c * model.lap[i] for i, _, c in held if c)
            model.cp.add(others - laps + rise <= room)


def _set_objective(model: _PatternModel, goal: Goal) -> None:
    """What to make small among patterns of one period: each leads to another completion."""
    if goal == "any":
        return
    ticks, cp = model.ticks, model.cp
    start = [o + model.period * q for o, q in zip(model.offset, model.lap, strict=True)]
    span = model.period * (4 * len(start) + 4)
    first, last = cp.new_int_var(-span, span, ""), cp.new_int_var(-span, span, "")
    for i, s in enumerate(start):
        if not ticks.after[i]:
            cp.add(first <= s)
        if not ticks.followers[i]:
            cp.add(last >= s + ticks.time[i])
    latency = last - first
    if goal == "latency":
        cp.minimize(latency)
    elif goal == "early":
        cp.minimize(len(start) * latency + sum(start) - len(start) * first)
    else:
        most = max((abs(c) for held in ticks.held for _, _, c in held), default=0)
        unit = -(-most // _AMOUNTS) or 1  # bytes are too fine for the solver's integers
        kept = [-(c // unit) * start[i] for held in ticks.held for i, _, c in held if c // unit]
        cp.minimize(sum(kept) + latency)


def pattern_fits_memory(base: IntegerProblem, repetend: Repetend) -> bool:
    """Whether the pattern's memory fits, in every repetition."""
    ticks = with_copies(base, repetend.unroll)
    offset, lap = repetend.offsets, repetend.laps
    for room, held in zip(ticks.capacity, ticks.held, strict=True):
        for block, rise, _ in held if room is not None else ():
            before = sum(c * ((offset[i] < offset[block]) - lap[i]) for i, _, c in held)
            if room is not None and rise > 0 and before + rise > room:
                return False
    return True


# The least period of a pattern whose laps and order on every device are kept.
#
# Every wait and every pair of neighbours in a device's ring says `o_b ≥ o_a + length − laps · P`.
# Around a cycle the starts cancel: `P ≥ Σ length / Σ laps`, and the largest such ratio is reached.
# So from a period too short, the next candidate is the ratio of any cycle that contradicts it
# (`rate_bound_by_states`).


class TimingEdge(NamedTuple):
    """`then` starts at least `length` less `laps` periods after `first` starts."""

    first: int
    then: int
    length: Fraction
    laps: int


def tighten(base: IntegerProblem, repetend: Repetend, floor: Fraction) -> Repetend:
    """The same order in the fewest whole ticks."""
    found = timing_edges(base, repetend, base.time, base.after)
    period = -(-least_period(found, len(repetend.start), floor) // 1)
    if period >= repetend.period:
        return repetend
    starts, _ = _earliest_starts(found, len(repetend.start), Fraction(period))
    laps = repetend.laps
    whole = tuple(int(s) + int(period) * laps[i] for i, s in enumerate(starts))
    return Repetend(int(period), repetend.unroll, whole)


def timing_edges(
    base: IntegerProblem,
    repetend: Repetend,
    time: Sequence[float],
    after: Sequence[Sequence[tuple[int, float]]],
) -> list[TimingEdge]:
    """What a pattern says of its starts, with the times and lags given (of single blocks)."""
    ticks, unroll, laps = with_copies(base, repetend.unroll), repetend.unroll, repetend.laps
    found = []
    for block, waits in enumerate(after):
        for on, lag in waits:
            length = Fraction(time[on]) + Fraction(lag)
            for j in range(unroll):
                i, k = on * unroll + j, block * unroll + j
                found.append(TimingEdge(i, k, length, laps[k] - laps[i]))
    for on_device in ticks.by_device:
        ring = sorted(on_device, key=repetend.offsets.__getitem__)
        for a, b in zip(ring, ring[1:] + ring[:1], strict=True):
            found.append(TimingEdge(a, b, Fraction(time[a // unroll]), int(b == ring[0])))
    return found


def least_period(found: Sequence[TimingEdge], num: int, floor: Fraction) -> Fraction:
    """The least period, and not below `floor`, that the edges allow."""
    period = floor
    while True:
        _, cycle = _earliest_starts(found, num, period)
        if not cycle:
            return period
        period = sum((e.length for e in cycle), Fraction(0)) / sum(e.laps for e in cycle)


def _earliest_starts(
    found: Sequence[TimingEdge], num: int, period: Fraction
) -> tuple[list[Fraction], list[TimingEdge]]:
    """The earliest starts, or a cycle that this period is too short for."""
    scale = lcm(period.denominator, *(e.length.denominator for e in found))
    weight = [int(e.length * scale) - int(e.laps * period * scale) for e in found]
    start, reason = [0] * num, [-1] * num
    for _ in range(num + 1):
        moved = -1
        for k, edge in enumerate(found):
            if start[edge.first] + weight[k] > start[edge.then]:
                start[edge.then] = start[edge.first] + weight[k]
                reason[edge.then], moved = k, edge.then
        if moved < 0:
            return [Fraction(s, scale) for s in start], []
    return [], _critical_cycle(found, reason, moved)


def _critical_cycle(
    found: Sequence[TimingEdge], reason: Sequence[int], last: int
) -> list[TimingEdge]:
    """The cycle that the reasons of the last move lead back into."""
    for _ in reason:
        last = found[reason[last]].first
    cycle = [found[reason[last]]]
    while cycle[-1].first != last:
        cycle.append(found[reason[cycle[-1].first]])
    return cycle


# Patterns at the lower bound without a solver: blocks in order, each in the first place that is
# free.
#
# Tried in four ways: blocks of several devices first or in their turn, and the earliest place or
# the earliest that leaves no new gap. On pipelines without sharded blocks this is 1F1B, and finds
# at once what the solver would.


Occupied = list[
    list[tuple[int, int]]
]  # by device: what is taken of the ring, as (start, end) pairs


def greedy_patterns(ticks: IntegerProblem, period: int) -> Iterator[Repetend]:
    """Patterns of this period that fit into memory, as far as found without search."""
    for sharded_first, snug in product((False, True), (False, True)):
        start = _greedy_starts(ticks, period, sharded_first, snug)
        if start is not None:
            found = Repetend(period, 1, start)
            if pattern_fits_memory(ticks, found):
                yield found


def _greedy_starts(
    ticks: IntegerProblem, period: int, sharded_first: bool, snug: bool
) -> tuple[int, ...] | None:
    taken: Occupied = [[] for _ in ticks.capacity]
    ring: dict[int, int] = {}
    if sharded_first:
        for block in ticks.order:
            if len(ticks.devices[block]) > 1:
                offset = _first_free_offset(ticks, taken, block, 0, period, True)
                if offset is None:
                    return None
                ring[block] = offset
                _occupy(ticks, taken, block, offset, period)
    start = [0] * len(ticks.time)
    for block in ticks.order:
        ready = max((start[j] + ticks.time[j] + lag for j, lag in ticks.after[block]), default=0)
        if block in ring:
            start[block] = ready + (ring[block] - ready) % period
            continue
        offset = _first_free_offset(ticks, taken, block, ready % period, period, snug)
        if offset is None:
            return None
        start[block] = ready + (offset - ready) % period
        _occupy(ticks, taken, block, offset, period)
    return tuple(start)


def _first_free_offset(
    ticks: IntegerProblem, taken: Occupied, block: int, ready: int, period: int, snug: bool
) -> int | None:
    """The first free place in the ring from `ready` on; if `snug`, next to what is there."""
    time, devices = ticks.time[block], ticks.devices[block]
    spans = [span for d in devices for span in taken[d]]
    ends = {end % period for _, end in spans}
    touching = ends | {(begin - time) % period for begin, _ in spans}
    free = [
        place
        for place in touching | {ready}
        if not any(
            (begin - place) % period < time or (place - begin) % period < end - begin
            for begin, end in spans
        )
    ]
    rated = [(snug and bool(spans) and p not in touching, (p - ready) % period, p) for p in free]
    return min(rated)[2] if rated else None


def _occupy(ticks: IntegerProblem, taken: Occupied, block: int, offset: int, period: int) -> None:
    for device in ticks.devices[block]:
        taken[device].append((offset, offset + ticks.time[block]))


# The best pattern of any length, exactly: schedules as walks through states, patterns as cycles.
#
# Nothing starts but when something ends, so a schedule is a walk from end to end. What matters of
# the past is how often each block has started and how long those that run still take; memory
# follows from the counts. Shifted by a micro-batch a state is the same, and tight memory leaves
# few of them: 559 for the NN placement on four devices that hold three. A pattern is a cycle, its
# time a micro-batch the cycle's time over its micro-batches, and the least ratio over all cycles
# is found exactly (`_least_ratio_cycle`).
#
# Blocks on every device that hold no memory may run ahead without limit. For the bound they are cut
# out: while one runs nothing else does, so the rest of any schedule is a schedule of the rest
# (`rate_bound_by_states`). For a pattern they run ahead by a few at most (`pattern_by_states`).


MOST = 12_000  # states looked at, a second of work; more, and the solver is asked instead
_MOST_AHEAD = 4  # micro-batches that a block on all devices may run ahead in a pattern
_NEAR = Fraction(1, 100)  # of the bound: a pattern this near is not worth a longer one
_STEPS = 12  # periods tried by simple rules: the bound, then ever larger steps above it
_SQUARES = [k * k for k in range(_STEPS)]

Ints = NDArray[np.int64]
State = tuple[tuple[int, ...], tuple[int, ...]]  # starts of each block, time left of those running


@dataclass
class _StateGraph:
    """All states, and the ways from one to the next."""

    blocks: list[int]  # of the problem, in the order of the counts
    states: dict[State, int] = field(default_factory=dict)
    transitions: list[tuple[int, int, int, int]] = field(
        default_factory=list
    )  # from, to, time, shift


def rate_bound_by_states(ticks: IntegerProblem, best: Fraction, budget: Budget) -> Fraction | None:
    """Units a micro-batch that no pattern of any length beats; None where states are too many."""
    wide = _blocks_without_memory(ticks)
    if wide is None or not _starts_only_at_ends(ticks):
        return None
    graph = _reachable_states(ticks, set(wide), 0, budget)
    if graph is None:
        return None
    cut = sum(ticks.time[b] for b in wide)
    found = _least_ratio_cycle(graph, best - cut)
    return cut + (best - cut if found is None else found[0])


def pattern_by_states(
    ticks: IntegerProblem, best: Fraction, bound: Fraction, budget: Budget
) -> Repetend | None:
    """A pattern quicker than the best known, as long as it may be; None where none was found."""
    found: Repetend | None = None
    wide = _blocks_without_memory(ticks)
    if wide is None or not _starts_only_at_ends(ticks):
        return None
    for ahead in range(1, _MOST_AHEAD + 1) if wide else (0,):
        graph = _reachable_states(ticks, set(), ahead, budget, frozenset(wide))
        if graph is None:
            break
        cycle = _least_ratio_cycle(graph, best)
        if cycle is not None:
            found, best = _pattern_of_cycle(ticks, graph, cycle[1]), cycle[0]
        if best <= bound * (1 + _NEAR):
            break
    return found


def _starts_only_at_ends(ticks: IntegerProblem) -> bool:
    """Whether starts lie only at ends: no lags, no blocks without time, memory as given."""
    return ticks.fine == 1 and ticks.is_faithful and not any(g for w in ticks.after for _, g in w)


def _blocks_without_memory(ticks: IntegerProblem) -> list[int] | None:
    """Blocks on all devices outside of what memory ties together; None where others are outside."""
    tied: list[set[int]] = []
    for device, room in enumerate(ticks.capacity):
        for r in residences(ticks, device) or () if room is not None else ():
            inside = {r.taken, r.given}
            inside |= {b for b in ticks.reach[r.taken] if r.given in ticks.reach[b]}
            apart = [t for t in tied if not t & inside]
            tied = [*apart, inside.union(*(t for t in tied if t & inside))]
    if len(tied) != 1:
        return None
    outside = [b for b in range(len(ticks.time)) if b not in tied[0]]
    is_wide = all(len(ticks.devices[b]) == len(ticks.capacity) for b in outside)
    holds = any(i in outside for held in ticks.held for i, _, _ in held)
    return outside if is_wide and not holds else None


def _reachable_states(
    ticks: IntegerProblem, without: set[int], ahead: int, budget: Budget,
    free: frozenset[int] = frozenset(),
) -> _StateGraph | None:  # fmt: skip
    """Every state that can be reached; `free` blocks run at most `ahead` ahead or behind."""
    rules = _Transitions(ticks, without, ahead, free)
    graph = _StateGraph(rules.blocks)
    empty = (0,) * len(rules.blocks)
    graph.states[empty, empty] = 0
    left: list[State] = [(empty, empty)]
    while left:
        state = left.pop()
        for then, took, shift in rules.steps(state):
            if then not in graph.states:
                graph.states[then] = len(graph.states)
                left.append(then)
            graph.transitions.append((graph.states[state], graph.states[then], took, shift))
        if len(graph.states) > MOST or (len(graph.transitions) % 256 < 8 and budget.is_over):
            return None
    return graph


class _Transitions:
    """Which states follow a state."""

    def __init__(
        self, ticks: IntegerProblem, without: set[int], ahead: int, free: frozenset[int]
    ) -> None:
        self.blocks = [b for b in ticks.order if b not in without]
        place = {b: k for k, b in enumerate(self.blocks)}
        self.time = [ticks.time[b] for b in self.blocks]
        self.devices = [frozenset(ticks.devices[b]) for b in self.blocks]
        self.before = [
            sorted({place[j] for j in _remaining_predecessors(ticks, b, without)})
            for b in self.blocks
        ]
        self.held = [
            [(place[i], r, c) for i, r, c in rows if i in place] if room is not None else []
            for rows, room in zip(ticks.held, ticks.capacity, strict=True)
        ]
        self.room = ticks.capacity
        self.ahead = ahead
        tied = [b for b in self.blocks if b not in free]
        self.first, self.last = (place[b] for b in (tied[0], tied[-1]))
        late = [b for b in free if b in ticks.reach[tied[-1]]]
        self.early = [place[b] for b in free if b not in late]
        self.late = [place[b] for b in late]

    def steps(self, state: State) -> Iterator[tuple[State, int, int]]:
        """What may be started now, then on to the next end: (state, time, micro-batches gone)."""
        counts, left = state
        for chosen in self._choices(counts, left):
            if not chosen and not any(left):
                continue
            after = [c + (k in chosen) for k, c in enumerate(counts)]
            running = [self.time[k] if k in chosen else r for k, r in enumerate(left)]
            took = min(r for r in running if r)
            shift = min(after)
            ends = tuple(r - took if r else 0 for r in running)
            yield (tuple(c - shift for c in after), ends), took, shift

    def _choices(self, counts: Sequence[int], left: Sequence[int]) -> list[tuple[int, ...]]:
        """Sets of blocks that can start together."""
        busy = frozenset().union(*(self.devices[k] for k, r in enumerate(left) if r))
        out: list[tuple[tuple[int, ...], frozenset[int]]] = [((), busy)]
        full = [sum(change * counts[k] for k, _, change in rows) for rows in self.held]
        for k in range(len(self.blocks)):
            if self._may(k, counts, left, full):
                mine = self.devices[k]
                out += [((*some, k), used | mine) for some, used in out if not used & mine]
        return [some for some, _ in out]

    def _may(self, k: int, counts: Sequence[int], left: Sequence[int], full: Sequence[int]) -> bool:
        if any(counts[j] - (left[j] > 0) <= counts[k] for j in self.before[k]):
            return False
        if k in self.early and counts[k] - counts[self.first] >= self.ahead:
            return False
        if k == self.last and any(counts[k] - counts[j] >= self.ahead for j in self.late):
            return False
        for device in self.devices[k]:
            for other, rise, _ in self.held[device]:
                room = self.room[device]
                if other == k and room is not None and full[device] + rise > room:
                    return False
        return True


def _remaining_predecessors(ticks: IntegerProblem, block: int, without: set[int]) -> Iterator[int]:
    """What a block waits for once some blocks are cut out."""
    for j, _ in ticks.after[block]:
        if j in without:
            yield from _remaining_predecessors(ticks, j, without)
        else:
            yield j


def _least_ratio_cycle(graph: _StateGraph, below: Fraction) -> tuple[Fraction, list[int]] | None:
    """The least ratio of time to micro-batches under a value, and the ways of its cycle."""
    table = np.array(graph.transitions, np.int64)
    table = table[np.argsort(table[:, 1], kind="stable")]
    graph.transitions = [(int(a), int(b), int(t), int(s)) for a, b, t, s in table]
    found: tuple[Fraction, list[int]] | None = None
    while cycle := _cycle_below(table, len(graph.states), below):
        shift = int(table[cycle, 3].sum())
        below = Fraction(int(table[cycle, 2].sum()), shift)
        found = (below, cycle)
    return found


def _cycle_below(table: Ints, num: int, ratio: Fraction) -> list[int]:
    """A cycle of a smaller ratio: one of negative weight time·q − shift·p, by Bellman and Ford."""
    source, target = table[:, 0], table[:, 1]
    weight = table[:, 2] * ratio.denominator - table[:, 3] * ratio.numerator
    firsts = np.flatnonzero(np.diff(target, prepend=-1))
    heads = target[firsts]
    dist = np.zeros(num, np.int64)
    via = np.full(num, -1)
    for turn in range(num + 1):
        offered = dist[source] + weight
        least_ = np.minimum.reduceat(offered, firsts)
        better = least_ < dist[heads]
        if not better.any():
            return []
        hit = np.flatnonzero(offered == np.repeat(least_, np.diff([*firsts, len(target)])))[::-1]
        hit = hit[offered[hit] < dist[target[hit]]]
        via[target[hit]] = hit
        dist[heads[better]] = least_[better]
        if turn % 16 == 15 or turn == num:
            cycle = _cycle_of_predecessors(via, source)
            if cycle:
                return cycle
    return []


def _cycle_of_predecessors(via: Ints, source: Ints) -> list[int]:
    """A cycle among the ways by which states were last reached, first to last."""
    num = len(via)
    step = np.where(via >= 0, source[via], num)
    jump = np.append(step, num)
    for _ in range(num.bit_length()):
        jump = jump[jump]
    on = np.flatnonzero(jump[:num] < num)
    if not len(on):
        return []
    first = here = int(jump[on[0]])
    out = []
    while True:
        out.append(int(via[here]))
        here = int(source[via[here]])
        if here == first:
            return out[::-1]


def _pattern_of_cycle(
    ticks: IntegerProblem, graph: _StateGraph, cycle: Sequence[int]
) -> Repetend | None:
    """The pattern that a cycle of states stands for."""
    known = {number: state for state, number in graph.states.items()}
    transitions = [graph.transitions[i] for i in cycle]
    period, size = sum(w[2] for w in transitions), sum(w[3] for w in transitions)
    start = [0] * (len(ticks.time) * size)
    now = gone = 0
    for here, there, took, shift in transitions:
        counts, after = known[here][0], known[there][0]
        for k, block in enumerate(graph.blocks):
            if after[k] + shift > counts[k]:
                lap, copy = divmod(counts[k] + gone, size)
                start[block * size + copy] = now - period * lap
        now, gone = now + took, gone + shift
    found = Repetend(period, size, tuple(start))
    return found if pattern_fits_memory(ticks, found) else None


# The shortest repetend: from the lower bound upward, then with several micro-batches a pattern.
#
# For one micro-batch a repetend: try the bound; if it cannot be met, halve the gap between what is
# proven impossible and the best found. For u = 2, 3, …: only a period under `u` times the best rate
# helps, so ask for the largest such period; one "no" closes that `u` for good. `Rate.closed` says
# up to which `u` nothing better exists; when the lower bound itself is met, no `u` can help. Under
# tight memory a schedule has few states, which answers for every `u` at once.


Progress = Callable[[str, float, float], None]  # what was reached, its value, the bound


@dataclass
class PeriodSearch:
    """The best repetend so far, and what is known about better ones."""

    best: Repetend
    bound: Fraction  # units a micro-batch, for any repetend
    closed_unroll: int = 0  # no repetend of up to so many micro-batches is better

    def is_met(self, ticks: IntegerProblem) -> bool:
        """Whether the bound is reached."""
        return _units_per_micro_batch(ticks, self.best) <= self.bound


def shortest_period(
    rate: PeriodSearch, ticks: IntegerProblem, unroll: int, budget: Budget, progress: Progress
) -> None:
    """The repetend with the least time a micro-batch that the budget finds, left in `rate`."""
    _search_one_micro_batch(rate, ticks, budget, progress)
    if unroll >= MAX_UNROLL and not rate.is_met(ticks) and not budget.is_over:
        _search_states(rate, ticks, budget, progress)
    size = 2
    while size <= unroll and not rate.is_met(ticks) and not budget.is_over:
        sure = _search_unrolled(rate, ticks, size, budget, progress)
        rate.closed_unroll = size if sure and rate.closed_unroll == size - 1 else rate.closed_unroll
        size += 1
    rate.closed_unroll = rate.closed_unroll if ticks.is_faithful else 0


def _search_states(
    rate: PeriodSearch, ticks: IntegerProblem, budget: Budget, progress: Progress
) -> None:
    """Patterns of any length by their states, where those are few; and what none of them beats."""
    rate.bound = max(
        rate.bound,
        rate_bound_by_states(ticks, _units_per_micro_batch(ticks, rate.best), budget) or rate.bound,
    )
    if not rate.is_met(ticks):
        rate.best = (
            pattern_by_states(ticks, _units_per_micro_batch(ticks, rate.best), rate.bound, budget)
            or rate.best
        )
        progress("period", float(_units_per_micro_batch(ticks, rate.best)), float(rate.bound))


def _units_per_micro_batch(ticks: IntegerProblem, repetend: Repetend) -> Fraction:
    """Whole units a micro-batch: ticks beyond them are due to blocks without time."""
    return Fraction(repetend.period // ticks.fine, repetend.unroll)


def _search_one_micro_batch(
    rate: PeriodSearch, ticks: IntegerProblem, budget: Budget, progress: Progress
) -> None:
    """One micro-batch a repetend: the shortest; closed up to 1 if that is certain."""
    low, bound = ceil(rate.bound), rate.bound
    high = rate.best.period // ticks.fine
    for step in dict.fromkeys(low + (high - low) * k // _STEPS**2 for k in _SQUARES):
        found = next(greedy_patterns(ticks, ticks.ticks(step)), None) if step < high else None
        if found is not None:
            rate.best, high = tighten(ticks, found, bound * ticks.fine), step
            progress("period", float(_units_per_micro_batch(ticks, rate.best)), float(bound))
            break
        if budget.is_over:
            return
    high = rate.best.period // ticks.fine
    sure, step = True, low
    while low <= high and step < high and not budget.is_over:
        status, found = solve_pattern(
            ticks, 1, ticks.ticks(step), "latency", budget, budget.left / 2
        )
        if found is not None:
            rate.best = tighten(ticks, found, bound * ticks.fine)
            high = rate.best.period // ticks.fine
            progress("period", float(high), float(bound))
        else:
            sure = sure and status == "none"
            low = step + 1
        step = (low + high) // 2 if low < high - 1 else low
    rate.closed_unroll = int(sure and low >= high)


def _search_unrolled(
    rate: PeriodSearch, ticks: IntegerProblem, unroll: int, budget: Budget, progress: Progress
) -> bool:
    """The best repetend of up to so many micro-batches; whether it is sure to be."""
    limit = budget.left if unroll == 2 else budget.left / 3  # beyond two, little is gained
    bound = rate.bound
    while True:
        period = ceil(_units_per_micro_batch(ticks, rate.best) * unroll) - 1
        if period < bound * unroll:
            return True
        status, found = solve_pattern(ticks, unroll, ticks.ticks(period), "any", budget, limit)
        if found is None:
            return status == "none"
        rate.best = tighten(ticks, found, bound * unroll * ticks.fine)
        progress("period", float(_units_per_micro_batch(ticks, rate.best)), float(bound))
