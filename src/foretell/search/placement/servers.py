"""Who serves a group that agrees by parameter server, and what serving adds. Compiled.

A server is a place: ranks are counted cell by cell. It gets the gradients of its groups, holds the
optimizer's state, updates, and hands parameters back. A placement names it, or leaves it to
`places`, which assigns messages: the longest update first, to the rank that has updated it all
soonest and has room for the state. Reduce and broadcast are chains through all ranks (NCCL has no
other way for them), whose slowest link paces them, whichever rank is last: prices do not depend on
the server. Gloo's do, where three ranks and more have links that differ, so that of equals the best
connected serves.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foretell.compiled import F1, I1, compiled
from foretell.search.placement.problem import NO_SERVER, PS, SHARDED, SPLIT, Tables

ANY_SERVER = NO_SERVER - 1  # some rank will serve; which one is open


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
