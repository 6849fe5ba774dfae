"""How long steps take that follow one another, without making any of them wait.

On a GPU an event is put on the stream at the end of every step and read when all are done; without
one the host's clock is read. Either way the time of a step is that from its predecessor's end.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Times:
    """Seconds of steps: the middle one and, between them, the middle half."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: list[float]) -> Times:
        ranked = sorted(seconds)
        quarter = len(ranked) // 4
        return cls(median(ranked), ranked[quarter], ranked[-1 - quarter])


@dataclass
class Clock:
    """Notes the ends of steps; on a GPU by events, elsewhere by the host's clock."""

    on_gpu: bool
    ticks: list[Any] = field(default_factory=list)

    def tick(self) -> None:
        """A step has ended."""
        if not self.on_gpu:
            self.ticks.append(time.perf_counter())
            return
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.ticks.append(event)

    def seconds(self) -> list[float]:
        """Seconds of every step but the first, whose beginning was not noted."""
        if self.on_gpu:
            import torch

            torch.cuda.synchronize()
            pairs = zip(self.ticks, self.ticks[1:], strict=False)
            return [a.elapsed_time(b) / 1e3 for a, b in pairs]
        return [b - a for a, b in zip(self.ticks, self.ticks[1:], strict=False)]
