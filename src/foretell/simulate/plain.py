"""Plays without a compiler: for a graph that is played once or twice.

Loading the compiled loops takes half a second and a hundred megabytes, which a trace of some
thousand tasks does not repay.

    sweep    what `paths` does, where numbers are a right order (all wait for lower ones only)
    flow     what `flows` does, in `transfers`
    play     what `readable` does, looking only at tasks for which something has changed
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from foretell.graph.columns import Array
from foretell.graph.edges import Edges
from foretell.graph.graph import Graph
from foretell.graph.wiring import wiring
from foretell.simulate.readable import LANE, NOTHING, WAIT, Play, Played

NOBODY, SEVERAL = -1, -2  # how many others a task waits for, where it is not one


class Rows(NamedTuple):
    """What each task waits for, and how long behind its end: mostly one other task, or none."""

    other: list[int]  # or NOBODY, or SEVERAL
    delay: list[float]
    several: dict[int, list[tuple[int, float]]]


@dataclass
class Placed:
    """How much has been swept in this process: enough of it repays loading the compiled loops."""

    tasks: int = 0


placed = Placed()


def sweep(graph: Graph) -> Played:
    """Place all tasks along the longest paths, lowest number first."""
    placed.tasks += graph.size
    waits, turns = rows(graph)
    start, end = list[float](), list[float]()
    cause, why = list[int](), list[int]()
    each = zip(graph.seconds.tolist(), waits.other, turns.other, strict=True)
    for i, (seconds, by, holder) in enumerate(each):
        ready = free = 0.0
        if by >= 0:
            ready = end[by] + waits.delay[i]
        elif by == SEVERAL:
            ready, by = latest(waits.several[i], end)
        if holder >= 0:
            free = end[holder] + turns.delay[i]
        elif holder == SEVERAL:
            free, holder = latest(turns.several[i], end)
        is_lane = free > ready or (by < 0 <= holder)
        begin = free if free > ready else ready
        start.append(begin)
        end.append(begin + seconds)
        cause.append(holder if is_lane else by)
        why.append(LANE if is_lane else WAIT if by >= 0 else NOTHING)
    return Played(
        np.array(start), np.array(end), np.array(cause, np.int32), np.array(why, np.uint8)
    )


def rows(graph: Graph) -> tuple[Rows, Rows]:
    """What each task waits for, and whose turn comes before its own."""
    wires = wiring(graph)
    turns = wires.turns
    return _rows(wires.waits, wires.waits.lags), _rows(turns, graph.gap[turns.after])


def _rows(edges: Edges, delays: Array) -> Rows:
    first, count = edges.start[:-1], np.diff(edges.start)
    other = np.full(len(count), NOBODY)
    other[count == 1] = edges.after[first[count == 1]]
    other[count > 1] = SEVERAL
    delay = np.zeros(len(count))
    delay[count == 1] = delays[first[count == 1]]
    several = {}
    for i in np.flatnonzero(count > 1).tolist():
        here = slice(edges.start[i], edges.start[i + 1])
        several[i] = list(zip(edges.after[here].tolist(), delays[here].tolist(), strict=True))
    return Rows(other.tolist(), delay.tolist(), several)


def latest(others: list[tuple[int, float]], end: list[float]) -> tuple[float, int]:
    """When the last of some tasks is done, its delay included, and which: of several the lowest."""
    last, who = 0.0, NOBODY
    for task, delay in others:
        time = end[task] + delay
        if time > last or (time == last and (who < 0 or task < who)):
            last, who = time, task
    return last, who


def play(graph: Graph) -> Played:
    """Play any graph; quick where lanes are ordered, as few tasks can start then at a time."""
    placed.tasks += graph.size
    return _Play(graph).run()


class _Play(Play):
    """Remembers which tasks may start since it last looked: all others still cannot."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.fresh = set(self.candidates)

    def arrive(self, i: int) -> None:
        super().arrive(i)
        if self.waiting[i] == 0:
            self.fresh.add(i)

    def leave(self, i: int, now: float) -> None:
        super().leave(i, now)
        for lane in self.lanes[i]:
            if lane not in self.issued:
                self.fresh |= self.candidates  # any of them may want it
            elif self.issued[lane] and self.issued[lane][-1] in self.candidates:
                self.fresh.add(self.issued[lane][-1])

    def start_all(self, now: float) -> bool:
        urgent = sorted(self.fresh, key=lambda i: (-self.priority[i], self.ready[i][0], i))
        self.fresh.clear()
        changed = False
        for i in urgent:
            if self.can_start(i):
                self.begin(i, now)
                changed = changed or i in self.moving
        return changed
