"""Pairs of rows that differ in one thing: number format, memory layout, batch.

What a what-if asks of a table is not a time but a ratio of two, and ratios of rows measured side by
side carry less noise than times do. `kind` names the class of work a row belongs to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from foretell_lab.bench.case import Case
from foretell_lab.bench.table import Row

STREAMS = {
    "activation": "relu gelu gelu_tanh silu hardswish hardsigmoid sigmoid tanh leaky_relu relu6 elu"
    " mish softplus exp pow",
    "arithmetic": "add sub mul div add_ mul_ where masked_fill",
    "update piece": "addcmul_ addcdiv_ lerp_ sqrt rsqrt add_alpha_ zero_ fill_",
    "reduction": "sum mean amax norm var",
    "pooling": "max_pool avg_pool adaptive_pool",
    "resizing": "nearest bilinear",
    "gather or scatter": "index_select gather index_put scatter_add",
    "embedding": "embedding embedding_bag",
    "join or shift": "cat roll pad",
    "recurrent": "lstm gru",
}
_CLASS = {op: name for name, ops in STREAMS.items() for op in ops.split()}


@dataclass(frozen=True)
class Pair:
    """Two rows of one kind: the ratio of their times, and the time of the first."""

    kind: str
    ratio: float
    seconds: float


def kind(case: Case) -> str:
    """The class of work of a case, with its direction."""
    name = _CLASS.get(case.op, case.op)
    if case.op in ("conv2d", "conv3d", "convt2d"):
        name = f"{case.op} {_filter(case)}"
    if case.op == "attention":
        name = f"attention {case.layout}"
    return f"{name} {case.direction}"


def _filter(case: Case) -> str:
    if case["groups"] > 1:
        return "depthwise" if case["groups"] == case["c"] else "grouped"
    widest = max(case["r"], case["s"])
    return {1: "1x1", 3: "3x3"}.get(widest, "larger")


def pairs(rows: Iterable[Row], change: Callable[[Case], Case | None]) -> list[Pair]:
    """Every row beside the row of its changed case, where both were measured."""
    timed = {row.case: row for row in rows if row.seconds > 0 and not math.isnan(row.seconds)}
    found = []
    for case, row in timed.items():
        other = change(case)
        if other is not None and other in timed:
            found.append(Pair(kind(case), timed[other].seconds / row.seconds, row.seconds))
    return found


def dtype_change(old: str, new: str) -> Callable[[Case], Case | None]:
    """From one number format to another."""
    return lambda case: replace(case, dtype=new) if case.dtype == old else None


def layout_change(dtype: str) -> Callable[[Case], Case | None]:
    """From channels second to channels last, in one format."""
    return lambda case: (
        replace(case, layout="nhwc") if (case.layout, case.dtype) == ("nchw", dtype) else None
    )


def twice_the_batch(case: Case) -> Case | None:
    """The same work on twice the batch."""
    name = {"linear": "m", "conv2d": "n", "batch_norm": "n", "layer_norm": "m"}.get(case.op)
    if name is None:
        return None
    shape = tuple((k, 2 * v if k == name and isinstance(v, int) else v) for k, v in case.shape)
    return replace(case, shape=shape)
