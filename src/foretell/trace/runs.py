"""Running maxima within runs of equal rows: what numpy says in one call for each run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from foretell.graph.columns import Array


def runs(key: Array) -> Iterator[tuple[int, int]]:
    """The bounds of stretches of equal keys."""
    breaks = np.flatnonzero(key[1:] != key[:-1]) + 1
    bounds = [0, *breaks.tolist(), len(key)]
    return pairwise(bounds) if len(key) else iter(())


def is_follower(key: Array) -> Array:
    """Which rows have the key of the row before them."""
    return np.append(False, key[1:] == key[:-1])[: len(key)]


def highest(values: Array, key: Array) -> Array:
    """The largest value so far in each run."""
    found = np.empty(len(values))
    for a, b in runs(key):
        found[a:b] = np.maximum.accumulate(values[a:b])
    return found


def highest_before(values: Array, key: Array) -> Array:
    """The largest value before each row of its run; -inf for the first."""
    found = np.full(len(values), -np.inf)
    for a, b in runs(key):
        found[a + 1 : b] = np.maximum.accumulate(values[a : b - 1])
    return found


def rising(values: Array, key: Array, tick: float) -> Array:
    """The values, raised where needed so that each run rises by a tick a row or more."""
    found = np.empty(len(values))
    for a, b in runs(key):
        ticks = tick * np.arange(b - a)
        found[a:b] = np.maximum.accumulate(values[a:b] - ticks) + ticks
    return found
