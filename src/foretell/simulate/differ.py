"""Compiled loops for taking up a play: which rows differ, and the state at an instant."""

from typing import Any

import numpy as np
from numba import njit

from foretell.simulate.events import EVENTS, FRESH, Fixed, State
from foretell.simulate.heaps import event_push
from foretell.simulate.readable import ARRIVE, END, FREE


@njit(cache=True)
def rows_differ(
    start: Any,
    item: Any,
    weight: Any,
    old_start: Any,
    old_item: Any,
    old_weight: Any,
    origin: Any,
    are_tasks: bool = True,
) -> Any:
    """Which rows are not what they were; items that are tasks are compared by origin."""
    differs = np.zeros(len(start) - 1, np.bool_)
    for i in range(len(differs)):
        was = origin[i]
        if was < 0:
            differs[i] = True
            continue
        count = start[i + 1] - start[i]
        if count != old_start[was + 1] - old_start[was]:
            differs[i] = True
            continue
        for k in range(count):
            a, b = start[i] + k, old_start[was] + k
            known = origin[item[a]] if are_tasks else item[a]
            if known != old_item[b] or weight[a] != old_weight[b]:
                differs[i] = True
                break
    return differs


@njit(cache=True)
def ready_bound(start: Any, after: Any, lag: Any, end: Any, tasks: Any) -> Any:
    """When each task's known waits are over."""
    bound = np.zeros(len(tasks))
    for t in range(len(tasks)):
        i = tasks[t]
        for k in range(start[i], start[i + 1]):
            bound[t] = max(bound[t], end[after[k]] + lag[k])
    return bound


@njit(cache=True)
def restore(f: Fixed, s: State, kept: Any, instant: float, waits: Any, turns: Any) -> bool:
    """Fill the state as it is just before `instant`, when the kept tasks have started.

    False where the timeline does not tell who held a lane last (several tasks of no length).
    """
    n = len(kept)
    for i in range(n):
        if kept[i]:
            if not keep_running(f, s, i, instant):
                return False
        else:
            look_back(f, s, i, kept, instant, waits, turns)
    for i in range(n):
        if not kept[i] and s.waiting[i] == 0:
            s.fresh[s.count[FRESH]] = i
            s.count[FRESH] += 1
    return True


@njit(cache=True)
def keep_running(f: Fixed, s: State, i: int, instant: float) -> bool:
    """Note what a started task holds, and when it will let go."""
    release = s.end[i] + (f.gap[i] if len(f.gap) else 0.0)
    if s.end[i] >= instant:
        pend(f, s, s.end[i], END, i)
    elif release >= instant:
        pend(f, s, release, FREE, i)
    for k in range(f.lane_start[i], f.lane_start[i + 1]):
        lane = f.lane[k]
        if s.end[i] >= instant or release >= instant:
            s.taken[lane] = 1
            continue
        last = s.freed_by[lane]
        if last >= 0 and release == s.freed[lane]:
            if s.start[i] == s.start[last] and s.end[i] == s.end[last]:
                return False
            if (s.start[i], s.end[i]) < (s.start[last], s.end[last]):
                continue  # of two that let go at once, the one that came later did so last
        elif last >= 0 and release < s.freed[lane]:
            continue
        s.freed[lane], s.freed_by[lane] = release, i
    return True


@njit(cache=True)
def look_back(
    f: Fixed, s: State, i: int, kept: Any, instant: float, waits: Any, turns: Any
) -> None:
    """Note which waits and turns of a task that has not started are over."""
    start, after, lag = waits
    for k in range(start[i], start[i + 1]):
        p = after[k]
        if not kept[p] or s.end[p] >= instant:
            continue
        t = s.end[p] + lag[k]
        if t > s.ready[i] or (t == s.ready[i] and (s.ready_by[i] < 0 or p < s.ready_by[i])):
            s.ready[i], s.ready_by[i] = t, p
        if t >= instant and lag[k] > 0:
            pend(f, s, t, ARRIVE, i)
        else:
            s.waiting[i] -= 1
    turn_start, before = turns
    for k in range(turn_start[i], turn_start[i + 1]):
        p = before[k]
        t = s.end[p] + (f.gap[p] if len(f.gap) else 0.0)
        if kept[p] and s.end[p] < instant and t < instant:
            if t > s.free[i] or (t == s.free[i] and (s.free_by[i] < 0 or p < s.free_by[i])):
                s.free[i], s.free_by[i] = t, p
            s.waiting[i] -= 1


@njit(cache=True)
def pend(f: Fixed, s: State, time: float, what: int, i: int) -> None:
    event_push(s.times, s.codes, s.count[EVENTS], time, what * len(f.seconds) + i)
    s.count[EVENTS] += 1
