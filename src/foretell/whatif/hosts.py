"""What a call costs on the host of a step, and where it is issued."""

from __future__ import annotations

import numpy as np

from foretell.graph.columns import Array, Kind, Phase
from foretell.graph.graph import Graph
from foretell.whatif.calls import operators

PASSES = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD)
USUAL = (
    26e-6  # seconds: host time a kernel of eager steps, seven models without profiler, H200 host
)


def call_seconds(graph: Graph) -> float:
    """Host time a kernel of the forward and backward pass; an optimizer's calls are others."""
    mine = np.isin(graph.phase, PASSES)
    host = mine & (graph.kind == Kind.HOST)
    kernels = int((mine & (graph.kind == Kind.KERNEL)).sum())
    if not kernels or not host.any():
        return USUAL
    return float(graph.seconds[host].sum() + graph.gap[host].sum()) / kernels


def issued_by(graph: Graph, launches: Array) -> Array:
    """The first host task of the operator that each launch belongs to."""
    number = operators(graph)
    mine = np.flatnonzero(number >= 0)
    order = mine[np.argsort(graph.order[mine], kind="stable")][::-1]
    first = np.zeros(int(number.max(initial=0)) + 1, np.int64)
    first[number[order]] = order  # the last written is the earliest
    found: Array = np.where(number[launches] >= 0, first[number[launches]], launches)
    return found
