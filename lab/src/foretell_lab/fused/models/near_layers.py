"""Layers of tokens near those known, without attention: gates, filters, experts, few bits.

They widen what is trained on by gates across tokens, filters told by waves or made for each token,
tokens sent to one expert, numbers rounded to few levels. None is a model kept out of training.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from foretell_lab.fused.models.image import _square
from foretell_lab.fused.models.near_text import words
from foretell_lab.fused.models.parts import (
    LayerNorm,
    Linear,
    dropout,
    half,
    noise,
    stored,
    wide,
)
from foretell_lab.fused.models.text import Made

Tensor = Any


class Spatial(nn.Module):  # type: ignore[misc]
    """gMLP: half of what is wide gates the other half after a layer across tokens."""

    def __init__(self, length: int, width: int, inner: int, precision: str) -> None:
        super().__init__()
        self.up, self.down = Linear(width, 2 * inner, precision), Linear(inner, width, precision)
        self.norms = nn.ModuleList([LayerNorm(n, precision) for n in (width, inner)])
        self.across = Linear(length, length, precision)

    def forward(self, x: Tensor) -> Tensor:
        kept, gate = F.gelu(self.up(self.norms[0](x))).chunk(2, -1)
        gate = self.across(self.norms[1](gate).transpose(1, 2)).transpose(1, 2)
        return x + self.down(kept * (gate + 1.0))


def gmlp(chance: Random, precision: str) -> Made:
    """Two blocks of gMLP."""
    width, inner = chance.choice(((128, 384), (256, 768), (512, 1536), (144, 320), (192, 576)))
    x = words(chance, precision, width, 1)
    blocks = (Spatial(x.shape[1], width, inner, precision) for _ in range(2))
    return nn.Sequential(*blocks), (x,), _square


class Hyena(nn.Module):  # type: ignore[misc]
    """Hyena: gates around a filter along time that waves and a decay tell."""

    def __init__(self, width: int, taps: int, precision: str) -> None:
        super().__init__()
        kind = stored(precision)
        self.enter, self.out = Linear(width, 3 * width, precision), Linear(width, width, precision)
        self.short = nn.Parameter(torch.empty(3 * width, 1, 3, dtype=kind))
        self.waves, self.filter = Linear(9, 64, precision), Linear(64, width, precision)
        self.skip, self.taps, self.precision = (
            nn.Parameter(torch.ones(width, 1, dtype=kind)),
            taps,
            precision,
        )

    def _along(self, x: Tensor, weight: Tensor) -> Tensor:
        x, weight = half(self.precision, F.pad(x, (weight.shape[-1] - 1, 0)), weight)
        return F.conv1d(x, weight, groups=len(weight))

    def forward(self, x: Tensor, places: Tensor, decay: Tensor) -> Tensor:
        a, b, v = self._along(self.enter(x).transpose(1, 2), self.short).chunk(3, 1)
        scores = self.filter(torch.sin(10.0 * self.waves(places)))
        t = torch.arange(self.taps, device=x.device) / self.taps
        long = scores.t() * torch.exp(-t * decay.abs()).to(scores.dtype)
        v = v * b
        y = a * (self._along(v, long.unsqueeze(1)) + v * self.skip)
        return self.out(y.transpose(1, 2))


def hyena(chance: Random, precision: str) -> Made:
    """An operator of Hyena with a filter of some dozen places."""
    width, taps = chance.choice((96, 192, 384, 768, 864)), chance.choice((16, 32, 64))
    scores = noise(taps, 9, precision=precision), noise(width, 1, precision="fp32")
    return Hyena(width, taps, precision), (words(chance, precision, width), *scores), _square


class Switched(nn.Module):  # type: ignore[misc]
    """Switch: every token goes to the expert it prefers, as masks; shares are held even."""

    def __init__(self, width: int, count: int, inner: int, precision: str) -> None:
        super().__init__()
        kind = stored(precision)
        self.router, self.norm = Linear(width, count, "fp32"), LayerNorm(width, precision)
        self.up = nn.Parameter(torch.empty(count, width, 2 * inner, dtype=kind))
        self.down = nn.Parameter(torch.empty(count, inner, width, dtype=kind))
        self.precision = precision

    def forward(self, x: Tensor, jitter: Tensor) -> tuple[Tensor, Tensor]:
        h = self.norm(x)
        scores = self.router(h.float() * (1 + 0.01 * jitter))
        shares = F.softmax(scores, -1)
        best, which = shares.max(-1)
        mine = (which[:, None] == torch.arange(shares.shape[1], device=x.device)).float()
        sent = mine.t().unsqueeze(-1).to(h.dtype) * h
        gate, up = torch.matmul(*half(self.precision, sent, self.up)).chunk(2, -1)
        y = torch.matmul(*half(self.precision, F.relu(gate) * up, self.down))
        y = (y * (mine * best[:, None]).t().unsqueeze(-1)).sum(0)
        load = (mine.mean(0) * shares.mean(0)).sum() * shares.shape[1]
        return x + y.to(x.dtype), load + 1e-3 * torch.logsumexp(scores, -1).square().mean()


def switch(chance: Random, precision: str) -> Made:
    """A layer of experts of which each token sees one."""
    width, inner = chance.choice(((192, 384), (384, 512), (768, 1000), (512, 640)))
    x = noise(chance.choice((96, 320, 1000, 2048)), width, precision=precision, grad=True)
    model = Switched(width, chance.choice((4, 8, 16)), inner, precision)
    jitter = noise(len(x), width, precision="fp32")
    return model, (x, jitter), lambda scores: _square(scores[0]) + scores[1]


class Dynamic(nn.Module):  # type: ignore[misc]
    """Dynamic convolution: each token makes the filter of its heads, softmaxed over its taps."""

    def __init__(self, width: int, heads: int, taps: int, precision: str) -> None:
        super().__init__()
        self.enter, self.out = Linear(width, 2 * width, precision), Linear(width, width, precision)
        self.filter, self.norm = Linear(width, heads * taps, precision), LayerNorm(width, precision)
        self.heads, self.taps, self.precision = heads, taps, precision

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        value, gate = self.enter(x).chunk(2, -1)
        y = value * torch.sigmoid(gate)
        scores = wide(self.precision, self.filter(y).view(b, t, self.heads, self.taps))
        weights = dropout(F.softmax(scores, -1), 0.1)
        wider = F.pad(y, (0, 0, self.taps - 1, 0)).view(b, -1, self.heads, c // self.heads)
        taken = sum(wider[:, i : i + t] * weights[..., i, None] for i in range(self.taps))
        return self.norm(x + self.out(taken.reshape(b, t, c).to(x.dtype)))


def dynamic(chance: Random, precision: str) -> Made:
    """A layer of dynamic convolutions."""
    width, heads = chance.choice(((320, 5), (512, 8), (768, 12), (1024, 16), (144, 3)))
    model = Dynamic(width, heads, chance.choice((3, 5, 7)), precision)
    return model, (words(chance, precision, width),), _square


class Rounded(torch.autograd.Function):  # type: ignore[misc]
    """Numbers rounded to few levels; the gradient passes where nothing was cut off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, most: int) -> Tensor:
        y = x / scale
        ctx.save_for_backward(y, scale)
        ctx.most = most
        return torch.round(y).clamp(-most, most) * scale

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        y, scale = ctx.saved_tensors
        inside = (y > -ctx.most) & (y < ctx.most)
        steps = torch.where(inside, torch.round(y) - y, torch.sign(y) * ctx.most)
        scores = (given * steps).flatten(1).sum(1).view(-1, *(1 for _ in y.shape[1:]))
        return given * inside, scores.sum_to_size(scale.shape), None


class Quantized(nn.Module):  # type: ignore[misc]
    """Layers trained for eight bits or four: weights by their rows, what flows by all of it."""

    def __init__(self, width: int, inner: int, most: int, precision: str) -> None:
        super().__init__()
        self.up, self.down = Linear(width, inner, precision), Linear(inner, width, precision)
        self.norm, self.most, self.precision = LayerNorm(width, precision), most, precision
        kind = stored(precision)
        self.flows = nn.Parameter(torch.ones(2, 1, 1, dtype=kind))

    def _layer(self, x: Tensor, layer: Any, flows: Tensor) -> Tensor:
        weight = layer.weight
        rows = weight.detach().abs().amax(1, keepdim=True) / self.most
        weight = Rounded.apply(weight, rows, self.most)
        return F.linear(
            *half(self.precision, Rounded.apply(x, flows, self.most), weight, layer.bias)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self._layer(self.norm(x), self.up, self.flows[0]))
        return x + self._layer(y, self.down, self.flows[1])


def quantized(chance: Random, precision: str) -> Made:
    """Two layers trained with rounded weights."""
    width = chance.choice((120, 192, 320, 384, 576, 768, 1152))
    rows = chance.choice((96, 500, 1000, 4096, 12000))
    x = noise(rows, width, precision=precision, grad=True)
    return Quantized(width, 4 * width, chance.choice((7, 127)), precision), (x,), _square


NEAR_LAYERS: dict[str, Callable[[Random, str], Made]] = {
    "gmlp": gmlp,
    "hyena": hyena,
    "switch": switch,
    "dynamic": dynamic,
    "quantized": quantized,
}
