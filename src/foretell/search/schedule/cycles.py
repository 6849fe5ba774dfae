"""The least period of a pattern whose laps and order on every device are kept.

Every wait and every pair of neighbours in a device's ring says `o_b ≥ o_a + length − laps · P`.
Around a cycle the starts cancel: `P ≥ Σ length / Σ laps`, and the largest such ratio is reached.
So from a period too short, the next candidate is the ratio of any cycle that contradicts it
(`least`).
"""

from collections.abc import Sequence
from fractions import Fraction
from math import lcm
from typing import NamedTuple

from foretell.search.schedule.repetend import Repetend
from foretell.search.schedule.ticks import Ticks, copies


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
