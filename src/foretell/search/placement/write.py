"""A placement written down as tasks. Compiled.

forward, backward   one task a segment (groups in a row on one set), cell and micro-batch; the
                    last backward has one for each message of gradients
send                samples that a segment which reads it wants elsewhere (→ `moves`)
sync, product       gradients as soon as their backward is done; with factors, then the product
update, share       the optimizer when all gradients are there; then parameters go round (ps,
                    sharded)

Parts are inlined: each call would hand over some forty arrays, a third of the time in all.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from foretell.compiled import I1, I2, compiled
from foretell.search.placement.moves import (
    BACKWARD,
    FORWARD,
    PRODUCT,
    SHARE,
    SYNC,
    UPDATE,
    Page,
    collective,
    holds,
    law,
    most,
    moved,
    task,
    transfers,
    updating,
    waits,
    waits_all,
)
from foretell.search.placement.problem import FACTORS, MICROS, PS, SHARDED, SPLIT, Tables

_MICROS = np.array(MICROS)


class Draft(NamedTuple):
    """A placement on its way to tasks."""

    sets: Any
    ways: Any
    served: Any  # [g] the place that serves it
    share: Any  # [s, c]
    start: Any  # where each segment begins, and the end of the last
    link: Any  # [e, 2] a segment and one that reads it
    size: Any  # [e] bytes of one sample that it reads
    part: Any  # [e, c, c] share of the batch that is sent for it
    ahead: Any  # [m, q, c] forward of a segment on a cell
    back: Any  # [m, q, c] its newest backward
    arrived: Any  # [e, c, c] the messages of the newest hand-over of each link
    synced: Any  # [c, n] what the update of a cell waits for
    counts: Any  # [c] how much that is
    later: Any  # [n, 4] set, way, bytes, first group of what goes round after the update
    number: Any  # [1] how many of those


@compiled
def drafted(t: Tables, sets: Any, ways: Any, served: Any, micros: int, share: Any) -> Draft:
    """Segments of a placement and what is passed over between them."""
    groups, cells = len(sets), len(t.kind)
    start = np.empty(groups + 1, np.int64)
    n = 0
    for g in range(groups):
        if g == 0 or sets[g] != sets[g - 1] or (ways[g] == SPLIT) != (ways[g - 1] == SPLIT):
            start[n] = g
            n += 1
    start[n] = groups
    link, size, count = links(t, start, n)
    part, flags = np.zeros((count, cells, cells)), np.zeros(2, np.bool_)
    for e in range(count):
        g, h = start[link[e, 0]], start[link[e, 1]]
        flags[0], flags[1] = ways[g] == SPLIT, ways[h] == SPLIT
        moved(t, sets[g], share[sets[g]], flags, sets[h], share[sets[h]], part[e])
    return Draft(
        sets, ways, served, share, start[: n + 1], link[:count], size[:count], part,
        np.full((micros, n, cells), -1, np.int64), np.full((micros, n, cells), -1, np.int64),
        np.full((count, cells, cells), -1, np.int64),
        np.full((cells, groups + 1), -1, np.int64), np.zeros(cells, np.int64),
        np.zeros((groups, 4)), np.zeros(1, np.int64),
    )  # fmt: skip


@compiled
def links(t: Tables, start: Any, n: int) -> Any:
    """Segments that read one another, bytes of one sample, and how many; by reading segment."""
    most = max(len(t.reads), 1)
    link, size, count = np.zeros((most, 2), np.int64), np.zeros(most), 0
    home = np.zeros(start[n], np.int64)
    for q in range(n):
        home[start[q] : start[q + 1]] = q
    for i in range(len(t.reads)):
        q, r = home[t.reads[i, 0]], home[t.reads[i, 1]]
        known, e, j = q == r, count - 1, i - 1
        while not known and j >= 0 and home[t.reads[j, 1]] == r:
            known = t.reads[j, 2] == t.reads[i, 2]  # two groups of a segment read it: sent once
            j -= 1
        if known:
            continue
        while e >= 0 and not (link[e, 0] == q and link[e, 1] == r):
            e -= 1
        if e < 0:
            e = count
            link[e, 0], link[e, 1] = q, r
            count += 1
        size[e] += t.read_bytes[i]
    return link, size, count


@compiled
def written(
    t: Tables, sets: I1, ways: I1, served: I1, micros: int, fuse: float, share: I2, p: Page
) -> None:
    """Write the tasks of a placement down."""
    p.count[:] = 0
    p.lane_start[0], p.use_start[0] = 0, 0
    d = drafted(t, sets, ways, served, micros, share)
    for m in range(micros):
        for q in range(len(d.start) - 1):
            write_forward(p, t, d, m, q, micros)
    for m in range(micros):
        for q in range(len(d.start) - 2, -1, -1):
            write_backward(p, t, d, m, q, micros, fuse)
    write_updates(p, t, d, micros)


@compiled
def seconds_of(
    t: Tables, d: Draft, s: int, c: int, first: int, last: int, micros: int, back: bool
) -> Any:
    """Seconds of some groups on one cell, one micro-batch."""
    if d.ways[first] == SPLIT:
        table = t.split_backward if back else t.split_forward
        return table[np.searchsorted(_MICROS, micros), s, first:last].sum()
    k, b = t.kind[c], -(-d.share[s, c] // micros)
    table = t.backward if back else t.forward
    return table[k, last, b] - table[k, first, b]


@compiled
def write_forward(p: Page, t: Tables, d: Draft, m: int, q: int, micros: int) -> None:
    """One segment of one micro-batch, and what it is passed."""
    g, h = d.start[q], d.start[q + 1]
    s = d.sets[g]
    for e in range(len(d.size)):
        if d.link[e, 1] == q:
            size = d.size[e] * t.batch / micros
            transfers(p, t, d.part[e], size, d.ahead[m, d.link[e, 0]], d.arrived[e], False, g)
    for c in range(len(t.kind)):
        if t.member[s, c]:
            i = task(p, seconds_of(t, d, s, c, g, h, micros, False), 1, FORWARD, c, g)
            holds(p, c)
            for e in range(len(d.size)):
                if d.link[e, 1] == q:
                    waits(p, d.ahead[m, d.link[e, 0], c])
                    waits_all(p, d.arrived[e], c)
            d.ahead[m, q, c] = i


@compiled
def write_backward(p: Page, t: Tables, d: Draft, m: int, q: int, micros: int, fuse: float) -> None:
    """One segment backward, message by message in the last micro-batch."""
    g, h = d.start[q], d.start[q + 1]
    s = d.sets[g]
    is_read = False
    for e in range(len(d.size)):
        if d.link[e, 0] == q:
            is_read = True
            size = d.size[e] * t.batch / micros
            transfers(p, t, d.part[e], size, d.back[m, d.link[e, 1]], d.arrived[e], True, h - 1)
    last = h
    while last > g:
        first = piece(t, d, g, last, fuse, m == micros - 1)
        size = t.gradient[first:last].sum()
        sends = m == micros - 1 and t.size[s] > 1 and d.ways[first] != SPLIT and size > 0
        by_factors = sends and d.ways[first] == FACTORS and t.factors[s, first] > 0
        for c in range(len(t.kind)):
            if t.member[s, c]:
                seconds = seconds_of(t, d, s, c, first, last, micros, True)
                if by_factors:
                    b = -(-d.share[s, c] // micros)
                    seconds = max(seconds - t.product[t.kind[c], first, b], 0.0)
                i = task(p, seconds, 2, BACKWARD, c, first)
                holds(p, c)
                if last < h:
                    waits(p, d.back[m, q, c])
                elif not is_read:
                    waits(p, d.ahead[m, q, c])
                else:
                    waits_readers(p, d, m, q, c)
                d.back[m, q, c] = i
        if sends:
            write_sync(p, t, d, s, first, size, by_factors, m, q)
        last = first


@compiled
def waits_readers(p: Page, d: Draft, m: int, q: int, c: int) -> None:
    """The newest task waits for what comes back from all segments that read one."""
    for e in range(len(d.size)):
        if d.link[e, 0] == q:
            waits(p, d.back[m, d.link[e, 1], c])
            waits_all(p, d.arrived[e], c)


@compiled
def piece(t: Tables, d: Draft, g: int, last: int, fuse: float, is_last: bool) -> int:
    """The first group of one message: groups in a row with one way and server, up to `fuse` bytes.

    Where nothing is sent (a rank alone, a split, an earlier micro-batch) it is the whole segment.
    """
    if not is_last or t.size[d.sets[g]] == 1 or d.ways[g] == SPLIT:
        return g
    first, size = last - 1, t.gradient[last - 1]
    while (
        first > g
        and d.ways[first - 1] == d.ways[last - 1]
        and d.served[first - 1] == d.served[last - 1]
        and d.ways[first] != FACTORS
        and size + t.gradient[first - 1] <= fuse
    ):
        first -= 1
        size += t.gradient[first]
    return first


@compiled
def write_sync(
    p: Page, t: Tables, d: Draft, s: int, first: int, size: float, by_factors: bool, m: int, q: int
) -> None:
    """One message of gradients; with factors, the matmul that follows it."""
    way, rows = d.ways[first], t.size[s] * d.share[s].max()
    if by_factors:
        seconds = law(t.laws[s, 4], rows * t.factors[s, first])
        if t.rest[s, first] > 0:
            seconds += law(t.laws[s, 0], t.rest[s, first])
    else:
        seconds = law(t.laws[s, 1 if way == PS else 3 if way == SHARDED else 0], size)
    i = collective(p, t, s, seconds, SYNC, first)
    for c in range(len(t.kind)):
        if t.member[s, c]:
            waits(p, d.back[m, q, c])
    for c in range(len(t.kind)):
        if t.member[s, c]:
            j = i
            if by_factors:
                k = t.kind[c]
                seconds = rows / t.batch * (t.product[k, first, t.batch] + t.recompute[k, first])
                j = task(p, seconds, 0, PRODUCT, c, first)
                holds(p, c)
                waits(p, i)
            d.synced[c, d.counts[c]] = j
            d.counts[c] += 1
    if way in (PS, SHARDED):
        row = d.later[d.number[0]]
        row[0], row[1], row[2], row[3] = s, way, size, first
        d.number[0] += 1


@compiled
def write_updates(p: Page, t: Tables, d: Draft, micros: int) -> None:
    """The optimizer of each cell when all is there; then parameters that others updated."""
    cells = len(t.kind)
    updated = np.full(cells, -1, np.int64)
    seconds = updating(t, d.sets, d.ways, d.served)
    issued(t, d, micros, seconds)
    for c in range(cells):
        is_used = False
        for q in range(len(d.start) - 1):
            is_used = is_used or d.back[0, q, c] >= 0
        if is_used:
            updated[c] = task(p, seconds[c], 0, UPDATE, c, 0)
            holds(p, c)
            for q in range(len(d.start) - 1):
                if is_first(d, q, c):
                    for m in range(micros):
                        waits(p, d.back[m, q, c])
            for k in range(d.counts[c]):
                waits(p, d.synced[c, k])
    for n in range(d.number[0]):
        s, op = int(d.later[n, 0]), 2 if d.later[n, 1] == PS else 4
        collective(p, t, s, law(t.laws[s, op], d.later[n, 2]), SHARE, int(d.later[n, 3]))
        for c in range(cells):
            if t.member[s, c]:
                waits(p, updated[c])


@compiled
def is_first(d: Draft, q: int, c: int) -> bool:
    """Whether a cell has nothing of what a segment reads: no other backward waits for its own."""
    for e in range(len(d.size)):
        if d.link[e, 1] == q and d.ahead[0, d.link[e, 0], c] >= 0:
            return False
    return True


@compiled
def issued(t: Tables, d: Draft, micros: int, seconds: Any) -> None:
    """Add to each cell's update what the host is behind with when the backward is over."""
    cells, which = len(t.kind), np.searchsorted(_MICROS, micros)
    tensors, lead, each = np.zeros(cells), np.zeros(cells), np.zeros(len(t.cell_of))
    for g in range(len(d.sets)):
        s, by_server = d.sets[g], d.ways[g] == PS and t.size[d.sets[g]] > 1
        if d.served[g] >= 0:
            each[d.served[g]] += t.tensors[g]
        for c in range(cells):
            if t.member[s, c]:
                k, b = t.kind[c], -(-d.share[s, c] // micros)
                tensors[c] += 0.0 if by_server else t.tensors[g]
                if d.ways[g] == SPLIT:
                    lead[c] += t.split_lead[which, s, g]
                else:
                    lead[c] += t.lead[k, g + 1, b] - t.lead[k, g, b]
    served = most(t, each)
    for c in range(cells):
        start, one, overlap_exponent = (
            t.host[t.kind[c], 0],
            t.host[t.kind[c], 1],
            t.host[t.kind[c], 2],
        )
        behind = start + one * (tensors[c] + served[c]) - max(lead[c], 0.0)
        if tensors[c] + served[c] > 0 and start > 0 and behind > 0:
            seconds[c] = (seconds[c] ** overlap_exponent + behind**overlap_exponent) ** (
                1 / overlap_exponent
            )
