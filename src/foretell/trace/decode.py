"""JSON of a trace into typed events, in batches of whole values, while the file is read.

Where a value begins and ends is found from quotes and brackets alone, all at once (no compiled
loop: loading one costs more than reading most traces). Events of the expected form are decoded
fast; others (a number as text, an argument of another type) one by one, without the arguments that
cannot be understood. Events that are not JSON are passed over and counted, up to one in a hundred;
then the trace counts as broken. What stands around the events is small and parsed as a whole.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Union

import msgspec
import numpy as np
from msgspec import Raw

from foretell.errors import InputError
from foretell.graph.graph import Array
from foretell.io import limits, too_large
from foretell.trace.source import Member

_QUOTE, _BACKSLASH = 34, 92
_OPEN, _CLOSE = (123, 91), (125, 93)  # { [ and } ]


@dataclass
class Inside:
    """How deep in brackets, and whether in a string, the text so far has ended."""

    depth: int = 0
    quoted: bool = False


@dataclass(frozen=True, eq=False)
class Brackets:
    """The brackets of a text that are not in strings, and the depth behind each."""

    at: Array  # place in the text
    step: Array  # 1 opens, -1 closes
    depth: Array


def brackets(text: bytes, seen: int, inside: Inside) -> Brackets:
    """The brackets behind the first `seen` bytes; `inside` is carried on to the end of the text."""
    whole = np.frombuffer(text, np.uint8)
    code = whole[seen:]
    wanted = code == _QUOTE
    for bracket in (*_OPEN, *_CLOSE):
        wanted |= code == bracket
    at = np.flatnonzero(wanted)
    code = code[at]
    is_quote = (code == _QUOTE) & ~_are_escaped(whole, seen + at, code)
    quoted = (np.cumsum(is_quote) + inside.quoted) % 2 == 1
    is_bracket = (code != _QUOTE) & ~quoted
    at, code = seen + at[is_bracket], code[is_bracket]
    step = np.where(np.isin(code, _OPEN), 1, -1)
    depth = inside.depth + np.cumsum(step)
    inside.depth = int(depth[-1]) if len(depth) else inside.depth
    inside.quoted = bool(quoted[-1]) if len(quoted) else inside.quoted
    return Brackets(at, step, depth)


def _are_escaped(whole: Array, at: Array, code: Array) -> Array:
    """Which of these bytes are quotes behind an odd number of backslashes."""
    before = whole[np.maximum(at - 1, 0)]
    found: Array = (code == _QUOTE) & (before == _BACKSLASH) & (at > 0)
    for k in np.flatnonzero(found).tolist():
        first = int(at[k]) - 1
        while first >= 0 and whole[first] == _BACKSLASH:
            first -= 1
        found[k] = (int(at[k]) - 1 - first) % 2 == 1
    return found


def last_value(b: Brackets) -> tuple[int, int]:
    """(end of the last whole value, place of the bracket that closes the list around it or -1)."""
    beyond = np.flatnonzero(b.depth < 0)
    close = int(b.at[beyond[0]]) if len(beyond) else -1
    whole = np.flatnonzero((b.depth == 0) & (b.step < 0))
    if len(beyond):
        whole = whole[whole < beyond[0]]
    return int(b.at[whole[-1]]) + 1 if len(whole) else 0, close


def values(text: bytes) -> list[tuple[int, int]]:
    """Where each value in brackets begins and ends in a list without its own brackets."""
    b = brackets(text, 0, Inside())
    begin = b.at[(b.depth == 1) & (b.step > 0)]
    end = b.at[(b.depth == 0) & (b.step < 0)] + 1
    return list(zip(begin.tolist(), end.tolist(), strict=False))


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
    """How many events have been seen so far, how many were not JSON, and what instants told."""

    events: int = 0
    malformed: int = 0
    allocated: float = 0.0  # the most bytes that PyTorch had given out on a device (`[memory]`)


class Args(msgspec.Struct, gc=False):
    """Arguments of an event that are read; the rest is skipped unparsed.

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


class Allocation(msgspec.Struct, gc=False):
    """Arguments of a `[memory]` instant: what `profile_memory` records at each allocation."""

    total: float = msgspec.field(default=0.0, name="Total Allocated")
    device_type: int = msgspec.field(default=0, name="Device Type")  # of c10::DeviceType; 0: CPU


class Instant(msgspec.Struct, gc=False, tag_field="ph", tag="i"):
    """An event without length."""

    name: str | None = None
    args: Allocation | None = None


NO_ARGS = Args()
# Events of other phases of the Trace Event Format, of which nothing is read; no profiler of torch
# writes any but these.
_PASSED = [
    msgspec.defstruct(f"Passed{k}", [], tag_field="ph", tag=phase, gc=False)
    for k, phase in enumerate("BEICMbnestf")
]
_ONE = Union[Event, Instant, *_PASSED]  # type: ignore[valid-type]
_DECODER: msgspec.json.Decoder[list[Event]] = msgspec.json.Decoder(list[_ONE])
_ONE_DECODER: msgspec.json.Decoder[Event | Instant] = msgspec.json.Decoder(_ONE)


def tried(text: bytes | memoryview, seen: Seen) -> list[Event] | None:
    """The events of a text; None where it is not a list of events of the expected form."""
    try:
        found = _DECODER.decode(b"".join((b"[", text, b"]")))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    seen.events += len(found)
    return _lasting(found, seen)


def _lasting(events: list[Any], seen: Seen) -> list[Event]:
    """The events that last; of allocations on a device the largest total is noted."""
    given_out = (
        e.args.total for e in events
        if e.__class__ is Instant and e.name == "[memory]" and e.args and e.args.device_type > 0
    )  # fmt: skip
    seen.allocated = max(seen.allocated, max(given_out, default=0.0))
    return [e for e in events if e.__class__ is Event]


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
            events += [] if event is None else _lasting([event], seen)
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


def _lenient(text: bytes) -> Event | Instant | None:
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


_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_NODES = re.compile(rb'"(nodes|workload_graph)"\s*:\s*\[')
_BETWEEN = b"\n  },\n  {"  # two events as Kineto writes them
_LONGEST_KEY = 4096  # bytes of the key before a list, with the blanks around it


@dataclass
class Around:
    """Metadata of the file besides its events."""

    head: bytes = b""
    tail: bytes = b""
    notes: list[str] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        """The other keys of the trace; none, and a note, where they are not JSON."""
        if not self.head:
            return {}
        try:
            found = msgspec.json.decode(self.head + b'"traceEvents": []' + self.tail)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self.notes.append(
                f"what stands around the events is not JSON and was left out: {error}"
            )
            return {}
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class Opened:
    """A file whose beginning has been read, and what that shows it to hold."""

    name: str
    text: bytes
    blocks: Iterator[bytes]
    form: str  # one of FORMS, or nothing

    def whole(self) -> bytes:
        """All of the file at once, within the limit of a document."""
        return gathered(self.text, self.blocks, limits().document, self.name)


def gathered(text: bytes, blocks: Iterator[bytes], most: int, name: str) -> bytes:
    """A text and all that follows it; an error where that is more than may be held at once."""
    parts, size = [text], len(text)
    for block in blocks:
        parts.append(block)
        size += len(block)
        if size > most:
            raise too_large(name, most)
    return b"".join(parts)


FORMS = ("events", "execution", "chakra", "chakra json")  # in the order in which they are preferred


def opened(member: Member) -> Opened:
    """Read enough of a file to tell what it holds."""
    blocks, most = member.blocks(), limits().event
    text = bytearray()
    for block in blocks:
        known = max(0, len(text) - _LONGEST_KEY)
        text += block
        if not _is_open(text, known):
            break
        if len(text) > most:
            raise InputError(
                f"`{member.name}` has no events in its first {most >> 20} MiB",
                hint="is it a trace? a sound one of that kind needs a larger FORETELL_MAX_EVENT",
            )
    return Opened(member.name, bytes(text), blocks, _form(text))


def _is_open(text: bytearray, known: int) -> bool:
    """Whether more must be read to know what the file is; looks behind what is known already."""
    if text[:_LONGEST_KEY].lstrip()[:1] != b"{":
        return False
    return not (_EVENTS.search(text, known) or _NODES.search(text, known))


def _form(text: bytes | bytearray) -> str:
    start = text[:4096].lstrip()[:1]
    if start not in (b"{", b"["):
        from foretell.trace.chakra import is_chakra

        return "chakra" if is_chakra(bytes(text)) else ""
    if _EVENTS.search(text) or re.match(rb"\s*\[\s*(\{|\]|$)", text):
        return "events"
    found = _NODES.search(text)
    return "" if not found else "execution" if found[1] == b"nodes" else "chakra json"


def batches(file: Opened, around: Around, seen: Seen) -> Iterator[list[Event]]:
    """The events of a file in batches; fills `around` with what else there is.

    Where events are set as Kineto sets them, a text that ends with one of them and decodes holds
    whole events: text cut inside of an event, or behind the list, does not. All else is cut where
    the brackets say, which takes longer.
    """
    begin = _begin(file, around)
    offset, rest = begin, file.text[begin:]
    inside, known = Inside(), 0
    while True:
        cut = _kineto_cut(rest)
        events = tried(memoryview(rest)[:cut], seen) if cut else None
        if events is None:
            cut, close = last_value(brackets(rest, known, inside))
            if cut:
                yield decoded(Batch(rest[:cut], offset), seen, file.name)
            if close >= 0:
                most = limits().event
                around.tail = gathered(rest[close + 1 :], file.blocks, most, file.name)
                return
        else:
            yield events
            inside = Inside()
        following = rest[cut:].lstrip(b", \t\r\n")
        offset += len(rest) - len(following)
        known = 0 if events is not None else len(following)
        block = _more(file, 0 if cut else len(following))
        if not block and events is None:
            _check_end(following, bool(around.head), offset, file.name)
            return
        rest = following + block


def _more(file: Opened, held: int) -> bytes:
    """The next bytes: as many again as are held of an event without end, so that all is linear."""
    if held > limits().event:
        raise InputError(
            f"`{file.name}` has an event of more than {held >> 20} MiB",
            hint="it is no trace, or its end is missing; a sound one needs FORETELL_MAX_EVENT",
        )
    parts, size = [], 0
    for block in file.blocks:
        parts.append(block)
        size += len(block)
        if size >= held:
            break
    return b"".join(parts)


def _begin(file: Opened, around: Around) -> int:
    """Where the events begin; what stands before them is noted."""
    found = _EVENTS.search(file.text)
    if not found:
        return file.text.index(b"[") + 1
    around.head = file.text[: found.start()]
    return found.end()


def _kineto_cut(text: bytes) -> int:
    """The end of the last event with another behind it, 0 where none is set as Kineto sets it."""
    at = text.rfind(_BETWEEN)
    return at + _BETWEEN.index(b",") if at >= 0 else 0


def _check_end(rest: bytes, is_object: bool, offset: int, where: str) -> None:
    """A bare list of events may lack its end, as Chrome allows; anything else was cut short."""
    if is_object or rest.strip(b" \t\r\n,"):
        at = offset + len(rest)
        raise InputError(
            f"`{where}` ends at byte {at} in the middle of its events",
            hint="the trace was cut short; record or copy it again",
        )
