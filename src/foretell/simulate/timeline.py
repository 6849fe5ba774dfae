"""What came of a simulation: when every task starts and ends, and what let it start.

Predicted and measured timelines are the same type; a measured one knows no causes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from foretell.errors import InputError
from foretell.graph.columns import NONE, Array, frozen
from foretell.graph.graph import Graph, Task
from foretell.simulate.readable import LANE, NOTHING, WAIT, Played

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
        """What a notebook shows."""
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


def timeline(graph: Graph, played: Played) -> Timeline:
    """A timeline of read-only columns."""
    return Timeline(graph, *(frozen(column) for column in played))
