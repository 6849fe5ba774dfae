"""Matmuls in TF32: fp32 numbers, ten bits of their fraction on tensor cores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretell.graph.graph import Dtype, Graph
from foretell.memory import change as memory
from foretell.memory.tape import Tape
from foretell.whatif.base import DoesNotApply, Setting, WhatIf
from foretell.whatif.machine import check_format
from foretell.whatif.table_lookup import (
    Change,
    KernelGroup,
    format_change,
    kernel_groups,
    retimed,
    without_helpers,
)


@dataclass(frozen=True)
class Tf32(WhatIf):
    """Let matmuls and convolutions of fp32 numbers use tensor cores."""

    name = "tf32"
    assumes = (
        "matmuls and convolutions in fp32 run in TF32; kernels change as they did where both were "
        "measured, on an H200",
    )
    source = "PyTorch documentation, CUDA semantics: TensorFloat-32"
    code = 'torch.set_float32_matmul_precision("high")'

    def apply(self, graph: Graph, setting: Setting) -> Graph:
        check_format(graph, setting, "tf32")
        mine = [s for s in kernel_groups(graph) if s.is_product and _is_plain(graph, s)]
        changes = []
        for sort in mine:
            change = format_change(graph, setting, sort, "fp32", "tf32")
            if change is not None:
                changes.append(Change(sort, *change, "tf32"))
        if not changes:
            raise DoesNotApply("the step has no fp32 matmul or convolution that TF32 would change")
        with graph.edit(str(self)) as edit:
            retimed(edit, graph, changes)
            without_helpers(edit, graph)
        return edit.graph

    def hold(self, tape: Tape) -> Tape:
        return memory.tensor_cores(tape)


def _is_plain(graph: Graph, sort: KernelGroup) -> bool:
    """Whether these kernels compute in fp32 proper: their names say where they use TF32."""
    if not np.all(graph.dtype[sort.kernels] == Dtype.FP32):
        return False
    names = {graph.names[int(n)].lower() for n in np.unique(graph.name[sort.kernels])}
    return not any("tf32" in name or "s1688" in name for name in names)
