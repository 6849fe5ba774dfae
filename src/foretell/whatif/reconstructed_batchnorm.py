"""Batch normalisation taken apart and joined with its neighbours, which read and write anyway.

As the paper has it, statistics are gathered while the convolution before writes its output;
normalising and the ReLU behind it happen while the convolution after reads its input. The ReLU's
kernels go, forward and backward, and of the normalisation's traffic half is left. Triton kernels
that leave the convolutions alone (statistics in one pass, normalising, adding and ReLU in another)
come to the same on an H200, where PyTorch's take more passes than they need; Python launches them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from foretell.cost.kernel import passes
from foretell.errors import InputError
from foretell.graph.graph import Array, Graph
from foretell.whatif.base import DoesNotApply, Setting, WhatIf
from foretell.whatif.calls import burden, host_of, kernels_of, ops_of

FORWARD = ("native_batch_norm", "batch_norm")
BACKWARD = ("native_batch_norm_backward", "batch_norm_backward")
RELU = ("relu", "relu_", "clamp_min", "clamp_min_", "threshold", "threshold_")
RELU_BACKWARD = ("threshold_backward", "relu_backward")


@dataclass(frozen=True)
class ReconstructedBatchnorm(WhatIf):
    """Join batch normalisation with the convolutions and ReLUs around it."""

    name = "reconstructed-batchnorm"
    assumes = (
        "batch normalisation is bound by memory, and joined it moves that share of its bytes",
        "the convolutions around it take the time they take now",
        "its kernels are launched from Python, as Triton's are",
    )
    source = (
        "Jung et al., Restructuring Batch Normalization to Accelerate CNN Training, MLSys 2019; "
        "the share as Daydream has it (Zhu et al., ATC 2020)"
    )
    keep: float = 0.5  # share of its time that batch normalisation keeps

    def apply(self, graph: Graph, setting: Setting) -> Graph:
        if not 0 <= self.keep <= 1:
            raise InputError(f"`{self}` keeps {self.keep} of the time", hint="use 0 to 1")
        norms = graph.select(kind="kernel", op=(*FORWARD, *BACKWARD))
        if not len(norms):
            raise DoesNotApply("the step has no batch normalisation")
        relus = beside(graph)
        with graph.edit(str(self)) as edit:
            edit.scale(norms, self.keep)
            edit.remove(relus)
            edit.remove(host_of(graph, relus))
            for ops, calls in zip((FORWARD, BACKWARD), passes()["python"]["norm"], strict=True):
                burden(edit, graph.select(kind="kernel", op=ops), calls - 1.0)
        return edit.graph


def beside(graph: Graph) -> Array:
    """ReLUs right behind a batch normalisation, and in the backward pass right before it."""
    found: list[int] = []
    for rank in np.unique(graph.rank).tolist():
        kernels = kernels_of(graph, rank)
        ops = ops_of(graph, kernels)
        for k, (first, second) in enumerate(pairwise(ops)):
            if first in FORWARD and second in RELU:
                found.append(int(kernels[k + 1]))
            elif first in RELU_BACKWARD and second in BACKWARD:
                found.append(int(kernels[k]))
    return np.array(found, np.int64)
