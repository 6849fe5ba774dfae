"""Everything a task waits for, said outright: its edges, its turn on ordered lanes, what it drains.

`turns` are the tasks just before it on its ordered lanes; a drained lane becomes an edge from the
last task issued there before it. Both are decided from the graph as it is now, never copied from
where it came from, so they stay right after any edit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from foretell.graph.columns import NONE, Array, WaitKind
from foretell.graph.graph import Graph
from foretell.graph.tables import Edges, edges


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
        from foretell.graph.loops import topological

        w, t = self.waits, self.turns
        return topological(w.start, w.after, t.start, t.after)

    @cached_property
    def followers(self) -> tuple[Array, Array, Array]:
        """Who waits for each task: (start, follower, position of the edge in `waits`)."""
        return _followers(self.waits)

    @cached_property
    def turn_followers(self) -> tuple[Array, Array, Array]:
        """Whose turn on an ordered lane comes after each task."""
        return _followers(self.turns)


def wiring(graph: Graph) -> Wiring:
    """The wiring of a graph, made once and shared by all edits that leave the structure alone."""
    made = graph.cache.get("wiring")
    if made is None:
        lane_tasks = _issued(graph)
        made = Wiring(_waits(graph, lane_tasks), _turns(graph, lane_tasks))
        graph.cache["wiring"] = made
    found: Wiring = made
    return found


def _followers(e: Edges) -> tuple[Array, Array, Array]:
    from foretell.graph.loops import transposed

    return transposed(e.start, e.after)


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
