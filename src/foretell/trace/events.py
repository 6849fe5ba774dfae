"""The events of one trace as columns: what happened, when, where, and what it belongs to.

Both schemas are read: `Operator`, `Runtime`, `Kernel` (torch 1.8) and `cpu_op`, `cuda_runtime`,
`kernel` (since 1.9). Stamps are microseconds, whole or with fractions, after `baseTimeNanoseconds`
where that is given; here they are seconds after the first event, and `origin` is that event's time.
A trace has a hundred thousand events and more, so fields are gathered by `attrgetter` and looked up
in tables that number what they have not met before: no Python runs once an event.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import compress
from operator import attrgetter
from typing import Any

import numpy as np

from foretell.errors import InputError
from foretell.graph.graph import Array
from foretell.trace.decode import NO_ARGS, NO_ID, Args, Around, Event, Id, Opened, Seen, batches
from foretell.trace.runs import median

_MOST_WARPS = 64  # a multiprocessor holds at most: CUDA Programming Guide, compute capabilities 7-9


class What(IntEnum):
    """The kind of an event."""

    OTHER = 0
    OP = 1  # an operator on a CPU thread
    CALL = 2  # a runtime or driver call on a CPU thread
    NOTE = 3  # a named range on a CPU thread: a step, the optimizer, a user's record_function
    MODULE = 4  # a Python module's forward
    KERNEL = 5
    COPY = 6
    FILL = 7  # a memset
    WAIT = 8  # what a synchronising call waited for (`cuda_sync`)


_CATEGORIES = {
    "cpu_op": What.OP,
    "operator": What.OP,
    "cuda_runtime": What.CALL,
    "cuda_driver": What.CALL,
    "runtime": What.CALL,
    "hip_runtime": What.CALL,
    "xpu_runtime": What.CALL,
    "mtia_runtime": What.CALL,
    "privateuse1_runtime": What.CALL,
    "privateuse1_driver": What.CALL,
    "user_annotation": What.NOTE,
    "python_function": What.MODULE,
    "kernel": What.KERNEL,
    "gpu_memcpy": What.COPY,
    "memcpy": What.COPY,
    "gpu_memset": What.FILL,
    "memset": What.FILL,
    "cuda_sync": What.WAIT,
}
_KERNEL, _CALL, _MODULE = int(What.KERNEL), int(What.CALL), int(What.MODULE)  # once a batch
_IS_MODULE = "nn.Module"  # how the Python functions are named that count
# The first schema knows no annotations: these operators are named ranges.
_FIRST_SCHEMA, _MAYBE_NOTE = "Operator", len(What)
_NOTES = ("ProfilerStep", "Optimizer.", "enumerate(DataLoader)", "## ", "nccl:", "gloo:", "[param|")


@dataclass(frozen=True)
class Message:
    """Metadata of a collective; sizes are in elements of a type."""

    collective: str
    sent: int
    received: int
    element: str
    group: str
    group_name: str
    group_size: int


class _Sorts(dict[str | None, int]):
    """The sorts of events by category; those of no use are OTHER."""

    def __missing__(self, category: str | None) -> int:
        kind = int(_CATEGORIES.get((category or "").lower(), What.OTHER))
        self[category] = _MAYBE_NOTE if category == _FIRST_SCHEMA else kind
        return self[category]


class _Texts(dict[str, int]):
    """Strings by number; 0 is the empty one, and none."""

    def __missing__(self, text: str | None) -> int:
        return 0 if text is None else self.setdefault(text, len(self))


class _Inputs(dict[bytes, int]):
    """Inputs of operators (dims, types and values as JSON, with NUL between) by number."""

    def __missing__(self, inputs: bytes) -> int:
        return 0 if inputs.startswith(b"\0") else self.setdefault(inputs, len(self))  # 0: no dims


class _Threads(dict[tuple[Id, Id], int]):
    """Threads by number, as events name them; `named` as people do."""

    def __init__(self) -> None:
        self.named: dict[tuple[str, str], int] = {}

    def __missing__(self, key: tuple[Id, Id]) -> int:
        pid, tid = key
        self[key] = self.named.setdefault((_text(pid), _text(tid)), len(self.named))
        return self[key]


class _Streams(dict[tuple[tuple[Id, Id], tuple[int | None, Id]], int]):
    """Streams by number, as events name them; `named` by device and stream."""

    def __init__(self) -> None:
        self.named: dict[tuple[int, str], int] = {}

    def __missing__(self, key: tuple[tuple[Id, Id], tuple[int | None, Id]]) -> int:
        (pid, tid), (device, stream) = key
        if device is None:
            device = pid if isinstance(pid, int) else 0
        name = _text(stream if stream is not None else tid).removeprefix("stream ").strip()
        self[key] = self.named.setdefault((device, name), len(self.named))
        return self[key]


def _text(value: Id) -> str:
    return value if isinstance(value, str) else str(value)


@dataclass
class Tables:
    """Text and places met so far, each with its number."""

    sorts: _Sorts = field(default_factory=_Sorts)
    texts: _Texts = field(default_factory=lambda: _Texts({"": 0}))
    inputs: _Inputs = field(default_factory=lambda: _Inputs({b"\0\0": 0}))
    threads: _Threads = field(default_factory=_Threads)
    streams: _Streams = field(default_factory=_Streams)
    messages: dict[Message | None, int] = field(default_factory=lambda: {None: 0})
    base: float = 0.0  # microseconds: of the first event
    seen: Seen = field(default_factory=Seen)
    incomplete: int = 0

    def shapes(self) -> tuple[tuple[bytes, bytes, bytes], ...]:
        """Dims, types and values of the inputs met, as JSON."""
        parts = (inputs.split(b"\0") for inputs in self.inputs)
        return tuple((dims, types, values) for dims, types, values in parts)


def filled(events: list[Event], tables: Tables) -> dict[str, Array]:
    """The events worth keeping, as columns: some hold a value for some of them only."""
    events, what = _useful(events, tables)
    start, long = _numbers(events, "ts"), _numbers(events, "dur")
    with np.errstate(over="ignore"):
        complete = np.isfinite(start + long)
    if not complete.all():
        tables.incomplete += int((~complete).sum())
        events = list(compress(events, complete.tolist()))
        what, start, long = what[complete], start[complete], long[complete]
    return {"what": what, "start": start, "long": long, **_columns(events, what, tables)}


def _useful(events: list[Event], tables: Tables) -> tuple[list[Event], Array]:
    """The events that are of a sort, and which."""
    what = _looked_up(tables.sorts, map(attrgetter("cat"), events), len(events)).astype(np.uint8)
    for k in np.flatnonzero((what == _MODULE) | (what == _MAYBE_NOTE)).tolist():
        name = events[k].name or ""
        if what[k] == _MODULE:
            what[k] = _MODULE if name.startswith(_IS_MODULE) else What.OTHER
        else:
            what[k] = What.NOTE if name.startswith(_NOTES) else What.OP
    return list(compress(events, what.tolist())), what[what > 0]


def _columns(events: list[Event], what: Array, tables: Tables) -> dict[str, Array]:
    """All columns but the times; some of operators, notes and modules only, some of device work."""
    args = [e.args or NO_ARGS for e in events]
    on_device = (what >= _KERNEL).tolist()
    work = list(compress(args, on_device))
    threads = map(_THREAD, compress(events, (what < _KERNEL).tolist()))
    streams = zip(map(_THREAD, compress(events, on_device)), map(_STREAM, work), strict=True)
    return {
        "name": _looked_up(tables.texts, map(attrgetter("name"), events), len(events)),
        "place": _looked_up(tables.threads, threads, len(events) - len(work)),
        "stream": _looked_up(tables.streams, streams, len(work)),
        "correlation": _ids(args, "correlation"),
        "external": _externals(args),
        "message": np.array([_message(a, tables) if a.collective else 0 for a in args], np.int32),
        **_of_ranges(list(compress(args, are_ranges(what).tolist())), tables),
        **_of_work(work),
    }


_THREAD, _STREAM = attrgetter("pid", "tid"), attrgetter("device", "stream")
_INPUTS = attrgetter("dims", "types", "values")


def are_ranges(what: Array) -> Array:
    """Which events are operators, notes or modules."""
    found: Array = (what < _KERNEL) & (what != _CALL)
    return found


def _looked_up(table: dict[Any, int], keys: Iterable[Any], size: int) -> Array:
    return np.fromiter(map(table.__getitem__, keys), np.int32, size)


def _of_ranges(args: list[Args], tables: Tables) -> dict[str, Array]:
    """Columns of operators, annotations and modules."""
    inputs, module = map(b"\0".join, map(_INPUTS, args)), map(attrgetter("module"), args)
    return {
        "sequence": _ids(args, "sequence"),
        "forward_thread": _ids(args, "forward_thread", 0),
        "shape": _looked_up(tables.inputs, inputs, len(args)),
        "module": _looked_up(tables.texts, module, len(args)),
    }


def _of_work(args: list[Args]) -> dict[str, Array]:
    """Columns of work on devices."""
    return {
        "size": _numbers(args, "bytes"),
        "waves": np.array([_waves(a) for a in args], np.float32),
        "waits_for_stream": _ids(args, "waits_for_stream"),
        "waits_for_record": _ids(args, "waits_for_record"),
    }


def _numbers(of: Sequence[Event | Args], field: str) -> Array:
    """Numbers; NaN where missing."""
    try:
        return np.fromiter(map(attrgetter(field), of), np.float64, len(of))
    except TypeError:
        return np.array([math.nan if v is None else v for v in map(attrgetter(field), of)])


def _externals(args: list[Args]) -> Array:
    """The id shared by an operator and its kernels, under the new name or the old."""
    found = known_ids(_ids(args, "external"))
    rest = np.flatnonzero(found == NO_ID).tolist()
    found[rest] = _ids([args[k] for k in rest], "old_external")
    return found


def _ids(of: list[Args], field: str, none: int = NO_ID) -> Array:
    """Whole numbers; none where a value needs more than 64 bits."""
    try:
        return np.fromiter(map(attrgetter(field), of), np.int64, len(of))
    except OverflowError:
        values = map(attrgetter(field), of)
        return np.array([none if abs(v) >= _UNSET else v for v in values], np.int64)


def _waves(a: Args) -> float:
    """Warps for each multiprocessor over the warps that fit, from the occupancy the trace tells."""
    if not a.warps or not a.occupancy:
        return 0.0
    return a.warps / (a.occupancy / 100.0 * _MOST_WARPS)


def _message(a: Args, tables: Tables) -> int:
    made = Message(
        a.collective or "", a.sent or 0, a.received or 0, a.element or "",
        bytes(a.group).decode(errors="replace"), a.group_name or "", a.group_size or 0,
    )  # fmt: skip
    return tables.messages.setdefault(made, len(tables.messages))


def known_ids(ids: Array, none: int = NO_ID) -> Array:
    """The same, none where a value is beyond 2^62 (an unset 64-bit id)."""
    ids[(ids >= _UNSET) | (ids <= -_UNSET)] = none
    return ids


_UNSET = 1 << 62


__all__ = ["Events", "Message", "What", "read_events"]

MICRO = 1e-6
ALLOCATED = "peak allocated"  # a fact: the most bytes that PyTorch had given out on a device; or 0
_CLOCK_JUMP = 3600.0  # seconds from the middle of a trace that no recording reaches


@dataclass(frozen=True, eq=False)
class Events:
    """One value an event in every column; text is kept once and named by number."""

    what: Array  # uint8, What
    name: Array  # int32 into texts
    start: Array  # float64 seconds after the first event
    end: Array
    place: Array  # int32 into threads, for work on a device into streams
    correlation: Array  # int64: a call and what it started share it; NO_ID where there is none
    external: Array  # int64: an operator and what it started share it
    sequence: Array  # int64: a forward operator and its backward share it
    forward_thread: Array  # int64: above zero for backward operators
    shape: Array  # int32 into shapes
    size: Array  # float64: bytes copied or filled
    waves: Array  # float32: how often a kernel fills all multiprocessors, zero where not given
    message: Array  # int32 into messages
    module: Array  # int32 into texts
    waits_for_stream: Array  # int64
    waits_for_record: Array  # int64
    texts: Sequence[str]
    threads: Sequence[tuple[str, str]]  # process, thread
    streams: Sequence[tuple[int, str]]  # device, stream
    shapes: Sequence[tuple[bytes, bytes, bytes]]  # dims, types and values of inputs, as JSON
    messages: Sequence[Message | None]
    origin: float  # absolute seconds of time zero
    facts: dict[str, Any]
    notes: tuple[str, ...]
    source: str

    def __len__(self) -> int:
        return len(self.what)

    def is_(self, *wanted: What) -> Array:
        """Where events are of those sorts."""
        return np.isin(self.what, wanted)


def read_events(file: Opened) -> Events:
    """All events of one file that foretell has a use for."""
    around, tables = Around(), Tables()
    parts = [filled(events, tables) for events in batches(file, around, tables.seen)]
    if not any(len(p["what"]) for p in parts):
        raise InputError(
            f"`{file.name}` has {tables.seen.events} events, none an operator, a call or a kernel",
            hint="record with torch.profiler and export_chrome_trace",
        )
    facts = {**around.facts(), ALLOCATED: tables.seen.allocated}
    columns, far = _without_jumps(_joined(parts, tables))
    return Events(
        **columns,
        texts=tuple(tables.texts),
        threads=tuple(tables.threads.named),
        streams=tuple(tables.streams.named),
        shapes=tables.shapes(),
        messages=tuple(tables.messages),
        origin=_number(facts.get("baseTimeNanoseconds")) * 1e-9 + tables.base * MICRO,
        facts=facts,
        notes=(*around.notes, *_notes(tables, far)),
        source=file.name,
    )


# Columns that only some events have: which, and what stands in them for all others.
_SOME = {
    "place": ("host", 0),
    "stream": ("device", 0),
    "sequence": ("ranges", NO_ID),
    "forward_thread": ("ranges", 0),
    "shape": ("ranges", 0),
    "module": ("ranges", 0),
    "size": ("device", 0),
    "waves": ("device", 0),
    "waits_for_stream": ("device", NO_ID),
    "waits_for_record": ("device", NO_ID),
}


def _joined(parts: Sequence[dict[str, Array]], tables: Tables) -> dict[str, Array]:
    """The columns of all parts, one value an event; notes when the first of all events was.

    Parts are emptied on the way: both at once would be the most that is ever held.
    """
    what = np.concatenate([p["what"] for p in parts])
    rows = {"host": what < What.KERNEL, "device": what >= What.KERNEL, "ranges": are_ranges(what)}
    found = {}
    for name in tuple(parts[0]):
        whose, none = _SOME.get(name, ("", NO_ID))
        values = np.concatenate([p.pop(name) for p in parts])
        if values.dtype == np.int64:
            values = known_ids(values, none)
        if whose:
            found[name] = np.full(len(what), none, values.dtype)
            found[name][rows[whose]] = values
        else:
            found[name] = values
    found["place"] = np.where(rows["device"], found.pop("stream"), found["place"])
    tables.base = float(found["start"][0])
    start = found["start"] - tables.base
    found["end"] = (start + np.maximum(found.pop("long"), 0.0)) * MICRO
    found["start"] = start * MICRO
    return found


def _without_jumps(columns: dict[str, Array]) -> tuple[dict[str, Array], int]:
    """The columns without events that a clock has thrown far away, and how many these are."""
    start = columns["start"]
    if start.max() - start.min() < _CLOCK_JUMP:
        return columns, 0
    near = np.abs(start - median(start)) < _CLOCK_JUMP
    return {k: v[near] for k, v in columns.items()}, int((~near).sum())


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def _notes(tables: Tables, far: int) -> Iterable[str]:
    seen = tables.seen
    if seen.malformed:
        yield f"{seen.malformed} of {seen.events} events are not JSON and were left out"
    if tables.incomplete:
        yield f"{tables.incomplete} of {seen.events} events lack a time and were left out"
    if far:
        yield f"{far} of {seen.events} events are hours away from the others and were left out"
