"""Where two timelines of the same step part: which task, on which lane, and how much it explains.

Tasks are the same where rank, op and name are and it is the same one of those; where only names
differ, rank and op decide. Along the predicted critical path p₁ … pₙ the difference of the ends is
a sum, with nothing left over:

    measured end(pₙ) − predicted end(pₙ) = Σ (ran longer) + Σ (waited longer)

so every task on the path explains its own part of the gap (→ `compare`); what lies behind the last
of them in either timeline is `elsewhere`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from foretell.errors import InputError
from foretell.graph.graph import NONE, Array, Graph
from foretell.simulate.timeline import Timeline


@dataclass(frozen=True)
class TaskGap:
    """One task's part of the gap, in seconds; what made it longer is positive."""

    task: int  # in the predicted timeline
    name: str
    lane: str
    predicted: float  # seconds it was to run
    measured: float
    ran: float  # longer than predicted
    waited: float  # longer than predicted, behind the task before it

    @property
    def seconds(self) -> float:
        """Seconds that it adds to the step."""
        return self.ran + self.waited


@dataclass(frozen=True)
class Lane:
    """One lane in both timelines: seconds it is taken, and its part of the gap."""

    name: str
    predicted: float
    measured: float
    explains: float


@dataclass(frozen=True)
class Comparison:
    """Two steps laid beside each other."""

    predicted: float
    measured: float
    matched: int  # tasks that both have
    only_predicted: int
    only_measured: int
    parts: tuple[TaskGap, ...]  # of the path, the largest first
    lanes: tuple[Lane, ...]
    elsewhere: float  # of the gap, behind the path

    @property
    def gap(self) -> float:
        """Measured less predicted."""
        return self.measured - self.predicted


def compare(predicted: Timeline, measured: Timeline) -> Comparison:
    """Line up two timelines and say where the gap between them comes from."""
    twin = twins(predicted.graph, measured.graph)
    found = twin != NONE
    if not found.any():
        raise InputError(
            "the two timelines have no task in common",
            hint="compare a step with what was predicted of the same step",
        )
    path = [int(i) for i in _path(predicted) if found[i]]
    parts = list(_parts(predicted, measured, twin, path))
    last = path[-1] if path else NONE
    behind = predicted.seconds - (float(predicted.end[last]) if path else 0.0)
    after = measured.seconds - (float(measured.end[twin[last]]) if path else 0.0)
    return Comparison(
        predicted.seconds,
        measured.seconds,
        int(found.sum()),
        int((~found).sum()),
        measured.graph.size - int(found.sum()),
        tuple(sorted(parts, key=lambda p: -abs(p.seconds))),
        tuple(_lanes(predicted, measured, parts)),
        after - behind,
    )


def twins(one: Graph, other: Graph) -> Array:
    """For each task of the first graph the same one of the second, or NONE."""
    found = np.full(one.size, NONE, np.int64)
    free = np.ones(other.size, bool)
    for names in (("rank", "op", "name"), ("rank", "op")):
        mine = _numbered(one, names, found == NONE)
        theirs = _numbered(other, names, free)
        for key in mine.keys() & theirs.keys():
            found[mine[key]] = theirs[key]
            free[theirs[key]] = False
    return found


def _numbered(graph: Graph, columns: tuple[str, ...], which: Array) -> dict[tuple[Any, ...], int]:
    """Tasks by their words and the how-many-th of those they are in issue order."""
    texts = [graph.rank.tolist() if c == "rank" else graph.texts(c) for c in columns]
    words = list(zip(*texts, strict=True))
    seen: Counter[tuple[Any, ...]] = Counter()
    found = {}
    for i in np.argsort(graph.order, kind="stable").tolist():
        if which[i]:
            found[*words[i], seen[words[i]]] = i
            seen[words[i]] += 1
    return found


def _path(timeline: Timeline) -> Array:
    """The critical path; without causes the tasks of the lane that ends last, as they begin."""
    if not timeline.is_measured:
        return timeline.critical_path()
    lane = timeline.graph.lane[int(timeline.end.argmax())]
    tasks = np.flatnonzero(timeline.graph.lane == lane)
    return tasks[np.argsort(timeline.start[tasks], kind="stable")]


def _parts(
    predicted: Timeline, measured: Timeline, twin: Array, path: list[int]
) -> Iterator[TaskGap]:
    before, was = 0.0, 0.0
    for i in path:
        k = int(twin[i])
        start, end = float(predicted.start[i]), float(predicted.end[i])
        began, ended = float(measured.start[k]), float(measured.end[k])
        yield TaskGap(
            i, predicted.graph.text_of("name", i) or predicted.graph.text_of("op", i),
            lane_name(predicted.graph, int(predicted.graph.lane[i])), end - start, ended - began,
            (ended - began) - (end - start), (began - was) - (start - before),
        )  # fmt: skip
        before, was = end, ended


def _lanes(predicted: Timeline, measured: Timeline, parts: list[TaskGap]) -> Iterator[Lane]:
    mine, theirs = _busy(predicted), _busy(measured)
    for name in mine | theirs:
        part = sum(p.seconds for p in parts if p.lane == name)
        yield Lane(name, mine.get(name, 0.0), theirs.get(name, 0.0), part)


def _busy(timeline: Timeline) -> dict[str, float]:
    graph = timeline.graph
    found: dict[str, float] = {}
    spent = timeline.end - timeline.start
    for lane in range(len(graph.lanes)):
        own = float(spent[graph.lane == lane].sum())
        found[lane_name(graph, lane)] = found.get(lane_name(graph, lane), 0.0) + own
    return {name: seconds for name, seconds in found.items() if seconds > 0}


def lane_name(graph: Graph, lane: int) -> str:
    """Rank and name of a lane."""
    if lane == NONE:
        return "no lane"
    return f"rank {int(graph.lanes.rank[lane])}: {graph.names[int(graph.lanes.name[lane])]}"
