"""What the kernels of a fused region must move and compute, found by walking its ops once.

A compiler makes one loop nest of ops that visit the same places, but a reduction with few results
is split over the device and what uses its results has to wait: the region falls into levels (→
`fused_levels`), one kernel or more each. The walk drops what nobody uses and counts for every level
which tensors are read again.

    read      bytes of entering tensors, each once
    fresh     those of them the step has just written
    reread    bytes read again at later levels, from memory or cache
    written   bytes that leave, and what one level leaves for the next
    kernels   kernels expected
    levels    of them that wait for one another
    work      elementary operations over all places (→ `WEIGHT`)
    turned    bytes read in another order than they lie
    lone      the most places one result is reduced from, where few results leave the device idle
    product   matrix products' and convolutions' flop
    own       their own time where it is known
    places    places visited by the largest op
    random    places at which numbers are drawn
    operand   bytes the products read and write
    odd       elements moved in rows no wide load fits, where rows matter
    halves    places visited in formats of two bytes
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from foretell.cost.fused_codes import (
    BATCH,
    COLUMNS,
    CONSTANT,
    FRESH,
    INPUT,
    NORM,
    RANDOM,
    REDUCTION,
    SIZE,
    TEMPLATE,
    TWICE,
    UNPOOLS,
    VIEW,
    WEIGHT,
)
from foretell.cost.fused_levels import (
    LEVELS,
    bits,
    is_split,
    levels,
    live,
    needs,
    odd,
    origins,
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
_LOOPS = 8  # of a level; more are counted as the last
_NOTHING = 1 << 62  # what a loop reads that reads nothing: such a one joins no other


class Walk(NamedTuple):
    """What a walk found: `WALKED` of each region; visits, level and being split of each node."""

    region: Array
    node: Array


def walked(regions: Regions, units: float, weight: Array | None = None) -> Walk:
    """Walk all regions, on a device of so many units; `weight` counts operations by op."""
    read = _read(regions)
    start = np.searchsorted(regions.target[read], np.arange(len(regions.op) + 1))
    out, node = np.zeros((len(regions), len(WALKED))), np.zeros((len(regions.op), 3))
    _walk(
        regions.first, start, regions.source[read], regions.pattern[read], KIND_CODE[regions.op],
        regions.op,
        SIZE[regions.dtype], regions.elements, regions.looped, regions.inner, regions.across,
        regions.last, regions.writes, regions.flops, regions.seconds, units, regions.is_written,
        out, node,
    )  # fmt: skip
    _add_work(regions, node, WEIGHT if weight is None else weight, out)
    return Walk(out, node)


def _read(regions: Regions) -> npt.NDArray[np.bool_]:
    """The edges along which something is read: of what was pooled only the shape is asked."""
    place = np.arange(len(regions.target)) - np.searchsorted(regions.target, regions.target)
    return np.asarray(~(UNPOOLS[regions.op[regions.target]] & (place == 1)))


def _add_work(regions: Regions, node: Array, weight: Array, out: Array) -> None:
    """Operations over all places, and those in formats of two bytes."""
    kind = KIND_CODE[regions.op]
    busy = ~np.isin(kind, (VIEW, CONSTANT, INPUT, TEMPLATE))
    places = regions.looped * node[:, 0] * busy
    half = SIZE[regions.dtype] == 2
    out[:, WALKED.index("work")] = np.bincount(
        regions.region, places * weight[regions.op], len(out)
    )
    out[:, WALKED.index("halves")] = np.bincount(regions.region, places * half, len(out))


@njit(cache=True)
def _walk(  # type: ignore[no-untyped-def]
    first, start, source, pattern, kind, op, size, elements, looped, inner, across, last, writes,
    flops, seconds, device_units, written, out, node,
):  # fmt: skip
    writes = writes.copy()
    for r in range(len(first) - 1):
        low, high = first[r], first[r + 1]
        units = 0.0 if written[r] else device_units  # one kernel: nothing of it is split
        settle(low, high, start, source, kind, writes)
        alive = live(low, high, start, source, kind, op, writes)
        level, done, bound = levels(
            low, high, start, source, kind, op, elements, looped, inner, across, units, alive
        )
        need = needs(
            low,
            high,
            start,
            source,
            kind,
            op,
            inner,
            across,
            writes,
            alive,
            level,
            done,
            written[r],
        )
        _count(
            low, high, start, source, pattern, kind, op, size, elements, looped, inner, across,
            last, writes, flops, seconds, units, device_units, alive, level, done, bound, need,
            out[r],
        )  # fmt: skip
        if written[r]:
            out[r, 4] = 1.0
            out[r, 5] = 1.0
        for i in range(high - low):
            visits = max(1, bits(need[i])) if alive[i] else 0
            node[low + i, 0] = visits + (
                1 if alive[i] and kind[low + i] == NORM and done[i] > level[i] else 0
            )
            node[low + i, 1] = level[i]
            node[low + i, 2] = done[i] - level[i]


@njit(cache=True)
def _count(  # type: ignore[no-untyped-def]
    low, high, start, source, pattern, kind, op, size, elements, looped, inner, across, last,
    writes, flops, seconds, units, device_units, live, level, done, bound, need, row,
):  # fmt: skip
    mask = origins(low, high, start, source, kind, op)
    read = touched(low, high, start, source, kind, elements, looped, live)
    seen = np.zeros((LEVELS, _LOOPS), np.int64)
    has_rows = rows_matter(low, high, start, pattern, kind, live)
    split = np.zeros(LEVELS, np.int64)
    plain, joined, apart = (
        np.zeros((LEVELS, _LOOPS, 2)),
        np.zeros((LEVELS, _LOOPS, 2)),
        np.zeros((LEVELS, _LOOPS, 2)),
    )
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
            n, i, low, start, source, pattern, kind, op, size, elements, looped, inner, across,
            writes, flops, seconds, units, device_units, level, done, bound, need, row, split,
            plain, joined, apart, mask, seen,
        )  # fmt: skip
        if has_rows and writes[n] > 0:
            row[14] += elements[n] * odd(last[n])
    for l in range(LEVELS):
        loops = _loops_of(plain[l], joined[l], apart[l])
        row[4] += loops + split[l]
        row[5] += 1.0 if loops > 0 else 0.0


@njit(cache=True)
def _count_op(  # type: ignore[no-untyped-def]
    n, i, low, start, source, pattern, kind, op, size, elements, looped, inner, across, writes,
    flops, seconds, units, device_units, level, done, bound, need, row, split, plain, joined, apart,
    mask, seen,
):  # fmt: skip
    if kind[n] == TEMPLATE:
        row[9] += flops[n]
        row[10] += seconds[n] if seconds[n] == seconds[n] else 0.0
        for e in range(start[n], start[n + 1]):
            row[13] += elements[source[e]] * size[source[e]]
        row[13] += elements[n] * size[n]
        if units > 0:  # what follows a library's product reads it again
            row[2] += elements[n] * size[n] * bits(need[i] & ~(1 << done[i]))
            row[2] += elements[n] * size[n] if need[i] >> done[i] & 1 and writes[n] == 0 else 0.0
        else:
            row[3] += writes[n]
        return
    _count_written(n, i, low, start, source, kind, size, elements, writes, level, done, need, row)
    if kind[n] == VIEW or kind[n] == CONSTANT:
        return
    times = max(1, bits(need[i])) + (1 if done[i] > level[i] and kind[n] == NORM else 0)
    row[12] += looped[n] * times if kind[n] == RANDOM else 0.0
    row[11] = max(row[11], looped[n])
    for e in range(start[n], start[n + 1]):
        row[7] += elements[source[e]] * size[source[e]] if pattern[e] == 2 else 0.0
    rows = looped[n] / max(inner[n], 1.0)
    if inner[n] > 1 and done[i] == level[i]:
        row[8] = max(row[8], inner[n] * min(1.0, device_units / max(rows, 1.0)))
    if done[i] > level[i]:
        row[3] += elements[n] * size[n] if kind[n] == REDUCTION else 0.0
        outer = across[n] == 2 or (across[n] == 1 and not BATCH[op[n]])
        new = _noted(level[i], looped[n], rows, 1, apart if outer else joined, seen * 0)
        if is_split(op[n], elements[n], looped[n], inner[n], across[n], units):
            split[level[i]] += new * (2 if TWICE[op[n]] else 1)
            _noted(
                done[i], 0.5, rows, 1, joined, seen * 0
            )  # what finishes it takes small users along
        if kind[n] == NORM:
            _noted(done[i], looped[n], 0.0, mask[i] or _NOTHING, plain, seen)
    elif kind[n] == REDUCTION or kind[n] == NORM:
        outer = across[n] != 0 and not BATCH[op[n]] and kind[n] == REDUCTION
        _noted(level[i], looped[n], -rows if outer else rows, 1, joined, seen * 0)
    elif writes[n] > 0:
        _noted(level[i], looped[n], 1.0 if bound[i] else 0.0, mask[i] or _NOTHING, plain, seen)
    if COLUMNS[op[n]]:
        _noted(level[i], looped[n], -inner[n], 1, apart, seen * 0)
        split[level[i]] += 2  # weight and bias are finished one by one


@njit(cache=True)
def _count_written(  # type: ignore[no-untyped-def]
    n, i, low, start, source, kind, size, elements, writes, level, done, need, row
):
    """What a node leaves in memory, and what later levels read of it there."""
    row[3] += writes[n]
    lies = writes[n] > 0 or kind[n] == REDUCTION
    if lies:
        row[2] += elements[n] * size[n] * bits(need[i] & ~(1 << done[i]))


@njit(cache=True)
def _noted(level, places, rows, mask, loops, seen):  # type: ignore[no-untyped-def]
    """Note a loop over so many places and rows that reads `mask`; 1 where it is a new one.

    Loops it reads something in common with become one with it.
    """
    home = -1
    for k in range(loops.shape[1]):
        same = loops[level, k, 0] == places and loops[level, k, 1] == rows
        if same and (seen[level, k] == 0 or seen[level, k] & mask):
            if home < 0:
                home = k
                seen[level, k] |= mask if seen[level, k] else 0
            else:
                seen[level, home] |= seen[level, k]
                loops[level, k, 0] = -1.0  # no loop any more
        if loops[level, k, 0] == 0.0:
            if home < 0:
                loops[level, k, 0] = places
                loops[level, k, 1] = rows
                seen[level, k] = mask
                return 1
            return 0
    return 0


@njit(cache=True)
def _loops_of(plain, joined, apart):  # type: ignore[no-untyped-def]
    """Kernels of one level: a plain loop joins a reduction over its places or its rows."""
    count = 0
    for k in range(_LOOPS):
        count += (1 if apart[k, 0] > 0 else 0) + (1 if joined[k, 0] >= 1 else 0)
        alone = plain[k, 0] > 0
        for j in range(_LOOPS):
            rows = joined[j, 1]
            same = joined[j, 0] == plain[k, 0] and (rows > 0 or plain[k, 1] > 0)
            alone &= not (same or abs(rows) == plain[k, 0])
        count += 1 if alone else 0
    return count
