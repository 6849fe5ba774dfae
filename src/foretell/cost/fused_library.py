"""Kernels a library has ready: what they read lies in memory, laid out as the library wants it."""

from __future__ import annotations

import numpy as np

from foretell.compiled import compiled
from foretell.cost.fused_codes import CONVOLVES
from foretell.cost.fused_join import extent
from foretell.cost.fused_values import (
    ALIGNED,
    COLS,
    FINISH,
    LAID,
    LIBRARY,
    ODD,
    POINT,
    ROWS,
    TURNED,
    WHOLE,
    base,
    new,
    realize,
    take,
)

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
    return (better and not last) or (last and not _told_last(o, n, low + len(v.held), made))


@compiled
def _told_last(o, n, high, channels):  # type: ignore[no-untyped-def]
    """Whether what reads an image was told that its channels are last, as they will be."""
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
