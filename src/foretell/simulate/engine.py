"""Simulate a graph: choose the quickest loop that covers what the graph has.

    paths    every lane ordered, no links    one sweep
    events   everything                      one heap, a queue for each lane

All give the bits of `readable.simulate_readable`; tests hold them to it on random graphs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foretell.errors import unknown
from foretell.graph.build import Wiring, wiring
from foretell.graph.graph import NONE, Array, Graph
from foretell.simulate.readable import ARRIVE, TaskTimes, simulate_readable
from foretell.simulate.timeline import Timeline, timeline

assert ARRIVE == 2, "event codes are packed as what * tasks + task"


ENGINES = ("auto", "compiled", "readable")


def simulate(graph: Graph, *, engine: str = "auto", before: Timeline | None = None) -> Timeline:
    """Start each task as soon as what it waits for is done and its lanes are free.

    With `before`, the timeline of the graph this one was edited from, only what the edit can change
    is simulated again. Engines (`readable`; `compiled`, which is `auto`) and simulating again give
    the same answer to the last bit.
    """
    if engine not in ENGINES:
        raise unknown("engine", engine, ENGINES)
    if engine == "readable":
        return timeline(graph, simulate_readable(graph))
    if before is not None:
        from foretell.simulate.resume import resume

        found = resume(graph, before)
        if found is not None:
            return timeline(graph, found)
    return timeline(graph, full(graph))


def full(graph: Graph) -> TaskTimes:
    """Simulate all of a graph with compiled loops."""
    wires = wiring(graph)
    if is_ordered(graph):
        return sweep(graph, wires, blank(graph.size), 0, np.zeros(0, np.uint8))
    return run(graph, wires)


def is_ordered(graph: Graph) -> bool:
    """Whether every lane keeps its issue order and no link is shared: a sweep is enough."""
    return bool(graph.lanes.ordered.all()) and not len(graph.used)


def blank(size: int) -> TaskTimes:
    """Room for a simulation."""
    return TaskTimes(
        np.zeros(size),
        np.zeros(size),
        np.full(size, NONE, np.int32),
        np.zeros(size, np.uint8),
    )


def sweep(graph: Graph, wires: Wiring, times: TaskTimes, first: int, stale: Array) -> TaskTimes:
    """Place tasks along the longest paths, in place."""
    from foretell.simulate import paths

    lag = wires.waits.lag
    paths.sweep(
        wires.order,
        (wires.waits.start, wires.waits.after, np.zeros(0) if lag is None else lag),
        (wires.turns.start, wires.turns.after),
        graph.seconds,
        graph.columns.get("gap", np.zeros(0)),
        (times.start, times.end, times.cause, times.why),
        first,
        stale,
    )
    return times


def run(graph: Graph, wires: Wiring) -> TaskTimes:
    """Simulate event by event, from the beginning."""
    f = fixed(graph, wires)
    return simulate_from(f, fresh_state(f, waiting_of(wires), blank(graph.size)), 0.0)


def simulate_from(f: Any, s: Any, now: float) -> TaskTimes:
    """Simulate on from a state."""
    from foretell.simulate import events

    events.run(f, s, now)
    return TaskTimes(s.start, s.end, s.cause, s.why)


def fixed(graph: Graph, wires: Wiring) -> Any:
    """Arrays the loops read; those of the structure are made once per structure."""
    from foretell.simulate.events import Fixed

    made = graph.cache.get("fixed")
    if made is None:
        made = graph.cache["fixed"] = _structure(graph, wires)
    return Fixed(
        seconds=np.ascontiguousarray(graph.seconds),
        gap=graph.columns.get("gap", np.zeros(0)),
        priority=np.ascontiguousarray(graph.priority),
        use_start=_use_start(graph),
        use_link=graph.used.link,
        use_demand=graph.used.demand,
        capacity=graph.links.capacity,
        **made,
    )


def _use_start(graph: Graph) -> Array:
    """Where the links of each task begin; made once a table, which edits of times share."""
    table, made = graph.cache.get("use_start", (None, None))
    if table is not graph.used:
        made = rows_of(graph.used.task, graph.size)
        graph.cache["use_start"] = graph.used, made
    found: Array = made
    return found


def waiting_of(wires: Wiring) -> Array:
    """How many things each task waits for."""
    count: Array = np.diff(wires.waits.start) + np.diff(wires.turns.start)
    return count


def fresh_state(f: Any, waiting: Array, times: TaskTimes) -> Any:
    """The state before anything has happened."""
    s = empty_state(f, times)
    s.waiting[:] = waiting
    for seconds in (s.ready, s.free):
        seconds[:] = 0.0
    for tasks in (s.ready_by, s.free_by):
        tasks[:] = NONE
    ready = np.flatnonzero(waiting == 0)
    s.fresh[: len(ready)] = ready
    s.count[1] = len(ready)
    return s


def empty_state(f: Any, times: TaskTimes) -> Any:
    """An empty state: no lane is occupied; columns of tasks are filled later."""
    from foretell.simulate.events import State

    n, lanes = len(f.seconds), len(f.base) - 1
    room = 2 * n + len(f.lag) + 1  # every task ends once, frees its lanes once; every lag ends once
    return State(
        waiting=np.empty(n, np.int32),
        ready=np.empty(n),
        ready_by=np.empty(n, np.int32),
        free=np.empty(n),
        free_by=np.empty(n, np.int32),
        start=times.start,
        end=times.end,
        cause=times.cause,
        why=times.why,
        taken=np.zeros(lanes, np.uint8),
        freed=np.zeros(lanes),
        freed_by=np.full(lanes, NONE, np.int32),
        queue=np.empty(int(f.base[-1]), np.int32),
        queued=np.zeros(lanes, np.int64),
        times=np.empty(room),
        codes=np.empty(room, np.int64),
        fresh=np.empty(n, np.int32),
        count=np.zeros(2, np.int64),
    )


def _structure(graph: Graph, wires: Wiring) -> dict[str, Array]:
    lane_start, lane, lanes = _lane_rows(graph)
    follow_start, follower, position = wires.followers
    turn_start, turn, _ = wires.turn_followers
    lag = wires.waits.lag
    return {
        "lane_start": lane_start,
        "lane": lane,
        "base": np.concatenate([[0], np.cumsum(np.bincount(lane, minlength=lanes))]),
        "follow_start": follow_start,
        "follower": follower,
        "lag": np.zeros(0) if lag is None else lag[position],
        "turn_start": turn_start,
        "turn": turn,
    }


def _lane_rows(graph: Graph) -> tuple[Array, Array, int]:
    """The free lanes of each task in compressed rows, numbered among free lanes."""
    is_free = ~graph.lanes.ordered
    number = np.cumsum(is_free) - 1
    own = graph.lane
    task = np.flatnonzero(own != NONE)
    task = task[is_free[own[task]]]
    lane = own[task]
    if len(graph.held):
        more = is_free[graph.held.lane]
        task = np.concatenate([task, graph.held.task[more]])
        lane = np.concatenate([lane, graph.held.lane[more]])
        ranked = np.lexsort((lane, task))
        task, lane = task[ranked], lane[ranked]
    count = int(is_free.sum())
    return rows_of(task, graph.size), number[lane].astype(np.int32), count


def rows_of(task: Array, size: int) -> Array:
    """Where the rows of each task begin in a table sorted by task."""
    start = np.zeros(size + 1, np.int64)
    np.cumsum(np.bincount(task, minlength=size), out=start[1:])
    return start
