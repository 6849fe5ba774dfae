"""Regions lowered to the kernels Inductor would make of them, each a region of its own.

    found = lowered(regions, units)
    found.regions, found.of         # kernels as regions, and the region each belongs to

Ops become loop nests (→ `fused_place`), nests are joined to kernels (→
`fused_join`). A kernel's nodes are the tensors that enter it, be they the region's or what an
earlier kernel left, and the ops inside; of a norm the sums are nodes apart from what uses them.
What an earlier kernel touched and the cache holds is `fresh`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from foretell.cost.fused_codes import (
    FRESH,
    NORM,
    SIZE,
    SOFT,
    WELFORD,
)
from foretell.cost.fused_join import finished, joined
from foretell.cost.fused_levels import live, settle
from foretell.cost.fused_place import nests
from foretell.cost.fused_regions import DTYPES, Regions
from foretell.cost.fused_values import (
    COLS,
    FILL,
    FINISH,
    LAID,
    LIBRARY,
    MOVED,
    ODD,
    PARTIAL,
    PLACED,
    POINT,
    WHOLE,
    Array,
    Flags,
    Ops,
    Whole,
    base,
)
from foretell.cost.fusion_class import KIND_CODE, codes_of

_FP32 = DTYPES.index("fp32")
_SUM, _SPREADS, _SOFTENS, _ENTERS, _CLONES = codes_of(
    ["sum", "var_mean", "logsumexp", "input", "clone"]
).tolist()
_KEPT = 50.0 * 2**20  # bytes of the H200's second-level cache: what a kernel may still find there


class Lowered(NamedTuple):
    """Kernels as regions; the region each is of, and whether a library has it ready."""

    regions: Regions
    of: Whole
    library: Flags
    known: Array  # seconds of a library's kernel that no product is; 0 for all else


class _Rest(NamedTuple):
    """Columns that are only handed on."""

    dtype: Whole
    last: Array
    flops: Array
    seconds: Array


class _Made(NamedTuple):
    """Kernels while they are written down, with room for more."""

    used: Whole  # kernels, nodes, edges
    first: Whole
    of: Whole
    library: Flags
    known: Array
    op: Whole
    dtype: Whole
    across: Whole
    numbers: Array  # elements, looped, inner, last, writes, flops, seconds
    edges: Whole  # source, target, pattern


def lowered(regions: Regions, units: float) -> Lowered:
    """The kernels of all regions, on a device of so many units."""
    start = np.searchsorted(regions.target, np.arange(len(regions.op) + 1))
    rest = _Rest(regions.dtype, regions.last, regions.flops, regions.seconds)
    room = 2
    while True:
        o = Ops(
            start, regions.source, regions.pattern, KIND_CODE[regions.op], regions.op,
            SIZE[regions.dtype], regions.elements, regions.looped, regions.inner, regions.across,
            regions.writes.copy(), regions.last, regions.flops,
        )  # fmt: skip
        made = _empty(room * (len(regions.op) + 64), room * (len(regions.source) + 128))
        if _lower(o, rest, regions.first, units, made):
            return _found(made)
        room *= 2


def _empty(nodes: int, edges: int) -> _Made:
    whole = (np.zeros(nodes, np.int64) for _ in range(4))
    return _Made(
        np.zeros(3, np.int64), np.zeros(nodes + 1, np.int64), next(whole), np.zeros(nodes, bool),
        np.zeros(nodes), next(whole), next(whole), next(whole), np.zeros((nodes, 7)),
        np.zeros((edges, 3), np.int64),
    )  # fmt: skip


def _found(made: _Made) -> Lowered:
    kernels, nodes, edges = made.used.tolist()
    elements, looped, inner, last, writes, flops, seconds = made.numbers[:nodes].T.copy()
    source, target, pattern = made.edges[:edges].T.copy()
    regions = Regions(
        made.first[: kernels + 1], made.op[:nodes], made.dtype[:nodes], elements, looped, inner,
        made.across[:nodes], last, writes, flops, seconds, source, target, pattern,
        np.ones(kernels, bool), lowered=True,
    )  # fmt: skip
    return Lowered(regions, made.of[:kernels], made.library[:kernels], made.known[:kernels])


@njit(cache=True)
def _lower(o, rest, first, units, made):  # type: ignore[no-untyped-def]
    """Write down the kernels of all regions; False where there is too little room."""
    for r in range(len(first) - 1):
        low, high = first[r], first[r + 1]
        settle(low, high, o.start, o.source, o.kind, o.writes)
        alive = live(low, high, o.start, o.source, o.kind, o.op, o.writes)
        k, v = nests(o, low, high, alive, units)
        group = joined(k, o.elements, o.size, low)
        touched = np.zeros(high - low, np.bool_)
        count, edges = k.used[0], o.start[high] - o.start[low]
        for g in range(count):
            if group[g] != g:
                continue
            if made.used[1] + 3 * (high - low + count) > len(made.op):
                return False
            if made.used[2] + 4 * (edges + 2 * count) + count * count > len(made.edges):
                return False
            _kernel(o, rest, low, high - low, k, v, group, g, touched, made)
            made.of[made.used[0]] = r
            known = finished(k, group, g, o.size[low + k.node[g]], units)
            made.known[made.used[0]] = known
            made.library[made.used[0]] = k.part[g] == LIBRARY or known > 0
            made.used[0] += 1
            made.first[made.used[0]] = made.used[1]
    return True


@njit(cache=True)
def _kernel(o, rest, low, nodes, k, v, group, g, touched, made):  # type: ignore[no-untyped-def]
    """Write down one kernel: its nests one after another."""
    ops = np.full(nodes, -1)  # the node of each op inside
    inside = np.full(nodes + k.used[0], -1)  # the node of each tensor that is here
    for x in range(k.used[0]):
        if group[x] != g:
            continue
        own = k.node[x]
        part = k.how[x] != POINT or k.part[x] in (FILL, PARTIAL, LAID)
        for i in range(nodes):
            if k.ops[x, i] and ops[i] < 0 and not (part and i == own):
                ops[i] = _op(o, rest, low, k, v, group, x, i, ops, inside, touched, made, False)
        last = ops[own]
        if part:
            last = _op(o, rest, low, k, v, group, x, own, ops, inside, touched, made, True)
        inside[nodes + x] = last
        made.numbers[last, 4] += _left(o, low, k, group, x)
    for b in range(nodes):
        touched[b] |= inside[b] >= 0


@njit(cache=True)
def _left(o, low, k, group, x):  # type: ignore[no-untyped-def]
    """Bytes a nest leaves for what comes after its kernel."""
    if k.leaves[x] > 0:
        return k.leaves[x]
    for y in range(k.used[0]):
        if group[y] != group[x] and k.reads[y, k.ops.shape[1] + x] > 0:
            return k.n[x] * (o.size[low + k.node[x]] if k.part[x] in (WHOLE, LAID) else 4.0)
    return 0.0


@njit(cache=True)
def _op(o, rest, low, k, v, group, x, i, ops, inside, touched, made, part):  # type: ignore[no-untyped-def]
    """Write down an op, or the part of it that a nest of its own computes, after what it reads."""
    n, begins = low + i, made.used[2]
    if not (part and k.part[x] == FINISH):
        for e in range(o.start[n], o.start[n + 1]):
            s = base(o, low, o.source[e] - low)
            b = v.held[s]
            at = ops[s] if b < 0 else -1
            if b >= 0 and (k.reads[x, b] > 0 or inside[b] >= 0):
                at = _enter(o, rest, low, k, group, x, b, inside, touched, made)
            _wire(made, begins, at, o.pattern[e])
    for y in range(k.used[0]):
        b = k.ops.shape[1] + y
        if k.reads[x, b] > 0 and k.node[y] == i and y != x:
            at = _enter(o, rest, low, k, group, x, b, inside, touched, made)
            _wire(made, begins, at, 0 if part else 1)
    at = made.used[1]
    made.used[1] += 1
    made.edges[begins : made.used[2], 1] = at
    _describe(o, rest, n, made, at)
    if part:
        _describe_part(o, n, k, x, made, at)
    return at


@njit(cache=True)
def _wire(made, begins, source, pattern):  # type: ignore[no-untyped-def]
    """An edge to the node that comes next, once for each source."""
    if source < 0:
        return
    at = made.used[2]
    for e in range(begins, at):
        if made.edges[e, 0] == source:
            return
    made.edges[at, 0], made.edges[at, 2] = source, pattern
    made.used[2] += 1


@njit(cache=True)
def _describe(o, rest, n, made, at):  # type: ignore[no-untyped-def]
    """The columns of an op as the region has them; what is left of a norm reduces nothing."""
    made.op[at], made.dtype[at] = o.op[n], rest.dtype[n]
    reduces = o.kind[n] != NORM
    made.across[at] = o.across[n] if reduces else 0
    row = made.numbers[at]
    row[0], row[1], row[2] = o.elements[n], o.looped[n], o.inner[n] if reduces else 1.0
    row[3], row[4], row[5], row[6] = rest.last[n], 0.0, rest.flops[n], rest.seconds[n]


@njit(cache=True)
def _describe_part(o, n, k, x, made, at):  # type: ignore[no-untyped-def]
    """The columns of a reduction, or one step of it."""
    row = made.numbers[at]
    row[0], row[1], row[2] = k.n[x], k.n[x] * k.r[x], k.r[x]
    made.across[at] = 1 if k.how[x] == COLS else 0
    if k.part[x] == LAID:
        made.op[at], row[5], row[6] = _CLONES, 0.0, np.nan
        return
    if k.part[x] >= PARTIAL:
        made.dtype[at] = _FP32
    if o.kind[n] == NORM and k.how[x] != POINT:
        op = o.op[n]
        made.op[at] = _SPREADS if WELFORD[op] else _SOFTENS if SOFT[op] else _SUM


@njit(cache=True)
def _enter(o, rest, low, k, group, x, b, inside, touched, made):  # type: ignore[no-untyped-def]
    """The node of a tensor that a kernel reads."""
    if inside[b] >= 0:
        return inside[b]
    at, nodes = made.used[1], k.ops.shape[1]
    made.used[1] += 1
    row = made.numbers[at]
    if b < nodes:
        made.dtype[at], row[3] = rest.dtype[low + b], rest.last[low + b]
        row[0] = _read(o, low, k, group, x, b)
        kept = touched[b] and o.elements[low + b] * o.size[low + b] <= _KEPT
        near = o.op[low + b] == FRESH or kept
    else:
        y = b - nodes
        whole = k.part[y] in (WHOLE, LAID, LIBRARY)
        made.dtype[at] = rest.dtype[low + k.node[y]] if whole else _FP32
        row[0], row[3] = k.n[y], rest.last[low + k.node[y]] if k.how[y] == POINT else k.n[y]
        near = k.n[y] * 4 <= _KEPT
    row[1], row[2], row[4], row[5], row[6] = row[0], 1.0, 0.0, 0.0, np.nan
    made.op[at], made.across[at] = FRESH if near else _ENTERS, 0
    inside[b] = at
    return at


@njit(cache=True)
def _read(o, low, k, group, x, b):  # type: ignore[no-untyped-def]
    """Elements of an entering tensor that a kernel touches."""
    whole, some, seen = o.elements[low + b], 0.0, 0
    for y in range(k.used[0]):
        code = k.reads[y, b]
        if group[y] == group[x] and code > 0:
            if code < ODD or code >= MOVED or code >= ODD + PLACED:
                return whole
            some += k.n[y] * k.r[y] if code != seen else 0.0
            seen = code
    return min(whole, some)
