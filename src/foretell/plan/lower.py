"""From a plan in any syntax to the task graph of its step, priced, ready to be simulated."""

from __future__ import annotations

from foretell.cluster import Cluster
from foretell.errors import unknown
from foretell.graph import Graph
from foretell.plan.check import check, settled
from foretell.plan.costs import Costs
from foretell.plan.layer_ranges import GroupStep, has_per_rank_costs
from foretell.plan.plan import Plan
from foretell.plan.program import ResolvedStep, lowered
from foretell.plan.stage_ops import priced
from foretell.plan.stage_placement import PlacedStep, Prices, as_degrees
from foretell.workload import Workload

DETAILS = ("stage", "layer")


def lower(plan: Plan, workload: Workload, cluster: Cluster, *, detail: str = "stage") -> Graph:
    """The graph of one step; `detail` says how much of a stage one task is: `stage` or `layer`."""
    if detail not in DETAILS:
        raise unknown("detail", detail, DETAILS)
    plan, cluster = settled(plan, workload, cluster)
    return lowered(resolved(plan, workload, cluster), detail)


def resolved(
    plan: Plan, workload: Workload, cluster: Cluster, costs: Costs | None = None
) -> ResolvedStep:
    """A settled plan with all its prices; `costs` are those of its degrees where known."""
    if plan.stages:
        step = PlacedStep.of(plan, Prices(plan, workload, cluster))
        same = as_degrees(plan, workload) if step.in_order() else None
        if same is None:
            return step
        cluster = cluster if same.ranks == cluster.size else cluster.part(range(same.ranks))
        plan = check(same, workload, cluster)
    if has_per_rank_costs(plan):
        return GroupStep.of(plan, workload, cluster)
    return priced(plan, workload, cluster, costs)


def is_even(plan: Plan) -> bool:
    """Whether all ranks of a plan are split alike, so that its prices are one column of many."""
    return not (plan.stages or plan.segments or has_per_rank_costs(plan))
