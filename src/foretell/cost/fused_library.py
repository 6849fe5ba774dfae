"""Kernels a library has ready: what they read lies in memory, laid out as the library wants it."""

from __future__ import annotations

from numba import njit

from foretell.cost.fused_codes import CONVOLVES
from foretell.cost.fused_values import (
    ALIGNED,
    LAID,
    LIBRARY,
    ODD,
    POINT,
    TURNED,
    WHOLE,
    base,
    new,
    realize,
    take,
)


@njit(cache=True)
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


@njit(cache=True)
def lay_out(o, n, low, k, v):  # type: ignore[no-untyped-def]
    """Copies of an image and a filter with channels last; whether the result is turned by that.

    Inductor does so for all but few channels and filters that make them fewer
    (`GraphLowering.decide_layout_opt`).
    """
    deep = o.flops[n] / (2 * max(o.elements[n], 1.0))
    if o.start[n + 1] - o.start[n] < 2 or deep < 1:
        return False  # what it reads is not told
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
    return better and not last


@njit(cache=True)
def _copy(o, n, low, k, v, s):  # type: ignore[no-untyped-def]
    i, b = n - low, v.held[s]
    at = new(k, i, POINT, LAID, o.elements[low + s], 1.0)
    k.reads[at, b], v.reads[i, b] = ALIGNED, 0
    v.reads[i, len(v.held) + at] = ODD + i
