"""What a page shows: named timelines, and plain values for its sections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretell.simulate.timeline import Timeline

Values = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Line:
    """A timeline of a page; its step is `seconds` long and begins at `zero` of its clock."""

    name: str
    timeline: Timeline
    zero: float = 0.0
    seconds: float | None = None  # the timeline's own where it is not given
    parts: Values | None = None  # where the step goes (→ foretell.report.split)

    @property
    def inside(self) -> Timeline:
        """The timeline from the step's begin on: what was done ahead of it is cut off."""
        if not self.zero:
            return self.timeline
        whole = self.timeline
        start, end = ((column - self.zero).clip(0.0) for column in (whole.start, whole.end))
        return Timeline(whole.graph, start, end, whole.cause, whole.why)

    @property
    def step_s(self) -> float:
        """The step time that is reported."""
        return self.timeline.seconds if self.seconds is None else self.seconds


@dataclass(frozen=True)
class Content:
    """The sections of a page; what is empty is not shown."""

    title: str = "Report"
    figures: Sequence[Values] = ()  # what, and seconds, bytes or text; low, high, gain, more
    notes: Sequence[str] = ()
    diagnosis: Values | None = None  # (→ foretell.survey.diagnosis)
    advice: Values | None = None  # as `foretell advise --json` prints it
    memory: Sequence[Values] = ()  # curves (→ foretell.report.memory)
    oracle: Sequence[Values] = ()  # layouts (→ foretell.report.layouts)
    plans: Sequence[Values] = ()  # (→ foretell.report.plans)
    schedules: Sequence[Values] = ()  # (→ foretell.report.schedules)
