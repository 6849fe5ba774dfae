"""Plays without a compiler: for a graph that is played once or twice.

Loading the compiled loops takes half a second and a hundred megabytes, which a trace of some
thousand tasks does not repay.

    sweep    what `paths` does, where numbers are a right order (all wait for lower ones only)
    play     what `readable` does, looking only at tasks for which something has changed
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretell.graph.edges import Edges
from foretell.graph.graph import Graph
from foretell.graph.wiring import wiring
from foretell.simulate.readable import LANE, NOTHING, WAIT, Play, Played

Rows = list[list[tuple[int, float]] | None]


@dataclass
class Placed:
    """How much has been swept in this process: enough of it repays loading the compiled loops."""

    tasks: int = 0


placed = Placed()


def sweep(graph: Graph) -> Played:
    """Place all tasks along the longest paths, lowest number first."""
    placed.tasks += graph.size
    wires = wiring(graph)
    waits = _rows(wires.waits, wires.waits.lags.tolist())
    turns = _rows(wires.turns, graph.gap[wires.turns.after].tolist())
    start, end = list[float](), list[float]()
    cause, why = list[int](), list[int]()
    for seconds, wait, turn in zip(graph.seconds.tolist(), waits, turns, strict=True):
        ready, by = _latest(wait, end) if wait else (0.0, -1)
        free, holder = _latest(turn, end) if turn else (0.0, -1)
        begin = free if free > ready else ready
        is_lane = free > ready or (by < 0 <= holder)
        start.append(begin)
        end.append(begin + seconds)
        cause.append(holder if is_lane else by)
        why.append(LANE if is_lane else WAIT if by >= 0 else NOTHING)
    return Played(
        np.array(start), np.array(end), np.array(cause, np.int32), np.array(why, np.uint8)
    )


def _latest(others: list[tuple[int, float]], end: list[float]) -> tuple[float, int]:
    """When the last of some tasks is done, its delay included, and which: of several the lowest."""
    latest, who = 0.0, -1
    for task, delay in others:
        time = end[task] + delay
        if time > latest or (time == latest and (who < 0 or task < who)):
            latest, who = time, task
    return latest, who


def _rows(edges: Edges, delays: list[float]) -> Rows:
    """What each task waits for, with delays; None where there is nothing."""
    rows: Rows = [None] * (len(edges.start) - 1)
    for i, after, delay in zip(edges.waiting.tolist(), edges.after.tolist(), delays, strict=True):
        row = rows[i]
        if row is None:
            rows[i] = [(after, delay)]
        else:
            row.append((after, delay))
    return rows


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
