"""Kernels and collectives that run at the same time slow each other down.

A collective over NVLink or through a NIC takes multiprocessors and memory bandwidth of the device.
Each device is a link of capacity one, as it is in a trace whose streams overlap: a kernel takes
what its blocks fill (all of it where unknown), a collective `TAKES` more. While both run, both
go at 1/(1 + TAKES); alone, either goes at full speed. What overlaps is for the simulation to find.

TAKES is 0.189: computation was 18.9 % slower on average under overlapped communication, 40 % at
most, over A100, H100, MI210 and MI250 with GPT and LLaMA models (Lee et al., Characterizing
Compute-Communication Overlap in GPU-Accelerated Distributed Deep Learning, arXiv:2507.03114,
abstract). Of NCCL beside compute, Daydream (Zhu et al., ATC 2020) reports calls about 34 % slower.
"""

from __future__ import annotations

import numpy as np

from foretell.graph.edit import Edit
from foretell.graph.graph import Array, Graph, Ids, Kind, LaneKind

TAKES = 0.189


def share_devices(edit: Edit, ranks: list[int], messages: Ids, kernels: Ids) -> None:
    """Let messages share the device of each rank with its kernels.

    `kernels` are those this edit has inserted; the kernels of the graph before come along.
    """
    graph = edit.before
    if not len(messages):
        return
    column, lane = edit.column("rank"), edit.column("lane")
    on_streams = _on_streams(graph)
    for rank in ranks:
        link = _device_link(edit, graph, rank)
        sharing = graph.used.task[graph.used.link == link]
        mine = np.flatnonzero(on_streams & (graph.rank == rank))
        new = kernels[column[kernels] == rank]
        apart = np.concatenate([np.setdiff1d(mine, sharing), new])
        apart = apart[~np.isin(lane[apart], lane[messages])]  # a lane's own are never at once
        if len(apart):
            edit.use(apart, link, 1.0)
        edit.use(messages, link, TAKES)


def _on_streams(graph: Graph) -> Array:
    """Kernels, and copies within the device, on streams that are not for communication."""
    lanes = np.append(np.isin(graph.lanes.kind, (LaneKind.COMM, LaneKind.HOST)), True)
    found: Array = (graph.kind == Kind.KERNEL) & ~lanes[graph.lane]
    return found


def _device_link(edit: Edit, graph: Graph, rank: int) -> int:
    """The link that stands for a rank's device, made where there is none."""
    name = f"rank {rank} device"
    for link, number in enumerate(graph.links.name.tolist()):
        if graph.names[number].startswith(name):
            return link
    return edit.link(f"{name} 0", 1.0)
