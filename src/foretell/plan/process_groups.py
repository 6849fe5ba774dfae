"""Which ranks communicate with each other along an axis, and what they see of the cluster.

Ranks are numbered with `tp` innermost, then `cp`, the splits of images and channels, `dp`, and `pp`
outermost, as Megatron does: the axis with most communication stays in a node. All groups of an axis
look alike on a regular cluster, so one stands for all; its neighbours communicate at the same time.
"""

from __future__ import annotations

from functools import lru_cache

from foretell.cluster import Cluster, Level
from foretell.plan.plan import Plan

# Axes that run over the ranks of another: sequence over tensor, experts over data parallel.
_INSIDE = {"sp": "tp", "etp": "tp", "esp": "tp", "ep": "dp"}
ORDER = ("tp", "cp", "height", "width", "depth", "filter", "channel", "dp", "pp")


def stride(plan: Plan, axis: str) -> int:
    """How far apart in rank two neighbours of an axis are."""
    if axis == "ep" and expert_ranks(plan) > 1:
        return plan.etp
    degrees, out = plan.degrees(), 1
    axis = _INSIDE.get(axis, axis)
    for inner in ORDER:
        if inner == axis:
            return out
        out *= degrees.get(inner, 1)
    return out


def expert_ranks(plan: Plan) -> int:
    """Tensor-parallel ranks that have experts of their own."""
    return plan.tp // (plan.etp or plan.tp)


@lru_cache(maxsize=4096)
def levels(cluster: Cluster, size: int, stride: int) -> tuple[Level, ...]:
    """What a group of `size` ranks, `stride` apart, sees while its neighbours communicate too."""
    group = [i * stride for i in range(size)]
    node = int((cluster.nodes == cluster.nodes[0]).sum())
    beside = range(1, min(stride, node, cluster.size - group[-1]))
    return cluster.levels(group, [[r + k for r in group] for k in beside])
