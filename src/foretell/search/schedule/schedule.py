"""A schedule: its figures, whether it is legal, how it is drawn, written and kept.

A schedule: when every block of every micro-batch starts, and what is known about better ones.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from itertools import pairwise
from math import ceil, isfinite
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

from foretell.errors import InputError
from foretell.io import read_json, write_text
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
            "period": _without_fraction(self.period),
            "unroll": self.unroll,
            "per_micro_batch": _without_fraction(self.per_micro_batch),
            "lower_bound": _without_fraction(self.lower_bound),
            "gap": self.gap,
            "proven": self.proven,
            "proven_unroll": self.proven_unroll,
            "makespan": _without_fraction(self.makespan),
            "makespan_bound": _without_fraction(self.makespan_bound),
            "makespan_gap": self.makespan_gap,
            "bubble": self.bubble,
            "peak_memory": [_without_fraction(p) for p in self.peak_memory],
            "in_flight": self.in_flight,
            "search_cpu_s": self.search_cpu,
            "stopped": self.stopped,
            "cached": self.is_cached,
            "blocks": [
                {"block": blocks[s.block].id, "micro_batch": s.micro_batch,
                 "start": _without_fraction(s.start), "end": _without_fraction(s.end),
                 "kind": blocks[s.block].kind, "devices": list(blocks[s.block].devices)}
                for s in self.spans
            ],
        }  # fmt: skip


def _without_fraction(value: float) -> float | int:
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


class _BlockRun(NamedTuple):
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
    placed = _order_by_start(problem, starts) if order is None else list(order)
    fault = _out_of_order(problem, starts, placed)
    for device, runs in enumerate(_runs(problem, starts, placed)):
        fault = (
            fault
            or _overlapping(runs, device)
            or _over_capacity(runs, device, problem.capacity[device])
        )
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


def _order_by_start(problem: Problem, starts: Starts) -> list[tuple[int, int]]:
    """An order by start; of what starts together, what takes no time and older ones go first."""
    rank = {block: place for place, block in enumerate(problem.order)}

    def key(item: tuple[int, int]) -> tuple[float, bool, int, int]:
        block, m = item
        return (starts[block][m], problem.blocks[block].time > 0, m, rank[block])

    return sorted(((b, m) for b, row in enumerate(starts) for m in range(len(row))), key=key)


def _out_of_order(problem: Problem, starts: Starts, order: Order) -> str | None:
    place = {item: k for k, item in enumerate(order)}
    if len(place) != len(order) or len(place) != sum(len(row) for row in starts):
        return f"the order names {len(place)} blocks of {sum(len(row) for row in starts)}"
    for wait in problem.waits:
        for m in range(len(starts[0])):
            if place[wait.block, m] < place[wait.on, m]:
                then, first = problem.blocks[wait.block].id, problem.blocks[wait.on].id
                return f"block {then} of micro-batch {m} is put before {first}, which it waits for"
    return None


def _runs(problem: Problem, starts: Starts, order: Order) -> list[list[_BlockRun]]:
    """What each device runs, by start."""
    found: list[list[_BlockRun]] = [[] for _ in range(problem.num_devices)]
    time = [_time(problem, block) for block in problem.blocks]
    for i, m in order:
        block = problem.blocks[i]
        run = _BlockRun(starts[i][m], starts[i][m] + time[i], block, m)
        for device in block.devices:
            found[device].append(run)
    return [sorted(runs, key=lambda run: run.start) for runs in found]


def _overlapping(runs: Sequence[_BlockRun], device: int) -> str | None:
    slack = _TOLERANCE * max((run.end for run in runs), default=0.0)
    for first, then in pairwise(runs):
        if then.start < first.end - slack:
            return (
                f"device {device} runs {first} until {first.end:g} and {then} from {then.start:g}"
            )
    return None


def _over_capacity(runs: Sequence[_BlockRun], device: int, room: float) -> str | None:
    held = 0.0
    for run in runs:
        block = run.block
        most = held + max(block.memory, block.memory + block.memory_end)
        if most > room * (1 + _TOLERANCE) + _TOLERANCE:
            return f"device {device} holds {most:g} of {room:g} as {run} runs at {run.start:g}"
        held += block.memory + block.memory_end
    return None


# A schedule as lists of actions, as text for a terminal, and as SVG.


# A schedule as what each device does in turn: `3F0`, `3B0`, `3I0`, `3W0`.
#
# Stages are the forward blocks, numbered in the order of forward. A backward block belongs to the
# stage on its devices whose followers' backwards it waits for (or whose forward, for the last). The
# lists are what `torch.distributed.pipelining` runs and what torchtitan reads from a file.


def actions(schedule: Schedule) -> tuple[tuple[str, ...], ...]:
    """The actions of each device, in order."""
    stages = stage_of(schedule.problem)
    blocks = schedule.problem.blocks
    return tuple(
        tuple(
            f"{stages[s.block]}{blocks[s.block].kind}{s.micro_batch}" for s in schedule.on(device)
        )
        for device in range(schedule.problem.num_devices)
    )


def after(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """The stages that each stage takes its input from."""
    stages = stage_of(problem)
    forward = _forward(problem)
    return tuple(
        tuple(sorted({stages[w.on] for w in problem.after[block] if w.on in forward}))
        for block in sorted(forward, key=lambda b: stages[b])
    )


def copies(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Stages that hold the same parameters: the k-th of every separate pipeline of equal length."""
    lines = _separate_pipelines(after(problem))
    if len(lines) < 2 or len({len(line) for line in lines}) > 1:
        return ()
    return tuple(zip(*lines, strict=True))


def stage_of(problem: Problem) -> dict[int, int]:
    """The stage of each block, by place in the problem."""
    found = {block: stage for stage, block in enumerate(_forward_order(problem))}
    follow = _followers(problem, found)
    for block in problem.order:
        if problem.blocks[block].kind in "BIW":
            found[block] = _stage_of_backward(problem, block, found, follow)
        elif problem.blocks[block].kind != "F":
            raise InputError(
                f"block {problem.blocks[block].id} is communication that holds its devices",
                hint="give messages as lags: the runtime sends them beside the compute",
            )
    return found


def _forward_order(problem: Problem) -> list[int]:
    """The forward blocks as they are listed, where that is an order of forward."""
    listed = [i for i, b in enumerate(problem.blocks) if b.kind == "F"]
    is_order = all(w.on < w.block for w in problem.waits if {w.on, w.block} <= set(listed))
    return listed if is_order else [b for b in problem.order if b in set(listed)]


def _stage_of_backward(
    problem: Problem, block: int, found: dict[int, int], follow: dict[int, frozenset[int]]
) -> int:
    """The stage whose backward a block is."""
    kind, devices = problem.blocks[block].kind, set(problem.blocks[block].devices)
    waits = [w.on for w in problem.after[block]]
    if kind == "W":
        return found[next(w for w in waits if problem.blocks[w].kind == "I")]
    on = frozenset(found[w] for w in waits if problem.blocks[w].kind in "BI")
    own = [w for w in waits if problem.blocks[w].kind == "F"]
    taken = {found[b] for b in found if problem.blocks[b].kind in "BI"}
    for place in [*own, *(b for b in follow if follow[b] == on)]:
        is_here = set(problem.blocks[place].devices) == devices
        if is_here and follow[place] == on and found[place] not in taken:
            return found[place]
    raise InputError(
        f"backward block {problem.blocks[block].id} belongs to no forward block",
        hint="let backward go back over the devices of forward",
    )


def _followers(problem: Problem, stages: dict[int, int]) -> dict[int, frozenset[int]]:
    forward = _forward(problem)
    return {
        b: frozenset(stages[w.block] for w in problem.waits if w.on == b and w.block in forward)
        for b in forward
    }


def _forward(problem: Problem) -> set[int]:
    return {i for i, b in enumerate(problem.blocks) if b.kind == "F"}


def _separate_pipelines(befores: Sequence[Sequence[int]]) -> list[list[int]]:
    """Stages by the separate pipeline they are in."""
    found = list(range(len(befores)))
    for stage, ones in enumerate(befores):
        for one in ones:
            old, new = max(found[stage], found[one]), min(found[stage], found[one])
            found = [new if f == old else f for f in found]
    return [[s for s, f in enumerate(found) if f == name] for name in sorted(set(found))]


# A schedule as a picture: text that fits a terminal, or SVG.


_FORWARD, _BACKWARD, _WEIGHT = "0123456789", "ABCDEFGHIJ", "abcdefghij"
_SIGNS = {"F": _FORWARD, "B": _BACKWARD, "I": _BACKWARD, "W": _WEIGHT, "C": "~"}
_IDLE, _CUT = "·", " … "
_LONGEST = 40  # lines so many times too long show their ends; longer ones are scaled down
# hues of forward, backward, input and weight gradients, communication: apart for most eyes
_HUES = {"F": 210, "B": 30, "I": 30, "W": 130, "C": 280}
_ROW, _BAR, _TOP, _SIDE = 26, 20, 34, 44  # pixels


def text(
    schedule: Schedule, width: int = 80, unit: Callable[[float], str] = "{:.4g}".format
) -> str:
    """One line per device, one sign per column: a micro-batch modulo ten; long ones keep ends."""
    names = {d: f"{d} " for d in range(schedule.problem.num_devices) if not _is_link(schedule, d)}
    side = max(map(len, names.values()))
    room = max(width - side, 8)
    step, columns = _scale(schedule, room)
    lines = []
    for device, name in names.items():
        line = _device_signs(schedule, schedule.on(device), step, columns)
        lines.append(name.rjust(side) + _shorten(line, room))
    key = f"a column is {unit(step)}; 0-9 forward, A-J backward, a-j weight gradient, {_IDLE} idle"
    return "\n".join([*lines, *wrap(key, width)])


def svg(schedule: Schedule, width: int = 1000) -> str:
    """One bar a block, coloured by what it does, darker with every other micro-batch."""
    problem = schedule.problem
    scale = (width - _SIDE - 8) / schedule.makespan if schedule.makespan else 1.0
    height = _TOP + _ROW * problem.num_devices + 8
    name = problem.name or "schedule"
    ends = f"makespan {schedule.makespan:g}, {schedule.per_micro_batch:g} a micro-batch"
    title = escape(f"{name}: {ends}")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="11" role="img">',
        f"<title>{title}</title>",
        f'<text x="8" y="18" font-size="13">{title}</text>',
    ]
    for device in range(problem.num_devices):
        top = _TOP + _ROW * device
        parts.append(f'<text x="8" y="{top + 14}">{device}</text>')
        parts += [_bar(schedule, span, top, scale) for span in schedule.on(device)]
    return "\n".join([*parts, "</svg>\n"])


def _is_link(schedule: Schedule, device: int) -> bool:
    """Whether a device only carries messages: it stands for a link."""
    mine = [b.kind for b in schedule.problem.blocks if device in b.devices]
    return bool(mine) and set(mine) == {"C"}


def _scale(schedule: Schedule, room: int) -> tuple[float, int]:
    """The time of a column and how many there are: one a time step, if there are not too many."""
    steps = [t for t in schedule.problem.seconds if t > 0]
    if not steps:
        return 1.0, 1
    step = min(steps)
    if any(t % step for t in steps) or schedule.makespan / step > _LONGEST * room:
        return schedule.makespan / room, room
    return step, ceil(schedule.makespan / step)


def _device_signs(schedule: Schedule, spans: Sequence[Span], step: float, columns: int) -> str:
    signs = [_IDLE] * columns
    for span in spans:
        kind = _SIGNS[schedule.problem.blocks[span.block].kind]
        sign = kind[span.micro_batch % len(kind)]
        first, last = round(span.start / step), round(span.end / step)
        signs[first:last] = sign * (last - first)
    return "".join(signs[:columns])


def _shorten(line: str, room: int) -> str:
    half = (room - len(_CUT)) // 2
    return line if len(line) <= room else line[:half] + _CUT + line[-half:]


def _bar(schedule: Schedule, span: Span, top: int, scale: float) -> str:
    block = schedule.problem.blocks[span.block]
    left, size = _SIDE + span.start * scale, (span.end - span.start) * scale
    light = 62 if span.micro_batch % 2 else 74
    what = block.name or f"block {block.id}"
    hint = (
        f"{what} ({block.kind}) of micro-batch {span.micro_batch}: {span.start:g} to {span.end:g}"
    )
    place = f'x="{left + size / 2:.2f}" y="{top + 14}" text-anchor="middle"'
    fits = size >= 7 * len(str(span.micro_batch))  # pixels of a digit
    label = f"<text {place}>{span.micro_batch}</text>" if fits else ""
    return (
        f'<g><title>{escape(hint)}</title><rect x="{left:.2f}" y="{top}" width="{size:.2f}" '
        f'height="{_BAR}" fill="hsl({_HUES[block.kind]} 60% {light}%)" stroke="#fff" '
        f'stroke-width="0.5"/>{label}</g>'
    )


# Schedules found before, one file each, by what was asked.
#
# The key is the fingerprint of the problem and every option that shapes the answer, with the
# version of the search: a new version never reads an old answer. Files appear whole or not at
# all, and what is read is checked like any schedule; a file that is broken or wrong counts as
# missing.


VERSION = 4  # one more whenever the search may answer differently


def cache_folder() -> Path:
    """Where schedules are kept unless another place is named."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "foretell" / "schedules"


def cache_key(problem: Problem, micro_batches: int, **options: Any) -> str:
    """The name of the file that would hold the answer to a question."""
    text = json.dumps([VERSION, problem.fingerprint, micro_batches, options], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def load_cached(where: Path, name: str, problem: Problem) -> Schedule | None:
    """A schedule found before, or None."""
    try:
        found = read_json(where / f"{name}.json")
        starts = tuple(tuple(map(float, row)) for row in found.pop("starts"))
        order = tuple((int(block), int(m)) for block, m in found.pop("order"))
        schedule = Schedule(problem, starts, order, **found)
        fault = wrong(problem, starts, order)
    except (InputError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None
    return None if fault else replace(schedule, is_cached=True)


def save_cached(where: Path, name: str, schedule: Schedule) -> None:
    """Keep a schedule; a folder that cannot be written is left alone."""
    kept = (
        "period",
        "unroll",
        "lower_bound",
        "makespan_bound",
        "proven_unroll",
        "method",
        "search_cpu",
        "stopped",
    )
    found = {"starts": schedule.starts, "order": schedule.order} | {
        k: getattr(schedule, k) for k in kept
    }
    try:
        where.mkdir(parents=True, exist_ok=True)
        write_text(where / f"{name}.json", json.dumps(found))
    except (OSError, InputError):
        return
