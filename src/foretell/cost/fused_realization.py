"""Values of a fused region as Inductor (torch 2.11) holds them: inlined into readers, or realized.

What is computed place by place is inlined into whatever reads it. A loop nest of its own, whose
result lies in memory, get values that leave the region, what a library needs, and what reads or
computes so much that doing it twice would cost more (`realize_reads_threshold` and its like).

A nest has `n` results of `r` places each and reads buffers: entering tensors by their node, the
result of nest k as `nodes + k`. How it reads one is a code, and equal codes are equal places:

    ALIGNED   place by place, as the nest loops        SPREAD   the same for many places
    TURNED    all of it in another order of memory     ODD + …  some of it, or at an index
    SWAPPED   through a view that swaps dimensions     MOVED + … one that swaps and reshapes
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from foretell.compiled import F1, I1, compiled
from foretell.cost.fused_regions import (
    CAT,
    COUNTS,
    GATHER,
    LOSS_BACK,
    PARTS,
    PIECES,
    POINTWISE,
    RANDOM,
    RESHAPES,
    SOFT,
    TURNS,
    UNPOOLS,
    VIEW,
    WELFORD,
    WINDOW,
)

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


class Ops(NamedTuple):
    """The columns of all regions."""

    start: I1  # first edge of each node
    source: I1
    pattern: I1
    kind: I1
    op: I1
    size: F1
    elements: F1
    looped: F1
    inner: F1
    across: I1
    writes: F1
    last: F1
    flops: F1


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
def look(o, n, low, v):  # type: ignore[no-untyped-def]
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
def _coded(code, pattern, own):  # type: ignore[no-untyped-def]
    """How something is read through one more op."""
    if own > 0:
        return own
    if pattern == 1 and code == ALIGNED:
        return SPREAD
    if pattern == 2 and (code in (ALIGNED, SWAPPED) or code >= MOVED):
        return TURNED
    return code


@compiled
def take(v, s, pattern, own, reads, ops):  # type: ignore[no-untyped-def]
    """Read a value: from memory, or by computing it here too; `own` is the reader's code if any."""
    if v.held[s] >= 0:
        c = _coded(v.access[s], pattern, own)
        b = v.held[s]
        reads[b] = c if reads[b] == 0 else min(reads[b], c)
        return
    for b in range(len(reads)):
        c = v.reads[s, b]
        if c > 0:
            c = _coded(c, pattern, own)
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
        take(v, s, o.pattern[e], mine, v.reads[i], v.ops[i])
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
def many(row):  # type: ignore[no-untyped-def]
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
def new(k, node, how, part, n, r):  # type: ignore[no-untyped-def]
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
    at = new(k, i, POINT, part, o.elements[n], 1.0)
    whole = o.elements[n] * o.size[n] if o.kind[n] == POINTWISE and o.writes[n] > 0 else 0.0
    k.leaves[at], k.shape[at] = max(o.writes[n], whole), v.shaped[i]
    k.reads[at, :] = v.reads[i, :]
    k.ops[at, :] |= v.ops[i, :]
    if many(k.reads[at]) > 0 or part == LIBRARY or o.kind[n] == RANDOM:
        hold(v, i, at)


@compiled
def hold(v, i, at):  # type: ignore[no-untyped-def]
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
def settle_value(o, n, low, k, v, users):  # type: ignore[no-untyped-def]
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
    nodes, count = k.ops.shape[1], many(reads)
    for y in range(k.used[0]):
        if k.how[y] != POINT and reads[nodes + y] > 0:
            op = o.op[low + k.node[y]]
            count += WELFORD[op] or SOFT[op]
    return count
