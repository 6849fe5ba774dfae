"""Linear layers whose matmuls are in fp8: one scale a tensor, found each time it is used.

Inputs and weights go as e4m3, gradients as e5m2, sums are fp32 and outputs bf16. Parameters stay as
they are. All three matmuls of a layer are `torch._scaled_mm`, a name that torch marks as private.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from foretell.errors import InputError

Tensor = Any
_EACH = 16  # what the sizes of an fp8 matmul are multiples of
_FORMATS = (torch.float32, torch.bfloat16, torch.float16)  # of weights that are cast to fp8
_CAPABLE = (8, 9)  # compute capability from which NVIDIA's GPUs have it


def require_fp8(word: str, device: str) -> None:
    """Raise where a run would be in fp8 on a device without such matmuls."""
    if word != "fp8":
        return
    name = "the CPU"
    if device == "cuda":
        if torch.cuda.get_device_capability() >= _CAPABLE:
            return
        name = torch.cuda.get_device_name()
    raise InputError(
        f"dtype=fp8: {name} has no fp8 matmuls",
        hint="run it on a GPU of compute capability 8.9 or more, or with dtype=bf16",
    )


def require_layers(model: Any) -> None:
    """Raise where no layer of a model can compute in fp8."""
    if not _layers(model):
        raise InputError(
            f"dtype=fp8: no linear layer of {type(model).__name__} has sizes that are multiples of "
            f"{_EACH}",
            hint="run it with dtype=bf16",
        )


def use_fp8(module: Any) -> None:
    """Let the linear layers of a module compute in fp8, those that can."""
    for layer in _layers(module):
        layer.forward = _Forward(layer)


def _layers(module: Any) -> list[Any]:
    linear = (m for m in module.modules() if type(m) is nn.Linear and "weight" in m._parameters)
    fitting = (m for m in linear if not m.in_features % _EACH and not m.out_features % _EACH)
    return [m for m in fitting if m.weight.dtype in _FORMATS]


class _Forward:
    """The forward of one layer."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __call__(self, x: Tensor) -> Tensor:
        y = _Linear.apply(x, self.layer.weight)
        return y if self.layer.bias is None else y + self.layer.bias.to(y.dtype)


class _Linear(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        y = _matmul(_rows(x), weight, torch.float8_e4m3fn)
        return y.reshape(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        g, rows = _rows(g), _rows(x)
        wants_x, wants_weight = ctx.needs_input_grad
        gx = _matmul(g, weight.t(), torch.float8_e5m2) if wants_x else None
        gw = _matmul(g.t(), rows.t(), torch.float8_e5m2) if wants_weight else None
        return (
            None if gx is None else gx.to(x.dtype).reshape(x.shape),
            None if gw is None else gw.to(weight.dtype),
        )


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _matmul(a: Tensor, b: Tensor, kind: Any) -> Tensor:
    """`a @ b.t()`, `a` as `kind` and `b` as e4m3."""
    rows = len(a)
    a, b = _filled(a), _filled(b, rows=False)
    first, one = _quantised(a, kind)
    second, other = _quantised(b, torch.float8_e4m3fn)
    found = torch._scaled_mm(first, second.t(), one, other, out_dtype=torch.bfloat16)
    return found[:rows]


def _filled(x: Tensor, *, rows: bool = True) -> Tensor:
    """Zeros behind what is no multiple: they add nothing to a sum, and rows of them are cut off."""
    wide = -x.shape[1] % _EACH
    tall = -x.shape[0] % _EACH if rows else 0
    return nn.functional.pad(x, (0, wide, 0, tall)) if wide or tall else x


def _quantised(x: Tensor, kind: Any) -> tuple[Tensor, Tensor]:
    """A tensor in eight bits, in order of rows, and by what to multiply it."""
    scale = torch.finfo(kind).max / x.detach().abs().max().float().clamp_min(1e-12)
    return (x.float() * scale).to(kind).contiguous(), scale.reciprocal()
