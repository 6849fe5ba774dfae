"""How the samples of a batch are split to the ranks of each set; uneven shares by a linear
program.

Compiled; indices as in `foretell.search.placement.problem`.

Uneven shares of a batch by a linear program, as HAP deals them out.

    min T    a_k + r_k·x_c ≤ T  for every cell c of kind k
             Σ_c n_c·x_c = batch,  x_c ≥ 1

a and r are the line through the seconds of one sample and of twice an even share. `whole` rounds
the answer to samples. The search itself splits whole samples against the true seconds
(`deal.balanced`), which this bounds from below where seconds are lines.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.compiled import F1, F2, I1, I2, compiled
from foretell.errors import InfeasibleError, UnmodelledError
from foretell.search.placement.problem import FACTORS, SPLIT, Problem, Tables

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


EVEN, PROPORTIONAL, BALANCED = range(3)  # how samples are split


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
    dealt = 0
    for c in range(len(share)):
        if t.member[s, c]:
            share[c] = max(1, int(t.batch * t.speed[t.kind[c]] / total))
            dealt += t.ranks[c] * share[c]
    while dealt < t.batch:  # the next sample to the cell that is furthest below its due
        most, at = -np.inf, -1
        for c in range(len(share)):
            due = t.batch * t.speed[t.kind[c]] / total - share[c]
            if t.member[s, c] and due > most:
                most, at = due, c
        share[at] += 1
        dealt += t.ranks[at]
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
        middle, dealt = (low + high) / 2, 0
        for c in range(cells):
            if t.member[s, c]:
                dealt += t.ranks[c] * max(1, min(cap[c], most_within(cost[t.kind[c]], middle)))
        if dealt >= t.batch:
            high = middle
        else:
            low = middle
    dealt = 0
    for c in range(cells):
        if t.member[s, c]:
            share[c] = max(1, min(cap[c], most_within(cost[t.kind[c]], high)))
            dealt += t.ranks[c] * share[c]
    return trimmed(t, s, cost, share, dealt)


@compiled
def trimmed(t: Tables, s: int, cost: Any, share: Any, dealt: int) -> Any:
    """Take surplus samples from the slowest device, while it leaves enough for the batch."""
    while True:
        worst, at = -1.0, -1
        for c in range(len(share)):
            able = t.member[s, c] and share[c] > 1 and dealt - t.ranks[c] >= t.batch
            if able and cost[t.kind[c], share[c]] > worst:
                worst, at = cost[t.kind[c], share[c]], c
        if at < 0:
            return share
        share[at] -= 1
        dealt -= t.ranks[at]


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
