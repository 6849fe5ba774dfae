"""A schedule: when every block of every micro-batch starts, and what is known about better ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import isfinite
from typing import Any, NamedTuple

from foretell.search.schedule.problem import Block, Problem


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
    stopped: str = "work"  # what ended the search: bound (both met), work, time, interrupted

    @property
    def micro_batches(self) -> int:
        return len(self.starts[0])

    @property
    def per_micro_batch(self) -> float:
        """Seconds a micro-batch in the steady state."""
        return self.period / self.unroll

    @property
    def proven(self) -> bool:
        """Whether the time a micro-batch meets its lower bound, so that no pattern is faster."""
        return self.proven_unroll is None

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
            "stopped": self.stopped,
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


# Whether a schedule is legal: written apart from the search, from problem and starts alone.
#
# Completeness, waits with their lags, one block at a time on each device, and memory, in that
# order. Memory is what a device holds as each of its blocks starts, added up in the order of the
# starts; blocks that take no time may start together, then `order` says which goes first.


_TOLERANCE = 1e-9  # of the largest time or amount: what sums of floats may be off

Starts = Sequence[Sequence[float]]
Order = Sequence[tuple[int, int]]


class _Run(NamedTuple):
    start: float
    end: float
    block: Block
    micro_batch: int

    def __str__(self) -> str:
        return f"block {self.block.id} of micro-batch {self.micro_batch}"


def wrong(problem: Problem, starts: Starts, order: Order | None = None) -> str | None:
    """What is illegal in a schedule, in words, or None."""
    fault = _incomplete(problem, starts) or _too_early(problem, starts)
    if fault:
        return fault
    placed = _placed(problem, starts) if order is None else list(order)
    fault = _misplaced(problem, starts, placed)
    for device in range(problem.num_devices):
        runs = _runs(problem, starts, placed, device)
        fault = fault or _crowded(runs, device) or _full(runs, device, problem.capacity[device])
    return fault


def _incomplete(problem: Problem, starts: Starts) -> str | None:
    if len(starts) != len(problem.blocks):
        return f"{len(starts)} blocks are scheduled of {len(problem.blocks)}"
    for block, row in zip(problem.blocks, starts, strict=True):
        if len(row) != len(starts[0]) or not row:
            return f"block {block.id} runs for {len(row)} micro-batches of {len(starts[0])}"
        for m, start in enumerate(row):
            if not isfinite(start) or start < 0:
                return f"block {block.id} of micro-batch {m} starts at {start}"
    return None


def _too_early(problem: Problem, starts: Starts) -> str | None:
    slack = _TOLERANCE * max(max(row) for row in starts)
    for wait in problem.waits:
        first, then = problem.blocks[wait.on], problem.blocks[wait.block]
        for m, start in enumerate(starts[wait.block]):
            ready = starts[wait.on][m] + _time(problem, first) + wait.lag
            if start < ready - slack:
                return (
                    f"block {then.id} of micro-batch {m} starts at {start:g}, "
                    f"before what it needs of {first.id} is there at {ready:g}"
                )
    return None


def _time(problem: Problem, block: Block) -> float:
    return block.time / min(problem.speed[d] for d in block.devices)


def _placed(problem: Problem, starts: Starts) -> list[tuple[int, int]]:
    """An order by start; of what starts together, what takes no time and older ones go first."""
    rank = {block: place for place, block in enumerate(problem.order)}

    def key(item: tuple[int, int]) -> tuple[float, bool, int, int]:
        block, m = item
        return (starts[block][m], problem.blocks[block].time > 0, m, rank[block])

    return sorted(((b, m) for b, row in enumerate(starts) for m in range(len(row))), key=key)


def _misplaced(problem: Problem, starts: Starts, order: Order) -> str | None:
    place = {item: k for k, item in enumerate(order)}
    if len(place) != len(order) or len(place) != sum(len(row) for row in starts):
        return f"the order names {len(place)} blocks of {sum(len(row) for row in starts)}"
    for wait in problem.waits:
        for m in range(len(starts[0])):
            if place[wait.block, m] < place[wait.on, m]:
                then, first = problem.blocks[wait.block].id, problem.blocks[wait.on].id
                return f"block {then} of micro-batch {m} is put before {first}, which it waits for"
    return None


def _runs(problem: Problem, starts: Starts, order: Order, device: int) -> list[_Run]:
    """What a device runs, by start."""
    found = []
    for i, m in order:
        block = problem.blocks[i]
        if device in block.devices:
            found.append(_Run(starts[i][m], starts[i][m] + _time(problem, block), block, m))
    return sorted(found, key=lambda run: run.start)


def _crowded(runs: Sequence[_Run], device: int) -> str | None:
    slack = _TOLERANCE * max((run.end for run in runs), default=0.0)
    for first, then in pairwise(runs):
        if then.start < first.end - slack:
            return (
                f"device {device} runs {first} until {first.end:g} and {then} from {then.start:g}"
            )
    return None


def _full(runs: Sequence[_Run], device: int, room: float) -> str | None:
    held = 0.0
    for run in runs:
        block = run.block
        most = held + max(block.memory, block.memory + block.memory_end)
        if most > room * (1 + _TOLERANCE) + _TOLERANCE:
            return f"device {device} holds {most:g} of {room:g} as {run} runs at {run.start:g}"
        held += block.memory + block.memory_end
    return None
