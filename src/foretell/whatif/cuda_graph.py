"""The whole step captured once and replayed: the device no longer waits for the host.

Capturing changes the attention masks that a model's library makes. The transformers library leaves
a mask out where no word is masked. It cannot look that up while a step is captured, and gives
attention a mask then (src/transformers/masking_utils.py, release 5):

    causal        the mask takes the place of the flag, and all scores are worked out
    both ways     no kernel takes such a mask (its rows lie on one another in memory), so that
                  attention is written out: matmuls in fp32, and a pass over the scores for each
                  of what lies between them

Compiled, a mask both ways is a tensor that memory-efficient attention takes and cuDNN's does not:
half precision goes back to the kernels of fp32 (BERT on 2048 words: 35 ms a step, 22 without).

A trace does not name libraries. This one is recognised by attention whose keys are words (as many
as some table was asked for) and that has a scale and no mask: PyTorch's own layers leave the scale
to the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretell.cluster.node import Device
from foretell.cost import kernel as kernels
from foretell.cost.aten import read
from foretell.cost.kernel import parse_shape as parse
from foretell.cost.kernel import passes
from foretell.cost.kernel import write_shape as write
from foretell.cost.ratios import Way
from foretell.graph.edit import Edit
from foretell.graph.graph import Array, Dtype, Graph, Kind, LaneKind, word_of
from foretell.trace.words import GRAPH_LAUNCHES
from foretell.whatif.base import DoesNotApply, Setting, WhatIf
from foretell.whatif.calls import kernels_of
from foretell.whatif.kernel_request import requested_kernels
from foretell.whatif.machine import device_of
from foretell.whatif.table_lookup import PLACES, changed, kernel_group

WORDS = "embedding"  # how operators on a table of words begin


def masked(graph: Graph, setting: Setting, *, is_compiled: bool = False) -> Graph:
    """The step with attention as it is captured or compiled; the same without that library."""
    found = [call for r in np.unique(graph.rank).tolist() for call in _unmasked(graph, r)]
    device = _known_device(graph, setting) if found else None
    if device is None:
        return graph
    longest = np.array([call[np.argmax(graph.seconds[call])] for call in found])
    now = np.array([graph.seconds[call].sum() for call in found])
    each = np.stack([graph.op[longest], graph.shape[longest], graph.dtype[longest]], axis=1)
    _, firsts, sort = np.unique(each, axis=0, return_index=True, return_inverse=True)
    priced = np.array(
        [
            _compiled(graph, k) if is_compiled else _with_mask(graph, k, device)
            for k in longest[firsts].tolist()
        ]
    )
    times, least = priced[sort.reshape(-1)].T
    with graph.edit() as edit:
        edit.set(longest, seconds=np.maximum(now * times, least), source="formula")
        edit.remove(np.setdiff1d(np.concatenate(found), longest))
    return edit.graph


def _known_device(graph: Graph, setting: Setting) -> Device | None:
    try:
        return device_of(graph, setting)
    except DoesNotApply:
        return None


def _unmasked(graph: Graph, rank: int) -> list[Array]:
    """The kernels of each attention on words with a scale and no mask."""
    numbers = [k for k in map(graph.names.number, PLACES) if k >= 0]
    line = kernels_of(graph, rank) if numbers else np.zeros(0, np.int64)
    place = np.flatnonzero(np.isin(graph.op[line], numbers))
    words = _words(graph, line) if len(place) else set()
    if not words:
        return []
    mine = line[place]
    same = (graph.op[mine[1:]] == graph.op[mine[:-1]]) & (np.diff(place) == 1)
    same &= graph.shape[mine[1:]] == graph.shape[mine[:-1]]
    calls = np.split(mine, np.flatnonzero(~same) + 1)
    return [call for call in calls if _is_bare(graph, int(call[0]), words)]


def _words(graph: Graph, line: Array) -> set[int]:
    """How many words tables were asked for, of each that was."""
    tables = [k for k in np.unique(graph.op[line]) if graph.names[int(k)].startswith(WORDS)]
    mine = line[np.isin(graph.op[line], tables)]
    calls = {(int(graph.op[k]), int(graph.shape[k])) for k in mine}
    requested_kernels = [read(graph.names[op], graph.names[shape]) for op, shape in calls]
    return {call.size(1) for call in requested_kernels if len(call.dims) > 1 and call.dims[1]}


def _is_bare(graph: Graph, task: int, words: set[int]) -> bool:
    """Whether a call on words was given a scale and no mask."""
    op = graph.text_of("op", task)
    call = read(op, graph.text_of("shape", task))
    mask, scale = PLACES[op]
    keys = call.dims[2 if op.endswith("backward") else 1]
    if keys[0] * keys[2 if "cudnn" in op else 1] not in words:
        return False
    has_scale = scale < len(call.values) and call.values[scale] not in ("", "-")
    return has_scale and (mask is None or not call.dims[mask])


def _with_mask(graph: Graph, task: int, device: Device) -> tuple[float, float]:
    """How many times as long an attention takes with a mask, and the least it then takes."""
    part = requested_kernels(graph.text_of("op", task), graph.text_of("shape", task))[0]
    dtype, sizes = word_of(Dtype, graph.dtype[task]), dict(parse(part.shape))
    if not sizes.get("causal"):
        return 1.0, _written_seconds(sizes, 2 if dtype in ("fp16", "bf16") else 4, device)
    shapes = [part.shape, write(sizes | {"causal": 0.0})]
    flagged, whole = kernels.seconds(device, "attention", dtype, shapes).seconds
    return float(whole / flagged), 0.0


def _compiled(graph: Graph, task: int) -> tuple[float, float]:
    """The same of a compiled attention: by the kernel that takes a mask; a flag stays one."""
    op, shape = graph.text_of("op", task), graph.text_of("shape", task)
    is_half = word_of(Dtype, graph.dtype[task]) in ("fp16", "bf16")
    if not is_half or dict(parse(requested_kernels(op, shape)[0].shape)).get("causal"):
        return 1.0, 0.0
    sort = kernel_group(op, shape, int(graph.phase[task]), np.array([task]))
    change = changed(sort, Way("bf16", "cudnn"), Way("bf16", "efficient"))
    return max(change[0] if change else 1.0, 1.0), 0.0


def _written_seconds(sizes: dict[str, float], item: int, device: Device) -> float:
    names = ("b", "heads", "sq", "sk", "d", "causal", "direction", "dropout", "window")
    attention = kernels.Attention(*(np.array([sizes.get(name, 0.0)]) for name in names))
    peak, bandwidth = device.peak("fp32"), device.memory_bandwidth
    return float(kernels.written_seconds(attention, item, peak, bandwidth)[0])


DEVICE = (Kind.KERNEL, Kind.COPY, Kind.COLLECTIVE, Kind.SEND)
HOST = (Kind.HOST, Kind.SYNC)
LAUNCH = 2e-5  # seconds of one cudaGraphLaunch on the host
# Adam in a graph keeps its step on the device (`capturable=True`): torch/optim/adam.py then works
# out the two bias corrections and the step size with kernels of their own on one number (14.0 to
# 14.8 a parameter, 0.9 to 1.6 µs each), and divides and adds by what those made: passes that look
# up an offset for every number, where a plain number would have been read from a register.
# How many and how long: `[capturable]` of the table of passes.


@dataclass(frozen=True)
class CudaGraph(WhatIf):
    """Replay the whole step as one CUDA graph."""

    name = "cuda-graph"
    assumes = (
        "shapes and control flow are the same in every step, and nothing in it waits for the host",
        "kernels take the time they take now; an Adam optimizer runs with capturable=True; models "
        "of the transformers library (words, a scale, no mask) make their masks in a capture",
    )
    source = "PyTorch documentation, CUDA semantics: CUDA graphs"
    code = "with torch.cuda.graph(g): step()   # then g.replay()"

    def apply(self, graph: Graph, setting: Setting) -> Graph:
        if not np.isin(graph.kind, DEVICE).any() or not np.isin(graph.kind, HOST).any():
            raise DoesNotApply("there is no host that launches work on a device in this step")
        if len(graph.select(kind="host", op=GRAPH_LAUNCHES)):
            raise DoesNotApply("the step is launched as a CUDA graph already")
        graph = masked(graph, setting)
        device = np.flatnonzero(np.isin(graph.kind, DEVICE))
        with graph.edit(str(self)) as edit:
            edit.remove(np.flatnonzero(np.isin(graph.kind, HOST)), bridge=False)
            edit.set(device, gap=passes()["gap"]["graph"])
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
    known = passes()["capturable"]
    for op, times in known["by_tensor"].items():
        some = graph.select(kind="kernel", phase="update", op=op)
        edit.set(some, seconds=graph.seconds[some] * times)
    each = np.repeat(last, int(known["kernels"]))
    new = edit.insert(
        issued_before=each,
        kind="kernel",
        op="capturable",
        phase="update",
        lane=graph.lane[each],
        rank=graph.rank[each],
        seconds=known["seconds"],
        gap=passes()["gap"]["graph"],
    )
    edit.wait(new, launch, kind="launch")
