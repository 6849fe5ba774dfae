"""One rank's step as columns of a graph: op, layer, phase, collective, duration of every task.

op       the innermost operator, under one word whatever backend runs it
layer    the innermost module where the trace knows modules or `layer:` notes; otherwise the
         outermost forward operator, counted by name (`conv2d.3`). Backward operators take the
         layer of the forward operator with their sequence number: of several with one number
         the last, which is the one that made the backward node (so do torch's own flows)
phase    notes of the data loader and the optimizer, but for a closure that the latter was given
         (as Lightning does); backward by its thread or sequence number; what comes before the
         first backward is forward, from the first loss operator on loss; behind the last, update

Kernels of several streams that overlap share the device: each takes the part that its blocks fill
(all of it with at least one block a multiprocessor), and together they are slowed until they fit.
A kernel's duration is its work, the time it would have taken alone; collectives are left out, since
they wait for the network:

    work = ∫ min(1, 1 / Σ demand of all that ran) dt      over its run      → `_alone`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from foretell.graph import COLUMNS, Kind, LaneKind, Phase, Source
from foretell.graph.graph import NONE, Array, group_text
from foretell.trace.decode import NO_ID
from foretell.trace.events import Events, Message, What
from foretell.trace.runs import distinct, highest, strictly_increasing
from foretell.trace.step.tasks import RankStep, join
from foretell.trace.step.waits import Waits, ready_times, waits
from foretell.trace.words import (
    LAYER_NOTE,
    CallEffect,
    RangeKind,
    Shape,
    Texts,
    by_name,
    canonical,
    collective,
    element_bytes,
    is_collective,
    plain,
)

_MODULE = "nn.Module: "


@dataclass(frozen=True, eq=False)
class Labels:
    """Attributes of each position in a nest."""

    layer: Array  # number in `layers`
    phase: Array
    layers: list[str]  # 0 is none


def labels(d: RankStep) -> Labels:
    """Layer and phase of every place in the nest of a step."""
    phase = _phases(d)
    layers: dict[str, int] = {"": 0}
    layer = _forward_layers(d, phase, layers)
    return Labels(_backward_layers(d, phase, layer), phase, list(layers))


def _phases(d: RankStep) -> Array:
    n, e = d.event_tree, d.events
    start = e.start[n.event]
    backward = (n.tells & RangeKind.BACKWARD) > 0
    phase = np.full(len(start), Phase.FORWARD, np.uint8)
    if backward.any():
        first, last = start[backward].min(), e.end[n.event[backward]].max()
        on_main = e.place[n.event] == d.thread
        loss = np.flatnonzero(((n.tells & RangeKind.LOSS) > 0) & (start < first) & on_main)
        if len(loss):
            phase[(start >= start[loss].min()) & (start < first)] = Phase.LOSS
        phase[start >= last] = Phase.UPDATE
    phase[backward] = Phase.BACKWARD
    phase[((n.tells & RangeKind.UPDATE) > 0) & ~_in_closures(d, backward)] = Phase.UPDATE
    phase[(n.tells & RangeKind.LOAD) > 0] = Phase.LOAD
    return phase


def _in_closures(d: RankStep, backward: Array) -> Array:
    """Events in an optimizer's step before its backward pass ends: the step has a closure.

    An optimizer that steps inside a backward pass is no such case.
    """
    n, e = d.event_tree, d.events
    start, end = e.start[n.event], e.end[n.event]
    is_note = (e.what[n.event] == What.NOTE) & ((n.tells & RangeKind.UPDATE) > 0) & ~backward
    begun = np.sort(start[backward])
    found = np.zeros(len(start), bool)
    for k in np.flatnonzero(is_note).tolist():
        if np.searchsorted(begun, end[k]) > np.searchsorted(begun, start[k]):
            mine = backward & (start >= start[k]) & (start < end[k])
            found |= (start > start[k]) & (start < end[mine].max())
    return found


def _forward_layers(d: RankStep, phase: Array, layers: dict[str, int]) -> Array:
    """Layers of what is forward or loss, by module, by hierarchy, or by counting operators."""
    n, e = d.event_tree, d.events
    found = np.zeros(len(n.event), np.int64)
    is_forward = (phase == Phase.FORWARD) | (phase == Phase.LOSS)
    by_module = np.flatnonzero((n.layer != NONE) & is_forward)
    for place in distinct(n.layer[by_module]).tolist():
        text = e.texts[e.name[n.event[place]]].removeprefix(_MODULE).removeprefix(LAYER_NOTE)
        found[by_module[n.layer[by_module] == place]] = layers.setdefault(text, len(layers))
    rest = np.flatnonzero(is_forward & (n.layer == NONE) & (n.unit != NONE))
    named = _unit_layers(d, distinct(n.unit[rest]), layers)
    found[rest] = named[n.unit[rest]]
    return found


def _unit_layers(d: RankStep, units: Array, layers: dict[str, int]) -> Array:
    """A layer for each outermost operator: its module hierarchy, or its name and a count."""
    n, e = d.event_tree, d.events
    named = np.zeros(len(n.event), np.int64)
    counts: dict[str, int] = {}
    units = units[np.argsort(e.start[n.event[units]], kind="stable")]
    for unit in units.tolist():
        event = n.event[unit]
        text = e.texts[e.module[event]]
        if not text:
            name = plain(e.texts[e.name[event]])
            k = counts[name] = counts.get(name, -1) + 1
            text = f"{name}.{k}"
        named[unit] = layers.setdefault(text, len(layers))
    return named


def _backward_layers(d: RankStep, phase: Array, layer: Array) -> Array:
    """Layers of backward places, from the forward operator with the same sequence number."""
    n, e = d.event_tree, d.events
    sequence = e.sequence[n.event]
    is_op = (e.what[n.event] == What.OP) & (sequence != NO_ID)
    forward = np.flatnonzero(is_op & (phase != Phase.BACKWARD) & (layer != 0))
    forward = forward[np.argsort(e.start[n.event[forward]], kind="stable")]
    known = dict(zip(sequence[forward].tolist(), layer[forward].tolist(), strict=True))
    units = np.flatnonzero((n.unit == np.arange(len(n.unit))) & (phase == Phase.BACKWARD))
    of_unit = np.zeros(len(n.event), np.int64)
    before: dict[int, int] = {}
    for unit in units.tolist():  # in order of thread and start
        thread = int(e.place[n.event[unit]])
        # What has no forward operator (a gradient being stored) goes with what ran before it.
        before[thread] = known.get(int(sequence[unit]), before.get(thread, 0))
        of_unit[unit] = before[thread]
    inside = np.flatnonzero((phase == Phase.BACKWARD) & (n.unit != NONE))
    out = layer.copy()
    out[inside] = of_unit[n.unit[inside]]
    return out


def say_collectives(d: RankStep, op_place: Array, columns: dict[str, Array], texts: Texts) -> None:
    """Fill in kind, op, bytes, group and phase of communication; `op_place` is who launched it."""
    e, work = d.events, d.device.work
    comm = by_name(e.texts, e.name[work.event], lambda text: int(is_collective(text)))
    for k in np.flatnonzero(comm).tolist():
        kind, op, size, group = _message(d, k, int(op_place[k]))
        columns["kind"][k], columns["op"][k] = kind, texts.number(op)
        columns["comm_bytes"][k], columns["group"][k] = size, texts.number(group)
        columns["phase"][k] = Phase.COMMUNICATE


def _message(d: RankStep, k: int, op_place: int) -> tuple[Kind, str, float, str]:
    """Kind, op, bytes and group: from the kernel's own words, its operator's, or the note's."""
    e, event = d.events, d.device.work.event[k]
    message = e.messages[e.message[event]]
    if message is None and op_place != NONE:
        message = e.messages[e.message[d.event_tree.event[op_place]]]
    note = _note_of(d, k)
    text = message.collective if message else e.texts[e.name[note]] if note != NONE else ""
    kind, op = collective(e.texts[e.name[event]], text)
    if message:
        size = float(max(message.sent, message.received) * element_bytes(message.element))
    else:
        size = Shape(e.shapes[e.shape[note]]).bytes if note != NONE else 0.0
    return kind, op, size, _group(e, message)


def _note_of(d: RankStep, k: int) -> int:
    """The event of the note around the launch of a piece of work."""
    host = d.device.host[k]
    label = d.host.label[host] if host != NONE else NONE
    if label == NONE or d.event_tree.note[label] == NONE:
        return NONE
    return int(d.event_tree.event[d.event_tree.note[label]])


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


_LEAST_DEMAND = 1e-3  # a kernel of one block still takes something


@dataclass(frozen=True, eq=False)
class Shared:
    """Which device tasks share their device, with what demand, and their time alone."""

    work: Array
    device: Array
    demand: Array
    seconds: Array


def shared(d: RankStep, source: Array, target: Array) -> Shared:
    """The kernels that compete; `source` and `target` are the event edges between them."""
    kernels = _kernels(d)
    device = _device_of(d)[kernels]
    ready = ready_times(d, source, target)[kernels]
    start, end = d.device.work.start[kernels], d.device.work.end[kernels]
    stream = d.device.work.stream[kernels]
    marked = np.zeros(len(kernels), bool)
    for one in distinct(device).tolist():
        rows = np.flatnonzero(device == one)
        marked[rows] = _compete(stream[rows], ready[rows], start[rows], end[rows])
    chosen = kernels[marked]
    waves = d.events.waves[d.device.work.event[chosen]]
    demand = np.clip(np.where(waves > 0, waves, 1.0), _LEAST_DEMAND, 1.0)
    seconds = np.zeros(len(chosen))
    for one in distinct(device[marked]).tolist():
        rows = np.flatnonzero(device[marked] == one)
        seconds[rows] = _alone(start[marked][rows], end[marked][rows], demand[rows])
    return Shared(chosen, device[marked], demand, seconds)


def _kernels(d: RankStep) -> Array:
    """Work of the step that multiprocessors do: kernels, fills, copies within the device."""
    e, work = d.events, d.device.work
    uses_it = by_name(e.texts, e.name[work.event], lambda text: int(_is_computed(text)))
    return np.flatnonzero((uses_it > 0) & ~d.device.is_ahead)


def _is_computed(name: str) -> bool:
    is_transfer = name.startswith("Memcpy") and "DtoD" not in name
    return not is_transfer and not is_collective(name)


def _device_of(d: RankStep) -> Array:
    device = np.array([device for device, _ in d.events.streams] or [0])
    found: Array = device[d.device.work.stream]
    return found


def _compete(stream: Array, ready: Array, start: Array, end: Array) -> Array:
    """Which kernels were ready or running while one of another stream ran, and which those are."""
    marked = np.zeros(len(stream), bool)
    rows = {s: np.flatnonzero(stream == s) for s in distinct(stream).tolist()}
    for one, mine in rows.items():
        for other, theirs in rows.items():
            if one == other:
                continue
            low = np.searchsorted(end[theirs], ready[mine], side="right")
            high = np.searchsorted(start[theirs], end[mine], side="left")
            hit = high > low
            marked[mine[hit]] = True
            edges = np.zeros(len(theirs) + 1, np.int64)
            np.add.at(edges, low[hit], 1)
            np.add.at(edges, high[hit], -1)
            marked[theirs[np.cumsum(edges[:-1]) > 0]] = True
    return marked


def _alone(start: Array, end: Array, demand: Array) -> Array:
    """The time each kernel would have taken with the device to itself."""
    time = np.concatenate([start, end])
    change = np.concatenate([demand, -demand])
    ranked = np.argsort(time, kind="stable")
    level = 1.0 / np.maximum(1.0, np.cumsum(change[ranked]))
    passed = np.concatenate([[0.0], np.cumsum(np.diff(time[ranked]) * level[:-1])])
    at = np.empty(len(time), np.int64)
    at[ranked] = np.arange(len(time))
    n = len(start)
    found: Array = passed[at[n:]] - passed[at[:n]]
    return found


_TICK = 1e-12  # seconds between things issued at the same instant
_AGES = 1e6  # seconds: what was there before a step comes before all that is in it
_CAST = "aten::to"
_DRAINS = (CallEffect.DRAIN_DEVICE, CallEffect.DRAIN_STREAM, CallEffect.DRAIN_EVENT)


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
    step: RankStep


def part(d: RankStep, texts: Texts) -> Part:
    """The columns of one rank."""
    w, found = waits(d), labels(d)
    both = shared(d, w.source, w.target)
    lane_of_thread, lane_of_stream, lanes = _lanes(d)
    host, device = _host_columns(d, w, found, texts), _device_columns(d, found, texts)
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


def _column(name: str, d: RankStep, host: dict[str, Array], device: dict[str, Array]) -> Array:
    """A column of host and device tasks, as a graph keeps it; zero where one of them has none."""
    found = np.zeros(len(d.host) + len(d.device), COLUMNS[name].dtype)
    if name in host:
        found[: len(d.host)] = host[name]
    if name in device:
        found[len(d.host) :] = device[name]
    return found


def _lanes(d: RankStep) -> tuple[Array, Array, list[tuple[str, LaneKind]]]:
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


def _stream_kind(d: RankStep, stream: int) -> LaneKind:
    """The purpose of a stream: the kind of work that takes most of its time."""
    e, work = d.events, d.device.work
    mine = work.stream == stream
    event, took = work.event[mine], (work.end - work.start)[mine]
    comm = np.array([is_collective(e.texts[k]) for k in e.name[event].tolist()])
    if took[comm].sum() > 0.5 * took.sum():
        return LaneKind.COMM
    return LaneKind.COMPUTE if (e.what[event] == What.KERNEL).any() else LaneKind.COPY


def _host_columns(d: RankStep, w: Waits, found: Labels, texts: Texts) -> dict[str, Array]:
    """A call is named for its operator; a piece of operator time for the outermost around it."""
    h, n, e = d.host, d.event_tree, d.events
    known = h.label != NONE
    name = _at(e.name[n.event], h.label)
    op_place = np.where(known, _at(n.op, h.label, NONE), NONE)
    ops = _words(e.texts, _at(e.name[n.event], op_place), texts, canonical)
    units = _words(e.texts, _at(e.name[n.event], h.unit), texts, plain)
    own = _words(e.texts, np.where(known, name, 0), texts, str)
    is_load = ~h.is_call & (_at(n.tells, h.label) & RangeKind.LOAD > 0)
    is_idle = ~h.is_call & ~is_load & (op_place == NONE)  # a note's own time, or no operator's
    op = np.where(h.is_call, own, ops)
    op[is_load], op[is_idle] = texts.number("load"), texts.number("python")
    drains = h.is_call & np.isin(_at(n.call_effect, h.label), _DRAINS)
    kind = np.where(h.is_return | drains, Kind.SYNC, Kind.HOST)
    kind[is_load] = Kind.LOAD
    return {
        "kind": kind,
        "op": op,
        "name": np.where(h.is_call, ops, np.where(is_idle, own, units)),
        "seconds": w.seconds,
        "gap": w.gap,
        "layer": _at(texts.table(found.layers)[found.layer], h.label),
        "phase": _at(found.phase, h.label, Phase.NONE),
        "shape": _cast_shapes(d, np.where(h.is_call, NONE, op_place), texts),
    }


def _cast_shapes(d: RankStep, op_place: Array, texts: Texts) -> Array:
    """The requested format of a cast that launches nothing: in half precision it would."""
    n, e = d.event_tree, d.events
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
    """The code of what each name means, looked up once a name."""
    unique, inverse = np.unique(number, return_inverse=True)
    found: Array = texts.table(meaning(names[k]) for k in unique.tolist())[inverse.reshape(-1)]
    return found


def _device_columns(d: RankStep, found: Labels, texts: Texts) -> dict[str, Array]:
    e, n, work = d.events, d.event_tree, d.device.work
    op_place = _launching_op(d)
    shapes, dtypes = _shapes(e.shapes, _at(e.shape[n.event], op_place), texts)
    is_kernel = e.what[work.event] == What.KERNEL
    columns = {
        "kind": np.where(is_kernel, Kind.KERNEL, Kind.COPY),
        "op": _words(e.texts, _at(e.name[n.event], op_place), texts, canonical),
        "name": _words(e.texts, e.name[work.event], texts, str),
        "seconds": d.device.pace.seconds.copy(),
        "gap": d.device.pace.gap,
        "layer": _at(texts.table(found.layers)[found.layer], op_place),
        "phase": _at(found.phase, op_place, Phase.NONE),
        "dtype": dtypes,
        "shape": shapes,
        "bytes": e.size[work.event],
        "comm_bytes": np.zeros(len(work)),
        "group": np.zeros(len(work), np.int64),
    }
    say_collectives(d, op_place, columns, texts)
    return columns


def _launching_op(d: RankStep) -> Array:
    """The place of the operator that launched each piece of work: by its call, or external id."""
    n, e = d.event_tree, d.events
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


def _issue_times(d: RankStep) -> Array:
    """When each task was put on its lane, such that numbers by it keep the order of every lane."""
    h, work = d.host, d.device.work
    host = strictly_increasing(h.start, h.thread, 2 * _TICK)
    known = d.device.host != NONE
    device = np.where(d.device.is_ahead, work.start - _AGES, work.start)
    device[known] = host[d.device.host[known]] + _TICK
    return np.concatenate([host, highest(device, work.stream)])
