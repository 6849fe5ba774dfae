"""What differs between two timelines: task by task where both have it, and summed up by op."""

from __future__ import annotations

from typing import Any

import numpy as np

from foretell.graph.columns import NONE, Array
from foretell.graph.graph import Graph
from foretell.simulate.timeline import Timeline

SAME, SHORTER, LONGER, NEW, EARLIER, LATER, GONE = range(7)
RUNS = 0.02  # a task runs longer or shorter where it does by this share of itself
STARTS = 0.01  # a task starts earlier or later where it does by this share of the step
LEAST = 1e-5  # of the step: less than that cannot be seen


def origins(before: Graph, after: Graph) -> Array | None:
    """For each task after, its number before or NONE; None where the graphs are not related."""
    graph, origin = after, np.arange(after.size)
    while graph is not before:
        if graph.parent is None:
            return None
        step = np.arange(graph.size) if graph.origin is None else graph.origin
        origin = np.where(origin == NONE, NONE, step[origin])
        graph = graph.parent
    return origin


def changes(before: Timeline, after: Timeline, origin: Array) -> Array:
    """What became of each task after: one of the codes above."""
    whole = max(before.seconds, after.seconds)
    known = origin != NONE
    was = np.where(known, origin, 0)
    ran, runs = (before.end - before.start)[was], after.end - after.start
    shift = after.start - before.start[was]
    longer = np.abs(runs - ran) > np.maximum(RUNS * np.maximum(ran, runs), LEAST * whole)
    moved = np.abs(shift) > STARTS * whole
    found = np.where(moved, np.where(shift > 0, LATER, EARLIER), SAME)
    found = np.where(longer, np.where(runs > ran, LONGER, SHORTER), found)
    return np.where(known, found, NEW).astype(np.uint8)


def gone(size: int, origin: Array) -> Array:
    """Which tasks before are not there after."""
    kept = np.zeros(size, bool)
    kept[origin[origin != NONE]] = True
    return ~kept


def by_op(before: Timeline, after: Timeline, most: int = 20) -> list[dict[str, Any]]:
    """Tasks and seconds of each op in both, those that differ most first."""
    one, other = _sums(before), _sums(after)
    rows: list[dict[str, Any]] = [
        {
            "op": op or "(none)",
            "tasks_before": one.get(op, (0, 0.0))[0],
            "tasks_after": other.get(op, (0, 0.0))[0],
            "before_s": one.get(op, (0, 0.0))[1],
            "after_s": other.get(op, (0, 0.0))[1],
        }
        for op in one | other
    ]
    return sorted(rows, key=lambda r: (-abs(r["after_s"] - r["before_s"]), r["op"]))[:most]


def _sums(timeline: Timeline) -> dict[str, tuple[int, float]]:
    graph = timeline.graph
    tasks = np.bincount(graph.op, minlength=len(graph.names))
    spent = np.bincount(graph.op, weights=timeline.end - timeline.start, minlength=len(graph.names))
    return {
        graph.names[k]: (int(tasks[k]), float(spent[k])) for k in np.flatnonzero(tasks).tolist()
    }
