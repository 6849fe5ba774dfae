"""Plans whose ranks are priced one by one: layers apart, uneven shares, ways of agreeing."""

from __future__ import annotations

import numpy as np

from foretell.cluster import Cluster
from foretell.plan import Plan
from foretell.plan.group_costs import GroupCosts
from foretell.plan.group_graph import holding, in_flight, lower_groups
from foretell.plan.layer_ranges import layer_ranges
from foretell.plan.memory import ROUNDING, USABLE
from foretell.simulate import Timeline, simulate
from foretell.workload import Workload


def played(plan: Plan, workload: Workload, cluster: Cluster) -> tuple[Timeline, GroupCosts]:
    """The step of a checked plan as it runs, and what it was priced by."""
    costs = GroupCosts.of(plan, workload, cluster)
    return simulate(lower_groups(plan, workload, cluster, costs)), costs


def samples(plan: Plan, costs: GroupCosts) -> int:
    """The most samples that a rank has in one micro-batch."""
    found, batches = layer_ranges(plan, costs)
    return -(-max(max(one.samples.values()) for one in found) // batches)


def held(plan: Plan, costs: GroupCosts) -> tuple[float, float, dict[str, float]]:
    """Bytes of the rank with the least room left, how many are missing there, and what they are."""
    found, _ = layer_ranges(plan, costs)
    ranks = sorted({rank for stretch in found for rank in stretch.ranks})
    flying, program = in_flight(found), {"program": costs.run.profile.runtime}
    each = [holding(found, costs, rank, flying) | program for rank in ranks]
    most = [ROUNDING * sum(parts.values()) for parts in each]
    devices = [costs.cluster.devices[rank] for rank in ranks]
    over = [m - d.memory * USABLE for m, d in zip(most, devices, strict=True)]
    worst = int(np.argmax(over))
    return most[worst], max(over[worst], 0.0), each[worst]
