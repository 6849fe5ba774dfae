"""Inputs of convolutions moved to the host in the forward pass and back before their backward.

Every convolution's input leaves on a copy lane while the convolution runs, and the next
convolution starts when it is gone (its memory is free then). In the backward pass the input comes
back while the convolution behind it, whose backward comes first, is at work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foretell.cost.price import COPY_START
from foretell.graph.edit import Edit
from foretell.graph.graph import NONE, Array, Graph, Kind, Phase
from foretell.memory.tape import Tape
from foretell.whatif.base import DoesNotApply, Setting, WhatIf
from foretell.whatif.calls import hooked, issued, kernels_of, launch_of, ops_of, usual_launch
from foretell.whatif.kernel_request import first_input
from foretell.whatif.machine import bus_rate
from foretell.whatif.memory_effect import is_activation, released

CONVOLUTIONS = ("convolution", "conv")
CASTS = ("copy_", "_to_copy", "to")  # of filters and inputs, where formats are mixed
_CALL = 1e-5  # seconds of a call where a step shows no launch
_CALLS = 2  # of the host for every copy: the copy, and the event others wait for


@dataclass(frozen=True)
class Layer:
    """A convolution: its kernels forward and backward, and the bytes of its input."""

    forward: Array
    backward: Array
    bytes: float


@dataclass(frozen=True)
class Vdnn(WhatIf):
    """Keep the inputs of convolutions on the host until their backward needs them."""

    name = "vdnn"
    assumes = (
        "copies go from and to pinned memory at the rate of the bus, each way on its own lane",
        "a convolution waits until the input of the one before has left",
        "hooks written in Python see every tensor that autograd saves",
    )
    source = "Rhu et al., vDNN: Virtualized Deep Neural Networks, MICRO 2016"
    code = "with torch.autograd.graph.save_on_cpu(pin_memory=True): …"

    def apply(self, graph: Graph, setting: Setting) -> Graph:
        found = {r: layers(graph, r) for r in np.unique(graph.rank).tolist()}
        if not any(found.values()):
            raise DoesNotApply(
                "the step has no convolutions with known inputs, forward and backward",
                hint="profile with record_shapes=True",
            )
        if any(_is_late(graph, mine) for mine in found.values() if mine):
            raise DoesNotApply(
                "some forward pass runs, or runs again, behind a backward pass",
                hint="ask for vdnn before checkpoint, p3 or parameter-server, or without them",
            )
        rate = bus_rate(graph, setting)
        with graph.edit(str(self)) as edit:
            for rank, mine in found.items():
                _moved(edit, rank, mine, rate)
            hooked(edit)
            edit.fact(offloaded_bytes=_saved(found.values()))
        return edit.graph

    def hold(self, tape: Tape) -> Tape:
        forward = [op for op in tape.ops if op.phase == Phase.FORWARD and op.name in CONVOLUTIONS]
        inputs = [op.reads[0] for op in forward if op.reads and is_activation(tape, op.reads[0])]
        return released(tape, dict.fromkeys(inputs, 0.0))


def _is_late(graph: Graph, mine: Sequence[Layer]) -> bool:
    """Whether a convolution runs forward again, or after some has begun to run backward."""
    back = np.concatenate([layer.backward for layer in mine])
    again = {graph.text_of("op", int(t)) for t in back} & set(CONVOLUTIONS)
    last = max(graph.order[layer.forward].max() for layer in mine)
    return bool(again) or bool(last > graph.order[back].min())


def layers(graph: Graph, rank: int) -> list[Layer]:
    """The convolutions of a rank in the order of the forward pass, one for each input."""
    mine = (graph.rank == rank) & (graph.kind == Kind.KERNEL) & (graph.layer != 0)
    back = mine & (graph.phase == Phase.BACKWARD)
    first = graph.select(kind="kernel", op=CONVOLUTIONS, phase="forward", rank=rank)
    found: dict[int, Layer] = {}
    fresh = _fresh(graph, rank)
    seen: set[str] = set()
    for layer in dict.fromkeys(graph.layer[issued(graph, first)].tolist()):
        forward = issued(graph, first[graph.layer[first] == layer])
        backward = issued(graph, np.flatnonzero(back & (graph.layer == layer)))
        size = _input_bytes(graph, int(forward[0]))
        read = _input_dims(graph, int(forward[0]))
        is_kept = read in seen and int(forward[0]) not in fresh  # it has left for another already
        seen.add(read)
        if layer and len(backward) and size and not is_kept:
            found[layer] = Layer(forward, backward, size)
    return list(found.values())


def _fresh(graph: Graph, rank: int) -> set[int]:
    """Convolutions whose input the kernel before them has made, as far as sizes tell.

    Where it has made another tensor (a shortcut beside a block), the input is one of before.
    """
    found: set[int] = set()
    tasks = kernels_of(graph, rank)
    tasks = tasks[graph.phase[tasks] == Phase.FORWARD]
    made = 0.0  # elements, zero where they are not known
    for task, op in zip(tasks.tolist(), ops_of(graph, tasks), strict=True):
        elements = first_input(op, graph.text_of("shape", task))[0]
        if op in CONVOLUTIONS:
            if not made or elements == made:
                found.add(task)
            made = 0.0
        elif elements > 1 and op not in CASTS:
            made = elements
    return found


def _input_dims(graph: Graph, task: int) -> str:
    return graph.text_of("shape", task).partition("+")[0]


def _input_bytes(graph: Graph, task: int) -> float:
    elements, size = first_input(graph.text_of("op", task), graph.text_of("shape", task))
    if elements:
        return elements * size
    return float(graph.bytes[task]) / 3  # input, filters and output: what is known of them together


def _moved(edit: Edit, rank: int, mine: list[Layer], rate: float) -> None:
    """Copies out and back of all layers of a rank."""
    out = edit.lane("offload", rank=rank, kind="copy")
    back = edit.lane("prefetch", rank=rank, kind="copy")
    gone = []
    for k, layer in enumerate(mine):
        seconds = COPY_START + layer.bytes / rate
        copy = _copy(edit, "d2h", out, layer, int(layer.forward[0]), seconds)
        if k + 1 < len(mine):
            edit.wait(mine[k + 1].forward[:1], copy, kind="event")
        gone.append(copy)
    for k, layer in enumerate(mine):
        before = mine[k + 1].backward if k + 1 < len(mine) else layer.backward
        seconds = COPY_START + layer.bytes / rate
        copy = _copy(edit, "h2d", back, layer, int(before[0]), seconds)
        edit.wait(copy, gone[k], kind="event")
        edit.wait(layer.backward[:1], copy, kind="event")


def _copy(edit: Edit, op: str, lane: int, layer: Layer, beside: int, seconds: float) -> int:
    """A copy that starts with a kernel: behind what that kernel waited for, and a host call."""
    graph = edit.before
    launch = int(launch_of(graph, np.array([beside]))[0])
    where: dict[str, Any] = {
        c: graph.column(c)[beside] for c in ("rank", "layer", "phase", "dtype")
    }
    copy = edit.insert(
        1, issued_before=beside, kind="copy", op=op, name=op, lane=lane, seconds=seconds,
        bytes=layer.bytes, **where,
    )  # fmt: skip
    before = _before(graph, beside)
    if before != NONE:
        edit.wait(copy, before, kind="event")
    if launch != NONE:
        call = edit.insert(
            1, issued_before=launch, kind="host", op="cudaMemcpyAsync", name=op,
            lane=graph.lane[launch], seconds=_CALLS * usual_launch(graph, _CALL), **where,
        )  # fmt: skip
        edit.wait(copy, call, kind="launch")
    return int(copy[0])


def _before(graph: Graph, kernel: int) -> int:
    """The kernel before another on its lane."""
    same = np.flatnonzero((graph.lane == graph.lane[kernel]) & (graph.order < graph.order[kernel]))
    return int(same[np.argmax(graph.order[same])]) if len(same) else NONE


def _saved(found: Any) -> float:
    """Bytes a rank no longer keeps: all inputs but the two that are on their way."""
    sizes = [sorted(layer.bytes for layer in mine) for mine in found]
    return float(max((sum(s[:-2]) for s in sizes), default=0.0))
