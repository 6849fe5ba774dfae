"""All waits of tasks: edges, order on lanes, drained streams; and a topological order.

`turns` are the tasks just before it on its ordered lanes; a drained lane becomes an edge from the
last task issued there before it. Both are decided from the graph as it is now, never copied from
where it came from, so they stay right after any edit. Loops over edges that numpy cannot say in one
call are compiled; each fills arrays that the function below it makes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter

import numpy as np

from foretell.compiled import B1, F1, I1, J1, U1, compiled
from foretell.graph.columns import NONE, Array, Edges, WaitKind, edges
from foretell.graph.graph import Graph


@compiled
def _transpose(start: I1, after: J1, out: I1, place: I1, follower: J1, position: I1) -> None:
    n = len(start) - 1
    for k in range(len(after)):
        out[after[k] + 1] += 1
    for i in range(n):
        out[i + 1] += out[i]
        place[i] = out[i]
    for i in range(n):
        for k in range(start[i], start[i + 1]):
            p = after[k]
            follower[place[p]] = i
            position[place[p]] = k
            place[p] += 1


def transposed(start: Array, after: Array) -> tuple[Array, Array, Array]:
    """Rows of followers from rows of waits: (start, follower, position of the edge)."""
    n = len(start) - 1
    out, place = np.zeros(n + 1, np.int64), np.empty(n, np.int64)
    follower, position = np.empty(len(after), np.int32), np.empty(len(after), np.int64)
    _transpose(start, after, out, place, follower, position)
    return out, follower, position


@compiled
def _sort(
    start: I1, after: J1, turn_start: I1, turn_before: J1, seen: U1, at: I1, stack: J1, order: J1
) -> int:
    placed = 0
    for root in range(len(order)):
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
                    return placed
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
    return placed


def topological(start: Array, after: Array, turn_start: Array, turn_before: Array) -> Array:
    """Tasks in an order in which each comes after all it waits for; shorter where there is a cycle.

    Depth first over waits, smallest number first, so that an order that is already right stays.
    """
    n = len(start) - 1
    seen, at = np.zeros(n, np.uint8), np.empty(n, np.int64)  # 1: on the stack, 2: placed
    stack, order = np.empty(n, np.int32), np.empty(n, np.int32)
    placed = _sort(start, after, turn_start, turn_before, seen, at, stack, order)
    return order[:placed]


def a_cycle(start: Array, after: Array, turn_start: Array, turn_before: Array) -> Array:
    """The tasks of one cycle, each waiting for the next; empty where there is none."""
    waits = {
        i: [
            *after[start[i] : start[i + 1]].tolist(),
            *turn_before[turn_start[i] : turn_start[i + 1]].tolist(),
        ]
        for i in range(len(start) - 1)
    }
    try:
        TopologicalSorter(waits).prepare()
    except CycleError as error:  # it lists each before the one that waits for it, the first twice
        return np.array(error.args[1][:0:-1])
    return np.zeros(0, np.int64)


@compiled
def _bridge(
    start: I1,
    after: J1,
    lag: F1,
    gone: B1,
    order: J1,
    rows: I1,
    mark: I1,
    pool: J1,
    pool_lag: F1,
    out: J1,
    out_lag: F1,
) -> int:
    used, count = 0, 0
    for o in range(len(order)):
        i = order[o]
        begin = used
        for k in range(start[i], start[i + 1]):
            p = after[k]
            first, last = 0, 1
            if gone[p]:
                first, last = rows[2 * p], rows[2 * p + 1]
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
                        return -1
                    pool[used], pool_lag[used] = s, w
                    mark[s] = used
                    used += 1
                else:
                    if count == len(out_lag):
                        return -1
                    out[2 * count], out[2 * count + 1], out_lag[count] = i, s, w
                    count += 1
        if gone[i]:
            rows[2 * i], rows[2 * i + 1] = begin, used
    return count


def bridged(
    start: Array, after: Array, lag: Array, gone: Array, order: Array
) -> tuple[Array, Array, Array]:
    """Edges between kept tasks when others go: who waited for a gone task waits for its waits.

    Returns (waiting, after, lag) of the edges to add; repeats may occur.
    """
    n, room = len(start) - 1, 1024 + 2 * len(after)
    while True:
        rows = np.empty(2 * n, np.int64)  # where the waits of a gone task begin and end in `pool`
        mark = np.full(n, -1, np.int64)
        pool, pool_lag = np.empty(room, np.int32), np.empty(room)
        out, out_lag = np.empty(2 * room, np.int32), np.empty(room)
        count = _bridge(start, after, lag, gone, order, rows, mark, pool, pool_lag, out, out_lag)
        if count >= 0:
            return out[0 : 2 * count : 2], out[1 : 2 * count : 2], out_lag[:count]
        room *= 4  # it was too little


@compiled
def _place(
    ranked: I1,
    tasks: I1,
    anchors: I1,
    is_behind: B1,
    first: I1,
    more: I1,
    is_put: U1,
    stack: I1,
    out: I1,
) -> int:
    """`first`: of each task the last one put ahead of it and the last one put behind it."""
    for k in range(len(tasks)):
        at = 2 * anchors[k] + (1 if is_behind[k] else 0)
        more[k] = first[at]  # the one put there before that
        first[at] = k
        is_put[tasks[k]] = 1
    count = 0
    for r in range(len(ranked)):
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
            k = first[2 * i + 1]
            while k >= 0:
                stack[top] = tasks[k]
                top += 1
                k = more[k]
            stack[top] = ~i
            top += 1
            k = first[2 * i]
            while k >= 0:
                stack[top] = tasks[k]
                top += 1
                k = more[k]
    return count


def placed(ranked: Array, tasks: Array, anchors: Array, is_behind: Array) -> Array:
    """All tasks in issue order when some are put right ahead of or right behind others.

    What is put next to the same task keeps the order given, and goes where that task goes.
    Shorter where tasks are put next to each other in a ring.
    """
    n = len(ranked)
    first, more = np.full(2 * n, -1, np.int64), np.empty(len(tasks), np.int64)
    is_put, stack, out = np.zeros(n, np.uint8), np.empty(2 * n + 1, np.int64), np.empty(n, np.int64)
    count = _place(ranked, tasks, anchors, is_behind, first, more, is_put, stack, out)
    return out[:count]


@dataclass(frozen=True, eq=False)
class Wiring:
    """Waits and turns of every task in compressed rows, and what follows from them."""

    waits: Edges  # edges and drained lanes
    turns: Edges  # the task before it on each ordered lane it holds

    @cached_property
    def is_forward(self) -> bool:
        """Whether every task waits only for lower numbers, so that 0, 1, 2 … is a right order."""
        return all(bool((e.after < e.waiting).all()) for e in (self.waits, self.turns))

    @cached_property
    def order(self) -> Array:
        """All tasks, each after everything it waits for."""
        if self.is_forward:
            return np.arange(len(self.waits.start) - 1, dtype=np.int32)
        w, t = self.waits, self.turns
        return topological(w.start, w.after, t.start, t.after)

    @cached_property
    def followers(self) -> tuple[Array, Array, Array]:
        """Successors of each task: (start, follower, position of the edge in `waits`)."""
        return transposed(self.waits.start, self.waits.after)

    @cached_property
    def turn_followers(self) -> tuple[Array, Array, Array]:
        """Whose turn on an ordered lane comes after each task."""
        return transposed(self.turns.start, self.turns.after)


def wiring(graph: Graph) -> Wiring:
    """The wiring of a graph, made once and shared by all edits that leave the structure alone."""
    made = graph.cache.get("wiring")
    if made is None:
        lane_tasks = _issued(graph)
        made = Wiring(_waits(graph, lane_tasks), _turns(graph, lane_tasks))
        graph.cache["wiring"] = made
    found: Wiring = made
    return found


def _issued(graph: Graph) -> tuple[Array, Array, Array]:
    """(lane, place, task) of every task on every ordered lane it holds, sorted in that order."""
    lane, order = graph.lane, graph.order
    task = np.flatnonzero(lane != NONE)
    task, lane = task.astype(np.int32), lane[task]
    if len(graph.held):
        task = np.concatenate([task, graph.held.task])
        lane = np.concatenate([lane, graph.held.lane])
    if not len(graph.lanes):
        return lane[:0], order[:0], task[:0]
    keep = graph.lanes.ordered[lane]
    if not keep.all():
        task, lane = task[keep], lane[keep]
    place = order[task]
    if "order" not in graph.columns and not len(graph.held):
        ranked = np.argsort(lane, kind="stable")  # numbers ascend within a lane already
    else:
        ranked = np.lexsort((task, place, lane))
    return lane[ranked], place[ranked], task[ranked]


def _turns(graph: Graph, issued: tuple[Array, Array, Array]) -> Edges:
    lane, _, task = issued
    same = lane[1:] == lane[:-1]
    return edges(graph.size, task[1:][same], task[:-1][same])


def _waits(graph: Graph, issued: tuple[Array, Array, Array]) -> Edges:
    if not len(graph.drained):
        return graph.edges
    waiting, after = _last_issued(graph, issued)
    own = graph.edges
    kinds = np.concatenate([own.kinds, np.full(len(after), WaitKind.SYNC, np.uint8)])
    return edges(
        graph.size,
        np.concatenate([own.waiting, waiting]),
        np.concatenate([own.after, after]),
        np.concatenate([own.lags, np.zeros(len(after))]),
        kinds,
    )


def _last_issued(graph: Graph, issued: tuple[Array, Array, Array]) -> tuple[Array, Array]:
    """For every drained lane, who waits and for which task: the last one issued before it."""
    lane, place, task = issued
    place, at = _from_zero(place, graph.order[graph.drained.task])
    # One sortable key a row: lanes far apart, places within a lane in order.
    span = int(max(place.max(initial=0), at.max(initial=0))) + 2
    key = lane.astype(np.int64) * span + place
    wanted = graph.drained.lane.astype(np.int64) * span + at
    found = np.searchsorted(key, wanted, side="left") - 1
    fits = found >= 0
    fits[fits] = lane[found[fits]] == graph.drained.lane[fits]
    return graph.drained.task[fits], task[found[fits]]


def _from_zero(place: Array, at: Array) -> tuple[Array, Array]:
    """Places that begin at zero and are small enough to share a key with a lane, order kept."""
    low = min(int(place.min(initial=0)), int(at.min(initial=0)))
    high = max(int(place.max(initial=0)), int(at.max(initial=0)))
    if high - low < 2**31:  # lanes are int32, so that the product stays below 2**63
        return place - low, at - low
    _, dense = np.unique(np.concatenate([place, at]), return_inverse=True)
    return dense[: len(place)], dense[len(place) :]
