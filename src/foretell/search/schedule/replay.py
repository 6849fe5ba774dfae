"""Orders of blocks: replayed to start times, and found by simple rules.

An order of all (block, micro-batch) pairs fixes the start of everything (→ `replay`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from foretell.compiled import B2, I1, I2, compiled
from foretell.errors import InfeasibleError
from foretell.search.schedule.exact_search import Repetend
from foretell.search.schedule.integer_problem import Budget, IntegerProblem, solve, solver
from foretell.search.schedule.problem import Problem

Item = tuple[int, int]  # block, micro-batch
NEVER = 1 << 60  # makespan of an order that does not fit into memory


class Arrays(NamedTuple):
    """A problem in rows: devices and waits of block b are those from its first to the next's."""

    time: I1
    first_device: I1
    device: I1
    rise: I1  # memory, aligned with `device`
    change: I1
    first_wait: I1
    wait: I1
    lag: I1
    room: I1  # of each device; -1: unlimited
    reach: B2  # [a, b]: b waits for a, directly or not
    first_claim: I1  # of each device, into `claim`
    claim: I1  # the most a micro-batch will hold there once so many of its blocks are done


def arrays(ticks: IntegerProblem) -> Arrays:
    """The rows of a problem in whole numbers."""
    num = len(ticks.time)
    held = [{i: (r, c) for i, r, c in rows} for rows in ticks.held]
    uses = [(d, *held[d].get(b, (0, 0))) for b in range(num) for d in ticks.devices[b]]
    reach = np.zeros((num, num), np.bool_)
    for a, behind in enumerate(ticks.reach):
        reach[a, list(behind)] = True
    device, rise, change = (np.array([u[k] for u in uses], np.int64) for k in range(3))
    return Arrays(
        np.array(ticks.time, np.int64),
        _row_offsets([len(ds) for ds in ticks.devices]),
        device,
        rise,
        change,
        *wait_arrays(ticks.after),
        np.array([-1 if r is None else r for r in ticks.capacity], np.int64),
        reach,
        _row_offsets([len(rows) + 1 for rows in ticks.held]),
        np.array([c for rows in ticks.held for c in _remaining_peaks(rows)], np.int64),
    )


def _remaining_peaks(rows: Sequence[tuple[int, int, int]]) -> list[int]:
    """The most a micro-batch will hold on a device once so many of its rows are done."""
    now, levels = 0, []
    for _, rise, change in rows:
        levels.append(max(now, now + rise))
        now += change
    levels.append(now)
    return [max(levels[k:]) for k in range(len(levels))]


def wait_arrays(waits: Sequence[Sequence[tuple[int, int]]]) -> tuple[I1, I1, I1]:
    """Of each block where its waits begin, then the blocks and the lags of all waits."""
    every = np.array([w for row in waits for w in row], np.int64).reshape(-1, 2)
    return _row_offsets([len(row) for row in waits]), every[:, 0].copy(), every[:, 1].copy()


def _row_offsets(sizes: Sequence[int]) -> I1:
    return np.concatenate([[0], np.cumsum(np.array(sizes, np.int64))])


@compiled
def list_schedule(p: Arrays, num: int, key: I1, turn: int) -> I1:
    """Always what can start first, of equals the least `key[block] + turn · micro-batch`.

    Memory is kept as a banker would: a block that takes some starts only if every micro-batch
    already begun on that device can still be finished. Shorter than all where that gets stuck.
    """
    many, devices = len(p.time), len(p.room)
    free, promised = np.zeros(devices, np.int64), np.zeros(devices, np.int64)
    done = np.zeros((devices, num), np.int64)
    then, ends = np.zeros(many, np.int64), np.zeros((many, num), np.int64)
    order, size = np.zeros(many * num, np.int64), 0
    while size < many * num:
        best, when = -1, 0
        for b in range(many):
            m = then[b]
            if m == num or not _memory_allows(p, b, m, done, promised):
                continue
            now = _ready_time(p, b, m, then, ends, free)
            if now < 0:
                continue
            if best >= 0:
                a, c = key[b] + turn * m, key[best] + turn * then[best]
                if now > when or (now == when and a >= c):
                    continue
            best, when = b, now
        if best < 0:
            break
        m = then[best]
        order[size] = best * num + m
        size += 1
        ends[best, m] = when + p.time[best]
        then[best] += 1
        for e in range(p.first_device[best], p.first_device[best + 1]):
            free[p.device[e]] = when + p.time[best]
            _reserve_memory(p, e, m, done, promised)
    return order[:size]


@compiled
def _ready_time(p: Any, b: Any, m: Any, then: Any, ends: Any, free: Any) -> Any:
    """When a block could start; −1 as long as what it waits for has not run."""
    now = 0
    for e in range(p.first_wait[b], p.first_wait[b + 1]):
        on = p.wait[e]
        if then[on] <= m:
            return -1
        now = max(now, ends[on, m] + p.lag[e])
    for e in range(p.first_device[b], p.first_device[b + 1]):
        now = max(now, free[p.device[e]])
    return now


@compiled
def _memory_allows(p: Any, b: Any, m: Any, done: Any, promised: Any) -> bool:
    """Whether every device of a block can promise its micro-batch all it will hold."""
    for e in range(p.first_device[b], p.first_device[b + 1]):
        d = p.device[e]
        begins = (p.rise[e] > 0 or p.change[e] != 0) and done[d, m] == 0
        if begins and p.room[d] >= 0 and promised[d] + p.claim[p.first_claim[d]] > p.room[d]:
            return False
    return True


@compiled
def _reserve_memory(p: Any, e: Any, m: Any, done: Any, promised: Any) -> None:
    """Note that a block runs on one of its devices."""
    d = p.device[e]
    if p.room[d] < 0 or (p.rise[e] <= 0 and p.change[e] == 0):
        return
    first, many = p.first_claim[d], p.first_claim[d + 1] - p.first_claim[d] - 1
    if done[d, m] > 0:
        promised[d] -= p.claim[first + done[d, m]]
    done[d, m] += 1
    if done[d, m] < many:
        promised[d] += p.claim[first + done[d, m]]


@compiled
def order_makespan(p: Arrays, num: int, order: I1) -> int:
    """The makespan of an order; a very large number where it holds too much."""
    n, devices = len(order), len(p.room)
    start, cause = np.zeros(n, np.int64), np.zeros(n, np.int64)
    state = np.zeros((3, devices), np.int64)
    most, _, over = _replay_items(p, num, order, start, cause, state)
    return most if over == 0 else NEVER


@compiled
def starts_and_peaks(p: Arrays, num: int, order: I1) -> tuple[I1, I1]:
    """When every item starts, and the most that each device holds."""
    start, cause = np.zeros(len(order), np.int64), np.zeros(len(order), np.int64)
    _replay_items(p, num, order, start, cause, np.zeros((3, len(p.room)), np.int64))
    now, most = np.zeros(len(p.room), np.int64), np.zeros(len(p.room), np.int64)
    for item in order:
        b = item // num
        for e in range(p.first_device[b], p.first_device[b + 1]):
            d = p.device[e]
            most[d] = max(most[d], now[d] + p.rise[e])
            now[d] += p.change[e]
    return start, most


@compiled
def _replay_items(p: Any, num: Any, order: Any, start: Any, cause: Any, state: Any) -> Any:
    """Starts and causes, in place; the makespan, what ends last, how often memory is too small.

    A cause is the item before it on a device, or −2 less the item whose result it waits for.
    """
    for d in range(state.shape[1]):
        state[0, d], state[1, d], state[2, d] = 0, -1, 0
    most, last, over = 0, -1, 0
    for k in range(len(order)):
        item = order[k]
        b, m = item // num, item % num
        now, why = 0, -1
        for e in range(p.first_wait[b], p.first_wait[b + 1]):
            on = p.wait[e] * num + m
            ready = start[on] + p.time[p.wait[e]] + p.lag[e]
            if ready > now:
                now, why = ready, -2 - on
        for e in range(p.first_device[b], p.first_device[b + 1]):
            d = p.device[e]
            if state[0, d] > now:
                now, why = state[0, d], state[1, d]
        start[item], cause[item] = now, why
        end = now + p.time[b]
        for e in range(p.first_device[b], p.first_device[b + 1]):
            d = p.device[e]
            if p.room[d] >= 0:
                if state[2, d] + p.rise[e] > p.room[d]:
                    over += 1
                state[2, d] += p.change[e]
            state[0, d], state[1, d] = end, item
        if end > most:
            most, last = end, item
    return most, last, over


# From an order to start times: every block as soon as its devices and what it waits for allow.
#
# A list of (block, micro-batch) that puts every block after what it waits for fixes the order on
# every device, and with it the memory; starting everything as early as that order allows shortens
# the ends of a schedule without a look at memory. The same pass runs on whole ticks and on real
# seconds.


Starts = list[list[float]]  # by block, by micro-batch


def unrolled_order(repetend: Repetend, num_blocks: int, micro_batches: int) -> list[Item]:
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


def end_time(starts: Sequence[Sequence[float]], time: Sequence[float]) -> float:
    """When the last block ends."""
    return max(s + t for row, t in zip(starts, time, strict=True) for s in row)


def order_by_start(starts: Sequence[Sequence[float]]) -> list[Item]:
    """Blocks and micro-batches by when they start."""
    rows = enumerate(starts)
    return [(b, m) for _, b, m in sorted((s, b, m) for b, row in rows for m, s in enumerate(row))]


def longest_idle(starts: I2, ticks: IntegerProblem) -> float:
    """The longest that a device waits between its first block and its last."""
    waits = [0.0]
    for on in ticks.by_device:
        if on:
            first = min(starts[i][0] for i in on)
            last = max(starts[i][-1] + ticks.time[i] for i in on)
            work = sum(ticks.time[i] for i in on) * len(starts[0])
            waits.append(float(last - first - work))
    return max(waits)


def peak_memory(items: Sequence[Item], held: Sequence[Sequence[tuple[int, int, int]]]) -> list[int]:
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


def fits_memory(
    items: Sequence[Item],
    held: Sequence[Sequence[tuple[int, int, int]]],
    capacity: Sequence[int | None],
) -> bool:
    """Whether no device ever holds more than it can."""
    pairs = zip(peak_memory(items, held), capacity, strict=True)
    return all(room is None or peak <= room for peak, room in pairs)


# Schedules without search: always start next what can start first, by a rule where several can.
#
# Memory is kept as a banker would (→ `list_schedule`).


Rule = Callable[
    [IntegerProblem, int], tuple[list[int], int]
]  # a key of each block, and one of each turn


def backward_first(ticks: IntegerProblem, num: int) -> tuple[list[int], int]:
    """Backward before forward; what nothing waits for fills the gaps."""
    late = max(ticks.head) + 1
    rows = zip(ticks.followers, ticks.head, strict=True)
    return [((0 if behind else late) - head) * num for behind, head in rows], 1


def _oldest_first(ticks: IntegerProblem, num: int) -> tuple[list[int], int]:
    """One micro-batch as far as it goes, then the next."""
    return list(ticks.head), max(ticks.head) + 1


def _critical_first(ticks: IntegerProblem, num: int) -> tuple[list[int], int]:
    """What has the longest way to go."""
    return [-tail * num for tail in ticks.tail], 1


RULES: tuple[Rule, ...] = (backward_first, _oldest_first, _critical_first)


def list_schedules(ticks: IntegerProblem, micro_batches: int) -> Iterator[list[Item]]:
    """One order for each rule, as far as it ends and fits."""
    found = arrays(ticks)
    for rule in RULES:
        order = _by_rule(ticks, found, micro_batches, rule)
        if len(order) and order_makespan(found, micro_batches, order) < NEVER:
            yield _items(order, micro_batches)


def order_by_rule(ticks: IntegerProblem, micro_batches: int, rule: Rule) -> list[Item] | None:
    """The order that a rule leads to, or None where it gets stuck."""
    order = _by_rule(ticks, arrays(ticks), micro_batches, rule)
    return _items(order, micro_batches) if len(order) else None


def _by_rule(ticks: IntegerProblem, found: Arrays, micro_batches: int, rule: Rule) -> I1:
    key, turn = rule(ticks, micro_batches)
    order = list_schedule(found, micro_batches, np.array(key, np.int64), turn)
    return order if len(order) == micro_batches * len(ticks.time) else order[:0]


def _items(order: I1, micro_batches: int) -> list[Item]:
    return [divmod(i, micro_batches) for i in order.tolist()]


# One micro-batch on its own: an order that fits into memory, or how much is missing and where.
#
# Micro-batches one after the other are always a schedule, so one that cannot run alone is the only
# way for a problem to have none.


_LIMIT = 5.0  # deterministic seconds; one micro-batch of any placement we met takes milliseconds


def sequential_pattern(ticks: IntegerProblem, budget: Budget | None = None) -> Repetend:
    """Micro-batches one after the other, as a pattern; the work is not counted."""
    free = Budget(_LIMIT) if budget is None else replace(budget, left=_LIMIT, whole=None)
    for order in (ticks.order, _depth_first(ticks)):
        items = [(block, 0) for block in order]
        if fits_memory(items, ticks.held, ticks.capacity):
            return _pattern_of(ticks, items)
    for device in range(len(ticks.capacity)):
        _require_device(ticks, device, free)
    starts = _solve_one_micro_batch(ticks, None, free)
    if starts is None:
        raise _memory_error(ticks, peak_memory([(i, 0) for i in ticks.order], ticks.held))
    return _pattern_of(ticks, [(i, 0) for i in sorted(range(len(starts)), key=starts.__getitem__)])


def _pattern_of(ticks: IntegerProblem, items: list[Item]) -> Repetend:
    starts = replay(items, ticks.time, ticks.devices, ticks.after)
    period = int(end_time(starts, ticks.time))
    return Repetend(period, 1, tuple(int(row[0]) for row in starts))


def _depth_first(ticks: IntegerProblem) -> list[int]:
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


def _require_device(ticks: IntegerProblem, device: int, budget: Budget) -> None:
    """Raise unless the device alone could hold one micro-batch in some order."""
    room = ticks.capacity[device]
    if room is None or peak_memory([(i, 0) for i in ticks.order], ticks.held)[device] <= room:
        return
    starts = _solve_one_micro_batch(ticks, device, budget)
    order = sorted(range(len(ticks.time)), key=(starts or ticks.head).__getitem__)
    need = peak_memory([(i, 0) for i in order], ticks.held)
    if need[device] > room:
        raise _memory_error(ticks, need, device)


def _solve_one_micro_batch(
    ticks: IntegerProblem, device: int | None, budget: Budget
) -> list[int] | None:
    """Starts of one micro-batch that fit every device, or that need least of one."""
    cp = solver().CpModel()
    total = sum(ticks.time) + sum(lag for waits in ticks.after for _, lag in waits)
    start = [cp.new_int_var(0, total, "") for _ in ticks.time]
    for i, waits in enumerate(ticks.after):
        for j, lag in waits:
            cp.add(start[i] >= start[j] + ticks.time[j] + lag)
    before = add_device_order(cp, ticks, start)
    for d, room in enumerate(ticks.capacity):
        if device is None and room is not None:
            add_memory_limit(cp, ticks.held[d], before, room)
    if device is not None:
        most = cp.new_int_var(0, sum(r for _, r, _ in ticks.held[device]), "")
        add_memory_limit(cp, ticks.held[device], before, most)
        cp.minimize(most)
    status, engine = solve(cp, replace(budget), _LIMIT)
    return [engine.value(s) for s in start] if status in ("best", "found") else None


def add_device_order(
    cp: Any, ticks: IntegerProblem, start: list[Any], period: Any = None
) -> dict[tuple[int, int], Any]:
    """Which of two blocks of a device goes first, again and again where there is a period."""
    before: dict[tuple[int, int], Any] = {}
    for a, b in sorted({(a, b) for on in ticks.by_device for a in on for b in on if a < b}):
        before[a, b] = cp.new_bool_var("")
        before[b, a] = ~before[a, b]
        for x, y in ((a, b), (b, a)):
            cp.add(start[y] >= start[x] + ticks.time[x]).only_enforce_if(before[x, y])
            if period is not None:
                cp.add(start[x] + period >= start[y] + ticks.time[y])
    return before


def add_memory_limit(
    cp: Any, held: Sequence[tuple[int, int, int]], before: dict[tuple[int, int], Any], room: Any
) -> None:
    for block, rise, _ in held:
        if rise > 0:
            earlier = sum(c * before[i, block] for i, _, c in held if i != block and c)
            cp.add(earlier + rise <= room)


def _memory_error(
    ticks: IntegerProblem, need: list[int], device: int | None = None
) -> InfeasibleError:
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
