"""Seconds of a step in each collective on the busiest kind of rank, overlapped or exposed."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from foretell.cluster import Cluster
from foretell.plan.check import check, micro_batches, placed
from foretell.plan.costs import Costs, costs, shard_talk, stage
from foretell.plan.framework import running
from foretell.plan.layer_cost import exchange_seconds
from foretell.plan.layouts import layouts
from foretell.plan.plan import Plan
from foretell.plan.reduction_and_update import reducing, regathering, sends
from foretell.plan.stages import FIRST, shares
from foretell.workload import Exchange, Workload


def by_collective(plan: Plan, workload: Workload, cluster: Cluster) -> dict[str, float]:
    """Seconds by name of the collective: layers' exchanges, gradients, shards and hand-overs."""
    plan, cluster = placed(plan, cluster)
    plan = check(plan, workload, cluster)
    c = costs([plan], workload, cluster)
    dealt = shares(workload, c.plans).times[FIRST][:, 0]
    found: dict[str, float] = defaultdict(float)
    for layer, many in zip(workload.layers, dealt.tolist(), strict=True):
        for exchange in layer.ops:
            if isinstance(exchange, Exchange) and many:
                _add_layer(found, exchange, plan, (workload, cluster), layer.is_block, many)
    _add_gradients(found, c, dealt, workload, cluster)
    if plan.pp > 1:
        found["send"] += 2 * micro_batches(plan) * float(sends(c, workload, cluster)[0])
    return {op: seconds for op, seconds in found.items() if seconds}


def _add_layer(
    found: dict[str, float],
    exchange: Exchange,
    plan: Plan,
    where: tuple[Workload, Cluster],
    is_block: bool,
    many: float,
) -> None:
    """What one exchange of a layer costs a step; forwards that run again exchange again."""
    workload, cluster = where
    turns = many * micro_batches(plan)
    again = 2.0 if is_block and plan.recompute == "full" else 1.0
    kept = plan.dtype or workload.dtype
    for is_back, op, seconds in exchange_seconds(exchange, kept, cluster, layouts([plan])):
        found[op] += turns * (1.0 if is_back else again) * float(seconds[0])


def _add_gradients(
    found: dict[str, float], c: Costs, dealt: np.ndarray[tuple[int], np.dtype[np.float64]],
    workload: Workload, cluster: Cluster,
) -> None:  # fmt: skip
    """Reduction, parameters passed back, and those that are gathered for use."""
    plan = c.plans.plans[0]
    held = stage(c, dealt[:, None], workload, cluster)
    op = "reduce_scatter" if plan.zero in (1, 2) else "all_reduce"
    found[op] += float(reducing(c, held, cluster)[0])
    found["all_gather"] += float(regathering(c, held, cluster)[0])
    if plan.zero == 3 and plan.dp * plan.cp > 1:
        for at, many in enumerate(dealt.tolist()):
            gather, scatter = shard_talk(c, at, workload, cluster)
            turns = many * micro_batches(plan)
            found["all_gather"] += turns * running(plan).profile.gathers * float(gather[0])
            found["reduce_scatter"] += turns * float(scatter[0])
