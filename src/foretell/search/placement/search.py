"""Placements evaluated, and searched by trees and annealing.

Seconds of placements: samples of each rank, memory, the simulated step, and bounds.

How the samples of a batch are split over the ranks of each set; uneven shares by a linear
program.

Compiled; indices as in `foretell.search.placement.problem`.

Uneven shares of a batch by a linear program, as HAP splits it.

    min T    a_k + r_k·x_c ≤ T  for every cell c of kind k
             Σ_c n_c·x_c = batch,  x_c ≥ 1

a and r are the line through the seconds of one sample and of twice an even share. `whole` rounds
the answer to samples. The search itself splits whole samples against the true seconds
(`balanced`), which this bounds from below where seconds are lines.

Searches over placements: annealing, descent, and Monte Carlo trees as TAG has them.

Simulated annealing over placements, compiled, and the descent that follows it.

A stroke gives one choice to a run of groups, moves the border between two segments, exchanges two
choices, names a parameter server, or changes micro-batches, message size or the split of
samples. Slower placements pass with exp(−Δ/(T·t)), t falling from `HOT` to `COLD` of a step. The
same seed gives the same answer.

Descent: change what can be changed in one stroke until nothing helps.

Strokes: one group, a run of groups from here to the end of its segment or to either end of the
model, all groups; who serves them; micro-batches, message size, and how samples are split.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from foretell import portable
from foretell.compiled import B3, F1, F2, I1, I2, compiled
from foretell.errors import InfeasibleError
from foretell.graph import Builder, Graph
from foretell.search.kit import shared_work
from foretell.search.placement import lowering
from foretell.search.placement.lowering import Page, page, places, play, standing, written
from foretell.search.placement.problem import (
    EVEN,
    FACTORS,
    MICROS,
    MODES,
    NO_SERVER,
    PROPORTIONAL,
    PS,
    SPLIT,
    WAYS,
    Action,
    Placement,
    Problem,
    Tables,
    actions,
    canonical,
    servers,
)

Array = npt.NDArray[np.float64]


def ratios(
    start: Array, slope: Array, ranks: Array, batch: float, least: float = 1.0
) -> tuple[Array, float]:
    """Samples of one rank of each cell and the seconds of the slowest, in the best split.

    At a limit every rank has as many samples as end by it: the least limit that takes the batch.
    """
    if least * ranks.sum() > batch:
        raise InfeasibleError(f"a batch of {batch:g} cannot be split over {ranks.sum():g} ranks")
    each = np.maximum(slope, 1e-15)
    low, high = 0.0, float((start + each * batch).max())
    for _ in range(200):
        middle = (low + high) / 2
        enough = (ranks * np.maximum((middle - start) / each, least)).sum() >= batch
        low, high = (low, middle) if enough else (middle, high)
    x = np.maximum((high - start) / each, least)
    return x, float((start + slope * x).max())


def whole_step(x: Array, ranks: Array, batch: int) -> npt.NDArray[np.int64]:
    """Whole samples of one rank of each cell, at least a batch in all."""
    out = np.maximum(np.floor(x + 1e-9), 1).astype(np.int64)
    while (out * ranks).sum() < batch:
        out[int(np.argmax(x - out))] += 1
    return out


def rank_shares(problem: Problem, chosen: int) -> npt.NDArray[np.int64]:
    """[s, c] samples by the program for the whole model on one set."""
    t = problem.tables
    total = t.forward[:, -1] + t.backward[:, -1]
    cells = np.array(problem.fleet.sets[chosen])
    far = max(2, min(problem.batch, 2 * problem.batch // int(t.size[chosen])))
    # Of one sample nothing is known but what it takes.
    is_one = total.shape[1] <= far
    slope = total[:, 1] if is_one else (total[:, far] - total[:, 1]) / (far - 1)
    start = total[:, 1] - slope
    kinds, ranks = t.kind[cells], t.ranks[cells].astype(float)
    x, _ = ratios(start[kinds], slope[kinds], ranks, problem.batch)
    out = np.zeros((len(t.size), len(t.kind)), np.int64)
    out[chosen, cells] = whole_step(x, ranks, problem.batch)
    return out


@compiled
def even(t: Tables, s: int) -> Any:
    """As many samples for each rank."""
    share = np.zeros(len(t.kind), np.int64)
    each = -(-t.batch // t.size[s])
    for c in range(len(share)):
        if t.member[s, c]:
            share[c] = each
    return share


@compiled
def proportional(t: Tables, s: int) -> Any:
    """Samples by the speed of each device on the whole model."""
    share, total = np.zeros(len(t.kind), np.int64), 0.0
    for c in range(len(share)):
        if t.member[s, c]:
            total += t.ranks[c] * t.speed[t.kind[c]]
    assigned = 0
    for c in range(len(share)):
        if t.member[s, c]:
            share[c] = max(1, int(t.batch * t.speed[t.kind[c]] / total))
            assigned += t.ranks[c] * share[c]
    while assigned < t.batch:  # the next sample to the cell that is furthest below its due
        most, at = -np.inf, -1
        for c in range(len(share)):
            due = t.batch * t.speed[t.kind[c]] / total - share[c]
            if t.member[s, c] and due > most:
                most, at = due, c
        share[at] += 1
        assigned += t.ranks[at]
    return share


@compiled
def most_within(cost: Any, limit: float) -> int:
    """The most samples whose seconds stay within a limit."""
    low, high = 0, len(cost) - 1
    while low < high:
        middle = (low + high + 1) >> 1
        if cost[middle] <= limit:
            low = middle
        else:
            high = middle - 1
    return low


@compiled
def balanced(t: Tables, s: int, cost: F2, cap: I1) -> I1:
    """Whole samples for each rank so that the slowest is done as early as can be.

    `cost` [k, b] are the seconds of a rank with b samples, `cap` [c] what its memory allows. The
    least possible limit is found by halving; all zero where the batch does not fit.
    """
    cells = len(t.kind)
    share = np.zeros(cells, np.int64)
    room = 0
    low, high = 0.0, 0.0
    for c in range(cells):
        if t.member[s, c]:
            if cap[c] < 1:
                return share
            room += t.ranks[c] * cap[c]
            low = max(low, cost[t.kind[c], 1])
            high = max(high, cost[t.kind[c], min(cap[c], t.batch)])
    if room < t.batch or t.size[s] > t.batch:
        return share
    for _ in range(48):
        middle, assigned = (low + high) / 2, 0
        for c in range(cells):
            if t.member[s, c]:
                assigned += t.ranks[c] * max(1, min(cap[c], most_within(cost[t.kind[c]], middle)))
        if assigned >= t.batch:
            high = middle
        else:
            low = middle
    assigned = 0
    for c in range(cells):
        if t.member[s, c]:
            share[c] = max(1, min(cap[c], most_within(cost[t.kind[c]], high)))
            assigned += t.ranks[c] * share[c]
    return trimmed(t, s, cost, share, assigned)


@compiled
def trimmed(t: Tables, s: int, cost: Any, share: Any, assigned: int) -> Any:
    """Take surplus samples from the slowest device, while it leaves enough for the batch."""
    while True:
        worst, at = -1.0, -1
        for c in range(len(share)):
            able = t.member[s, c] and share[c] > 1 and assigned - t.ranks[c] >= t.batch
            if able and cost[t.kind[c], share[c]] > worst:
                worst, at = cost[t.kind[c], share[c]], c
        if at < 0:
            return share
        share[at] -= 1
        assigned -= t.ranks[at]


@compiled
def costs_on(t: Tables, sets: Any, ways: Any, s: int) -> Any:
    """[k, b] seconds of all groups that share their samples out over a set."""
    out = np.zeros((t.forward.shape[0], t.forward.shape[2]))
    g = 0
    while g < len(sets):
        if sets[g] != s or ways[g] == SPLIT:
            g += 1
            continue
        last = g
        while last < len(sets) and sets[last] == s and ways[last] != SPLIT:
            last += 1
        for k in range(out.shape[0]):
            for b in range(out.shape[1]):
                out[k, b] += (t.forward[k, last, b] - t.forward[k, g, b]) + (
                    t.backward[k, last, b] - t.backward[k, g, b]
                )
        g = last
    return out


@compiled
def shares_of(t: Tables, sets: Any, ways: Any, mode: int, hold: Any, share: Any) -> bool:
    """Fill [s, c] the samples of each rank for every set that is used; whether that can be."""
    done = np.zeros(len(t.size), np.bool_)
    for g in range(len(sets)):
        s = sets[g]
        if done[s] or ways[g] == SPLIT:
            continue
        done[s] = True
        if t.size[s] > t.batch:
            return False
        if mode == EVEN:
            share[s] = even(t, s)
        elif mode == PROPORTIONAL:
            share[s] = proportional(t, s)
        else:
            kept = 0.0
            for j in range(len(sets)):
                if sets[j] == s and ways[j] != SPLIT:
                    kept += t.kept[j]
            cap = np.zeros(len(t.kind), np.int64)
            for c in range(len(cap)):
                free = max(t.room[c] - hold[c], 0.0)
                cap[c] = t.batch if kept <= 0 else min(t.batch, int(free / kept))
            share[s] = balanced(t, s, costs_on(t, sets, ways, s), cap)
            if share[s].sum() == 0:
                return False
    return True


@compiled
def peaks(t: Tables, sets: I1, ways: I1, hold: F1, share: I2) -> F1:
    """[c] bytes of a device of each cell at the fullest moment."""
    out = hold.copy()
    brief = np.zeros(len(out))
    for g in range(len(sets)):
        s = sets[g]
        largest = share[s].max()
        for c in range(len(out)):
            if not t.member[s, c]:
                continue
            if ways[g] == SPLIT:
                out[c] += t.split_kept[s, g]
                brief[c] = max(brief[c], t.brief[g] * t.batch)
            else:
                out[c] += t.kept[g] * share[s, c]
                brief[c] = max(brief[c], t.brief[g] * share[s, c])
                if ways[g] == FACTORS:
                    brief[c] = max(brief[c], t.factors[s, g] * largest * t.size[s])
    return out + brief


# Seconds of placements, compiled, each worked out once; and seconds that none can beat.
#
# `graph` writes a placement down as a `Graph` of the same tasks, for timelines and to hold the
# compiled loops against the readable engine.
#
# Seconds that no placement can beat, whatever it does about communication.
#
# Each sample passes every group somewhere. With y[k, g] samples of group g on devices of kind k,
# r[k, g] the least device-seconds a sample takes there at any batch size or split, and N_k devices,
#
#     min T    Σ_k y[k, g] = batch for every g,   Σ_g r[k, g]·y[k, g] ≤ N_k·T
#
# (→ `shared_work`), and no step is shorter than one sample alone on the best device for each group
# (→ `longest`).


OUT_OF_MEMORY, NO_SAMPLES, NO_SPLIT = -1.0, -2.0, -3.0  # why a placement has no seconds


Ints = npt.NDArray[np.int64]
FAULTS = {-1.0: "memory", -2.0: "samples", -3.0: "split"}
_WHAT = ("forward", "backward", "send", "sync", "product", "update", "share")


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
def compiled_scores(
    t: Tables, sets: I2, ways: I2, servers: I2, micros: I1, fuse: F1, mode: I1
) -> F1:
    """Seconds of many placements, a row each."""
    out = np.empty(len(sets))
    p = page(t, micros.max())
    for i in range(len(sets)):
        out[i] = score(t, sets[i], ways[i], servers[i], micros[i], fuse[i], mode[i], p)
    return out


@dataclass
class Evaluator:
    """Remembers what every placement took; infinite where it does not fit."""

    problem: Problem
    seen: dict[Placement, float] = field(default_factory=dict)
    evaluations: int = 0

    @property
    def least(self) -> float:
        """The best seconds so far."""
        return min(self.seen.values(), default=inf)

    def seconds(self, placement: Placement) -> float:
        """Seconds of one step."""
        return self.many([placement])[0]

    def many(self, placements: Sequence[Placement]) -> list[float]:
        """Seconds of several, those that are new simulated together."""
        keys = [canonical(self.problem, p) for p in placements]
        new = [k for k in dict.fromkeys(keys) if k not in self.seen]
        if new:
            self.evaluations += len(new)
            found = scores(self.problem, new)
            self.seen.update(zip(new, np.where(found < 0, inf, found).tolist(), strict=True))
        return [self.seen[k] for k in keys]

    def fault(self, placement: Placement) -> str:
        """Why a placement has no seconds: memory, samples or split; empty where it has."""
        found = float(scores(self.problem, [canonical(self.problem, placement)])[0])
        return FAULTS.get(found, "")


def scores(problem: Problem, placements: Sequence[Placement]) -> npt.NDArray[np.float64]:
    """What the compiled loops say of some canonical placements."""
    found: npt.NDArray[np.float64] = compiled_scores(
        problem.tables,
        *columns(placements),
        np.array([p.micros for p in placements]),
        np.array([float(p.fuse) for p in placements]),
        np.array([p.mode for p in placements]),
    )
    return found


def columns(placements: Sequence[Placement]) -> tuple[Ints, Ints, Ints]:
    """Sets, ways and servers of placements, a row each."""
    table = np.array([p.actions for p in placements], np.int64)
    sets, ways, named = (np.ascontiguousarray(table[:, :, i]) for i in range(3))
    return sets, ways, named


def settled(problem: Problem, placement: Placement) -> tuple[Ints, Ints, Ints]:
    """Sets, ways and servers of a placement, with those that it leaves to be split."""
    sets, ways, named = (row[0] for row in columns([canonical(problem, placement)]))
    return sets, ways, lowering.places(problem.tables, sets, ways, named, float(placement.fuse))


def shares(problem: Problem, placement: Placement) -> Ints:
    """[s, c] samples of a rank of each cell, for every set that deals samples out."""
    t = problem.tables
    share = np.zeros((len(t.size), len(t.kind)), np.int64)
    prepared(t, *settled(problem, placement), placement.micros, placement.mode, share)
    return share


def memory(problem: Problem, placement: Placement) -> dict[int, float]:
    """Bytes of each rank at its fullest."""
    t, (sets, ways, served) = problem.tables, settled(problem, placement)
    hold = lowering.standing(t, sets, ways, served)
    full = peaks(t, sets, ways, hold, shares(problem, placement))
    cells = problem.fleet.cells
    return {r: float(full[c]) for c, cell in enumerate(cells) for r in cell.ranks}


def with_shares(problem: Problem, placement: Placement, share: Ints) -> float:
    """Seconds where samples are split as given; infinite where that does not fit."""
    t = problem.tables
    page = lowering.page(t, placement.micros)
    chosen = settled(problem, placement)
    found = score_with(t, *chosen, placement.micros, float(placement.fuse), share, page)
    return inf if found < 0 else float(found)


def graph(problem: Problem, placement: Placement) -> Graph:
    """The tasks of a placement as a graph that `foretell.simulate` simulates."""
    t = problem.tables
    page = lowering.page(t, placement.micros)
    share, chosen = shares(problem, placement), settled(problem, placement)
    lowering.written(t, *chosen, placement.micros, float(placement.fuse), share, page)
    return _drawn(problem, page)


def _drawn(problem: Problem, page: Any) -> Graph:
    make, cells = Builder(), problem.fleet.cells
    for word in ("compute", "collectives"):
        kind = "compute" if word == "compute" else "comm"
        for cell in cells:
            make.lane(word, rank=cell.ranks[0], kind=kind, ordered=False)
    for box in range(1 + max(cell.box for cell in cells)):
        for word in ("out", "in", "bus"):
            make.link(f"{word} {box}", 1.0)
    tasks, _, _, edges = page.count.tolist()
    after: dict[int, list[int]] = {}
    for a, b in zip(page.edge_from[:edges].tolist(), page.edge_to[:edges].tolist(), strict=True):
        after.setdefault(b, []).append(a)
    for i in range(tasks):
        _task(make, problem, page, i, sorted(set(after.get(i, []))))
    return make.graph(workload=problem.workload.name, batch=float(problem.batch))


def _task(make: Builder, problem: Problem, page: Any, i: int, after: list[int]) -> None:
    what = _WHAT[page.what[i]]
    kinds = {"send": "send", "sync": "collective", "share": "collective"}
    used = slice(page.use_start[i], page.use_start[i + 1])
    demand: dict[int, float] = {}
    for link, share in zip(
        page.use_link[used].tolist(), page.use_demand[used].tolist(), strict=True
    ):
        demand[link] = demand.get(link, 0.0) + share
    make.task(
        kind=kinds.get(what, "kernel"),
        op="all_reduce" if kinds.get(what) == "collective" else what,
        name=what,
        layer=problem.groups[page.group[i]].name,
        seconds=float(page.seconds[i]),
        priority=int(page.priority[i]),
        rank=problem.fleet.cells[page.cell[i]].ranks[0],
        lanes=page.lane[page.lane_start[i] : page.lane_start[i + 1]].tolist(),
        uses=demand,
        after=after,
    )


def bound(problem: Problem) -> float:
    """The larger of the two."""
    return max(work(problem), longest(problem))


def rates(problem: Problem) -> Array:
    """[k, g] least device-seconds of one sample."""
    t = problem.tables
    each = np.diff(t.forward, axis=1) + np.diff(t.backward, axis=1)
    many = np.arange(1, t.batch + 1)
    out: Array = (each[:, :, 1:] / many).min(axis=2)
    for i in range(len(MICROS)):
        part = -(-t.batch // MICROS[i])
        for s, cells in enumerate(problem.fleet.sets):
            k = t.kind[cells[0]]
            took = (t.split_forward[i, s] + t.split_backward[i, s]) * t.size[s] / part
            out[k] = np.minimum(out[k], took)
    return out


def work(problem: Problem) -> float:
    """All samples through all groups, shared out over devices as well as can be."""
    t = problem.tables
    count = np.bincount(t.kind, weights=t.ranks, minlength=len(problem.fleet.kinds))
    return t.batch * shared_work(rates(problem).T, count)


def longest(problem: Problem) -> float:
    """One sample through the longest way of groups, each where it is quickest."""
    t = problem.tables
    each = np.diff(t.forward[:, :, 1], axis=1) + np.diff(t.backward[:, :, 1], axis=1)
    split = (t.split_forward + t.split_backward).min(axis=(0, 1))
    took = np.minimum(each.min(axis=0), split)
    ends = took.copy()
    for source, reader, _ in t.reads.tolist():  # by reading group
        ends[reader] = max(ends[reader], ends[source] + took[reader])
    return float(ends.max())


FUSES = (0.0, 4 * 2**20, 25 * 2**20, 64 * 2**20, 256 * 2**20, inf)
LEAST = 1e-6  # relative gain that counts as one
Allowed = Callable[[Action], bool]


_FUSES = np.array(FUSES)
_MICROS = np.array(MICROS)


def polish(
    on: Evaluator, start: Placement, most: int = 20_000, allowed: Allowed | None = None
) -> tuple[Placement, float]:
    """The best that single strokes lead to, within about so many simulations."""
    best, seconds = start, on.seconds(start)
    limit = on.evaluations + most
    improved = True
    while improved and on.evaluations < limit:
        improved = False
        for g in (-1, *on.problem.leaders):
            tried = list(whole(on, best) if g < 0 else _strokes(on, best, g, allowed))
            took = on.many(tried)
            i = int(np.argmin(took))
            if took[i] < seconds * (1 - LEAST):
                best, seconds, improved = tried[i], took[i], True
            if on.evaluations >= limit:
                break
    return best, seconds


def whole(on: Evaluator, now: Placement) -> Iterator[Placement]:
    """Changes of the whole step."""
    for micros in MICROS:
        if micros <= on.problem.batch:
            yield replace(now, micros=micros)
    for fuse in FUSES:
        yield replace(now, fuse=fuse)
    for mode in range(len(MODES)):
        yield replace(now, mode=mode)


def _strokes(on: Evaluator, now: Placement, g: int, allowed: Allowed | None) -> Iterator[Placement]:
    """All changes that begin at one group, and none."""
    yield now
    n = len(now.actions)
    runs = dict.fromkeys((range(g, g + 1), range(g, n), range(g + 1), *_segment(now, g)))
    for action in (*actions(on.problem, g), *_served(on, now, g)):
        if allowed is None or allowed(action):
            for run in runs:
                yield now.but(run, action)


def _served(on: Evaluator, now: Placement, g: int) -> Iterator[Action]:
    """The choice of a group with each server by name; nothing where nothing serves it."""
    mine = now.actions[g]
    for place in servers(on.problem, now, mine.devices) if mine.way == PS else ():
        yield mine._replace(server=place)


def _segment(now: Placement, g: int) -> tuple[range, range]:
    """From a group to either end of those that choose as it does."""
    first, last = g, g + 1
    mine = now.actions[g][:2]
    while first > 0 and now.actions[first - 1][:2] == mine:
        first -= 1
    while last < len(now.actions) and now.actions[last][:2] == mine:
        last += 1
    return range(first, g + 1), range(g, last)


def simplified(on: Evaluator, start: Placement) -> tuple[Placement, float]:
    """The same seconds in fewer words: choices like the neighbour's, or plain all-reduce."""
    best, seconds = start, on.seconds(start)
    for g in range(len(start.actions)):
        mine = best.actions[g]
        plain = Action(mine.devices, 0)
        around = [best.actions[g - 1]] if g else []
        for action in (*around, plain):
            other = best.but((g,), action)
            if action != mine and on.seconds(other) <= seconds:
                best, seconds = other, on.seconds(other)
                break
    return best, seconds


HOT, COLD = 0.04, 0.001  # shares of a step that a stroke may lose, at the start and at the end


def anneal(on: Evaluator, start: Placement, strokes: int, seed: int) -> tuple[Placement, float]:
    """The best placement met on the way."""
    problem = on.problem
    start = canonical(problem, start)
    chosen = np.stack([row[0] for row in columns([start])])
    step = np.array([MICROS.index(start.micros), _nearest(start.fuse), start.mode])
    leaders = np.array([group.leader for group in problem.groups])
    limits = np.array([sum(m <= problem.batch for m in MICROS), len(FUSES), len(MODES)])
    seconds = loops_anneal(
        problem.tables, chosen, step, leaders, _allowed(on), limits, strokes, seed
    )
    on.evaluations += strokes
    rows = tuple(Action(*row) for row in chosen.T.tolist())
    found = Placement(rows, MICROS[step[0]], FUSES[step[1]], int(step[2]))
    return found, float(seconds)


def _nearest(fuse: float) -> int:
    return min(range(len(FUSES)), key=lambda i: abs(min(FUSES[i], 1e12) - min(fuse, 1e12)))


def _allowed(on: Evaluator) -> Any:
    """[g, s, w] what each group may choose."""
    t, count = on.problem.tables, len(on.problem.groups)
    out = np.zeros((count, len(t.size), len(WAYS)), np.bool_)
    for g in range(count):
        for action in actions(on.problem, g):
            out[g, action.devices, action.way] = True
    return out


@compiled
def loops_anneal(
    t: Tables, chosen: I2, step: I1, leaders: I1, allowed: B3, limits: I1, strokes: int, seed: int
) -> float:
    """Anneal in place; the best seconds, whose placement is left in `chosen` and `step`.

    `chosen` has a row each for sets, ways and servers.
    """
    np.random.seed(seed)  # noqa: NPY002
    p = lowering.page(t, MICROS[-1])
    now = scored(t, chosen, step, p)
    now = now if now > 0 else np.inf
    best, best_chosen, best_step = now, chosen.copy(), step.copy()
    new, new_step = chosen.copy(), step.copy()
    for i in range(strokes):
        if i % 4000 == 3999:  # go on from the best
            chosen[:], step[:], now = best_chosen, best_step, best
        new[:], new_step[:] = chosen, step
        stroke(t, new, new_step, leaders, allowed, limits)
        took = scored(t, new, new_step, p)
        if took <= 0:
            continue
        heat = HOT * (COLD / HOT) ** (i / strokes)
        if took <= now or np.random.random() < np.exp((now - took) / (heat * best)):  # noqa: NPY002
            chosen[:], step[:], now = new, new_step, took
            if took < best:
                best = took
                best_chosen[:], best_step[:] = chosen, step
    chosen[:], step[:] = best_chosen, best_step
    return best


@compiled
def scored(t: Tables, chosen: Any, step: Any, p: Any) -> Any:
    """Seconds of what stands in some rows."""
    micros, fuse = _MICROS[step[0]], _FUSES[step[1]]
    return score(t, chosen[0], chosen[1], chosen[2], micros, fuse, step[2], p)


@compiled
def stroke(t: Tables, chosen: Any, step: Any, leaders: Any, allowed: Any, limits: Any) -> None:
    """One change at random, in place."""
    sets, ways, servers = chosen
    n = len(sets)
    kind = np.random.random()  # noqa: NPY002
    g = np.random.randint(0, n)  # noqa: NPY002
    if kind < 0.08:
        which = np.random.randint(0, 3)  # noqa: NPY002
        step[which] = np.random.randint(0, limits[which])  # noqa: NPY002
        return
    length = 1 + int(np.random.exponential(n / 8.0))  # noqa: NPY002
    first, last = g, min(n, g + length)
    server = NO_SERVER
    s: int
    w: int
    if kind < 0.45:  # a border moves: the run takes the choice of the group before or behind it
        other = g - 1 if np.random.random() < 0.5 else last  # noqa: NPY002
        if other < 0 or other >= n:
            return
        s, w, server = sets[other], ways[other], servers[other]
    elif kind < 0.55:  # two groups exchange their choices, with all that choose as they do
        h = np.random.randint(0, n)  # noqa: NPY002
        exchange(sets, ways, allowed, sets[g], sets[h])
        follow(chosen, leaders)
        return
    elif kind < 0.75:  # another way for the same set
        s, w = sets[g], np.random.randint(0, allowed.shape[2])  # noqa: NPY002
        while last > first + 1 and sets[last - 1] != s:
            last -= 1
    else:
        s = np.random.randint(0, allowed.shape[1])  # noqa: NPY002
        w = 0 if np.random.random() < 0.6 else np.random.randint(0, allowed.shape[2])  # noqa: NPY002
    if w == PS and np.random.random() < 0.5:  # noqa: NPY002
        server = np.random.randint(0, len(t.cell_of))  # noqa: NPY002
    for j in range(first, last):
        if allowed[j, s, w]:
            sets[j], ways[j], servers[j] = s, w, server
        elif allowed[j, s, 0]:
            sets[j], ways[j] = s, 0
    follow(chosen, leaders)


@compiled
def exchange(sets: Any, ways: Any, allowed: Any, a: int, b: int) -> None:
    """Groups on one set go to another, and those there come here."""
    for j in range(len(sets)):
        if sets[j] == a or sets[j] == b:
            s = b if sets[j] == a else a
            if allowed[j, s, ways[j]]:
                sets[j] = s
            elif allowed[j, s, 0]:
                sets[j], ways[j] = s, 0


@compiled
def follow(chosen: Any, leaders: Any) -> None:
    """Tied groups choose as their leader does."""
    for j in range(chosen.shape[1]):
        chosen[:, j] = chosen[:, leaders[j]]


# Monte Carlo tree search over placements, as TAG guides it.
#
# The first decision is a placement to start from, the second one for the whole step
# (micro-batches, messages, samples), the third one choice for all groups or none, the next one
# choice for each branch of the model that runs beside others, each further one that of one op
# group, the heaviest first (where it is served, also by whom); groups not yet decided keep what
# they have. A leaf is simulated by the simulator, not rolled out, and r = T₀/T − 1 (its fourth
# root above 1, −1 where it does not fit) is backed up:
#
#     next = argmax  Q + c·P·√N / (1 + n),     c = √(children / 10)
#
# Q of a way that was not tried is `UNTRIED` of its node's: with 0, as TAG has it, the first way
# that gains anything is followed for ever. P comes from a `Prior`. Several leaves are gathered
# before any is simulated, those on the way counted as visited and not yet worth anything (virtual
# loss), so that a prior and the simulator answer for all of them at once. What is reached in two
# ways is one node. It can be stopped at any time.


AT_ONCE = 4  # leaves gathered before they are simulated
UNTRIED = 0.7  # on 14 problems no game was on: 0, 0.5, 0.7, 1 gain 4.3, 4.9, 5.0, 5.2 × unguided,
# and guided by the network 5.33, 5.33, 5.40, 5.41 × with 0.26, 0.29, 0.16, 0.31 of the playouts
SHARP = 0.1  # share of a step by which look-ahead lets chances fall by e: 0.03 gets stuck


class Expansion(NamedTuple):
    """A placement and the ways on from it."""

    now: Placement
    successors: list[Placement]


class Prior(Protocol):
    """Says how promising each way on is, before any is tried."""

    def __call__(self, on: Evaluator, expansions: Sequence[Expansion]) -> list[Array]:
        """For each question, chances that add up to 1."""


def even_chances(on: Evaluator, expansions: Sequence[Expansion]) -> list[Array]:
    """Nothing is known."""
    return [np.full(len(one.successors), 1 / len(one.successors)) for one in expansions]


def look_ahead(on: Evaluator, expansions: Sequence[Expansion]) -> list[Array]:
    """By what one simulation of each says: chances fall by e for every tenth of a step."""
    on.many([way for one in expansions for way in one.successors])
    return [by_seconds(np.array(on.many(one.successors))) for one in expansions]


def by_seconds(took: Array) -> Array:
    """Chances by how long each takes."""
    least = took.min()
    if not np.isfinite(least):
        return np.full(len(took), 1 / len(took))
    chances = np.where(np.isfinite(took), portable.exp(-(took / least - 1) / SHARP), 0.0) + 1e-4
    out: Array = chances / chances.sum()
    return out


@dataclass(eq=False)
class Node:
    """A placement after so many decisions, and how often each way on from it was taken."""

    now: Placement
    depth: int
    visits: int = 0
    total: float = 0.0
    children: list[Node] = field(default_factory=list)
    chances: Array = field(default_factory=lambda: np.zeros(0))
    taken: Array = field(default_factory=lambda: np.zeros(0))
    is_over: bool = False  # nothing below it is left to try

    @property
    def worth(self) -> float:
        return self.total / self.visits if self.visits else 0.0

    def next(self) -> int:
        """The way on to take now."""
        untried = UNTRIED * self.worth
        worth = np.array([child.worth if child.visits else untried for child in self.children])
        reach = math.sqrt(len(self.children) / 10) * math.sqrt(max(self.visits, 1))
        over = np.array([child.is_over for child in self.children])
        value = np.where(over, -math.inf, worth + reach * self.chances / (1 + self.taken))
        return int(np.argmax(value))


@dataclass
class Tree:
    """A search that can go on for ever; `best` is the answer so far."""

    on: Evaluator
    starts: list[Placement]
    prior: Prior
    baseline: float  # T₀
    seed: int | None = None  # in which order equal ways are tried; as they come where None
    noise: float = 0.0  # share of the first chances that is drawn, for self-play
    ways: tuple[int, ...] = tuple(range(len(WAYS)))  # how replicas may agree
    steps: bool = True  # whether anything is decided for the whole step
    best: tuple[Placement, float] = field(init=False)
    root: Node = field(init=False)
    playouts: int = field(default=0, init=False)
    nodes: dict[tuple[int, Placement], Node] = field(default_factory=dict, init=False)
    curve: list[float] = field(default_factory=list, init=False)  # the best after each playout
    spent: list[int] = field(default_factory=list, init=False)  # placements simulated by then

    def __post_init__(self) -> None:
        self.root = Node(self.starts[0], -1 if len(self.starts) > 1 else 0 if self.steps else 1)
        self.best = (self.starts[0], self.on.seconds(self.starts[0]))
        problem = self.on.problem
        single = [(g,) for g in problem.leaders]
        self._runs = [tuple(range(len(problem.groups))), *problem.branches, *single]
        self._draw = random.Random(self.seed)
        self._known: set[Placement] = set()  # what was simulated

    def play(self, playouts: int) -> None:
        """Go down, open leaves, simulate them, and tell those above: so many times."""
        until = self.playouts + playouts
        while self.playouts < until and not self.root.is_over:
            paths = self._gathered(min(AT_ONCE, until - self.playouts))
            self._open([path[-1] for path in paths])
            self.on.many([path[-1].now for path in paths])
            for path in paths:
                reward = self._played(path[-1].now)
                self.curve.append(self.best[1])
                self.spent.append(self.on.evaluations)
                for node in path:
                    node.total += reward
                self._ended(path)
            self.playouts += len(paths)

    def _ended(self, path: list[Node]) -> None:
        """All is decided at its end: there, and where all ways on are over, nothing is left."""
        path[-1].is_over = path[-1].depth > len(self._runs)
        for node in reversed(path[:-1]):
            node.is_over = all(child.is_over for child in node.children)

    def _gathered(self, most: int) -> list[list[Node]]:
        """Ways down to leaves that differ, counted as visited before they are simulated."""
        paths: list[list[Node]] = []
        while len(paths) < most and not self.root.is_over:
            # To the leaf that looks best. One whose placement was simulated before (nothing was
            # changed on the way to it) has nothing to tell: it is opened, and the way goes on.
            path, ways = [self.root], list[int]()
            while True:
                if not path[-1].children and self._is_known(path[-1]):
                    self._open([path[-1]])
                if not path[-1].children:
                    break
                ways.append(path[-1].next())
                path.append(path[-1].children[ways[-1]])
            if self._is_known(path[-1]):  # the end of the tree, nothing changed on the way
                self._ended(path)
                continue
            if any(path[-1] is other[-1] for other in paths):
                break
            for node, way in zip(path, [*ways, None], strict=True):
                node.visits += 1
                if way is not None:
                    node.taken[way] += 1
            paths.append(path)
        return paths

    def _is_known(self, leaf: Node) -> bool:
        return canonical(self.on.problem, leaf.now) in self._known

    def _open(self, leaves: list[Node]) -> None:
        deepest = len(self._runs)
        fresh = [n for n in dict.fromkeys(leaves) if n.depth <= deepest and not n.children]
        expansions = [Expansion(n.now, self._successors(n)) for n in fresh]
        if not expansions:
            return
        for node, one, chances in zip(
            fresh, expansions, self.prior(self.on, expansions), strict=True
        ):
            node.chances = self._noisy(chances) if node.depth <= 2 else chances
            node.children = [self._node(node.depth + 1, now) for now in one.successors]
            node.taken = np.zeros(len(node.children))

    def _node(self, depth: int, now: Placement) -> Node:
        return self.nodes.setdefault((depth, now), Node(now, depth))

    def _noisy(self, chances: Array) -> Array:
        if not self.noise:
            return chances
        drawn = np.array([self._draw.gammavariate(0.3, 1.0) for _ in chances]) + 1e-12
        mixed: Array = (1 - self.noise) * chances + self.noise * drawn / drawn.sum()
        return mixed

    def _successors(self, node: Node) -> list[Placement]:
        """What may be decided next, what there is among it."""
        if node.depth < 0:
            found = list(self.starts)
        elif node.depth == 0:
            found = list(dict.fromkeys([node.now, *whole(self.on, node.now)]))
        else:
            found = self._choices(node)
        if self.seed is not None:
            self._draw.shuffle(found)
        return found

    def _choices(self, node: Node) -> list[Placement]:
        problem, run = self.on.problem, self._runs[node.depth - 1]
        for_all = node.depth == 1
        group = next((g for g in problem.leaders if g in run), run[0])
        kept: Action = node.now.actions[group]
        others = [a for a in actions(problem, group, ways=self.ways) if a != kept or for_all]
        if kept.way == PS and len(run) == 1:
            places = servers(problem, node.now, kept.devices)
            others += [kept._replace(server=p) for p in places if p != kept.server]
        return [node.now, *(node.now.but(run, a) for a in others)]

    def _played(self, now: Placement) -> float:
        seconds = self.on.seconds(now)
        self._known.add(canonical(self.on.problem, now))
        if seconds < self.best[1]:
            self.best = (now, seconds)
        if not math.isfinite(seconds):
            return -1.0
        gain = self.baseline / seconds - 1 if math.isfinite(self.baseline) else 1.0
        return math.sqrt(math.sqrt(gain)) if gain > 1 else gain
