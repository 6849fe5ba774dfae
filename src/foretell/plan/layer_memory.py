"""Per-rank memory of one layer: parameters, saved activations, stage output; an entry a layout.

Kept bytes are for one micro-batch and one layer. With full recompute a layer keeps its input alone;
selective recompute drops what attention keeps of its scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretell.plan.framework import Running
from foretell.plan.layouts import Array, Layouts
from foretell.workload import Layer, Op, Workload
from foretell.workload.op import KEPT, Tensor, holds

ATTENTION = "attention"
_SUMMED = ("weights", "experts", "kept", "scores", "brief", "frozen", "frozen_experts")
_SCORES = ("softmax", "mask", "dropped")  # what attention keeps besides queries, keys and values


@dataclass(frozen=True)
class LayerMemory:
    """One layer, an entry a layout; elements and bytes of one rank."""

    weights: Array  # elements that every data-parallel rank has
    experts: Array  # elements split over data-parallel ranks besides
    kept: Array  # bytes autograd keeps with nothing run again
    scores: Array  # bytes among them that selective recompute drops
    handed: Array  # bytes passed to the next layer
    brief: Array  # bytes that are there only while it runs
    largest: Array  # bytes of the largest single tensor kept: what is there twice for a moment
    frozen: Array  # elements of `weights` that are not trained
    frozen_experts: Array  # and of `experts`

    def trained(self) -> tuple[Array, Array]:
        """Elements that have gradients and optimizer state: of `weights` and of `experts`."""
        return self.weights - self.frozen, self.experts - self.frozen_experts


def holdings(workload: Workload, cells: Layouts) -> list[LayerMemory]:
    """What each layer holds once, for every cell."""
    return [_holding(workload, layer, cells) for layer in workload.layers]


def _holding(workload: Workload, layer: Layer, cells: Layouts) -> LayerMemory:
    degrees, batch = cells.degrees(), cells.column("micro_batch")
    zero = np.zeros(len(cells))
    sums = {name: zero.copy() for name in _SUMMED}
    largest = zero.copy()
    for run, rows in cells.by_profile():
        dtype = KEPT.get(run.formats.compute, run.formats.compute)
        for op in layer.works():
            if not holds(op.when, run.flags):
                continue
            op = run.op(op)
            sizes = op.sizes({k: v[rows] for k, v in degrees.items()}, batch[rows])
            dealt = cells.column("ep")[rows] > 1 if "ep" in op.splits else np.zeros(len(rows), bool)
            for weight in op.weights:
                size = weight.elements(sizes)
                sums["experts"][rows] += np.where(dealt, size, 0.0)
                sums["weights"][rows] += np.where(dealt, 0.0, size)
                if weight.frozen:
                    sums["frozen_experts"][rows] += np.where(dealt, size, 0.0)
                    sums["frozen"][rows] += np.where(dealt, 0.0, size)
            for tensor in op.brief:
                if holds(tensor.when, run.flags):
                    sums["brief"][rows] += tensor.bytes(sizes, dtype)
            for tensor in op.saved:
                if holds(tensor.when, run.flags):
                    size = tensor.bytes(sizes, _kept_in(op, tensor, dtype, run))
                    sums["kept"][rows] += size
                    largest[rows] = np.maximum(largest[rows], size)
                    if _is_score(op, tensor.name):
                        sums["scores"][rows] += size
    handed = layer.handed(degrees, batch, workload.dtype)
    return LayerMemory(**sums, handed=np.broadcast_to(handed, zero.shape), largest=largest)


def _kept_in(op: Op, tensor: Tensor, dtype: str, run: Running) -> str:
    """The format a saved tensor is kept in: under autocast the residual stream stays in fp32.

    Transformer Engine keeps the inputs of matmuls as it has cast them.
    """
    is_cast = op.kind in ("matmul", "experts") and not op.options.get("vocabulary")
    if is_cast and tensor.name == "input" and "fp8-weights" in run.flags:
        return run.formats.compute
    is_stream = op.kind == "norm" and tensor.name == "input"
    return "fp32" if is_stream and run.formats.casts else dtype


def _is_score(op: Op, name: str) -> bool:
    return op.kind == ATTENTION and name in _SCORES
