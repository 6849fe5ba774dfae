"""The machines a plan stands on, made ready to be drawn: nodes, what joins devices, switches.

Ranks are numbered as `foretell.plan` lays them out: tensor slices next to each other, then context,
data-parallel copies, and stages outermost.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foretell.cluster import Cluster
from foretell.plan import Plan
from foretell.report import words

MOST = 2048  # ranks drawn: more are no picture
NODE = 8  # devices a node has where no cluster is named


def machines(plan: Plan, cluster: Cluster | None = None) -> dict[str, Any]:
    """Nodes with the ranks of a plan on them, and the tiers of switches between those nodes."""
    ranks = _ranks(plan, cluster)
    places = np.array([r["place"] for r in ranks], np.int64)
    at = places // NODE if cluster is None else cluster.nodes[places]
    used = np.unique(at).tolist()
    nodes = [
        {**_node(node, cluster), "ranks": [r for r, n in zip(ranks, at, strict=True) if n == node]}
        for node in used
    ]
    return {"nodes": nodes, "tiers": _tiers(used, cluster)}


def _ranks(plan: Plan, cluster: Cluster | None) -> list[dict[str, Any]]:
    """One entry a device that is used, in the order of the machines."""
    shown = plan.placement or range(min(plan.ranks, MOST))
    logical = {place: k for k, place in enumerate(shown)}
    is_free = bool(plan.groups or plan.stages)
    return [
        {
            "rank": logical[place],
            "place": place,
            "device": cluster.devices[place].name if cluster else "",
            **(_free(place, cluster) if is_free else _part(plan, logical[place])),
        }
        for place in sorted(logical)[:MOST]
    ]


def _free(place: int, cluster: Cluster | None) -> dict[str, Any]:
    """A rank whose layers a grid names; devices of one kind have one hue."""
    kinds = list(cluster.devices_by_kind()) if cluster else []
    hue = kinds.index(cluster.devices[place].name) if cluster else 0
    return {"stage": hue, "copy": 0, "short": "", "where": "what it runs is given below"}


def _part(plan: Plan, rank: int) -> dict[str, Any]:
    """Which stage, copy and slice of a regular layout a rank is."""
    inner = plan.ranks // (plan.dp * plan.pp)  # ranks that share one sample
    stage, copy, slice_ = rank // (plan.dp * inner), rank // inner % plan.dp, rank % inner
    parts = [("stage", stage, plan.pp), ("copy", copy, plan.dp), ("slice", slice_, inner)]
    where = [f"{word} {k} of {n}" for word, k, n in parts if n > 1]
    brief = [f"{word[0]}{k}" for word, k, n in parts if n > 1]
    if copy < len(plan.shares):
        where.append(f"{plan.shares[copy]} samples")
        brief.append(f"×{plan.shares[copy]}")
    said = {"where": ", ".join(where) or "the whole model", "short": " ".join(brief)}
    return {"stage": stage, "copy": copy, **said}


def _node(node: int, cluster: Cluster | None) -> dict[str, str]:
    """A node's name, what joins the devices inside it, and its way out."""
    if cluster is None:
        return {"name": f"node {node}", "inside": "", "out": ""}
    kind, _ = cluster.groups[int(cluster.kinds[node])]
    slots = tuple(cluster.slots[cluster.nodes == node].tolist())
    inside = kind.spread(slots) if len(slots) > 1 else None
    found = {"name": f"node {node}: {kind.name}", "inside": "", "out": ""}
    if inside is not None:
        found["inside"] = f"{inside.kind} {words.rate(inside.bandwidth)}"
    if kind.nics and cluster.num_nodes > 1:
        found["out"] = f"{kind.nics[0].kind} {words.rate(kind.exit(slots).bandwidth)}"
    return found


def _tiers(used: list[int], cluster: Cluster | None) -> list[dict[str, Any]]:
    """Switches between nodes, innermost first: which of the nodes shown each of them joins."""
    if cluster is None or len(used) < 2:
        return []
    tiers = []
    for tier in cluster.fabric.groupings:
        of = tier.group[used]
        groups = [np.flatnonzero(of == g).tolist() for g in np.unique(of)]
        up = [words.rate(float(tier.out[g])) for g in np.unique(of)]
        tiers.append({"name": tier.name, "groups": groups, "up": up})
    return tiers
