"""One reduction as the loop nests Inductor (torch 2.11) cuts it into.

With few results it is split: one nest makes partial sums, another finishes them. Parts that do not
lie side by side are split again, and so is what is finished where the middle and the spread are
found together (Welford).
"""

from __future__ import annotations

import numpy as np

from foretell.compiled import compiled
from foretell.cost.fused_codes import BATCH, GROUPS, INPUT, NEVER_SPLIT, WELFORD
from foretell.cost.fused_values import (
    ALIGNED,
    COLS,
    FINISH,
    PARTIAL,
    POINT,
    REDUCE,
    ROWS,
    SPREAD,
    TURNED,
    is_part,
    new,
)


@compiled
def splits(n, r, rows, units):  # type: ignore[no-untyped-def]
    """Parts a reduction is cut into (`Reduction.num_splits`, `reduction_split_factor`)."""
    if n > 1 and (r <= 32 or n >= units * 64):
        return 1
    least, most = 32.0 * units * 2048, 512.0 * units * 2048
    if rows and (n >= 2 * units or r <= 8192):
        return 1
    group = 256 if rows else 4  # places that threads of one block, or one thread, take at a time
    if n * r < least:
        each = 32.0
    elif n * r >= most:
        each = _even(r, 512.0, 50.0, 1.0)
    elif rows:
        blocks = np.ceil(units * 2048 // 512 / n)
        each = _even(r, np.ceil(r / (group * blocks)), 30.0, 32.0)
    else:
        blocks = np.ceil(units * 2048 // 256 / np.ceil(n / 128))
        each = _even(r, np.ceil(r / (group * blocks)), 20.0, 32.0)
    return int(np.ceil(r / (group * each)))


@compiled
def _even(r, each, near, least):  # type: ignore[no-untyped-def]
    """A divisor close by, if there is one."""
    for d in range(int(near)):
        if each - d >= 1 and r % (each - d) == 0:
            return max(each - d, least)
        if r % (each + d) == 0:
            return max(each + d, least)
    return each


@compiled
def _way(o, low, k, places, how, reads):  # type: ignore[no-untyped-def]
    """Along rows or down columns, as most of the tensors read whole lie."""
    side, apart, nodes = 0, 0, k.ops.shape[1]
    for b in range(len(reads)):
        whole = o.elements[low + b] if b < nodes else k.n[b - nodes]
        if reads[b] > 0 and whole >= places:
            along = (reads[b] == TURNED) != (how == ROWS)
            side, apart = side + along, apart + (not along)
    if side + apart == 0:
        return how
    return ROWS if side > apart else COLS


@compiled
def summed(o, low, i, k, n, r, how, units, reads, ops, shape):  # type: ignore[no-untyped-def]
    """The nests of one reduction of what a view gave its shape; the number of the last."""
    op = o.op[low + i]
    if not GROUPS[op]:
        how = _way(o, low, k, n * r, how, reads)
    along = how == ROWS or n == 1
    cut = 1 if NEVER_SPLIT[op] else splits(n, r, along, units)
    results, rest, within = n * cut, np.ceil(r / cut), 1
    if cut > 1:
        flat = along and _flat(o, low, i, k, n, how, reads)
        within = splits(results, rest, flat, units)
    at = new(k, i, how, PARTIAL if cut > 1 else REDUCE, results * within, np.ceil(rest / within))
    k.base[at], k.shape[at] = n, shape
    k.even[at] = cut > 1 and _even_parts(o, low, i, k, at, how, n, r)
    k.reads[at, :] = reads
    k.ops[at, :] |= ops
    if within > 1:
        at = finish(k, i, how, results, float(within), at)
    while cut > 1:
        again = splits(n, float(cut), along, units) if WELFORD[op] and within == 1 else 1
        at = finish(k, i, how, n * again, np.ceil(cut / again), at)
        cut = again
    return at


@compiled
def _even_parts(o, low, i, k, at, how, n, r):  # type: ignore[no-untyped-def]
    """Whether partial sums are cut where the tensors they are of have a dimension.

    Whole rows are, and along rows powers of two; of columns a tensor with a number for each row, or
    one that is the same for each part, shows how many rows there are in one.
    """
    if how == ROWS:
        rows = (
            k.r[at] == o.last[low + i] and k.r[at] * k.n[at] == n * r and not BATCH[o.op[low + i]]
        )
        return rows or (n == 1 and 2.0 ** np.round(np.log2(r)) == r)
    if k.r[at] * k.n[at] != n * r:
        return False
    for b in range(low, low + k.ops.shape[1]):
        if o.kind[b] == INPUT and o.last[b] > 1:
            rows = o.elements[b] == r and o.last[b] == k.r[at]
            if rows or (o.elements[b] < n * r and o.elements[b] / o.last[b] == k.r[at]):
                return True
    return False


@compiled
def finish(k, i, how, n, r, before):  # type: ignore[no-untyped-def]
    """A nest that sums what another has left."""
    at = new(k, i, how, FINISH, n, r)
    k.reads[at, k.ops.shape[1] + before] = ALIGNED
    return at


@compiled
def _flat(o, low, i, k, n, how, reads):  # type: ignore[no-untyped-def]
    """Whether most of what a part of a split sum reads lies side by side; else it is split again.

    The places of a part are those of the whole one after another, whatever dimensions they have.
    """
    near, across, far, nodes = 0, 0, 0, k.ops.shape[1]
    groups = GROUPS[o.op[low + i]] and o.across[low + i] == 2
    for b in range(len(reads)):
        node = low + (b if b < nodes else k.node[b - nodes])
        size = o.elements[node] if b < nodes else k.n[b - nodes]
        if reads[b] == 0 or size == 1 or (reads[b] == SPREAD and n > 1):
            continue
        same = o.last[node] == o.last[low + i] and (b < nodes or k.how[b - nodes] == POINT)
        side = (same or reads[b] == ALIGNED or is_part(reads[b])) and not groups
        if reads[b] == TURNED:
            across += 1
        else:
            near, far = near + side, far + (not side)
    if n == 1 and across > near:  # a sum of everything goes along memory
        near, across = across, near
    far += across
    return near > far or near + far == 0
