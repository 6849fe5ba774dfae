"""One step out of steps in a row: the window from the end of one step to the end of the next.

Every number of a page is taken from this window, so that the timeline, its parts and the headline
are of one length. Calls the host made ahead lie before the window's begin (`zero`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from foretell.advise import Step
from foretell.graph.build import replicate
from foretell.graph.graph import NONE, Array, Graph
from foretell.report.page import PageTimeline
from foretell.report.summary import split
from foretell.simulate import Timeline, simulate
from foretell.survey.ranks import ranks_table, waits_of

ROW = 4  # steps in a row: the third is shown, what the host does for the fourth is seen beside it
SHOWN = 2
# Parts of a step, and the columns of the table of ranks that hold them.
_COLUMNS = {
    "compute": "compute_s", "exposed communication": "exposed_s", "bubble": "waits_s",
    "host": "host_s", "idle": "idle_s",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Window:
    """A step in steady state: its own tasks, and everything that runs meanwhile."""

    seconds: float  # the step time that is reported
    line: Timeline  # the step's tasks; time begins at its first call
    zero: float  # on that clock: the end of the step before
    around: Timeline  # the tasks of neighbouring steps too, on a clock that begins with the window

    @property
    def length(self) -> float:
        """The window as simulated; `seconds` also has what the graph misses."""
        return self.line.seconds - self.zero

    def clipped(self) -> Timeline:
        """The tasks inside the window."""
        ends = [
            np.clip(column, 0.0, self.length) for column in (self.around.start, self.around.end)
        ]
        return Timeline(self.around.graph, ends[0], ends[1])

    def shown(self, name: str) -> PageTimeline:
        """The window as a page draws it."""
        return PageTimeline(name, self.line, self.zero, self.seconds, _parts(name, self))


@lru_cache(4)  # a page asks for the current step again with every change
def window(step: Step, graph: Graph) -> Window:
    """The window of a current step, or of its changed graph; a step without a trace begins cold."""
    if step.baseline is None or not graph.size:
        line = simulate(graph)
        return Window(line.seconds, line, 0.0, line)
    row = simulate(replicate(graph, ROW, over="micro_batch"))
    ends = row.end.reshape(ROW, graph.size).max(axis=1)
    begin = float(ends[SHOWN - 1])
    mine = slice(SHOWN * graph.size, (SHOWN + 1) * graph.size)
    first = min(float(row.start[mine].min()), begin)
    cause, why = _own_causes(row, mine)
    line = Timeline(graph, row.start[mine] - first, row.end[mine] - first, cause, why)
    around = Timeline(row.graph, row.start - begin, row.end - begin)
    return Window(step.predicted(graph), line, begin - first, around)


def measured(line: Timeline) -> PageTimeline:
    """A measured step: its time is the profiler's, its window ends with its last task."""
    name, seconds = "measured, with the profiler", float(line.graph.facts["measured"])
    zero = max(line.seconds - seconds, 0.0)
    found = Window(seconds, line, zero, Timeline(line.graph, line.start - zero, line.end - zero))
    return found.shown(name)


def _own_causes(row: Timeline, mine: slice) -> tuple[Array, Array]:
    """Causes among a step's own tasks; what the step before let start has none."""
    cause = row.cause[mine].astype(np.int64)
    own = (cause >= mine.start) & (cause < mine.stop)
    return np.where(own, cause - mine.start, NONE), np.where(own, row.why[mine], 0)


def _parts(name: str, found: Window) -> dict[str, object]:
    """Where the step goes, of several ranks their mean; what the graph misses of it is idle."""
    inside = found.clipped()
    parts = split(name, inside)
    values, missed = dict(parts["values"]), found.seconds - found.length
    ranks = ranks_table(inside, waits_of(found.around, found.length), {})
    for part, column in _COLUMNS.items() if ranks else ():
        values[part] = sum(row[column] for row in ranks) / len(ranks)
    if missed >= 0:
        values["idle"] = values.get("idle", 0.0) + missed
    elif found.length > 0:  # a known time shorter than what the graph holds: all parts shrink
        values = {key: value * found.seconds / found.length for key, value in values.items()}
    return {**parts, "total": found.seconds, "values": values}
