"""Activations kept in fewer bits between the forward and the backward pass.

The output of a ReLU is encoded behind the kernel that uses it, and decoded before the backward of
that user: to one bit a number where a pooling follows (its backward needs the sign alone), to
`bits` otherwise. Each encoding and decoding is one pass over memory: the numbers, and what is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from foretell.cluster.node import Device
from foretell.cost import kernel as kernels
from foretell.cost.kernel import write_shape as write
from foretell.errors import InputError
from foretell.graph.edit import Edit
from foretell.graph.graph import NONE, Array, Dtype, Graph, Kind, Phase, word_of
from foretell.memory.tape import Tape
from foretell.whatif.base import DoesNotApply, Setting, WhatIf
from foretell.whatif.calls import hooked, issued, kernels_of, launch_of, ops_of
from foretell.whatif.kernel_request import first_input
from foretell.whatif.machine import device_of
from foretell.whatif.memory_effect import released
from foretell.whatif.reconstructed_batchnorm import RELU

POOLS = ("max_pool2d_with_indices", "max_pool2d", "pool")


@dataclass(frozen=True)
class Saved:
    """The output of a ReLU: its numbers, the kernel that uses it, and that one's backward."""

    user: int
    backward: int
    elements: float
    size: int  # bytes a number
    bits: int  # kept of a number


@dataclass(frozen=True)
class Gist(WhatIf):
    """Keep the outputs of ReLUs in fewer bits until the backward pass."""

    name = "gist"
    assumes = (
        "encoding and decoding are bound by memory; the host launches one kernel more for each",
        "hooks written in Python see every tensor that autograd saves",
        "training bears the lost bits",
    )
    source = "Jain et al., Gist: Efficient Data Encoding for DNN Training, ISCA 2018"
    bits: int = 8  # a number, where no pooling follows

    def apply(self, graph: Graph, setting: Setting) -> Graph:
        if not 1 <= self.bits <= 32:
            raise InputError(f"`{self}` keeps {self.bits} bits a number", hint="use 1 to 32")
        saved = saved_by_relus(graph, self.bits)
        if not saved:
            raise DoesNotApply(
                "the step has no ReLU of known size whose user has a backward",
                hint="profile with record_shapes=True",
            )
        device = device_of(graph, setting)
        with graph.edit(str(self)) as edit:
            for one in saved:
                _pass(edit, device, one, "encode", one.user, behind=True)
                _pass(edit, device, one, "decode", one.backward, behind=False)
            hooked(edit)
            less = sum(s.elements * (s.size - s.bits / 8) for s in saved)
            edit.fact(encoded_bytes=float(less))
        return edit.graph

    def hold(self, tape: Tape) -> Tape:
        forward = [op for op in tape.ops if op.phase == Phase.FORWARD]
        share: dict[int, float] = {}
        for op, user in pairwise(forward):
            if op.name in RELU and op.reads:
                made = (op.makes or op.reads)[0]
                bits = 1 if user.name in POOLS else self.bits
                share[made] = bits / (8 * tape.storages[made].item)
        return released(tape, share)


def saved_by_relus(graph: Graph, bits: int) -> list[Saved]:
    """All outputs of ReLUs that a kernel behind them keeps for its backward."""
    found = []
    for rank in np.unique(graph.rank).tolist():
        tasks = kernels_of(graph, rank)
        ops = ops_of(graph, tasks)
        backward = _first_backward(graph, rank)
        for k in range(len(tasks) - 1):
            if ops[k] not in RELU or graph.phase[tasks[k]] != Phase.FORWARD:
                continue
            user = int(tasks[k + 1])
            back = backward.get(int(graph.layer[user]), NONE)
            elements, size = first_input(ops[k], graph.text_of("shape", int(tasks[k])))
            if back != NONE and elements:
                kept = 1 if ops[k + 1] in POOLS else bits
                found.append(Saved(user, back, elements, size, kept))
    return found


def _first_backward(graph: Graph, rank: int) -> dict[int, int]:
    """Layer → the first kernel of its backward."""
    mine = (graph.rank == rank) & (graph.kind == Kind.KERNEL) & (graph.phase == Phase.BACKWARD)
    tasks = issued(graph, np.flatnonzero(mine & (graph.layer != 0)))
    return dict(zip(graph.layer[tasks[::-1]].tolist(), tasks[::-1].tolist(), strict=True))


def _pass(edit: Edit, device: Device, one: Saved, op: str, kernel: int, *, behind: bool) -> Array:
    """One pass over memory, launched and run right behind a kernel or right before it."""
    graph = edit.before
    dtype = word_of(Dtype, graph.dtype[kernel])
    moved = one.elements * (one.size + one.bits / 8)
    shape, form = write({"n": one.elements}), dtype if dtype != "none" else "fp32"
    price = kernels.seconds(device, "elementwise", form, [shape], None, [moved])
    where: dict[str, Any] = {c: graph.column(c)[kernel] for c in ("rank", "layer", "phase")}
    place = "issued_after" if behind else "issued_before"
    new = edit.insert(
        1, **{place: kernel}, kind="kernel", op=op, lane=graph.lane[kernel], bytes=moved,
        dtype=graph.dtype[kernel], seconds=float(price.seconds[0]), gap=graph.gap[kernel],
        source="formula", sigma=float(price.sigma[0]), **where,
    )  # fmt: skip
    launch = int(launch_of(graph, np.array([kernel]))[0])
    if launch != NONE:
        call = edit.insert(
            1, **{place: launch}, kind="host", op="cudaLaunchKernel", name=op,
            lane=graph.lane[launch], seconds=kernels.host_seconds(device, "elementwise"), **where,
        )  # fmt: skip
        edit.wait(new, call, kind="launch")
    return new
