"""Compiled loops for taking up a simulation: which rows differ, and the state at an instant."""

from __future__ import annotations

import numpy as np

from foretell.compiled import B1, F1, I1, J1, compiled
from foretell.simulate.events import EVENTS, FRESH, Fixed, State, event_push
from foretell.simulate.readable import ARRIVE, END, FREE


@compiled
def rows_differ(
    start: I1,
    item: J1,
    weight: F1,
    old_start: I1,
    old_item: J1,
    old_weight: F1,
    origin: I1,
    are_tasks: bool = True,
) -> B1:
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


@compiled
def ready_bound(start: I1, after: J1, lag: F1, end: F1, tasks: I1) -> F1:
    """When each task's known waits are over."""
    bound = np.zeros(len(tasks))
    for t in range(len(tasks)):
        i = tasks[t]
        for k in range(start[i], start[i + 1]):
            bound[t] = max(bound[t], end[after[k]] + lag[k])
    return bound


@compiled
def restore(f: Fixed, s: State, rest: I1, instant: float, waits: tuple[I1, J1, F1, I1, J1]) -> None:
    """Fill the state of tasks that have not started, just before `instant`.

    Lanes and turns that were free before it need no memory of by whom: nothing that starts at this
    instant or later can have been held up by them.
    """
    waiting, ready, ready_by, free, free_by, start, end = s[:7]
    times, codes, fresh = s.times, s.codes, s.fresh
    wait_start, after, lag, turn_start, before = waits
    n, events, n_fresh = len(waiting), s.count[EVENTS], 0
    has_gap, has_lag = len(f.gap) > 0, len(lag) > 0
    for r in range(len(rest)):
        i = rest[r]
        left = wait_start[i + 1] - wait_start[i] + turn_start[i + 1] - turn_start[i]
        at, by = 0.0, -1
        for k in range(wait_start[i], wait_start[i + 1]):
            p = after[k]
            if start[p] >= instant or end[p] >= instant:
                continue
            t = end[p] + lag[k] if has_lag else end[p]
            if t > at or (t == at and (by < 0 or p < by)):
                at, by = t, p
            if t >= instant:
                event_push(times, codes, events, t, ARRIVE * n + i)
                events += 1
            else:
                left -= 1
        for k in range(turn_start[i], turn_start[i + 1]):
            p = before[k]
            t = end[p] + f.gap[p] if has_gap else end[p]
            if start[p] < instant and t < instant:
                left -= 1
        ready[i], ready_by[i], free[i], free_by[i], waiting[i] = at, by, 0.0, -1, left
        if left == 0:
            fresh[n_fresh] = i
            n_fresh += 1
    s.count[EVENTS], s.count[FRESH] = events, n_fresh


@compiled
def hold(f: Fixed, s: State, running: I1, instant: float) -> None:
    """Let tasks that have started keep their lanes until they end, or until their gap does."""
    n, events = len(f.seconds), 0
    for r in range(len(running)):
        i = running[r]
        is_over = s.end[i] < instant
        time = s.end[i] + f.gap[i] if is_over else s.end[i]
        event_push(s.times, s.codes, events, time, (FREE if is_over else END) * n + i)
        events += 1
        for k in range(f.lane_start[i], f.lane_start[i + 1]):
            s.taken[f.lane[k]] = 1
    s.count[EVENTS] = events
