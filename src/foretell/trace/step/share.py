"""Kernels of several streams that ran, or could have run, at the same time on one device.

Such kernels share the device: each takes the part of it that its blocks fill (a kernel with at
least one block for every multiprocessor takes all of it), and together they are slowed until they
fit. What is kept of a kernel is its work, the time it would have taken alone:

    work = ∫ min(1, 1 / Σ demand of all that ran) dt      over its run      → `_alone`

Collectives are left out: they wait for the network, not for multiprocessors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretell.graph.columns import Array
from foretell.trace.runs import distinct
from foretell.trace.step.draft import Draft
from foretell.trace.step.issue import ready_times
from foretell.trace.words import by_name, is_collective

_LEAST_DEMAND = 1e-3  # a kernel of one block still takes something


@dataclass(frozen=True, eq=False)
class Shared:
    """Which device tasks share their device, with what demand, and their time alone."""

    work: Array
    device: Array
    demand: Array
    seconds: Array


def shared(d: Draft, source: Array, target: Array) -> Shared:
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


def _kernels(d: Draft) -> Array:
    """Work of the step that multiprocessors do: kernels, fills, copies within the device."""
    e, work = d.events, d.device.work
    uses_it = by_name(e.texts, e.name[work.event], lambda text: int(_is_computed(text)))
    return np.flatnonzero((uses_it > 0) & ~d.device.is_ahead)


def _is_computed(name: str) -> bool:
    is_transfer = name.startswith("Memcpy") and "DtoD" not in name
    return not is_transfer and not is_collective(name)


def _device_of(d: Draft) -> Array:
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
