"""The rule where every lane is ordered and nothing is shared: the longest path to each task.

With all orders given there is nothing to decide while time passes, so one sweep in a right order
gives the same bits as simulating events, several times faster.
"""

from __future__ import annotations

from foretell.compiled import F1, I1, J1, U1, compiled
from foretell.simulate.readable import LANE, NOTHING, WAIT


@compiled
def sweep(
    order: J1,
    waits: tuple[I1, J1, F1],
    turns: tuple[I1, J1],
    seconds: F1,
    gap: F1,
    played: tuple[F1, F1, J1, U1],
    first: int,
    stale: U1,
) -> None:
    """Place tasks from position `first` of the order on; with `stale`, only what may have moved.

    A task is placed anew where it is marked stale, or where something it waits for has moved.
    """
    wait_start, after, lag = waits
    turn_start, before = turns
    start, end, cause, why = played
    partial = len(stale) > 0
    for o in range(first, len(order)):
        i = order[o]
        if partial and not stale[i]:
            moved = False
            for k in range(wait_start[i], wait_start[i + 1]):
                if stale[after[k]]:
                    moved = True
                    break
            if not moved:
                for k in range(turn_start[i], turn_start[i + 1]):
                    if stale[before[k]]:
                        moved = True
                        break
            if not moved:
                continue
        ready, by = 0.0, -1
        for k in range(wait_start[i], wait_start[i + 1]):
            p = after[k]
            t = end[p] + lag[k] if len(lag) else end[p]
            if t > ready or (t == ready and (by < 0 or p < by)):
                ready, by = t, p
        free, holder = 0.0, -1
        for k in range(turn_start[i], turn_start[i + 1]):
            p = before[k]
            t = end[p] + gap[p] if len(gap) else end[p]
            if t > free or (t == free and (holder < 0 or p < holder)):
                free, holder = t, p
        begin = max(ready, free)
        finish = begin + seconds[i]
        if partial:
            # What follows must look again if this end moved, or its gap did (marked by the caller).
            stale[i] = stale[i] == 2 or finish != end[i] or begin != start[i]
        start[i], end[i] = begin, finish
        if free > ready:
            cause[i], why[i] = holder, LANE
        elif by >= 0:
            cause[i], why[i] = by, WAIT
        elif holder >= 0:
            cause[i], why[i] = holder, LANE
        else:
            cause[i], why[i] = -1, NOTHING
