"""Seconds of placements: samples of each rank, memory, the simulated step, and bounds.

How the samples of a batch are split over the ranks of each set; uneven shares by a linear
program.

Compiled; indices as in `foretell.search.placement.problem`.

Uneven shares of a batch by a linear program, as HAP deals them out.

    min T    a_k + r_k·x_c ≤ T  for every cell c of kind k
             Σ_c n_c·x_c = batch,  x_c ≥ 1

a and r are the line through the seconds of one sample and of twice an even share. `whole` rounds
the answer to samples. The search itself splits whole samples against the true seconds
(`balanced`), which this bounds from below where seconds are lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.compiled import F1, F2, I1, I2, compiled
from foretell.errors import InfeasibleError, UnmodelledError
from foretell.graph import Builder, Graph
from foretell.search.placement import lowering
from foretell.search.placement.lowering import _MICROS, Page, page, places, play, standing, written
from foretell.search.placement.problem import (
    EVEN,
    FACTORS,
    MICROS,
    PROPORTIONAL,
    SPLIT,
    Placement,
    Problem,
    Tables,
    canonical,
)

Array = npt.NDArray[np.float64]


def linear_solver() -> Any:
    """OR-tools' linear solver (GLOP), or an error that says how to get it."""
    try:
        from ortools.linear_solver import pywraplp
    except ImportError:
        raise UnmodelledError(
            "splitting a batch by a linear program needs OR-tools, which is not installed",
            hint="pip install 'foretell[solve]'",
        ) from None
    return pywraplp.Solver.CreateSolver("GLOP")


def ratios(
    start: Array, slope: Array, ranks: Array, batch: float, least: float = 1.0
) -> tuple[Array, float]:
    """Samples of one rank of each cell and the seconds of the slowest, in the best split."""
    solver = linear_solver()
    limit = solver.NumVar(0, solver.infinity(), "limit")
    x = [solver.NumVar(least, solver.infinity(), f"x{i}") for i in range(len(ranks))]
    for i, one in enumerate(x):
        solver.Add(float(start[i]) + float(slope[i]) * one <= limit)
    solver.Add(sum(float(n) * one for n, one in zip(ranks, x, strict=True)) == float(batch))
    solver.Minimize(limit)
    if solver.Solve() != solver.OPTIMAL:
        raise InfeasibleError(f"a batch of {batch:g} cannot be split over {ranks.sum():g} ranks")
    return np.array([one.solution_value() for one in x]), float(limit.solution_value())


def whole(x: Array, ranks: Array, batch: int) -> npt.NDArray[np.int64]:
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
    out[chosen, cells] = whole(x, ranks, problem.batch)
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
# and no step is shorter than one sample alone on the best device for each group (→ `longest`).


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
    r, t = rates(problem), problem.tables
    count = np.bincount(t.kind, weights=t.ranks, minlength=len(r))
    solver = linear_solver()
    limit = solver.NumVar(0, solver.infinity(), "limit")
    y = [[solver.NumVar(0, solver.infinity(), "") for _ in row] for row in r]
    for g in range(r.shape[1]):
        solver.Add(sum(row[g] for row in y) == float(t.batch))
    for k, row in enumerate(y):
        spent = sum(float(r[k, g]) * one for g, one in enumerate(row))
        solver.Add(spent <= float(count[k]) * limit)
    solver.Minimize(limit)
    assert solver.Solve() == solver.OPTIMAL
    return float(limit.solution_value()) * (1 - 1e-7)  # the solver's own tolerance


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
