"""The kernels a task requests, as price models name them: op, shape and bytes.

Operators of a trace are spelled out by `foretell.cost.aten`. Traces of old say the sizes of inputs
and no other arguments; what is missing of a convolution is then guessed from the sizes alone.
"""

from __future__ import annotations

from functools import lru_cache

from foretell.cost.aten import Call, Dims, Kernel, kernels
from foretell.cost.aten import read as inputs_of
from foretell.cost.kernel import class_of, is_call
from foretell.cost.kernel import parse_shape as parse_shape
from foretell.cost.kernel import write_shape as write

# Until torch 1.10 the two gradients of a convolution were operators of their own.
_GRADIENTS = {
    "cudnn_convolution_backward_input": "conv_dgrad",
    "cudnn_convolution_backward_weight": "conv_wgrad",
}


@lru_cache(1 << 14)
def requested_kernels(op: str, shape: str) -> tuple[Kernel, ...]:
    """The kernels of one call of an operator; none where its shape is unknown."""
    if not is_call(shape):
        known = bool(shape) and class_of(op) != "bare"
        return (Kernel(op, write(dict(parse_shape(shape)))),) if known else ()
    call = inputs_of(op, shape)
    if not call.tensors():
        return ()
    found = kernels(op, shape)
    if "convolution" in op and found[0].op == "elementwise":
        return _convolutions(call) or found
    return found


def sizes_of(op: str, shape: str) -> dict[str, float]:
    """Sizes of a product, empty where it is none."""
    parts = requested_kernels(op, shape)
    return dict(parse_shape(parts[0].shape)) if parts and parts[0].op == "gemm" else {}


def first_input(op: str, shape: str) -> tuple[float, int]:
    """Elements of the first input and bytes of each, zero elements where they are not given."""
    if not is_call(shape):
        return 0.0, 4
    call = inputs_of(op, shape)
    there = call.tensors()
    return (float(call.size(0)), call.item(0)) if there and there[0] == 0 else (0.0, 4)


def largest_input(op: str, shape: str) -> float:
    """Elements of the largest input, zero where they are not given."""
    if not is_call(shape):
        return 0.0
    call = inputs_of(op, shape)
    return float(max((call.size(i) for i in call.tensors()), default=0))


def _convolutions(call: Call) -> tuple[Kernel, ...]:
    """Convolutions from the sizes of their tensors: strides from sizes, windows padded to keep."""
    tensors = [d for d in call.dims if len(d) == 4]
    if call.op == "convolution_backward" and len(tensors) >= 3:
        dy, x, w = tensors[:3]
        shape = _shape(x, w, _stride(x, dy))
        return (Kernel("conv_wgrad", shape), Kernel("conv_dgrad", shape))
    if len(tensors) < 2:
        return ()
    if call.op == "convolution":
        return (Kernel("conv", _shape(tensors[0], tensors[1], 1)),)
    return _gradient(_GRADIENTS.get(call.op, ""), tensors[0], tensors[1])


def _gradient(kind: str, dy: Dims, other: Dims) -> tuple[Kernel, ...]:
    """One gradient from that of the output and the filters, or the input."""
    if kind == "conv_dgrad":
        return (Kernel(kind, _shape((dy[0], other[1], *dy[2:]), other, 1)),)
    if kind == "conv_wgrad":
        stride = _stride(other, dy)
        return (Kernel(kind, _shape(other, (dy[1], other[1], stride, stride), stride)),)
    return ()


def _stride(x: Dims, y: Dims) -> int:
    return max(1, round(x[2] / max(1, y[2])))


def _shape(x: Dims, w: Dims, stride: int) -> str:
    keys = ("n", "c", "h", "w", "k", "r", "s", "stride", "pad", "groups")
    groups = max(1, x[1] // max(1, w[1]))
    values = (*x, w[0], *w[2:], stride, w[2] // 2, groups)
    return write(dict(zip(keys, map(float, values), strict=True)))
