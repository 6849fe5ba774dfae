"""When the gradients of a backward are made, layer by layer: what can be sent while it still runs.

A message of gradients is there when the layer is done that makes the last of them; tied weights
wait for the layer nearest to the input. With n equal messages of a reduction that takes W, and f
of the gradients made before a layer that ends at t, the backward at T, no less than

    t + (1 - ⌊n·f⌋ / n)·W - T                                                          → `exposed`

of the reduction is left when the backward is over.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from foretell.plan.costs import Costs, layer_parts, own_weights
from foretell.plan.layouts import Array
from foretell.workload import Workload

ROUNDED = 1e-9  # what sums may be off by


class Made(NamedTuple):
    """One layer in the order of backward, all its times together; an entry a plan."""

    times: Array  # how often gradients are there, evenly over its seconds
    seconds: Array
    elements: Array


def made(c: Costs, times: Array, workload: Workload) -> Iterator[Made]:
    """What each layer of a stage takes backward and makes; the loss first."""
    own, parts = own_weights(c, times, workload), _parts(workload)
    for at in reversed(range(len(times))):
        seconds = layer_parts(c, at, workload)[1].seconds(c.bend) * times[at]
        seconds = seconds + (c.turn * (times[at] > 0) if at == len(times) - 1 else 0.0)
        yield Made(times[at] * parts[at], seconds, own[at] * times[at])


def _parts(workload: Workload) -> list[int]:
    """How many gradients each layer makes one after another: of tables side by side, every one."""
    found = []
    for layer in workload.layers:
        sizes = [w.elements(op.dims) for op in layer.works() for w in op.weights]
        found.append(len(sizes) if len(set(sizes)) == 1 else 1)
    return found


def shares(c: Costs, times: Array, workload: Workload, count: int) -> list[float]:
    """Parts of one plan's backward between one of so many equal messages and the next."""
    took, sent = [0.0], [0.0]
    for layer in made(c, times, workload):
        many = max(round(float(layer.times[0])), 1)
        took += [float(layer.seconds[0]) / many] * many
        sent += [float(layer.elements[0]) / many] * many
    ends, known = np.cumsum(took), np.cumsum(sent)
    due = np.arange(1, count + 1) / count * known[-1] * (1 - ROUNDED)
    ready = ends[np.searchsorted(known, due)] / ends[-1]
    ready[-1] = 1.0
    found: list[float] = np.diff(ready, prepend=0.0).tolist()
    return found


def exposed(
    c: Costs, times: Array, workload: Workload, *, whole: Array, backward: Array, messages: Array
) -> Array:
    """Seconds of a reduction in some messages that are left when the backward is over."""
    layers = list(made(c, times, workload))
    none = np.zeros(len(whole))
    seconds = sum((layer.seconds for layer in layers), none + ROUNDED**2)
    elements = sum((layer.elements for layer in layers), none + ROUNDED**2)  # never by zero
    late, done, sent = whole / messages, none, none
    for layer in layers:
        many = np.maximum(np.round(layer.times), 1.0)
        for before in (none, many - 1):  # its first time, and its last
            made_then = (sent + layer.elements * before / many) / elements
            ends = (done + layer.seconds * (before + 1) / many) / seconds
            gone = np.floor(messages * made_then * (1 + ROUNDED)) / messages
            left = ends * backward + (1 - gone) * whole - backward
            late = np.where(layer.elements > 0, np.maximum(late, left), late)
        done, sent = done + layer.seconds, sent + layer.elements
    return late
