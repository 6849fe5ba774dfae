"""Events decoded from JSON into typed values: fast where they have the expected form.

Where they do not (a number as text, an argument of another type) they are decoded one by one and
what cannot be understood of their arguments is left out. Events that are not JSON at all are passed
over and counted, up to one in a hundred; then the trace counts as broken.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Union

import msgspec
from msgspec import Raw

from foretell.errors import InputError
from foretell.trace.brackets import values

_MOST_MALFORMED = 0.01  # share of events that may be left out before a trace counts as broken
Id = int | str | float | None
NO_ID = -1


@dataclass(frozen=True)
class Batch:
    """Whole events separated by commas, and the byte at which they begin."""

    text: bytes
    offset: int


@dataclass
class Seen:
    """How many events have been seen so far, and how many of them were not JSON."""

    events: int = 0
    malformed: int = 0


class Args(msgspec.Struct, gc=False):
    """What foretell reads of an event's arguments; the rest is passed over unparsed.

    What most events have stands first, in the order in which torch writes it: found sooner so.
    """

    external: int = msgspec.field(default=NO_ID, name="External id")
    correlation: int = NO_ID
    sequence: int = msgspec.field(default=NO_ID, name="Sequence number")
    forward_thread: int = msgspec.field(default=0, name="Fwd thread id")
    values: Raw = msgspec.field(default=Raw(b""), name="Concrete Inputs")
    types: Raw = msgspec.field(default=Raw(b""), name="Input type")
    dims: Raw = msgspec.field(default=Raw(b""), name="Input Dims")
    device: int | None = None
    stream: Id = None
    warps: float | None = msgspec.field(default=None, name="warps per SM")
    occupancy: float | None = msgspec.field(default=None, name="est. achieved occupancy %")
    bytes: float = 0.0
    old_external: int = msgspec.field(default=NO_ID, name="external id")
    module: str | None = msgspec.field(default="", name="Module Hierarchy")
    waits_for_stream: int = msgspec.field(default=NO_ID, name="wait_on_stream")
    waits_for_record: int = msgspec.field(default=NO_ID, name="wait_on_cuda_event_record_corr_id")
    collective: str | None = msgspec.field(default=None, name="Collective name")
    sent: int | None = msgspec.field(default=None, name="In msg nelems")
    received: int | None = msgspec.field(default=None, name="Out msg nelems")
    element: str | None = msgspec.field(default=None, name="dtype")
    group: Raw = msgspec.field(default=Raw(b""), name="Process Group Ranks")
    group_name: str | None = msgspec.field(default=None, name="Process Group Name")
    group_size: int | None = msgspec.field(default=None, name="Group size")


class Event(msgspec.Struct, gc=False, tag_field="ph", tag="X"):
    """An event that lasts: all others only point, count or name."""

    cat: str | None = None
    name: str | None = None
    pid: Id = None
    tid: Id = None
    ts: float | None = math.nan
    dur: float | None = math.nan
    args: Args | None = None


NO_ARGS = Args()
# Events of other phases of the Trace Event Format, of which nothing is read; no profiler of torch
# writes any but these.
_PASSED = [
    msgspec.defstruct(f"Passed{k}", [], tag_field="ph", tag=phase, gc=False)
    for k, phase in enumerate("BEiICMbnestf")
]
_ONE = Union[Event, *_PASSED]  # type: ignore[valid-type]
_DECODER: msgspec.json.Decoder[list[Event]] = msgspec.json.Decoder(list[_ONE])
_ONE_DECODER: msgspec.json.Decoder[Event] = msgspec.json.Decoder(_ONE)


def tried(text: bytes | memoryview, seen: Seen) -> list[Event] | None:
    """The events of a text; None where it is not a list of events of the expected form."""
    try:
        found = _DECODER.decode(b"".join((b"[", text, b"]")))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    seen.events += len(found)
    return [e for e in found if e.__class__ is Event]


def decoded(batch: Batch, seen: Seen, where: str) -> list[Event]:
    """The events of a batch; one by one where they do not all have the expected form."""
    events = tried(batch.text, seen)
    return _one_by_one(batch, seen, where) if events is None else events


def _one_by_one(batch: Batch, seen: Seen, where: str) -> list[Event]:
    """The events that can be read; an error that names the first that cannot if there are many."""
    spans, events = values(batch.text), []
    for k, (begin, end) in enumerate(spans):
        try:
            event = _lenient(batch.text[begin:end])
            if event.__class__ is Event:
                events.append(event)
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError) as error:
            seen.malformed += 1
            if seen.malformed > max(1, _MOST_MALFORMED * (seen.events + len(spans))):
                raise InputError(
                    f"event {seen.events + k} of `{where}`, at byte {batch.offset + begin}, "
                    f"cannot be read: {error}",
                    hint="the trace was damaged or written by something else; record it again",
                ) from None
    seen.events += len(spans)
    return events


def _lenient(text: bytes) -> Event | None:
    """One event, with arguments of unexpected types left out; none where it does not last."""
    try:
        return _ONE_DECODER.decode(text)
    except msgspec.ValidationError:
        found = msgspec.json.decode(text)
    if not isinstance(found, dict):
        raise ValueError(f"expected an object, got {type(found).__name__}")
    if found.get("ph") != "X":
        return None
    args = found.pop("args", None)
    event = msgspec.convert({k: found[k] for k in found if k in _PLAIN}, Event, strict=False)
    event.args = _lenient_args(args) if isinstance(args, dict) else None
    return event


_PLAIN = frozenset(Event.__struct_fields__)


def _lenient_args(args: dict[str, Any]) -> Args:
    made = Args()
    for info in msgspec.structs.fields(Args):
        if info.encode_name not in args:
            continue
        value = args[info.encode_name]
        try:
            if info.type is Raw:
                setattr(made, info.name, Raw(msgspec.json.encode(value)))
            else:
                setattr(made, info.name, msgspec.convert(value, info.type, strict=False))
        except msgspec.ValidationError:
            continue
    return made
