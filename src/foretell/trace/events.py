"""The events of one trace as columns: what happened, when, where, and what it belongs to.

Both schemas are read: `Operator`, `Runtime`, `Kernel` (torch 1.8) and `cpu_op`, `cuda_runtime`,
`kernel` (since 1.9). Stamps are microseconds, whole or with fractions, after `baseTimeNanoseconds`
where that is given; here they are seconds after the first event, and `origin` is that event's time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from operator import attrgetter
from typing import Any

import numpy as np

from foretell.errors import InputError
from foretell.graph.columns import Array
from foretell.trace.decode import NO_ARGS, NO_ID, Args, Event, Id, Seen, decoded
from foretell.trace.split import Around, Opened, batches

MICRO = 1e-6
_MOST_WARPS = 64  # a multiprocessor holds at most: CUDA Programming Guide, compute capabilities 7-9
_CLOCK_JUMP = 3600.0  # seconds from the middle of a trace that no recording reaches


class What(IntEnum):
    """What sort of event it is."""

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
# The first schema knows no annotations: these operators are named ranges.
_NOTES = ("ProfilerStep", "Optimizer.", "enumerate(DataLoader)", "## ", "nccl:", "gloo:", "[param|")
_ON_DEVICE = (What.KERNEL, What.COPY, What.FILL, What.WAIT)


@dataclass(frozen=True)
class Message:
    """What a collective says of itself: bytes are counted in elements of a type."""

    collective: str
    sent: int
    received: int
    element: str
    group: str
    group_name: str
    group_size: int


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
    waves: Array  # float32: how often a kernel fills all multiprocessors, zero where not told
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


COLUMNS = tuple(f for f in Events.__dataclass_fields__ if f not in (
    "texts", "threads", "streams", "shapes", "messages", "origin", "facts",
    "notes", "source",
))  # fmt: skip


@dataclass
class _Tables:
    """Text and places met so far, each with its number."""

    texts: dict[str, int] = field(default_factory=lambda: {"": 0})
    threads: dict[tuple[str, str], int] = field(default_factory=dict)
    streams: dict[tuple[int, str], int] = field(default_factory=dict)
    shapes: dict[tuple[bytes, bytes, bytes], int] = field(default_factory=lambda: {(b"",) * 3: 0})
    messages: dict[Message | None, int] = field(default_factory=lambda: {None: 0})
    met: dict[tuple[Id | bool, ...], int] = field(default_factory=dict)  # places as events say them
    base: float = math.nan  # microseconds
    seen: Seen = field(default_factory=Seen)
    incomplete: int = 0


def read_events(file: Opened) -> Events:
    """All events of one file that foretell has a use for."""
    around, tables = Around(), _Tables()
    parts = [
        _columns(decoded(batch, tables.seen, file.name), tables) for batch in batches(file, around)
    ]
    if not any(len(p["what"]) for p in parts):
        raise InputError(
            f"`{file.name}` has {tables.seen.events} events, none an operator, a call or a kernel",
            hint="record with torch.profiler and export_chrome_trace",
        )
    facts = around.facts()
    columns, far = _without_jumps({k: np.concatenate([p[k] for p in parts]) for k in COLUMNS})
    return Events(
        **columns,
        texts=tuple(tables.texts),
        threads=tuple(tables.threads),
        streams=tuple(tables.streams),
        shapes=tuple(tables.shapes),
        messages=tuple(tables.messages),
        origin=_number(facts.get("baseTimeNanoseconds")) * 1e-9 + tables.base * MICRO,
        facts=facts,
        notes=(*around.notes, *_notes(tables, far)),
        source=file.name,
    )


def _without_jumps(columns: dict[str, Array]) -> tuple[dict[str, Array], int]:
    """The columns without events that a clock has thrown far away, and how many these are."""
    near = np.abs(columns["start"] - np.median(columns["start"])) < _CLOCK_JUMP
    return {k: v[near] for k, v in columns.items()}, int((~near).sum())


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def _notes(tables: _Tables, far: int) -> Iterable[str]:
    seen = tables.seen
    if seen.malformed:
        yield f"{seen.malformed} of {seen.events} events are not JSON and were left out"
    if tables.incomplete:
        yield f"{tables.incomplete} of {seen.events} events lack a time and were left out"
    if far:
        yield f"{far} of {seen.events} events are hours away from the others and were left out"


def _columns(events: list[Event], tables: _Tables) -> dict[str, Array]:
    """The events worth keeping, as columns."""
    kept, what, finite = [], [], math.isfinite
    for e in events:
        if e.ph != "X" or not (kind := _what(e)):
            continue
        if e.ts is None or e.dur is None or not finite(e.ts + e.dur):
            tables.incomplete += 1
            continue
        kept.append(e)
        what.append(kind)
    return _filled(kept, np.array(what, np.uint8), tables)


def _what(e: Event) -> int:
    kind = _category(e.cat)
    if kind == _MODULE:
        return kind if (e.name or "").startswith("nn.Module") else _OTHER
    if e.cat == "Operator" and (e.name or "").startswith(_NOTES):
        return _NOTE
    return kind


_OTHER, _MODULE, _NOTE = int(What.OTHER), int(What.MODULE), int(What.NOTE)  # asked once an event


@lru_cache(256)
def _category(cat: str | None) -> int:
    return int(_CATEGORIES.get(cat.lower() if cat else "", What.OTHER))


def _filled(events: list[Event], what: Array, tables: _Tables) -> dict[str, Array]:
    args = [e.args or NO_ARGS for e in events]
    if events and math.isnan(tables.base):
        tables.base = float(events[0].ts or 0.0)
    start = _numbers(events, "ts") - tables.base
    long = np.maximum(_numbers(events, "dur"), 0.0)
    external = _ids(args, "external")
    number = tables.texts.setdefault
    return {
        "what": what,
        "name": np.array([number(e.name or "", len(tables.texts)) for e in events], np.int32),
        "start": start * MICRO,
        "end": (start + long) * MICRO,
        "place": np.array(_places(events, args, what, tables), np.int32),
        "correlation": _ids(args, "correlation"),
        "external": np.where(external != NO_ID, external, _ids(args, "old_external")),
        "sequence": _ids(args, "sequence"),
        "forward_thread": _ids(args, "forward_thread", 0),
        "shape": np.array([_shape(a, tables) if a.dims else 0 for a in args], np.int32),
        "size": _numbers(args, "bytes"),
        "waves": np.array([_waves(a) if a.warps else 0.0 for a in args], np.float32),
        "message": np.array([_message(a, tables) if a.collective else 0 for a in args], np.int32),
        "module": np.array([number(a.module or "", len(tables.texts)) for a in args], np.int32),
        "waits_for_stream": _ids(args, "waits_for_stream"),
        "waits_for_record": _ids(args, "waits_for_record"),
    }


def _numbers(of: Sequence[Event | Args], field: str) -> Array:
    return np.fromiter(map(attrgetter(field), of), np.float64, len(of))


def _ids(of: list[Args], field: str, none: int = NO_ID) -> Array:
    """Whole numbers; none where something beyond 2^62 (an unset 64-bit id) is said."""
    try:
        found = np.fromiter(map(attrgetter(field), of), np.int64, len(of))
    except OverflowError:
        said = map(attrgetter(field), of)
        return np.array([none if abs(v) >= _UNSET else v for v in said], np.int64)
    found[(found >= _UNSET) | (found <= -_UNSET)] = none
    return found


_UNSET = 1 << 62


def _places(events: list[Event], args: list[Args], what: Array, tables: _Tables) -> list[int]:
    on_device = np.isin(what, _ON_DEVICE).tolist()
    threads, streams, met = tables.threads, tables.streams, tables.met
    found = []
    for e, a, device in zip(events, args, on_device, strict=True):
        said = (device, e.pid, e.tid, a.device, a.stream) if device else (device, e.pid, e.tid)
        place = met.get(said)
        if place is None:
            if device:
                place = streams.setdefault((_device(e, a), _stream(e, a)), len(streams))
            else:
                place = threads.setdefault((_text(e.pid), _text(e.tid)), len(threads))
            met[said] = place
        found.append(place)
    return found


def _text(value: Id) -> str:
    return value if isinstance(value, str) else str(value)


def _device(e: Event, a: Args) -> int:
    if a.device is not None:
        return a.device
    return e.pid if isinstance(e.pid, int) else 0


def _stream(e: Event, a: Args) -> str:
    return _text(a.stream if a.stream is not None else e.tid).removeprefix("stream ").strip()


def _shape(a: Args, tables: _Tables) -> int:
    key = (bytes(a.dims), bytes(a.types), bytes(a.values))
    return tables.shapes.setdefault(key, len(tables.shapes))


def _waves(a: Args) -> float:
    """Warps for each multiprocessor over the warps that fit, from the occupancy the trace tells."""
    if not a.warps or not a.occupancy:
        return 0.0
    return a.warps / (a.occupancy / 100.0 * _MOST_WARPS)


def _message(a: Args, tables: _Tables) -> int:
    made = Message(
        a.collective or "", a.sent or 0, a.received or 0, a.element or "",
        bytes(a.group).decode(errors="replace"), a.group_name or "", a.group_size or 0,
    )  # fmt: skip
    return tables.messages.setdefault(made, len(tables.messages))
