"""What of a fused region is computed once and left in memory, since twice would cost more.

The rules are Inductor's (torch 2.11): a value that many read, or that reads or computes much
itself, gets a loop nest of its own (`realize_reads_threshold` and its like).
"""

from __future__ import annotations

from foretell.compiled import compiled
from foretell.cost.fused_codes import COUNTS, RANDOM, SOFT, WELFORD, WINDOW
from foretell.cost.fused_values import POINT, WHOLE, base, leaves_whole, many, realize

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
