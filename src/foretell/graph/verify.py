"""The rules every graph keeps; an error shows the tasks that break one.

Numbers are finite and not negative; edges, lanes and links exist; nothing waits for itself,
neither by edges nor by its turn on an ordered lane; only ordered lanes can be drained.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from foretell.errors import GraphError
from foretell.graph.columns import COLUMNS, NONE, Array
from foretell.graph.graph import Graph

_SHOWN = 6  # tasks printed in an error


def verify(graph: Graph, *, columns: Iterable[str] | None = None, structure: bool = True) -> Graph:
    """The same graph, or a GraphError that names what is wrong.

    An edit that touched only some `columns` and no structure has only those checked.
    """
    for name in graph.columns if columns is None else columns:
        if name in graph.columns:
            _check_column(graph, name)
    if structure:
        _check_edges(graph)
        _check_lanes(graph)
        _check_tables(graph)
        _check_order(graph)
    return graph


def _check_column(graph: Graph, name: str) -> None:
    spec, values = COLUMNS[name], graph.columns[name]
    if len(values) != graph.size:
        raise GraphError(f"column `{name}` has {len(values)} values for {graph.size} tasks")
    if spec.dtype in (np.float64, np.float32) and not np.isfinite(values).all():
        _raise_at(graph, ~np.isfinite(values), f"`{name}` is not a finite number")
    if spec.low is not None and graph.size and values.min() < spec.low:
        _raise_at(graph, values < spec.low, f"`{name}` is below {spec.low:g}")
    high = len(graph.names) if spec.is_text else len(spec.words) if spec.words else None
    if high is not None and graph.size and values.max() >= high:
        _raise_at(graph, values >= high, f"`{name}` has a code that stands for nothing", show=False)


def _check_edges(graph: Graph) -> None:
    e = graph.edges
    if len(e.start) != graph.size + 1 or e.start[0] != 0 or e.start[-1] != e.size:
        raise GraphError(f"edge rows do not fit {graph.size} tasks and {e.size} edges")
    if (np.diff(e.start) < 0).any():
        raise GraphError("edge rows overlap")
    if e.size and (e.after.min() < 0 or e.after.max() >= graph.size):
        bad = (e.after < 0) | (e.after >= graph.size)
        k = int(np.flatnonzero(bad)[0])
        raise GraphError(
            f"task %{e.waiting[k]} waits for %{e.after[k]}, which is not there "
            f"({int(bad.sum())} such edges; {graph.size} tasks)"
        )
    if e.lag is not None and not (np.isfinite(e.lag).all() and e.lag.min() >= 0):
        raise GraphError("the lag of an edge is negative or not a finite number")


def _check_lanes(graph: Graph) -> None:
    lanes = len(graph.lanes)
    if graph.size and graph.lane.max() >= lanes:
        _raise_at(graph, graph.lane >= lanes, f"the lane does not exist ({lanes} lanes)", False)
    for table, noun in ((graph.held, "held"), (graph.drained, "drained")):
        _check_rows(graph, table.task, f"{noun} lanes")
        if len(table) and (table.lane.min() < 0 or table.lane.max() >= lanes):
            raise GraphError(f"a {noun} lane does not exist ({lanes} lanes)")
    if len(graph.drained) and not graph.lanes.ordered[graph.drained.lane].all():
        raise GraphError(
            "a drained lane has no issue order",
            hint="only ordered lanes know what was issued before",
        )
    repeated = graph.held.lane == graph.lane[graph.held.task]
    if repeated.any():
        raise GraphError(f"task %{graph.held.task[repeated][0]} holds its own lane twice")


def _check_tables(graph: Graph) -> None:
    used, links, buffers = graph.used, graph.links, graph.buffers
    _check_rows(graph, used.task, "uses of links")
    if len(used) and (used.link.min() < 0 or used.link.max() >= len(links)):
        raise GraphError(f"a link does not exist ({len(links)} links)")
    for name, values in (("capacity", links.capacity), ("demand", used.demand)):
        if not (np.isfinite(values).all() and (values > 0).all()):
            raise GraphError(f"the {name} of a link is not a positive number")
    for name in ("born", "dies"):
        values = buffers.columns()[name]
        if len(values) and (values.min() < NONE or values.max() >= graph.size):
            raise GraphError(f"a buffer's `{name}` names a task that is not there")
    if len(buffers) and not (np.isfinite(buffers.bytes).all() and buffers.bytes.min() >= 0):
        raise GraphError("the bytes of a buffer are negative or not a finite number")


def _check_rows(graph: Graph, task: Array, what: str) -> None:
    if len(task) and (task.min() < 0 or task.max() >= graph.size or (np.diff(task) < 0).any()):
        raise GraphError(f"the {what} are not sorted by tasks that exist")


def _check_order(graph: Graph) -> None:
    from foretell.graph.wiring import wiring

    wires = wiring(graph)
    if len(wires.order) == graph.size:
        return
    from foretell.graph.loops import a_cycle

    w, t = wires.waits, wires.turns
    ring = a_cycle(w.start, w.after, t.start, t.after)
    raise GraphError(
        f"{len(ring)} tasks wait on each other:\n{_shown(graph, ring)}",
        hint="an edge, or the issue order of a lane, points backwards",
    )


def _raise_at(graph: Graph, bad: Array, message: str, show: bool = True) -> None:
    where = np.flatnonzero(bad)
    lines = _shown(graph, where) if show else f"  %{where[0]}"
    raise GraphError(f"{message} in {len(where)} of {graph.size} tasks:\n{lines}")


def _shown(graph: Graph, tasks: Array) -> str:
    from foretell.graph.text import task_text

    lines = [f"  {task_text(graph, int(i))}" for i in tasks[:_SHOWN]]
    return "\n".join(lines + (["  …"] if len(tasks) > _SHOWN else []))
