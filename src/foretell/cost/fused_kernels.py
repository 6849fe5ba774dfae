"""Regions lowered to the kernels Inductor (torch 2.11) would make of them, each a region itself.

    found = lowered(regions, units)
    found.regions, found.of         # kernels as regions, and the region each belongs to

Ops become loop nests (→ `fused_nests`). Two groups of nests may be joined where one reads what the
other makes or both read the same, where their loops fit, and where nothing outside lies between
them. Those with the most bytes in common are joined first, two that reduce or two that do not
before one of each.

What an earlier kernel touched may still lie in the cache, so the order decides which kernel waits
for memory. Inductor begins with the kernels in the order of their first loop nests, each after what
it needs, and takes another order where its peak of memory is lower: the kernel next that adds the
least, the one whose needs were met first, or small ones first (`reorder_for_peak_memory`).
Tensors that enter are never freed.

Kernels are written down as columns. The nodes of one are the tensors that enter, be they the
region's or what an earlier kernel left, and the ops inside; of a norm the sums are nodes apart from
what uses them. A tensor is `fresh` where no more was touched since it was than the cache holds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foretell.compiled import B1, F1, F2, I1, I2, compiled
from foretell.cost.fused_nests import (
    ALIGNED,
    COLS,
    FILL,
    FINISH,
    GROUPED,
    LAID,
    LIBRARY,
    MOVED,
    ODD,
    PARTIAL,
    PLACED,
    POINT,
    REDUCE,
    ROWS,
    SPREAD,
    SWAPPED,
    TURNED,
    WHOLE,
    Array,
    Flags,
    Whole,
    base,
    nests,
    turns,
)  # fmt: skip
from foretell.cost.fused_regions import (
    DTYPES,
    FRESH,
    INPUT,
    NORM,
    PREPARED,
    SIZE,
    SOFT,
    WELFORD,
    Ops,
    Regions,
    codes_of,
    columns_of,
    hand_writes_to_bases,
    live,
)  # fmt: skip

_LEAST = 10.0  # bytes in common worth a join (`score_fusion_memory_threshold`)
_ALIKE = 1e15  # more than any tensor has bytes
_LATE = 1e-15  # where loops must be put in another order first, which is tried last
# Sums of rows and of columns share a pass over tensors of so many elements, with so many rows, at
# least so many times as many as columns, of which there are no more than (`MixOrderReduction`).
_MIXED, _MIXED_ROWS, _MIXED_RATIO, _MIXED_COLUMNS = 5.0 * 2**20, 4096, 2, 16384


@compiled
def fuse_nests(k, elements, size, low):  # type: ignore[no-untyped-def]
    """The group of each nest: the number of its first nest."""
    count = k.used[0]
    group = np.arange(count)
    if count < 2:
        return group
    score, shared = np.zeros((count, count)), np.full((count, count), -1.0)
    for a in range(count):
        for b in range(a + 1, count):
            score[a, b] = _score(k, group, elements, size, low, shared, a, b)
    while _fuse_best_pair(k, group, score, elements, size, low, shared):
        pass
    return group


@compiled
def _fuse_best_pair(k, group, score, elements, size, low, shared):  # type: ignore[no-untyped-def]
    """Join the two groups that gain most; whether there were any."""
    count = len(group)
    left = score.copy()
    a: int
    b: int
    while True:
        at = np.argmax(left)
        a, b = int(at) // count, int(at) % count
        if left[a, b] <= 0:
            return False
        if not (_path_outside(k, group, a, b) or _path_outside(k, group, b, a)):
            break
        left[a, b] = 0.0
    for x in range(count):
        if group[x] == b:
            group[x] = a
    score[b, :] = 0.0
    score[:, b] = 0.0
    for x in range(count):
        if group[x] == x and x != a:
            low_, high_ = min(a, x), max(a, x)
            score[low_, high_] = _score(k, group, elements, size, low, shared, low_, high_)
    return True


@compiled
def _score(k, group, elements, size, low, shared, a, b):  # type: ignore[no-untyped-def]
    """What joining two groups gains; 0 where they may not be joined.

    `shared` keeps what two nests have in common, below 0 where it is not computed yet.
    """
    n1, r1, how1 = extent(k, group, a)
    n2, r2, how2 = extent(k, group, b)
    if not _loops_fit(k, group, a, b, n1, r1, how1, n2, r2, how2):
        return 0.0
    n, r = (n1, r1) if how1 != POINT else (n2, r2) if how2 != POINT else (-1.0, 1.0)
    most, uses, nodes = 0.0, False, k.ops.shape[1]
    for x in range(len(group)):
        if group[x] == a:
            for y in range(len(group)):
                if group[y] == b:
                    if not (_in_time(k, x, y, n, r) and _in_time(k, y, x, n, r)):
                        return 0.0
                    if shared[x, y] < 0:
                        shared[x, y] = _shared_bytes(k, elements, size, low, x, y)
                    most = max(most, shared[x, y])
                    uses |= k.reads[y, nodes + x] > 0 or k.reads[x, nodes + y] > 0
    if most < _LEAST and not uses:
        return 0.0
    if (how1 == POINT) == (how2 == POINT):
        return most + _ALIKE
    return most * (_LATE if COLS in (how1, how2) and _parts(k, group, a, b) else 1.0)


@compiled
def extent(k, group, a):  # type: ignore[no-untyped-def]
    """Results, places of each, and way of a group's loops; of a library's kernel none."""
    n, r, how = 0.0, 1.0, POINT
    for x in range(len(group)):
        if group[x] == a:
            if k.part[x] == LIBRARY:
                return -1.0, 1.0, POINT
            if k.how[x] != POINT and how != ROWS:  # of rows and columns in one pass the rows
                n, r, how = k.n[x], k.r[x], k.how[x]
            elif how == POINT:
                n = k.n[x]
    return n, r, how


@compiled
def _loops_fit(k, group, a, b, n1, r1, how1, n2, r2, how2):  # type: ignore[no-untyped-def]
    """Whether the loops of two groups can be one."""
    if n1 < 0 or n2 < 0:
        return False
    if how1 != POINT and how2 != POINT:
        same = n1 == n2 and r1 == r2 and how1 == how2
        same &= how1 != COLS or _turned(k, group, a) == _turned(k, group, b)
        return same or _mixes(k, group, a, b, n1, r1, how1) or _mixes(k, group, b, a, n2, r2, how2)
    if how1 == POINT and how2 == POINT:
        return n1 == n2
    if how1 == POINT:
        return n1 == n2 or (n1 == n2 * r2 and _whole(k, group, b))
    return n2 == n1 or (n2 == n1 * r1 and _whole(k, group, a))


@compiled
def _turned(k, group, a):  # type: ignore[no-untyped-def]
    """Whether partial sums of a group read something in another order of memory."""
    for x in range(len(group)):
        if group[x] == a and k.part[x] == PARTIAL and (k.reads[x] == TURNED).any():
            return True
    return False


@compiled
def _parts(k, group, a, b):  # type: ignore[no-untyped-def]
    """Whether there are partial sums in one of two groups."""
    for x in range(len(group)):
        if group[x] in (a, b) and k.part[x] == PARTIAL:
            return True
    return False


@compiled
def _whole(k, group, a):  # type: ignore[no-untyped-def]
    """Whether a group's reduction is not split: partial sums of columns take no loop along."""
    whole, partial = False, False
    for x in range(len(group)):
        if group[x] == a and k.how[x] != POINT:
            whole |= k.part[x] != PARTIAL or k.even[x]
            partial |= k.part[x] == PARTIAL
    return whole or not partial


@compiled
def _mixes(k, group, a, b, n, r, how):  # type: ignore[no-untyped-def]
    """Whether the columns of what group a sums along rows are summed by b, in the same pass."""
    for x in range(len(group)):
        columns = k.how[x] == COLS and k.part[x] <= PARTIAL and k.base[x] == r
        if group[x] == b and not columns:
            return False
    large = n * r >= _MIXED and n >= _MIXED_RATIO * r and n >= _MIXED_ROWS
    return how == ROWS and large and r <= _MIXED_COLUMNS and _whole(k, group, a)


@compiled
def _in_time(k, x, y, n, r):  # type: ignore[no-untyped-def]
    """Whether nest y reads of nest x, if anything, what a common loop has made by then."""
    code = k.reads[y, k.ops.shape[1] + x]
    return code <= 0 or _reads_just_made(k, x, y, code, n, r)


@compiled
def _shared_bytes(k, elements, size, low, x, y):  # type: ignore[no-untyped-def]
    """Bytes of the largest tensor two nests share."""
    nodes, most = k.ops.shape[1], 0.0
    apart = _shapes_differ(k, x, y)
    for b in range(nodes):
        if k.reads[x, b] > 0 and _same_access(k.reads[x, b], k.reads[y, b]) and not apart:
            most = max(most, elements[low + b] * size[low + b])
    for z in range(k.used[0]):
        b = nodes + z
        one = ALIGNED if z == x else k.reads[x, b]
        other = ALIGNED if z == y else k.reads[y, b]
        if one > 0 and other > 0 and (z in (x, y) or _same_access(one, other)):
            most = max(most, k.n[z] * 4.0)
    return most


@compiled
def _shapes_differ(k, x, y):  # type: ignore[no-untyped-def]
    """Whether the loops of two nests have shapes of which none can be turned into the other."""
    if k.shape[x] == k.shape[y]:
        return False
    if k.shape[x] >= GROUPED or k.shape[y] >= GROUPED:
        return True
    if (k.how[x] == COLS) == (k.how[y] == COLS):
        return False
    return not (k.even[x] or k.even[y])


@compiled
def _same_access(one, other):  # type: ignore[no-untyped-def]
    """Whether two ways to read a tensor are the same."""
    return one == other or (turns(one) and turns(other))


@compiled
def _reads_just_made(k, x, y, code, n, r):  # type: ignore[no-untyped-def]
    """Whether nest y reads of nest x what their common loop, of n rows of r, has just made."""
    places = k.n[y] * k.r[y]
    if k.how[x] == POINT:
        if code in (ALIGNED, TURNED, SWAPPED):
            even = k.even[y] and k.n[y] == n and k.r[y] == r
            whole = k.how[y] == POINT or k.part[y] != PARTIAL or even
            return k.n[x] == places and whole and not _shapes_differ(k, x, y)
        follows = k.reads[x, k.ops.shape[1] :].any()
        return code == SPREAD and k.n[x] == n and places == n * r and follows
    if code == ALIGNED and k.n[x] == places:
        return True
    by_rows = code in (SPREAD, ALIGNED, SWAPPED) or (code >= MOVED and k.how[x] == ROWS)
    return by_rows and places == k.n[x] * k.r[x] and k.part[x] == REDUCE


@compiled
def _path_outside(k, group, a, b):  # type: ignore[no-untyped-def]
    """Whether something outside reads group a and group b reads that."""
    count, nodes = len(group), k.ops.shape[1]
    after = np.zeros(count, np.bool_)
    again = True
    while again:
        again = False
        for y in range(count):
            g = group[y]
            for x in range(count):
                if g == group[x] or k.reads[y, nodes + x] == 0 or g == a:
                    continue
                if after[group[x]] and g == b:
                    return True
                if g != b and not after[g] and (after[group[x]] or group[x] == a):
                    after[g] = True
                    again = True
    return False


class Kernels(NamedTuple):
    """The kernels of one region, and what they hand to each other: results of nests."""

    first: Whole  # the nest each is named by
    maker: Whole  # the kernel of each nest
    size: Array  # bytes of each nest's result
    leaves: Flags  # whether a nest's result leaves the region
    reads: Flags  # kernels by nests: results of other kernels that one reads
    made: Array  # bytes each kernel makes


@compiled
def ordered(k, group, size, low):  # type: ignore[no-untyped-def]
    """The first nest of each kernel, in the order they run; `size` has bytes by node."""
    p = _kernels(k, group, size, low)
    count = len(p.first)
    if count < 2:
        return p.first
    plain = _order_by_rank(p, np.arange(count).astype(np.float64))
    p = _renumbered(p, plain)
    best = np.arange(count)
    least = _peak(p, best)
    for way in range(3):
        if way == 0:
            order = _order_by_least_memory(p)
        elif way == 1:
            order = _order_breadth_first(p)
        else:
            order = _order_by_rank(p, p.made + p.reads.astype(np.float64) @ p.size)
        peak = _peak(p, order)
        if peak < least:
            best, least = order, peak
    return p.first[best]


@compiled
def _kernels(k, group, size, low):  # type: ignore[no-untyped-def]
    """The kernels in the order of their first nests."""
    nests, nodes = k.used[0], k.ops.shape[1]
    first = np.flatnonzero(group[:nests] == np.arange(nests))
    number = np.zeros(nests, np.int64)
    number[first] = np.arange(len(first))
    maker = number[group[:nests]]
    bytes_ = np.zeros(nests)
    reads, made = np.zeros((len(first), nests), np.bool_), np.zeros(len(first))
    for x in range(nests):
        bytes_[x] = k.n[x] * width(k, x, size, low)
        made[maker[x]] += bytes_[x]
        for y in range(nests):
            if maker[y] != maker[x] and k.reads[y, nodes + x] > 0:
                reads[maker[y], x] = True
    return Kernels(first, maker, bytes_, k.leaves[:nests] > 0, reads, made)


@compiled
def width(k, x, size, low):  # type: ignore[no-untyped-def]
    """Bytes of one element of a nest's result: sums are held in single precision."""
    return size[low + k.node[x]] if k.part[x] in (WHOLE, LAID, LIBRARY) else 4.0


@compiled
def _renumbered(p, order):  # type: ignore[no-untyped-def]
    """The same kernels, numbered in an order."""
    place = np.zeros(len(order), np.int64)
    place[order] = np.arange(len(order))
    return Kernels(p.first[order], place[p.maker], p.size, p.leaves, p.reads[order], p.made[order])


@compiled
def _order_by_rank(p, rank):  # type: ignore[no-untyped-def]
    """Kernels by rank, each after what it needs, that by rank too."""
    count = len(p.first)
    order, done, used = np.zeros(count, np.int64), np.zeros(count, np.bool_), 0
    by_rank = np.argsort(rank, kind="mergesort")
    waiting = np.zeros(count + 1, np.int64)
    for start in by_rank:
        waiting[0], depth = start, 0 if not done[start] else -1
        while depth >= 0:
            need = _unmet(p, waiting[depth], by_rank, done)
            if need >= 0 and depth < count:
                depth += 1
                waiting[depth] = need
            else:
                order[used], done[waiting[depth]] = waiting[depth], True
                used += 1
                depth -= 1
    return order


@compiled
def _unmet(p, kernel, by_rank, done):  # type: ignore[no-untyped-def]
    """The first kernel by rank that another waits for; -1 for none."""
    for b in by_rank:
        if not done[b] and b != kernel:
            for x in range(len(p.maker)):
                if p.maker[x] == b and p.reads[kernel, x]:
                    return b
    return -1


@compiled
def _peak(p, order):  # type: ignore[no-untyped-def]
    """The most bytes that lie in memory at once."""
    left = p.reads.sum(axis=0) + p.leaves  # readers to come of each result
    here = most = 0.0
    for g in order:
        here += p.made[g]
        most = max(most, here)
        for x in range(len(p.maker)):
            if p.reads[g, x]:
                left[x] -= 1
            if left[x] == 0 and (p.reads[g, x] or p.maker[x] == g):
                here -= p.size[x]
    return most


@compiled
def _order_by_least_memory(p):  # type: ignore[no-untyped-def]
    """The kernel next that adds least, where it raises the peak least (`topological_sort_lpmf`)."""
    count = len(p.first)
    order, done = np.zeros(count, np.int64), np.zeros(count, np.bool_)
    left = p.reads.sum(axis=0) + p.leaves
    here, most = 0.0, (p.size * p.leaves).sum()
    for step in range(count):
        chosen, raised, added = -1, 0.0, 0.0
        for g in range(count):
            if done[g] or not _ready(p, g, done):
                continue
            up = p.made[g] if p.made[g] > most - here else 0.0
            more = p.made[g] - _freed(p, g, left)
            if chosen < 0 or up < raised or (up == raised and more < added):
                chosen, raised, added = g, up, more
        order[step], done[chosen] = chosen, True
        most = max(most, here + p.made[chosen])
        here += added
        left -= p.reads[chosen]
    return order


@compiled
def _freed(p, g, left):  # type: ignore[no-untyped-def]
    """Bytes nothing needs once a kernel has run."""
    freed = 0.0
    for x in range(len(p.maker)):
        if (p.reads[g, x] and left[x] == 1) or (p.maker[x] == g and left[x] == 0):
            freed += p.size[x]
    return freed


@compiled
def _ready(p, g, done):  # type: ignore[no-untyped-def]
    """Whether all that a kernel needs has run."""
    for x in range(len(p.maker)):
        if p.reads[g, x] and not done[p.maker[x]]:
            return False
    return True


@compiled
def _order_breadth_first(p):  # type: ignore[no-untyped-def]
    """The kernel next whose needs were met first (`topological_sort_bfs`)."""
    count = len(p.first)
    place = np.full(count, -1)
    order = np.zeros(count, np.int64)
    for step in range(count):
        chosen = -1
        for g in range(count):
            ready = place[g] < 0 and _ready(p, g, place >= 0)
            if ready and (chosen < 0 or _sooner(p, g, chosen, place)):
                chosen = g
        order[step], place[chosen] = chosen, step
    return order


@compiled
def _sooner(p, a, b, place):  # type: ignore[no-untyped-def]
    """Whether the places of what one needs come before those of another, place by place."""
    for step in range(len(place)):
        mine, theirs = _needs_at(p, a, place, step), _needs_at(p, b, place, step)
        if mine != theirs:
            return _needs_after(p, b, place, step) if mine else not _needs_after(p, a, place, step)
    return False


@compiled
def _needs_at(p, g, place, step):  # type: ignore[no-untyped-def]
    for x in range(len(p.maker)):
        if p.reads[g, x] and place[p.maker[x]] == step:
            return True
    return False


@compiled
def _needs_after(p, g, place, step):  # type: ignore[no-untyped-def]
    """Whether a kernel needs anything that came after a step."""
    for x in range(len(p.maker)):
        if p.reads[g, x] and place[p.maker[x]] > step:
            return True
    return False


# What torch's own sum of columns took on an H200, in seconds: under so many rows a thread each row
# adds, from there on blocks count themselves, by numbers set to zero before, and read bytes.
_FEW, _START, _ROW = 256, 2.2e-6, 1.52e-8
_COUNTED, _BYTE = 6.5e-6, 3.3e-13


@compiled
def column_sum_seconds(k, group, g, units):  # type: ignore[no-untyped-def]
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
        made.numbers[last, 4] += _bytes_left(o, low, k, group, x)
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
        if own and _bytes_left(o, low, k, group, x) == 0:
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
def _bytes_left(o, low, k, group, x):  # type: ignore[no-untyped-def]
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
            return _as_regions(made)
        room *= 2


def _empty(nodes: int, edges: int) -> KernelColumns:
    whole = (np.zeros(nodes, np.int64) for _ in range(4))
    return KernelColumns(
        np.zeros(3, np.int64), np.zeros(nodes + 1, np.int64), next(whole), np.zeros(nodes, bool),
        np.zeros(nodes), next(whole), next(whole), next(whole), np.zeros((nodes, 8)),
        np.zeros((edges, 3), np.int64),
    )  # fmt: skip


def _as_regions(made: KernelColumns) -> Lowered:
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
        hand_writes_to_bases(o, low, high)
        alive = live(o, low, high)
        k, v = nests(o, low, high, alive, units)
        group = fuse_nests(k, o.elements, o.size, low)
        count, edges = k.used[0], o.start[high] - o.start[low]
        touched = touched_before(o, low, high, count)
        for g in ordered(k, group, o.size, low):
            if made.used[1] + 3 * (high - low + count) + 2 > len(made.op):
                return False
            if made.used[2] + 4 * (edges + 2 * count) + count * count > len(made.edges):
                return False
            known, counted = column_sum_seconds(k, group, g, units)
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
