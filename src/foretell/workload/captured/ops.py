"""One recorded call as ops of a workload: what it computes, keeps, and how it may be split.

Matmuls, convolutions, attention, norms, tables and losses become the kinds that built-in models
are made of (→ `words`, `windows`); everything else keeps its kernels (→ `recorded`).
"""

from __future__ import annotations

from collections.abc import Callable

from foretell.workload.captured.model import Model, Piece
from foretell.workload.captured.recorded import as_recorded
from foretell.workload.captured.roles import is_linear
from foretell.workload.captured.row import Row
from foretell.workload.captured.windows import batch_norm, convolved, mean, pool
from foretell.workload.captured.words import attention, batched, embedding, linear, loss, norm

_CASTS = ("torch.float32", "torch.bfloat16", "torch.float16")
_LOSSES = ("nll_loss_forward", "nll_loss2d_forward")


def pieces_of(model: Model, at: int, name: str) -> list[Piece]:
    """The ops and exchanges of one row."""
    row = model.rows[at]
    if at in model.roles.cores:
        return attention(model, at, name)
    if is_linear(row) and row.live:
        return linear(model, at, name)
    if row.op == "convolution" and row.live:
        return convolved(model, row, name)
    if row.op == "_log_softmax":
        return loss(model, at, name)
    rule = _RULES.get(row.op)
    if rule is not None and row.live:
        return rule(model, at, name)
    return [as_recorded(model, at, name, when=_when(model, row))]


def _when(model: Model, row: Row) -> str:
    """Which programs run a call too: those that hold halves cast nothing, as autocast does."""
    is_cast = row.op == "copy_" and any(value in _CASTS for value in row.call.values)
    if is_cast and "autocast" in model.graph.facts:
        return "eager"
    return "!fused" if row.op in _LOSSES else ""


_RULES: dict[str, Callable[[Model, int, str], list[Piece]]] = {
    "native_layer_norm": norm,
    "_fused_rms_norm": norm,
    "native_batch_norm": batch_norm,
    "max_pool2d_with_indices": pool,
    "avg_pool2d": pool,
    "max_pool3d_with_indices": pool,
    "avg_pool3d": pool,
    "embedding": embedding,
    "mean": mean,
    "bmm": batched,
    "baddbmm": batched,
    "_grouped_mm": batched,
}
