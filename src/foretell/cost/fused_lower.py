"""Regions lowered to the kernels Inductor would make of them, each a region of its own.

    found = lowered(regions, units)
    found.regions, found.of         # kernels as regions, and the region each belongs to

Ops become loop nests, nests are joined to kernels that run in an order
(→ `fused_scheduler`), and kernels are written down as columns. The nodes of a kernel are the
tensors that enter, be they the region's or what an earlier kernel left, and the ops inside; of a
norm the sums are nodes apart from what uses them. A tensor is `fresh` where no more was touched
since it was than the cache holds.

What a library kernel reads lies in memory, laid out as the library wants it. For a concatenation
(`lowering.cat`) one loop asks at every place which part it is in, where that saves a tensor or all
parts must be copied anyway; else each part is written to its place by itself: by the nest that
makes it, or by one that copies it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foretell.compiled import B1, F1, F2, I1, I2, compiled
from foretell.cost.fused_realization import (
    ALIGNED,
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
    ROWS,
    TURNED,
    WHOLE,
    Array,
    Flags,
    Nests,
    Values,
    Whole,
    base,
    expand,
    groups_back,
    inline,
    leaves_whole,
    look,
    loss,
    new,
    norm,
    realize,
    reduce,
    scatter_loss,
    settle_value,
    take,
)
from foretell.cost.fused_regions import (
    CAT,
    CONSTANT,
    CONVOLVES,
    DTYPES,
    EXPANDS,
    EXTERN,
    FRESH,
    GROUP_BACK,
    INPUT,
    LAYER_BACK,
    LOSS,
    LOSS_BACK,
    NORM,
    POINTWISE,
    PREPARED,
    REDUCTION,
    SCATTER,
    SIZE,
    SOFT,
    TEMPLATE,
    VIEW,
    WELFORD,
    Ops,
    Regions,
    columns_of,
    live,
    settle,
)
from foretell.cost.fused_scheduler import extent, joined, ordered, width
from foretell.cost.fusion_class import codes_of

_FP32 = DTYPES.index("fp32")
_SUM, _SPREADS, _SOFTENS, _ENTERS, _CLONES = codes_of(
    ["sum", "var_mean", "logsumexp", "input", "clone"]
).tolist()
_KEPT = 50.0 * 2**20  # bytes of the H200's second-level cache: what a kernel may still find there


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
def write_down(o, low, nodes, k, v, group, g, touched, made):  # type: ignore[no-untyped-def]
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
                ops[i] = _op(o, low, k, v, group, x, i, ops, inside, touched, made, False)
        last = ops[own]
        if part:
            last = _op(o, low, k, v, group, x, own, ops, inside, touched, made, True)
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
def _op(o, low, k, v, group, x, i, ops, inside, touched, made, part):  # type: ignore[no-untyped-def]
    """Write down an op, or the part of it that a nest of its own computes, after what it reads."""
    n, begins = low + i, made.used[2]
    if not (part and k.part[x] == FINISH):
        for e in range(o.start[n], o.start[n + 1]):
            s = base(o, low, o.source[e] - low)
            b = v.held[s]
            at = ops[s] if b < 0 else -1
            if b >= 0 and (k.reads[x, b] > 0 or inside[b] >= 0):
                at = _enter(o, low, k, group, x, b, inside, touched, made)
            _wire(made, begins, at, o.pattern[e])
    for y in range(k.used[0]):
        b = k.ops.shape[1] + y
        if k.reads[x, b] > 0 and k.node[y] == i and y != x:
            at = _enter(o, low, k, group, x, b, inside, touched, made)
            _wire(made, begins, at, 0 if part else 1)
    at = made.used[1]
    made.used[1] += 1
    made.edges[begins : made.used[2], 1] = at
    _describe(o, n, made, at)
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
def _describe(o, n, made, at):  # type: ignore[no-untyped-def]
    """The columns of an op as the region has them; what is left of a norm reduces nothing."""
    made.op[at], made.dtype[at] = o.op[n], o.dtype[n]
    reduces = o.kind[n] != NORM
    made.across[at] = o.across[n] if reduces else 0
    row = made.numbers[at]
    row[0], row[1], row[2] = o.elements[n], o.looped[n], o.inner[n] if reduces else 1.0
    row[3], row[4], row[5], row[6] = o.last[n], 0.0, o.flops[n], o.seconds[n]


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
def _enter(o, low, k, group, x, b, inside, touched, made):  # type: ignore[no-untyped-def]
    """The node of a tensor that a kernel reads."""
    if inside[b] >= 0:
        return inside[b]
    at, nodes = made.used[1], k.ops.shape[1]
    made.used[1] += 1
    row = made.numbers[at]
    if b < nodes:
        made.dtype[at], row[3] = o.dtype[low + b], o.last[low + b]
        row[0] = _read(o, low, k, group, x, b)
    else:
        y = b - nodes
        whole = k.part[y] in (WHOLE, LAID, LIBRARY)
        made.dtype[at] = o.dtype[low + k.node[y]] if whole else _FP32
        row[0], row[3] = k.n[y], o.last[low + k.node[y]] if k.how[y] == POINT else k.n[y]
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
    room = 8  # times the nodes and edges of the regions: enough for most of them
    while True:
        o = columns_of(regions)
        made = _empty(room * (len(regions.op) + 64), room * (len(regions.source) + 128))
        if _lower(o, regions.first, units, made):
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
def _lower(o: Ops, first: I1, units: float, made: KernelColumns) -> bool:
    """Write down the kernels of all regions; False where there is too little room."""
    for r in range(len(first) - 1):
        low, high = first[r], first[r + 1]
        settle(o, low, high)
        alive = live(o, low, high)
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
                _small(made, r, _ZEROS, o.dtype[n])
            write_down(o, low, high - low, k, v, group, g, touched, made)
            _close(made, r, known, k.part[g] == LIBRARY or known > 0)
            if known > 0 and o.size[n] == 2:
                _small(made, r, _CASTS, o.dtype[n])
            if PREPARED[o.op[n]] and k.part[g] == LIBRARY:
                made.known[made.used[0] - 1] = _own(o.seconds[n])
                _small(made, r, _ZEROS, o.dtype[n])
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


_MOST = 8  # parts of one loop (`MAX_COMPLEX_POINTWISE_CAT`)


@compiled
def joins(o, n, low, k, v, inside):  # type: ignore[no-untyped-def]
    """Whether a concatenation is one loop; `inside` says that only such loops read it."""
    first, last = o.start[n], o.start[n + 1]
    every, some, reduced = True, False, False
    for e in range(first, last):
        s = o.source[e] - low
        copied = _is_copied(k, v, s)
        every, some = every and copied, some or copied
        reduced |= _follows(k, v, s)
    return last - first <= _MOST and ((inside and some) or (every and not reduced))


@compiled
def _is_copied(k, v, s):  # type: ignore[no-untyped-def]
    """Whether a part is no nest's own result that could be written to its place at once."""
    at = v.held[s] - len(v.held)
    return at < 0 or v.access[s] != ALIGNED or (k.leaves[at] > 0 and k.part[at] == WHOLE)


@compiled
def _follows(k, v, s):  # type: ignore[no-untyped-def]
    """Whether a part is a reduction or reads one."""
    nodes = len(v.held)
    if v.held[s] >= nodes:
        return k.how[v.held[s] - nodes] != POINT
    for y in range(k.used[0]):
        if v.reads[s, nodes + y] > 0 and k.how[y] != POINT:
            return True
    return False


@compiled
def concatenate(o, n, low, k, v):  # type: ignore[no-untyped-def]
    """A nest for each part that must be copied, one for all that enter; the others leave so."""
    i, nodes, enters = n - low, len(v.held), -1
    for e in range(o.start[n], o.start[n + 1]):
        s = o.source[e] - low
        left = o.elements[s + low] * o.size[n] if o.writes[n] > 0 else 0.0
        if not _is_copied(k, v, s):
            at = v.held[s] - nodes
            left = 0.0 if k.part[at] == LIBRARY else left
        elif 0 <= v.held[s] < nodes and enters >= 0:
            at = enters
            k.n[at] += o.elements[s + low]
        else:
            at = new(k, i, POINT, WHOLE, o.elements[s + low], 1.0)
            k.shape[at] = v.shaped[s]
            enters = at if 0 <= v.held[s] < nodes else enters
        if _is_copied(k, v, s):
            take(v, s, 2 if o.pattern[e] == 2 else 0, 0, k.reads[at], k.ops[at])
        k.leaves[at] += left
        v.reads[i, nodes + at] = ODD + PLACED + e - o.start[n]
        v.held[i] = nodes + at if o.writes[n] > 0 else -1
    v.ops[i, i] = v.held[i] < 0
    if v.held[i] >= 0:
        v.reads[i, :] = 0


# What torch's own sum of columns took on an H200, in seconds: under so many rows a thread each row
# adds, from there on blocks count themselves, by numbers set to zero before, and read bytes.
_FEW, _START, _ROW = 256, 2.2e-6, 1.52e-8
_COUNTED, _BYTE = 6.5e-6, 3.3e-13


@compiled
def library(o, n, low, k, v):  # type: ignore[no-untyped-def]
    """A library's kernel: what it reads must lie in memory."""
    i = n - low
    for e in range(o.start[n], o.start[n + 1]):
        s = base(o, low, o.source[e] - low)
        if v.held[s] < 0 and v.ops[s].any():
            realize(o, s + low, low, k, v, WHOLE)
        take(v, s, 0, ODD + i, v.reads[i], v.ops[i])
    turned = CONVOLVES[o.op[n]] and lay_out(o, n, low, k, v)
    realize(o, n, low, k, v, LIBRARY)
    if turned:
        v.access[i] = TURNED


@compiled
def lay_out(o, n, low, k, v):  # type: ignore[no-untyped-def]
    """Copies of an image and a filter with channels last; whether the result is turned by that.

    Inductor does so for all but few channels and filters that make them fewer
    (`GraphLowering.decide_layout_opt`).
    """
    deep = o.flops[n] / (2 * max(o.elements[n], 1.0))
    if o.start[n + 1] - o.start[n] < 2 or deep < 1:
        return False  # what it reads is not given
    x, w = o.source[o.start[n]], o.source[o.start[n] + 1]
    if v.held[x - low] < 0 or v.held[w - low] < 0:
        return False
    side = (
        o.last[w] if o.last[w] < deep else 1.0
    )  # of a filter; one of a single place ends in channels
    channels, made = deep / side**2, o.elements[w] / deep
    grouped = channels > 1 and o.last[x] != channels and o.elements[x] % channels != 0
    fewer, few = made * 2 <= channels and side > 1, made <= 64 and channels <= 64
    last = o.last[x] == channels or (channels == 1 and o.last[x] == made)
    better = not (grouped or fewer or few)
    if better and not last:
        _copy(o, n, low, k, v, x - low)
    if side > 1 and channels > 1 and (better or last):
        _copy(o, n, low, k, v, w - low)
    return (better and not last) or (last and not _is_channels_last(o, n, low + len(v.held), made))


@compiled
def _is_channels_last(o, n, high, channels):  # type: ignore[no-untyped-def]
    """Whether the reader of an image takes it with its channels last, as they will be."""
    for t in range(n + 1, high):
        for e in range(o.start[t], o.start[t + 1]):
            if o.source[e] == n:
                return o.last[t] == channels or o.across[t] == 2
    return True


@compiled
def _copy(o, n, low, k, v, s):  # type: ignore[no-untyped-def]
    i, b = n - low, v.held[s]
    at = new(k, i, POINT, LAID, o.elements[low + s], 1.0)
    k.reads[at, b], v.reads[i, b] = ALIGNED, 0
    v.reads[i, len(v.held) + at] = ODD + i


@compiled
def finished(k, group, g, units):  # type: ignore[no-untyped-def]
    """Seconds of a sum of columns that rows were summed beside: torch finishes it; 0 for others.

    And whether a kernel before it sets the numbers to zero by which its blocks count themselves.
    """
    nodes = k.ops.shape[1]
    if k.part[g] != FINISH or k.how[g] != COLS:
        return 0.0, False
    for y in range(k.used[0]):
        if k.reads[g, nodes + y] > 0 and k.how[y] == COLS:
            rows, _, how = extent(k, group, group[y])
            if how == ROWS:
                return _by_torch(rows, k.n[g], units)
    return 0.0, False


@compiled
def _by_torch(rows, columns, units):  # type: ignore[no-untyped-def]
    """Seconds to sum the parts of columns, as many as rows in groups of 16 to 128."""
    each = 16.0
    while each < 128 and 2 * each <= rows // (8 * units):
        each *= 2
    parts = np.ceil(rows / each)
    # Threads of a block one below the other: 512 in all, or 128 that take four columns each.
    below = 4.0 if columns >= 128 else 512 / 2.0 ** np.floor(np.log2(columns))
    if parts < _FEW * below:
        return _START + _ROW * parts, False
    return _COUNTED + _BYTE * parts * columns * 4, True


# Nests a sum has at most, and how many sums a norm, beside the nest each op may be.
_SUM_NESTS = 3
_NORM_SUMS = np.where(LAYER_BACK, 4, np.where(GROUP_BACK, 5, 2))


@compiled
def nests(o, low, high, alive, units):  # type: ignore[no-untyped-def]
    """The loop nests of a region, and where its values are."""
    size, most = high - low, 2
    for n in range(low, high):
        most += 1 if o.kind[n] != CAT else o.start[n + 1] - o.start[n]
        if o.kind[n] in (NORM, REDUCTION):
            most += _SUM_NESTS * (_NORM_SUMS[o.op[n]] if o.kind[n] == NORM else 1)
        most += 2 if o.kind[n] == TEMPLATE else 0
    k = Nests(
        np.zeros(1, np.int64), np.zeros(most, np.int64), np.zeros(most, np.int64),
        np.zeros(most, np.int64), np.zeros(most), np.ones(most), np.zeros(most), np.zeros(most),
        np.zeros((most, size + most), np.int16), np.zeros((most, size), np.bool_),
        np.full(most, -1), np.zeros(most, np.bool_),
    )  # fmt: skip
    v = Values(
        np.full(size, -1), np.ones(size, np.int16), np.full(size, -1),
        np.zeros((size, size + most), np.int16), np.zeros((size, size), np.bool_),
        np.full(size, -1),
    )  # fmt: skip
    users = _users(o, low, high, alive)
    inside = _inside(o, low, high, alive)
    for n in range(low, high):
        if not alive[n - low]:
            continue
        if o.kind[n] == CAT and not joins(o, n, low, k, v, inside[n - low]):
            concatenate(o, n, low, k, v)
        else:
            _place(o, n, low, k, v, units, users[n - low])
    return k, v


@compiled
def _inside(o, low, high, alive):  # type: ignore[no-untyped-def]
    """Whether all that reads a node computes place by place, and none of it leaves."""
    inside = o.writes[low:high] == 0
    for n in range(high - 1, low - 1, -1):
        if alive[n - low]:
            plain = inside[n - low] if o.kind[n] == VIEW else o.kind[n] in (POINTWISE, CAT)
            for e in range(o.start[n], o.start[n + 1]):
                inside[o.source[e] - low] &= plain
    return inside


@compiled
def _users(o, low, high, alive):  # type: ignore[no-untyped-def]
    """How many ops read each node; a norm reads twice."""
    users = np.zeros(high - low, np.int64)
    for n in range(high - 1, low - 1, -1):
        if alive[n - low]:
            mine = max(users[n - low], 1) if o.kind[n] == VIEW else 2 if o.kind[n] == NORM else 1
            for e in range(o.start[n], o.start[n + 1]):
                users[o.source[e] - low] += mine
    return users


@compiled
def _place(o, n, low, k, v, units, users):  # type: ignore[no-untyped-def]
    """What becomes of one op."""
    kind, op = o.kind[n], o.op[n]
    if kind == INPUT:
        v.held[n - low] = n - low
    elif kind == VIEW:
        if EXPANDS[op]:
            expand(o, n, low, k, v)
        look(o, n, low, v)
    elif kind == CONSTANT:
        if o.writes[n] > 0:
            realize(o, n, low, k, v, FILL)
    elif kind in (TEMPLATE, EXTERN, SCATTER) or PREPARED[op]:
        library(o, n, low, k, v)
    elif LOSS[op]:
        loss(o, n, low, k, v)
    elif kind == REDUCTION and not LOSS_BACK[op]:
        reduce(o, n, low, k, v, units, users)
    else:
        _place_value(o, n, low, k, v, units)
        settle_value(o, n, low, k, v, users)


@compiled
def _place_value(o, n, low, k, v, units):  # type: ignore[no-untyped-def]
    op = o.op[n]
    if o.kind[n] != NORM:
        if LOSS_BACK[op]:
            scatter_loss(o, n, low, k, v)
        inline(o, n, low, k, v)
        return
    if GROUP_BACK[op] and o.start[n + 1] - o.start[n] > 1:
        groups_back(o, n, low, k, v, units)
    else:
        norm(o, n, low, k, v, units)
    small = v.small[n - low] - len(v.held)
    if small >= 0 and o.writes[n] > 0 and not leaves_whole(o, n) and not LAYER_BACK[op]:
        k.leaves[small] = o.writes[n]
