"""In which order a region's kernels run: that of Inductor (torch 2.11), which spares memory.

What an earlier kernel touched may still lie in the cache, so the order decides which kernel waits
for memory. Inductor begins with the kernels in the order of their first loop nests, each after what
it needs, and takes another order where its peak of memory is lower: the kernel next that adds the
least, the one whose needs were met first, or small ones first (`reorder_for_peak_memory`).
Tensors that enter are never freed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foretell.compiled import compiled
from foretell.cost.fused_values import LAID, LIBRARY, WHOLE, Array, Flags, Whole


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
    plain = _after_needs(p, np.arange(count).astype(np.float64))
    p = _renumbered(p, plain)
    best = np.arange(count)
    least = _peak(p, best)
    for way in range(3):
        if way == 0:
            order = _sparing(p)
        elif way == 1:
            order = _soonest(p)
        else:
            order = _after_needs(p, p.made + p.reads.astype(np.float64) @ p.size)
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
def _after_needs(p, rank):  # type: ignore[no-untyped-def]
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
def _sparing(p):  # type: ignore[no-untyped-def]
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
def _soonest(p):  # type: ignore[no-untyped-def]
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
            return _goes_on(p, b, place, step) if mine else not _goes_on(p, a, place, step)
    return False


@compiled
def _needs_at(p, g, place, step):  # type: ignore[no-untyped-def]
    for x in range(len(p.maker)):
        if p.reads[g, x] and place[p.maker[x]] == step:
            return True
    return False


@compiled
def _goes_on(p, g, place, step):  # type: ignore[no-untyped-def]
    """Whether a kernel needs anything that came after a step."""
    for x in range(len(p.maker)):
        if p.reads[g, x] and place[p.maker[x]] > step:
            return True
    return False
