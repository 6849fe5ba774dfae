"""Simulate again only what an edit can change, to the same bits as simulating all of it.

Where every lane is ordered, a sweep from the first changed task on places anew only what moves.
Otherwise the simulation is taken up at the first instant the edit can be felt: what started before
it stays, and the state at that instant is read off the timeline that is known.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from foretell.graph.build import wiring
from foretell.graph.graph import NONE, Array, Graph
from foretell.simulate.engine import empty_state, fixed, is_ordered, rows_of, simulate_from, sweep
from foretell.simulate.readable import TaskTimes
from foretell.simulate.timeline import Timeline


def resume(graph: Graph, before: Timeline) -> TaskTimes | None:
    """The simulation of an edited graph, or None where starting over is as good."""
    old = before.graph
    if graph.parent is not old or before.is_measured or not graph.size or not old.size:
        return None
    if graph.lanes is not old.lanes and not _same_lanes(graph, old):
        return None
    change = _Change(graph, old, before)
    if is_ordered(graph):
        return _swept(graph, change) if is_ordered(old) else None
    return _taken_up(graph, change)


class _Change:
    """Differences between a graph and the one it was edited from."""

    def __init__(self, graph: Graph, old: Graph, before: Timeline) -> None:
        self.graph, self.old, self.before = graph, old, before
        # Where each task stood before: all in their places where none came or went.
        self.is_new: Array = np.zeros(graph.size, bool)
        self.was: Any = slice(None)
        if graph.origin is not None:
            self.is_new = graph.origin == NONE
            self.was = np.where(self.is_new, 0, graph.origin)
        self.rewired = self.is_new | self._rewired()
        self.gapped = self._differs("gap")
        self.retimed = self._differs("seconds") | self.gapped

    @cached_property
    def origin(self) -> Array:
        """For each task its number before, or NONE."""
        same = self.graph.origin is None
        return np.arange(self.graph.size) if same else self.graph.origin  # type: ignore[return-value]

    def _differs(self, name: str) -> Array:
        """Where a column differs from before; undefined for new tasks."""
        new, old = (g.columns.get(name) for g in (self.graph, self.old))
        if new is old:
            return np.zeros(self.graph.size, bool)
        found: Array = self.graph.column(name) != self.old.column(name)[self.was]
        return found

    def _rewired(self) -> Array:
        """Tasks whose waits, turns, lanes, links or priority are not what they were."""
        graph, old = self.graph, self.old
        changed = self._differs("priority") | self._differs("lane")
        new_wires, old_wires = wiring(graph), wiring(old)
        if new_wires is not old_wires:
            from foretell.simulate.differ import rows_differ

            for a, b in (
                (new_wires.waits, old_wires.waits),
                (new_wires.turns, old_wires.turns),
            ):
                changed |= rows_differ(
                    a.start, a.after, a.lags, b.start, b.after, b.lags, self.origin
                )
        for part, column in (("held", "lane"), ("used", "link")):
            if getattr(graph, part) is not getattr(old, part):
                changed |= _table_differs(self, part, column)
        return changed


def _same_lanes(graph: Graph, old: Graph) -> bool:
    """Whether all lanes there were are there still, in the same places (more may follow)."""
    known = len(old.lanes)
    return len(graph.lanes) >= known and graph.lanes.take(np.arange(known)) == old.lanes


def _table_differs(change: _Change, part: str, column: str) -> Array:
    from foretell.simulate.differ import rows_differ

    new, old = getattr(change.graph, part), getattr(change.old, part)
    weights = [t.columns().get("demand", np.zeros(len(t))) for t in (new, old)]
    found: Array = rows_differ(
        rows_of(new.task, change.graph.size), new.columns()[column], weights[0],
        rows_of(old.task, change.old.size), old.columns()[column], weights[1],
        change.origin, False,
    )  # fmt: skip
    return found


# Where every lane is ordered


def _swept(graph: Graph, change: _Change) -> TaskTimes:
    wires = wiring(graph)
    stale: Array = (change.rewired | change.retimed).view(np.uint8)
    for longer in (change.gapped, change.is_new):
        if longer.any():
            stale[longer] = 2
    placed = stale if wires.is_forward else stale[wires.order]
    first = int((placed != 0).argmax())
    return sweep(graph, wires, _carried_over(change), first, stale)


def _carried_over(change: _Change) -> TaskTimes:
    """The earlier simulation with causes renumbered; columns of new tasks are not set yet."""
    before = change.before
    if change.graph.origin is None:
        return TaskTimes(
            *(np.array(c) for c in (before.start, before.end, before.cause, before.why))
        )
    was, cause = change.was, _renumbered(change, before.cause)
    return TaskTimes(before.start[was], before.end[was], cause[was], before.why[was])


def _renumbered(change: _Change, tasks: Array) -> Array:
    """Tasks of the graph before as tasks of this one."""
    number = np.full(change.old.size + 1, NONE, np.int32)  # the last stands for NONE
    mine = np.flatnonzero(~change.is_new)
    number[change.origin[mine]] = mine
    found: Array = number[tasks]
    return found


# Where there is something to decide


def _taken_up(graph: Graph, change: _Change) -> TaskTimes | None:
    instant = _first_felt(change)
    if instant == np.inf:
        return _carried_over(change)
    if instant <= 0:
        return None
    times = _carried_over(change)
    times.start[change.is_new] = np.inf
    rest = np.flatnonzero(times.start >= instant)
    if len(rest) > 0.75 * graph.size:
        return None  # most of it has to be simulated anyway
    f = fixed(graph, wiring(graph))
    state = empty_state(f, times)
    _restore(graph, f, state, rest, instant)
    return simulate_from(f, state, instant)


def _restore(graph: Graph, f: Any, s: Any, rest: Array, instant: float) -> None:
    """Fill the state as it is just before `instant`, when all but the rest have started."""
    from foretell.simulate import differ

    waits, turns = wiring(graph).waits, wiring(graph).turns
    lag = np.zeros(0) if waits.lag is None else waits.lag
    release = s.end + f.gap if len(f.gap) else s.end
    running = np.flatnonzero((s.start < instant) & (release >= instant))
    differ.hold(f, s, running, instant)
    differ.restore(f, s, rest, instant, (waits.start, waits.after, lag, turns.start, turns.after))


def _first_felt(change: _Change) -> float:
    """The earliest time at which the edit can make a difference."""
    before, graph = change.before, change.graph
    retimed = change.retimed & ~change.is_new
    felt = [before.start[change.was][retimed].min(initial=np.inf)]
    if graph.origin is not None:
        gone = np.ones(change.old.size, bool)
        gone[change.origin[~change.is_new]] = False
        felt.append(before.start[gone].min(initial=np.inf))
    rewired = np.flatnonzero(change.rewired)
    if len(rewired):
        felt.append(_earliest_ready(graph, change, rewired))
    if graph.links is not change.old.links and graph.links != change.old.links:
        felt.append(before.start[change.old.used.task].min(initial=np.inf))
    return _before_transfers(change, float(min(felt)))


def _earliest_ready(graph: Graph, change: _Change, tasks: Array) -> float:
    """When the first of some tasks could be ready, before or after the edit."""
    from foretell.simulate.differ import ready_bound

    waits, end = wiring(graph).waits, np.where(change.is_new, 0.0, change.before.end[change.was])
    new = ready_bound(waits.start, waits.after, waits.lags, end, tasks)
    known = change.origin[tasks[~change.is_new[tasks]]]
    waits = wiring(change.old).waits
    old = ready_bound(waits.start, waits.after, waits.lags, change.before.end, known)
    return min(float(new.min(initial=np.inf)), float(old.min(initial=np.inf)))


def _before_transfers(change: _Change, instant: float) -> float:
    """The latest instant not after this one at which no transfer is under way.

    The progress of a transfer depends on all that shared its links since it started.
    """
    if not len(change.old.used):
        return instant
    tasks = np.unique(change.old.used.task)
    start, end = change.before.start[tasks], change.before.end[tasks]
    while True:
        under_way = (start < instant) & (end >= instant)
        if not under_way.any():
            return instant
        instant = float(start[under_way].min())
