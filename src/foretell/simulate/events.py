"""The rule for any graph, event by event, over plain arrays.

A ready task sits in the queue of one lane that keeps it from starting; when that lane is free it is
looked at again, and either starts or moves to the queue of another lane that is taken. The state is
laid out so that a simulation can begin anywhere: at time zero, or in the middle of a known one.
Heaps are of events ordered by (time, code), and of tasks waiting for a lane ordered by (highest
priority, earliest ready, lowest number). Running tasks that share links are an ascending list.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from foretell.compiled import F1, I1, J1, U1, compiled
from foretell.simulate.readable import ARRIVE, END, FREE, LANE, SLOWEST, WAIT

EVENTS, FRESH = 0, 1  # places in `State.count`


class Fixed(NamedTuple):
    """Inputs that stay constant during a simulation. An empty `gap` or `lag` is all zero."""

    seconds: F1
    gap: F1
    priority: J1
    lane_start: I1  # the free lanes of each task
    lane: J1
    base: I1  # where the queue of each free lane begins
    follow_start: I1  # who waits for each task
    follower: J1
    lag: F1  # along `follower`
    turn_start: I1  # whose turn on an ordered lane comes after each task
    turn: J1
    use_start: I1  # the links of each task
    use_link: J1
    use_demand: F1
    capacity: F1


class State(NamedTuple):
    """The mutable state of a simulation."""

    waiting: J1  # how many waits and turns of a task are not over yet
    ready: F1  # when its last wait was over, and whose end that was
    ready_by: J1
    free: F1  # when its last ordered lane was freed for it, and by whom
    free_by: J1
    start: F1
    end: F1
    cause: J1
    why: U1
    taken: U1  # of each free lane: whether it is held, when it was last freed, and by whom
    freed: F1
    freed_by: J1
    queue: J1  # tasks waiting for each free lane, as heaps one behind the other
    queued: I1
    times: F1  # events to come, as a heap
    codes: I1
    fresh: J1  # tasks that became ready at this instant
    count: I1  # type: ignore[assignment]  # how many events and fresh tasks there are


@compiled
def run(f: Fixed, s: State, now: float) -> None:
    """Simulate from the fresh tasks at `now` and the events pending until nothing is left.

    One long function on purpose: what changes at every event stays in registers.
    """
    seconds, gap, priority, lane_start, lane_of, base, follow_start, follower, lag, turn_start = f[
        :10
    ]
    turn, use_start, use_link, use_demand, capacity = f[10:]
    waiting, ready, ready_by, free, free_by, start, end, cause, why, taken, freed, freed_by = s[:12]
    queue, queued, times, codes, fresh = s[12:17]
    n, has_gap, has_lag, has_links = len(seconds), len(gap) > 0, len(lag) > 0, len(use_link) > 0
    events, n_fresh = s.count[EVENTS], s.count[FRESH]
    lanes = np.empty(len(taken), np.int32)  # free lanes a task waits for, the most urgent first
    marked = np.zeros(len(taken), np.int32)  # the place of a lane among them, from 1
    n_lanes = 0
    moving = np.empty(n if has_links else 0, np.int32)  # running tasks that use links, ascending
    left, speed, since = np.empty(len(moving)), np.empty(len(moving)), np.empty(len(moving))
    room = np.empty(len(moving)), np.empty(len(capacity)), np.empty(len(capacity))
    pace = room[0]
    n_moving, moved = 0, False
    while True:
        # Ready tasks that need a free lane queue up; see `readable.start_all` for the rule.
        n_started = 0
        for k in range(n_fresh):
            i = fresh[k]
            first = lane_start[i]
            if first == lane_start[i + 1]:
                fresh[n_started] = i
                n_started += 1
                continue
            at = lane_of[first]
            for q in range(first, lane_start[i + 1]):
                if taken[lane_of[q]]:
                    at = lane_of[q]
                    break
            if marked[at] and sooner(i, queue[base[at]], priority, ready):
                look_away(lanes, marked, n_lanes, at, queue, base, priority, ready)
                n_lanes -= 1
            task_push(queue, base[at], queued[at], i, priority, ready)
            queued[at] += 1
            if not taken[at] and not marked[at]:
                rise(lanes, marked, n_lanes, at, queue, base, priority, ready)
                n_lanes += 1
        # Start those that need none, then the most urgent over all lanes, one by one.
        while n_started > 0 or n_lanes > 0:
            if n_started > 0:
                n_started -= 1
                i = fresh[n_started]
            else:
                lane = lanes[0]
                look_away(lanes, marked, n_lanes, lane, queue, base, priority, ready)
                n_lanes -= 1
                i = queue[base[lane]]
                task_pop(queue, base[lane], queued[lane], priority, ready)
                queued[lane] -= 1
                at = -1
                for q in range(lane_start[i], lane_start[i + 1]):
                    if taken[lane_of[q]]:
                        at = lane_of[q]
                        break
                if at >= 0:  # it has to wait for another lane
                    task_push(queue, base[at], queued[at], i, priority, ready)
                    queued[at] += 1
                    if queued[lane]:
                        rise(lanes, marked, n_lanes, lane, queue, base, priority, ready)
                        n_lanes += 1
                    continue
            last, holder = free[i], free_by[i]
            for q in range(lane_start[i], lane_start[i + 1]):
                lane = lane_of[q]
                t, p = freed[lane], freed_by[lane]
                if p >= 0 and (t > last or (t == last and (holder < 0 or p < holder))):
                    last, holder = t, p
                taken[lane] = 1
                if marked[lane]:
                    look_away(lanes, marked, n_lanes, lane, queue, base, priority, ready)
                    n_lanes -= 1
            if last > ready[i] or ready_by[i] < 0:
                cause[i], why[i] = holder, LANE if holder >= 0 else 0
            else:
                cause[i], why[i] = ready_by[i], WAIT
            start[i], end[i] = now, now + seconds[i]
            if has_links and use_start[i] < use_start[i + 1] and seconds[i] > 0:
                join(moving, left, speed, since, n_moving, i, seconds[i], now)
                n_moving += 1
                moved = True
            else:
                event_push(times, codes, events, end[i], END * n + i)
                events += 1
        if moved:
            fair(moving, n_moving, use_start, use_link, use_demand, capacity, room)
            for m in range(n_moving):
                if pace[m] != speed[m]:
                    left[m] = max(left[m] - (now - since[m]) * speed[m], 0.0)
                    speed[m], since[m] = pace[m], now
                    end[moving[m]] = now + left[m] / pace[m]
            moved = False
        # All that happens at the next instant.
        now = times[0] if events else np.inf
        for m in range(n_moving):
            now = min(now, end[moving[m]])
        if now == np.inf:
            return
        n_fresh, m = 0, 0
        while True:
            if events and times[0] == now:
                what, i = codes[0] // n, codes[0] % n
                event_pop(times, codes, events)
                events -= 1
            else:
                while m < n_moving and end[moving[m]] != now:
                    m += 1
                if m == n_moving:
                    break
                what, i, moved = END, np.int64(moving[m]), True
                depart(moving, left, speed, since, n_moving, m)
                n_moving -= 1
            if what == END:
                for k in range(follow_start[i], follow_start[i + 1]):
                    j = follower[k]
                    t = now + lag[k] if has_lag else now
                    if t > ready[j] or (t == ready[j] and (ready_by[j] < 0 or i < ready_by[j])):
                        ready[j], ready_by[j] = t, i
                    if t > now:
                        event_push(times, codes, events, t, ARRIVE * n + j)
                        events += 1
                        continue
                    waiting[j] -= 1
                    if waiting[j] == 0:
                        fresh[n_fresh] = j
                        n_fresh += 1
                if has_gap and gap[i] > 0:
                    event_push(times, codes, events, now + gap[i], FREE * n + i)
                    events += 1
                    continue
            elif what == ARRIVE:
                waiting[i] -= 1
                if waiting[i] == 0:
                    fresh[n_fresh] = i
                    n_fresh += 1
                continue
            for k in range(turn_start[i], turn_start[i + 1]):
                j = turn[k]
                if now > free[j] or (now == free[j] and (free_by[j] < 0 or i < free_by[j])):
                    free[j], free_by[j] = now, i
                waiting[j] -= 1
                if waiting[j] == 0:
                    fresh[n_fresh] = j
                    n_fresh += 1
            for k in range(lane_start[i], lane_start[i + 1]):
                lane = lane_of[k]
                taken[lane], freed[lane], freed_by[lane] = 0, now, i
                if queued[lane] and not marked[lane]:
                    rise(lanes, marked, n_lanes, lane, queue, base, priority, ready)
                    n_lanes += 1


# The heap of free lanes that a task waits for, ordered by the first in each queue


@compiled
def look_away(
    lanes: Any, marked: Any, size: int, lane: int, queue: Any, base: Any, priority: Any, ready: Any
) -> None:
    """Take a lane away; `size` counts it still."""
    at = marked[lane] - 1
    marked[lane] = 0
    size -= 1
    if at == size:
        return
    last = lanes[size]
    while True:
        down = 2 * at + 1
        if down >= size:
            break
        if down + 1 < size and sooner(
            queue[base[lanes[down + 1]]], queue[base[lanes[down]]], priority, ready
        ):
            down += 1
        if not sooner(queue[base[lanes[down]]], queue[base[last]], priority, ready):
            break
        lanes[at] = lanes[down]
        marked[lanes[at]] = at + 1
        at = down
    rise(lanes, marked, at, last, queue, base, priority, ready)


@compiled
def rise(
    lanes: Any, marked: Any, at: int, lane: int, queue: Any, base: Any, priority: Any, ready: Any
) -> None:
    """Put a lane at a place, or further up where it goes first."""
    head = queue[base[lane]]
    while at > 0 and sooner(head, queue[base[lanes[(at - 1) >> 1]]], priority, ready):
        lanes[at] = lanes[(at - 1) >> 1]
        marked[lanes[at]] = at + 1
        at = (at - 1) >> 1
    lanes[at] = lane
    marked[lane] = at + 1


@compiled
def event_push(times: Any, codes: Any, size: int, time: float, code: int) -> None:
    """Put an event into a heap of `size` events that has room for it."""
    i = size
    while i > 0:
        up = (i - 1) >> 1
        if times[up] < time or (times[up] == time and codes[up] <= code):
            break
        times[i], codes[i] = times[up], codes[up]
        i = up
    times[i], codes[i] = time, code


@compiled
def event_pop(times: Any, codes: Any, size: int) -> None:
    """Take the first event away; `size` counts it still.

    The hole sinks to a leaf and the last event rises from there: it seldom rises far, so this
    compares half as often as letting it sink.
    """
    size -= 1
    i, down = 0, 1
    while down < size:
        right = down + 1
        if right < size and (
            times[right] < times[down]
            or (times[right] == times[down] and codes[right] < codes[down])
        ):
            down = right
        times[i], codes[i] = times[down], codes[down]
        i = down
        down = 2 * i + 1
    event_push(times, codes, i, times[size], codes[size])


@compiled
def sooner(a: int, b: int, priority: Any, ready: Any) -> bool:
    """Whether task a goes before task b on a free lane."""
    if priority[a] != priority[b]:
        return bool(priority[a] > priority[b])
    if ready[a] != ready[b]:
        return bool(ready[a] < ready[b])
    return a < b


@compiled
def task_push(heap: Any, base: int, size: int, i: int, priority: Any, ready: Any) -> None:
    """Put a task into the heap that begins at `base` and holds `size` tasks."""
    at = size
    while at > 0:
        up = (at - 1) >> 1
        if sooner(heap[base + up], i, priority, ready):
            break
        heap[base + at] = heap[base + up]
        at = up
    heap[base + at] = i


@compiled
def task_pop(heap: Any, base: int, size: int, priority: Any, ready: Any) -> None:
    """Take the first task away; `size` counts it still."""
    size -= 1
    i = heap[base + size]
    at = 0
    while True:
        down = 2 * at + 1
        if down >= size:
            break
        if down + 1 < size and sooner(heap[base + down + 1], heap[base + down], priority, ready):
            down += 1
        if not sooner(heap[base + down], i, priority, ready):
            break
        heap[base + at] = heap[base + down]
        at = down
    heap[base + at] = i


@compiled
def join(
    moving: Any, left: Any, speed: Any, since: Any, size: int, i: int, seconds: float, now: float
) -> None:
    """Add a task that starts to move."""
    m = size
    while m > 0 and moving[m - 1] > i:
        moving[m], left[m], speed[m], since[m] = (
            moving[m - 1],
            left[m - 1],
            speed[m - 1],
            since[m - 1],
        )
        m -= 1
    moving[m], left[m], speed[m], since[m] = i, seconds, 0.0, now


@compiled
def depart(moving: Any, left: Any, speed: Any, since: Any, size: int, m: int) -> None:
    """Take the m-th task away; `size` counts it still."""
    for k in range(m, size - 1):
        moving[k], left[k], speed[k], since[k] = (
            moving[k + 1],
            left[k + 1],
            speed[k + 1],
            since[k + 1],
        )


@compiled
def fair(
    moving: Any, size: int, use_start: Any, use_link: Any, use_demand: Any, capacity: Any, room: Any
) -> None:
    """The speed of each, into `room[0]`: the same sums in the same order as `readable.speeds`.

    `room[1:]` are two rows to work in, a place for each link.
    """
    speed, rest, demand = room
    for link in range(len(capacity)):
        rest[link] = capacity[link]
    for m in range(size):
        speed[m] = -1.0
    unsettled = size
    while unsettled > 0:
        for link in range(len(capacity)):
            demand[link] = 0.0
        for m in range(size):
            if speed[m] < 0:
                for k in range(use_start[moving[m]], use_start[moving[m] + 1]):
                    demand[use_link[k]] += use_demand[k]
        level, full = np.inf, -1
        for link in range(len(capacity)):
            if demand[link] > 0 and rest[link] / demand[link] < level:
                level, full = rest[link] / demand[link], link
        level = max(level, SLOWEST)
        for m in range(size):
            i = moving[m]
            is_held = False
            for k in range(use_start[i], use_start[i + 1]):
                is_held = is_held or use_link[k] == full
            if speed[m] < 0 and (level >= 1.0 or is_held):
                speed[m] = min(level, 1.0)
                unsettled -= 1
                for k in range(use_start[i], use_start[i + 1]):
                    rest[use_link[k]] -= use_demand[k] * speed[m]
