"""From an order to start times: every block as soon as its devices and what it waits for allow.

A list of (block, micro-batch) that puts every block after what it waits for fixes the order on
every device, and with it the memory; starting everything as early as that order allows shortens
the ends of a schedule without a look at memory. The same pass runs on whole ticks and on real
seconds.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from foretell.errors import InfeasibleError
from foretell.search.schedule.integer_problem import Budget, Ticks, solve, solver
from foretell.search.schedule.local_search import arrays, listed
from foretell.search.schedule.problem import Problem
from foretell.search.schedule.repetend import Repetend

Item = tuple[int, int]  # block, micro-batch
Starts = list[list[float]]  # by block, by micro-batch


def unroll(repetend: Repetend, num_blocks: int, micro_batches: int) -> list[Item]:
    """All blocks of so many micro-batches in the order in which the pattern starts them."""
    size, period = repetend.unroll, repetend.period
    return [
        (block, m)
        for _, block, m in sorted(
            (repetend.start[block * size + m % size] + period * (m // size), block, m)
            for block in range(num_blocks)
            for m in range(micro_batches)
        )
    ]


def replay(
    items: Sequence[Item],
    time: Sequence[float],
    devices: Sequence[Sequence[int]],
    after: Sequence[Sequence[tuple[int, float]]],
) -> Starts:
    """The earliest start of everything, in this order on every device."""
    num = 1 + max(m for _, m in items)
    starts: Starts = [[-1.0] * num for _ in time]
    free = [0.0] * (1 + max(d for ds in devices for d in ds))
    for block, m in items:
        start = max(free[d] for d in devices[block])
        for on, lag in after[block]:
            assert starts[on][m] >= 0, f"block {block} of {m} is put before {on}, which it needs"
            start = max(start, starts[on][m] + time[on] + lag)
        starts[block][m] = start
        for d in devices[block]:
            free[d] = start + time[block]
    return starts


def starts_of(problem: Problem, items: Sequence[Item]) -> Starts:
    """The same in the problem's own seconds."""
    after = [[(w.on, w.lag) for w in waits] for waits in problem.after]
    return replay(items, problem.seconds, [b.devices for b in problem.blocks], after)


def end(starts: Sequence[Sequence[float]], time: Sequence[float]) -> float:
    """When the last block ends."""
    return max(s + t for row, t in zip(starts, time, strict=True) for s in row)


def longest_idle(starts: Sequence[Sequence[float]], ticks: Ticks) -> float:
    """The longest that a device waits between its first block and its last."""
    waits = [0.0]
    for on in ticks.by_device:
        if on:
            first = min(starts[i][0] for i in on)
            last = max(starts[i][-1] + ticks.time[i] for i in on)
            work = sum(ticks.time[i] for i in on) * len(starts[0])
            waits.append(last - first - work)
    return max(waits)


def peaks(items: Sequence[Item], held: Sequence[Sequence[tuple[int, int, int]]]) -> list[int]:
    """The most that each device holds in this order."""
    found = []
    for rows in held:
        rise, change = {i: r for i, r, _ in rows}, {i: c for i, _, c in rows}
        now = most = 0
        for block, _ in items:
            if block in rise:
                most = max(most, now + rise[block])
                now += change[block]
        found.append(most)
    return found


def fits(
    items: Sequence[Item],
    held: Sequence[Sequence[tuple[int, int, int]]],
    capacity: Sequence[int | None],
) -> bool:
    """Whether no device ever holds more than it can."""
    pairs = zip(peaks(items, held), capacity, strict=True)
    return all(room is None or peak <= room for peak, room in pairs)


# Schedules without search: always start next what can start first, by a rule where several can.
#
# Memory is kept as a banker would (→ `local_search.listed`).


Rule = Callable[[Ticks, int], tuple[list[int], int]]  # a key of each block, and one of each turn


def deepest(ticks: Ticks, num: int) -> tuple[list[int], int]:
    """Backward before forward; what nothing waits for fills the gaps."""
    late = max(ticks.head) + 1
    rows = zip(ticks.followers, ticks.head, strict=True)
    return [((0 if behind else late) - head) * num for behind, head in rows], 1


def _oldest(ticks: Ticks, num: int) -> tuple[list[int], int]:
    """One micro-batch as far as it goes, then the next."""
    return list(ticks.head), max(ticks.head) + 1


def _critical(ticks: Ticks, num: int) -> tuple[list[int], int]:
    """What has the longest way to go."""
    return [-tail * num for tail in ticks.tail], 1


RULES: tuple[Rule, ...] = (deepest, _oldest, _critical)


def dispatch(ticks: Ticks, micro_batches: int) -> Iterator[list[Item]]:
    """One order for each rule, as far as it ends and fits."""
    for rule in RULES:
        items = ordered(ticks, micro_batches, rule)
        if items is not None and fits(items, ticks.held, ticks.capacity):
            yield items


def ordered(ticks: Ticks, micro_batches: int, rule: Rule) -> list[Item] | None:
    """The order that a rule leads to, or None where it gets stuck."""
    key, turn = rule(ticks, micro_batches)
    found = listed(arrays(ticks), micro_batches, np.array(key, np.int64), turn)
    if len(found) < micro_batches * len(ticks.time):
        return None
    return [(int(i) // micro_batches, int(i) % micro_batches) for i in found]


# One micro-batch on its own: an order that fits into memory, or how much is missing and where.
#
# Micro-batches one after the other are always a schedule, so one that cannot run alone is the only
# way for a problem to have none.


_LIMIT = 5.0  # deterministic seconds; one micro-batch of any placement we met takes milliseconds


def alone(ticks: Ticks) -> Repetend:
    """Micro-batches one after the other, as a pattern."""
    for order in (ticks.order, _depth_first(ticks)):
        items = [(block, 0) for block in order]
        if fits(items, ticks.held, ticks.capacity):
            return _pattern(ticks, items)
    for device in range(len(ticks.capacity)):
        _require(ticks, device)
    starts = _search(ticks, None)
    if starts is None:
        raise _too_small(ticks, peaks([(i, 0) for i in ticks.order], ticks.held))
    return _pattern(ticks, [(i, 0) for i in sorted(range(len(starts)), key=starts.__getitem__)])


def _pattern(ticks: Ticks, items: list[Item]) -> Repetend:
    starts = replay(items, ticks.time, ticks.devices, ticks.after)
    period = int(end(starts, ticks.time))
    return Repetend(period, 1, tuple(int(row[0]) for row in starts))


def _depth_first(ticks: Ticks) -> list[int]:
    """Follow each branch as far as it goes before the next is begun: the least is held at once."""
    left = [len(waits) for waits in ticks.after]
    stack = [i for i in reversed(ticks.order) if not left[i]]
    done: list[int] = []
    while stack:
        done.append(i := stack.pop())
        for j, _ in ticks.followers[i]:
            left[j] -= 1
            if not left[j]:
                stack.append(j)
    return done


def _require(ticks: Ticks, device: int) -> None:
    """Raise unless the device alone could hold one micro-batch in some order."""
    room = ticks.capacity[device]
    if room is None or peaks([(i, 0) for i in ticks.order], ticks.held)[device] <= room:
        return
    starts = _search(ticks, device)
    order = sorted(range(len(ticks.time)), key=(starts or ticks.head).__getitem__)
    need = peaks([(i, 0) for i in order], ticks.held)
    if need[device] > room:
        raise _too_small(ticks, need, device)


def _search(ticks: Ticks, device: int | None) -> list[int] | None:
    """Starts of one micro-batch that fit every device, or that need least of one."""
    cp = solver().CpModel()
    total = sum(ticks.time) + sum(lag for waits in ticks.after for _, lag in waits)
    start = [cp.new_int_var(0, total, "") for _ in ticks.time]
    for i, waits in enumerate(ticks.after):
        for j, lag in waits:
            cp.add(start[i] >= start[j] + ticks.time[j] + lag)
    before = _orders(cp, ticks, start)
    for d, room in enumerate(ticks.capacity):
        if device is None and room is not None:
            _hold(cp, ticks.held[d], before, room)
    if device is not None:
        most = cp.new_int_var(0, sum(r for _, r, _ in ticks.held[device]), "")
        _hold(cp, ticks.held[device], before, most)
        cp.minimize(most)
    status, engine = solve(cp, Budget(_LIMIT), _LIMIT)
    return [engine.value(s) for s in start] if status in ("best", "found") else None


def _orders(cp: Any, ticks: Ticks, start: list[Any]) -> dict[tuple[int, int], Any]:
    before: dict[tuple[int, int], Any] = {}
    for a, b in sorted({(a, b) for on in ticks.by_device for a in on for b in on if a < b}):
        before[a, b] = cp.new_bool_var("")
        before[b, a] = ~before[a, b]
        for x, y in ((a, b), (b, a)):
            cp.add(start[y] >= start[x] + ticks.time[x]).only_enforce_if(before[x, y])
    return before


def _hold(
    cp: Any, held: Sequence[tuple[int, int, int]], before: dict[tuple[int, int], Any], room: Any
) -> None:
    for block, rise, _ in held:
        if rise > 0:
            earlier = sum(c * before[i, block] for i, _, c in held if i != block and c)
            cp.add(earlier + rise <= room)


def _too_small(ticks: Ticks, need: list[int], device: int | None = None) -> InfeasibleError:
    rooms = [n if r is None else r for n, r in zip(need, ticks.capacity, strict=True)]
    if device is None:
        device = max(range(len(need)), key=lambda d: need[d] - rooms[d])
    stays = max(ticks.left[device], 0)
    wanted, has = (need[device] + stays) * ticks.memory_unit, ticks.limits[device]
    what = "what all micro-batches leave behind" if stays else "one micro-batch"
    return InfeasibleError(
        f"device {device} needs memory {wanted:g} for {what}, it has {has:g}",
        hint=f"give it at least {wanted:g}, or place fewer blocks there",
    )
