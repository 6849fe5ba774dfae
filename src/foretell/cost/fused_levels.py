"""The passes of a kernel over its places: what is read, and how often (Inductor, torch 2.11).

Rows too long for registers are visited twice, sums of columns make a pass of their own, and rows
cannot change places inside a kernel: what moves them begins another level.
"""

from __future__ import annotations

import numpy as np

from foretell.compiled import compiled
from foretell.cost.fused_codes import (
    BATCH,
    COLUMNS,
    CONSTANT,
    GATHER,
    INPUT,
    NORM,
    REDUCTION,
    TEMPLATE,
    VIEW,
)

LEVELS = 12  # more are counted as the last
# A row of a kernel as written that is longer than this is not held in registers (`persistent`): it
# is visited once to reduce it and once more to use the result.
_HELD_INNER, _HELD_OUTER = 1024.0, 64.0


@compiled
def settle(low, high, start, source, kind, writes):  # type: ignore[no-untyped-def]
    """Hand what a view leaves to the node whose memory it looks at; entries lie there anyway."""
    for n in range(high - 1, low - 1, -1):
        if kind[n] == VIEW and writes[n] > 0 and start[n] < start[n + 1]:
            at = source[start[n]]
            if kind[at] != INPUT:
                writes[at] = max(writes[at], writes[n])
            writes[n] = 0.0


@compiled
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


@compiled
def levels(low, high, start, source, kind):  # type: ignore[no-untyped-def]
    """The level at which each node is computed."""
    level = np.zeros(high - low, np.int64)
    bound = np.zeros(high - low, np.bool_)
    for n in range(low, high):
        i = n - low
        if kind[n] != CONSTANT:
            for e in range(start[n], start[n + 1]):
                at = source[e] - low
                moves = kind[n] == GATHER and bound[at]  # rows of one kernel cannot change places
                level[i] = min(max(level[i], level[at] + (1 if moves else 0)), LEVELS - 1)
            for e in range(start[n], start[n + 1]):
                at = source[e] - low
                bound[i] |= bound[at] and level[at] == level[i] and kind[n] != GATHER
        bound[i] |= kind[n] == REDUCTION or kind[n] == NORM
    return level


@compiled
def needs(low, high, start, source, kind, op, inner, across, writes, live, level):  # type: ignore[no-untyped-def]
    """For each node the passes, as bits, at which its value is computed or read."""
    need = np.zeros(high - low, np.int64)
    for n in range(high - 1, low - 1, -1):
        i = n - low
        if not live[i] or kind[n] == INPUT or kind[n] == CONSTANT:
            continue
        if writes[n] > 0:
            need[i] |= 1 << level[i]
        outer = across[n] == 2 or (across[n] == 1 and not BATCH[op[n]])
        outer |= inner[n] > (_HELD_OUTER if across[n] else _HELD_INNER)
        asked = _asked_at(kind[n], COLUMNS[op[n]], outer, writes[n], need[i], level[i])
        for e in range(start[n], start[n + 1]):
            need[source[e] - low] |= asked
    return need


@compiled
def _asked_at(kind, columns, outer, writes, need, level):  # type: ignore[no-untyped-def]
    """The passes at which a node's sources are wanted; a sum of columns makes its own."""
    apart = 1 << (level + LEVELS if outer or columns else level)
    if kind == TEMPLATE:
        return 0  # its operands belong to the product's own time
    if kind == REDUCTION:
        return apart
    asked = 1 << level if writes > 0 else need  # what lies in memory is read there later
    return asked | apart if columns or (outer and kind == NORM) else asked


@compiled
def bits(mask):  # type: ignore[no-untyped-def]
    count = 0
    while mask:
        count += mask & 1
        mask >>= 1
    return count


@compiled
def odd(last):  # type: ignore[no-untyped-def]
    """How much narrower than sixteen elements the loads of a row must be: 0 to 1."""
    if last % 16 == 0 or last <= 1:
        return 0.0
    if last % 8 == 0:
        return 0.1
    if last % 4 == 0:
        return 0.25
    return 0.5 if last % 2 == 0 else 1.0


@compiled
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


@compiled
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
