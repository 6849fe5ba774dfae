"""Compiled loops over edges: what numpy cannot say in one call."""

from typing import Any

import numpy as np
from numba import njit


@njit(cache=True)
def transposed(start: Any, after: Any) -> Any:
    """Rows of followers from rows of waits: (start, follower, position of the edge)."""
    n = len(start) - 1
    out = np.zeros(n + 1, np.int64)
    for k in range(len(after)):
        out[after[k] + 1] += 1
    for i in range(n):
        out[i + 1] += out[i]
    follower = np.empty(len(after), np.int32)
    position = np.empty(len(after), np.int64)
    place = out[:-1].copy()
    for i in range(n):
        for k in range(start[i], start[i + 1]):
            p = after[k]
            follower[place[p]] = i
            position[place[p]] = k
            place[p] += 1
    return out, follower, position


@njit(cache=True)
def topological(start: Any, after: Any, turn_start: Any, turn_before: Any) -> Any:
    """Tasks in an order in which each comes after all it waits for; shorter where there is a cycle.

    Depth first over waits, smallest number first, so that an order that is already right stays.
    """
    n = len(start) - 1
    seen = np.zeros(n, np.uint8)  # 1: on the stack, 2: placed
    at = np.empty(n, np.int64)
    stack = np.empty(n, np.int32)
    order = np.empty(n, np.int32)
    placed = 0
    for root in range(n):
        if seen[root]:
            continue
        top = 0
        stack[0], seen[root], at[root] = root, 1, 0
        while top >= 0:
            i = stack[top]
            deps = start[i + 1] - start[i]
            turns = turn_start[i + 1] - turn_start[i]
            pushed = False
            while at[i] < deps + turns:
                k = at[i]
                at[i] += 1
                p = after[start[i] + k] if k < deps else turn_before[turn_start[i] + k - deps]
                if seen[p] == 1:
                    return order[:placed]
                if seen[p] == 0:
                    top += 1
                    stack[top], seen[p], at[p] = p, 1, 0
                    pushed = True
                    break
            if not pushed:
                seen[i] = 2
                order[placed] = i
                placed += 1
                top -= 1
    return order


@njit(cache=True)
def a_cycle(start: Any, after: Any, turn_start: Any, turn_before: Any) -> Any:
    """The tasks of one cycle, each waiting for the next; empty where there is none."""
    n = len(start) - 1
    seen = np.zeros(n, np.uint8)
    at = np.zeros(n, np.int64)
    stack = np.empty(n, np.int32)
    for root in range(n):
        if seen[root]:
            continue
        top = 0
        stack[0], seen[root] = root, 1
        while top >= 0:
            i = stack[top]
            deps = start[i + 1] - start[i]
            turns = turn_start[i + 1] - turn_start[i]
            if at[i] == deps + turns:
                seen[i] = 2
                top -= 1
                continue
            k = at[i]
            at[i] += 1
            p = after[start[i] + k] if k < deps else turn_before[turn_start[i] + k - deps]
            if seen[p] == 1:
                first = top
                while stack[first] != p:
                    first -= 1
                return stack[first : top + 1].copy()
            if seen[p] == 0:
                top += 1
                stack[top], seen[p] = p, 1
    return stack[:0].copy()


@njit(cache=True)
def doubled(values: Any) -> Any:
    """The same values with as much room behind them.

    One by one: to assign a slice, numba compiles the text of an error too, which takes seconds.
    """
    out = np.empty(2 * len(values), values.dtype)
    for k in range(len(values)):
        out[k] = values[k]
    return out


@njit(cache=True)
def bridged(start: Any, after: Any, lag: Any, gone: Any, order: Any) -> Any:
    """Edges between kept tasks when others go: who waited for a gone task waits for its waits.

    Returns (waiting, after, lag) of the edges to add; repeats may occur.
    """
    n = len(start) - 1
    rows = np.full(n + 1, -1, np.int64)  # where the waits of a gone task begin in `pool`
    ends = np.zeros(n, np.int64)
    pool = np.empty(1024, np.int32)
    pool_lag = np.empty(1024, np.float64)
    used = 0
    mark = np.full(n, -1, np.int64)
    out_w = np.empty(1024, np.int32)
    out_a = np.empty(1024, np.int32)
    out_l = np.empty(1024, np.float64)
    count = 0
    for o in range(n):
        i = order[o]
        begin = used
        for k in range(start[i], start[i + 1]):
            p = after[k]
            first, last = 0, 1
            if gone[p]:
                first, last = rows[p], ends[p]
            elif not gone[i]:
                continue  # a plain edge between kept tasks stays as it is
            for q in range(first, last):
                s, w = p, lag[k]
                if gone[p]:
                    s, w = pool[q], pool_lag[q] + lag[k]
                if gone[i]:
                    if mark[s] >= begin and mark[s] < used and pool[mark[s]] == s:
                        pool_lag[mark[s]] = max(pool_lag[mark[s]], w)
                        continue
                    if used == len(pool):
                        pool, pool_lag = doubled(pool), doubled(pool_lag)
                    pool[used], pool_lag[used] = s, w
                    mark[s] = used
                    used += 1
                else:
                    if count == len(out_w):
                        out_w, out_a, out_l = doubled(out_w), doubled(out_a), doubled(out_l)
                    out_w[count], out_a[count], out_l[count] = i, s, w
                    count += 1
        if gone[i]:
            rows[i], ends[i] = begin, used
    return out_w[:count], out_a[:count], out_l[:count]


@njit(cache=True)
def placed(ranked: Any, tasks: Any, anchors: Any, is_behind: Any) -> Any:
    """All tasks in issue order when some are put right ahead of or right behind others.

    What is put next to the same task keeps the order given, and goes where that task goes.
    Shorter where tasks are put next to each other in a ring.
    """
    n, m = len(ranked), len(tasks)
    first = np.full((2, n), -1, np.int64)  # of each task: the last one put ahead, and behind
    more = np.full(m, -1, np.int64)  # the one put there before that
    is_put = np.zeros(n, np.uint8)
    for k in range(m):
        side = 1 if is_behind[k] else 0
        more[k] = first[side, anchors[k]]
        first[side, anchors[k]] = k
        is_put[tasks[k]] = 1
    out = np.empty(n, np.int64)
    stack = np.empty(2 * n + 1, np.int64)
    count = 0
    for r in range(n):
        if is_put[ranked[r]]:
            continue
        stack[0] = ranked[r]
        top = 1
        while top:
            top -= 1
            i = stack[top]
            if i < 0:  # all that goes ahead of it is out
                out[count] = ~i
                count += 1
                continue
            k = first[1, i]
            while k >= 0:
                stack[top] = tasks[k]
                top += 1
                k = more[k]
            stack[top] = ~i
            top += 1
            k = first[0, i]
            while k >= 0:
                stack[top] = tasks[k]
                top += 1
                k = more[k]
    return out[:count]
