"""The host's part of device work: which calls launched it, where, and what a call costs."""

from __future__ import annotations

import numpy as np

from foretell.cost.kernel import passes
from foretell.graph.edit import Edit
from foretell.graph.graph import NONE, Array, Graph, Kind, LaneKind, Phase, WaitKind
from foretell.trace.operators import is_call, operators

__all__ = ["host_of", "is_call", "issued", "kernels_of", "launch_of", "operators", "ops_of"]
__all__ += ["burden", "hooked", "usual_launch"]


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


def usual_launch(graph: Graph, otherwise: float) -> float:
    """Seconds the host usually spends on one launch, its operator's own time left out."""
    launches = graph.select(kind="host", op=("cudaLaunchKernel", "cudaLaunchKernelExC", "launch"))
    return float(np.median(graph.seconds[launches])) if len(launches) else otherwise


PASSES = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD)
USUAL = (
    26e-6  # seconds: host time a kernel of eager steps, seven models without profiler, H200 host
)


def call_seconds(graph: Graph) -> float:
    """Host time a kernel of the forward and backward pass; an optimizer's calls are others.

    Operators inside which a library launches kernel after kernel (cuDNN's recurrent layers) do not
    count: no call of PyTorch lies between those.
    """
    mine = np.isin(graph.phase, PASSES) & ~_in_loops(graph)
    host = mine & (graph.kind == Kind.HOST)
    kernels = int((mine & (graph.kind == Kind.KERNEL)).sum())
    if not kernels or not host.any():
        return USUAL
    return float(graph.seconds[host].sum() + graph.gap[host].sum()) / kernels


LOOP = 16  # kernels of one operator: with more, a library launches them, not PyTorch


def _in_loops(graph: Graph) -> Array:
    """Tasks of operators that launch more than `LOOP` kernels each."""
    number, kernels = operators(graph), np.flatnonzero(graph.kind == Kind.KERNEL)
    launch = launch_of(graph, kernels)
    kernels, launch = kernels[launch >= 0], launch[launch >= 0]
    of = number[launch]
    kernels, of = kernels[of >= 0], of[of >= 0]
    many = np.bincount(of, minlength=int(number.max(initial=0)) + 1) > LOOP
    found: Array = np.where(number >= 0, many[np.maximum(number, 0)], False)
    found[kernels] |= many[of]
    return found


def burden(edit: Edit, kernels: Array, calls: float) -> None:
    """Host time of so many calls more for every operator that launched some of these kernels."""
    graph = edit.before
    launches = launch_of(graph, kernels)
    first = np.unique(issued_by(graph, launches[launches != NONE]))
    if len(first):
        edit.set(first, seconds=graph.seconds[first] + calls * call_seconds(graph))


def hooked(edit: Edit) -> None:
    """Hooks in Python on all that autograd saves: the host is longer at every operator."""
    graph = edit.before
    mine = np.isin(graph.phase, PASSES) & (graph.kind == Kind.KERNEL)
    burden(edit, np.flatnonzero(mine), float(passes()["python"]["saved"]))


def issued_by(graph: Graph, launches: Array) -> Array:
    """The first host task of the operator that each launch belongs to."""
    number = operators(graph)
    mine = np.flatnonzero(number >= 0)
    order = mine[np.argsort(graph.order[mine], kind="stable")][::-1]
    first = np.zeros(int(number.max(initial=0)) + 1, np.int64)
    first[number[order]] = order  # the last written is the earliest
    found: Array = np.where(number[launches] >= 0, first[number[launches]], launches)
    return found
