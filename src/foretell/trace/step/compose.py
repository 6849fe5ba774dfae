"""One rank's step as the columns of a graph: what its tasks are, take and belong to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from foretell.graph import COLUMNS, Kind, LaneKind, Phase, Source
from foretell.graph.columns import NONE, Array
from foretell.trace.events import What
from foretell.trace.runs import distinct, highest, rising
from foretell.trace.step.device import join
from foretell.trace.step.draft import Draft
from foretell.trace.step.label import Labels, labels
from foretell.trace.step.messages import say_collectives
from foretell.trace.step.share import Shared, shared
from foretell.trace.step.waits import Waits, waits
from foretell.trace.words import Does, Shape, Tells, Texts, canonical, is_collective, plain

_TICK = 1e-12  # seconds between things issued at the same instant
_AGES = 1e6  # seconds: what was there before a step comes before all that is in it
_CAST = "aten::to"
_DRAINS = (Does.DRAIN_DEVICE, Does.DRAIN_STREAM, Does.DRAIN_EVENT)


@dataclass(frozen=True, eq=False)
class Part:
    """The tasks of one rank, host tasks first; text columns hold numbers in shared `Texts`."""

    columns: dict[str, Array]
    issued: Array  # when each task was put on its lane: what numbers go by
    start: Array  # measured
    end: Array
    recorded: Array
    is_ahead: Array
    waits: Waits
    lanes: list[tuple[str, LaneKind]]
    drain_lane: Array
    shared: Shared
    draft: Draft


def part(d: Draft, texts: Texts) -> Part:
    """The columns of one rank."""
    w, said = waits(d), labels(d)
    both = shared(d, w.source, w.target)
    lane_of_thread, lane_of_stream, lanes = _lanes(d)
    host, device = _host_columns(d, w, said, texts), _device_columns(d, said, texts)
    device["seconds"][both.work] = both.seconds
    host["lane"] = lane_of_thread[d.host.thread]
    device["lane"] = lane_of_stream[d.device.work.stream]
    size = len(d.host) + len(d.device)
    none = {"rank": np.full(size, d.rank), "source": np.full(size, Source.MEASURED, np.uint8)}
    return Part(
        {**{k: _column(k, d, host, device) for k in {**host, **device}}, **none},
        _issue_times(d),
        np.concatenate([w.start, d.device.work.start]),
        np.concatenate([d.host.end, d.device.work.end]),
        np.concatenate([d.host.recorded, np.zeros((len(d.device), 2), np.int32)]),
        np.concatenate([np.zeros(len(d.host), bool), d.device.is_ahead]),
        w,
        lanes,
        lane_of_stream[w.drain_stream],
        both,
        d,
    )


def _column(name: str, d: Draft, host: dict[str, Array], device: dict[str, Array]) -> Array:
    """A column of host and device tasks, as a graph keeps it; zero where one of them has none."""
    found = np.zeros(len(d.host) + len(d.device), COLUMNS[name].dtype)
    if name in host:
        found[: len(d.host)] = host[name]
    if name in device:
        found[len(d.host) :] = device[name]
    return found


def _lanes(d: Draft) -> tuple[Array, Array, list[tuple[str, LaneKind]]]:
    """Lanes of threads, the main one first, then of streams."""
    lanes: list[tuple[str, LaneKind]] = []
    thread = np.full(max(len(d.events.threads), 1), NONE, np.int64)
    used = distinct(np.append(d.host.thread, d.thread)).tolist()
    for k in sorted(used, key=lambda k: k != d.thread):
        thread[k] = len(lanes)
        name = d.events.threads[k][1] if d.events.threads else "host"
        lanes.append((f"thread {name}", LaneKind.HOST))
    stream = np.full(max(len(d.events.streams), 1), NONE, np.int64)
    running = distinct(d.device.work.stream).tolist()
    devices = {d.events.streams[k][0] for k in running}
    for k in running:
        device, name = d.events.streams[k]
        stream[k] = len(lanes)
        whose = f"device {device} " if len(devices) > 1 else ""
        lanes.append((f"{whose}stream {name}", _stream_kind(d, k)))
    return thread, stream, lanes


def _stream_kind(d: Draft, stream: int) -> LaneKind:
    """What a stream is for: what it spends most of its time on."""
    e, work = d.events, d.device.work
    mine = work.stream == stream
    event, took = work.event[mine], (work.end - work.start)[mine]
    comm = np.array([is_collective(e.texts[k]) for k in e.name[event].tolist()])
    if took[comm].sum() > 0.5 * took.sum():
        return LaneKind.COMM
    return LaneKind.COMPUTE if (e.what[event] == What.KERNEL).any() else LaneKind.COPY


def _host_columns(d: Draft, w: Waits, said: Labels, texts: Texts) -> dict[str, Array]:
    """A call is named for its operator; a piece of operator time for the outermost around it."""
    h, n, e = d.host, d.nest, d.events
    known = h.label != NONE
    name = _at(e.name[n.event], h.label)
    op_place = np.where(known, _at(n.op, h.label, NONE), NONE)
    ops = _words(e.texts, _at(e.name[n.event], op_place), texts, canonical)
    units = _words(e.texts, _at(e.name[n.event], h.unit), texts, plain)
    own = _words(e.texts, np.where(known, name, 0), texts, str)
    is_load = ~h.is_call & (_at(n.tells, h.label) & Tells.LOAD > 0)
    is_idle = ~h.is_call & ~is_load & (op_place == NONE)  # a note's own time, or no operator's
    op = np.where(h.is_call, own, ops)
    op[is_load], op[is_idle] = texts.number("load"), texts.number("python")
    drains = h.is_call & np.isin(_at(n.does, h.label), _DRAINS)
    kind = np.where(h.is_return | drains, Kind.SYNC, Kind.HOST)
    kind[is_load] = Kind.LOAD
    return {
        "kind": kind,
        "op": op,
        "name": np.where(h.is_call, ops, np.where(is_idle, own, units)),
        "seconds": w.seconds,
        "gap": w.gap,
        "layer": _at(texts.table(said.layers)[said.layer], h.label),
        "phase": _at(said.phase, h.label, Phase.NONE),
        "shape": _cast_shapes(d, np.where(h.is_call, NONE, op_place), texts),
    }


def _cast_shapes(d: Draft, op_place: Array, texts: Texts) -> Array:
    """What a change of format was asked for, where it launches nothing: half precision would."""
    n, e = d.nest, d.events
    named = [k for k, text in enumerate(e.texts) if text == _CAST]
    is_cast = (op_place != NONE) & np.isin(_at(e.name[n.event], op_place), named)
    found = np.zeros(len(op_place), np.int64)
    found[is_cast] = _shapes(e.shapes, e.shape[n.event[op_place[is_cast]]], texts)[0]
    return found


def _at(values: Array, place: Array, otherwise: int = 0) -> Array:
    """Values at places, something else where a place is NONE."""
    if not len(values):
        return np.full(len(place), otherwise, np.int64)
    return np.where(place != NONE, values[place], otherwise)


def _words(
    names: Sequence[str], number: Array, texts: Texts, meaning: Callable[[str], str]
) -> Array:
    """The number of what each name means, asked once a name."""
    unique, inverse = np.unique(number, return_inverse=True)
    found: Array = texts.table(meaning(names[k]) for k in unique.tolist())[inverse.reshape(-1)]
    return found


def _device_columns(d: Draft, said: Labels, texts: Texts) -> dict[str, Array]:
    e, n, work = d.events, d.nest, d.device.work
    op_place = _launching_op(d)
    shapes, dtypes = _shapes(e.shapes, _at(e.shape[n.event], op_place), texts)
    is_kernel = e.what[work.event] == What.KERNEL
    columns = {
        "kind": np.where(is_kernel, Kind.KERNEL, Kind.COPY),
        "op": _words(e.texts, _at(e.name[n.event], op_place), texts, canonical),
        "name": _words(e.texts, e.name[work.event], texts, str),
        "seconds": d.device.pace.seconds.copy(),
        "gap": d.device.pace.gap,
        "layer": _at(texts.table(said.layers)[said.layer], op_place),
        "phase": _at(said.phase, op_place, Phase.NONE),
        "dtype": dtypes,
        "shape": shapes,
        "bytes": e.size[work.event],
        "comm_bytes": np.zeros(len(work)),
        "group": np.zeros(len(work), np.int64),
    }
    say_collectives(d, op_place, columns, texts)
    return columns


def _launching_op(d: Draft) -> Array:
    """The place of the operator that launched each piece of work: by its call, or external id."""
    n, e = d.nest, d.events
    label = _at(d.host.label, d.device.host, NONE)
    found = _at(n.op, label, NONE)
    lost = np.flatnonzero((found == NONE) & ~d.device.is_ahead)
    ops = np.flatnonzero(e.what[n.event] == What.OP)
    found[lost] = join(e.external[d.device.work.event[lost]], e.external[n.event[ops]], ops)
    return found


def _shapes(
    shapes: Sequence[tuple[bytes, bytes, bytes]], number: Array, texts: Texts
) -> tuple[Array, Array]:
    """Text and number format of the inputs of each operator, worked out once a shape."""
    unique, inverse = np.unique(number, return_inverse=True)
    made = [Shape(shapes[k]) for k in unique.tolist()]
    text = texts.table(s.text() if s.dims else "" for s in made)
    dtype = np.array([int(s.dtype) for s in made], np.int64)
    return text[inverse.reshape(-1)], dtype[inverse.reshape(-1)]


def _issue_times(d: Draft) -> Array:
    """When each task was put on its lane, such that numbers by it keep the order of every lane."""
    h, work = d.host, d.device.work
    host = rising(h.start, h.thread, 2 * _TICK)
    known = d.device.host != NONE
    device = np.where(d.device.is_ahead, work.start - _AGES, work.start)
    device[known] = host[d.device.host[known]] + _TICK
    return np.concatenate([host, highest(device, work.stream)])
