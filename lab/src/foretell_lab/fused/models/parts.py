"""Layers with their precision spelled out, as autocast would place the casts on a GPU.

fp32    everything in fp32
bf16    parameters and activations in bf16
amp     fp32 parameters, matmuls in bf16, norms, softmax and losses in fp32
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

Tensor = Any
PRECISIONS = ("fp32", "bf16", "amp")
_HALF = torch.bfloat16


def stored(precision: str) -> torch.dtype:
    """The format parameters are kept in."""
    return _HALF if precision == "bf16" else torch.float32


def half(precision: str, *tensors: Tensor) -> Any:
    """Tensors as a matmul takes them."""
    given = [t.to(_HALF) if precision == "amp" and t is not None else t for t in tensors]
    return given[0] if len(given) == 1 else given


def wide(precision: str, x: Tensor) -> Tensor:
    """A tensor as a norm, softmax or loss takes it."""
    return x.float() if precision == "amp" else x


def noise(*shape: int, precision: str, grad: bool = False) -> Tensor:
    """A tensor of activations."""
    return torch.randn(shape, dtype=stored(precision)).requires_grad_(grad)


class Linear(nn.Module):  # type: ignore[misc]
    """A linear layer."""

    def __init__(self, wide_in: int, wide_out: int, precision: str, bias: bool = True) -> None:
        super().__init__()
        self.precision = precision
        self.weight = nn.Parameter(torch.empty(wide_out, wide_in, dtype=stored(precision)))
        self.bias = nn.Parameter(torch.empty(wide_out, dtype=stored(precision))) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(*half(self.precision, x, self.weight, self.bias))


class Conv(nn.Module):  # type: ignore[misc]
    """A convolution, its padding half the filter."""

    def __init__(
        self, c: int, k: int, size: int, precision: str, stride: int = 1, groups: int = 1,
        bias: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.precision, self.stride, self.groups, self.pad = precision, stride, groups, size // 2
        self.weight = nn.Parameter(torch.empty(k, c // groups, size, size, dtype=stored(precision)))
        self.bias = nn.Parameter(torch.empty(k, dtype=stored(precision))) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        x, weight, bias = half(self.precision, x, self.weight, self.bias)
        return F.conv2d(x, weight, bias, self.stride, self.pad, 1, self.groups)


class Scale(nn.Module):  # type: ignore[misc]
    """The parameters of a norm."""

    def __init__(self, width: int, precision: str, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=stored(precision)))
        self.bias = nn.Parameter(torch.zeros(width, dtype=stored(precision))) if bias else None
        self.precision, self.width = precision, width


class LayerNorm(Scale):
    """Layer norm over the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(wide(self.precision, x), (self.width,), self.weight, self.bias)


class BatchNorm(Scale):
    """Batch norm by the batch's own statistics; running ones are not kept."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.float(), cast(Tensor, self.bias).float()
        return F.batch_norm(x, None, None, weight, bias, training=True)


class RmsNorm(Scale):
    """Root-mean-square norm, written out as models do."""

    def __init__(self, width: int, precision: str) -> None:
        super().__init__(width, precision, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype)


class GroupNorm(Scale):
    """Group norm of 32 groups."""

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(wide(self.precision, x), 32, self.weight, self.bias)


def dropout(x: Tensor, p: float) -> Tensor:
    """Dropout as the kernel of a GPU does it."""
    return torch.native_dropout(x, p, True)[0] if p > 0 else x


def entropy(precision: str, logits: Tensor) -> Tensor:
    """Cross entropy against labels that are made on the spot."""
    flat = wide(precision, logits).reshape(-1, logits.shape[-1]).float()
    labels = torch.zeros(flat.shape[0], dtype=torch.int64, device=flat.device)
    return F.cross_entropy(flat, labels)
