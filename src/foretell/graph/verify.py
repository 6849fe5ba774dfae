"""The rules every graph keeps; an error shows the tasks that break one.

Numbers are finite and not negative; codes stand for something; edges, lanes and links exist; rows
are sorted; nothing waits for itself, neither by edges nor by its turn on an ordered lane; only
ordered lanes can be drained.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

import numpy as np

from foretell.errors import GraphError
from foretell.graph.columns import COLUMNS, NONE, Array, BufferKind, LaneKind, Rows, WaitKind
from foretell.graph.graph import Graph
from foretell.graph.wiring import Wiring, a_cycle, wiring

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
