"""What a kernel must move and compute, found by walking its ops once.

Regions are lowered to kernels first (→ `fused_lower`). The walk drops what nothing uses and counts
for every pass over the kernel's places (→ `fused_levels`) which tensors are read again.

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
from foretell.cost.fused_codes import (
    CONSTANT,
    FRESH,
    INPUT,
    RANDOM,
    REDUCTION,
    SIZE,
    TEMPLATE,
    UNPOOLS,
    VIEW,
    WEIGHT,
)
from foretell.cost.fused_levels import (
    bits,
    levels,
    live,
    needs,
    odd,
    rows_matter,
    settle,
    touched,
)
from foretell.cost.fused_regions import Regions
from foretell.cost.fusion_class import KIND_CODE

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
