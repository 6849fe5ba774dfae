"""Loop nests that Inductor (torch 2.11) makes of a fused region: what is inlined, what realized.

What is computed place by place is inlined into whatever reads it. A loop nest of its own, whose
result lies in memory, get values that leave the region, what a library needs, and what reads or
computes so much that doing it twice would cost more (`realize_reads_threshold` and its like).

A nest has `n` results of `r` places each and reads buffers: entering tensors by their node, the
result of nest k as `nodes + k`. How it reads one is a code, and equal codes are equal places:

    ALIGNED   place by place, as the nest loops        SPREAD   the same for many places
    TURNED    all of it in another order of memory     ODD + …  some of it, or at an index
    SWAPPED   through a view that swaps dimensions     MOVED + … one that swaps and reshapes

A reduction with few results is split: one nest makes partial sums, another finishes them. Parts
that do not lie side by side are split again, and so is what is finished where the mean and the
variance are found together (Welford). A norm is its sums and what uses them, which is inlined into
readers like any op.

What a library kernel reads lies in memory, laid out as the library wants it. For a concatenation
(`lowering.cat`) one loop asks at every place which part it is in, where that saves a tensor or all
parts must be copied anyway; else each part is written to its place by itself: by the nest that
makes it, or by one that copies it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from foretell.compiled import compiled
from foretell.cost.fused_regions import (
    BATCH,
    BATCH_BACK,
    CAT,
    CONSTANT,
    CONVOLVES,
    COUNTS,
    EXPANDS,
    EXTERN,
    GATHER,
    GROUP_BACK,
    GROUPS,
    INPUT,
    LAYER_BACK,
    LOSS,
    LOSS_BACK,
    NEVER_SPLIT,
    NORM,
    PARTS,
    PIECES,
    POINTWISE,
    PREPARED,
    RANDOM,
    REDUCTION,
    RESHAPES,
    SCATTER,
    SOFT,
    TEMPLATE,
    TURNS,
    UNPOOLS,
    VIEW,
    WELFORD,
    WINDOW,
)  # fmt: skip

Whole = npt.NDArray[np.int64]
Array = npt.NDArray[np.float64]
Codes = npt.NDArray[np.int16]
Flags = npt.NDArray[np.bool_]

POINT, ROWS, COLS = 0, 1, 2  # a nest computes places, or reduces along rows or down columns
# What a nest is of its op: its value, a reduction, the first and the later steps of one that is
# split, zeros to be filled in, a library's kernel, a copy laid out as a library wants it.
WHOLE, REDUCE, PARTIAL, FINISH, FILL, LIBRARY, LAID = range(7)
ALIGNED, SPREAD, TURNED, SWAPPED, ODD, MOVED = 1, 2, 4, 5, 10, 5000
_PART, PLACED = 1000, 1500  # added to ODD: one of several results; a tensor's place in a cat
GROUPED = 10000  # added to a node: the shape of its channels cut into groups


class Nests(NamedTuple):
    """The loop nests of one region."""

    used: Whole  # of nests, one number
    node: Whole  # the op whose value or part of it a nest computes
    how: Whole
    part: Whole
    n: Array
    r: Array
    base: Array  # results before the reduction was split
    leaves: Array  # bytes
    reads: Codes
    ops: Flags  # computed inside
    shape: Whole  # the view that gave its loops their shape, or -1 (→ `Values.shaped`)
    even: Flags  # of partial sums: cut where loops over the same places have a dimension


class Values(NamedTuple):
    """Where the value of each node of a region is."""

    held: Whole  # its buffer, or -1: written into its readers
    access: Codes  # how a buffer is read through a view
    small: Whole  # the buffer of its small results: sums of a norm
    reads: Codes
    ops: Flags
    shaped: Whole  # the view that gave it its shape, or -1: shape of what it is computed from


@compiled
def turns(code):  # type: ignore[no-untyped-def]
    """Whether all of a tensor is read in another order."""
    return code in (TURNED, SWAPPED) or code >= MOVED


@compiled
def view_value(o, n, low, v):  # type: ignore[no-untyped-def]
    """A view: the same value, read another way."""
    i = n - low
    if o.start[n] == o.start[n + 1]:
        return
    s = o.source[o.start[n]] - low
    v.held[i], v.small[i] = v.held[s], v.small[s]
    v.shaped[i] = i if RESHAPES[o.op[n]] else v.shaped[s]
    code = v.access[s]
    if PARTS[o.op[s + low]]:
        code = ODD + _PART + i  # each result is looked at by views of its own
    elif PIECES[o.op[n]] and o.elements[n] != o.elements[s + low]:
        code = ODD + i
    elif TURNS[o.op[n]] and code == ALIGNED:
        reshaped = v.shaped[base(o, low, s)] != v.shaped[s]
        code = MOVED + i if reshaped else SWAPPED
    elif RESHAPES[o.op[n]] and code == SWAPPED:
        code = MOVED + i
    v.access[i] = code if v.held[i] >= 0 else ALIGNED
    for b in range(v.reads.shape[1]):
        c = v.reads[s, b]
        moves = c == ALIGNED or (c == SPREAD and b >= len(v.held))
        if RESHAPES[o.op[n]] and c == SWAPPED:
            c = MOVED + i
        v.reads[i, b] = code if code >= SWAPPED and moves else c
    if is_part(code):
        for b in range(v.reads.shape[1]):
            v.reads[i, b] = code if turns(v.reads[i, b]) else v.reads[i, b]
    v.ops[i, :] = v.ops[s, :]


@compiled
def _composed_access(code, pattern, own):  # type: ignore[no-untyped-def]
    """How something is read through one more op."""
    if own > 0:
        return own
    if pattern == 1 and code == ALIGNED:
        return SPREAD
    if pattern == 2 and (code in (ALIGNED, SWAPPED) or code >= MOVED):
        return TURNED
    return code


@compiled
def add_reads(v, s, pattern, own, reads, ops):  # type: ignore[no-untyped-def]
    """Read a value: from memory, or by computing it here too; `own` is the reader's code if any."""
    if v.held[s] >= 0:
        c = _composed_access(v.access[s], pattern, own)
        b = v.held[s]
        reads[b] = c if reads[b] == 0 else min(reads[b], c)
        return
    for b in range(len(reads)):
        c = v.reads[s, b]
        if c > 0:
            c = _composed_access(c, pattern, own)
            reads[b] = c if reads[b] == 0 else min(reads[b], c)
    for j in range(len(ops)):
        ops[j] |= v.ops[s, j]


@compiled
def inline(o, n, low, k, v):  # type: ignore[no-untyped-def]
    """An op computed place by place, written into its readers for now."""
    i, first = n - low, o.start[n]
    pools = o.kind[n] == WINDOW and (o.looped[n] != o.elements[n] or UNPOOLS[o.op[n]])
    own = ODD + i if o.kind[n] == GATHER or pools else 0
    for e in range(first, o.start[n + 1]):
        s = o.source[e] - low
        if (UNPOOLS[o.op[n]] or LOSS_BACK[o.op[n]]) and e == first + 1:
            v.shaped[i] = v.shaped[s]
            continue  # only its shape is used
        if v.small[s] >= 0 and v.held[s] != s and o.elements[n] < o.elements[s + low]:
            v.reads[i, v.small[s]] = ALIGNED
            continue
        if o.kind[n] == WINDOW and v.held[s] < 0 and _large(o, low, k, v.reads[s]) > 1:
            realize(o, s + low, low, k, v, WHOLE)  # each place is read many times
        if o.elements[s + low] == o.elements[n]:
            v.shaped[i] = max(v.shaped[i], v.shaped[s])
        mine = ODD + PLACED + e - first if o.kind[n] == CAT else own
        mine = ODD + _PART + i if PARTS[o.op[s + low]] else mine
        add_reads(v, s, o.pattern[e], mine, v.reads[i], v.ops[i])
    v.ops[i, i] = True


@compiled
def _large(o, low, k, reads):  # type: ignore[no-untyped-def]
    """How many tensors of more than one element are read."""
    nodes, count = k.ops.shape[1], 0
    for b in range(len(reads)):
        if reads[b] > 0:
            count += (o.elements[low + b] if b < nodes else k.n[b - nodes]) > 1
    return count


@compiled
def count_reads(row):  # type: ignore[no-untyped-def]
    count = 0
    for code in row:
        count += code > 0
    return count


@compiled
def is_part(code):  # type: ignore[no-untyped-def]
    """Whether one of several results is read, or one of the parts of a concatenation."""
    return ODD + _PART <= code < MOVED


@compiled
def leaves_whole(o, n):  # type: ignore[no-untyped-def]
    """Whether an op's first result or a view of it leaves, not only the small ones beside it."""
    single = o.kind[n] in (POINTWISE, GATHER, CAT)
    return o.writes[n] > 0 and (single or o.writes[n] >= 0.99 * o.elements[n] * o.size[n])


@compiled
def new_nest(k, node, how, part, n, r):  # type: ignore[no-untyped-def]
    """A new nest; its number."""
    at = k.used[0]
    k.used[0] += 1
    k.node[at], k.how[at], k.part[at] = node, how, part
    k.n[at], k.r[at], k.base[at] = n, r, n
    k.ops[at, node] = True
    k.shape[at] = -1
    return at


@compiled
def realize(o, n, low, k, v, part):  # type: ignore[no-untyped-def]
    """A nest that leaves a value in memory; one that reads nothing is recomputed elsewhere."""
    i = n - low
    at = new_nest(k, i, POINT, part, o.elements[n], 1.0)
    whole = o.elements[n] * o.size[n] if o.kind[n] == POINTWISE and o.writes[n] > 0 else 0.0
    k.leaves[at], k.shape[at] = max(o.writes[n], whole), v.shaped[i]
    k.reads[at, :] = v.reads[i, :]
    k.ops[at, :] |= v.ops[i, :]
    if count_reads(k.reads[at]) > 0 or part == LIBRARY or o.kind[n] == RANDOM:
        read_from_nest(v, i, at)


@compiled
def read_from_nest(v, i, at):  # type: ignore[no-untyped-def]
    """From now on a value is read where a nest has left it."""
    v.held[i] = len(v.held) + at
    v.access[i] = ALIGNED
    v.reads[i, :] = 0
    v.ops[i, :] = False


@compiled
def base(o, low, s):  # type: ignore[no-untyped-def]
    """The node whose memory a view looks at."""
    while o.kind[low + s] == VIEW and o.start[low + s] < o.start[low + s + 1]:
        s = o.source[o.start[low + s]] - low
    return s


READS, _MANY_READS, _WORK = 4, 8, 30  # thresholds of Inductor's `config`: reads, and operations


@compiled
def expand(o, n, low, k, v):  # type: ignore[no-untyped-def]
    """What is to be read many times and reads much itself is computed once (`mark_reuse`)."""
    s = base(o, low, n - low)
    if v.held[s] >= 0 or o.elements[n] <= o.elements[s + low]:
        return
    reads = 0
    for j in range(len(v.ops[s])):
        for e in range(o.start[low + j], o.start[low + j + 1]):
            reads += v.ops[s, j] and v.held[o.source[e] - low] >= 0
    if reads > READS:
        realize(o, s + low, low, k, v, WHOLE)
        at = o.source[o.start[n]] - low
        while at != s:  # views on the way
            v.held[at] = v.held[s]
            at = o.source[o.start[low + at]] - low


@compiled
def realize_if_reused(o, n, low, k, v, users):  # type: ignore[no-untyped-def]
    """Give a value memory of its own where it leaves or is too much to recompute."""
    i = n - low
    if v.held[i] >= 0:
        return
    reads, work = _loads(o, low, k, v.reads[i]), 0
    for j in range(len(v.ops[i])):
        if v.ops[i, j]:
            work += COUNTS[o.op[low + j]]
            if o.kind[low + j] == WINDOW:
                reads += int(o.inner[low + j]) - 1
    work += reads
    if (
        leaves_whole(o, n)
        or o.kind[n] == RANDOM
        or reads > _MANY_READS
        or work > _WORK
        or (users > 1 and reads > READS)
    ):
        realize(o, n, low, k, v, WHOLE)


@compiled
def _loads(o, low, k, reads):  # type: ignore[no-untyped-def]
    """Tensors read; of a norm's sums there are two: middle and spread, or largest and sum."""
    nodes, count = k.ops.shape[1], count_reads(reads)
    for y in range(k.used[0]):
        if k.how[y] != POINT and reads[nodes + y] > 0:
            op = o.op[low + k.node[y]]
            count += WELFORD[op] or SOFT[op]
    return count


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
def add_reduction(o, low, i, k, n, r, how, units, reads, ops, shape):  # type: ignore[no-untyped-def]
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
    at = new_nest(
        k, i, how, PARTIAL if cut > 1 else REDUCE, results * within, np.ceil(rest / within)
    )
    k.base[at], k.shape[at] = n, shape
    k.even[at] = cut > 1 and _even_parts(o, low, i, k, at, how, n, r)
    k.reads[at, :] = reads
    k.ops[at, :] |= ops
    if within > 1:
        at = add_final_sum(k, i, how, results, float(within), at)
    while cut > 1:
        again = splits(n, float(cut), along, units) if WELFORD[op] and within == 1 else 1
        at = add_final_sum(k, i, how, n * again, np.ceil(cut / again), at)
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
def add_final_sum(k, i, how, n, r, before):  # type: ignore[no-untyped-def]
    """A nest that sums what another has left."""
    at = new_nest(k, i, how, FINISH, n, r)
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


_UNROLLED = 8  # places: fewer are summed place by place (`unroll_reductions_threshold`)
_LIGHT = 10  # operations of a gradient that a group norm's own do not raise above the threshold
_ASIDE = 1000  # added to ODD: the columns of sums, read apart from their rows


@compiled
def _outer(o, n):  # type: ignore[no-untyped-def]
    return o.across[n] == 2 or (o.across[n] == 1 and not BATCH[o.op[n]])


@compiled
def reduce(o, n, low, k, v, units, users):  # type: ignore[no-untyped-def]
    """A sum, mean or the like; of few places it is an op like others."""
    i = n - low
    few = o.inner[n] < _UNROLLED and o.inner[n] > 1
    for e in range(o.start[n], o.start[n + 1]):
        pattern = o.pattern[e] if o.elements[o.source[e]] < o.looped[n] and not few else 0
        add_reads(v, o.source[e] - low, pattern, ODD + i if few else 0, v.reads[i], v.ops[i])
    v.ops[i, i] = True
    if few:
        realize_if_reused(o, n, low, k, v, users)
        return
    how = COLS if _outer(o, n) else ROWS
    rows = o.looped[n] / max(o.inner[n], 1.0)
    shape = _shape_of(o, n, low, v)
    at: int
    like = _like(o, n, low, k, v) if o.looped[n] == o.inner[n] else -1
    if like >= 0 and splits(1.0, o.inner[n], True, units) > 1:
        first = new_nest(k, i, ROWS, PARTIAL, k.n[like], k.r[like])
        # of channels no other loop has the order
        batch = BATCH[o.op[low + k.node[like]]]
        k.even[first] = not batch
        k.shape[first], k.reads[first, :] = GROUPED + i if batch else k.shape[like], v.reads[i]
        k.ops[first, :] |= v.ops[i]
        at = add_final_sum(k, i, ROWS, 1.0, k.n[like], first)
    else:
        at = add_reduction(o, low, i, k, rows, o.inner[n], how, units, v.reads[i], v.ops[i], shape)
    k.leaves[at] = o.writes[n]
    read_from_nest(v, i, at)


@compiled
def _like(o, n, low, k, v):  # type: ignore[no-untyped-def]
    """The reduction whose rows a sum of everything is cut into: the last ones it is made of."""
    nodes, count = len(v.held), k.used[0]
    if v.held[o.source[o.start[n]] - low] >= 0:
        return -1
    level = v.reads[n - low, nodes:] > 0
    while level.any():
        found, above = -1, np.zeros(len(level), np.bool_)
        for x in range(count):
            if level[x] and k.how[x] != POINT:
                if found >= 0 and (k.n[x] != k.n[found] or k.r[x] != k.r[found]):
                    return -1
                found = x
            elif level[x] and k.part[x] != LIBRARY:
                above |= k.reads[x, nodes:] > 0
        if found >= 0:
            return found if k.n[found] * k.r[found] == o.looped[n] else -1
        level = above
    return -1


@compiled
def loss(o, n, low, k, v):  # type: ignore[no-untyped-def]
    """The loss of classes: of each row one place is read."""
    i = n - low
    first, rows = o.start[n], 1.0
    for e in range(first, o.start[n + 1]):
        if e == first and o.writes[n] == 0:
            continue  # nothing asks for the loss: only how many labels count is found
        add_reads(v, o.source[e] - low, 0, ODD + i if e == first else 0, v.reads[i], v.ops[i])
        rows = o.elements[o.source[e]] if e == first + 1 else rows
    few = rows < _UNROLLED
    if few and o.writes[n] == 0 and not (v.reads[i] > 0).any():
        return  # of labels that are all the same
    at = new_nest(
        k, i, POINT if few else ROWS, PARTIAL if few else REDUCE, 1.0, 1.0 if few else rows
    )
    k.reads[at, :] = v.reads[i, :]
    k.ops[at, :] |= v.ops[i, :]
    k.leaves[at] = o.writes[n]
    read_from_nest(v, i, at)


@compiled
def scatter_loss(o, n, low, k, v):  # type: ignore[no-untyped-def]
    """What a loss's gradient is scattered into: a tensor of zeros, then its few places."""
    i, nodes = n - low, len(v.held)
    if o.start[n + 1] - o.start[n] < 3:
        return  # its labels are not given
    at = new_nest(k, i, POINT, FILL, o.elements[n], 1.0)
    index = o.source[o.start[n] + 2] - low
    more = new_nest(k, i, POINT, PARTIAL, o.elements[index + low], 1.0)
    add_reads(v, index, 0, 0, k.reads[more], k.ops[more])
    k.reads[more, nodes + at] = ODD + i
    v.reads[i, nodes + more] = ALIGNED


@compiled
def norm(o, n, low, k, v, units):  # type: ignore[no-untyped-def]
    """Softmax, layer and batch norm, their gradients; group norm."""
    i, nodes, op = n - low, len(v.held), o.op[n]
    first, rows = o.start[n], o.looped[n] / max(o.inner[n], 1.0)
    apart = GROUPS[op] and (o.start[n + 1] - first < 2 or o.elements[o.source[first + 1]] != 32)
    how = COLS if _outer(o, n) and not apart else ROWS
    if BATCH_BACK[op] and o.start[n + 1] - first > 1 and o.pattern[first + 1] == 2:
        how = ROWS if how == COLS else COLS  # told of the other tensor
    _take_some(o, n, low, v, o.start[n + 1], v.reads[i], v.ops[i])
    shape = _shape(o, n, low, v)
    sums = 2 if LAYER_BACK[op] or BATCH_BACK[op] else 1
    for m in range(sums):
        reads, ops = np.zeros(k.reads.shape[1], np.int16), np.zeros(nodes, np.bool_)
        last = o.start[n + 1] if m == 1 else first + 1
        _take_some(o, n, low, v, last, reads, ops)
        if o.inner[n] < _UNROLLED and rows > 1:
            _unrolled(o, n, low, k, v, rows, reads, ops)
            continue
        at = add_reduction(o, low, i, k, rows, o.inner[n], how, units, reads, ops, shape)
        v.reads[i, nodes + at] = ODD + i if apart else SPREAD
        v.small[i] = nodes + at
        if SOFT[op] and k.part[at] == FINISH:  # the largest first, then the sum
            reads[nodes + at] = SPREAD
            at = add_reduction(o, low, i, k, rows, o.inner[n], how, units, reads, ops, shape)
            v.reads[i, nodes + at] = SPREAD
    if LAYER_BACK[op]:
        _columns(o, n, low, k, v, units)
    v.ops[i, i] = True


@compiled
def _unrolled(o, n, low, k, v, rows, reads, ops):  # type: ignore[no-untyped-def]
    """Few places a row are summed one by one; in memory only where they are many to read again."""
    i, whole = n - low, 0
    for b in range(len(reads)):
        whole += reads[b] > 0 and reads[b] != SPREAD
        reads[b] = ODD + i if reads[b] > 0 else 0
    if whole * o.inner[n] <= READS:
        return
    at = new_nest(k, i, POINT, PARTIAL, rows, 1.0)
    k.reads[at, :] = reads
    k.ops[at, :] |= ops
    v.reads[i, len(v.held) + at] = SPREAD
    v.small[i] = len(v.held) + at


@compiled
def _shape(o, n, low, v):  # type: ignore[no-untyped-def]
    """The shape a norm loops over; a group norm cuts channels, and no other loop fits those."""
    i, first = n - low, o.start[n]
    v.shaped[i] = _shape_of(o, n, low, v)
    if not GROUPS[o.op[n]] or o.start[n + 1] == first:
        return v.shaped[i]
    return GROUPED + i if o.elements[o.source[o.start[n + 1] - 1]] != 32 else v.shaped[i]


@compiled
def _shape_of(o, n, low, v):  # type: ignore[no-untyped-def]
    """The shape of what an op reads first."""
    return v.shaped[o.source[o.start[n]] - low] if o.start[n] < o.start[n + 1] else -1


@compiled
def _take_some(o, n, low, v, last, reads, ops):  # type: ignore[no-untyped-def]
    for e in range(o.start[n], min(last, o.start[n + 1])):
        add_reads(v, o.source[e] - low, o.pattern[e], 0, reads, ops)


@compiled
def _columns(o, n, low, k, v, units):  # type: ignore[no-untyped-def]
    """A layer norm's gradients of weight and bias, where they leave."""
    i, first = n - low, o.start[n]
    whole, each = o.elements[n] * o.size[n], o.inner[n] * o.size[n]
    wide = o.writes[n] - whole if o.writes[n] >= whole else o.writes[n]
    rows = o.looped[n] / max(o.inner[n], 1.0)
    sums = 2 if wide >= 2 * each else 1 if wide > 0 else 0
    for m in range(sums):
        reads, ops = np.zeros(k.reads.shape[1], np.int16), np.zeros(len(v.held), np.bool_)
        _take_some(o, n, low, v, first + (1 if m == 1 or sums == 1 else 4), reads, ops)
        shape = _shape_of(o, n, low, v)
        at = add_reduction(o, low, i, k, o.inner[n], rows, COLS, units, reads, ops, shape)
        k.leaves[at] = each
        v.small[i] = len(v.held) + at


@compiled
def groups_back(o, n, low, k, v, units):  # type: ignore[no-untyped-def]
    """A group norm's gradients: sums over each image's channels, over groups, over images."""
    i, nodes, size = n - low, len(v.held), k.reads.shape[1]
    channels = o.elements[o.source[o.start[n + 1] - 1]]
    images = max(1.0, o.looped[n] / o.inner[n] / 32)
    area = max(1.0, o.looped[n] / (images * channels))
    how = COLS if o.across[n] == 2 else ROWS
    _take_some(o, n, low, v, o.start[n + 1], v.reads[i], v.ops[i])
    made = np.zeros(2, np.int64)
    for m in range(2):
        reads, ops = np.zeros(size, np.int16), np.zeros(nodes, np.bool_)
        _take_some(o, n, low, v, o.start[n] + 2 - m, reads, ops)
        results, shape = images * channels, GROUPED + i if channels > 32 else -1
        made[m] = nodes + add_reduction(o, low, i, k, results, area, how, units, reads, ops, shape)
    for m in range(2):  # of groups of one channel nothing is left to sum
        at = new_nest(k, i, POINT, PARTIAL, images * 32, 1.0)
        if channels > 32:
            k.how[at], k.part[at], k.r[at] = ROWS, REDUCE, channels / 32
        add_reads(v, o.source[o.start[n + 1] - 1] - low, 1, 0, k.reads[at], k.ops[at])
        k.reads[at, made[m]] = ODD + i if channels > 32 else ALIGNED
        v.reads[i, nodes + at] = ODD + i if channels > 32 else SPREAD
    v.ops[i, i] = True
    if channels > 64 and _work(o, n, low, v) > _LIGHT:  # of pairs of channels less is read
        _store_gradient(o, n, low, k, v)
    if o.writes[n] > 0 and o.writes[n] != o.elements[n] * o.size[n]:
        _channels(o, n, low, k, v, units, channels, images, made)


@compiled
def _work(o, n, low, v):  # type: ignore[no-untyped-def]
    """Operations of the gradient that enters a group norm's; casts and turned images add some."""
    s = o.source[o.start[n]] - low
    work = 0
    for j in range(len(v.ops[s])):
        work += COUNTS[o.op[low + j]] if v.ops[s, j] else 0
    return work + _LIGHT * (work > 0) * ((o.size[n] == 2) + (o.across[n] == 2))


@compiled
def _store_gradient(o, n, low, k, v):  # type: ignore[no-untyped-def]
    """What a gradient that is computed here adds goes through memory: it is too much otherwise."""
    i, nodes = n - low, len(v.held)
    at = new_nest(k, i, POINT, PARTIAL, o.elements[n], 1.0)
    k.reads[at, :] = v.reads[i, :]
    k.ops[at, :] |= v.ops[i, :]
    v.reads[i, :nodes] = 0
    v.ops[i, :] = False
    v.ops[i, i] = True
    add_reads(v, o.source[o.start[n] + 1] - low, 0, 0, v.reads[i], v.ops[i])
    v.reads[i, nodes + at] = ODD + _ASIDE + i


@compiled
def _channels(o, n, low, k, v, units, channels, images, made):  # type: ignore[no-untyped-def]
    i, nodes = n - low, len(v.held)
    for m in range(2):
        reads, ops = np.zeros(k.reads.shape[1], np.int16), np.zeros(nodes, np.bool_)
        reads[made[1]] = ODD + _ASIDE + i
        reads[made[0]] = ODD + _ASIDE + i if m == 0 else 0
        at = add_reduction(o, low, i, k, channels, images, COLS, units, reads, ops, -1)
        k.leaves[at] = channels * o.size[n]
        v.small[i] = nodes + at


_MOST = 8  # parts of one loop (`MAX_COMPLEX_POINTWISE_CAT`)


@compiled
def is_one_loop(o, n, low, k, v, inside):  # type: ignore[no-untyped-def]
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
            at = new_nest(k, i, POINT, WHOLE, o.elements[s + low], 1.0)
            k.shape[at] = v.shaped[s]
            enters = at if 0 <= v.held[s] < nodes else enters
        if _is_copied(k, v, s):
            add_reads(v, s, 2 if o.pattern[e] == 2 else 0, 0, k.reads[at], k.ops[at])
        k.leaves[at] += left
        v.reads[i, nodes + at] = ODD + PLACED + e - o.start[n]
        v.held[i] = nodes + at if o.writes[n] > 0 else -1
    v.ops[i, i] = v.held[i] < 0
    if v.held[i] >= 0:
        v.reads[i, :] = 0


@compiled
def library(o, n, low, k, v):  # type: ignore[no-untyped-def]
    """A library's kernel: what it reads must lie in memory."""
    i = n - low
    for e in range(o.start[n], o.start[n + 1]):
        s = base(o, low, o.source[e] - low)
        if v.held[s] < 0 and v.ops[s].any():
            realize(o, s + low, low, k, v, WHOLE)
        add_reads(v, s, 0, ODD + i, v.reads[i], v.ops[i])
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
    at = new_nest(k, i, POINT, LAID, o.elements[low + s], 1.0)
    k.reads[at, b], v.reads[i, b] = ALIGNED, 0
    v.reads[i, len(v.held) + at] = ODD + i


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
        if o.kind[n] == CAT and not is_one_loop(o, n, low, k, v, inside[n - low]):
            concatenate(o, n, low, k, v)
        else:
            _place_op(o, n, low, k, v, units, users[n - low])
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
def _place_op(o, n, low, k, v, units, users):  # type: ignore[no-untyped-def]
    """What becomes of one op."""
    kind, op = o.kind[n], o.op[n]
    if kind == INPUT:
        v.held[n - low] = n - low
    elif kind == VIEW:
        if EXPANDS[op]:
            expand(o, n, low, k, v)
        view_value(o, n, low, v)
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
        realize_if_reused(o, n, low, k, v, users)


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
