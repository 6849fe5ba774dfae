"""Op, layer and phase of every host event of a step, without help from the user.

op       the innermost operator, under one word whatever backend runs it
layer    the innermost module where the trace knows modules or `layer:` notes; otherwise the
         outermost forward operator, counted by name (`conv2d.3`). Backward operators take the
         layer of the forward operator with their sequence number: of several with one number
         the last, which is the one that made the backward node (so do torch's own flows)
phase    notes of the data loader and the optimizer, but for a closure that the latter was given
         (as Lightning does); backward by its thread or sequence number;
         what comes before the first backward is forward, from the first loss operator on loss;
         what comes behind the last is update
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretell.graph import Phase
from foretell.graph.columns import NONE, Array
from foretell.trace.decode import NO_ID
from foretell.trace.events import What
from foretell.trace.runs import distinct
from foretell.trace.step.draft import Draft
from foretell.trace.words import LAYER_NOTE, Tells, plain

_MODULE = "nn.Module: "


@dataclass(frozen=True, eq=False)
class Labels:
    """What is said of each place in a nest."""

    layer: Array  # number in `layers`
    phase: Array
    layers: list[str]  # 0 is none


def labels(d: Draft) -> Labels:
    """Layer and phase of every place in the nest of a step."""
    phase = _phases(d)
    layers: dict[str, int] = {"": 0}
    layer = _forward_layers(d, phase, layers)
    return Labels(_backward_layers(d, phase, layer), phase, list(layers))


def _phases(d: Draft) -> Array:
    n, e = d.nest, d.events
    start = e.start[n.event]
    backward = (n.tells & Tells.BACKWARD) > 0
    phase = np.full(len(start), Phase.FORWARD, np.uint8)
    if backward.any():
        first, last = start[backward].min(), e.end[n.event[backward]].max()
        on_main = e.place[n.event] == d.thread
        loss = np.flatnonzero(((n.tells & Tells.LOSS) > 0) & (start < first) & on_main)
        if len(loss):
            phase[(start >= start[loss].min()) & (start < first)] = Phase.LOSS
        phase[start >= last] = Phase.UPDATE
    phase[backward] = Phase.BACKWARD
    phase[((n.tells & Tells.UPDATE) > 0) & ~_in_closures(d, backward)] = Phase.UPDATE
    phase[(n.tells & Tells.LOAD) > 0] = Phase.LOAD
    return phase


def _in_closures(d: Draft, backward: Array) -> Array:
    """What runs in an optimizer's step before a backward pass ends there: it was given a closure.

    An optimizer that steps inside a backward pass is no such case.
    """
    n, e = d.nest, d.events
    start, end = e.start[n.event], e.end[n.event]
    is_note = (e.what[n.event] == What.NOTE) & ((n.tells & Tells.UPDATE) > 0) & ~backward
    begun = np.sort(start[backward])
    found = np.zeros(len(start), bool)
    for k in np.flatnonzero(is_note).tolist():
        if np.searchsorted(begun, end[k]) > np.searchsorted(begun, start[k]):
            mine = backward & (start >= start[k]) & (start < end[k])
            found |= (start > start[k]) & (start < end[mine].max())
    return found


def _forward_layers(d: Draft, phase: Array, layers: dict[str, int]) -> Array:
    """Layers of what is forward or loss, by module, by hierarchy, or by counting operators."""
    n, e = d.nest, d.events
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


def _unit_layers(d: Draft, units: Array, layers: dict[str, int]) -> Array:
    """A layer for each outermost operator: its module hierarchy, or its name and a count."""
    n, e = d.nest, d.events
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


def _backward_layers(d: Draft, phase: Array, layer: Array) -> Array:
    """Layers of backward places, from the forward operator with the same sequence number."""
    n, e = d.nest, d.events
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
