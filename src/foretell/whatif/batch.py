"""More or fewer samples a step: the device and the loader do more or less work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from foretell.errors import InputError
from foretell.graph.columns import Kind, Phase
from foretell.graph.graph import Graph
from foretell.memory import change
from foretell.memory.tape import Tape
from foretell.whatif.base import DoesNotApply, Setting, WhatIf
from foretell.whatif.parameters import treats_parameters
from foretell.whatif.table_gradients import remade

FLOOR = 1.5e-6  # seconds of a kernel with next to no work, on an H200: the part batch cannot change
# Larger kernels fill the device better: the median of ln(time ratio)/ln(batch ratio) of steps held
# up by the device at half, once and twice the batch, thirteen models on an H200.
POWER = 0.96


@dataclass(frozen=True)
class Batch(WhatIf):
    """Use `times` as many samples a step."""

    name: ClassVar[str] = "batch"
    source: ClassVar[str] = "ours: how kernels of each sort grow with their samples"
    assumes: ClassVar[tuple[str, ...]] = (
        f"the host issues the same calls; forward and backward kernels take batch^{POWER} as long",
        "the batch changes neither the optimizer's work nor what fills, casts or adds whole "
        "parameters",
        "the gradient of an embedding is made as PyTorch makes it for so many indices",
    )
    code: ClassVar[str] = "DataLoader(…, batch_size=…)"
    times: float = 2.0  # how many times as many

    def apply(self, graph: Graph, setting: Setting) -> Graph:
        if not 0 < self.times < float("inf"):
            raise InputError(
                f"`{self}` uses {self.times} times the samples", hint="use more than 0"
            )
        phases = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD)
        is_mine = np.isin(graph.kind, (Kind.KERNEL, Kind.COPY)) & np.isin(graph.phase, phases)
        tasks = np.flatnonzero(is_mine & ~treats_parameters(graph))
        if not len(tasks):
            raise DoesNotApply("the step has no kernels of a forward or backward pass")
        floor = np.minimum(graph.seconds[tasks], FLOOR)
        with graph.edit(str(self)) as edit:
            edit.scale(np.flatnonzero(graph.kind == Kind.LOAD), self.times)
            edit.set(tasks, seconds=floor + (graph.seconds[tasks] - floor) * self.times**POWER)
            for column in ("flops", "bytes"):
                if column in graph.columns:
                    edit.scale(tasks, self.times, column)
            remade(edit, graph, self.times)
        return edit.graph

    def hold(self, tape: Tape) -> Tape:
        return change.batch(tape, self.times)
