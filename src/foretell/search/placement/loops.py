"""The seconds of placements, compiled: split, checked against memory, written down, simulated."""

from __future__ import annotations

from typing import Any

import numpy as np

from foretell.compiled import F1, I1, I2, compiled
from foretell.search.placement.deal import peaks, shares_of
from foretell.search.placement.problem import MICROS, SPLIT, Tables
from foretell.search.placement.servers import places, standing
from foretell.search.placement.tasks import Page, page, play
from foretell.search.placement.write import written

_MICROS = np.array(MICROS)
OUT_OF_MEMORY, NO_SAMPLES, NO_SPLIT = -1.0, -2.0, -3.0  # why a placement has no seconds


@compiled
def prepared(t: Tables, sets: I1, ways: I1, served: I1, micros: int, mode: int, share: I2) -> float:
    """Deal samples out and look at memory: 0, or why there can be no such placement."""
    which = np.searchsorted(_MICROS, micros)
    for g in range(len(sets)):
        if ways[g] == SPLIT and not t.split_forward[which, sets[g], g] < np.inf:
            return NO_SPLIT
    hold = standing(t, sets, ways, served)
    for c in range(len(hold)):
        if hold[c] > t.room[c]:
            return OUT_OF_MEMORY
    if not shares_of(t, sets, ways, mode, hold, share):
        return NO_SAMPLES
    full = peaks(t, sets, ways, hold, share)
    for c in range(len(full)):
        if full[c] > t.room[c]:
            return OUT_OF_MEMORY
    return 0.0


@compiled
def score(
    t: Tables, sets: Any, ways: Any, servers: Any, micros: int, fuse: float, mode: int, p: Page
) -> Any:
    """Seconds of one step, or a number below zero that says why there is none."""
    share = np.zeros((len(t.size), len(t.kind)), np.int64)
    served = places(t, sets, ways, servers, fuse)
    fault = prepared(t, sets, ways, served, micros, mode, share)
    if fault < 0:
        return fault
    written(t, sets, ways, served, micros, fuse, share, p)
    _, end = play(p, len(t.kind), 3 * (t.box.max() + 1))
    return end.max()


@compiled
def score_with(
    t: Tables, sets: I1, ways: I1, servers: I1, micros: int, fuse: float, share: I2, p: Page
) -> float:
    """The same for samples that something else has split: [s, c] of one rank."""
    served = places(t, sets, ways, servers, fuse)
    full = peaks(t, sets, ways, standing(t, sets, ways, served), share)
    for c in range(len(full)):
        if full[c] > t.room[c]:
            return OUT_OF_MEMORY
    written(t, sets, ways, served, micros, fuse, share, p)
    _, end = play(p, len(t.kind), 3 * (t.box.max() + 1))
    return end.max()


@compiled
def scores(t: Tables, sets: I2, ways: I2, servers: I2, micros: I1, fuse: F1, mode: I1) -> F1:
    """Seconds of many placements, a row each."""
    out = np.empty(len(sets))
    p = page(sets.shape[1], len(t.kind), micros.max())
    for i in range(len(sets)):
        out[i] = score(t, sets[i], ways[i], servers[i], micros[i], fuse[i], mode[i], p)
    return out
