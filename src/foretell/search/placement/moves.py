"""What goes over links: samples wanted elsewhere, collectives, and parameter servers. Compiled.

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

from foretell.compiled import C1, F1, I1, J1, S1, compiled
from foretell.search.placement.problem import NO_SERVER, PS, SHARDED, SPLIT, Tables
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
