"""Uneven shares of a batch by a linear program, as HAP deals them out.

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

from foretell.errors import InfeasibleError, UnmodelledError
from foretell.search.placement.problem import Problem

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


def dealt(problem: Problem, chosen: int) -> npt.NDArray[np.int64]:
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
