"""The rule where each task needs at most one free lane and nothing is delayed or shared.

The common case of a search, and the quickest: one heap of events, one queue a lane.
"""

from typing import Any

import numpy as np
from numba import njit

from foretell.simulate.events import Fixed
from foretell.simulate.heaps import event_pop, event_push, task_pop, task_push
from foretell.simulate.readable import LANE, WAIT


@njit(cache=True)
def run(f: Fixed, waiting: Any, lane_of: Any, played: Any) -> None:
    """Play a graph from its beginning; `lane_of` is the free lane of each task or -1."""
    start, end, cause, why = played
    n, lanes = len(f.seconds), len(f.base) - 1
    ready, by = np.zeros(n), np.full(n, -1, np.int32)
    free, free_by = np.zeros(n), np.full(n, -1, np.int32)
    has_turns = len(f.turn) > 0
    busy = np.zeros(lanes, np.uint8)
    last = np.full(lanes, -1, np.int32)
    freed = np.zeros(lanes)
    queue, queued = np.empty(f.base[-1], np.int32), np.zeros(lanes, np.int64)
    times, codes, events = np.empty(n + 1), np.empty(n + 1, np.int32), 0
    fresh, n_fresh = np.empty(n, np.int32), 0
    idle, n_idle = np.empty(n + lanes, np.int32), 0
    for i in range(n):
        if waiting[i] == 0:
            fresh[n_fresh] = i
            n_fresh += 1
    now = 0.0
    while True:
        for k in range(n_fresh):
            i = fresh[k]
            lane = lane_of[i]
            if lane >= 0:
                if not busy[lane]:
                    idle[n_idle] = lane
                    n_idle += 1
                task_push(queue, f.base[lane], queued[lane], i, f.priority, ready)
                queued[lane] += 1
                continue
            start[i] = now
            if free[i] > ready[i] or by[i] < 0:
                cause[i], why[i] = free_by[i], LANE if free_by[i] >= 0 else 0
            else:
                cause[i], why[i] = by[i], WAIT
            end[i] = now + f.seconds[i]
            event_push(times, codes, events, end[i], i)
            events += 1
        for k in range(n_idle):
            lane = idle[k]
            if busy[lane] or queued[lane] == 0:
                continue
            i = queue[f.base[lane]]
            task_pop(queue, f.base[lane], queued[lane], f.priority, ready)
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
            end[i] = now + f.seconds[i]
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
            for k in range(f.follow_start[i], f.follow_start[i + 1]):
                j = f.follower[k]
                if now > ready[j] or by[j] < 0 or i < by[j]:
                    ready[j], by[j] = now, i
                waiting[j] -= 1
                if waiting[j] == 0:
                    fresh[n_fresh] = j
                    n_fresh += 1
            if has_turns:
                for k in range(f.turn_start[i], f.turn_start[i + 1]):
                    j = f.turn[k]
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
