"""What the kernels of a fused region must move and compute, found by walking its ops once.

A compiler makes one loop nest of ops that visit the same places, but a reduction with few results
is split over the device and what uses its results has to wait: the region falls into levels, one
kernel or more each. The walk follows Inductor's rules (its `num_splits` and `reduction_split_factor`)
for what is split, drops what nobody uses, and counts for every level which tensors are read again.

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

from foretell.cost.fused_regions import DTYPES, Regions
from foretell.cost.fusion_class import KIND_CODE, KINDS, WORDS
from foretell.cost.limits import SIZES

Array = npt.NDArray[np.float64]

WALKED = (
    "read", "fresh", "reread", "written", "kernels", "levels", "work", "turned", "lone", "product",
    "own", "places", "random", "operand", "odd", "halves",
)  # fmt: skip

# Elementary operations of one place, against an addition: polynomials, divisions and the counter of
# a random draw are what they are made of; only their proportions matter, the rate is fitted.
_HEAVY = {
    "div": 4.0, "reciprocal": 4.0, "sqrt": 4.0, "rsqrt": 3.0, "pow": 3.0, "exp": 6.0, "log": 8.0,
    "log1p": 14.0, "expm1": 10.0, "sin": 20.0, "cos": 20.0, "tanh": 12.0, "sigmoid": 9.0, "erf": 16.0,
    "gelu": 18.0, "gelu_backward": 26.0, "silu": 10.0, "silu_backward": 16.0, "elu": 9.0, "mish": 24.0,
    "elu_backward": 9.0, "softplus": 14.0, "hardswish": 4.0, "hardswish_backward": 5.0, "hardsigmoid": 3.0,
    "dropout": 34.0, "rand": 30.0, "bernoulli": 30.0, "rand_like": 30.0, "randn": 40.0, "softmax": 12.0,
    "log_softmax": 12.0, "softmax_backward_data": 6.0, "log_softmax_backward_data": 10.0,
    "layer_norm": 8.0, "layer_norm_backward": 14.0, "batch_norm": 8.0, "batch_norm_backward": 14.0,
    "group_norm": 8.0, "group_norm_backward": 14.0, "embedding": 4.0, "index": 5.0, "roll": 6.0,
    "cat": 4.0, "constant_pad_nd": 4.0, "upsample_nearest2d": 6.0, "avg_pool2d": 6.0, "var_mean": 5.0,
    "max_pool2d_with_indices": 24.0, "max_pool2d_with_indices_backward": 40.0, "avg_pool2d_backward": 10.0,
    "adaptive_avg_pool2d": 8.0, "adaptive_avg_pool2d_backward": 8.0, "slice_backward": 4.0,
    "select_backward": 4.0, "nll_loss_forward": 4.0, "nll_loss_backward": 4.0, "sigmoid_backward": 3.0,
    "tanh_backward": 3.0,
}  # fmt: skip
WEIGHT = np.array([_HEAVY.get(word, 1.0) for word in WORDS])
_SIZE = np.array([float(SIZES[d]) for d in DTYPES])
_CODE = {kind: number for number, kind in enumerate(KINDS)}
_VIEW, _CONSTANT, _INPUT = _CODE["view"], _CODE["constant"], _CODE["input"]
_REDUCTION, _NORM, _TEMPLATE = _CODE["reduction"], _CODE["norm"], _CODE["template"]
_GATHER, _RANDOM = _CODE["gather"], _CODE["random"]
_BATCH = np.array([word.startswith("batch_norm") for word in WORDS])
_COLUMNS = np.array([word in ("layer_norm_backward", "group_norm_backward") for word in WORDS])
_FRESH = WORDS.index("fresh")
# What scales groups of channels is applied in a kernel of its own, and so is an unpooled gradient.
_APPLIED = np.array([w in ("group_norm", "max_pool2d_with_indices_backward") for w in WORDS])
_TWICE = np.array([w == "batch_norm_backward" for w in WORDS])  # two sums, finished one by one
_PARTS = np.array([w in ("split", "split_with_sizes", "unbind", "chunk") for w in WORDS])
_SLICES = np.array([w in ("slice", "select") for w in WORDS])
_LEVELS, _LOOPS = 12, 8  # more of either are counted as the last

# Inductor (torch 2.11) splits a reduction whose results are fewer than these many times the units.
_ROWS_INNER, _ROWS_OUTER = 2, 64
_LONG_INNER, _LONG_OUTER = 8192.0, 128.0  # and whose length is more than this


class Walk(NamedTuple):
    """What a walk found: `WALKED` of each region; visits, level and being split of each node."""

    region: Array
    node: Array


def walked(regions: Regions, units: float, weight: Array | None = None) -> Walk:
    """Walk all regions, on a device of so many units; `weight` counts operations by op."""
    start = np.searchsorted(regions.target, np.arange(len(regions.op) + 1))
    out, node = np.zeros((len(regions), len(WALKED))), np.zeros((len(regions.op), 3))
    _walk(
        regions.first, start, regions.source, regions.pattern, KIND_CODE[regions.op], regions.op,
        _SIZE[regions.dtype], regions.elements, regions.looped, regions.inner, regions.across,
        regions.last, regions.writes, regions.flops, regions.seconds, units, out, node,
    )  # fmt: skip
    _add_work(regions, node, WEIGHT if weight is None else weight, out)
    return Walk(out, node)


def _add_work(regions: Regions, node: Array, weight: Array, out: Array) -> None:
    """Operations over all places, and those in formats of two bytes."""
    kind = KIND_CODE[regions.op]
    busy = ~np.isin(kind, (_VIEW, _CONSTANT, _INPUT, _TEMPLATE))
    places = regions.looped * node[:, 0] * busy
    half = _SIZE[regions.dtype] == 2
    out[:, WALKED.index("work")] = np.bincount(regions.region, places * weight[regions.op], len(out))
    out[:, WALKED.index("halves")] = np.bincount(regions.region, places * half, len(out))


@njit(cache=True)  # type: ignore[untyped-decorator]
def _walk(
    first, start, source, pattern, kind, op, size, elements, looped, inner, across, last, writes, flops,
    seconds, units, out, node,
):  # fmt: skip  # type: ignore[no-untyped-def]
    writes = writes.copy()
    for r in range(len(first) - 1):
        low, high = first[r], first[r + 1]
        _settle(low, high, start, source, kind, writes)
        live = _live(low, high, start, source, kind, op, writes)
        level, done, bound = _levels(
            low, high, start, source, kind, op, elements, looped, inner, across, units, live
        )
        need = _needs(low, high, start, source, kind, op, across, writes, live, level, done)
        _count(
            low, high, start, source, pattern, kind, op, size, elements, looped, inner, across, last,
            writes, flops, seconds, units, live, level, done, bound, need, out[r],
        )  # fmt: skip
        for i in range(high - low):
            visits = max(1, _bits(need[i])) if live[i] else 0
            node[low + i, 0] = visits + (1 if live[i] and kind[low + i] == _NORM and done[i] > level[i] else 0)
            node[low + i, 1] = level[i]
            node[low + i, 2] = done[i] - level[i]


@njit(cache=True)  # type: ignore[untyped-decorator]
def _settle(low, high, start, source, kind, writes):  # type: ignore[no-untyped-def]
    """Hand what a view leaves behind to the node whose memory it looks at; entries lie there anyway."""
    for n in range(high - 1, low - 1, -1):
        if kind[n] == _VIEW and writes[n] > 0 and start[n] < start[n + 1]:
            at = source[start[n]]
            if kind[at] != _INPUT:
                writes[at] = max(writes[at], writes[n])
            writes[n] = 0.0


@njit(cache=True)  # type: ignore[untyped-decorator]
def _live(low, high, start, source, kind, op, writes):  # type: ignore[no-untyped-def]
    """Nodes something that leaves depends on; a constant needs only the shape of what it reads."""
    live = np.zeros(high - low, np.bool_)
    for n in range(high - 1, low - 1, -1):
        if writes[n] > 0:
            live[n - low] = True
        if live[n - low] and kind[n] != _CONSTANT:
            for e in range(start[n], start[n + 1]):
                live[source[e] - low] = True
    return live


@njit(cache=True)  # type: ignore[untyped-decorator]
def _is_split(op, elements, looped, inner, across, units):  # type: ignore[no-untyped-def]
    """Whether a reduction's results wait for a second kernel."""
    rows = looped / max(inner, 1.0)
    if across == 2 or (across == 1 and not _BATCH[op]):
        return rows < _ROWS_OUTER * units and inner > _LONG_OUTER
    return rows < _ROWS_INNER * units and inner > _LONG_INNER


@njit(cache=True)  # type: ignore[untyped-decorator]
def _levels(  # type: ignore[no-untyped-def]
    low, high, start, source, kind, op, elements, looped, inner, across, units, live
):
    """The level at which each node is begun, and the one at which its result is there."""
    level = np.zeros(high - low, np.int64)
    done = np.zeros(high - low, np.int64)
    bound = np.zeros(high - low, np.bool_)
    for n in range(low, high):
        i = n - low
        if kind[n] != _CONSTANT:
            for e in range(start[n], start[n + 1]):
                at = source[e] - low
                moves = kind[n] == _GATHER and bound[at]  # rows of one kernel cannot change places
                level[i] = min(max(level[i], done[at] + (1 if moves else 0)), _LEVELS - 1)
            for e in range(start[n], start[n + 1]):
                at = source[e] - low
                bound[i] |= bound[at] and done[at] == level[i] and kind[n] != _GATHER
        bound[i] |= kind[n] == _REDUCTION or kind[n] == _NORM
        later = kind[n] == _TEMPLATE or _APPLIED[op[n]]
        if kind[n] == _REDUCTION or kind[n] == _NORM:
            later |= _is_split(op[n], elements[n], looped[n], inner[n], across[n], units)
        done[i] = min(level[i] + (1 if later else 0), _LEVELS - 1)
    return level, done, bound


@njit(cache=True)  # type: ignore[untyped-decorator]
def _needs(low, high, start, source, kind, op, across, writes, live, level, done):  # type: ignore[no-untyped-def]
    """For each node the levels, as bits, at which its value is computed or read."""
    need = np.zeros(high - low, np.int64)
    for n in range(high - 1, low - 1, -1):
        i = n - low
        if not live[i] or kind[n] == _INPUT or kind[n] == _CONSTANT:
            continue
        if writes[n] > 0:
            need[i] |= 1 << done[i]
        outer = across[n] == 2 or (across[n] == 1 and not _BATCH[op[n]])
        bits = _asked_at(kind[n], _COLUMNS[op[n]], outer, writes[n], need[i], level[i], done[i])
        for e in range(start[n], start[n + 1]):
            s = source[e] - low
            if kind[n] == _TEMPLATE:
                continue  # its operands belong to the product's own time
            need[s] |= bits
    return need


@njit(cache=True)  # type: ignore[untyped-decorator]
def _asked_at(kind, columns, outer, writes, need, level, done):  # type: ignore[no-untyped-def]
    """The passes at which a node's sources are wanted; a split sum of columns makes its own."""
    apart = 1 << (level + _LEVELS if outer or columns else level)
    if kind == _TEMPLATE:
        return 0
    if kind == _REDUCTION:
        return apart
    if kind == _NORM and done > level:
        return apart | (1 << done)
    bits = 1 << done if writes > 0 else need  # what lies in memory is read there later
    return bits | apart if columns else bits


@njit(cache=True)  # type: ignore[untyped-decorator]
def _bits(mask):  # type: ignore[no-untyped-def]
    count = 0
    while mask:
        count += mask & 1
        mask >>= 1
    return count


@njit(cache=True)  # type: ignore[untyped-decorator]
def _odd(last):  # type: ignore[no-untyped-def]
    """How much narrower than sixteen elements the loads of a row must be: 0 to 1."""
    if last % 16 == 0 or last <= 1:
        return 0.0
    if last % 8 == 0:
        return 0.1
    if last % 4 == 0:
        return 0.25
    return 0.5 if last % 2 == 0 else 1.0


@njit(cache=True)  # type: ignore[untyped-decorator]
def _rows_matter(low, high, start, pattern, kind, live):  # type: ignore[no-untyped-def]
    """Whether a region's loop knows rows: something is broadcast or reduced."""
    for n in range(low, high):
        if live[n - low] and kind[n] != _CONSTANT:
            if kind[n] == _REDUCTION or kind[n] == _NORM:
                return True
            for e in range(start[n], start[n + 1]):
                if pattern[e] != 0:
                    return True
    return False


@njit(cache=True)  # type: ignore[untyped-decorator]
def _read_of(n, low, high, start, source, kind, elements, looped, live):  # type: ignore[no-untyped-def]
    """Elements of an entering tensor that its live readers touch."""
    touched = 0.0
    for t in range(low, high):
        if live[t - low] and kind[t] != _CONSTANT:
            for e in range(start[t], start[t + 1]):
                if source[e] == n:
                    part = kind[t] == _VIEW or kind[t] == _GATHER
                    touched += elements[t] if part else looped[t]
    return min(touched, elements[n])


@njit(cache=True)  # type: ignore[untyped-decorator]
def _count(  # type: ignore[no-untyped-def]
    low, high, start, source, pattern, kind, op, size, elements, looped, inner, across, last, writes,
    flops, seconds, units, live, level, done, bound, need, row,
):  # fmt: skip
    mask, seen = _origins(low, high, start, source, kind, op), np.zeros((_LEVELS, _LOOPS), np.int64)
    rows_matter = _rows_matter(low, high, start, pattern, kind, live)
    split = np.zeros(_LEVELS, np.int64)
    plain, joined, apart = (
        np.zeros((_LEVELS, _LOOPS, 2)),
        np.zeros((_LEVELS, _LOOPS, 2)),
        np.zeros((_LEVELS, _LOOPS, 2)),
    )
    for n in range(low, high):
        i = n - low
        if not live[i]:
            continue
        if kind[n] == _INPUT:
            moved = _read_of(n, low, high, start, source, kind, elements, looped, live) * size[n]
            times = _bits(need[i])
            if times > 0:
                row[0] += moved
                row[1] += moved if op[n] == _FRESH else 0.0
                row[2] += moved * (times - 1)
                row[14] += moved / size[n] * times * _odd(last[n]) if rows_matter else 0.0
            continue
        _count_op(
            n, i, low, start, source, pattern, kind, op, size, elements, looped, inner, across, writes, flops,
            seconds, units, level, done, bound, need, row, split, plain, joined, apart, mask, seen,
        )  # fmt: skip
        if rows_matter and writes[n] > 0:
            row[14] += elements[n] * _odd(last[n])
    for l in range(_LEVELS):
        loops = _loops_of(plain[l], joined[l], apart[l])
        row[4] += loops + split[l]
        row[5] += 1.0 if loops > 0 else 0.0


@njit(cache=True)  # type: ignore[untyped-decorator]
def _count_op(  # type: ignore[no-untyped-def]
    n, i, low, start, source, pattern, kind, op, size, elements, looped, inner, across, writes, flops,
    seconds, units, level, done, bound, need, row, split, plain, joined, apart, mask, seen,
):  # fmt: skip
    if kind[n] == _TEMPLATE:
        row[9] += flops[n]
        row[10] += seconds[n] if seconds[n] == seconds[n] else 0.0
        for e in range(start[n], start[n + 1]):
            row[13] += elements[source[e]] * size[source[e]]
        row[13] += elements[n] * size[n]
        row[2] += elements[n] * size[n] * _bits(need[i] & ~(1 << done[i]))
        row[2] += elements[n] * size[n] if need[i] >> done[i] & 1 and writes[n] == 0 else 0.0
        return
    _count_written(n, i, low, start, source, kind, size, elements, writes, level, done, need, row)
    if kind[n] == _VIEW or kind[n] == _CONSTANT:
        return
    times = max(1, _bits(need[i])) + (1 if done[i] > level[i] and kind[n] == _NORM else 0)
    row[12] += looped[n] * times if kind[n] == _RANDOM else 0.0
    row[11] = max(row[11], looped[n])
    for e in range(start[n], start[n + 1]):
        row[7] += elements[source[e]] * size[source[e]] if pattern[e] == 2 else 0.0
    rows = looped[n] / max(inner[n], 1.0)
    if inner[n] > 1 and done[i] == level[i]:
        row[8] = max(row[8], inner[n] * min(1.0, units / max(rows, 1.0)))
    if done[i] > level[i]:
        row[3] += elements[n] * size[n] if kind[n] == _REDUCTION else 0.0
        outer = across[n] == 2 or (across[n] == 1 and not _BATCH[op[n]])
        new = _noted(level[i], looped[n], rows, 1, apart if outer else joined, seen * 0)
        if _is_split(op[n], elements[n], looped[n], inner[n], across[n], units):
            split[level[i]] += new * (2 if _TWICE[op[n]] else 1)
            _noted(done[i], 0.5, rows, 1, joined, seen * 0)  # what finishes it takes small users along
        if kind[n] == _NORM:
            _noted(done[i], looped[n], 0.0, mask[i], plain, seen)
    elif kind[n] == _REDUCTION or kind[n] == _NORM:
        outer = across[n] != 0 and not _BATCH[op[n]] and kind[n] == _REDUCTION
        _noted(level[i], looped[n], -rows if outer else rows, 1, joined, seen * 0)
    elif writes[n] > 0:
        _noted(level[i], looped[n], 1.0 if bound[i] else 0.0, mask[i], plain, seen)
    if _COLUMNS[op[n]]:
        _noted(level[i], looped[n], -inner[n], 1, apart, seen * 0)
        split[level[i]] += 2  # weight and bias are finished one by one


@njit(cache=True)  # type: ignore[untyped-decorator]
def _count_written(  # type: ignore[no-untyped-def]
    n, i, low, start, source, kind, size, elements, writes, level, done, need, row
):
    """What a node leaves in memory, and what later levels read of it there."""
    row[3] += writes[n]
    lies = writes[n] > 0 or kind[n] == _REDUCTION
    if lies:
        row[2] += elements[n] * size[n] * _bits(need[i] & ~(1 << done[i]))


@njit(cache=True)  # type: ignore[untyped-decorator]
def _noted(level, places, rows, mask, loops, seen):  # type: ignore[no-untyped-def]
    """Note a loop over so many places and rows that reads `mask`; 1 where it is a new one."""
    for k in range(loops.shape[1]):
        same = loops[level, k, 0] == places and loops[level, k, 1] == rows
        if same and (seen[level, k] == 0 or seen[level, k] & mask):
            seen[level, k] |= mask if seen[level, k] else 0
            return 0
        if loops[level, k, 0] == 0.0:
            loops[level, k, 0] = places
            loops[level, k, 1] = rows
            seen[level, k] = mask
            return 1
    return 0


@njit(cache=True)  # type: ignore[untyped-decorator]
def _origins(low, high, start, source, kind, op):  # type: ignore[no-untyped-def]
    """What each node reads, as bits: loops that read nothing in common stay apart."""
    mask = np.zeros(high - low, np.int64)
    for n in range(low, high):
        i = n - low
        if kind[n] == _INPUT or _SLICES[op[n]]:
            mask[i] = 1 << (i % 61)
            continue
        for e in range(start[n], start[n + 1]):
            part = 1 << ((e - start[low] + 17) % 61)
            mask[i] |= part if _PARTS[op[source[e]]] else mask[source[e] - low]
    return mask


@njit(cache=True)  # type: ignore[untyped-decorator]
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
