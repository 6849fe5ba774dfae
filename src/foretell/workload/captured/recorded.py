"""Calls that no kind of op stands for: the kernels that were recorded, by their size a sample."""

from __future__ import annotations

import math
from typing import Any

from foretell.workload.captured.model import Model, Piece, kept_of, leaf, named_dims, said
from foretell.workload.workload import Op, Tensor


def as_recorded(model: Model, at: int, name: str, *, when: str = "") -> Op:
    """A row with the kernels that were recorded for it."""
    row = model.rows[at]
    dims, splits = named_dims(model, at)
    n = math.prod(dims.values())
    whole = model.batch * n if row.live else n
    forward = tuple(k for i in row.tasks for k in said(model, i, whole))
    back = tuple(k for i in row.back for k in said(model, i, whole))
    saved = kept_of(model, row, (("batch",) if row.live else ()) + tuple(dims), dims)
    options: dict[str, Any] = {"forward": forward, "backward": back}
    if not row.live:
        options["once"] = True
    weights = tuple(
        Tensor(leaf(path, name), (), times=size) for path, size in (*row.weights, *row.tied)
    )
    return Op(name, "recorded", dims, splits, weights, saved, options=options, when=when)


def summed_back(model: Model, at: int, name: str, usual: tuple[str, ...]) -> list[Piece]:
    """Backward kernels of a row beside those its kind has: gradients of two users added up."""
    row = model.rows[at]
    more = [i for i in row.back if model.graph.text_of("op", i) not in usual]
    if not more:
        return []
    dims, splits = named_dims(model, at)
    whole = model.batch * math.prod(dims.values())
    back = tuple(k for i in more for k in said(model, i, whole))
    options = {"forward": (), "backward": back}
    return [Op(f"{name}.sum", "recorded", dims, splits, options=options, when="!fused")]
