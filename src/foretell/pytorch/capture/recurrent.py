"""Recurrent layers as cuDNN runs them: one call forward and one backward, however many steps.

torch picks that way in C++ from the device; here the same operator is called by hand. It has no
fake form of its own for the backward pass, so the shapes of its gradients are answered here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  # cuDNN's numbers
KINDS = tuple(_MODES)


_ARGUMENTS = 9  # of a recurrent layer, packed or not


def is_recurrent(name: str, args: Sequence[Any]) -> bool:
    """Whether a call is of a recurrent layer."""
    return name in KINDS and len(args) == _ARGUMENTS and args[0].is_floating_point()


def recurrent(kind: str, cast: Callable[..., tuple[Tensor, ...]], *args: Any) -> tuple[Any, ...]:
    """Outputs of `torch.lstm`, `torch.gru` and `torch.rnn_*`, for padded or packed sequences."""
    if isinstance(args[1], Tensor) and not args[1].is_floating_point():
        input, sizes, *rest = args
        return _run(kind, cast, (input, *rest, False), sizes.tolist())
    return _run(kind, cast, args, [])


def _run(
    kind: str, cast: Callable[..., tuple[Tensor, ...]], args: Sequence[Any], sizes: list[int]
) -> tuple[Any, ...]:
    input, hx, weights, has_biases, layers, dropout, train, bidirectional, batch_first = args
    hidden, cell = (hx[0], hx[1]) if kind == "lstm" else (hx, None)
    each = len(weights) // (layers * (2 if bidirectional else 1))
    input, hidden, *weights = cast(input, hidden, *weights)
    cell = cast(cell)[0] if cell is not None else None
    size, projected = _sizes(weights, each, has_biases, hidden)
    flat = weights[0].detach()  # stands for the buffer that all weights are views of
    out, new, state, *_ = aten._cudnn_rnn(
        input, weights, each, flat, hidden, cell, _MODES[kind], size, projected, layers,
        batch_first, dropout, train, bidirectional, sizes, None,
    )  # fmt: skip
    return (out, new, state) if kind == "lstm" else (out, new)


def _sizes(
    weights: Sequence[Tensor], each: int, has_biases: bool, hidden: Tensor
) -> tuple[int, int]:
    """Width of the state, and of what it is projected to (0 where it is not)."""
    if each == (5 if has_biases else 3):
        return int(weights[each - 1].shape[1]), int(hidden.shape[-1])
    return int(hidden.shape[-1]), 0


def gradients(func: Any, input: Tensor, weight: Sequence[Tensor], *rest: Any) -> tuple[Any, ...]:
    """Tensors like those that `_cudnn_rnn_backward` makes."""
    hidden, cell = rest[2], rest[3]
    return (
        torch.empty_like(input),
        torch.empty_like(hidden),
        torch.empty_like(cell) if cell is not None else torch.empty_like(hidden),
        [torch.empty_like(w) for w in weight],
    )
