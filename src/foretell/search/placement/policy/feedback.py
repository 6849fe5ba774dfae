"""What the simulation of a placement says about each op group and each cell. Compiled.

Shares of the step: when a group's forward begins, when its backward and its gradients are done,
how long they were waited for; how long the devices of a cell compute, communicate and hold.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foretell.compiled import F2, I1, I2, compiled
from foretell.search.placement import loops
from foretell.search.placement.deal import peaks
from foretell.search.placement.evaluate import settled
from foretell.search.placement.problem import Problem, Tables
from foretell.search.placement.servers import standing
from foretell.search.placement.space import Placement
from foretell.search.placement.tasks import (
    BACKWARD,
    FORWARD,
    PRODUCT,
    SEND,
    SYNC,
    TASKS,
    UPDATE,
    page,
    play,
)
from foretell.search.placement.write import written

GROUP_FEEDBACK = 5  # forward begins, backward ends, gradients agree, waited for them, sends before
CELL_FEEDBACK = 5  # computes, communicates, its messages, first begins, memory


def feedback(problem: Problem, placement: Placement) -> tuple[Any, Any, Any, float]:
    """[g, ·] and [c, ·] shares of the step, samples [s, c] and seconds; zeros if it has none."""
    t, (sets, ways, served) = problem.tables, settled(problem, placement)
    share = np.zeros((len(t.size), len(t.kind)), np.int64)
    group = np.zeros((len(problem.groups), GROUP_FEEDBACK))
    cell = np.zeros((len(t.kind), CELL_FEEDBACK))
    row = (sets, ways, served, placement.micros)
    if loops.prepared(t, *row, placement.mode, share) < 0:
        hold = standing(t, sets, ways, served)
        cell[:, 4] = np.minimum(peaks(t, sets, ways, hold, share) / t.room, 4.0)
        return group, cell, share, np.inf
    seconds = told(t, *row, float(placement.fuse), share, group, cell)
    return group, cell, share, float(seconds)


@compiled
def told(
    t: Tables,
    sets: I1,
    ways: I1,
    served: I1,
    micros: int,
    fuse: float,
    share: I2,
    group: F2,
    cell: F2,
) -> float:
    """Simulate a placement and fill in what its groups and cells did."""
    cells = len(t.kind)
    p = page(len(sets), cells, micros)
    written(t, sets, ways, served, micros, fuse, share, p)
    start, end = play(p, cells, 3 * (t.box.max() + 1))
    total = end.max()
    first = np.full(cells, total)
    begins, done = np.full(len(sets), np.inf), np.zeros(len(sets))
    for i in range(p.count[TASKS]):
        g, c, took = p.group[i], p.cell[i], (end[i] - start[i]) / total
        if p.what[i] == FORWARD:
            begins[g] = min(begins[g], start[i] / total)
            first[c] = min(first[c], start[i])
        elif p.what[i] == BACKWARD:
            group[g, 1] = max(group[g, 1], end[i] / total)
        elif p.what[i] == SYNC:
            done[g] = max(done[g], end[i] / total)
        elif p.what[i] == SEND:
            group[g, 4] += took
            cell[c, 2] += took
        if p.what[i] in (FORWARD, BACKWARD, PRODUCT, UPDATE):
            cell[c, 0] += took
        for k in range(p.lane_start[i], p.lane_start[i + 1]):
            if p.lane[k] >= cells:
                cell[p.lane[k] - cells, 1] += took
    spread(begins, done, group)
    cell[:, 3] = first / total
    cell[:, 4] = peaks(t, sets, ways, standing(t, sets, ways, served), share) / t.room
    return total


@compiled
def spread(begins: Any, done: Any, group: Any) -> None:
    """Tasks stand for runs of groups under the name of the first: the others get its figures."""
    for g in range(len(begins)):
        seen = begins[g] < np.inf
        group[g, 0] = begins[g] if seen or g == 0 else group[g - 1, 0]
        if group[g, 1] == 0.0 and g > 0:
            group[g, 1], done[g] = group[g - 1, 1], done[g - 1]
        group[g, 2] = max(done[g], group[g, 1])
        group[g, 3] = group[g, 2] - group[g, 1]
