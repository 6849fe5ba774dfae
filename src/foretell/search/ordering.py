"""The same machines in an order that their own numbers give: a plan must not depend on a file's.

Planners look at the nodes of a mixed cluster in this order; what they find is then said of the
ranks as the file has them.
"""

from __future__ import annotations

from typing import Any

from foretell.cluster import Cluster
from foretell.graph.groups import group_text, ranks_of
from foretell.plan import Plan


def in_order(cluster: Cluster) -> tuple[int, ...]:
    """Ranks of a cluster, node by node: the fastest devices first, larger nodes before smaller."""
    if len(cluster.devices_by_kind()) == 1:
        return tuple(range(cluster.size))
    nodes: dict[int, list[int]] = {}
    for rank, node in enumerate(cluster.nodes.tolist()):
        nodes.setdefault(node, []).append(rank)
    order = sorted(nodes, key=lambda node: _key(cluster, nodes[node]))
    return tuple(rank for node in order for rank in nodes[node])


def _key(cluster: Cluster, ranks: list[int]) -> tuple[Any, ...]:
    """What sorts a node: its devices and its network, never its place."""
    devices = [cluster.devices[rank] for rank in ranks]
    peaks = tuple(sorted((-d.peak("bf16"), -d.memory, d.name) for d in devices))
    nics = tuple(sorted(-nic.bandwidth for nic in cluster.node(ranks[0]).nics))
    return peaks, -len(ranks), nics


def renamed(plan: Plan, ranks: tuple[int, ...], cluster: Cluster) -> Plan:
    """A plan for `cluster.subset(ranks)` as one for the cluster itself: rank i becomes ranks[i]."""
    if ranks == tuple(range(cluster.size)):
        return plan
    made = plan.cluster and cluster.fingerprint()
    if plan.segments:
        rows = tuple((row[0], _moved(row[1], ranks), *row[2:]) for row in plan.segments)
        return plan.but(segments=rows, cluster=made)
    if plan.groups:
        rows = tuple((*row[:3], *(_share(item, ranks) for item in row[3:])) for row in plan.groups)
        return plan.but(groups=rows, cluster=made)
    inner = plan.placement or tuple(range(plan.ranks))
    placement = tuple(ranks[rank] for rank in inner)
    return plan.but(placement=placement, cluster=made)


def _moved(text: str, ranks: tuple[int, ...]) -> str:
    return group_text(ranks[rank] for rank in ranks_of(text))


def _share(item: str, ranks: tuple[int, ...]) -> str:
    rank, _, samples = item.partition(":")
    return f"{ranks[int(rank)]}:{samples}"
