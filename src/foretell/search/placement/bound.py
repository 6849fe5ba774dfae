"""Seconds that no placement can beat, whatever it does about communication.

Each sample passes every group somewhere. With y[k, g] samples of group g on devices of kind k,
r[k, g] the least device-seconds a sample takes there at any batch size or split, and N_k devices,

    min T    Σ_k y[k, g] = batch for every g,   Σ_g r[k, g]·y[k, g] ≤ N_k·T

and no step is shorter than one sample alone on the best device for each group (→ `longest`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foretell.search.placement.problem import MICROS, Problem
from foretell.search.placement.shares import linear_solver

Array = npt.NDArray[np.float64]


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
    """One sample through all groups, each where it is quickest."""
    t = problem.tables
    each = np.diff(t.forward[:, :, 1], axis=1) + np.diff(t.backward[:, :, 1], axis=1)
    split = (t.split_forward + t.split_backward).min(axis=(0, 1))
    return float(np.minimum(each.min(axis=0), split).sum())
