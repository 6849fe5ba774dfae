"""The loop nests of a region: what becomes of each op, one after another (Inductor, torch 2.11).

What a library kernel reads lies in memory, laid out as the library wants it. For a concatenation
(`lowering.cat`) one loop asks at every place which part it is in, where that saves a tensor or all
parts must be copied anyway; else each part is written to its place by itself: by the nest that
makes it, or by one that copies it.
"""

from __future__ import annotations

import numpy as np

from foretell.compiled import compiled
from foretell.cost.fused_realization import (
    ALIGNED,
    COLS,
    FILL,
    FINISH,
    LAID,
    LIBRARY,
    ODD,
    PLACED,
    POINT,
    ROWS,
    TURNED,
    WHOLE,
    Nests,
    Values,
    base,
    expand,
    inline,
    leaves_whole,
    look,
    new,
    realize,
    settle_value,
    take,
)
from foretell.cost.fused_reductions import groups_back, loss, norm, reduce, scatter_loss
from foretell.cost.fused_regions import (
    CAT,
    CONSTANT,
    CONVOLVES,
    EXPANDS,
    EXTERN,
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
    TEMPLATE,
    VIEW,
)
from foretell.cost.fused_scheduler import extent

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
