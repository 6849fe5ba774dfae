"""A placement as tasks, compiled: work, messages, collectives, parameter servers.

What goes over links: samples wanted elsewhere, collectives, and parameter servers. Compiled.

`moved` says which share of the batch goes from cell to cell when one set hands over to another:
what `redistribute` says of single ranks.

Tasks written down on a page of plain arrays, and simulated by the rule of the simulator.

One task stands for what all devices of a cell do. Lanes: the compute of each cell, then its
collectives (one at a time). Links of each box: out, in, and the bus inside. The rule by which
tasks start is that of `foretell.simulate.events`, which simulates them.

Who serves a group that agrees by parameter server, and what serving adds. Compiled.

A server is a place: ranks are counted cell by cell. It gets the gradients of its groups, holds the
optimizer's state, updates, and hands parameters back. A placement names it, or leaves it to
`places`, which assigns messages: the longest update first, to the rank that has updated it all
soonest and has room for the state. Reduce and broadcast are chains through all ranks (NCCL has no
other way for them), whose slowest link paces them, whichever rank is last: prices do not depend on
the server. Gloo's do, where three ranks and more have links that differ, so that of equals the best
connected serves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from foretell.compiled import C1, F1, I1, I2, J1, S1, compiled
from foretell.search.placement.problem import FACTORS, MICROS, NO_SERVER, PS, SHARDED, SPLIT, Tables
from foretell.simulate.events import Fixed, State, run

FORWARD, BACKWARD, SEND, SYNC, PRODUCT, UPDATE, SHARE = range(7)  # what a task is
TASKS, LANES, USES, EDGES = range(4)  # places in `Page.count`


ANY_SERVER = NO_SERVER - 1  # some rank will serve; which one is open


class Page(NamedTuple):
    """Room to write tasks down."""

    seconds: F1
    priority: J1
    what: C1
    cell: S1
    group: S1
    lane_start: I1
    lane: J1
    use_start: I1
    use_link: J1
    use_demand: F1
    edge_from: J1
    edge_to: J1
    count: I1  # type: ignore[assignment]


@compiled
def page(t: Tables, micros: int) -> Page:
    """Room for the tasks of any placement with so many micro-batches."""
    groups, cells = max(len(t.gradient), len(t.reads)), len(t.kind)
    n = micros * groups * cells * 10 + 8 * groups + 4 * cells + 64
    wide = 4 * n + 8 * groups * cells
    return Page(
        np.empty(n), np.empty(n, np.int32), np.empty(n, np.int8), np.empty(n, np.int16),
        np.empty(n, np.int16), np.empty(n + 1, np.int64), np.empty(wide, np.int32),
        np.empty(n + 1, np.int64), np.empty(wide, np.int32), np.empty(wide),
        np.empty(wide, np.int32), np.empty(wide, np.int32), np.zeros(4, np.int64),
    )  # fmt: skip


@compiled
def law(rows: Any, size: float) -> float:
    """The least of some laws at one size."""
    best = np.inf
    root = np.sqrt(size)
    for i in range(len(rows)):
        best = min(best, rows[i, 0] + rows[i, 1] * size + rows[i, 2] * root)
    return best


@compiled
def task(p: Page, seconds: float, priority: int, what: int, cell: int, group: int) -> Any:
    """A new task; lanes, links and waits that are added next are its own."""
    i = p.count[TASKS]
    p.seconds[i], p.priority[i], p.what[i], p.cell[i], p.group[i] = (
        seconds,
        priority,
        what,
        cell,
        group,
    )
    p.count[TASKS] = i + 1
    p.lane_start[i + 1], p.use_start[i + 1] = p.count[LANES], p.count[USES]
    return i


@compiled
def holds(p: Page, lane: int) -> None:
    """The newest task holds a lane."""
    p.lane[p.count[LANES]] = lane
    p.count[LANES] += 1
    p.lane_start[p.count[TASKS]] = p.count[LANES]


@compiled
def uses(p: Page, link: int, demand: float) -> None:
    """The newest task uses a part of a link."""
    n = p.count[USES]
    p.use_link[n], p.use_demand[n] = link, demand
    p.count[USES] = n + 1
    p.use_start[p.count[TASKS]] = n + 1


@compiled
def waits(p: Page, after: int) -> None:
    """The newest task waits for another; nothing where there is none."""
    if after >= 0:
        n = p.count[EDGES]
        p.edge_from[n], p.edge_to[n] = after, p.count[TASKS] - 1
        p.count[EDGES] = n + 1


@compiled
def waits_all(p: Page, arrived: Any, to: int) -> None:
    """The newest task waits for all messages to one cell."""
    edge_from, edge_to, newest = p.edge_from, p.edge_to, p.count[TASKS] - 1
    n = p.count[EDGES]
    for a in range(len(arrived)):
        if arrived[a, to] >= 0:
            edge_from[n], edge_to[n] = arrived[a, to], newest
            n += 1
    p.count[EDGES] = n


@compiled
def play(p: Page, cells: int, links: int) -> Any:
    """Simulate what is written on a page: start and end of every task."""
    n, edges, held = p.count[TASKS], p.count[EDGES], p.count[LANES]
    follow_start = np.zeros(n + 1, np.int64)
    waiting = np.zeros(n, np.int32)
    for e in range(edges):
        follow_start[p.edge_from[e] + 1] += 1
        waiting[p.edge_to[e]] += 1
    for i in range(n):
        follow_start[i + 1] += follow_start[i]
    follower = np.empty(edges, np.int32)
    at = follow_start.copy()
    for e in range(edges):
        follower[at[p.edge_from[e]]] = p.edge_to[e]
        at[p.edge_from[e]] += 1
    base = np.zeros(2 * cells + 1, np.int64)
    for k in range(held):
        base[p.lane[k] + 1] += 1
    for lane in range(2 * cells):
        base[lane + 1] += base[lane]
    fixed = Fixed(
        p.seconds[:n], np.zeros(0), p.priority[:n], p.lane_start[: n + 1], p.lane[:held], base,
        follow_start, follower, np.zeros(0), np.zeros(n + 1, np.int64), np.zeros(0, np.int32),
        p.use_start[: n + 1], p.use_link[: p.count[USES]], p.use_demand[: p.count[USES]],
        np.ones(links),
    )  # fmt: skip
    fresh, ready = np.empty(n, np.int32), 0
    for i in range(n):
        if waiting[i] == 0:
            fresh[ready] = i
            ready += 1
    state = State(
        waiting, np.zeros(n), np.full(n, -1, np.int32), np.zeros(n), np.full(n, -1, np.int32),
        np.zeros(n), np.zeros(n), np.full(n, -1, np.int32), np.zeros(n, np.uint8),
        np.zeros(2 * cells, np.uint8), np.zeros(2 * cells), np.full(2 * cells, -1, np.int32),
        np.empty(held, np.int32), np.zeros(2 * cells, np.int64), np.empty(2 * n + 1),
        np.empty(2 * n + 1, np.int64), fresh, np.array([0, ready]),
    )  # fmt: skip
    run(fixed, state, 0.0)
    return state.start, state.end


@compiled
def places(t: Tables, sets: I1, ways: I1, servers: I1, fuse: float) -> I1:
    """[g] the place that serves each group; below zero where nothing does."""
    out, is_open = np.full(len(sets), NO_SERVER), False
    for g in range(len(sets)):
        if ways[g] == PS and t.size[sets[g]] > 1:
            named = servers[g] >= 0 and t.member[sets[g], t.cell_of[servers[g]]]
            out[g] = servers[g] if named else ANY_SERVER
            is_open = is_open or not named
    if is_open:
        deal_out(t, sets, ways, out, fuse)
    return out


@compiled
def deal_out(t: Tables, sets: Any, ways: Any, out: Any, fuse: float) -> None:
    """Name a place for every message that has none, in order of its seconds."""
    first, last, count = messages(t, sets, out, fuse)
    seconds, free = occupied(t, sets, ways, out)
    update = np.zeros((count, len(t.update)))
    for i in range(count):
        for k in range(len(t.update)):
            for g in range(first[i], last[i]):
                update[i, k] += t.update[k, g]
    for i in np.argsort(-update[:, 0], kind="mergesort"):
        state = t.state[first[i] : last[i]].sum()
        at = soonest(t, sets[first[i]], update[i], state, seconds, free)
        out[first[i] : last[i]] = at
        seconds[at] += update[i, t.kind[t.cell_of[at]]]
        free[at] -= state


@compiled
def soonest(t: Tables, s: int, update: Any, state: float, seconds: Any, free: Any) -> int:
    """The place of a set that has updated one more message first, of equals the best connected.

    Where none has room it is the one that has most.
    """
    best, at, roomy = np.inf, -1, False
    for p in range(len(t.cell_of)):
        c = t.cell_of[p]
        if t.member[s, c]:
            fits = free[p] >= state
            took = seconds[p] + update[t.kind[c]] if fits else -free[p]
            is_wider = at >= 0 and took == best and t.way_out[c] > t.way_out[t.cell_of[at]]
            if (fits and not roomy) or (fits == roomy and (took < best or is_wider)):
                best, at, roomy = took, p, fits
    return at


@compiled
def messages(t: Tables, sets: Any, out: Any, fuse: float) -> Any:
    """Groups in a row that one message can serve: first, last and how many there are."""
    first, last, n = np.empty(len(sets), np.int64), np.empty(len(sets), np.int64), 0
    g = len(sets)
    while g > 0:
        g -= 1
        if out[g] != ANY_SERVER:
            continue
        last[n], size = g + 1, t.gradient[g]
        while g > 0 and out[g - 1] == ANY_SERVER and sets[g - 1] == sets[g]:
            size += t.gradient[g - 1]
            if size > fuse:
                break
            g -= 1
        first[n] = g
        n += 1
    return first, last, n


@compiled
def occupied(t: Tables, sets: Any, ways: Any, out: Any) -> Any:
    """[p] seconds of the optimizer that are given, and bytes that are left with even samples."""
    none = np.full(len(sets), NO_SERVER)
    busy, held = updating(t, sets, ways, none), standing(t, sets, ways, none)
    for g in range(len(sets)):
        s = sets[g]
        kept = t.split_kept[s, g] if ways[g] == SPLIT else t.kept[g] * t.batch / t.size[s]
        for c in range(len(held)):
            held[c] += kept if t.member[s, c] else 0.0
    seconds, free = busy[t.cell_of], (t.room - held)[t.cell_of]
    for g in range(len(sets)):
        if out[g] >= 0:
            seconds[out[g]] += t.update[t.kind[t.cell_of[out[g]]], g]
            free[out[g]] -= t.state[g]
    return seconds, free


@compiled
def standing(t: Tables, sets: I1, ways: I1, served: I1) -> F1:
    """[c] bytes that the fullest device of each cell holds all the time."""
    held, state, size, member = t.held, t.state, t.size, t.member
    split_held, split_state = t.split_held, t.split_state
    each, out = np.zeros(len(t.cell_of)), np.zeros(len(t.kind))
    for g in range(len(sets)):
        s, mine = sets[g], held[g] + state[g]
        if ways[g] == SPLIT:
            mine = split_held[s, g] + split_state[s, g]
        elif ways[g] == SHARDED:
            mine = held[g] + state[g] / size[s]
        elif ways[g] == PS and size[s] > 1:
            mine = held[g]
        if served[g] >= 0:
            each[served[g]] += state[g]
        for c in range(len(out)):
            if member[s, c]:
                out[c] += mine
    return out + most(t, each)


@compiled
def updating(t: Tables, sets: I1, ways: I1, served: I1) -> F1:
    """[c] seconds of the optimizer on the busiest device of each cell."""
    held, update, size, member, kind = t.held, t.update, t.size, t.member, t.kind
    split_held, cell_of = t.split_held, t.cell_of
    each, out = np.zeros(len(cell_of)), np.zeros(len(kind))
    for g in range(len(sets)):
        s, part = sets[g], 1.0
        if ways[g] == SHARDED:
            part = 1.0 / size[s]
        elif ways[g] == SPLIT:
            part = split_held[s, g] / max(held[g], 1.0)
        elif ways[g] == PS and size[s] > 1:
            part = 0.0
        if served[g] >= 0:
            each[served[g]] += update[kind[cell_of[served[g]]], g]
        for c in range(len(out)):
            if member[s, c]:
                out[c] += part * update[kind[c], g]
    return out + most(t, each)


@compiled
def most(t: Tables, each: Any) -> Any:
    """[c] the most that any place of a cell has."""
    out = np.zeros(len(t.kind))
    for p in range(len(each)):
        out[t.cell_of[p]] = max(out[t.cell_of[p]], each[p])
    return out


@compiled
def moved(t: Tables, one: int, of: Any, is_split: Any, other: int, to: Any, out: Any) -> None:
    """[c, c] share of the batch that goes from the cells of one set to those of another.

    `of` and `to` are samples of a rank [c]; `is_split` says whose ranks hold, or want, all samples.
    """
    out[:] = 0.0
    if is_split[0]:
        fetched(t, one, other, to, is_split[1], out)
    elif is_split[1]:
        gathered(t, one, of, other, out)
    else:
        redistributed(t, one, of, other, to, out)


@compiled
def total(t: Tables, s: int, share: Any) -> float:
    """Samples of all ranks of a set: a batch, and what rounding up adds."""
    out = 0.0
    for c in range(len(share)):
        if t.member[s, c]:
            out += t.ranks[c] * share[c]
    return out


@compiled
def fetched(t: Tables, one: int, other: int, to: Any, wants_all: bool, out: Any) -> None:
    """From ranks that hold everything: each cell that is none of them gets its part from all."""
    holders = t.member[one].sum()
    whole = 1.0 if wants_all else total(t, other, to)
    for b in range(len(t.kind)):
        if t.member[other, b] and not t.member[one, b]:
            part = 1.0 if wants_all else t.ranks[b] * to[b] / whole
            for a in range(len(t.kind)):
                if t.member[one, a]:
                    out[a, b] += part / holders


@compiled
def gathered(t: Tables, one: int, of: Any, other: int, out: Any) -> None:
    """To ranks that want everything: what a cell's own ranks hold passes over its bus."""
    whole = total(t, one, of)
    for b in range(len(t.kind)):
        if t.member[other, b]:
            for a in range(len(t.kind)):
                if t.member[one, a]:
                    part = t.ranks[a] * of[a] / whole
                    out[a, b] += part * (t.ranks[b] - 1) if a == b else part


@compiled
def redistributed(t: Tables, one: int, of: Any, other: int, to: Any, out: Any) -> None:
    """Where stretches of samples overlap; ranks lie in the order of cells for every set."""
    cells = len(t.kind)
    held, whole = total(t, one, of), total(t, other, to)
    a, i, b, j = 0, 0, 0, 0
    begin_a, begin_b = 0.0, 0.0
    while a < cells and b < cells:
        if not t.member[one, a]:
            a += 1
            continue
        if not t.member[other, b]:
            b += 1
            continue
        end_a, end_b = begin_a + of[a] / held, begin_b + to[b] / whole
        overlap = min(end_a, end_b) - max(begin_a, begin_b)
        if overlap > 1e-12 and not (a == b and i == j):
            out[a, b] += overlap
        if end_a <= end_b:
            begin_a = end_a
            i += 1
            if i == t.ranks[a]:
                a, i = a + 1, 0
        else:
            begin_b = end_b
            j += 1
            if j == t.ranks[b]:
                b, j = b + 1, 0


@compiled
def collective(p: Page, t: Tables, s: int, seconds: float, what: int, group: int) -> Any:
    """A collective of all ranks of a set: one at a time on each, sharing links with messages."""
    i = task(p, seconds, 0, what, 0, group)
    for c in range(len(t.kind)):
        if t.member[s, c]:
            holds(p, len(t.kind) + c)
    last = -1
    for c in range(len(t.kind)):
        if t.member[s, c] and t.box[c] != last:
            last = t.box[c]
            if t.boxes[s] > 1:
                uses(p, 3 * last, 1.0)
                uses(p, 3 * last + 1, 1.0)
            else:
                uses(p, 3 * last + 2, 1.0)
    return i


@compiled
def transfers(
    p: Page, t: Tables, part: Any, size: float, done: Any, arrived: Any, flip: bool, group: int
) -> None:
    """Messages of one hand-over; `arrived` [c, c] becomes their tasks.

    Messages between cells use what goes out of one box and into another; those inside one its bus.
    """
    arrived[:] = -1
    box, nodes, streams, sends = t.box, t.nodes, t.streams, t.sends
    for a in range(len(done)):
        for b in range(len(done)):
            share = part[b, a] if flip else part[a, b]
            if share > 0:
                side = streams[a, b]
                arrived[a, b] = task(p, law(sends[a, b], share * size / side), 0, SEND, b, group)
                if box[a] != box[b] or (a == b and nodes[a] > 1):
                    uses(p, 3 * box[a], side / nodes[a])
                    uses(p, 3 * box[b] + 1, side / nodes[b])
                else:
                    uses(p, 3 * box[a] + 2, 1.0)
                waits(p, done[a])


# A placement written down as tasks. Compiled.
#
# forward, backward   one task a segment (groups in a row on one set), cell and micro-batch; the
#                     last backward has one for each message of gradients
# send                samples that a segment which reads it wants elsewhere (→ `moved`)
# sync, product       gradients as soon as their backward is done; with factors, then the product
# update, share       the optimizer when all gradients are there; then parameters go round (ps,
#                     sharded)
#
# Parts are inlined: each call would hand over some forty arrays, a third of the time in all.


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
    k, b = t.kind[c], -(-d.share[s, c] // micros)
    added = (t.added[k, last] - t.added[k, first]) * (1 - 1 / micros) if back else 0.0
    if d.ways[first] == SPLIT:
        table = t.split_backward if back else t.split_forward
        took = table[np.searchsorted(_MICROS, micros), s, first:last].sum()
        return took + added / t.size[s]
    table = t.backward if back else t.forward
    return table[k, last, b] - table[k, first, b] + added


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
