"""What a kernel must move and compute, found by walking its ops once.

Regions are lowered to kernels first (→ `fused_lower`). The walk drops what nothing uses and counts
for every pass over the kernel's places which tensors are read again. Rows too long for registers
are visited twice, sums of columns make a pass of their own, and rows cannot change places inside a
kernel: what moves them begins another pass (Inductor, torch 2.11).

    read      bytes of entering tensors, each once
    fresh     those of them the step has just written
    reread    bytes read again in later passes, from memory or cache
    written   bytes that leave
    kernels   1; a region on a CPU (→ `fused_nests`), which has the same columns, may have more
    levels    1, likewise
    work      elementary operations over all places (→ `WEIGHT`)
    turned    bytes read in another order than they lie
    lone      the most places one result is reduced from, where few results leave the device idle
    product   matmuls' and convolutions' flop
    own       their own time where it is known
    places    places visited by the largest op
    random    places at which numbers are drawn
    operand   bytes the matmuls read and write
    odd       elements moved in rows no wide load fits, where rows matter
    halves    places visited in formats of two bytes
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from foretell.compiled import F1, F2, I1, compiled
from foretell.cost.fused_regions import (
    BATCH,
    COLUMNS,
    CONSTANT,
    FRESH,
    GATHER,
    INPUT,
    NORM,
    RANDOM,
    REDUCTION,
    SIZE,
    TEMPLATE,
    UNPOOLS,
    VIEW,
    WEIGHT,
    Regions,
)
from foretell.cost.fusion_class import KIND_CODE

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


Array = npt.NDArray[np.float64]

WALKED = (
    "read", "fresh", "reread", "written", "kernels", "levels", "work", "turned", "lone", "product",
    "own", "places", "random", "operand", "odd", "halves",
)  # fmt: skip
_KERNELS, _LEVELS = WALKED.index("kernels"), WALKED.index("levels")


class Walk(NamedTuple):
    """What a walk found: `WALKED` of each kernel; visits, level and being split of each node.

    Nothing of one kernel is split: that column is a CPU's.
    """

    region: Array
    node: Array


def walked(regions: Regions, units: float, weight: Array | None = None) -> Walk:
    """Walk all kernels, on a device of so many units; `weight` counts operations by op."""
    read = edges_read(regions)
    start = np.searchsorted(regions.target[read], np.arange(len(regions.op) + 1))
    out, node = np.zeros((len(regions), len(WALKED))), np.zeros((len(regions.op), 3))
    _walk(
        regions.first, start, regions.source[read], regions.pattern[read], KIND_CODE[regions.op],
        regions.op,
        SIZE[regions.dtype], regions.elements, regions.looped, regions.inner, regions.across,
        regions.last, regions.writes, regions.flops, regions.seconds, units, out, node,
    )  # fmt: skip
    out[:, [_KERNELS, _LEVELS]] = 1.0
    add_work(regions, node, WEIGHT if weight is None else weight, out)
    return Walk(out, node)


def edges_read(regions: Regions) -> npt.NDArray[np.bool_]:
    """The edges along which something is read: of what was pooled only the shape is asked."""
    place = np.arange(len(regions.target)) - np.searchsorted(regions.target, regions.target)
    return np.asarray(~(UNPOOLS[regions.op[regions.target]] & (place == 1)))


def is_busy(regions: Regions) -> npt.NDArray[np.bool_]:
    """Nodes that compute something inside a kernel."""
    return np.asarray(~np.isin(KIND_CODE[regions.op], (VIEW, CONSTANT, INPUT, TEMPLATE)))


def add_work(regions: Regions, node: Array, weight: Array, out: Array) -> None:
    """Operations over all places, and those in formats of two bytes."""
    places = regions.looped * node[:, 0] * is_busy(regions)
    half = SIZE[regions.dtype] == 2
    out[:, WALKED.index("work")] = np.bincount(
        regions.region, places * weight[regions.op], len(out)
    )
    out[:, WALKED.index("halves")] = np.bincount(regions.region, places * half, len(out))


@compiled
def _walk(
    first: I1,
    start: I1,
    source: I1,
    pattern: I1,
    kind: I1,
    op: I1,
    size: F1,
    elements: F1,
    looped: F1,
    inner: F1,
    across: I1,
    last: F1,
    writes: F1,
    flops: F1,
    seconds: F1,
    units: float,
    out: F2,
    node: F2,
) -> None:
    writes = writes.copy()
    for r in range(len(first) - 1):
        low, high = first[r], first[r + 1]
        settle(low, high, start, source, kind, writes)
        alive = live(low, high, start, source, kind, op, writes)
        level = levels(low, high, start, source, kind)
        need = needs(low, high, start, source, kind, op, inner, across, writes, alive, level)
        _count(
            low, high, start, source, pattern, kind, op, size, elements, looped, inner, last,
            writes, flops, seconds, units, alive, level, need, out[r],
        )  # fmt: skip
        for i in range(high - low):
            node[low + i, 0] = max(1, bits(need[i])) if alive[i] else 0
            node[low + i, 1] = level[i]


@compiled
def _count(  # type: ignore[no-untyped-def]
    low, high, start, source, pattern, kind, op, size, elements, looped, inner, last, writes, flops,
    seconds, units, live, level, need, row,
):  # fmt: skip
    read = touched(low, high, start, source, kind, elements, looped, live)
    has_rows = rows_matter(low, high, start, pattern, kind, live)
    for n in range(low, high):
        i = n - low
        if not live[i]:
            continue
        if kind[n] == INPUT:
            moved = read[i] * size[n]
            times = bits(need[i])
            if times > 0:
                row[0] += moved
                row[1] += moved if op[n] == FRESH else 0.0
                row[2] += moved * (times - 1)
                row[14] += moved / size[n] * times * odd(last[n]) if has_rows else 0.0
            continue
        _count_op(
            n, start, source, pattern, kind, size, elements, looped, inner, writes, flops, seconds,
            units, level[i], need[i], row,
        )  # fmt: skip
        if has_rows and writes[n] > 0:
            row[14] += elements[n] * odd(last[n])


@compiled
def _count_op(  # type: ignore[no-untyped-def]
    n, start, source, pattern, kind, size, elements, looped, inner, writes, flops, seconds, units,
    level, need, row,
):  # fmt: skip
    row[3] += writes[n]
    if kind[n] == TEMPLATE:
        row[9] += flops[n]
        row[10] += seconds[n] if seconds[n] == seconds[n] else 0.0
        for e in range(start[n], start[n + 1]):
            row[13] += elements[source[e]] * size[source[e]]
        row[13] += elements[n] * size[n]
        return
    if writes[n] > 0 or kind[n] == REDUCTION:  # it lies in memory for later passes
        row[2] += elements[n] * size[n] * bits(need & ~(1 << level))
    if kind[n] == VIEW or kind[n] == CONSTANT:
        return
    row[12] += looped[n] * max(1, bits(need)) if kind[n] == RANDOM else 0.0
    row[11] = max(row[11], looped[n])
    for e in range(start[n], start[n + 1]):
        row[7] += elements[source[e]] * size[source[e]] if pattern[e] == 2 else 0.0
    if inner[n] > 1:
        rows = looped[n] / max(inner[n], 1.0)
        row[8] = max(row[8], inner[n] * min(1.0, units / max(rows, 1.0)))
