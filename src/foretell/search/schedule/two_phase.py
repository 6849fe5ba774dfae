"""Tessel's own search (Lin et al., HPCA 2024), kept beside ours to compare with.

Blocks are put in one line; every way to cut the line into `n` runs gives micro-batch `n-1` to the
first run down to 0 to the last, and one model finds the shortest repetend for it, under the best
so far. The winner's warm-up and cool-down are then made as short as they can be on their own, and
the three parts are put one after the other, with a barrier between them (`_join`). `n` grows until
no device idles.

Differences from the published code: CP-SAT in place of Z3, ties in a fixed order.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from math import ceil
from typing import Any

from foretell.errors import InputError
from foretell.search.schedule.exact_search import Progress, Rate
from foretell.search.schedule.integer_problem import (
    INTERVALS,
    Budget,
    Ticks,
    residences,
    solve,
    solver,
)
from foretell.search.schedule.repetend import Repetend
from foretell.search.schedule.replay import Item, Starts, alone

_SPREAD = 8  # micro-batches in flight to try where memory sets no limit


@dataclass(frozen=True)
class Plan:
    """A repetend, and when everything starts, in ticks."""

    rate: Rate
    starts: Starts


def two_phase(
    ticks: Ticks, bound: Fraction, micro_batches: int, budget: Budget, progress: Progress
) -> Plan | None:
    """The schedule that the two phases find for so many micro-batches; None if they find none."""
    if any(r is not None and residences(ticks, d) is None for d, r in enumerate(ticks.capacity)):
        raise InputError(
            "Tessel's two phases need memory that each micro-batch takes before it gives it back",
            hint="leave the method out: the search counts any changes of memory",
        )
    alone(ticks)  # raises where not even one micro-batch fits
    best = _repetend(ticks, bound, micro_batches, budget, progress)
    if best is None:
        return None
    index = tuple(max(best.laps) - lap for lap in best.laps)
    parts = [[], []]  # type: list[list[Item]]
    for block, i in enumerate(index):
        parts[0] += [(block, m) for m in range(i)]
        parts[1] += [(block, m) for m in range(i + 1, max(index) + 1)]
    ends = [_shortest(ticks, part, budget) or _in_turn(ticks, best, part) for part in parts]
    return Plan(Rate(best, bound), _join(ticks, best, index, ends, micro_batches))


def _repetend(
    ticks: Ticks, bound: Fraction, micro_batches: int, budget: Budget, progress: Progress
) -> Repetend | None:
    best: Repetend | None = None
    floor = ceil(bound) * ticks.fine
    for spread in range(1, 1 + min(micro_batches, _most_in_flight(ticks))):
        for index in _candidates(ticks, spread):
            if budget.left <= 0 or (best is not None and best.period <= floor):
                return best
            high = sum(ticks.time) if best is None else best.period - 1
            found = _pack(ticks, index, floor, high, budget)
            if found is not None:
                best = found
                progress("period", best.period / ticks.fine, float(bound))
    return best


def _most_in_flight(ticks: Ticks) -> int:
    """As many micro-batches as the device with the least room for them can hold, and one."""
    most = [
        1 - (-room // taken)
        for room, held in zip(ticks.capacity, ticks.held, strict=True)
        if room is not None and (taken := sum(max(c, 0) for _, _, c in held))
    ]
    return max(1, min([*most, len(ticks.time)] if most else [_SPREAD, len(ticks.time)]))


def _candidates(ticks: Ticks, spread: int) -> Iterator[tuple[int, ...]]:
    """The micro-batch of each block, falling along the line from `spread` - 1 to 0."""
    line = sorted(range(len(ticks.time)), key=lambda i: (ticks.head[i], ticks.devices[i][0], i))
    for cuts in combinations(range(1, len(line)), spread - 1):
        index = [0] * len(line)
        for place, block in enumerate(line):
            index[block] = sum(cut > place for cut in cuts)
        yield tuple(index)


def _pack(
    ticks: Ticks, index: tuple[int, ...], low: int, high: int, budget: Budget
) -> Repetend | None:
    """The shortest repetend in which each block runs for the micro-batch given."""
    cp = solver().CpModel()
    period = cp.new_int_var(low, high, "")
    span = sum(ticks.time)
    start = [cp.new_int_var(0, span, "") for _ in ticks.time]
    for i, waits in enumerate(ticks.after):
        for j, lag in waits:
            cp.add(start[i] + (index[j] - index[i]) * period >= start[j] + ticks.time[j] + lag)
    before: dict[tuple[int, int], Any] = {}
    for a, b in sorted({(a, b) for on in ticks.by_device for a in on for b in on if a < b}):
        before[a, b] = cp.new_bool_var("")
        before[b, a] = ~before[a, b]
        for x, y in ((a, b), (b, a)):
            cp.add(start[y] >= start[x] + ticks.time[x]).only_enforce_if(before[x, y])
            cp.add(start[x] + period >= start[y] + ticks.time[y])
    for room, held in zip(ticks.capacity, ticks.held, strict=True):
        for block, rise, _ in held if room is not None else ():
            earlier = sum(c * before[i, block] for i, _, c in held if i != block and c)
            cp.add(earlier + sum(c * index[i] for i, _, c in held) + rise <= room)
    cp.minimize(period)
    status, engine = solve(cp, budget, budget.left / 4)
    if status not in ("best", "found"):
        return None
    length = engine.value(period)
    starts = [engine.value(s) - index[i] * length for i, s in enumerate(start)]
    return Repetend(length, 1, tuple(starts))


def _shortest(ticks: Ticks, part: list[Item], budget: Budget) -> dict[Item, int]:
    """The least makespan of a warm-up or a cool-down on its own."""
    if not part:
        return {}
    cp = solver().CpModel()
    total = sum(ticks.time[block] for block, _ in part)
    total += sum(lag for waits in ticks.after for _, lag in waits) * (1 + max(m for _, m in part))
    start = {item: cp.new_int_var(0, total, "") for item in part}
    last = cp.new_int_var(0, total, "")
    for (block, m), variable in start.items():
        cp.add(last >= variable + ticks.time[block])
        for j, lag in ticks.after[block]:
            if (j, m) in start:
                cp.add(variable >= start[j, m] + ticks.time[j] + lag)
    for device, on in enumerate(ticks.by_device):
        here = [item for item in part if item[0] in on]
        cp.add_no_overlap(
            [cp.new_fixed_size_interval_var(start[i], ticks.time[i[0]], "") for i in here]
        )
        _hold(cp, ticks, device, start, last)
    cp.minimize(last)
    status, engine = solve(cp, budget, max(budget.left / 2, 1.0), INTERVALS)
    if status in ("best", "found"):
        return {item: engine.value(s) for item, s in start.items()}
    return {}


def _in_turn(ticks: Ticks, best: Repetend, part: list[Item]) -> dict[Item, int]:
    """A part one block at a time, in the order of the repetend: where time ran out for better."""
    now, found = 0, {}
    longest_lag = max((lag for waits in ticks.after for _, lag in waits), default=0)
    for block, m in sorted(part, key=lambda i: (best.start[i[0]] + i[1] * best.period, i)):
        found[block, m] = now
        now += ticks.time[block] + longest_lag
    return found


def _hold(cp: Any, ticks: Ticks, device: int, start: dict[Item, Any], last: Any) -> None:
    """Memory within a part: taken before it, there from its start; given later, to its end."""
    room, found = ticks.capacity[device], residences(ticks, device)
    if room is None or not found:
        return
    spans, amounts = [], []
    for taken, given, amount in found:
        both = {m for block, m in start if block in (taken, given)}
        for m in sorted(both):
            begin = start.get((taken, m), 0)
            stop = start[given, m] + ticks.time[given] if (given, m) in start else last
            size = cp.new_int_var(0, 1 << 40, "")
            spans.append(cp.new_interval_var(begin, size, stop, ""))
            amounts.append(amount)
    cp.add_cumulative(spans, amounts, room)


def _join(
    ticks: Ticks,
    best: Repetend,
    index: tuple[int, ...],
    ends: list[dict[Item, int]],
    micro_batches: int,
) -> Starts:
    """Warm-up, repetends, cool-down, each once the one before has ended on all devices."""
    warm, cool = ends
    first = [s + i * best.period for s, i in zip(best.start, index, strict=True)]
    lag = max((lag for waits in ticks.after for _, lag in waits), default=0)  # crosses a barrier
    shift = max((s + ticks.time[b] + lag for (b, _), s in warm.items()), default=0) - min(first)
    times = micro_batches - max(index)
    core_end = shift + (times - 1) * best.period
    core_end += max(s + t for s, t in zip(first, ticks.time, strict=True)) + lag
    starts: Starts = [[0.0] * micro_batches for _ in ticks.time]
    for (block, m), s in warm.items():
        starts[block][m] = s
    for block, i in enumerate(index):
        for k in range(times):
            starts[block][i + k] = shift + first[block] + k * best.period
    for (block, m), s in cool.items():
        starts[block][m + times - 1] = core_end + s
    return starts
