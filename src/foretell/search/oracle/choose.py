"""The best layout of a space, simulated, with a bound on how much better any other could be.

Layouts are taken in the order of the closed form and simulated. A layout cannot take less than the
busiest stage works (kernels, host, exchanges inside layers) plus its update; once the best step
simulated is below that bound of every layout not yet simulated, nothing in the space can beat it.
Otherwise the remaining gap is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from foretell.cluster import Cluster
from foretell.graph.columns import Array
from foretell.plan import Plan
from foretell.pool import Pool
from foretell.predict import Prediction, predict, predict_many
from foretell.search.oracle.sweep import Swept, sweep
from foretell.workload import Workload

SLACK = 0.97  # of the closed form's parts: they and the simulation round differently
GROUP = 8  # layouts simulated before the bound is looked at again


@dataclass(frozen=True)
class Choice:
    """The layout chosen, how it does, and what is known of all the others."""

    best: Prediction
    others: tuple[Prediction, ...]  # simulated too, fastest first
    layouts: int
    fitting: int
    bound: float  # seconds below which no layout of the space can be

    @property
    def gap(self) -> float:
        """By how much of its time the best might be beaten inside the space; 0 where it cannot."""
        return max(0.0, 1 - self.bound / self.best.step)


def choose(
    plans: Sequence[Plan],
    workload: Workload,
    cluster: Cluster,
    *,
    most: int = 48,
    progress: Callable[[int, int], None] = lambda done, all_: None,
    pool: Pool | None = None,
) -> Choice:
    """The layout with the shortest step of those that fit; at most so many are simulated."""
    swept = sweep(plans, workload, cluster, progress, pool)
    swept.best()  # raises where nothing fits
    order = _order(swept)
    bounds = _bounds(swept)[order]
    found: list[Prediction] = []
    at = 0
    while at < min(most, len(order)):
        group = [swept.plans[i] for i in order[at : at + GROUP].tolist()]
        found += [p for p in _played(group, workload, cluster, pool) if p.fits]
        at += len(group)
        if found and at < len(order) and min(p.step for p in found) <= bounds[at:].min():
            break
    found.sort(key=lambda p: (p.step, str(p.plan)))
    rest = float(bounds[at:].min()) if at < len(order) else np.inf
    return Choice(
        found[0], tuple(found[1:]), len(plans), int(swept.fits.sum()), min(found[0].step, rest)
    )


def _played(
    plans: list[Plan], workload: Workload, cluster: Cluster, pool: Pool | None
) -> list[Prediction]:
    """Layouts simulated: together here, one by one where there are workers."""
    if pool is None or pool.size == 1:
        return predict_many(plans, workload, cluster)
    return pool.map(partial(predict, workload=workload, cluster=cluster), plans)


def _order(swept: Swept) -> Array:
    """Layouts that fit, fastest first by the closed form; ties by their text."""
    mine = np.flatnonzero(swept.fits)
    texts = np.array([str(swept.plans[i]) for i in mine.tolist()])
    found: Array = mine[np.lexsort((texts, swept.found.step[mine]))]
    return found


def _bounds(swept: Swept) -> Array:
    """Seconds that a layout takes at least: its busiest stage and its update."""
    f = swept.found
    found: Array = SLACK * (f.compute + f.host + f.talk + f.update)
    return found
