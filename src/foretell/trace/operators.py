"""Which host tasks of a step belong to one call of an operator.

A trace cuts an operator's time on its thread at every call into the driver. The pieces and calls of
one operator stand together; behind its last piece comes the gap of untraced time.
"""

from __future__ import annotations

import numpy as np

from foretell.graph.columns import NONE, Array, Kind, WaitKind
from foretell.graph.graph import Graph

CALLS = ("cuda", "cu", "hip")  # how calls into a driver begin


def operators(graph: Graph) -> Array:
    """For every task the number of the operator it is the host's part of; NONE for all others."""
    found = np.full(graph.size, NONE, np.int64)
    host = np.flatnonzero(graph.kind == Kind.HOST)
    if not len(host):
        return found
    host = host[np.lexsort((graph.order[host], graph.lane[host]))]
    call = is_call(graph)[host]
    whose = _names(graph, host, call)
    same = np.ones(len(host), bool)
    for column in (graph.lane[host], graph.layer[host], graph.phase[host], whose):
        same[1:] &= column[1:] == column[:-1]
    over = ~call & (graph.gap[host] > 0)  # untraced time lies between operators
    alone = ~call & _launches(graph)[host]  # a piece that launches itself is the whole operator
    same[1:] &= ~over[:-1] & ~alone[1:] & ~alone[:-1]
    same[0] = False
    found[host] = np.cumsum(~same)
    return found


def is_call(graph: Graph) -> Array:
    """Which tasks are calls into the driver."""
    known = {int(k) for k in np.unique(graph.op) if graph.names[int(k)].startswith(CALLS)}
    found: Array = np.isin(graph.op, sorted(known))
    return found


def _names(graph: Graph, host: Array, call: Array) -> Array:
    """The operator each host task works for: a call works for that of the piece before it."""
    at = np.maximum.accumulate(np.where(call, 0, np.arange(len(host))))
    found: Array = graph.name[host][at]
    return found


def _launches(graph: Graph) -> Array:
    found = np.zeros(graph.size, bool)
    found[graph.edges.after[graph.edges.kinds == WaitKind.LAUNCH]] = True
    return found
