"""Whether a schedule is legal: written apart from the search, from problem and starts alone.

Completeness, waits with their lags, one block at a time on each device, and memory, in that
order. Memory is what a device holds as each of its blocks starts, added up in the order of the
starts; blocks that take no time may start together, then `order` says which goes first.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import isfinite
from typing import NamedTuple

from foretell.search.schedule.problem import Block, Problem

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
