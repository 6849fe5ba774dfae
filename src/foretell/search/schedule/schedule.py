"""A schedule: when every block of every micro-batch starts, and what is known about better ones."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from foretell.search.schedule.problem import Problem


class Span(NamedTuple):
    """One block of one micro-batch in time."""

    start: float
    end: float
    block: int  # place in `Problem.blocks`
    micro_batch: int


@dataclass(frozen=True)
class Schedule:
    """Start times for a problem; `period` and the bounds are of the steady state."""

    problem: Problem
    starts: tuple[tuple[float, ...], ...]  # by block, by micro-batch
    order: tuple[tuple[int, int], ...]  # (block, micro-batch); decides between equal starts
    period: float  # of the repeating pattern
    unroll: int  # micro-batches that the pattern advances
    lower_bound: float  # seconds a micro-batch that no schedule beats in the long run
    makespan_bound: float  # seconds that no schedule of these micro-batches beats
    proven_unroll: int | None = (
        0  # no pattern of up to so many micro-batches is faster; None: of any
    )
    method: str = "search"
    search_cpu: float = 0.0  # CPU seconds of the search, all threads, the solver's import included
    is_cached: bool = False  # found before; `search_cpu` is what that took

    @property
    def micro_batches(self) -> int:
        return len(self.starts[0])

    @property
    def per_micro_batch(self) -> float:
        """Seconds a micro-batch in the steady state."""
        return self.period / self.unroll

    @property
    def proven(self) -> bool:
        """Whether the period is minimal: of all patterns, or at least of those up to two."""
        return self.proven_unroll is None or self.proven_unroll >= 2

    @property
    def gap(self) -> float:
        """By what share the time a micro-batch might still be shortened."""
        return (
            max(0.0, 1 - self.lower_bound / self.per_micro_batch) if self.per_micro_batch else 0.0
        )

    @property
    def makespan_gap(self) -> float:
        """By what share the makespan might still be shortened."""
        return max(0.0, 1 - self.makespan_bound / self.makespan) if self.makespan else 0.0

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Everything that runs, by start; equal starts in the order of running."""
        times = self.problem.seconds
        spans = [Span(s := self.starts[b][m], s + times[b], b, m) for b, m in self.order]
        return tuple(sorted(spans, key=lambda span: span.start))

    def on(self, device: int) -> list[Span]:
        """What runs on a device, in order."""
        return [s for s in self.spans if device in self.problem.blocks[s.block].devices]

    @property
    def makespan(self) -> float:
        """When the last block ends."""
        return max(s.end for s in self.spans)

    @cached_property
    def peak_memory(self) -> tuple[float, ...]:
        """The most that each device holds."""
        peaks = []
        for device in range(self.problem.num_devices):
            now = most = 0.0
            for span in self.on(device):
                block = self.problem.blocks[span.block]
                most = max(most, now + block.rise)
                now += block.change
            peaks.append(most)
        return tuple(peaks)

    @property
    def in_flight(self) -> int:
        """The most micro-batches begun and not ended at one time."""
        each = range(self.micro_batches)
        firsts = [min(row[m] for row in self.starts) for m in each]
        rows = list(zip(self.starts, self.problem.seconds, strict=True))
        lasts = [max(row[m] + time for row, time in rows) for m in each]
        return max(sum(a <= t < b for a, b in zip(firsts, lasts, strict=True)) for t in firsts)

    @property
    def bubble(self) -> float:
        """The share of the makespan that the busiest device is idle."""
        busy = max(self.problem.work) * self.micro_batches
        return max(0.0, 1 - busy / self.makespan) if self.makespan else 0.0

    @property
    def idle(self) -> float:
        """The longest that any device waits between its first block and its last."""
        waits = [0.0]
        for device, work in enumerate(self.problem.work):
            if spans := self.on(device):
                waits.append(spans[-1].end - spans[0].start - work * self.micro_batches)
        return max(waits)

    def __str__(self) -> str:
        least = "the least possible"
        spans = least if self.makespan_gap < 1e-9 else f"at least {self.makespan_bound:g}"
        if self.proven_unroll is None:
            rate = least
        else:
            rate = f"bound {self.lower_bound:g}, least up to {self.proven_unroll} a pattern"
        memory = ", ".join(f"{p:g}" for p in self.peak_memory)
        return (
            f"{self.problem.name or 'schedule'} by {self.method}: "
            f"{self.micro_batches} micro-batches in {self.makespan:g} ({spans}), "
            f"{self.per_micro_batch:g} a micro-batch ({rate}), "
            f"memory {memory}, {self.in_flight} in flight"
        )

    def answer(self) -> dict[str, Any]:
        """The schedule as `foretell schedule --json` prints it."""
        blocks = self.problem.blocks
        return {
            "name": self.problem.name,
            "method": self.method,
            "micro_batches": self.micro_batches,
            "period": _plain(self.period),
            "unroll": self.unroll,
            "per_micro_batch": _plain(self.per_micro_batch),
            "lower_bound": _plain(self.lower_bound),
            "gap": self.gap,
            "proven": self.proven,
            "proven_unroll": self.proven_unroll,
            "makespan": _plain(self.makespan),
            "makespan_bound": _plain(self.makespan_bound),
            "makespan_gap": self.makespan_gap,
            "bubble": self.bubble,
            "peak_memory": [_plain(p) for p in self.peak_memory],
            "in_flight": self.in_flight,
            "search_cpu_s": self.search_cpu,
            "cached": self.is_cached,
            "blocks": [
                {"block": blocks[s.block].id, "micro_batch": s.micro_batch,
                 "start": _plain(s.start), "end": _plain(s.end),
                 "kind": blocks[s.block].kind, "devices": list(blocks[s.block].devices)}
                for s in self.spans
            ],
        }  # fmt: skip


def _plain(value: float) -> float | int:
    """Whole numbers without a fraction."""
    return int(value) if float(value).is_integer() else value
