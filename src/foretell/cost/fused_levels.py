"""The levels of a fused region: what must wait for what, by the rules of Inductor (torch 2.11).

A reduction with few results is split over the device, and what uses them waits for a second kernel;
sums of columns make a pass of their own; rows of one kernel cannot change places inside it.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from foretell.cost.fused_codes import (
    APPLIED,
    BATCH,
    COLUMNS,
    CONSTANT,
    GATHER,
    INPUT,
    NORM,
    PARTS,
    REDUCTION,
    SLICES,
    TEMPLATE,
    VIEW,
)

LEVELS = 12  # more are counted as the last
# A reduction is split whose results are fewer than this many times the units (`num_splits`),
_ROWS_INNER, _ROWS_OUTER = 2, 64
# and whose length is more than this (`reduction_split_factor`): along rows, and across them.
_LONG_INNER, _LONG_OUTER = 8192.0, 128.0
# A row of a kernel as written that is longer than this is not held in registers (`persistent`): it
# is visited once to reduce it and once more to use the result.
_HELD_INNER, _HELD_OUTER = 1024.0, 64.0


@njit(cache=True)
def settle(low, high, start, source, kind, writes):  # type: ignore[no-untyped-def]
    """Hand what a view leaves to the node whose memory it looks at; entries lie there anyway."""
    for n in range(high - 1, low - 1, -1):
        if kind[n] == VIEW and writes[n] > 0 and start[n] < start[n + 1]:
            at = source[start[n]]
            if kind[at] != INPUT:
                writes[at] = max(writes[at], writes[n])
            writes[n] = 0.0


@njit(cache=True)
def live(low, high, start, source, kind, op, writes):  # type: ignore[no-untyped-def]
    """Nodes something that leaves depends on; a constant needs only the shape of what it reads."""
    live = np.zeros(high - low, np.bool_)
    for n in range(high - 1, low - 1, -1):
        if writes[n] > 0:
            live[n - low] = True
        if live[n - low] and kind[n] != CONSTANT:
            for e in range(start[n], start[n + 1]):
                live[source[e] - low] = True
    return live


@njit(cache=True)
def is_split(op, elements, looped, inner, across, units):  # type: ignore[no-untyped-def]
    """Whether a reduction's results wait for a second kernel."""
    rows = looped / max(inner, 1.0)
    if across == 2 or (across == 1 and not BATCH[op]):
        return rows < _ROWS_OUTER * units and inner > _LONG_OUTER
    return rows < _ROWS_INNER * units and inner > _LONG_INNER


@njit(cache=True)
def levels(  # type: ignore[no-untyped-def]
    low, high, start, source, kind, op, elements, looped, inner, across, units, live
):
    """The level at which each node is begun, and the one at which its result is there."""
    level = np.zeros(high - low, np.int64)
    done = np.zeros(high - low, np.int64)
    bound = np.zeros(high - low, np.bool_)
    for n in range(low, high):
        i = n - low
        if kind[n] != CONSTANT:
            for e in range(start[n], start[n + 1]):
                at = source[e] - low
                moves = kind[n] == GATHER and bound[at]  # rows of one kernel cannot change places
                level[i] = min(max(level[i], done[at] + (1 if moves else 0)), LEVELS - 1)
            for e in range(start[n], start[n + 1]):
                at = source[e] - low
                bound[i] |= bound[at] and done[at] == level[i] and kind[n] != GATHER
        bound[i] |= kind[n] == REDUCTION or kind[n] == NORM
        later = units > 0 and (kind[n] == TEMPLATE or APPLIED[op[n]])
        if kind[n] == REDUCTION or kind[n] == NORM:
            later |= is_split(op[n], elements[n], looped[n], inner[n], across[n], units)
        done[i] = min(level[i] + (1 if later else 0), LEVELS - 1)
    return level, done, bound


@njit(cache=True)
def needs(low, high, start, source, kind, op, inner, across, writes, live, level, done, written):  # type: ignore[no-untyped-def]
    """For each node the levels, as bits, at which its value is computed or read."""
    need = np.zeros(high - low, np.int64)
    for n in range(high - 1, low - 1, -1):
        i = n - low
        if not live[i] or kind[n] == INPUT or kind[n] == CONSTANT:
            continue
        if writes[n] > 0:
            need[i] |= 1 << done[i]
        outer = across[n] == 2 or (across[n] == 1 and not BATCH[op[n]])
        outer |= written and inner[n] > (_HELD_OUTER if across[n] else _HELD_INNER)
        bits = _asked_at(kind[n], COLUMNS[op[n]], outer, writes[n], need[i], level[i], done[i])
        for e in range(start[n], start[n + 1]):
            s = source[e] - low
            if kind[n] == TEMPLATE:
                continue  # its operands belong to the product's own time
            need[s] |= bits
    return need


@njit(cache=True)
def _asked_at(kind, columns, outer, writes, need, level, done):  # type: ignore[no-untyped-def]
    """The passes at which a node's sources are wanted; a split sum of columns makes its own."""
    apart = 1 << (level + LEVELS if outer or columns else level)
    if kind == TEMPLATE:
        return 0
    if kind == REDUCTION:
        return apart
    if kind == NORM and done > level:
        return apart | (1 << done)
    bits = 1 << done if writes > 0 else need  # what lies in memory is read there later
    return bits | apart if columns or (outer and kind == NORM) else bits


@njit(cache=True)
def bits(mask):  # type: ignore[no-untyped-def]
    count = 0
    while mask:
        count += mask & 1
        mask >>= 1
    return count


@njit(cache=True)
def odd(last):  # type: ignore[no-untyped-def]
    """How much narrower than sixteen elements the loads of a row must be: 0 to 1."""
    if last % 16 == 0 or last <= 1:
        return 0.0
    if last % 8 == 0:
        return 0.1
    if last % 4 == 0:
        return 0.25
    return 0.5 if last % 2 == 0 else 1.0


@njit(cache=True)
def rows_matter(low, high, start, pattern, kind, live):  # type: ignore[no-untyped-def]
    """Whether a region's loop knows rows: something is broadcast or reduced."""
    for n in range(low, high):
        if live[n - low] and kind[n] != CONSTANT:
            if kind[n] == REDUCTION or kind[n] == NORM:
                return True
            for e in range(start[n], start[n + 1]):
                if pattern[e] != 0:
                    return True
    return False


@njit(cache=True)
def origins(low, high, start, source, kind, op):  # type: ignore[no-untyped-def]
    """What each node reads, as bits: loops that read nothing in common stay apart."""
    mask = np.zeros(high - low, np.int64)
    for n in range(low, high):
        i = n - low
        if kind[n] == INPUT or SLICES[op[n]]:
            mask[i] = 1 << (i % 61)
        if kind[n] == INPUT or kind[n] == CONSTANT or SLICES[op[n]]:
            continue
        for e in range(start[n], start[n + 1]):
            part = 1 << ((e - start[low] + 17) % 61)
            mask[i] |= part if PARTS[op[source[e]]] else mask[source[e] - low]
    return mask


@njit(cache=True)
def touched(low, high, start, source, kind, elements, looped, live):  # type: ignore[no-untyped-def]
    """Elements of each node that what is live reads; through a view, what is read of the view."""
    found = np.zeros(high - low)
    for t in range(high - 1, low - 1, -1):
        i = t - low
        if not live[i] or kind[t] == CONSTANT:
            continue
        found[i] = min(found[i], elements[t])
        some = elements[t] if kind[t] == GATHER else looped[t]
        for e in range(start[t], start[t + 1]):
            found[source[e] - low] += found[i] if kind[t] == VIEW else some
    return found
