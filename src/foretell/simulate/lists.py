"""The rule where each task needs at most one free lane and nothing is delayed or shared.

The common case of a search, and the quickest: one heap of events, one queue a lane.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foretell.compiled import J1, compiled
from foretell.simulate.events import (
    EVENTS,
    FRESH,
    Fixed,
    State,
    event_pop,
    event_push,
    task_pop,
    task_push,
)
from foretell.simulate.readable import LANE, WAIT


@compiled
def line_up(queue: Any, first: int, last: int, i: int, ready: Any) -> None:
    """Put a task at the end of a queue ordered by (ready, number).

    Tasks become ready in order of time and are passed over in order of number, so that this is
    nearly always the end; only tasks of no length can make it step forward.
    """
    while last > first and ready[queue[last - 1]] == ready[i] and queue[last - 1] > i:
        queue[last] = queue[last - 1]
        last -= 1
    queue[last] = i


@compiled
def ascends(numbers: Any, size: int) -> bool:
    for k in range(1, size):
        if numbers[k] < numbers[k - 1]:
            return False
    return True


@compiled
def run(f: Fixed, s: State, lane_of: J1, now: float, is_plain: bool) -> None:
    """Simulate from the fresh tasks at `now` and the events pending until nothing is left.

    `lane_of` is the free lane of each task or -1. Where all priorities are equal (`is_plain`) a
    queue is a line, and the first fresh tasks come in the order they were ready; otherwise it is a
    heap. One long function for the reason `events.run` gives.
    """
    seconds, priority, base = f.seconds, f.priority, f.base
    follow_start, follower, turn_start, turn = f.follow_start, f.follower, f.turn_start, f.turn
    waiting, ready, by, free, free_by, start, end, cause, why, busy, freed, last = s[:12]
    queue, queued, times, codes, fresh = s[12:17]
    events, n_fresh, n_idle = s.count[EVENTS], s.count[FRESH], 0
    has_turns = len(turn) > 0
    head = base[:-1].copy()  # where the queue of each lane begins now
    idle = np.empty(len(seconds) + len(head), np.int32)
    is_first = True
    while True:
        if is_plain and not is_first and not ascends(fresh, n_fresh):
            fresh[:n_fresh].sort()
        is_first = False
        for k in range(n_fresh):
            i = fresh[k]
            lane = lane_of[i]
            if lane >= 0:
                if not busy[lane]:
                    idle[n_idle] = lane
                    n_idle += 1
                if is_plain:
                    line_up(queue, head[lane], head[lane] + queued[lane], i, ready)
                else:
                    task_push(queue, head[lane], queued[lane], i, priority, ready)
                queued[lane] += 1
                continue
            start[i] = now
            if free[i] > ready[i] or by[i] < 0:
                cause[i], why[i] = free_by[i], LANE if free_by[i] >= 0 else 0
            else:
                cause[i], why[i] = by[i], WAIT
            end[i] = now + seconds[i]
            event_push(times, codes, events, end[i], i)
            events += 1
        for k in range(n_idle):
            lane = idle[k]
            if busy[lane] or queued[lane] == 0:
                continue
            i = queue[head[lane]]
            if is_plain:
                head[lane] += 1
            else:
                task_pop(queue, head[lane], queued[lane], priority, ready)
            queued[lane] -= 1
            busy[lane] = 1
            start[i] = now
            since, holder = freed[lane], last[lane]
            if (
                has_turns
                and free_by[i] >= 0
                and (holder < 0 or free[i] > since or (free[i] == since and free_by[i] < holder))
            ):
                since, holder = free[i], free_by[i]
            if since > ready[i] or by[i] < 0:
                cause[i], why[i] = holder, LANE if holder >= 0 else 0
            else:
                cause[i], why[i] = by[i], WAIT
            end[i] = now + seconds[i]
            event_push(times, codes, events, end[i], i)
            events += 1
        if events == 0:
            return
        now = times[0]
        n_fresh, n_idle = 0, 0
        while events > 0 and times[0] == now:
            i = codes[0]
            event_pop(times, codes, events)
            events -= 1
            for k in range(follow_start[i], follow_start[i + 1]):
                j = follower[k]
                if now > ready[j] or by[j] < 0 or i < by[j]:
                    ready[j], by[j] = now, i
                waiting[j] -= 1
                if waiting[j] == 0:
                    fresh[n_fresh] = j
                    n_fresh += 1
            if has_turns:
                for k in range(turn_start[i], turn_start[i + 1]):
                    j = turn[k]
                    if now > free[j] or free_by[j] < 0 or i < free_by[j]:
                        free[j], free_by[j] = now, i
                    waiting[j] -= 1
                    if waiting[j] == 0:
                        fresh[n_fresh] = j
                        n_fresh += 1
            lane = lane_of[i]
            if lane >= 0:
                busy[lane], freed[lane], last[lane] = 0, now, i
                idle[n_idle] = lane
                n_idle += 1
