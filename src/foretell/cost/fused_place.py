"""The loop nests of a region: what becomes of each op, one after another."""

from __future__ import annotations

import numpy as np

from foretell.compiled import compiled
from foretell.cost.fused_cat import concatenate, joins
from foretell.cost.fused_codes import (
    CAT,
    CONSTANT,
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
from foretell.cost.fused_library import library
from foretell.cost.fused_reduced import groups_back, loss, norm, reduce, scatter_loss
from foretell.cost.fused_reuse import expand, settle_value
from foretell.cost.fused_values import (
    FILL,
    Nests,
    Values,
    inline,
    leaves_whole,
    look,
    realize,
)

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
