"""Concatenations, as Inductor (torch 2.11) lowers them (`lowering.cat`).

One loop asks at every place which part it is in, where that saves a tensor or all parts must be
copied anyway. Else each part is written to its place by itself: by the nest that makes it, or by
one that copies it.
"""

from __future__ import annotations

from foretell.compiled import compiled
from foretell.cost.fused_values import (
    ALIGNED,
    LIBRARY,
    ODD,
    PLACED,
    POINT,
    WHOLE,
    new,
    take,
)

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
