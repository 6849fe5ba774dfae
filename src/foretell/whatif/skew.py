"""Ranks are never equally fast: who exchanges with n ranks waits for the slowest of n.

With steps that spread by `skew` around their mean, independently and normally, the slowest of n is
late by skew·eₙ of a step, eₙ the expected largest of n standard normal numbers (Blom 1958:
Φ⁻¹((n − 0.375)/(n + 0.25))). Lateness grows from the last message of one step to that of the next:
at the last it is whole, at earlier ones the share of the step that has passed by then.
Ranks that are in the graph already show their own skew, and only what is beyond them is added.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from foretell.graph.graph import NONE, Array, Graph
from foretell.whatif.gradients import Gradients, compute_lane

# The relative spread that makes the median of 11 published scaling rows right, ResNet-50 on 2 to 16
# V100 of a DGX-1 or DGX-2 (`foretell validate --scaling`); their middle half lies at 1.3 to 2.4 %.
SKEW = 0.02


def straggler_delay(graph: Graph, ranks: int, skew: float) -> float:
    """Seconds that the slowest of so many ranks is expected behind those of the graph."""
    here = len(np.unique(graph.rank[np.flatnonzero(graph.lane != NONE)]))
    return skew * max(0.0, slowest(ranks) - slowest(here)) * _busiest(graph)


def slowest(ranks: int) -> float:
    """The expected largest of so many standard normal numbers."""
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0


def share_since_last_message(graph: Graph, found: Gradients) -> Array:
    """The share of a step that passes from one exchange until each gradient is ready."""
    mine = np.flatnonzero(graph.lane == compute_lane(graph, found.rank))
    mine = mine[np.argsort(graph.order[mine], kind="stable")]
    taken = np.append(0.0, np.cumsum(graph.seconds[mine] + graph.gap[mine]))
    at = taken[np.searchsorted(graph.order[mine], graph.order[found.ready], side="right")]
    share: Array = 1 - (at[-1] - at) / taken[-1] if taken[-1] else np.ones(len(found))
    return share


def _busiest(graph: Graph) -> float:
    """Seconds that the busiest lane is taken: the least a step can take."""
    mine = np.flatnonzero(graph.lane != NONE)
    if not len(mine):
        return 0.0
    taken = np.bincount(graph.lane[mine], graph.seconds[mine] + graph.gap[mine])
    return float(taken.max())
