"""What is said of work that moves data between ranks: which collective, how much, among whom."""

from __future__ import annotations

import msgspec
import numpy as np

from foretell.graph import Kind, Phase
from foretell.graph.columns import NONE, Array
from foretell.graph.groups import group_text
from foretell.trace.events import Events, Message
from foretell.trace.step.draft import Draft
from foretell.trace.words import Shape, Texts, by_name, collective, element_bytes, is_collective


def say_collectives(d: Draft, op_place: Array, columns: dict[str, Array], texts: Texts) -> None:
    """Fill in kind, op, bytes, group and phase of communication; `op_place` is who launched it."""
    e, work = d.events, d.device.work
    comm = by_name(e.texts, e.name[work.event], lambda text: int(is_collective(text)))
    for k in np.flatnonzero(comm).tolist():
        kind, op, size, group = _said(d, k, int(op_place[k]))
        columns["kind"][k], columns["op"][k] = kind, texts.number(op)
        columns["comm_bytes"][k], columns["group"][k] = size, texts.number(group)
        columns["phase"][k] = Phase.COMMUNICATE


def _said(d: Draft, k: int, op_place: int) -> tuple[Kind, str, float, str]:
    """Kind, op, bytes and group: from the kernel's own words, its operator's, or the note's."""
    e, event = d.events, d.device.work.event[k]
    message = e.messages[e.message[event]]
    if message is None and op_place != NONE:
        message = e.messages[e.message[d.nest.event[op_place]]]
    note = _note_of(d, k)
    said = message.collective if message else e.texts[e.name[note]] if note != NONE else ""
    kind, op = collective(e.texts[e.name[event]], said)
    if message:
        size = float(max(message.sent, message.received) * element_bytes(message.element))
    else:
        size = Shape(e.shapes[e.shape[note]]).bytes if note != NONE else 0.0
    return kind, op, size, _group(e, message)


def _note_of(d: Draft, k: int) -> int:
    """The event of the note around the launch of a piece of work."""
    host = d.device.host[k]
    label = d.host.label[host] if host != NONE else NONE
    if label == NONE or d.nest.note[label] == NONE:
        return NONE
    return int(d.nest.event[d.nest.note[label]])


def _group(events: Events, message: Message | None) -> str:
    """The ranks a collective spans, as text: what it says itself, or else all ranks of the job."""
    if message and message.group:
        try:
            found = msgspec.json.decode(message.group.encode())
            found = msgspec.json.decode(found.encode()) if isinstance(found, str) else found
            return group_text(int(r) for r in found)
        except (msgspec.DecodeError, TypeError, ValueError):
            pass  # some versions cut long lists short: `[0, 1, 2, ..., 127]`
    info = events.facts.get("distributedInfo")
    world = info.get("world_size") if isinstance(info, dict) else None
    return group_text(range(world)) if isinstance(world, int) and world > 0 else ""
