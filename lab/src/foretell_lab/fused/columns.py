"""What is known of a region's ops without running them: the columns `foretell.cost.fused` takes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from foretell.cost.fused_regions import Regions, assembled, codes_of, kind_of, word_of
from foretell_lab.fused.build import decoded, operator
from foretell_lab.fused.region import Entry, Op, Region, references

Tensor = Any
_NAMES = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float64": "fp64",
    "uint8": "int8",
}


def columns(regions: Sequence[Region], seconds: Sequence[Sequence[float]] | None = None) -> Regions:
    """Regions as columns; `seconds` are the times of their ops alone, where measured."""
    rows = [described(r, seconds[i] if seconds else None) for i, r in enumerate(regions)]
    return assembled(rows)


def described(
    region: Region, seconds: Sequence[float] | None = None
) -> tuple[list[tuple[Any, ...]], list[tuple[int, int, int]]]:
    """One region's nodes and edges; entries come first, as nodes too."""
    values = results(region)
    written = _written(region, values)
    nodes = [_entry_node(v[0], i) for i, v in enumerate(values[: len(region.entries)])]
    edges: list[tuple[int, int, int]] = []
    for k, op in enumerate(region.ops):
        i = len(region.entries) + k
        sources = [(v, values[v][max(r, 0)]) for v, r in references([op.args, op.kwargs])]
        alone = float("nan") if seconds is None else seconds[k]
        nodes.append(_node(op, [t for _, t in sources], values[i], written.get(i, 0.0), alone))
        edges += [(v, i, _pattern(t, sources, values[i])) for v, t in sources]
    return nodes, edges


def results(region: Region) -> list[list[Tensor]]:
    """Every value of a region as tensors without memory."""
    values: list[list[Tensor]] = [[_without_memory(e)] for e in region.entries]
    with torch.no_grad():
        for op in region.ops:
            args, kwargs = (
                decoded(a, lambda r: values[r[1]][max(r[2], 0)], "meta")
                for a in (op.args, op.kwargs)
            )
            made = operator(op.name)(*args, **kwargs)
            values.append(list(made) if isinstance(made, (tuple, list)) else [made])
    return values


def _without_memory(entry: Entry) -> Tensor:
    dtype = getattr(torch, entry.dtype)
    return torch.empty_strided(entry.shape, entry.stride, dtype=dtype, device="meta")


def _written(region: Region, values: list[list[Tensor]]) -> dict[int, float]:
    """Bytes of each value that leave the region."""
    found: dict[int, float] = {}
    for value, result in set(region.outputs):
        t = values[value][max(result, 0)]
        if t is not None:
            found[value] = found.get(value, 0.0) + float(t.numel() * t.element_size())
    return found


def dtype_name(t: Tensor) -> str:
    name = str(t.dtype).removeprefix("torch.")
    return _NAMES.get(name, name)


def dtype_size(name: str) -> float:
    """Bytes of an element, by torch's name of its format."""
    return float(getattr(torch, name).itemsize)


def _entry_node(t: Tensor, i: int) -> tuple[Any, ...]:
    size = float(_extent(t))
    word = "fresh" if i == 0 and t.is_floating_point() else "input"
    return _row(word, dtype_name(t), size, size, 1.0, 0, _last(t), 0.0, 0.0, float("nan"))


def _row(word: str, dtype: str, *numbers: float) -> tuple[Any, ...]:
    return (int(codes_of([word])[0]), dtype, *numbers)


def _extent(t: Tensor) -> int:
    """Elements of memory behind a tensor: what is expanded counts once."""
    return prod(n for n, s in zip(t.shape, t.stride(), strict=True) if s)


def _last(t: Tensor) -> float:
    """How many elements lie side by side: the extent of the dimension of stride one."""
    return float(max((n for n, s in zip(t.shape, t.stride(), strict=True) if s == 1), default=1))


def _node(
    op: Op, sources: list[Tensor], made: list[Tensor], written: float, alone: float
) -> tuple[Any, ...]:
    word = word_of(op.name)
    given = [t for t in made if t is not None] or sources[:1]
    main = max(given, key=lambda t: t.numel())
    small = kind_of(word) in ("view", "gather", "constant")  # these visit what they give, no more
    largest = main if small else max([main, *sources], key=lambda t: t.numel())
    inner, across = _reduced(word, op, sources, made)
    flops = _flops(word, sources, made)
    size = float(given[0].numel())
    return _row(
        word, dtype_name(given[0]), size, float(largest.numel()), inner, across, _last(largest),
        written, flops, alone,
    )  # fmt: skip


def _reduced(word: str, op: Op, sources: list[Tensor], made: list[Tensor]) -> tuple[float, int]:
    """How many places become one, and whether they lie apart in memory."""
    if not sources or max(t.dim() for t in sources) == 0:
        return 1.0, 0
    x = sources[1] if word == "batch_norm_backward" else max(sources, key=lambda t: t.numel())
    if word in ("batch_norm", "batch_norm_backward"):
        return float(x.numel() // x.shape[1]), 1 + int(x.stride(1) == 1)
    if word in ("group_norm", "group_norm_backward"):
        return float(x.numel() // (x.shape[0] * 32)), 2 * int(x.stride(1) == 1 and x.dim() > 2)
    if word in ("layer_norm", "layer_norm_backward"):
        width = made[0].shape[-1] if made[0] is not None else x.shape[-1]
        return float(width), 0
    if "softmax" in word:
        dim = next(a for a in op.args if isinstance(a, int))
        return float(x.shape[dim]), int(x.stride(dim) != 1)
    if kind_of(word) == "reduction":
        return _sum_dims(op, x, made[0])
    if kind_of(word) == "window":
        few, many = sorted((float(x.numel()), float(made[0].numel())))
        return max(1.0, many / max(few, 1.0)), 0
    return 1.0, 0


def _sum_dims(op: Op, x: Tensor, made: Tensor) -> tuple[float, int]:
    dims = next((a for a in op.args[1:] if isinstance(a, list) and a and a[0] != "%"), None)
    reduced = {d % x.dim() for d in dims} if dims and x.dim() else set(range(x.dim()))
    near = [d for d in range(x.dim()) if x.stride(d) == 1 and x.shape[d] > 1]
    across = int(bool(near) and near[0] not in reduced)
    return max(1.0, x.numel() / max(1, made.numel())), across


def _flops(word: str, sources: list[Tensor], made: list[Tensor]) -> float:
    """Floating-point operations of matmuls and convolutions; 0 for all else."""
    if word in ("mm", "bmm", "addmm", "baddbmm"):
        deep = sources[-1].shape[-2]
        return float(2 * made[0].numel() * deep)
    if word == "convolution":
        return float(2 * made[0].numel() * prod(sources[1].shape[1:]))
    return 0.0


def _pattern(t: Tensor, sources: list[tuple[int, Tensor]], made: list[Tensor]) -> int:
    """0 read in the order it is looped over, 1 broadcast, 2 where others lie side by side."""
    out = next((m for m in made if m is not None), None)
    largest = max(
        [s for _, s in sources] + ([out] if out is not None else []), key=lambda s: s.numel()
    )
    if t.numel() < largest.numel() or 0 in t.stride():
        return 1
    near = _near(t), None if out is None else _near(out)
    same = out is None or out.shape != t.shape or None in near or near[0] == near[1]
    return 0 if same else 2


def _near(t: Tensor) -> int | None:
    """The dimension whose elements lie side by side."""
    wide = [(s, d) for d, (n, s) in enumerate(zip(t.shape, t.stride(), strict=True)) if n > 1]
    return min(wide)[1] if wide else None
