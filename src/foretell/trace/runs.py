"""Running maxima within runs of equal rows; and the distinct, the middle and quantiles of values.

numpy has the latter too and loads its masked arrays for them, which takes as long as reading a
megabyte of a trace; these give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from foretell.graph.graph import Array


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


def strictly_increasing(values: Array, key: Array, tick: float) -> Array:
    """The values, raised where needed so that each run rises by a tick a row or more."""
    found = np.empty(len(values))
    for a, b in runs(key):
        ticks = tick * np.arange(b - a)
        found[a:b] = np.maximum.accumulate(values[a:b] - ticks) + ticks
    return found


def distinct(values: Array) -> Array:
    """The different values, ascending."""
    ranked = np.sort(values)
    return ranked[~is_follower(ranked)]


def median(values: Array) -> float:
    """The value in the middle, or halfway between the two; NaN where one is NaN."""
    ranked = np.sort(values)
    low, high = ranked[(len(ranked) - 1) // 2], ranked[len(ranked) // 2]
    return float("nan") if np.isnan(ranked[-1]) else float((low + high) / 2)


def quantile(values: Array, share: float) -> float:
    """The value with a share of the others below it, on the line between the two nearest."""
    at = share * (len(values) - 1)
    low = int(at)
    a, b = np.partition(values, (low, low + 1))[low : low + 2]
    part = at - low
    return float(a + (b - a) * part if part < 0.5 else b - (b - a) * (1 - part))
