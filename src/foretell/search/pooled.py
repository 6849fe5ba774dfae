"""A search by many workers: the same planner from several seeds, the best of what they find.

A planner that draws nothing (the oracle) shares its sweep out instead. Either way the answer is the
one that a single process would give, as long as no limit of time ends a search.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from foretell.cluster import Cluster
from foretell.errors import InputError
from foretell.graph import Graph
from foretell.pool import Alone, Pool
from foretell.search.ordering import in_order, renamed
from foretell.search.planner import Planned, Planner, Progress, silent
from foretell.workload import Workload

Model = Workload | Graph


def best_plan(
    planner: Planner, model: Model, cluster: Cluster, progress: Progress = silent,
    *, pool: Pool | None = None, seeds: int = 1,
) -> Planned:  # fmt: skip
    """The best plan that a planner finds, from so many seeds."""
    ranks = in_order(cluster)
    if ranks != tuple(range(cluster.size)):
        one = best_plan(planner, model, cluster.subset(ranks), progress, pool=pool, seeds=seeds)
        return replace(one, plan=renamed(one.plan, ranks, cluster))
    pool = pool or Alone()
    if not hasattr(planner, "seed"):
        if seeds > 1:
            raise InputError(f"`{planner.name}` draws nothing: {seeds} seeds find the same")
        more = {"pool": pool} if pool.size > 1 else {}
        return _searcher(planner, model)(model, cluster, progress, **more)
    if seeds == 1 and pool.size == 1:
        return _searcher(planner, model)(model, cluster, progress)
    asked = [_seeded(planner, k) for k in range(seeds)]
    work = partial(_searched, model=model, cluster=cluster)
    found = pool.map(work, asked, _telling(progress))
    return _best(found)


def _searcher(planner: Planner, model: Model) -> Callable[..., Planned]:
    """How the planner takes this model: a captured step itself, or what a workload says of one."""
    return planner.plan_graph if isinstance(model, Graph) else planner.plan  # type: ignore[attr-defined]


def _seeded(planner: Any, more: int) -> Any:
    return replace(planner, seed=planner.seed + more)


def _searched(planner: Planner, model: Model, cluster: Cluster) -> Planned:
    return _searcher(planner, model)(model, cluster, silent)


def _telling(progress: Progress) -> Callable[[int, int], None]:
    return lambda done, all_: progress(f"{done} of {all_} searches", float("nan"))


def _best(found: list[Planned]) -> Planned:
    """The shortest step, of the first seed that has it; what all of them cost."""
    at = min(range(len(found)), key=lambda k: found[k].predicted)
    steps = [one.predicted for one in found]
    told = f"best of {len(found)} seeds, {min(steps):.6g} to {max(steps):.6g} s"
    return replace(
        found[at],
        evaluations=sum(one.evaluations for one in found),
        cpu=sum(one.cpu for one in found),
        notes=(*found[at].notes, *([told] if len(found) > 1 else [])),
    )
