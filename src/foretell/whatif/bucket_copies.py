"""Where gradients are picked up and put back: copies into buckets and out of them.

PyTorch copies each gradient into its bucket as it is ready, one small kernel a parameter, and
copies the averages back before the optimizer (`gradient_as_bucket_view=False`). What such a kernel
costs the host is what the operators of this step's optimizer cost it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from foretell.cluster.read import devices
from foretell.graph.edit import Edit
from foretell.graph.graph import NONE, Graph, Ids, Kind, Phase, WaitKind
from foretell.whatif.base import Setting
from foretell.whatif.gradients import Gradients, compute_lane, exchanged
from foretell.whatif.parameters import PACK, UNPACK, backward_ends, in_order

OP_LEAST, OP_MOST, OP_USUAL = 3e-6, 15e-6, 8e-6  # seconds of host work for one small operator

KERNEL = 1.5e-6  # seconds of a kernel with next to no work (see `batch.FLOOR`)

REACHED = 0.8  # of the memory's bandwidth by a plain copy: what elementwise kernels of traces reach

MEMORY = 1e12  # bytes/s of a device that was not named


@dataclass(frozen=True, eq=False)
class Ready:
    """Where one rank's gradients can be picked up and where they are wanted."""

    rank: int
    calls: Ids  # the host task behind which each can be sent, NONE where no host does it
    kernels: Ids  # the device task behind which each is there
    wanted: tuple[Ids, Ids]  # pairs: (task that waits, number of the gradient)


def memory_rate(graph: Graph, setting: Setting) -> float:
    """Bytes/s that a plain copy reaches on the device of a step."""
    if setting.cluster is not None:
        return REACHED * setting.cluster.devices[0].memory_bandwidth
    name = str(graph.facts.get("device", "")).lower()
    words = [word for word in devices() if word in name]
    return REACHED * (devices()[max(words, key=len)].memory_bandwidth if words else MEMORY)


def host_op(graph: Graph, rank: int) -> float:
    """Seconds the host spends on one small operator: what those of the optimizer take here."""
    mine = (graph.rank == rank) & (graph.phase == Phase.UPDATE)
    kernels = int((mine & (graph.kind == Kind.KERNEL)).sum())
    if not kernels:
        return OP_USUAL
    spent = float(graph.seconds[mine & (graph.kind == Kind.HOST)].sum()) / kernels
    return min(max(spent, OP_LEAST), OP_MOST)


def picked_up(edit: Edit, found: Gradients, rate: float) -> Ready:
    """Where gradients can be picked up, with copies into and out of buckets where there are none.

    `rate` is what a plain copy moves, bytes/s.
    """
    graph = edit.before
    if found.source == "packed":
        return Ready(
            found.rank, launch_calls(graph, found.ready), found.ready, _unpacks(graph, found)
        )
    if found.source == "collectives":
        return Ready(found.rank, np.full(len(found), NONE), found.ready, _users(graph, found.rank))
    return _copied(edit, found, rate)


def launch_calls(graph: Graph, kernels: Ids) -> Ids:
    """The host call that launches each of some kernels, NONE where there is none."""
    e = graph.edges
    is_launch = (e.kinds == WaitKind.LAUNCH) & (graph.kind[e.after] == Kind.HOST)
    call = np.full(graph.size, NONE, np.int64)
    call[e.waiting[is_launch]] = e.after[is_launch]
    found: Ids = call[kernels]
    return found


def _unpacks(graph: Graph, found: Gradients) -> tuple[Ids, Ids]:
    tasks = graph.select(op=UNPACK, kind="kernel", rank=found.rank)
    return in_order(graph, tasks), np.arange(len(tasks))


def _users(graph: Graph, rank: int) -> tuple[Ids, Ids]:
    """The tasks that wait for each gradient collective on a rank."""
    collectives = exchanged(graph)
    place = np.full(graph.size, NONE)
    place[collectives] = np.arange(len(collectives))
    e = graph.edges
    mine = (place[e.after] != NONE) & (place[e.waiting] == NONE) & (graph.rank[e.waiting] == rank)
    return e.waiting[mine].astype(np.int64), place[e.after[mine]]


def _copied(edit: Edit, found: Gradients, rate: float) -> Ready:
    graph, rank = edit.before, found.rank
    lane, seconds = compute_lane(graph, rank), KERNEL + 2 * found.bytes / rate
    is_hosted = bool((graph.kind[found.ready] == Kind.HOST).all())
    host = host_op(graph, rank)
    like: dict[str, Any] = {
        "kind": "kernel",
        "lane": lane,
        "rank": rank,
        "seconds": seconds,
        "bytes": 2 * found.bytes,
        "comm_bytes": found.bytes,
        "layer": list(found.layer),
        "shape": [f"in={shape}" if shape else "" for shape in found.shape],
        "source": "formula",
    }
    calls = np.full(len(found), NONE)
    if is_hosted:
        calls = edit.insert(
            issued_after=found.ready, kind="host", op=PACK, lane=graph.lane[found.ready],
            rank=rank, seconds=host, phase="backward",
        )  # fmt: skip
    behind = calls if is_hosted else found.ready
    packs = edit.insert(issued_after=behind, op=PACK, phase="backward", **like)
    edit.wait(packs, behind, kind="launch" if is_hosted else "data")
    unpacks = _copied_back(edit, rank, host if is_hosted else 0.0, like)
    return Ready(rank, calls, packs, (unpacks, np.arange(len(found))))


def _copied_back(edit: Edit, rank: int, host: float, like: dict[str, Any]) -> Ids:
    """Copies out of the buckets, ahead of all the optimizer does, or behind all of the step."""
    count = len(like["seconds"])
    kernel, call = first_of_update(edit.before, rank)
    ahead: dict[str, Any] = {"issued_before": np.full(count, kernel)} if kernel != NONE else {}
    unpacks = edit.insert(count, op=UNPACK, phase="update", **ahead, **like)
    if host and call != NONE:
        calls = edit.insert(
            issued_before=np.full(count, call), kind="host", op=UNPACK, rank=rank,
            lane=edit.before.lane[call], seconds=host, phase="update",
        )  # fmt: skip
        edit.wait(unpacks, calls, kind="launch")
        handed = edit.before.edges.of(call)  # the end of the backward pass on its thread
        if len(handed):
            edit.wait(np.full(len(handed), calls[0]), handed, kind="thread")
    return unpacks


def first_of_update(graph: Graph, rank: int) -> tuple[int, int]:
    """The first kernel and host task of the optimizer behind the backward pass; NONE for none."""
    behind = (graph.rank == rank) & (graph.phase == Phase.UPDATE)
    behind &= graph.order > backward_ends(graph, rank)
    behind &= ~np.isin(graph.op, graph.names.matching(UNPACK))
    found = []
    for kind in (Kind.KERNEL, Kind.HOST):
        tasks = np.flatnonzero(behind & (graph.kind == kind))
        found.append(int(tasks[np.argmin(graph.order[tasks])]) if len(tasks) else NONE)
    return found[0], found[1]
