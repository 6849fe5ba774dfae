"""More or fewer samples a step: the device does more or less work, the host the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from foretell.errors import InputError
from foretell.graph.columns import Kind, Phase
from foretell.graph.graph import Graph
from foretell.whatif.base import DoesNotApply, Setting, WhatIf

FLOOR = 1.5e-6  # seconds of a kernel with next to no work, on an H200: the part batch cannot change


@dataclass(frozen=True)
class Batch(WhatIf):
    """Use `times` as many samples a step."""

    name: ClassVar[str] = "batch"
    assumes: ClassVar[tuple[str, ...]] = (
        "the host issues the same calls; forward and backward kernels do work as the batch",
        "the optimizer's work does not depend on the batch",
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
        tasks = np.flatnonzero(is_mine)
        if not len(tasks):
            raise DoesNotApply("the step has no kernels of a forward or backward pass")
        floor = np.minimum(graph.seconds[tasks], FLOOR)
        with graph.edit(str(self)) as edit:
            edit.set(tasks, seconds=floor + (graph.seconds[tasks] - floor) * self.times)
            for column in ("flops", "bytes"):
                if column in graph.columns:
                    edit.scale(tasks, self.times, column)
        return edit.graph
