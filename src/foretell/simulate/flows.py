"""The rule where every lane is ordered and some tasks share links: what overlapping streams need.

Nothing competes for a lane, so that a task starts the moment all it waits for is over; events are
left to say only how fast those that share a link go. A part of `events`, which takes three times as
long to compile: most traces with several streams are simulated by this.
"""

from __future__ import annotations

import numpy as np

from foretell.compiled import F1, I1, J1, U1, compiled
from foretell.simulate.events import EVENTS, FRESH
from foretell.simulate.heaps import put_event, take_event
from foretell.simulate.links import depart, fair, join
from foretell.simulate.readable import ARRIVE, END, FREE, LANE, WAIT


@compiled
def run(
    times_of: tuple[F1, F1],
    follows: tuple[I1, J1, F1],
    turns: tuple[I1, J1],
    uses: tuple[I1, J1, F1, F1],
    s: tuple[J1, F1, J1, F1, J1, F1, F1, J1, U1, F1, I1, J1, I1],
    flow: tuple[J1, F1, F1, F1],
    room: tuple[F1, F1, F1],
    now: float,
) -> None:
    """Simulate from the fresh tasks at `now` and the events pending until nothing is left.

    `times_of`: (seconds, gap). `follows`: (start, follower, lag). `turns`: (start, turn). `uses`:
    (start, link, demand, capacity). `s`: the arrays of a `State` that do not speak of free lanes.
    `flow`: of the running tasks that use links, ascending, (task, seconds left, speed, since when).
    `room`: what `fair` works in. Arrays are made outside: compiling that here takes longer.
    """
    seconds, gap = times_of
    follow_start, follower, lag = follows
    turn_start, turn = turns
    use_start, use_link, use_demand, capacity = uses
    waiting, ready, ready_by, free, free_by, start, end, cause, why, times, codes, fresh, count = s
    moving, left, speed, since = flow
    pace = room[0]
    n, has_gap, has_lag = len(seconds), len(gap) > 0, len(lag) > 0
    events, n_fresh = count[EVENTS], count[FRESH]
    n_moving, moved = 0, False
    while True:
        for k in range(n_fresh):
            i = fresh[k]
            if free[i] > ready[i] or ready_by[i] < 0:
                cause[i], why[i] = free_by[i], LANE if free_by[i] >= 0 else 0
            else:
                cause[i], why[i] = ready_by[i], WAIT
            start[i], end[i] = now, now + seconds[i]
            if use_start[i] < use_start[i + 1] and seconds[i] > 0:
                join(moving, left, speed, since, n_moving, i, seconds[i], now)
                n_moving += 1
                moved = True
            else:
                put_event(times, codes, events, end[i], END * n + i)
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
                take_event(times, codes, events)
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
                        put_event(times, codes, events, t, ARRIVE * n + j)
                        events += 1
                        continue
                    waiting[j] -= 1
                    if waiting[j] == 0:
                        fresh[n_fresh] = j
                        n_fresh += 1
                if has_gap and gap[i] > 0:
                    put_event(times, codes, events, now + gap[i], FREE * n + i)
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
