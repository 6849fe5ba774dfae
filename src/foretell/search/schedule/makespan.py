"""Every start of a few micro-batches as a variable: the least makespan, or the least around a
pattern.

    s_{b,m} ≥ s_{a,m} + t_a + lag                   b waits for a                     → `_waits`
    s_{b,m+1} ≥ s_{b,m} + t_b                       micro-batches in turn             → `_starts`
    one block at a time on each device                                                → `_devices`
    Σ amounts held from `taken` to the end of `given` ≤ capacity                      → `_memory`

Around a pattern of period `P`, instance `i_b` of block `b` belongs to the pattern, earlier ones to
the warm-up, later ones to the cool-down. Nothing separates the three in time; on each device they
follow each other, and the pattern's blocks span at most `P`, so that it can be repeated any number
of times:

    s_{a,i_a} + t_a ≤ s_{b,i_b} + P                 a, b on one device                → `_around`
    s_{b,i_b} ≥ s_{a,i_a} − (i_a − i_b)·P + t_a     b waits for a                     → `_linked`
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from foretell.search.schedule.bounds import residences
from foretell.search.schedule.replay import Item
from foretell.search.schedule.solver import INTERVALS, Budget, Status, solve, solver
from foretell.search.schedule.ticks import Ticks


@dataclass(frozen=True)
class Pattern:
    """Which instance of each block is repeated, and how often."""

    index: tuple[int, ...]
    period: int

    @property
    def micro_batches(self) -> int:
        """How many the pattern takes to show every block once, with its warm-up and cool-down."""
        return 1 + max(self.index)


@dataclass(frozen=True)
class _Model:
    """The solver's model and the start of every block of every micro-batch."""

    cp: Any
    ticks: Ticks
    start: list[list[Any]]
    most: int


def shortest(
    ticks: Ticks,
    micro_batches: int,
    *,
    floor: int,
    most: int,
    budget: Budget,
    limit: float,
    pattern: Pattern | None = None,
    hint: Sequence[Sequence[float]] | None = None,
) -> tuple[Status, list[list[int]] | None]:
    """Starts that end within `most` ticks, as early as found; `none` proves there are none."""
    model = _encode(ticks, micro_batches, most)
    cp = model.cp
    if pattern is not None:
        _around(model, pattern)
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


def repeated(starts: Sequence[Sequence[int]], pattern: Pattern, more: int) -> list[Item]:
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


def _encode(ticks: Ticks, micro_batches: int, most: int) -> _Model:
    model = _Model(solver().CpModel(), ticks, [], most)
    _starts(model, micro_batches)
    _waits(model)
    _devices(model)
    for device in range(len(ticks.capacity)):
        _memory(model, device)
    return model


def _starts(model: _Model, micro_batches: int) -> None:
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


def _waits(model: _Model) -> None:
    for i, waits in enumerate(model.ticks.after):
        for j, lag in waits:
            for then, first in zip(model.start[i], model.start[j], strict=True):
                model.cp.add(then >= first + model.ticks.time[j] + lag)


def _devices(model: _Model) -> None:
    cp, time = model.cp, model.ticks.time
    spans = [
        [cp.new_fixed_size_interval_var(s, time[i], "") for s in row]
        for i, row in enumerate(model.start)
    ]
    for on in model.ticks.by_device:
        cp.add_no_overlap([span for i in on for span in spans[i]])


def _memory(model: _Model, device: int) -> None:
    ticks, cp, room = model.ticks, model.cp, model.ticks.capacity[device]
    num = len(model.start[0])
    if room is None or sum(r for _, r, _ in ticks.held[device]) * num <= room:
        return
    found = residences(ticks, device)
    if found is None:
        _level(model, device, room)
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


def _level(model: _Model, device: int, room: int) -> None:
    """Memory that cannot be paired: the level itself, taken at starts and given back at ends."""
    times: list[Any] = []
    changes: list[int] = []
    for block, rise, change in model.ticks.held[device]:
        for start in model.start[block]:
            times += [start, start + model.ticks.time[block]]
            changes += [rise, change - rise]
    low = -sum(abs(c) for c in changes)
    model.cp.add_reservoir_constraint(times, changes, low, room)


def _around(model: _Model, pattern: Pattern) -> None:
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
            _linked(model, pattern, i, j, time[j] + lag)


def _linked(model: _Model, pattern: Pattern, block: int, on: int, length: int) -> None:
    """What `block` waits for may have run some repetitions earlier, in each of the three parts."""
    cp, period = model.cp, pattern.period
    first, then = pattern.index[on], pattern.index[block]
    begin, end = model.start[on][first], model.start[block][then]
    cp.add(end >= begin - (first - then) * period + length)
    for m in range(then + 1, first):
        cp.add(end + (m - then) * period >= model.start[on][m] + length)
        cp.add(model.start[block][m] >= begin - (first - m) * period + length)
