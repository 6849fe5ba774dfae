"""Start, end and cause of every task, and questions about them: critical path, breakdown, change.

Predicted and measured timelines are the same type; a measured one knows no causes. Answers are
values; nothing here draws or prints.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from foretell.errors import InputError
from foretell.graph.graph import NONE, Array, Graph, Kind, Task, frozen
from foretell.simulate.readable import LANE, NOTHING, WAIT, TaskTimes

WHY = {NOTHING: "the beginning", WAIT: "waited for", LANE: "lane was taken by"}


class Span(NamedTuple):
    """One task's stay, and why it began when it did."""

    task: Task
    start: float
    end: float
    cause: int  # the task whose end let it start, or NONE
    why: str


@dataclass(frozen=True, eq=False)
class Timeline:
    """Start, end and cause of every task of a graph, in seconds."""

    graph: Graph
    start: Array
    end: Array
    cause: Array = field(default_factory=lambda: np.zeros(0, np.int32))
    why: Array = field(default_factory=lambda: np.zeros(0, np.uint8))

    @property
    def seconds(self) -> float:
        """How long the step takes: the last end (time begins at zero)."""
        return float(self.end.max(initial=0.0))

    @property
    def is_measured(self) -> bool:
        """Whether it was measured rather than simulated: causes are unknown then."""
        return len(self.cause) != self.graph.size

    def __getitem__(self, i: int) -> Span:
        task = self.graph[i]
        cause = NONE if self.is_measured else int(self.cause[task.number])
        why = "measured" if self.is_measured else WHY[int(self.why[task.number])]
        start, end = float(self.start[task.number]), float(self.end[task.number])
        return Span(task, start, end, cause, why)

    def __len__(self) -> int:
        return self.graph.size

    def __repr__(self) -> str:
        return f"<Timeline {self.seconds:.6g} s, {self.graph.size} tasks>"

    def _repr_html_(self) -> str:
        """HTML for notebooks."""
        from foretell.simulate.show import timeline_html

        return timeline_html(self)

    def critical_path(self) -> Array:
        """The tasks that made the step as long as it is, first to last.

        Each one let the next start; read back from the task that ended last (lowest number first).
        """
        if self.is_measured:
            raise InputError("a measured timeline knows no causes", hint="simulate its graph first")
        path = []
        i = int(np.argmax(self.end)) if self.graph.size else NONE
        cause = self.cause.tolist()
        while i != NONE:
            path.append(i)
            i = cause[i]
        return np.array(path[::-1], np.int64)


def timeline(graph: Graph, times: TaskTimes) -> Timeline:
    """A timeline of read-only columns."""
    return Timeline(graph, *(frozen(column) for column in times))


COMMUNICATION = (Kind.COLLECTIVE, Kind.SEND)
DEVICE = (Kind.KERNEL, Kind.COPY)


def critical_path(timeline: Timeline) -> Array:
    """The tasks that made the step as long as it is, first to last."""
    return timeline.critical_path()


def path_seconds(timeline: Timeline, column: str) -> dict[str, float]:
    """How much of the critical path each value of a text or code column accounts for.

    Lags and gaps on the path are `(waiting)`; the values add up to the step.
    """
    path, graph = critical_path(timeline), timeline.graph
    if not len(path):
        return {}
    start, end = timeline.start[path], timeline.end[path]
    waits = np.maximum(start - np.append(0.0, end[:-1]), 0.0)
    _, first, whose = np.unique(graph.column(column)[path], return_index=True, return_inverse=True)
    sums = np.bincount(whose.reshape(-1), end - start)
    spent = {"(waiting)": float(waits.sum())} if waits.any() else {}
    for k in np.argsort(first).tolist():
        text = graph.text_of(column, int(path[first[k]])) or "(none)"
        spent[text] = spent.get(text, 0.0) + float(sums[k])
    return dict(sorted(spent.items(), key=lambda item: -item[1]))


@dataclass(frozen=True)
class Busy:
    """How one lane spends a step."""

    lane: int
    tasks: int
    seconds: float  # held by a running task
    share: float  # of the step


def busy(timeline: Timeline) -> list[Busy]:
    """Share of the step during which each lane is busy."""
    graph, total = timeline.graph, timeline.seconds
    task, lane = _occupied(timeline)
    spent = np.bincount(
        lane, weights=(timeline.end - timeline.start)[task], minlength=len(graph.lanes)
    )
    count = np.bincount(lane, minlength=len(graph.lanes))
    return [
        Busy(k, int(count[k]), float(spent[k]), float(spent[k] / total) if total else 0.0)
        for k in range(len(graph.lanes))
    ]


def union(start: Array, end: Array) -> tuple[Array, Array]:
    """Intervals that may overlap, as intervals that do not, ascending."""
    long = end > start
    start, end = start[long], end[long]
    if not len(start):
        return start, end
    ranked = np.argsort(start, kind="stable")
    start, end = start[ranked], np.maximum.accumulate(end[ranked])
    fresh = np.ones(len(start), bool)
    fresh[1:] = start[1:] > end[:-1]
    last = np.append(np.flatnonzero(fresh)[1:] - 1, len(start) - 1)
    return start[fresh], end[last]


def covered(start: Array, end: Array) -> float:
    """How long at least one of the intervals lasts."""
    a, b = union(start, end)
    return float((b - a).sum())


def overlap(one: tuple[Array, Array], other: tuple[Array, Array]) -> float:
    """How long both of two sets of intervals last at once."""
    both = covered(np.concatenate([one[0], other[0]]), np.concatenate([one[1], other[1]]))
    return covered(*one) + covered(*other) - both


@dataclass(frozen=True)
class Breakdown:
    """Where the step of one rank goes; the parts from `compute` to `idle` add up to it."""

    rank: int
    seconds: float
    compute: float  # some kernel or copy runs
    exposed: float  # only communication runs
    host: float  # nothing on the device, the host works
    idle: float  # nothing runs
    communication: float  # some communication runs, hidden or not

    @property
    def hidden(self) -> float:
        """Communication behind computation."""
        return max(self.communication - self.exposed, 0.0)


def breakdown(timeline: Timeline) -> list[Breakdown]:
    """Where the step of every rank goes."""
    rank = _ranks_of(timeline)
    return [_breakdown(timeline, r, rank) for r in np.unique(rank[1]).tolist()]


def _breakdown(timeline: Timeline, rank: int, ranks: tuple[Array, Array]) -> Breakdown:
    mine = ranks[0][ranks[1] == rank]
    kind = timeline.graph.kind[mine]
    device = mine[np.isin(kind, DEVICE)]
    comm = mine[np.isin(kind, COMMUNICATION)]
    host = mine[~np.isin(kind, DEVICE + COMMUNICATION) & (kind != Kind.SYNC)]
    by_device, by_comm, total = (
        covered(timeline.start[tasks], timeline.end[tasks])
        for tasks in (device, np.append(device, comm), np.concatenate([device, comm, host]))
    )
    whole = timeline.seconds
    all_comm = covered(timeline.start[comm], timeline.end[comm])
    return Breakdown(
        rank,
        seconds=whole,
        compute=by_device,
        exposed=by_comm - by_device,
        host=total - by_comm,
        idle=whole - total,
        communication=all_comm,
    )


def _ranks_of(timeline: Timeline) -> tuple[Array, Array]:
    """(task, rank) for every rank a task takes part on."""
    graph = timeline.graph
    own = np.arange(graph.size), graph.rank
    if not len(graph.held):
        return own
    task = np.concatenate([own[0], graph.held.task])
    rank = np.concatenate([own[1], graph.lanes.rank[graph.held.lane]])
    pairs = np.unique(np.stack([task, rank]), axis=1)
    return pairs[0], pairs[1]


def _occupied(timeline: Timeline) -> tuple[Array, Array]:
    """(task, lane) for every lane a task holds."""
    graph = timeline.graph
    own = np.flatnonzero(graph.lane != NONE)
    task = np.concatenate([own, graph.held.task])
    lane = np.concatenate([graph.lane[own], graph.held.lane])
    return task, lane
