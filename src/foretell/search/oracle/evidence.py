"""Evidence that one layout of an estimate does not show: priced again with one thing changed.

congestion   the same messages with nothing beside them on the links
imbalance    stages that take longer than the mean of all
redundancy   kernels that splitting does not shorten: 1/n of the time on one rank is not reached
input        samples that have to come in, against what the network of a node brings
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from foretell.cluster import Cluster, Tier
from foretell.cost import collective
from foretell.plan import Plan, check
from foretell.plan.costs import alike, costs, stage
from foretell.plan.estimate import Estimate, estimate
from foretell.plan.process_groups import levels
from foretell.plan.stages import FIRST, LAST, MIDDLE, shares
from foretell.workload import Workload

CROWDED = 1.4  # times as long as alone: from there on links are crowded
LARGE = 1e9  # bytes: a message that bandwidth decides
SPLITS = ("filter", "channel", "height", "width", "depth")


def crowding(plan: Plan, cluster: Cluster) -> float:
    """How many times as long as with all links to themselves gradients take to be reduced."""
    size, apart = alike(plan)
    if size < 2:
        return 1.0
    wide = replace(cluster, tiers=_unthinned(cluster.tiers), _ways={}, _levels={})
    alone = wide.levels([i * apart for i in range(size)])
    beside = levels(cluster, size, apart)
    took, ideal = (collective.price("all_reduce", LARGE, x).seconds for x in (beside, alone))
    return took / ideal


def _unthinned(tiers: tuple[Tier, ...]) -> tuple[Tier, ...]:
    return tuple(replace(tier, oversubscription=1.0, uplink=0.0) for tier in tiers)


def imbalance(plan: Plan, workload: Workload, cluster: Cluster) -> float:
    """The share of the slowest stage that others wait, on average."""
    if plan.pp == 1:
        return 0.0
    c = costs([check(plan, workload, cluster)], workload, cluster)
    dealt = shares(workload, c.plans)
    took = {
        kind: float(stage(c, dealt.times[kind], workload, cluster).both[0])
        for kind in (FIRST, MIDDLE, LAST)
    }
    middles = float(dealt.middles[0])
    mean = (took[FIRST] + middles * took[MIDDLE] + took[LAST]) / (2 + middles)
    return 1 - mean / max(took.values())


def redundancy(
    plan: Plan, found: Estimate, row: int, workload: Workload, cluster: Cluster
) -> tuple[float, int]:
    """Seconds that split kernels take beyond their share of one rank's, and the ways they split."""
    degrees = plan.degrees()
    ways = math.prod(degrees.get(axis, 1) for axis in SPLITS)
    if ways == 1:
        return 0.0, 1
    whole = plan.but(filter=1, channel=1, spatial=())
    few = cluster.subset(range(whole.ranks))
    alone = float(estimate([whole], workload, few).compute[0])
    return max(float(found.compute[row]) - alone / ways, 0.0), ways


def input_bytes(workload: Workload) -> float:
    """Bytes of one sample as it is stored: 8 bits a pixel and channel, 16 a voxel; 0 for words."""
    first = next((op for layer in workload.layers for op in layer.works()), None)
    if first is None or first.kind != "conv":
        return 0.0
    sides = [float(np.asarray(first.dims[d])) for d in ("c", "h", "w", "d") if d in first.dims]
    return (2.0 if "d" in first.dims else 1.0) * math.prod(sides)


def intake(cluster: Cluster) -> float:
    """Bytes/s that reach one node: over its NICs, or its host's bus where it has none."""
    node = cluster.node(0)
    if node.nics:
        return sum(nic.bandwidth for nic in node.nics)
    return cluster.host_bandwidth(0)
