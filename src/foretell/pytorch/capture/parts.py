"""The kernels behind one operator: most run one, convolutions several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from foretell.pytorch.capture.flops import conv_work, flops_of
from foretell.pytorch.capture.words import bytes_of, moved_bytes


class Part(NamedTuple):
    """One kernel: which of its operator's, and what it computes and moves."""

    word: str
    flops: float
    bytes: float


def parts_of(op: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[Part, ...]:
    """The kernels of an operator, in the order they are launched."""
    if op == "convolution":
        return _conv(inputs, outputs)
    if op == "convolution_backward":
        return _conv_backward(inputs, outputs)
    return (Part("", flops_of(op, inputs, outputs), moved_bytes(op, inputs, outputs)),)


def _conv(inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[Part, ...]:
    """cuDNN adds no bias: a kernel of its own does."""
    out = outputs[0]
    moved = bytes_of(inputs[0]) + bytes_of(inputs[1]) + bytes_of(out)
    main = Part("conv", flops_of("convolution", inputs, outputs), moved)
    if inputs[2] is None:
        return (main,)
    return (main, Part("bias", float(out.numel()), 2 * bytes_of(out)))


def _conv_backward(inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[Part, ...]:
    grad, x, weight = inputs[:3]
    wanted = inputs[10]
    flops = conv_work(x, grad, weight, bool(inputs[7]))
    moved = bytes_of(grad) + bytes_of(x) + bytes_of(weight)
    every = (
        Part("dgrad", flops, moved),
        Part("wgrad", flops, moved),
        Part("bias", float(grad.numel()), bytes_of(grad)),
    )
    return tuple(part for part, is_in in zip(every, wanted, strict=True) if is_in)
