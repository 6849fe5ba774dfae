"""The host's part of device work: which calls and pieces of which operator launched it.

A trace cuts an operator's time on its thread at every call into the driver. The pieces and calls of
one operator stand together; behind its last piece comes the gap of untraced time.
"""

from __future__ import annotations

import numpy as np

from foretell.graph.columns import NONE, Array, Kind, LaneKind, WaitKind
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


def host_of(graph: Graph, device: Array) -> Array:
    """Host tasks of the operators that launched some of this device work and nothing else."""
    number = operators(graph)
    e = graph.edges
    launch = (e.kinds == WaitKind.LAUNCH) & (number[e.after] != NONE)
    gone = np.zeros(graph.size, bool)
    gone[device] = True
    hit = np.unique(number[e.after[launch & gone[e.waiting]]])
    keeps = np.unique(number[e.after[launch & ~gone[e.waiting]]])
    return np.flatnonzero(np.isin(number, np.setdiff1d(hit, keeps)))


def launch_of(graph: Graph, device: Array) -> Array:
    """The host task that launched each piece of device work, NONE where there is none."""
    e = graph.edges
    launch = (e.kinds == WaitKind.LAUNCH) & (graph.kind[e.after] == Kind.HOST)
    found = np.full(graph.size, NONE, np.int64)
    found[e.waiting[launch]] = e.after[launch]
    return found[device]


def issued(graph: Graph, tasks: Array) -> Array:
    """Tasks in the order they are issued."""
    found: Array = tasks[np.argsort(graph.order[tasks], kind="stable")]
    return found


def kernels_of(graph: Graph, rank: int) -> Array:
    """The kernels and copies on a rank's compute lanes, in the order they are issued."""
    lanes = graph.lanes.of_kind(LaneKind.COMPUTE)
    mine = np.isin(graph.kind, (Kind.KERNEL, Kind.COPY)) & (graph.rank == rank)
    return issued(graph, np.flatnonzero(mine & np.isin(graph.lane, lanes)))


def ops_of(graph: Graph, tasks: Array) -> list[str]:
    """The op of each task."""
    return [graph.names[int(k)] for k in graph.op[tasks]]


def is_call(graph: Graph) -> Array:
    """Which tasks are calls into the driver."""
    known = {int(k) for k in np.unique(graph.op) if graph.names[int(k)].startswith(CALLS)}
    found: Array = np.isin(graph.op, sorted(known))
    return found


def usual_launch(graph: Graph, otherwise: float) -> float:
    """Seconds the host usually spends on one launch, its operator's own time left out."""
    launches = graph.select(kind="host", op=("cudaLaunchKernel", "cudaLaunchKernelExC", "launch"))
    return float(np.median(graph.seconds[launches])) if len(launches) else otherwise


def _names(graph: Graph, host: Array, call: Array) -> Array:
    """The operator each host task works for: a call works for that of the piece before it."""
    at = np.maximum.accumulate(np.where(call, 0, np.arange(len(host))))
    found: Array = graph.name[host][at]
    return found


def _launches(graph: Graph) -> Array:
    found = np.zeros(graph.size, bool)
    found[graph.edges.after[graph.edges.kinds == WaitKind.LAUNCH]] = True
    return found
