"""From columns to a graph that is sound: what waits for what, checks, builders.

All waits of tasks: edges, order on lanes, drained streams; and a topological order.

`turns` are the tasks just before it on its ordered lanes; a drained lane becomes an edge from the
last task issued there before it. Both are decided from the graph as it is now, never copied from
where it came from, so they stay right after any edit. Loops over edges that numpy cannot say in one
call are compiled; each fills arrays that the function below it makes.

The rules every graph keeps; an error shows the tasks that break one.

Numbers are finite and not negative; codes stand for something; edges, lanes and links exist; rows
are sorted; nothing waits for itself, neither by edges nor by its turn on an ordered lane; only
ordered lanes can be drained.

Graphs made by hand, one task at a time, and graphs put together from others.

`Builder` is for tests, examples and small readers; big readers fill columns at once and call
`assemble`. `concat` puts graphs after or beside each other, `replicate` copies one over ranks or
micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import Any

import numpy as np

from foretell.compiled import B1, F1, I1, J1, U1, compiled
from foretell.errors import GraphError, InputError
from foretell.graph.graph import (
    COLUMNS,
    NONE,
    Array,
    BufferKind,
    Buffers,
    Drained,
    Edges,
    Graph,
    Held,
    LaneKind,
    Lanes,
    Links,
    Names,
    Rows,
    Used,
    WaitKind,
    code_of,
    coded,
    column,
    edges,
    fitted,
    frozen,
    group_text,
    is_default,
    owned,
    ranks_of,
)


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


_MOST = 1e150  # seconds of a task: sums and squares stay finite
_SHOWN = 6  # tasks printed in an error
_WIDTH = 200  # characters of each, so that a task with a thousand waits does not fill the screen


def verify(
    graph: Graph,
    *,
    columns: Iterable[str] | None = None,
    structure: bool = True,
    tables: bool = True,
) -> Graph:
    """The same graph, or a GraphError that names what is wrong.

    An edit that touched only some `columns` has only those checked; one that left alone who waits
    for whom, or the tables beside, has these passed over.
    """
    if columns is None and not graph.names.is_unique():
        raise GraphError("a string is kept twice in the names of a graph")
    for name in graph.columns if columns is None else columns:
        if name in graph.columns:
            _check_column(graph, name)
    if structure or tables:
        _check_tables(graph)
    if structure:
        _check_edges(graph)
        _check_lanes(graph)
        _check_order(graph, wiring(graph))
    return graph


def _check_column(graph: Graph, name: str) -> None:
    spec, values = COLUMNS[name], graph.columns[name]
    if values.shape != (graph.size,):
        raise GraphError(f"column `{name}` has {values.size} values for {graph.size} tasks")
    if not graph.size:
        return
    if spec.dtype in (np.float64, np.float32) and not np.isfinite(values).all():
        _raise_at(graph, ~np.isfinite(values), f"`{name}` is not a finite number")
    if name in ("seconds", "gap") and np.abs(values).max() > _MOST:
        _raise_at(graph, np.abs(values) > _MOST, f"`{name}` is above {_MOST:g}: sums would not end")
    if spec.low is not None and values.min() < spec.low:
        _raise_at(graph, values < spec.low, f"`{name}` is below {spec.low:g}")
    high = len(graph.names) if spec.is_text else len(spec.words) if spec.words else None
    if high is not None and values.max() >= high:
        _raise_at(graph, values >= high, f"`{name}` has a code that stands for nothing")


def _check_tables(graph: Graph) -> None:
    lanes, links, buffers = graph.lanes, graph.links, graph.buffers
    _check_codes("name of a lane", lanes.name, len(graph.names))
    _check_codes("kind of a lane", lanes.kind, LaneKind)
    _check_codes("name of a link", links.name, len(graph.names))
    _check_codes("name of a buffer", buffers.name, len(graph.names))
    _check_codes("kind of a buffer", buffers.kind, BufferKind)
    for noun, rank in (("lane", lanes.rank), ("buffer", buffers.rank)):
        if len(rank) and rank.min() < 0:
            raise GraphError(f"a {noun} is of rank {rank.min()}", hint="ranks are 0, 1, 2 …")
    _check_rows(graph, graph.held, "held lanes", len(lanes), "lanes")
    _check_rows(graph, graph.drained, "drained lanes", len(lanes), "lanes")
    _check_rows(graph, graph.used, "uses of links", len(links), "links")
    _check_rates(graph)
    _check_buffers(graph)


def _check_codes(what: str, codes: Array, known: int | type[IntEnum]) -> None:
    high = known if isinstance(known, int) else len(known)
    if len(codes) and (codes.min() < 0 or codes.max() >= high):
        bad = codes[(codes < 0) | (codes >= high)]
        raise GraphError(f"the {what} is {bad[0]}, a code that stands for nothing ({high} are)")


def _check_rows(graph: Graph, rows: Rows, what: str, known: int, noun: str) -> None:
    if not len(rows):
        return
    task, named = rows.columns()["task"], rows.named
    if task.min() < 0 or task.max() >= graph.size:
        bad = task[(task < 0) | (task >= graph.size)]
        raise GraphError(f"the {what} name task %{bad[0]} of {graph.size} tasks")
    if named.min() < 0 or named.max() >= known:
        k = int(np.flatnonzero((named < 0) | (named >= known))[0])
        raise GraphError(
            f"the {what} of task %{task[k]} name {named[k]}, which does not exist ({known} {noun})"
        )
    if not rows.is_tidy():
        raise GraphError(f"the {what} are not sorted by task, or name one twice")


def _check_rates(graph: Graph) -> None:
    for name, values in (("capacity", graph.links.capacity), ("demand", graph.used.demand)):
        bad = ~(np.isfinite(values) & (values > 0))
        if bad.any():
            raise GraphError(f"the {name} of a link is {values[bad][0]}, not a positive number")


def _check_buffers(graph: Graph) -> None:
    buffers = graph.buffers
    for name, task in (("born", buffers.born), ("dies", buffers.dies)):
        if len(task) and (task.min() < NONE or task.max() >= graph.size):
            bad = task[(task < NONE) | (task >= graph.size)]
            raise GraphError(f"a buffer's `{name}` is task %{bad[0]} of {graph.size} tasks")
    bad = ~(np.isfinite(buffers.bytes) & (buffers.bytes >= 0))
    if bad.any():
        raise GraphError(f"a buffer has {buffers.bytes[bad][0]} bytes")


def _check_edges(graph: Graph) -> None:
    e = graph.edges
    if e.start.shape != (graph.size + 1,) or e.start[0] != 0 or e.start[-1] != e.size:
        raise GraphError(f"edge rows do not fit {graph.size} tasks and {e.size} edges")
    if (np.diff(e.start) < 0).any():
        raise GraphError("edge rows overlap")
    for name, values in (("lag", e.lag), ("kind", e.kind)):
        if values is not None and values.shape != e.after.shape:
            raise GraphError(f"{values.size} values of `{name}` for {e.size} edges")
    _check_after(graph)
    if e.lag is not None and not (np.isfinite(e.lag) & (e.lag >= 0)).all():
        k = int(np.flatnonzero(~(np.isfinite(e.lag) & (e.lag >= 0)))[0])
        raise GraphError(f"task %{e.waiting[k]} waits {e.lag[k]} seconds longer than %{e.after[k]}")
    _check_codes("kind of an edge", e.kinds, WaitKind)


def _check_after(graph: Graph) -> None:
    e = graph.edges
    if not e.size:
        return
    if e.after.min() < 0 or e.after.max() >= graph.size:
        bad = (e.after < 0) | (e.after >= graph.size)
        k = int(np.flatnonzero(bad)[0])
        raise GraphError(
            f"task %{e.waiting[k]} waits for %{e.after[k]}, which is not there "
            f"({int(bad.sum())} such edges; {graph.size} tasks)"
        )
    same = e.waiting[1:] == e.waiting[:-1]
    if (np.diff(e.after)[same] <= 0).any():
        raise GraphError("what a task waits for is not sorted, or named twice")


def _check_lanes(graph: Graph) -> None:
    lanes, held = len(graph.lanes), graph.held
    if graph.size and graph.lane.max() >= lanes:
        _raise_at(graph, graph.lane >= lanes, f"the lane does not exist ({lanes} lanes)")
    repeated = held.lane == graph.lane[held.task]
    if repeated.any():
        raise GraphError(f"task %{held.task[repeated][0]} holds its own lane twice")
    free = ~graph.lanes.ordered[graph.drained.lane]
    if free.any():
        raise GraphError(
            f"task %{graph.drained.task[free][0]} drains lane {graph.drained.lane[free][0]}, "
            "which has no issue order",
            hint="only ordered lanes know what was issued before",
        )


def _check_order(graph: Graph, wires: Wiring) -> None:
    if len(wires.order) == graph.size:
        return
    w, t = wires.waits, wires.turns
    ring = a_cycle(w.start, w.after, t.start, t.after)
    raise GraphError(
        f"{len(ring)} tasks wait on each other:\n{_shown(graph, ring)}",
        hint="an edge, or the issue order of a lane, points backwards",
    )


def _raise_at(graph: Graph, bad: Array, message: str) -> None:
    where = np.flatnonzero(bad)
    raise GraphError(f"{message} in {len(where)} of {graph.size} tasks:\n{_shown(graph, where)}")


def _shown(graph: Graph, tasks: Array) -> str:
    lines = [f"  {_line(graph, int(i))}" for i in tasks[:_SHOWN]]
    return "\n".join(lines + (["  …"] if len(tasks) > _SHOWN else []))


def _line(graph: Graph, i: int) -> str:
    from foretell.graph.text import task_text

    try:
        line = task_text(graph, i)
    except (IndexError, ValueError):  # it is too broken to be shown as text
        return f"%{i}"
    return line if len(line) <= _WIDTH else line[: _WIDTH - 1] + "…"


def assemble(
    size: int, columns: Mapping[str, Any], edges: Edges, *, check: bool = True, **parts: Any
) -> Graph:
    """A verified graph from whole columns.

    Columns that are all default are dropped; rows of tables may come in any order. What the caller
    could still write to is copied.
    """
    kept = {}
    for name, values in columns.items():
        array = owned(values, column(name).dtype, f"column `{name}`")
        if len(array) != size or not is_default(name, array):
            kept[name] = array
    parts = {k: v.tidy() if isinstance(v, Rows) else v for k, v in parts.items()}
    graph = Graph(size=size, columns=kept, edges=edges, **parts)
    return verify(graph) if check else graph


class Builder:
    """Collects tasks and lanes as Python values and makes one graph of them."""

    def __init__(self) -> None:
        self._texts: dict[str, int] = {"": 0}
        self._tasks: list[dict[str, Any]] = []
        self._waits: list[tuple[int, int, float, int]] = []
        self._lanes: list[tuple[int, int, int, bool]] = []
        self._links: list[tuple[int, float]] = []
        self._held: list[tuple[int, int]] = []
        self._drained: list[tuple[int, int]] = []
        self._used: list[tuple[int, int, float]] = []
        self._buffers: list[tuple[float, int, int, int, int, int]] = []

    def lane(self, name: str, *, rank: int = 0, kind: str = "other", ordered: bool = True) -> int:
        """A new lane; its number."""
        row = (rank, self._number(name), code_of(LaneKind, kind), ordered)
        self._lanes.append(row)
        return len(self._lanes) - 1

    def link(self, name: str, capacity: float) -> int:
        """A new link; its number."""
        self._links.append((self._number(name), capacity))
        return len(self._links) - 1

    def task(
        self,
        *,
        after: Iterable[int] = (),
        lanes: Sequence[int] = (),
        drains: Iterable[int] = (),
        uses: Mapping[int, float] | None = None,
        **columns: Any,
    ) -> int:
        """A new task; its number. Further `lanes` are held besides `lane`."""
        i = len(self._tasks)
        if lanes:
            columns.setdefault("lane", lanes[0])
            self._held += [(i, lane) for lane in lanes if lane != columns["lane"]]
        self._tasks.append({k: self._value(k, v) for k, v in columns.items()})
        for other in after:
            self.wait(i, other)
        self._drained += [(i, lane) for lane in drains]
        self._used += [(i, link, demand) for link, demand in (uses or {}).items()]
        return i

    def wait(self, task: int, after: int, *, lag: float = 0.0, kind: str = "data") -> None:
        """Let one task wait for another."""
        self._waits.append((task, after, lag, code_of(WaitKind, kind)))

    def buffer(
        self,
        bytes: float,
        *,
        rank: int = 0,
        born: int = NONE,
        dies: int = NONE,
        name: str = "",
        kind: str = "other",
    ) -> None:
        """Memory that is there from the start of `born` to the end of `dies`."""
        code = code_of(BufferKind, kind)
        self._buffers.append((bytes, rank, born, dies, self._number(name), code))

    def graph(self, *, check: bool = True, **facts: Any) -> Graph:
        """All that was collected, verified."""
        return self.made(facts, check=check)

    def made(
        self, facts: Mapping[str, Any], *, history: tuple[str, ...] = (), check: bool = True
    ) -> Graph:
        """All that was collected, with facts of any name."""
        size, waits = len(self._tasks), _transposed(self._waits, 4)
        return assemble(
            size,
            self._columns(),
            edges(size, *waits),
            check=check,
            names=Names(self._texts),
            lanes=Lanes(*_transposed(self._lanes, 4)),
            links=Links(*_transposed(self._links, 2)),
            held=Held(*_transposed(self._held, 2)),
            drained=Drained(*_transposed(self._drained, 2)),
            used=Used(*_transposed(self._used, 3)),
            buffers=Buffers(*_transposed(self._buffers, 6)),
            facts=facts,
            history=history,
        )

    def _columns(self) -> dict[str, Any]:
        given = {name for task in self._tasks for name in task}
        columns = {
            name: [task.get(name, COLUMNS[name].default) for task in self._tasks]
            for name in COLUMNS
            if name in given and name != "order"
        }
        if "order" in given:
            columns["order"] = [task.get("order", i) for i, task in enumerate(self._tasks)]
        return columns

    def _number(self, text: str) -> int:
        return self._texts.setdefault(text, len(self._texts))

    def _value(self, name: str, value: Any) -> Any:
        if isinstance(value, str):
            return coded(name, value, self._number)
        column(name)  # says so where there is no such column
        return value


def _transposed(rows: Sequence[tuple[Any, ...]], width: int) -> list[Any]:
    return list(zip(*rows, strict=True)) if rows else [[] for _ in range(width)]


def concat(graphs: Sequence[Graph], *, spec: str = "") -> Graph:
    """All tasks of several graphs in one, in that order.

    Lanes of the same rank and name become one lane, as do links of the same name (of several in
    one graph the first with the first, and so on); nothing waits across graphs unless an edge is
    added so. On a shared ordered lane earlier graphs go first.
    """
    if not graphs:
        return Graph()
    names = Names().adding(text for g in graphs for text in g.names)
    graphs = [_renamed(g, names) for g in graphs]
    lanes, lane_of = _merged(Lanes, [g.lanes for g in graphs], ("rank", "name"))
    links, link_of = _merged(Links, [g.links for g in graphs], ("name",))
    _check_same("lane", "ordered", lanes, [g.lanes for g in graphs], lane_of, names)
    _check_same("link", "capacity", links, [g.links for g in graphs], link_of, names)
    starts = np.cumsum([0] + [g.size for g in graphs])
    return Graph(
        size=int(starts[-1]),
        columns=_stacked_columns(graphs, lane_of, starts),
        edges=_stacked_edges(graphs, starts),
        names=names,
        lanes=lanes,
        links=links,
        held=_shifted(Held, [g.held for g in graphs], starts, lane=lane_of),
        drained=_shifted(Drained, [g.drained for g in graphs], starts, lane=lane_of),
        used=_shifted(Used, [g.used for g in graphs], starts, link=link_of),
        buffers=_stacked_buffers(graphs, starts),
        history=(*graphs[0].history, spec) if spec else graphs[0].history,
        facts=graphs[0].facts,
    )


def replicate(graph: Graph, copies: int, *, over: str = "rank", stride: int | None = None) -> Graph:
    """So many copies of a graph, on further ranks or as further micro-batches.

    Over ranks each copy has lanes of its own, `stride` ranks further (as many as the graph has).
    Over micro-batches the copies share their lanes, and on ordered lanes earlier copies go first.
    """
    if copies < 1:
        raise InputError(f"{copies} copies of a graph", hint="ask for one or more")
    if over not in ("rank", "micro_batch"):
        raise InputError(f"a graph is replicated over `rank` or `micro_batch`, not `{over}`")
    if stride is None:
        stride = 1 if over == "micro_batch" else _ranks(graph)
    if stride < 0:
        raise InputError(f"copies of a graph {stride} apart", hint="a stride is zero or more")
    move = _moved_rank if over == "rank" else _moved_micro_batch
    spec = f"replicate:copies={copies},over={over},stride={stride}"
    return concat([move(graph, k * stride) for k in range(copies)], spec=spec)


def _ranks(graph: Graph) -> int:
    known = [graph.rank, graph.lanes.rank, graph.buffers.rank]
    return 1 + max(int(r.max(initial=0)) for r in known)


def _moved_rank(graph: Graph, by: int) -> Graph:
    if by == 0:
        return graph
    graph = _moved_groups(graph, by)
    columns = {**graph.columns, "rank": _further(graph, "rank", by)}
    lanes = graph.lanes.replace(rank=graph.lanes.rank + np.int64(by))
    buffers = graph.buffers.replace(rank=graph.buffers.rank + np.int64(by))
    return replace(graph, columns=columns, lanes=lanes, buffers=buffers)


def _further(graph: Graph, name: str, by: int) -> Array:
    """A column that much higher, or an error where it has no room for that."""
    return frozen(
        fitted(graph.column(name) + np.int64(by), COLUMNS[name].dtype, f"column `{name}`")
    )


def _moved_groups(graph: Graph, by: int) -> Graph:
    """The graph with the ranks of its collectives that much further."""
    if "group" not in graph.columns:
        return graph
    old, place = np.unique(graph.group, return_inverse=True)
    texts = [group_text(r + by for r in ranks_of(graph.names[int(g)])) for g in old]
    names = graph.names.adding(texts)
    moved = frozen(names.numbers(texts)[place])
    return replace(graph, names=names, columns={**graph.columns, "group": moved})


def _moved_micro_batch(graph: Graph, by: int) -> Graph:
    if by == 0:
        return graph
    moved = _further(graph, "micro_batch", by)
    # What was there from the beginning is there once, whatever the number of micro-batches.
    own = graph.buffers.take(graph.buffers.born != NONE)
    return replace(graph, columns={**graph.columns, "micro_batch": moved}, buffers=own)


def _renamed(graph: Graph, names: Names) -> Graph:
    """The graph with its text columns as numbers of other names."""
    if graph.names == names:
        return graph
    new = names.numbers(graph.names)
    columns = {k: frozen(new[v]) if COLUMNS[k].is_text else v for k, v in graph.columns.items()}
    tables: dict[str, Any] = {
        part: getattr(graph, part).replace(name=new[getattr(graph, part).name])
        for part in ("lanes", "links", "buffers")
    }
    return replace(graph, names=names, columns=columns, **tables)


def _merged(kind: Any, tables: list[Any], keys: tuple[str, ...]) -> tuple[Any, list[Array]]:
    """One table without repeats of a key, and for each old table its rows' new numbers."""
    whole = kind.stack(tables)
    key = np.concatenate([_keys(t, keys) for t in tables])
    _, first, number = np.unique(key, axis=0, return_index=True, return_inverse=True)
    ranked = np.argsort(first, kind="stable")  # keep the order in which they first appear
    place = np.empty(len(first), np.int64)
    place[ranked] = np.arange(len(first))
    numbers = place[number.reshape(-1)]
    ends = np.cumsum([len(t) for t in tables])[:-1]
    return whole.take(np.sort(first)), np.split(numbers, ends)


def _keys(table: Any, keys: tuple[str, ...]) -> Array:
    """The key of each row, and as its last part how many rows before it have the same."""
    key = np.stack([table.columns()[k].astype(np.int64) for k in keys], axis=1)
    number = np.unique(key, axis=0, return_inverse=True)[1].reshape(-1)
    ranked = np.argsort(number, kind="stable")
    sorted_number = number[ranked]
    begins = np.searchsorted(sorted_number, sorted_number)
    repeat = np.empty(len(number), np.int64)
    repeat[ranked] = np.arange(len(number)) - begins
    return np.column_stack([key, repeat])


def _check_same(
    noun: str, column: str, whole: Any, tables: list[Any], numbers: list[Array], names: Names
) -> None:
    """Refuse to make one of two lanes or links that are not alike."""
    for table, number in zip(tables, numbers, strict=True):
        ours, theirs = whole.columns()[column][number], table.columns()[column]
        if (ours != theirs).any():
            k = int(np.flatnonzero(ours != theirs)[0])
            raise InputError(
                f"{noun} `{names[int(table.name[k])]}` has {column} {ours[k]} in one graph "
                f"and {theirs[k]} in another",
                hint="give it one of the two in both, or another name",
            )


def _stacked_columns(
    graphs: Sequence[Graph], lane_of: list[Array], starts: Array
) -> dict[str, Array]:
    present = {name for g in graphs for name in g.columns}
    columns = {
        name: np.concatenate([g.column(name) for g in graphs])
        for name in COLUMNS
        if name in present and name not in ("lane", "order")
    }
    if "lane" in present:
        columns["lane"] = np.concatenate(
            [np.append(m, NONE)[g.lane] for g, m in zip(graphs, lane_of, strict=True)]
        ).astype(np.int32)
    if "order" in present:
        columns["order"] = _stacked_order(graphs)
    return {k: frozen(v) for k, v in columns.items()}


def _stacked_order(graphs: Sequence[Graph]) -> Array:
    """The places of each graph moved behind all those of the graphs before it."""
    places, end = [], 0
    for order in (g.order for g in graphs if g.size):
        places.append(order - order.min() + end)
        end = int(places[-1].max()) + 1
    return np.concatenate(places)


def _stacked_edges(graphs: Sequence[Graph], starts: Array) -> Edges:
    offsets = np.cumsum([0] + [g.edges.size for g in graphs])
    rows = [g.edges.start[:-1] + o for g, o in zip(graphs, offsets, strict=False)]
    after = [g.edges.after + np.int32(s) for g, s in zip(graphs, starts, strict=False)]
    has_lag = any(g.edges.lag is not None for g in graphs)
    has_kind = any(g.edges.kind is not None for g in graphs)
    return Edges(
        frozen(np.append(np.concatenate(rows), offsets[-1])),
        frozen(np.concatenate(after), np.int32),
        frozen(np.concatenate([g.edges.lags for g in graphs])) if has_lag else None,
        frozen(np.concatenate([g.edges.kinds for g in graphs])) if has_kind else None,
    )


def _shifted(kind: Any, tables: list[Any], starts: Array, **numbers: list[Array]) -> Any:
    (column, maps), parts = next(iter(numbers.items())), []
    for table, start, new in zip(tables, starts, maps, strict=False):
        renumbered = {"task": table.task + start, column: new[table.columns()[column]]}
        parts.append(table.replace(**renumbered) if len(table) else table)
    return kind.stack(parts).tidy()


def _stacked_buffers(graphs: Sequence[Graph], starts: Array) -> Buffers:
    parts = []
    for g, start in zip(graphs, starts, strict=False):
        b = g.buffers
        born = np.where(b.born == NONE, NONE, b.born + start)
        dies = np.where(b.dies == NONE, NONE, b.dies + start)
        parts.append(b.replace(born=born, dies=dies))
    return Buffers.stack(parts)
