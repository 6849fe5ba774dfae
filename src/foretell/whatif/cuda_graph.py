"""The whole step captured once and replayed: the device no longer waits for the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from foretell.graph.columns import Array, Kind, LaneKind
from foretell.graph.edit import Edit
from foretell.graph.graph import Graph
from foretell.whatif.base import DoesNotApply, Setting, WhatIf
from foretell.whatif.masked import masked

DEVICE = (Kind.KERNEL, Kind.COPY, Kind.COLLECTIVE, Kind.SEND)
HOST = (Kind.HOST, Kind.SYNC)
LAUNCH = 2e-5  # seconds of one cudaGraphLaunch on the host
# Measured on an H200, four models with Adam as graphs under the profiler and without it: a kernel
# begins 0.26 to 0.35 µs after the one before has ended.
GAP = 0.3e-6  # seconds
# Adam in a graph keeps its step on the device (`capturable=True`): torch/optim/adam.py then works
# out the two bias corrections and the step size with kernels of their own on one number (14.0 to
# 14.8 a parameter, 0.9 to 1.6 µs each), and divides and adds by what those made: passes that look
# up an offset for every number, where a plain number would have been read from a register.
CAPTURABLE, TINY = 14, 1.2e-6
BY_TENSOR = {"div": 1.6, "add_": 1.6}  # times as long


@dataclass(frozen=True)
class CudaGraph(WhatIf):
    """Replay the whole step as one CUDA graph."""

    name: ClassVar[str] = "cuda-graph"
    assumes: ClassVar[tuple[str, ...]] = (
        "shapes and control flow are the same in every step, and nothing in it waits for the host",
        "kernels take the time they take now; an Adam optimizer runs with capturable=True; models "
        "of the transformers library (words, a scale, no mask) make their masks in a capture",
    )
    source: ClassVar[str] = "PyTorch documentation, CUDA semantics: CUDA graphs"
    code: ClassVar[str] = "with torch.cuda.graph(g): step()   # then g.replay()"

    def apply(self, graph: Graph, setting: Setting) -> Graph:
        if not np.isin(graph.kind, DEVICE).any() or not np.isin(graph.kind, HOST).any():
            raise DoesNotApply("there is no host that launches work on a device in this step")
        if len(graph.select(kind="host", op=("cudaGraphLaunch", "hipGraphLaunch"))):
            raise DoesNotApply("the step is launched as a CUDA graph already")
        graph = masked(graph, setting)
        device = np.flatnonzero(np.isin(graph.kind, DEVICE))
        with graph.edit(str(self)) as edit:
            edit.remove(np.flatnonzero(np.isin(graph.kind, HOST)), bridge=False)
            edit.set(device, gap=GAP)
            launch = _launched(edit, graph, device)
            _capturable(edit, graph, launch)
        return edit.graph


def _launched(edit: Edit, graph: Graph, device: Array) -> int:
    """One launch on the host, and every lane of the device behind it."""
    lanes = graph.lanes.of_kind(LaneKind.HOST)
    lane = int(lanes[0]) if len(lanes) else edit.lane("thread", kind="host")
    new = edit.insert(1, kind="host", op="cudaGraphLaunch", lane=lane, seconds=LAUNCH)
    edit.reorder(new, before=int(np.argmin(graph.order)))
    edit.wait(device, int(new[0]), kind="launch")
    return int(new[0])


def _capturable(edit: Edit, graph: Graph, launch: int) -> None:
    """What a parameter costs more when its step is counted on the device."""
    last = graph.select(kind="kernel", phase="update", op="addcdiv_")
    if not len(last):
        return
    for op, times in BY_TENSOR.items():
        passes = graph.select(kind="kernel", phase="update", op=op)
        edit.set(passes, seconds=graph.seconds[passes] * times)
    each = np.repeat(last, CAPTURABLE)
    new = edit.insert(
        issued_before=each,
        kind="kernel",
        op="capturable",
        phase="update",
        lane=graph.lane[each],
        rank=graph.rank[each],
        seconds=TINY,
        gap=GAP,
    )
    edit.wait(new, launch, kind="launch")
