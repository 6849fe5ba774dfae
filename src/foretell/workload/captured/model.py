"""A whole recorded step, and lookups of its rows: sizes, formats, kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretell.cost.aten import kernels
from foretell.cost.shape import parse
from foretell.graph import Graph
from foretell.workload.captured.roles import Roles
from foretell.workload.captured.rows import PRODUCTS, Row
from foretell.workload.models import transformer
from foretell.workload.models.windows import Image, splits_of
from foretell.workload.workload import BYTES, Exchange, Op, Tensor

Piece = Op | Exchange


@dataclass
class Model:
    """The whole step while its rows are turned into ops."""

    graph: Graph
    rows: Sequence[Row]
    roles: Roles
    batch: int
    dtype: str
    tokens: int  # of a sample; 1 where it has none
    images: bool  # convolutions, and nothing that attends
    last_image: int = -1  # the last row that looks at more than one pixel
    whole: bool = False  # images are no longer split from here on
    first: bool = True  # no convolution came yet

    def per_sample(self, size: float) -> float:
        return size / self.batch


def named_dims(model: Model, at: int) -> tuple[dict[str, float], dict[str, str]]:
    """Named sizes of one sample of what a row makes, and what may split them."""
    row = model.rows[at]
    if not row.live:
        return {"n": max(row.size, 1.0)}, {}
    n = model.per_sample(row.size)
    image = image_of(row)
    if model.images and image and row.out[0] == model.batch:
        return image.dims(), {} if model.whole else splits_of(image)
    if model.tokens > 1 and n >= model.tokens and n % model.tokens == 0:
        dims = {"tokens": float(model.tokens), "cols": n / model.tokens}
        if at in model.roles.inside:
            return dims, {"tp": "cols", "cp": "tokens"}
        return dims, dict(transformer.ROWS) if model.roles.row else {"cp": "tokens"}
    return {"n": max(n, 1.0)}, {"tp": "n"} if at in model.roles.inside else {}


def image_of(row: Row) -> Image | None:
    """Channels and sides of what a row makes, where that is an image."""
    dims = row.out
    if len(dims) not in (4, 5):
        return None
    return Image(dims[1], *dims[-2:], *dims[2:-2])


def kernels_of(model: Model, task: int, n: float) -> list[tuple[Any, ...]]:
    """Kernels of a task for `foretell.workload.kernels`: class, shape by size, bytes, format."""
    graph = model.graph
    op, shape, dtype = (graph.text_of(c, task) for c in ("op", "shape", "dtype"))
    if not shape.startswith("in="):
        return []
    moved, flops = float(graph.bytes[task]), float(graph.flops[task])
    found = []
    for kernel in kernels(op, shape, moved, flops):
        sizes = dict(parse(kernel.shape))
        scaled = ("m",) if kernel.op == "gemm" else ("n", "rows")
        grows = tuple((k, v / n) for k, v in sizes.items() if k in scaled)
        fixed = tuple((k, v) for k, v in sizes.items() if k not in scaled)
        own = "" if is_usual(dtype, model.dtype) else priced_as(dtype)
        size = kernel.bytes / n * (1.0 if own else 2.0 / BYTES[priced_as(dtype)])
        work = _work(sizes) / n if kernel.op == "gemm" else 0.0
        found += [(kernel.op, grows, fixed, size, own, work)] * int(kernel.times)
    return found


def _work(sizes: Mapping[str, float]) -> float:
    """Operations of a product."""
    return 2.0 * math.prod(sizes.get(k, 1.0) for k in "bmnk")


def is_usual(dtype: str, main: str) -> bool:
    return dtype == main or {dtype, main} == {"fp32", "tf32"}


def priced_as(dtype: str) -> str:
    return dtype if dtype in ("fp64", "fp32", "tf32", "fp16", "bf16") else "fp32"


def own_dtype(model: Model, row: Row) -> str:
    """The format of a row where it is not the workload's."""
    return "" if is_usual(row.dtype, model.dtype) else priced_as(row.dtype)


def width(model: Model) -> float:
    return BYTES[model.dtype]


def weights_of(
    row: Row, name: str, first: tuple[str, ...], second: tuple[str, ...]
) -> tuple[Tensor, ...]:
    """The parameters of a row by the dims of its op: the matrix first, then the bias."""
    found: list[Tensor] = []
    for path, size in (*row.tied, *row.weights):
        is_matrix = size == _matrix(row) and all(t.dims != first for t in found)
        found.append(Tensor(leaf(path, name), first if is_matrix else second))
    return tuple(found)


def _matrix(row: Row) -> float:
    """Elements of the parameter that a call multiplies with or looks up in."""
    at = {"convolution": 1, "embedding": 0}.get(row.op, -1)
    if row.op in PRODUCTS:
        at = PRODUCTS[row.op] + 1
    return float(row.call.size(at)) if at >= 0 else row.reads[0]


def leaf(path: str, name: str) -> str:
    return f"{name}.{path.rpartition('.')[2]}"


def kept_of(
    model: Model, row: Row, dims: tuple[str, ...], sizes: Mapping[str, float]
) -> tuple[Tensor, ...]:
    """Outputs of the row that are saved until the backward pass."""
    if not row.kept:
        return ()
    own = own_dtype(model, row)
    per = row.kept / (model.batch if "batch" in dims else 1)
    size = math.prod(sizes[d] for d in dims if d != "batch")
    wide = BYTES[own] if own else width(model)
    return (Tensor("output", dims, own, times=per / wide / size),)


def as_recorded(model: Model, at: int, name: str, *, when: str = "") -> Op:
    """A row with the kernels that were recorded for it."""
    row = model.rows[at]
    dims, splits = named_dims(model, at)
    n = math.prod(dims.values())
    whole = model.batch * n if row.live else n
    forward = tuple(k for i in row.tasks for k in kernels_of(model, i, whole))
    back = tuple(k for i in row.back for k in kernels_of(model, i, whole))
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
    back = tuple(k for i in more for k in kernels_of(model, i, whole))
    options = {"forward": (), "backward": back}
    return [Op(f"{name}.sum", "recorded", dims, splits, options=options, when="!fused")]
