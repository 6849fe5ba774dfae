"""The events of one trace as columns: what happened, when, where, and what it belongs to.

Both schemas are read: `Operator`, `Runtime`, `Kernel` (torch 1.8) and `cpu_op`, `cuda_runtime`,
`kernel` (since 1.9). Stamps are microseconds, whole or with fractions, after `baseTimeNanoseconds`
where that is given; here they are seconds after the first event, and `origin` is that event's time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foretell.errors import InputError
from foretell.graph.columns import Array
from foretell.trace.decode import NO_ID
from foretell.trace.fill import Message, Tables, What, are_ranges, filled, told_ids
from foretell.trace.runs import median
from foretell.trace.split import Around, Opened, batches

__all__ = ["Events", "Message", "What", "read_events"]

MICRO = 1e-6
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
    facts = around.facts()
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
            values = told_ids(values, none)
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
