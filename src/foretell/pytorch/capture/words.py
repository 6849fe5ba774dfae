"""Operators as a trace describes them: op, inputs, number format, bytes and flops.

    in=64x3x224x224+64x3x7x7+-,types=float+float+…,args=-+-+-+2x2+3x3,strides=…

`args` are plain values in the order of the operator's schema; `strides` is there only where an
input does not lie in memory row by row.

Floating-point operations of operators, from the sizes of what they are given and make. Matrix work
is counted as torch.utils.flop_counter does (two for a multiplication and an addition), but for
causal attention, which computes half of its scores. Operators that it does not know are counted by
the matmuls behind them; everything else counts one an element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foretell.graph import Dtype
from foretell.operators import FORMATS, OPERATORS, having, places, rules
from foretell.trace.words import canonical

Rule = Callable[[Sequence[Any], Sequence[Tensor]], float]


_KNOWN = {getattr(torch, f.torch): f for f in reversed(FORMATS)}
# What the dispatcher sees, and the innermost operator that a trace of the same call shows.
_INNERMOST = having("inner")


class _Attention(NamedTuple):
    """Attention as its innermost operator is called, and where dropout and causality are in it."""

    turned: bool  # it sees (batch, sequence, heads, width)
    source: tuple[int, ...]  # dropout and causality among what the outer one is given
    target: tuple[int, ...]


def _inside(outer: str, source: str) -> _Attention:
    _, _, sequence, _, mask, dropout = OPERATORS[_INNERMOST[outer]]["kernel"].split()
    return _Attention(sequence == "1", places(source), (int(dropout), int(mask)))


_ATTENTION = {op: _inside(op, text) for op, text in having("dropout_causal").items()}
# Those that only write, and those that read of their first input only what others point to.
_FILLS, _GATHERS = having("reads", "nothing"), having("reads", "rows")


def flops_of(op: str, inputs: Sequence[Any], outputs: Sequence[Tensor]) -> float:
    """Floating-point operations of an operator; one an element where no formula is known."""
    if op in _FLOPS:
        return _FLOPS[op](inputs, outputs)
    return float(sum(t.numel() for t in outputs if t.is_floating_point() or t.is_complex()))


def grouped_shape(a: Tensor, b: Tensor, offs: Tensor | None, *_: Any) -> tuple[int, ...]:
    """Output shape of a grouped matmul: rows, columns or the inner dim are split into groups."""
    if a.dim() == 2 and b.dim() == 2 and offs is not None:
        return (int(offs.shape[0]), int(a.shape[0]), int(b.shape[1]))
    if a.dim() == 3 and b.dim() == 3:
        return (*map(int, a.shape[:2]), int(b.shape[2]))
    return (int(a.shape[-2]), int(b.shape[-1]))


def _product(first: int) -> Rule:
    """Every element made is a sum over the side that two factors share."""
    return lambda inputs, outputs: 2.0 * outputs[0].numel() * int(inputs[first].shape[-1])


def _grouped(inputs: Sequence[Any], outputs: Sequence[Tensor]) -> float:
    """Rows × inner × columns, however they are cut into groups; a matrix each where both have."""
    a, b = inputs[0], inputs[1]
    many = int(a.shape[0]) if a.dim() == b.dim() == 3 else 1
    return 2.0 * many * int(a.shape[-2]) * int(a.shape[-1]) * int(b.shape[-1])


def _summed(inputs: Sequence[Any], outputs: Sequence[Tensor]) -> float:
    """A batch of matmuls added up."""
    return float(2.0 * int(inputs[1].numel()) * int(inputs[2].shape[-1]))


def _vectors(first: int) -> Rule:
    """A product with a vector: each element of the factor is used once."""
    return lambda inputs, outputs: 2.0 * int(inputs[first].numel())


def _distances(inputs: Sequence[Any], outputs: Sequence[Tensor]) -> float:
    return 3.0 * int(outputs[0].numel()) * int(inputs[0].shape[-1])


def _conv(inputs: Sequence[Any], outputs: Sequence[Tensor]) -> float:
    return conv_work(inputs[0], outputs[0], inputs[1], bool(inputs[6]))


def _conv_backward(inputs: Sequence[Any], outputs: Sequence[Tensor]) -> float:
    ways = sum(bool(wanted) for wanted in inputs[10][:2])
    return ways * conv_work(inputs[1], inputs[0], inputs[2], bool(inputs[7]))


def conv_work(x: Tensor, out: Tensor, weight: Tensor, turned: bool) -> float:
    """A window for each pixel that is made; a transposed one spreads each pixel it is given."""
    pixels = x if turned else out
    return 2.0 * int(pixels.numel()) * int(math.prod(weight.shape[1:]))


def _attention(first: int, causal: int) -> Rule:
    """Two matmuls of queries and keys forward, five backward; half of it where causal."""

    def flops(inputs: Sequence[Any], outputs: Sequence[Tensor]) -> float:
        q, k, v = inputs[first : first + 3]
        scores = float(q.numel() // int(q.shape[-1])) * int(k.shape[-2])
        wide, out = int(q.shape[-1]), int(v.shape[-1])
        work = 2.0 * scores * (3 * wide + 2 * out if first else wide + out)
        return work * (0.5 if inputs[causal] else 1.0)

    return flops


def _recurrent(ways: float) -> Rule:
    """Every token meets every weight matrix once forward, twice backward."""

    def flops(inputs: Sequence[Any], outputs: Sequence[Tensor]) -> float:
        tokens = int(inputs[0].numel()) // int(inputs[0].shape[-1])
        matrices = inputs[1] if isinstance(inputs[1], (list, tuple)) else inputs[1:5]
        return 2.0 * ways * tokens * sum(int(w.numel()) for w in matrices if w.dim() == 2)

    return flops


def _bags(first: int) -> Rule:
    """Rows of a table added up: one an element that is looked up."""
    return lambda inputs, outputs: float(int(inputs[first].numel()) * int(outputs[0].shape[-1]))


def _fourier(inputs: Sequence[Any], outputs: Sequence[Tensor]) -> float:
    """5 n log2 n of a complex transform, half of it where one side is real (fftw.org/speed)."""
    larger = max(inputs[0], outputs[0], key=lambda t: t.numel())
    n = math.prod(int(larger.shape[i]) for i in inputs[1])
    share = 1.0 if inputs[0].is_complex() and outputs[0].is_complex() else 0.5
    return float(share * 5.0 * int(larger.numel()) * math.log2(max(n, 2)))


_FLOPS: dict[str, Rule] = rules("flops", globals(), "_")


def op_word(func: Any) -> str:
    """The word a trace has for an operator: `aten._to_copy.default` → `copy_`."""
    name = func._schema.name.partition("::")[2] or func._schema.name
    return canonical(_INNERMOST.get(name, name))


def inputs_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """All inputs in the order of the schema, those nothing gave as their default."""
    left = func._schema.arguments[len(args) :]
    defaults = ((a.name, a.default_value if a.has_default_value() else None) for a in left)
    return [*args, *(kwargs.get(name, default) for name, default in defaults)]


def shape_text(func: Any, inputs: Sequence[Any]) -> str:
    """The inputs of an operator as text."""
    name = func._schema.name.partition("::")[2]
    if name in _ATTENTION:
        return _attention_text(inputs, *_ATTENTION[name])
    apart = [isinstance(x, Tensor) and not x.is_contiguous() for x in inputs]
    pairs = zip(inputs, apart, strict=True)
    strides = ["x".join(map(str, x.stride())) if is_so else "-" for x, is_so in pairs]
    layout = f",strides={'+'.join(strides)}" if any(apart) else ""
    parts = ["+".join(f(x) for x in inputs) for f in (_dims_text, _type_text, _value_text)]
    return f"in={parts[0]},types={parts[1]},args={parts[2]}{layout}"


def _attention_text(
    inputs: Sequence[Any], turned: bool, source: Sequence[int], target: Sequence[int]
) -> str:
    """Attention as its innermost operator is called: dropout and causality where it has them."""
    is_heads = [turned and isinstance(x, Tensor) and x.dim() == 4 for x in inputs]
    rows = [x.transpose(1, 2) if wide else x for x, wide in zip(inputs, is_heads, strict=True)]
    width = max(len(rows), target[1] + 1)
    tensors = [x if isinstance(x, Tensor) else None for x in rows] + [None] * (width - len(rows))
    values = ["-"] * width
    for come, go in zip(source, target, strict=True):
        values[go] = _value_text(inputs[come])
    dims, types = "+".join(map(_dims_text, tensors)), "+".join(map(_type_text, tensors))
    return f"in={dims},types={types},args={'+'.join(values)}"


def _dims_text(x: Any) -> str:
    if isinstance(x, Tensor):
        return "x".join(map(str, x.shape)) or "-"
    if _is_tensors(x):
        return "|".join(map(_dims_text, x))
    return "-"


def _type_text(x: Any) -> str:
    if isinstance(x, Tensor):
        return _KNOWN[x.dtype].traced if x.dtype in _KNOWN else str(x.dtype).removeprefix("torch.")
    if _is_tensors(x):
        return "TensorList"
    if isinstance(x, (list, tuple)):
        return "ScalarList"
    return "-" if x is None or isinstance(x, torch.dtype | str) else "Scalar"


def _value_text(x: Any) -> str:
    if x is None or isinstance(x, Tensor) or _is_tensors(x):
        return "-"
    text = "x".join(map(str, x)) if isinstance(x, (list, tuple)) else str(x)
    return text.replace(", ", "x").replace(",", "x").replace("+", "") or "-"


def _is_tensors(x: Any) -> bool:
    return isinstance(x, (list, tuple)) and any(isinstance(t, Tensor) for t in x)


def tensors_in(values: Any) -> list[Tensor]:
    """All tensors of inputs, outputs or a batch, also those in lists and mappings."""
    if isinstance(values, Tensor):
        return [values]
    inner = values.values() if isinstance(values, Mapping) else values
    if isinstance(values, (Mapping, list, tuple)):
        return [t for v in inner for t in tensors_in(v)]
    return []


def format_of(tensors: Sequence[Tensor]) -> Dtype:
    """The first floating-point format, else the first of all."""
    words = [_KNOWN[t.dtype].word.upper() if t.dtype in _KNOWN else "" for t in tensors]
    known = [Dtype.__members__.get(word, Dtype.NONE) for word in words]
    floats = [d for d in known if Dtype.NONE < d <= Dtype.FP8]
    return (floats or known or [Dtype.NONE])[0]


def bytes_of(tensor: Tensor) -> float:
    """Bytes behind a tensor; what is expanded is read once."""
    spread = math.prod(n for n, s in zip(tensor.shape, tensor.stride(), strict=True) if s)
    return float(spread * tensor.element_size())


def moved_bytes(op: str, inputs: Sequence[Any], outputs: Sequence[Tensor]) -> float:
    """Bytes an operator reads and writes."""
    made = sum(map(bytes_of, outputs))
    if op in _FILLS:
        return made
    if op in _GATHERS:  # of the table only what is looked up
        return 2 * made + sum(map(bytes_of, tensors_in(inputs)[1:]))
    return made + sum(map(bytes_of, tensors_in(inputs)))
