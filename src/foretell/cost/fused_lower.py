"""Regions lowered to the kernels Inductor would make of them, each a region of its own.

    found = lowered(regions, units)
    found.regions, found.of         # kernels as regions, and the region each belongs to

Ops become loop nests (→ `fused_loop_nests`), nests are joined to kernels that run in an order
(→ `fused_scheduler`), and kernels are written down as columns. The nodes of a kernel are the
tensors that enter, be they the region's or what an earlier kernel left, and the ops inside; of a
norm the sums are nodes apart from what uses them. A tensor is `fresh` where no more was touched
since it was than the cache holds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foretell.compiled import B1, F1, F2, I1, I2, compiled
from foretell.cost.fused_loop_nests import finished, nests
from foretell.cost.fused_realization import (
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
from foretell.cost.fused_regions import (
    DTYPES,
    FRESH,
    INPUT,
    NORM,
    PREPARED,
    SIZE,
    SOFT,
    WELFORD,
    Regions,
    live,
    settle,
)
from foretell.cost.fused_scheduler import joined, ordered, width
from foretell.cost.fusion_class import KIND_CODE, codes_of

_FP32 = DTYPES.index("fp32")
_SUM, _SPREADS, _SOFTENS, _ENTERS, _CLONES = codes_of(
    ["sum", "var_mean", "logsumexp", "input", "clone"]
).tolist()
_KEPT = 50.0 * 2**20  # bytes of the H200's second-level cache: what a kernel may still find there


class Rest(NamedTuple):
    """Columns that are only sent on."""

    dtype: I1
    last: F1
    flops: F1
    seconds: F1


class KernelColumns(NamedTuple):
    """Kernels while they are written down, with room for more."""

    used: I1  # kernels, nodes, edges
    first: I1
    of: I1
    library: B1
    known: F1
    op: I1
    dtype: I1
    across: I1
    numbers: F2  # elements, looped, inner, last, writes, flops, seconds, since
    edges: I2  # source, target, pattern


@compiled
def touched_before(o, low, high, count):  # type: ignore[no-untyped-def]
    """Of each buffer of a region when it was touched last, 0 for never, and how many bytes."""
    touched = np.zeros((high - low + count, 2))
    for n in range(low, high):
        if o.kind[n] == INPUT and o.op[n] == FRESH:
            touched[n - low] = 1.0, o.elements[n] * o.size[n]
    return touched


@compiled
def write_down(o, rest, low, nodes, k, v, group, g, touched, made):  # type: ignore[no-untyped-def]
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
    _touch(o, low, nodes, k, group, g, inside, touched, made)


@compiled
def _touch(o, low, nodes, k, group, g, inside, touched, made):  # type: ignore[no-untyped-def]
    """Remember what a kernel read and wrote, the latest last."""
    now = touched[:, 0].max() + 1
    for b in range(nodes + k.used[0]):
        if inside[b] < 0:
            continue
        x = b - nodes
        own = x >= 0 and group[x] == g
        if own and _left(o, low, k, group, x) == 0:
            continue
        size = o.size[low + b] if x < 0 else width(k, x, o.size, low)
        moved = k.n[x] if own else made.numbers[inside[b], 0]
        touched[b] = now + (1 if own else 0), moved * size


@compiled
def _since(touched, b):  # type: ignore[no-untyped-def]
    """Bytes touched since a tensor was; without end where it never was."""
    if touched[b, 0] == 0:
        return np.inf
    since = 0.0
    for other in range(len(touched)):
        if touched[other, 0] > touched[b, 0]:
            since += touched[other, 1]
    return since


@compiled
def _left(o, low, k, group, x):  # type: ignore[no-untyped-def]
    """Bytes a nest leaves for what comes after its kernel."""
    if k.leaves[x] > 0:
        return k.leaves[x]
    for y in range(k.used[0]):
        if group[y] != group[x] and k.reads[y, k.ops.shape[1] + x] > 0:
            return k.n[x] * width(k, x, o.size, low)
    return 0.0


@compiled
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


@compiled
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


@compiled
def _describe(o, rest, n, made, at):  # type: ignore[no-untyped-def]
    """The columns of an op as the region has them; what is left of a norm reduces nothing."""
    made.op[at], made.dtype[at] = o.op[n], rest.dtype[n]
    reduces = o.kind[n] != NORM
    made.across[at] = o.across[n] if reduces else 0
    row = made.numbers[at]
    row[0], row[1], row[2] = o.elements[n], o.looped[n], o.inner[n] if reduces else 1.0
    row[3], row[4], row[5], row[6] = rest.last[n], 0.0, rest.flops[n], rest.seconds[n]


@compiled
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


@compiled
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
    else:
        y = b - nodes
        whole = k.part[y] in (WHOLE, LAID, LIBRARY)
        made.dtype[at] = rest.dtype[low + k.node[y]] if whole else _FP32
        row[0], row[3] = k.n[y], rest.last[low + k.node[y]] if k.how[y] == POINT else k.n[y]
    row[1], row[2], row[4], row[5], row[6] = row[0], 1.0, 0.0, 0.0, np.nan
    row[7] = _since(touched, b)
    made.op[at], made.across[at] = FRESH if row[7] <= _KEPT else _ENTERS, 0
    inside[b] = at
    return at


@compiled
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


_ZEROS, _CASTS = codes_of(["zeros", "cast"]).tolist()
_SMALL = 8e-7  # seconds of a kernel that hardly does anything: medians of 204 fills, of 72 casts


class Lowered(NamedTuple):
    """Kernels as regions; the region each is of, and whether a library has it ready."""

    regions: Regions
    of: Whole
    library: Flags
    known: Array  # seconds of a library's kernel that no product is; 0 for all else


def lowered(regions: Regions, units: float) -> Lowered:
    """The kernels of all regions, on a device of so many units."""
    start = np.searchsorted(regions.target, np.arange(len(regions.op) + 1))
    rest = Rest(regions.dtype, regions.last, regions.flops, regions.seconds)
    room = 8  # times the nodes and edges of the regions: enough for most of them
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


def _empty(nodes: int, edges: int) -> KernelColumns:
    whole = (np.zeros(nodes, np.int64) for _ in range(4))
    return KernelColumns(
        np.zeros(3, np.int64), np.zeros(nodes + 1, np.int64), next(whole), np.zeros(nodes, bool),
        np.zeros(nodes), next(whole), next(whole), next(whole), np.zeros((nodes, 8)),
        np.zeros((edges, 3), np.int64),
    )  # fmt: skip


def _found(made: KernelColumns) -> Lowered:
    kernels, nodes, edges = made.used.tolist()
    elements, looped, inner, last, writes, flops, seconds, since = made.numbers[:nodes].T.copy()
    source, target, pattern = made.edges[:edges].T.copy()
    regions = Regions(
        made.first[: kernels + 1], made.op[:nodes], made.dtype[:nodes], elements, looped, inner,
        made.across[:nodes], last, writes, flops, seconds, source, target, pattern,
        np.ones(kernels, bool), since, lowered=True,
    )  # fmt: skip
    return Lowered(regions, made.of[:kernels], made.library[:kernels], made.known[:kernels])


@compiled
def _lower(o: Ops, rest: Rest, first: I1, units: float, made: KernelColumns) -> bool:
    """Write down the kernels of all regions; False where there is too little room."""
    for r in range(len(first) - 1):
        low, high = first[r], first[r + 1]
        settle(low, high, o.start, o.source, o.kind, o.writes)
        alive = live(low, high, o.start, o.source, o.kind, o.op, o.writes)
        k, v = nests(o, low, high, alive, units)
        group = joined(k, o.elements, o.size, low)
        count, edges = k.used[0], o.start[high] - o.start[low]
        touched = touched_before(o, low, high, count)
        for g in ordered(k, group, o.size, low):
            if made.used[1] + 3 * (high - low + count) + 2 > len(made.op):
                return False
            if made.used[2] + 4 * (edges + 2 * count) + count * count > len(made.edges):
                return False
            known, counted = finished(k, group, g, units)
            n = low + k.node[g]
            if counted:
                _small(made, r, _ZEROS, rest.dtype[n])
            write_down(o, rest, low, high - low, k, v, group, g, touched, made)
            _close(made, r, known, k.part[g] == LIBRARY or known > 0)
            if known > 0 and o.size[n] == 2:
                _small(made, r, _CASTS, rest.dtype[n])
            if PREPARED[o.op[n]] and k.part[g] == LIBRARY:
                made.known[made.used[0] - 1] = _own(rest.seconds[n])
                _small(made, r, _ZEROS, rest.dtype[n])
    return True


@compiled
def _own(seconds):  # type: ignore[no-untyped-def]
    """What a library's kernel took by itself, without the one that prepares it; 0 for unknown."""
    return max(seconds - _SMALL, _SMALL) if seconds > 0 else 0.0


@compiled
def _close(made, r, known, library):  # type: ignore[no-untyped-def]
    """The nodes written down since the last kernel are one of region r."""
    at = made.used[0]
    made.of[at], made.known[at], made.library[at] = r, known, library
    made.used[0] += 1
    made.first[at + 1] = made.used[1]


@compiled
def _small(made, r, op, dtype):  # type: ignore[no-untyped-def]
    """A small kernel that a library launches beside its main one."""
    at = made.used[1]
    made.op[at], made.dtype[at], made.across[at] = op, dtype, 0
    row = made.numbers[at]
    row[:] = 1.0
    row[4], row[5], row[6], row[7] = SIZE[dtype], 0.0, np.nan, 0.0
    made.used[1] += 1
    _close(made, r, _SMALL, True)
