"""From a repetend to a schedule of N micro-batches with the least makespan.

Candidates, until one meets the lower bound: the repetend and its equals in period, unrolled and
started as early as their order allows; orders by simple rules and those known from the literature;
when there are few blocks, all starts as variables; and the best warm-up and cool-down around each
of a few cuts of the pattern.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import chain
from math import ceil

from foretell.search.schedule import bounds
from foretell.search.schedule.alone import alone
from foretell.search.schedule.cycles import tighten
from foretell.search.schedule.dispatch import dispatch
from foretell.search.schedule.greedy import greedy
from foretell.search.schedule.makespan import Pattern, repeated
from foretell.search.schedule.makespan import shortest as shortest_makespan
from foretell.search.schedule.period import Progress, Rate
from foretell.search.schedule.repetend import GOALS, Repetend, repeat
from foretell.search.schedule.replay import Item, Starts, end, fits, longest_idle, replay, unroll
from foretell.search.schedule.solver import Budget
from foretell.search.schedule.ticks import Ticks, coarsened, copies

_DISPATCH = 400_000  # blocks × blocks × micro-batches up to which orders by rule are tried: 0.3 s
_AROUND = 420  # starts in a model around a pattern; beyond, presolve alone takes seconds
_DIRECT = 260  # starts in a model of everything
_CUTS = 4  # cuts tried of each pattern


@dataclass
class Finish:
    """The best order so far, how long it takes, and what no order can beat."""

    ticks: Ticks
    micro_batches: int
    bound: Fraction  # units
    progress: Progress
    least_idle: bool = False  # rather than the least makespan
    items: list[Item] = field(default_factory=list)
    starts: Starts = field(default_factory=list)
    length: int = 0  # ticks
    idle: int = 0  # ticks that some device waits between its first block and its last

    @property
    def is_least(self) -> bool:
        """Whether the bound is met."""
        short = self.length // self.ticks.fine <= self.bound
        return bool(self.items) and (self.idle == 0 if self.least_idle else short)

    def offer(self, items: list[Item]) -> None:
        """Take an order if it fits and is the shortest yet."""
        ticks = self.ticks
        if not fits(items, ticks.held, ticks.capacity):
            return
        starts = replay(items, ticks.time, ticks.devices, ticks.after)
        length, idle = int(end(starts, ticks.time)), int(longest_idle(starts, ticks))
        old, new = (self.length, self.idle), (length, idle)
        if not self.items or (new[::-1] < old[::-1] if self.least_idle else new < old):
            self.items, self.starts, self.length, self.idle = items, starts, length, idle
            self.progress("makespan", length / ticks.fine, float(self.bound))


def complete(
    ticks: Ticks,
    rate: Rate,
    micro_batches: int,
    budget: Budget,
    progress: Progress,
    *,
    known: Iterable[list[Item]] = (),
    least_idle: bool = False,
) -> Finish:
    """The shortest schedule found for so many micro-batches; `known` are orders to beat."""
    bound = bounds.makespan(ticks, micro_batches)
    best = Finish(ticks, micro_batches, bound, progress, least_idle)
    patterns: list[Repetend] = []
    for repetend in _equals(ticks, rate, budget):
        patterns.append(repetend)
        best.offer(unroll(repetend, len(ticks.time), micro_batches))
        if best.is_least:
            return best
    last = unroll(alone(ticks), len(ticks.time), micro_batches)
    for items in chain(_by_rule(ticks, micro_batches), known, [last]):
        best.offer(items)
        if best.is_least:
            return best
    coarse = coarsened(ticks)
    _directly(best, coarse, budget.part(0.6))
    rings = [r if coarse is ticks else tighten(coarse, r, Fraction(0)) for r in patterns]
    cuts = [cut for ring in rings for cut in _cuts(ring)]
    for size, pattern in [*dict.fromkeys(cuts), *_found_cuts(best, rings[0])]:
        if not best.is_least:
            _around(best, coarse, size, pattern, budget)
    return best


def _equals(ticks: Ticks, rate: Rate, budget: Budget) -> Iterator[Repetend]:
    """The best repetend and others of the same period."""
    best = rate.best
    yield best
    if best.unroll == 1:
        yield from greedy(ticks, best.period)
    for goal in GOALS:
        limit = min(budget.left / 8, 0.3)
        _, found = repeat(ticks, best.unroll, best.period, goal, budget, limit)
        if found is not None:
            yield found


def _by_rule(ticks: Ticks, micro_batches: int) -> Iterator[list[Item]]:
    if len(ticks.time) ** 2 * micro_batches <= _DISPATCH:
        yield from dispatch(ticks, micro_batches)


def _directly(best: Finish, coarse: Ticks, budget: Budget) -> None:
    """All starts as variables; proves the best when nothing shorter exists."""
    num = best.micro_batches
    floor = ceil(bounds.makespan(coarse, num)) * coarse.fine
    hint = replay(best.items, coarse.time, coarse.devices, coarse.after)
    most = int(end(hint, coarse.time)) - 1
    if best.is_least or most < floor or len(coarse.time) * num > _DIRECT:
        return
    status, starts = shortest_makespan(
        coarse, num, floor=floor, most=most, budget=budget, limit=budget.left, hint=hint
    )
    if starts is not None:
        best.offer(_in_order(starts))
    if status in ("best", "none") and coarse is best.ticks and coarse.is_faithful:
        best.bound = max(best.bound, _surely(best.ticks, best.length, num))


def _surely(ticks: Ticks, length: int, micro_batches: int) -> Fraction:
    """Real units that the least number of ticks stands for: less what blocks without time took."""
    if ticks.fine == 1:
        return Fraction(length)
    ticked = sum(1 for u in ticks.units if not u) * micro_batches
    return Fraction(-(-max(length - ticked, 0) // ticks.fine))  # whole units take whole time


def _around(best: Finish, coarse: Ticks, size: int, pattern: Pattern, budget: Budget) -> None:
    """The best warm-up and cool-down around one cut of a pattern of `size` micro-batches."""
    ticks = copies(coarse, size)
    num, more = pattern.micro_batches, -(-best.micro_batches // size) - pattern.micro_batches
    if more < 0 or len(ticks.time) * num > _AROUND:
        return
    floor = ceil(bounds.makespan(coarse, (num - 1) * size + 1)) * ticks.fine
    now = replay(best.items, coarse.time, coarse.devices, coarse.after)
    most = int(end(now, coarse.time)) - 1 - more * pattern.period
    if most < floor:
        return
    _, starts = shortest_makespan(
        ticks, num, floor=floor, most=most, budget=budget, limit=budget.left / 3, pattern=pattern
    )
    if starts is not None:
        items = repeated(starts, pattern, more)
        each = [(block // size, m * size + block % size) for block, m in items]
        best.offer([(block, m) for block, m in each if m < best.micro_batches])


def _in_order(starts: Sequence[Sequence[float]]) -> list[Item]:
    rows = enumerate(starts)
    return [(b, m) for _, b, m in sorted((s, b, m) for b, row in rows for m, s in enumerate(row))]


def _cuts(repetend: Repetend) -> list[tuple[int, Pattern]]:
    """Ways to cut the ring open: each says which instance of a block the pattern starts with."""
    found = {}
    for phase in sorted(set(repetend.offsets)):
        laps = [(s - phase) // repetend.period for s in repetend.start]
        index = tuple(max(laps) - lap for lap in laps)
        found[Pattern(index, repetend.period)] = sum(index)
    return [
        (repetend.unroll, p) for p in sorted(found, key=lambda p: (max(p.index), found[p]))[:_CUTS]
    ]


def _found_cuts(best: Finish, repetend: Repetend) -> Iterator[tuple[int, Pattern]]:
    """Patterns that a schedule found otherwise runs through, half way."""
    if repetend.unroll > 1:
        return
    for share in range(_CUTS):
        when = best.length // 2 + share * best.length // best.micro_batches // _CUTS
        index = tuple(sum(s < when for s in row) for row in best.starts)
        if max(index) < best.micro_batches:
            yield 1, Pattern(tuple(i - min(index) for i in index), repetend.period)
