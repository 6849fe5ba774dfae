"""Updates of weights: Adam, LAMB, Lion and Adafactor written out.

They widen what is trained on by long chains over weights and norms of whole tensors, where the
backward pass of a layer ends.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from foretell_lab.fused.models.image import _square
from foretell_lab.fused.models.parts import (
    half,
    noise,
    stored,
)
from foretell_lab.fused.models.text import Made

Tensor = Any


class Update(torch.autograd.Function):  # type: ignore[misc]
    """A weight whose gradient is turned into what it and its averages become."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, first: Tensor, second: Tensor, how: str) -> Tensor:
        ctx.save_for_backward(weight, first, second)
        ctx.how = how
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        weight, first, second = ctx.saved_tensors
        return (*_UPDATES[ctx.how](weight, given.float(), first, second), None)


def _adam(w: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    m, v = torch.lerp(m, g, 0.1), v * 0.999 + 0.001 * g * g
    return (
        torch.addcdiv(w.float() * 0.9999, m, (v / 0.9).sqrt() + 1e-8, value=-1e-3).to(w.dtype),
        m,
        v,
    )


def _lamb(w: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    g = g / torch.linalg.vector_norm(g).clamp_min(1.0)
    m, v = m * 0.9 + 0.1 * g, torch.addcmul(v * 0.999, g, g, value=0.001)
    step = m / (v.sqrt() + 1e-6) + 0.01 * w.float()
    trust = torch.linalg.vector_norm(w.float()) / (torch.linalg.vector_norm(step) + 1e-9)
    return (w - 1e-3 * trust.clamp_max(10.0) * step).to(w.dtype), m, v


def _lion(w: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    step = torch.sign(m * 0.9 + g * 0.1) + 0.1 * w.float()
    return (w - 1e-4 * step).to(w.dtype), torch.lerp(m, g, 0.01), torch.maximum(v, g.abs())


def _factored(w: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    square = g.square() + 1e-30
    row, column = square.mean(-1, keepdim=True), square.mean(0, keepdim=True)
    step = g * torch.rsqrt(row / row.mean()) * torch.rsqrt(column)
    step = step / (step.square().mean().sqrt()).clamp_min(1.0)
    return (w - 1e-2 * step).to(w.dtype), m * 0.9 + step, torch.minimum(v, square)


_UPDATES = {"adam": _adam, "lamb": _lamb, "lion": _lion, "factored": _factored}


class Updated(nn.Module):  # type: ignore[misc]
    """A layer whose backward pass ends in the update of its weight."""

    def __init__(self, width: int, inner: int, how: str, precision: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inner, width, dtype=stored(precision)))
        self.first, self.second = (nn.Parameter(torch.empty(inner, width)) for _ in range(2))
        self.how, self.precision = how, precision

    def forward(self, x: Tensor) -> Tensor:
        weight = Update.apply(self.weight, self.first, self.second, self.how)
        return F.silu(F.linear(*half(self.precision, x, weight)))


def optimizer(chance: Random, precision: str) -> Made:
    """The update of one weight: Adam, LAMB, Lion or Adafactor written out."""
    sizes = (80, 192, 320, 768, 1000, 1536, 2304, 3072, 4096, 8192)
    width, inner = chance.choice(sizes), chance.choice(sizes)
    x = noise(chance.choice((64, 512)), width, precision=precision)
    return Updated(width, inner, chance.choice(tuple(_UPDATES)), precision), (x,), _square


FAR_UPDATE: dict[str, Callable[[Random, str], Made]] = {
    "optimizer": optimizer,
}
