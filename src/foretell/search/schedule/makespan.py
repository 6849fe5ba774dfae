"""Every start of a few micro-batches as a variable: the least makespan, or the least around a
pattern.

    s_{b,m} ≥ s_{a,m} + t_a + lag                   b waits for a                     → `_add_waits`
    s_{b,m+1} ≥ s_{b,m} + t_b                       micro-batches in turn            → `_add_starts`
    one block at a time on each device                                              → `_add_devices`
    Σ amounts held from `taken` to the end of `given` ≤ capacity               → `_add_memory_limit`

Around a pattern of period `P`, instance `i_b` of block `b` belongs to the pattern, earlier ones to
the warm-up, later ones to the cool-down. Nothing separates the three in time; on each device they
follow each other, and the pattern's blocks span at most `P`, so that it can be repeated any number
of times:

    s_{a,i_a} + t_a ≤ s_{b,i_b} + P                 a, b on one device              → `_add_pattern`
    s_{b,i_b} ≥ s_{a,i_a} − (i_a − i_b)·P + t_a     b waits for a              → `_add_pattern_wait`
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import chain, pairwise
from math import ceil
from typing import Any

import numpy as np

from foretell.compiled import I2
from foretell.search.schedule import integer_problem
from foretell.search.schedule.anneal import annealed_order
from foretell.search.schedule.exact_search import (
    GOALS,
    PeriodSearch,
    Progress,
    Repetend,
    greedy_patterns,
    solve_pattern,
    tighten,
)
from foretell.search.schedule.integer_problem import (
    INTERVALS,
    Budget,
    IntegerProblem,
    Status,
    residences,
    solve,
    solver,
    with_copies,
    with_fewer_ticks,
)
from foretell.search.schedule.replay import (
    Item,
    arrays,
    end_time,
    list_schedules,
    longest_idle,
    order_by_start,
    replay,
    sequential_pattern,
    starts_and_peaks,
    unrolled_order,
)


@dataclass(frozen=True)
class PatternCut:
    """Which instance of each block is repeated, and how often."""

    index: tuple[int, ...]
    period: int

    @property
    def micro_batches(self) -> int:
        """How many the pattern takes to show every block once, with its warm-up and cool-down."""
        return 1 + max(self.index)


@dataclass(frozen=True)
class _StartsModel:
    """The solver's model and the start of every block of every micro-batch."""

    cp: Any
    ticks: IntegerProblem
    start: list[list[Any]]
    most: int


def solve_starts(
    ticks: IntegerProblem,
    micro_batches: int,
    *,
    floor: int,
    most: int,
    budget: Budget,
    limit: float,
    pattern: PatternCut | None = None,
    hint: Sequence[Sequence[float]] | None = None,
) -> tuple[Status, list[list[int]] | None]:
    """Starts that end within `most` ticks, as early as found; `none` proves there are none."""
    model = _starts_model(ticks, micro_batches, most)
    cp = model.cp
    if pattern is not None:
        _add_pattern(model, pattern)
    last = cp.new_int_var(floor, most, "")
    for i, row in enumerate(model.start):
        if not ticks.followers[i]:
            cp.add(last >= row[-1] + ticks.time[i])
    cp.minimize(last)
    for row, hints in zip(model.start, hint or (), strict=False):
        for variable, value in zip(row, hints, strict=True):
            cp.add_hint(variable, int(value))
    status, engine = solve(cp, budget, limit, INTERVALS)
    if status in ("none", "unknown"):
        return status, None
    return status, [[engine.value(s) for s in row] for row in model.start]


def order_of_repetitions(
    starts: Sequence[Sequence[int]], pattern: PatternCut, more: int
) -> list[Item]:
    """The order once the pattern runs `more` times more: warm-up, repetitions, cool-down."""
    placed = []
    for block, (row, index) in enumerate(zip(starts, pattern.index, strict=True)):
        for m, start in enumerate(row):
            if m < index:
                placed.append((start, block, m))
            elif m == index:
                again = range(more + 1)
                placed += [(start + k * pattern.period, block, m + k) for k in again]
            else:
                placed.append((start + more * pattern.period, block, m + more))
    return [(block, m) for _, block, m in sorted(placed)]


def _starts_model(ticks: IntegerProblem, micro_batches: int, most: int) -> _StartsModel:
    model = _StartsModel(solver().CpModel(), ticks, [], most)
    _add_starts(model, micro_batches)
    _add_waits(model)
    _add_devices(model)
    for device in range(len(ticks.capacity)):
        _add_memory_limit(model, device)
    return model


def _add_starts(model: _StartsModel, micro_batches: int) -> None:
    ticks, cp = model.ticks, model.cp
    for i, time in enumerate(ticks.time):
        low, high = ticks.head[i], model.most - ticks.tail[i] - time
        row = []
        for m in range(micro_batches):
            late = (micro_batches - 1 - m) * time
            row.append(cp.new_int_var(low + m * time, max(high - late, low + m * time), ""))
        for a, b in pairwise(row):
            cp.add(b >= a + time)
        model.start.append(row)


def _add_waits(model: _StartsModel) -> None:
    for i, waits in enumerate(model.ticks.after):
        for j, lag in waits:
            for then, first in zip(model.start[i], model.start[j], strict=True):
                model.cp.add(then >= first + model.ticks.time[j] + lag)


def _add_devices(model: _StartsModel) -> None:
    cp, time = model.cp, model.ticks.time
    spans = [
        [cp.new_fixed_size_interval_var(s, time[i], "") for s in row]
        for i, row in enumerate(model.start)
    ]
    for on in model.ticks.by_device:
        cp.add_no_overlap([span for i in on for span in spans[i]])


def _add_memory_limit(model: _StartsModel, device: int) -> None:
    ticks, cp, room = model.ticks, model.cp, model.ticks.capacity[device]
    num = len(model.start[0])
    if room is None or sum(r for _, r, _ in ticks.held[device]) * num <= room:
        return
    found = residences(ticks, device)
    if found is None:
        _add_memory_level(model, device, room)
        return
    if len(found) == 1:  # micro-batches come in turn: the memory of one serves a later one
        taken, given, amount = found[0]
        ahead = room // amount
        for m in range(num - ahead):
            end = model.start[given][m] + ticks.time[given]
            cp.add(model.start[taken][m + ahead] >= end)
        return
    spans, amounts = [], []
    for taken, given, amount in found:
        for begin, last in zip(model.start[taken], model.start[given], strict=True):
            size = cp.new_int_var(0, model.most, "")
            spans.append(cp.new_interval_var(begin, size, last + ticks.time[given], ""))
            amounts.append(amount)
    cp.add_cumulative(spans, amounts, room)


def _add_memory_level(model: _StartsModel, device: int, room: int) -> None:
    """Memory that cannot be paired: the level itself, taken at starts and given back at ends."""
    times: list[Any] = []
    changes: list[int] = []
    for block, rise, change in model.ticks.held[device]:
        for start in model.start[block]:
            times += [start, start + model.ticks.time[block]]
            changes += [rise, change - rise]
    low = -sum(abs(c) for c in changes)
    model.cp.add_reservoir_constraint(times, changes, low, room)


def _add_pattern(model: _StartsModel, pattern: PatternCut) -> None:
    cp, time, index = model.cp, model.ticks.time, pattern.index
    core = [row[i] for row, i in zip(model.start, index, strict=True)]
    for on in model.ticks.by_device:
        for a in on:
            early = model.start[a][index[a] - 1] + time[a] if index[a] else None
            late = model.start[a][index[a] + 1] if index[a] + 1 < len(model.start[a]) else None
            for b in on:
                if a != b:
                    cp.add(core[a] + time[a] <= core[b] + pattern.period)
                    if early is not None:
                        cp.add(early <= core[b])
                    if late is not None:
                        cp.add(late >= core[b] + time[b])
    for i, waits in enumerate(model.ticks.after):
        for j, lag in waits:
            _add_pattern_wait(model, pattern, i, j, time[j] + lag)


def _add_pattern_wait(
    model: _StartsModel, pattern: PatternCut, block: int, on: int, length: int
) -> None:
    """What `block` waits for may have run some repetitions earlier, in each of the three parts."""
    cp, period = model.cp, pattern.period
    first, then = pattern.index[on], pattern.index[block]
    begin, end = model.start[on][first], model.start[block][then]
    cp.add(end >= begin - (first - then) * period + length)
    for m in range(then + 1, first):
        cp.add(end + (m - then) * period >= model.start[on][m] + length)
        cp.add(model.start[block][m] >= begin - (first - m) * period + length)


# From a repetend to a schedule of N micro-batches with the least makespan.
#
# Candidates, until one meets the lower bound: orders by simple rules and those known from the
# literature; the repetend and its equals in period, unrolled and started as early as their order
# allows; the best of them annealed; when there are few blocks, all starts as variables; and the
# best warm-up and cool-down around each of a few cuts of the pattern; annealed once more.


_AROUND = 420  # starts in a model around a pattern; beyond, presolve alone takes seconds
_DIRECT = 320  # starts in a model of everything
_CUTS = 4  # cuts tried of each pattern
_KEPT = 3  # orders that annealing starts from


@dataclass
class BestOrder:
    """The best orders so far, how long they take, and what no order can beat."""

    ticks: IntegerProblem
    micro_batches: int
    bound: Fraction  # units
    progress: Progress
    least_idle: bool = False  # rather than the least makespan
    items: list[Item] = field(default_factory=list)
    starts: I2 = field(default_factory=lambda: np.zeros((0, 0), np.int64))  # block, micro-batch
    length: int = 0  # ticks
    idle: int = 0  # ticks that some device waits between its first block and its last
    cost: tuple[int, int, int] = (0, 0, 0)  # what is compared, memory last
    others: list[tuple[int, int, list[Item]]] = field(default_factory=list)  # best first, ours too

    def __post_init__(self) -> None:
        self.rows = arrays(self.ticks)

    @property
    def is_least(self) -> bool:
        """Whether the bound is met."""
        short = self.length // self.ticks.fine <= self.bound
        return bool(self.items) and (self.idle == 0 if self.least_idle else short)

    def offer(self, items: list[Item]) -> None:
        """Take an order if it fits and is the shortest yet; of equals the one that holds least."""
        ticks, num = self.ticks, self.micro_batches
        order = np.array([block * num + m for block, m in items], np.int64)
        start, held = starts_and_peaks(self.rows, num, order)
        if any(r is not None and p > r for p, r in zip(held, ticks.capacity, strict=True)):
            return
        starts = start.reshape(-1, num)
        length = int(np.max(starts[:, -1] + self.rows.time))
        idle = int(longest_idle(starts, ticks))
        if all(other[:2] != (length, idle) for other in self.others):
            self.others.append((length, idle, items))
            self.others = sorted(self.others, key=lambda o: o[:2])[:_KEPT]
        most = int(np.sum(held))
        cost = (idle, length, most) if self.least_idle else (length, idle, most)
        if not self.items or cost < self.cost:
            if not self.items or length < self.length:
                self.progress("makespan", length / ticks.fine, float(self.bound))
            self.items, self.starts, self.length, self.idle = items, starts, length, idle
            self.cost = cost


def offer_known_orders(best: BestOrder, known: Iterable[list[Item]], budget: Budget) -> None:
    """Orders without search: by rules, from the literature, one micro-batch after the other."""
    ticks, num = best.ticks, best.micro_batches
    last = unrolled_order(sequential_pattern(ticks, budget), len(ticks.time), num)
    for items in chain(list_schedules(ticks, num), known, [last]):
        best.offer(items)
        if best.is_least or (best.items and budget.is_over):
            return


def shorten_makespan(best: BestOrder, rate: PeriodSearch, budget: Budget) -> None:
    """The shortest schedule found around a repetend, left in `best`."""
    ticks, num = best.ticks, best.micro_batches
    rough, patterns = best.others[0], list[Repetend]()
    for repetend in _patterns_of_period(ticks, rate, budget):
        patterns.append(repetend)
        best.offer(unrolled_order(repetend, len(ticks.time), num))
        if best.is_least:
            return
    if budget.is_over:
        return
    _anneal_orders(best, budget.part(_ANNEALED), best.others, 1)
    coarse = with_fewer_ticks(ticks)
    _solve_whole(best, coarse, budget.part(_SOLVED))
    rings = [r if coarse is ticks else tighten(coarse, r, Fraction(0)) for r in patterns]
    cuts = [cut for ring in rings for cut in _cuts(ring)]
    around = budget.part(_RINGS)
    for size, pattern in dict.fromkeys([*_found_cuts(best, rings[0]), *cuts]):
        if not best.is_least and not around.is_over:
            _solve_around_pattern(best, coarse, size, pattern, around)
    for turn in range(_AGAIN):  # near the best and, from an order that is not, anywhere
        order = rough if turn % 2 else best.others[0]
        _anneal_orders(best, budget.part(1 / (_AGAIN - turn)), [order], 2 + turn)


# shares of the work left for annealing, for the model of all starts, for those around patterns
_ANNEALED, _SOLVED, _RINGS = 0.3, 0.2, 0.4
_AGAIN = 6  # how often it is annealed at the end


def _anneal_orders(
    best: BestOrder, budget: Budget, orders: Sequence[tuple[int, int, list[Item]]], seed: int
) -> None:
    """The best orders, each annealed for an equal share of the work."""
    floor = ceil(best.bound) * best.ticks.fine
    if best.ticks.fine > 1:
        floor = 0  # whole units say too little where blocks take no time
    many = len(orders)
    for k, (_, _, items) in enumerate(tuple(orders)):
        if not best.is_least and not budget.is_over:
            part = budget.part(1 / (many - k))
            best.offer(
                annealed_order(best.ticks, items, best.micro_batches, floor, part, seed=seed)
            )


def _patterns_of_period(
    ticks: IntegerProblem, rate: PeriodSearch, budget: Budget
) -> Iterator[Repetend]:
    """The best repetend and others of the same period."""
    best = rate.best
    yield best
    if best.unroll == 1 and budget.seconds > 0:
        yield from greedy_patterns(ticks, best.period)
    for goal in GOALS:
        if budget.is_over:
            return
        limit = min(budget.left / 8, 0.3)
        _, found = solve_pattern(ticks, best.unroll, best.period, goal, budget, limit)
        if found is not None:
            yield found


def _solve_whole(best: BestOrder, coarse: IntegerProblem, budget: Budget) -> None:
    """All starts as variables; proves the best when nothing shorter exists."""
    num = best.micro_batches
    floor = ceil(integer_problem.makespan_bound(coarse, num)) * coarse.fine
    hint = replay(best.items, coarse.time, coarse.devices, coarse.after)
    most = int(end_time(hint, coarse.time)) - 1
    over = budget.is_over or len(coarse.time) * num > _DIRECT
    if best.is_least or most < floor or over:
        return
    status, starts = solve_starts(
        coarse, num, floor=floor, most=most, budget=budget, limit=budget.left, hint=hint
    )
    if starts is not None:
        best.offer(order_by_start(starts))
    if status in ("best", "none") and coarse is best.ticks and coarse.is_faithful:
        best.bound = max(best.bound, _proven_units(best.ticks, best.length, num))


def _proven_units(ticks: IntegerProblem, length: int, micro_batches: int) -> Fraction:
    """Real units that the least number of ticks stands for: less what blocks without time took."""
    if ticks.fine == 1:
        return Fraction(length)
    ticked = sum(1 for u in ticks.units if not u) * micro_batches
    return Fraction(-(-max(length - ticked, 0) // ticks.fine))  # whole units take whole time


def _solve_around_pattern(
    best: BestOrder, coarse: IntegerProblem, size: int, pattern: PatternCut, budget: Budget
) -> None:
    """The best warm-up and cool-down around one cut of a pattern of `size` micro-batches."""
    ticks = with_copies(coarse, size)
    num, more = pattern.micro_batches, -(-best.micro_batches // size) - pattern.micro_batches
    if more < 0 or len(ticks.time) * num > _AROUND:
        return
    floor = ceil(integer_problem.makespan_bound(coarse, (num - 1) * size + 1)) * ticks.fine
    now = replay(best.items, coarse.time, coarse.devices, coarse.after)
    most = int(end_time(now, coarse.time)) - 1 - more * pattern.period
    if most < floor:
        return
    _, starts = solve_starts(
        ticks, num, floor=floor, most=most, budget=budget, limit=budget.left / 3, pattern=pattern
    )
    if starts is not None:
        items = order_of_repetitions(starts, pattern, more)
        each = [(block // size, m * size + block % size) for block, m in items]
        best.offer([(block, m) for block, m in each if m < best.micro_batches])


def _cuts(repetend: Repetend) -> list[tuple[int, PatternCut]]:
    """Ways to cut the ring open: each says which instance of a block the pattern starts with."""
    found = {}
    for phase in sorted(set(repetend.offsets)):
        laps = [(s - phase) // repetend.period for s in repetend.start]
        index = tuple(max(laps) - lap for lap in laps)
        found[PatternCut(index, repetend.period)] = sum(index)
    return [
        (repetend.unroll, p) for p in sorted(found, key=lambda p: (max(p.index), found[p]))[:_CUTS]
    ]


def _found_cuts(best: BestOrder, repetend: Repetend) -> Iterator[tuple[int, PatternCut]]:
    """Patterns that a schedule found otherwise runs through, half way."""
    if repetend.unroll > 1:
        return
    for share in range(_CUTS):
        when = best.length // 2 + share * best.length // best.micro_batches // _CUTS
        index = tuple(int(np.sum(row < when)) for row in best.starts)
        if max(index) < best.micro_batches:
            yield 1, PatternCut(tuple(i - min(index) for i in index), repetend.period)
