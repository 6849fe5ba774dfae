"""A trace's JSON taken apart while it is read: what stands before, around and between its events.

Events are sent on in batches of whole JSON values, so that a file larger than memory can be read.
What stands around them is small and parsed as a whole; where it is not JSON the events still count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from foretell.errors import InputError
from foretell.io import limits, too_large
from foretell.trace.brackets import Inside, brackets, last_value
from foretell.trace.decode import Batch, Event, Seen, decoded, tried
from foretell.trace.source import Member

_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_NODES = re.compile(rb'"(nodes|workload_graph)"\s*:\s*\[')
_BETWEEN = b"\n  },\n  {"  # two events as Kineto writes them
_LONGEST_KEY = 4096  # bytes of the key before a list, with the blanks around it


@dataclass
class Around:
    """What stands around the events, known once they have all been read."""

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
