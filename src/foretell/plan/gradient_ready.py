"""Gradient-ready times, used to overlap bucketed reduction with backward.

A message of gradients is there when the layer is done that makes the last of them; tied weights
wait for the layer nearest to the input. With a reduction that takes W, n messages of which the
first has a share a of the gradients and the others the same, and f of the gradients made before a
layer that ends at t, the backward at T, no less than

    t + (1 - gone)·W - T          gone = 0 where f < a, else a + ⌊(n-1)·(f-a)/(1-a)⌋·(1-a)/(n-1)

of the reduction is left when the backward is over (→ `exposed`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretell.errors import InputError
from foretell.plan.costs import Costs, layer_parts, own_weights
from foretell.plan.layouts import Array
from foretell.workload import Workload

ROUNDED = 1e-9  # what sums may be off by


class GradientReady(NamedTuple):
    """One layer in the order of backward, all its times together; an entry a plan."""

    times: Array  # how often gradients are there, evenly over its seconds
    seconds: Array
    elements: Array


def made(c: Costs, times: Array, workload: Workload) -> Iterator[GradientReady]:
    """What each layer of a stage takes backward and makes; the loss first."""
    own, parts = own_weights(c, times, workload), _parts(workload)
    for at in reversed(range(len(times))):
        seconds = layer_parts(c, at, workload)[1].seconds(c.bend) * times[at]
        seconds = seconds + (c.turn * (times[at] > 0) if at == len(times) - 1 else 0.0)
        yield GradientReady(times[at] * parts[at], seconds, own[at] * times[at])


def _parts(workload: Workload) -> list[int]:
    """How many gradients each layer makes one after another: of tables side by side, every one."""
    found = []
    for layer in workload.layers:
        sizes = [w.elements(op.dims) for op in layer.works() for w in op.weights]
        found.append(len(sizes) if len(set(sizes)) == 1 else 1)
    return found


MOST_MESSAGES = 1 << 18  # of one step's gradients


class Messages(NamedTuple):
    """In how many messages gradients go, and which share of them the first has; an entry a plan."""

    number: Array
    first: Array

    def take(self, rows: NDArray[np.int64]) -> Messages:
        """Those of some plans."""
        return Messages(self.number[rows], self.first[rows])

    def sizes(self) -> Array:
        """The share of each message of one plan."""
        count, first = round(float(self.number[0])), float(self.first[0])
        if count > MOST_MESSAGES:
            raise InputError(
                f"gradients in {count} messages", hint="raise bucket_mb, or make the model smaller"
            )
        rest = np.full(count - 1, (1 - first) / max(count - 1, 1))
        return np.append(first, rest)

    def last(self) -> Array:
        """The share of the last message."""
        rest = (1 - self.first) / np.maximum(self.number - 1, 1.0)
        return np.where(self.number > 1, rest, 1.0)

    def gone(self, made: Array) -> Array:
        """The share that is in full messages when so much is made."""
        left = np.maximum(1 - self.first, ROUNDED)
        others = np.maximum(self.number - 1, 1.0)
        full = np.floor(others * (made - self.first) / left + ROUNDED * others)
        found: Array = self.first + np.clip(full, 0.0, others) * left / others
        return np.where(made < self.first * (1 - ROUNDED), 0.0, np.minimum(found, 1.0))


def first_share(c: Costs, times: Array, workload: Workload, cap: Array) -> Array:
    """The share of the gradients in a message that is closed when it has a share `cap` or more."""
    layers = list(made(c, times, workload))
    total = sum((layer.elements for layer in layers), np.zeros(len(cap)) + ROUNDED**2)
    found, sent = np.ones(len(cap)), np.zeros(len(cap))
    for layer in layers:
        many = np.maximum(np.round(layer.times), 1.0)
        each = np.maximum(layer.elements / many, ROUNDED**2)
        opens = (sent < cap * total) & (sent + layer.elements >= cap * total * (1 - ROUNDED))
        whole = sent + np.ceil((cap * total - sent) / each * (1 - ROUNDED)) * each
        found = np.where(opens, whole / total, found)
        sent = sent + layer.elements
    return np.clip(found, cap, 1.0)


def shares(c: Costs, times: Array, workload: Workload, sizes: Array) -> list[float]:
    """Parts of one plan's backward between one of its messages and the next."""
    took, sent = [0.0], [0.0]
    for layer in made(c, times, workload):
        many = max(round(float(layer.times[0])), 1)
        took += [float(layer.seconds[0]) / many] * many
        sent += [float(layer.elements[0]) / many] * many
    ends, known = np.cumsum(took), np.cumsum(sent)
    due = np.cumsum(sizes) * known[-1] * (1 - ROUNDED)
    ready = ends[np.searchsorted(known, due)] / ends[-1]
    ready[-1] = 1.0
    found: list[float] = np.diff(ready, prepend=0.0).tolist()
    return found


def exposed(
    c: Costs, times: Array, workload: Workload, *, whole: Array, backward: Array,
    messages: Messages,
) -> Array:  # fmt: skip
    """Seconds of a reduction in some messages that are left when the backward is over."""
    layers = list(made(c, times, workload))
    none = np.zeros(len(whole))
    seconds = sum((layer.seconds for layer in layers), none + ROUNDED**2)
    elements = sum((layer.elements for layer in layers), none + ROUNDED**2)  # never by zero
    late, done, sent = whole * messages.last(), none, none
    for layer in layers:
        many = np.maximum(np.round(layer.times), 1.0)
        for before in (none, many - 1):  # its first time, and its last
            made_then = (sent + layer.elements * before / many) / elements
            ends = (done + layer.seconds * (before + 1) / many) / seconds
            left = ends * backward + (1 - messages.gone(made_then)) * whole - backward
            late = np.where(layer.elements > 0, np.maximum(late, left), late)
        done, sent = done + layer.seconds, sent + layer.elements
    return late
