"""A repeating pattern by modulo scheduling: every block once for each micro-batch it advances.

With period `P`, block `b` of the k-th repetition starts at `o_b + P·(q_b + k)`, `0 ≤ o_b < P`: `o`
is its place in the ring of time, `q` its lap. In a block graph with copies for each micro-batch
advanced:

    a, b on one device:  o_a + t_a ≤ o_b  and  o_b + t_b ≤ o_a + P,  or the reverse  → `_exclusive`
    b waits for a:       q_b − q_a ≥ c + [o_b < o_a + r] + [o_b + P < o_a + r],
                         where t_a + lag = c·P + r,  0 ≤ r < P                       → `_wait`
    memory of device d:  Σ_c change_c · ([c before b] − q_c) + rise_b ≤ capacity_d   → `_memory`

The last sum is what the device holds as `b` starts, in every repetition: all changes of a
micro-batch cancel, so the number of the repetition falls out. For a fixed `P` everything is
linear, and what is feasible for `P` stays so for `P + 1` (same `o`, same `q`): one infeasible
period rules out all below it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from math import lcm
from typing import Any, Literal, NamedTuple

from foretell.search.schedule.integer_problem import Budget, Status, Ticks, copies, solve, solver

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
class _Model:
    """The solver's model and its variables."""

    cp: Any
    ticks: Ticks  # with copies
    period: int
    offset: list[Any]
    lap: list[Any]
    before: dict[tuple[int, int], Any]  # (a, b) on a common device: a starts first in the ring


def repeat(
    base: Ticks, unroll: int, period: int, goal: Goal, budget: Budget, limit: float
) -> tuple[Status, Repetend | None]:
    """A pattern of this period, the best for a goal; or the news that there is none."""
    ticks = copies(base, unroll)
    if any(t > period for t in ticks.time):
        return "none", None
    model = _encode(ticks, unroll, period)
    _aim(model, goal)
    status, engine = solve(model.cp, budget, limit)
    if status in ("none", "unknown"):
        return status, None
    value = engine.value
    start = [value(o) + period * value(q) for o, q in zip(model.offset, model.lap, strict=True)]
    return status, Repetend(period, unroll, tuple(start))


def _encode(ticks: Ticks, unroll: int, period: int) -> _Model:
    num = len(ticks.time)
    cp = solver().CpModel()
    most = 2 * num + sum(lag for waits in ticks.after for _, lag in waits) // period
    offset = [cp.new_int_var(0, period - 1, "") for _ in range(num)]
    lap = [cp.new_int_var(-most, most, "") for _ in range(num)]
    model = _Model(cp, ticks, period, offset, lap, {})
    # the ring may be turned, so one block is pinned; the last of the longest makes proofs shortest
    longest = max(range(0, num, unroll), key=lambda i: (ticks.time[i], i))
    cp.add(offset[longest] == 0)
    for root in _roots(ticks, unroll):
        cp.add(lap[root] == 0)
    _exclusive(model)
    is_path = all(len(a) <= 1 for a in ticks.after) and all(len(f) <= 1 for f in ticks.followers)
    for i, waits in enumerate(ticks.after):
        for j, lag in waits:
            _wait(model, i, j, lag, is_path)
    _in_turn(model, unroll)
    for device in range(len(ticks.capacity)):
        _memory(model, device)
    return model


def _roots(ticks: Ticks, unroll: int) -> list[int]:
    """One block of each part of the graph that may run a lap later without any change."""
    part = list(range(len(ticks.time)))
    ties = [(i, j) for i, waits in enumerate(ticks.after) for j, _ in waits]
    ties += [(i, i - i % unroll) for i in part]  # copies take turns
    for _ in part:
        for i, j in ties:
            part[i] = part[j] = min(part[i], part[j])
    free = [root for root in sorted(set(part)) if _cancels(ticks, part, root)]
    return free or [0]


def _cancels(ticks: Ticks, part: list[int], root: int) -> bool:
    """Whether the memory of one part of the graph is balanced on every device."""
    return not any(sum(c for i, _, c in held if part[i] == root) for held in ticks.held)


def _exclusive(model: _Model) -> None:
    ticks, cp, o, period = model.ticks, model.cp, model.offset, model.period
    pairs = sorted({(a, b) for on in ticks.by_device for a in on for b in on if a < b})
    for a, b in pairs:
        first = cp.new_bool_var("")
        model.before[a, b], model.before[b, a] = first, ~first
        for x, y, literal in ((a, b, first), (b, a, ~first)):
            gap = cp.add_linear_constraint(o[y] - o[x], ticks.time[x], period - ticks.time[y])
            gap.only_enforce_if(literal)


def _wait(model: _Model, block: int, on: int, lag: int, is_path: bool) -> None:
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


def _in_turn(model: _Model, unroll: int) -> None:
    """Copies of a block start in their order: any schedule can be renamed so."""
    for i in range(0, len(model.lap), unroll):
        for j in range(unroll if unroll > 1 else 0):
            a, b = i + j, i + (j + 1) % unroll
            turn = 1 if j == unroll - 1 else 0
            model.cp.add(model.lap[b] + turn - model.lap[a] >= model.before[b, a])


def _memory(model: _Model, device: int) -> None:
    room, held = model.ticks.capacity[device], model.ticks.held[device]
    if room is None:
        return
    for block, rise, _ in held:
        if rise > 0:
            others = sum(c * model.before[i, block] for i, _, c in held if i != block and c)
            laps = sum(c * model.lap[i] for i, _, c in held if c)
            model.cp.add(others - laps + rise <= room)


def _aim(model: _Model, goal: Goal) -> None:
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


def is_within(base: Ticks, repetend: Repetend) -> bool:
    """Whether the pattern's memory fits, in every repetition."""
    ticks = copies(base, repetend.unroll)
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
# (`least`).


class Edge(NamedTuple):
    """`then` starts at least `length` less `laps` periods after `first` starts."""

    first: int
    then: int
    length: Fraction
    laps: int


def tighten(base: Ticks, repetend: Repetend, floor: Fraction) -> Repetend:
    """The same order in the fewest whole ticks."""
    found = edges(base, repetend, base.time, base.after)
    period = -(-least(found, len(repetend.start), floor) // 1)
    if period >= repetend.period:
        return repetend
    starts, _ = _relax(found, len(repetend.start), Fraction(period))
    laps = repetend.laps
    whole = tuple(int(s) + int(period) * laps[i] for i, s in enumerate(starts))
    return Repetend(int(period), repetend.unroll, whole)


def edges(
    base: Ticks,
    repetend: Repetend,
    time: Sequence[float],
    after: Sequence[Sequence[tuple[int, float]]],
) -> list[Edge]:
    """What a pattern says of its starts, with the times and lags given (of single blocks)."""
    ticks, unroll, laps = copies(base, repetend.unroll), repetend.unroll, repetend.laps
    found = []
    for block, waits in enumerate(after):
        for on, lag in waits:
            length = Fraction(time[on]) + Fraction(lag)
            for j in range(unroll):
                i, k = on * unroll + j, block * unroll + j
                found.append(Edge(i, k, length, laps[k] - laps[i]))
    for on_device in ticks.by_device:
        ring = sorted(on_device, key=repetend.offsets.__getitem__)
        for a, b in zip(ring, ring[1:] + ring[:1], strict=True):
            found.append(Edge(a, b, Fraction(time[a // unroll]), int(b == ring[0])))
    return found


def least(found: Sequence[Edge], num: int, floor: Fraction) -> Fraction:
    """The least period, and not below `floor`, that the edges allow."""
    period = floor
    while True:
        _, cycle = _relax(found, num, period)
        if not cycle:
            return period
        period = sum((e.length for e in cycle), Fraction(0)) / sum(e.laps for e in cycle)


def _relax(found: Sequence[Edge], num: int, period: Fraction) -> tuple[list[Fraction], list[Edge]]:
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
    return [], _cycle(found, reason, moved)


def _cycle(found: Sequence[Edge], reason: Sequence[int], last: int) -> list[Edge]:
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


Spans = list[list[tuple[int, int]]]  # by device: what is taken of the ring, as (start, end) pairs


def greedy(ticks: Ticks, period: int) -> Iterator[Repetend]:
    """Patterns of this period that fit into memory, as far as found without search."""
    for sharded_first, snug in product((False, True), (False, True)):
        start = _place(ticks, period, sharded_first, snug)
        if start is not None:
            found = Repetend(period, 1, start)
            if is_within(ticks, found):
                yield found


def _place(ticks: Ticks, period: int, sharded_first: bool, snug: bool) -> tuple[int, ...] | None:
    taken: Spans = [[] for _ in ticks.capacity]
    ring: dict[int, int] = {}
    if sharded_first:
        for block in ticks.order:
            if len(ticks.devices[block]) > 1:
                offset = _first(ticks, taken, block, 0, period, True)
                if offset is None:
                    return None
                ring[block] = offset
                _take(ticks, taken, block, offset, period)
    start = [0] * len(ticks.time)
    for block in ticks.order:
        ready = max((start[j] + ticks.time[j] + lag for j, lag in ticks.after[block]), default=0)
        if block in ring:
            start[block] = ready + (ring[block] - ready) % period
            continue
        offset = _first(ticks, taken, block, ready % period, period, snug)
        if offset is None:
            return None
        start[block] = ready + (offset - ready) % period
        _take(ticks, taken, block, offset, period)
    return tuple(start)


def _first(
    ticks: Ticks, taken: Spans, block: int, ready: int, period: int, snug: bool
) -> int | None:
    """The first free place in the ring from `ready` on; if `snug`, next to what is there."""
    time, devices = ticks.time[block], ticks.devices[block]
    spans = [span for d in devices for span in taken[d]]
    ends = {end % period for _, end in spans}
    touching = ends | {(begin - time) % period for begin, _ in spans}
    free = [
        place
        for place in touching | {ready}
        if not any(_overlap(place, time, begin, end - begin, period) for begin, end in spans)
    ]
    rated = [(snug and bool(spans) and p not in touching, (p - ready) % period, p) for p in free]
    return min(rated)[2] if rated else None


def _overlap(a: int, time_a: int, b: int, time_b: int, period: int) -> bool:
    return (b - a) % period < time_a or (a - b) % period < time_b


def _take(ticks: Ticks, taken: Spans, block: int, offset: int, period: int) -> None:
    for device in ticks.devices[block]:
        taken[device].append((offset, offset + ticks.time[block]))
