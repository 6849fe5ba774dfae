"""What the parts of a lowering share: the draft they write on, prices, and lanes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from foretell.cluster import Cluster
from foretell.graph.groups import group_text
from foretell.plan.costs import Costs, Stage, stage
from foretell.plan.costs import costs as price_all
from foretell.plan.draft import Draft
from foretell.plan.groups import stride
from foretell.plan.parts import slower
from foretell.plan.plan import Plan
from foretell.plan.stages import layers_of
from foretell.workload import Workload


class Lanes(NamedTuple):
    """The lanes of one rank."""

    compute: int
    collective: int
    down: int  # to the stage behind
    up: int  # to the stage before
    between: int  # to other copies of what is sharded; the collectives' own where there are none


@dataclass(frozen=True)
class Sheet:
    """One plan on its way to a graph."""

    draft: Draft
    costs: Costs
    workload: Workload
    cluster: Cluster
    lanes: tuple[Lanes, ...]  # of the rank that stands for each stage
    own: tuple[Costs, ...]  # prices on each stage's own devices

    @property
    def plan(self) -> Plan:
        """The plan, checked."""
        return self.costs.plans.plans[0]

    def rank(self, stage: int) -> int:
        """The cluster's rank that stands for a stage."""
        return rank_of(self.plan, stage)

    def stage(self, s: int) -> Stage:
        """What a stage costs and holds."""
        times = np.array(layers_of(self.plan, self.workload, s))[:, None]
        return stage(self.own[s], times, self.workload, self.cluster)

    def group(self, stage: int) -> str:
        """The data-parallel ranks of a stage."""
        first, step = stage * stride(self.plan, "pp"), stride(self.plan, "dp")
        return group_text(first + step * i for i in range(self.plan.dp))


def sheet(costs: Costs, workload: Workload, cluster: Cluster) -> Sheet:
    """An empty sheet for the first plan of some costs."""
    draft, plan = Draft(), costs.plans.plans[0]
    lanes = tuple(_lanes(draft, rank_of(plan, s), plan) for s in range(plan.pp))
    return Sheet(draft, costs, workload, cluster, lanes, _own(costs, workload, cluster))


def _own(priced: Costs, workload: Workload, cluster: Cluster) -> tuple[Costs, ...]:
    """Prices of each stage on the slowest of its ranks, where a cluster mixes devices."""
    plan = priced.plans.plans[0]
    if len(cluster.devices_by_kind()) == 1:
        return (priced,) * plan.pp
    each = plan.ranks // plan.pp
    found: dict[str, Costs] = {}
    out = []
    for s in range(plan.pp):
        device = slower(cluster.devices[s * each : (s + 1) * each])
        if device.name not in found:
            found[device.name] = price_all([plan], workload, cluster, device)
        out.append(found[device.name])
    return tuple(out)


def rank_of(plan: Plan, stage: int) -> int:
    """The first rank of a stage."""
    return stage * stride(plan, "pp")


def _lanes(draft: Draft, rank: int, plan: Plan) -> Lanes:
    """Copies of sharded parameters are reduced beside the gathers, over links of their own."""
    compute, collective = (
        draft.lane("compute", rank, "compute"),
        draft.lane("collectives", rank, "comm"),
    )
    down, up = draft.lane("send on", rank, "comm"), draft.lane("send back", rank, "comm")
    apart = plan.zero == 3 and plan.dp > plan.sharing
    between = draft.lane("between copies", rank, "comm") if apart else collective
    return Lanes(compute, collective, down, up, between)
