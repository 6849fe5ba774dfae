"""What a page tells besides its timelines: plain values, made by whoever knows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Content:
    """The sections of a page; what is empty is not shown."""

    title: str = "Report"
    figures: Sequence[Values] = ()  # what, and seconds, bytes or text; low, high, gain, more
    notes: Sequence[str] = ()
    advice: Values | None = None  # as `foretell advise --json` prints it
    memory: Sequence[Values] = ()  # curves (→ foretell.report.held)
    oracle: Sequence[Values] = ()  # layouts (→ foretell.report.layouts)
    plans: Sequence[Values] = ()  # (→ foretell.report.plans)
    schedules: Sequence[Values] = ()  # (→ foretell.report.schedules)
