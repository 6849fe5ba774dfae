"""Orders improved by simulated annealing, compiled: from any legal order to a shorter makespan.

Every item, a (block, micro-batch) pair, has a start `s` (the longest way to it) and a tail `q` (the
longest way from its end to the end of all); the makespan is the largest `s + t + q`. A move takes
two neighbours of a critical chain that wait for a device only and runs the second first, together
with what it needs (or the first behind the second, with what needs it); the same move may be made
for the micro-batches behind these too, and a few moves are drawn from all pairs that lie near each
other. It changes a window of the order. Paths through the window follow from new starts in it
(computed from the old ones before it) and new tails (from the old ones behind it); other paths
stay. So a rejected move costs the window only (→ `_trial_makespan`), an accepted one what changes
besides (→ `_accept_trial`). Orders over the memory limit are passed through at a penalty, and never
kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from foretell.compiled import I1, compiled
from foretell.search.schedule.integer_problem import Budget, IntegerProblem
from foretell.search.schedule.replay import NEVER, Arrays, Item, arrays, order_makespan, wait_arrays

_PACE = 8e-9  # seconds of work for an item, or one of its waits or devices, looked at once
_HOT, _COLD = 0.3, 0.03  # temperatures, in mean times of a block
_CHUNK = 60_000  # of these between two looks at the clock; and
_TURNS = 40  # of each item, so that what an order leads to is worked out once for many moves
_FAR = 24  # places that a move drawn at random spans at most
_CRITICAL = 0.35  # share of moves taken from a critical chain
_ANOTHER = 0.05  # of these, for which another critical chain is looked for
_SERIES = 0.04  # share of moves made for several micro-batches


class OrderState(NamedTuple):
    """An order, what it leads to, and room for a move.

    An item is `block · micro-batches + number`; a slot the same for an item on one of its devices.
    """

    order: I1
    trial: I1  # the order with a move in it
    place: I1  # of each item in `trial`
    start: I1
    tail: I1
    kept: I1  # starts before the move, then tails
    mark: I1  # of places: whether a move takes what is there
    stale: I1  # of items: whether what leads to it has changed
    block: I1
    turn: I1  # micro-batch of each item
    chain: I1  # pairs of neighbours on devices in a critical chain
    item: I1  # of each slot
    before: I1  # of each slot: the slot before it on its device, −1 for none
    behind: I1
    level: I1  # memory taken there as the item starts
    last: I1  # of each device: its last slot so far; −2: not seen
    first: I1
    full: I1  # memory
    end: I1  # the last slot of all
    first_follow: I1  # of each block, into `follow`
    follow: I1
    follow_lag: I1
    counters: I1  # the four below


_MOST, _OVER, _PAIRS, _LOOKED = 0, 1, 2, 3  # makespan, memory too small, pairs in `chain`, work


def annealed_order(
    ticks: IntegerProblem, items: Sequence[Item], micro_batches: int, floor: int, budget: Budget, *,
    seed: int = 1,
) -> list[Item]:  # fmt: skip
    """The shortest order that annealing from this one meets within the budget."""
    found = arrays(ticks)
    order = np.array([b * micro_batches + m for b, m in items], np.int64)
    best, least = order, order_makespan(found, micro_batches, order)
    walk = _order_state(ticks, found, micro_batches)
    hot, cold = _HOT * float(np.mean(found.time)), _COLD * float(np.mean(found.time))
    looks = max(_CHUNK, _TURNS * len(order))
    whole, turn = budget.left, 0
    while least > floor and not budget.is_over:
        heat = hot * (cold / hot) ** (1 - budget.left / whole)
        order, now, one, kept, looked = anneal(
            found, walk, micro_batches, order, seed + turn, looks, heat, floor,
            int(np.max(found.time)),
        )  # fmt: skip
        turn += 1
        if kept < least:
            best, least = one, kept
        elif now > least + 4 * heat + 1 or turn % 64 == 0:
            order = best  # lost its way: again from the best
        budget.spend(looked * _PACE)
    return [(int(i) // micro_batches, int(i) % micro_batches) for i in best]


def _order_state(ticks: IntegerProblem, found: Arrays, num: int) -> OrderState:
    """Room for a walk over orders."""
    many, devices = len(found.time), len(found.room)
    item, slot = many * num, len(found.device) * num
    each = np.array([b for b, on in enumerate(ticks.devices) for _ in on])
    room: list[I1] = [
        *(np.zeros(size, np.int64) for size in (*[item] * 5, 2 * item, item, item)),
        np.repeat(np.arange(many), num),
        np.tile(np.arange(num), many),
        np.zeros(2 * item, np.int64),
        (each[:, None] * num + np.arange(num)).ravel(),
        *(np.zeros(size, np.int64) for size in (*[slot] * 3, *[devices] * 4)),
        *wait_arrays(ticks.followers),
        np.zeros(4, np.int64),
    ]
    return OrderState(*room)


@compiled
def anneal(
    p: Arrays, w: OrderState, num: int, given: I1, seed: int, looks: int, heat: float, floor: int,
    price: int,
) -> tuple[I1, int, I1, int, int]:  # fmt: skip
    """Moves at one temperature: the last order and its cost, the best and its makespan, the work.

    They end once so many items, waits and devices were looked at.
    """
    np.random.seed(seed)  # noqa: NPY002
    n = len(given)
    _set_order(p, w, num, given)
    best = given.copy()
    least = w.counters[_MOST] if w.counters[_OVER] == 0 else NEVER
    while w.counters[_LOOKED] < looks and least > floor:
        w.counters[_LOOKED] += 8
        first, then = -1, -1
        if np.random.random() < _CRITICAL:  # noqa: NPY002
            if w.counters[_PAIRS] < 0 or np.random.random() < _ANOTHER:  # noqa: NPY002
                _draw_critical_chain(p, w, num)
            if w.counters[_PAIRS] > 0:
                k = np.random.randint(0, w.counters[_PAIRS])  # noqa: NPY002
                first, then = w.chain[2 * k], w.chain[2 * k + 1]
        if first < 0:
            then = w.order[np.random.randint(1, n)]  # noqa: NPY002
            far = 1 + np.random.randint(0, _FAR)  # noqa: NPY002
            first = w.order[max(w.place[then] - far, 0)]
        forward = np.random.random() < 0.5  # noqa: NPY002
        many = 1
        if np.random.random() < _SERIES:  # noqa: NPY002
            many += np.random.randint(1, num + 1)  # noqa: NPY002
        low, high = n, -1
        while many > 0 and w.place[first] < w.place[then]:
            since, until = w.place[first], w.place[then]
            if not _try_swap(p, w, since, until, forward):
                break
            low, high = min(low, since), max(high, until)
            many -= 1
            if w.turn[first] == num - 1 or w.turn[then] == num - 1:
                break
            first, then = first + 1, then + 1
        if high < 0:
            continue
        over, found = _trial_makespan(p, w, num, low, high)
        gain = float(w.counters[_MOST] - found + price * (w.counters[_OVER] - over))
        if found < w.counters[_MOST]:  # other ways may be as long as ever
            gain = float(price * (w.counters[_OVER] - over))
        if gain >= 0 or np.random.random() < np.exp(gain / heat):  # noqa: NPY002
            _accept_trial(p, w, num, low, high, over, found)
            if over == 0 and w.counters[_MOST] < least:
                least = w.counters[_MOST]
                for k in range(n):
                    best[k] = w.order[k]
        else:
            for k in range(low, high + 1):
                item = w.order[k]
                w.trial[k], w.place[item] = item, k
                w.start[item], w.tail[item] = w.kept[item], w.kept[n + item]
    cost = w.counters[_MOST] + price * w.counters[_OVER]
    return w.order.copy(), cost, best, least, w.counters[_LOOKED]


@compiled
def _set_order(p: Any, w: Any, num: Any, given: Any) -> None:
    """Everything about an order."""
    n, over = len(given), 0
    for d in range(len(p.room)):
        w.last[d], w.full[d], w.end[d] = -1, 0, -1
    for k in range(n):
        item = given[k]
        w.order[k], w.trial[k], w.place[item], w.stale[item] = item, item, k, 0
        m = w.turn[item]
        for e in range(p.first_device[w.block[item]], p.first_device[w.block[item] + 1]):
            d, slot = p.device[e], e * num + m
            w.before[slot], w.behind[slot], w.level[slot] = w.last[d], -1, w.full[d]
            if w.last[d] >= 0:
                w.behind[w.last[d]] = slot
            w.last[d], w.end[d] = slot, slot
            if p.room[d] >= 0:
                over += 1 if w.full[d] + p.rise[e] > p.room[d] else 0
                w.full[d] += p.change[e]
    w.counters[_OVER] = over
    _, found = _trial_makespan(p, w, num, 0, n - 1)
    w.counters[_MOST], w.counters[_PAIRS], w.counters[_LOOKED] = found, -1, 8 * n


@compiled
def _try_swap(p: Any, w: Any, low: Any, high: Any, forward: Any) -> bool:
    """In the trial what is at `high` before what is at `low` with all it needs, or the reverse."""
    pivot = w.trial[high if forward else low]
    block, turn = w.block[pivot], w.turn[pivot]
    for k in range(low, high + 1):  # micro-batches of a block stay in turn
        item = w.trial[k]
        a, m = w.block[item], w.turn[item]
        if forward:
            taken = m <= turn and (a == block or p.reach[a, block])
        else:
            taken = m >= turn and (a == block or p.reach[block, a])
        w.mark[k] = 1 if taken else 0
    w.counters[_LOOKED] += high - low + 1
    if w.mark[low if forward else high] == 1:
        return False
    at, size = low, 0
    for k in range(low, high + 1):
        item = w.trial[k]
        if (w.mark[k] == 1) == forward:
            w.trial[at], w.place[item] = item, at
            at += 1
        else:
            w.kept[size] = item
            size += 1
    for k in range(size):
        item = w.kept[k]
        w.trial[at], w.place[item] = item, at
        at += 1
    return True


@compiled
def _trial_makespan(p: Any, w: Any, num: Any, low: Any, high: Any) -> Any:
    """Starts and tails in a window of the trial; how often memory is too small, the longest way."""
    n, over, looked, most = len(w.order), w.counters[_OVER], 0, 0
    over -= _window_edges(p, w, num, low, high)
    for k in range(low, high + 1):
        item = w.trial[k]
        w.kept[item], w.kept[n + item] = w.start[item], w.tail[item]
        now = _longest_before(p, w, num, item, False)
        b, m = w.block[item], w.turn[item]
        for e in range(p.first_device[b], p.first_device[b + 1]):
            d = p.device[e]
            if w.last[d] >= 0:
                on = w.item[w.last[d]]
                now = max(now, w.start[on] + p.time[w.block[on]])
            w.last[d] = e * num + m
            if p.room[d] >= 0:
                over += 1 if w.full[d] + p.rise[e] > p.room[d] else 0
                w.full[d] += p.change[e]
        w.start[item] = now
        looked += p.first_wait[b + 1] - p.first_wait[b] + p.first_device[b + 1] - p.first_device[b]
    for k in range(high, low - 1, -1):
        item = w.trial[k]
        rest = _longest_after(p, w, num, item, False)
        b, m = w.block[item], w.turn[item]
        for e in range(p.first_device[b], p.first_device[b + 1]):
            d = p.device[e]
            if w.first[d] >= 0:
                on = w.item[w.first[d]]
                rest = max(rest, w.tail[on] + p.time[w.block[on]])
            w.first[d] = e * num + m
        w.tail[item] = rest
        most = max(most, w.start[item] + p.time[b] + rest)
    w.counters[_LOOKED] += 3 * looked + 4 * (high - low + 1)
    return over, most


@compiled
def _window_edges(p: Any, w: Any, num: Any, low: Any, high: Any) -> Any:
    """What is before and behind a window on its devices; how often memory is too small in it."""
    over = 0
    for k in range(low, high + 1):
        item = w.order[k]
        m = w.turn[item]
        for e in range(p.first_device[w.block[item]], p.first_device[w.block[item] + 1]):
            w.first[p.device[e]] = w.behind[e * num + m]
    for k in range(high, low - 1, -1):
        item = w.order[k]
        m = w.turn[item]
        for e in range(p.first_device[w.block[item]], p.first_device[w.block[item] + 1]):
            d, slot = p.device[e], e * num + m
            w.last[d], w.full[d] = w.before[slot], w.level[slot]
            over += 1 if p.room[d] >= 0 and w.level[slot] + p.rise[e] > p.room[d] else 0
    return over


@compiled
def _longest_before(p: Any, w: Any, num: Any, item: Any, linked: Any) -> Any:
    """The longest way to an item: over what it waits for, and, if linked, what is before it."""
    b, m, now = w.block[item], w.turn[item], 0
    for e in range(p.first_wait[b], p.first_wait[b + 1]):
        on = p.wait[e]
        now = max(now, w.start[on * num + m] + p.time[on] + p.lag[e])
    if linked:
        for e in range(p.first_device[b], p.first_device[b + 1]):
            slot = w.before[e * num + m]
            if slot >= 0:
                on = w.item[slot]
                now = max(now, w.start[on] + p.time[w.block[on]])
    return now


@compiled
def _longest_after(p: Any, w: Any, num: Any, item: Any, linked: Any) -> Any:
    """The longest way from the end of an item: over what waits for it and what is behind it."""
    b, m, rest = w.block[item], w.turn[item], 0
    for e in range(w.first_follow[b], w.first_follow[b + 1]):
        on = w.follow[e]
        rest = max(rest, w.tail[on * num + m] + p.time[on] + w.follow_lag[e])
    if linked:
        for e in range(p.first_device[b], p.first_device[b + 1]):
            slot = w.behind[e * num + m]
            if slot >= 0:
                on = w.item[slot]
                rest = max(rest, w.tail[on] + p.time[w.block[on]])
    return rest


@compiled
def _accept_trial(p: Any, w: Any, num: Any, low: Any, high: Any, over: Any, found: Any) -> None:
    """The trial is the order now: its neighbours, and starts and tails outside of the window."""
    _window_edges(p, w, num, low, high)
    for k in range(low, high + 1):
        item = w.trial[k]
        w.order[k] = item
        m = w.turn[item]
        for e in range(p.first_device[w.block[item]], p.first_device[w.block[item] + 1]):
            d, slot = p.device[e], e * num + m
            w.before[slot], w.level[slot] = w.last[d], w.full[d]
            if w.last[d] >= 0:
                w.behind[w.last[d]] = slot
            w.behind[slot] = w.first[d]
            if w.first[d] >= 0:
                w.before[w.first[d]] = slot
            else:
                w.end[d] = slot
            w.last[d] = slot
            if p.room[d] >= 0:
                w.full[d] += p.change[e]
    ahead, back = 0, 0
    for k in range(low, high + 1):
        ahead += _mark_neighbours(p, w, num, w.order[k], 1)
        back += _mark_neighbours(p, w, num, w.order[k], 2)
    for k in range(low, high + 1):  # the window itself is known
        stale = w.stale[w.order[k]]
        ahead, back = ahead - (stale & 1), back - (stale >> 1)
        w.stale[w.order[k]] = 0
    k = high + 1
    while ahead > 0:
        ahead += _update_stale(p, w, num, w.order[k], 1)
        k += 1
    j = low - 1
    while back > 0:
        back += _update_stale(p, w, num, w.order[j], 2)
        j -= 1
    most = found
    if found < w.counters[_MOST]:
        for d in range(len(p.room)):
            if w.end[d] >= 0:
                on = w.item[w.end[d]]
                most = max(most, w.start[on] + p.time[w.block[on]])
    w.counters[_MOST], w.counters[_OVER], w.counters[_PAIRS] = most, over, -1
    w.counters[_LOOKED] += (k - high + low - j) // 4


@compiled
def _update_stale(p: Any, w: Any, num: Any, item: Any, way: Any) -> Any:
    """The start (1) or tail (2) of an item anew if it is stale; how many more are stale then."""
    if w.stale[item] & way == 0:
        return 0
    w.stale[item] -= way
    w.counters[_LOOKED] += 4
    value = (
        _longest_before(p, w, num, item, True)
        if way == 1
        else _longest_after(p, w, num, item, True)
    )
    if value == (w.start[item] if way == 1 else w.tail[item]):
        return -1
    if way == 1:
        w.start[item] = value
    else:
        w.tail[item] = value
    return _mark_neighbours(p, w, num, item, way) - 1


@compiled
def _mark_neighbours(p: Any, w: Any, num: Any, item: Any, way: Any) -> Any:
    """Note that what follows an item (1), or what it follows (2), is stale; how many more are."""
    b, m, more = w.block[item], w.turn[item], 0
    if way == 1:
        for e in range(w.first_follow[b], w.first_follow[b + 1]):
            more += _mark_stale(w, w.follow[e] * num + m, way)
    else:
        for e in range(p.first_wait[b], p.first_wait[b + 1]):
            more += _mark_stale(w, p.wait[e] * num + m, way)
    for e in range(p.first_device[b], p.first_device[b + 1]):
        slot = w.behind[e * num + m] if way == 1 else w.before[e * num + m]
        if slot >= 0:
            more += _mark_stale(w, w.item[slot], way)
    return more


@compiled
def _mark_stale(w: Any, item: Any, way: Any) -> Any:
    if w.stale[item] & way != 0:
        return 0
    w.stale[item] += way
    return 1


@compiled
def _draw_critical_chain(p: Any, w: Any, num: Any) -> None:
    """Pairs of neighbours on a device along a critical chain, of those drawn at random."""
    item, met = -1, 0
    for d in range(len(p.room)):
        on = w.item[max(w.end[d], 0)]
        if w.end[d] >= 0 and w.start[on] + p.time[w.block[on]] == w.counters[_MOST]:
            met += 1
            if np.random.random() * met < 1.0:  # noqa: NPY002
                item = on
    pairs = 0
    while item >= 0:
        b, m, met, then, shared = w.block[item], w.turn[item], 0, -1, False
        w.counters[_LOOKED] += 4
        for e in range(p.first_wait[b], p.first_wait[b + 1]):
            on = p.wait[e] * num + m
            if w.start[on] + p.time[p.wait[e]] + p.lag[e] == w.start[item]:
                met += 1
                if np.random.random() * met < 1.0:  # noqa: NPY002
                    then, shared = on, False
        for e in range(p.first_device[b], p.first_device[b + 1]):
            slot = w.before[e * num + m]
            if slot >= 0:
                on = w.item[slot]
                if w.start[on] + p.time[w.block[on]] == w.start[item]:
                    met += 1
                    if np.random.random() * met < 1.0:  # noqa: NPY002
                        then, shared = on, True
        if shared and w.block[then] != b:
            w.chain[2 * pairs], w.chain[2 * pairs + 1] = then, item
            pairs += 1
        item = then
    w.counters[_PAIRS] = pairs
