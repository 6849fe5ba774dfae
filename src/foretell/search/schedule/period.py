"""The shortest repetend: from the lower bound upward, then with several micro-batches a pattern.

For one micro-batch a repetend: try the bound; if it cannot be met, halve the gap between what is
proven impossible and the best found. For u = 2, 3, …: only a period under `u` times the best rate
helps, so ask for the largest such period; one "no" closes that `u` for good. `Rate.closed` says up
to which `u` nothing better exists; when the lower bound itself is met, no `u` can help. Under tight
memory a schedule has few states, and `states.py` answers for every `u` at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from foretell.search.schedule import states
from foretell.search.schedule.alone import alone
from foretell.search.schedule.cycles import tighten
from foretell.search.schedule.greedy import greedy
from foretell.search.schedule.repetend import Repetend, repeat
from foretell.search.schedule.solver import Budget
from foretell.search.schedule.ticks import MAX_UNROLL, Ticks

Progress = Callable[[str, float, float], None]  # what was reached, its value, the bound


@dataclass(frozen=True)
class Rate:
    """The best repetend, and what is known about better ones."""

    best: Repetend
    bound: Fraction  # units a micro-batch, for any repetend
    closed: int  # no repetend of up to so many micro-batches is better
    met: bool  # the bound is reached


def shortest(
    ticks: Ticks, bound: Fraction, unroll: int, budget: Budget, progress: Progress
) -> Rate:
    """The repetend with the least time a micro-batch that the budget finds."""
    best, closed = _single(ticks, bound, budget, progress)
    if unroll >= MAX_UNROLL and _rate(ticks, best) > bound:
        best, bound = _exact(ticks, best, bound, progress)
    size = 2
    while size <= unroll and _rate(ticks, best) > bound and budget.left > 0:
        best, sure = _several(ticks, best, size, bound, budget, progress)
        closed = size if sure and closed == size - 1 else closed
        size += 1
    closed = closed if ticks.is_faithful else 0
    return Rate(best, bound, closed, _rate(ticks, best) <= bound)


def _exact(
    ticks: Ticks, best: Repetend, bound: Fraction, progress: Progress
) -> tuple[Repetend, Fraction]:
    """Patterns of any length by their states, where those are few; and what none of them beats."""
    bound = max(bound, states.least(ticks, _rate(ticks, best)) or bound)
    if _rate(ticks, best) > bound:
        best = states.pattern(ticks, _rate(ticks, best), bound) or best
        progress("period", float(_rate(ticks, best)), float(bound))
    return best, bound


def _rate(ticks: Ticks, repetend: Repetend) -> Fraction:
    """Whole units a micro-batch: ticks beyond them are due to blocks without time."""
    return Fraction(repetend.period // ticks.fine, repetend.unroll)


def _single(
    ticks: Ticks, bound: Fraction, budget: Budget, progress: Progress
) -> tuple[Repetend, int]:
    """One micro-batch a repetend: the shortest, and 1 if that is certain, else 0."""
    low = ceil(bound)
    for found in greedy(ticks, ticks.ticks(low)):
        progress("period", float(low), float(bound))
        return found, 1
    best = alone(ticks)
    high = best.period // ticks.fine
    sure, step = True, low
    while low <= high and budget.left > 0:
        if step >= high:
            break
        status, found_ = repeat(ticks, 1, ticks.ticks(step), "latency", budget, budget.left / 2)
        if found_ is not None:
            best = tighten(ticks, found_, bound * ticks.fine)
            high = best.period // ticks.fine
            progress("period", float(high), float(bound))
        else:
            sure = sure and status == "none"
            low = step + 1
        step = (low + high) // 2 if low < high - 1 else low
    return best, int(sure and low >= high)


def _several(
    ticks: Ticks, best: Repetend, unroll: int, bound: Fraction, budget: Budget, progress: Progress
) -> tuple[Repetend, bool]:
    """The best repetend of up to so many micro-batches; whether it is sure to be."""
    limit = budget.left if unroll == 2 else budget.left / 3  # beyond two, little is gained
    while True:
        period = ceil(_rate(ticks, best) * unroll) - 1
        if period < bound * unroll:
            return best, True
        status, found = repeat(ticks, unroll, ticks.ticks(period), "any", budget, limit)
        if found is None:
            return best, status == "none"
        best = tighten(ticks, found, bound * unroll * ticks.fine)
        progress("period", float(_rate(ticks, best)), float(bound))
