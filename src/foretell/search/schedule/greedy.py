"""Patterns at the lower bound without a solver: blocks in order, each in the first place that is
free.

Tried in four ways: blocks of several devices first or in their turn, and the earliest place or the
earliest that leaves no new gap. On pipelines without sharded blocks this is 1F1B, and finds at
once what the solver would.
"""

from collections.abc import Iterator
from itertools import product

from foretell.search.schedule.repetend import Repetend, is_within
from foretell.search.schedule.ticks import Ticks

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
