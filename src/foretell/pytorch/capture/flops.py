"""Floating-point operations of operators, from the sizes of what they are given and make.

Matrix work is counted as torch.utils.flop_counter does (two for a multiplication and an addition),
but for causal attention, which computes half of its scores. Operators that it does not know are
counted by the matmuls behind them; everything else counts one an element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

Rule = Callable[[Sequence[Any], Sequence[Tensor]], float]


def flops_of(op: str, inputs: Sequence[Any], outputs: Sequence[Tensor]) -> float:
    """Floating-point operations of an operator; one an element where no formula is known."""
    if op in _FLOPS:
        return _FLOPS[op](inputs, outputs)
    return float(sum(t.numel() for t in outputs if t.is_floating_point() or t.is_complex()))


def grouped_shape(a: Tensor, b: Tensor, offs: Tensor | None, *_: Any) -> tuple[int, ...]:
    """What a grouped product makes: rows, columns or the shared side are cut into groups."""
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


_FLOPS: dict[str, Rule] = {
    **dict.fromkeys(("mm", "bmm", "_int_mm", "_scaled_mm"), _product(0)),
    **dict.fromkeys(("addmm", "baddbmm", "_addmm_activation"), _product(1)),
    **dict.fromkeys(("linear", "mkldnn_linear"), _product(0)),
    **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm"), _grouped),
    "addbmm": _summed,
    **dict.fromkeys(("mv", "dot", "vdot"), _vectors(0)),
    **dict.fromkeys(("addmv", "addr"), _vectors(1)),
    "_cdist_forward": _distances,
    **dict.fromkeys(("_cudnn_rnn", "mkldnn_rnn_layer", "miopen_rnn"), _recurrent(1.0)),
    **dict.fromkeys(
        ("_cudnn_rnn_backward", "mkldnn_rnn_layer_backward", "miopen_rnn_backward"),
        _recurrent(2.0),
    ),
    "_embedding_bag": _bags(1),
    **dict.fromkeys(("_fft_r2c", "_fft_c2c", "_fft_c2r"), _fourier),
    "convolution": _conv,
    "convolution_backward": _conv_backward,
    "_efficient_attention_forward": _attention(0, 6),
    "_efficient_attention_backward": _attention(1, 11),
    "_cudnn_attention_forward": _attention(0, 6),
    "_cudnn_attention_backward": _attention(1, 14),
    "_flash_attention_forward": _attention(0, 4),
    "_flash_attention_backward": _attention(1, 11),
    "_scaled_dot_product_flash_attention_for_cpu": _attention(0, 4),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention(1, 7),
    "_scaled_dot_product_fused_attention_overrideable": _attention(0, 5),
}
