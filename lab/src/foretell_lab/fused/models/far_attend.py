"""Attention farther off: Performer, BigBird and Conformer.

They widen what is trained on by sums in the place of softmax, blocks that see their neighbours,
shifted places, gated filters and norms over time. None of them is a model kept out of training.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from foretell_lab.fused.models.far_text import Along
from foretell_lab.fused.models.image import _square
from foretell_lab.fused.models.parts import (
    BatchNorm,
    LayerNorm,
    Linear,
    dropout,
    half,
    noise,
    stored,
    wide,
)
from foretell_lab.fused.models.text import Made, _tokens, heads_of, merged

Tensor = Any


class Kernelized(nn.Module):  # type: ignore[misc]
    """Performer: features of queries and keys, whose matmuls with values come first."""

    def __init__(self, width: int, heads: int, features: int, how: str, precision: str) -> None:
        super().__init__()
        self.norms = nn.ModuleList([LayerNorm(width, precision) for _ in range(2)])
        self.qkv, self.out = Linear(width, 3 * width, precision), Linear(width, width, precision)
        self.up, self.down = Linear(width, 2 * width, precision), Linear(width, width, precision)
        kind = stored(precision)
        self.chosen = nn.Parameter(torch.empty(features, width // heads, dtype=kind))
        self.heads, self.how, self.precision = heads, how, precision

    def _features(self, x: Tensor, query: bool) -> Tensor:
        if self.how == "elu":
            return F.elu(x) + 1
        x = x * x.shape[-1] ** -0.25
        seen = torch.matmul(*half(self.precision, x, self.chosen.t())).float()
        length = x.float().square().sum(-1, keepdim=True) / 2
        most = seen.amax(-1 if query else (-1, -2), keepdim=True).detach()
        return (torch.exp(seen - length - most) + 1e-4) * self.chosen.shape[0] ** -0.5

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads_of(t, self.heads) for t in self.qkv(self.norms[0](x)).chunk(3, -1))
        q, k = self._features(q, True), self._features(k, False)
        both = torch.matmul(*half(self.precision, k.transpose(-1, -2), v.to(k.dtype)))
        total = (q * k.sum(-2, keepdim=True)).sum(-1, keepdim=True)
        mixed = torch.matmul(*half(self.precision, q, both.to(q.dtype))) / (total + 1e-6)
        x = x + self.out(merged(mixed).to(x.dtype))
        left, right = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.gelu(left) * right)


def performer(chance: Random, precision: str) -> Made:
    """A layer of a Performer or of a linear transformer."""
    width, heads = chance.choice(((192, 3), (384, 6), (512, 8), (768, 12), (1024, 16), (320, 5)))
    batch, length = _tokens(chance, width)
    x = noise(batch, length, width, precision=precision, grad=True)
    features, how = chance.choice((64, 128, 256)), chance.choice(("elu", "exp"))
    return Kernelized(width, heads, features, how, precision), (x,), _square


class Blocks(nn.Module):  # type: ignore[misc]
    """BigBird: each block sees itself, its neighbours and the first; the rest is masked."""

    def __init__(self, width: int, heads: int, block: int, precision: str) -> None:
        super().__init__()
        self.qkv, self.out = Linear(width, 3 * width, precision), Linear(width, width, precision)
        self.norm, self.heads, self.block = LayerNorm(width, precision), heads, block
        self.precision = precision

    def _near(self, x: Tensor) -> Tensor:
        first = x[:, :, :1].expand(x.shape)
        return torch.cat((first, torch.roll(x, 1, 2), x, torch.roll(x, -1, 2)), 3)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        b, s, _ = x.shape
        n = self.block
        q, k, v = (
            heads_of(t, self.heads).reshape(b, self.heads, s // n, n, -1)
            for t in self.qkv(x).chunk(3, -1)
        )
        k, v = self._near(k), self._near(v)
        scores = torch.matmul(*half(self.precision, q, k.transpose(-1, -2))) * q.shape[-1] ** -0.5
        scores = wide(self.precision, scores) - 1e4 * (1 - hidden)[:, None, None, None]
        chosen = dropout(F.softmax(scores, -1), 0.1)
        mixed = torch.matmul(*half(self.precision, chosen, v.to(chosen.dtype)))
        y = merged(mixed.reshape(b, self.heads, s, -1))
        return self.norm(x + dropout(self.out(y), 0.1))


def bigbird(chance: Random, precision: str) -> Made:
    """Attention of blocks among blocks."""
    width, heads = chance.choice(((192, 3), (384, 6), (576, 9), (768, 12), (1024, 16)))
    block, count = chance.choice((32, 64, 96)), chance.choice((8, 12, 16, 32))
    batch = min(chance.choice((1, 2, 4, 8, 16)), max(1, (12 << 20) // (width * block * count)))
    x = noise(batch, block * count, width, precision=precision, grad=True)
    hidden = noise(batch, 4 * block, precision=precision)
    return Blocks(width, heads, block, precision), (x, hidden), _square


class Conformed(nn.Module):  # type: ignore[misc]
    """Conformer: half layers at both ends, attention with shifted places, a gated filter."""

    def __init__(self, width: int, heads: int, size: int, precision: str) -> None:
        super().__init__()
        self.norms = nn.ModuleList([LayerNorm(width, precision) for _ in range(5)])
        self.ups = nn.ModuleList([Linear(width, 4 * width, precision) for _ in range(2)])
        self.downs = nn.ModuleList([Linear(4 * width, width, precision) for _ in range(2)])
        self.qkv, self.out = Linear(width, 3 * width, precision), Linear(width, width, precision)
        self.gate, self.end = Linear(width, 2 * width, precision), Linear(width, width, precision)
        self.deep = Along(width, width, size, precision, groups=width)
        self.even, self.heads, self.precision = BatchNorm(width, precision), heads, precision
        self.lean = nn.Parameter(torch.empty(2, heads, 1, width // heads, dtype=stored(precision)))

    def _half(self, i: int, x: Tensor) -> Tensor:
        y = dropout(F.silu(self.ups[i](self.norms[i](x))), 0.1)
        return x + 0.5 * dropout(self.downs[i](y), 0.1)

    def _mixed(self, x: Tensor, places: Tensor) -> Tensor:
        q, k, v = (heads_of(t, self.heads) for t in self.qkv(self.norms[2](x)).chunk(3, -1))
        near = torch.matmul(*half(self.precision, q + self.lean[0], k.transpose(-1, -2)))
        far = torch.matmul(*half(self.precision, q + self.lean[1], places))
        b, h, s, n = far.shape
        far = F.pad(far, (1, 0)).view(b, h, n + 1, s)[:, :, 1:].reshape(b, h, s, n)
        scores = (near + far[..., :s]) * q.shape[-1] ** -0.5
        chosen = dropout(F.softmax(wide(self.precision, scores), -1), 0.1)
        return self.out(merged(torch.matmul(*half(self.precision, chosen, v))))

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        x = self._half(0, x)
        x = x + dropout(self._mixed(x, places), 0.1)
        left, right = self.gate(self.norms[3](x)).chunk(2, -1)
        y = self.deep((left * torch.sigmoid(right)).transpose(1, 2))
        x = x + dropout(self.end(F.silu(self.even(y)).transpose(1, 2).to(x.dtype)), 0.1)
        return self.norms[4](self._half(1, x))


def conformer(chance: Random, precision: str) -> Made:
    """A layer of a Conformer."""
    width, heads = chance.choice(((144, 4), (176, 4), (256, 4), (320, 8), (512, 8), (640, 8)))
    length = chance.choice((100, 200, 256, 400, 750))
    batch = chance.choice((2, 4, 8, 16, 32))
    x = noise(batch, length, width, precision=precision, grad=True)
    places = noise(1, heads, width // heads, length, precision=precision)
    model = Conformed(width, heads, chance.choice((7, 15, 31)), precision)
    return model, (x, places), _square


FAR_ATTEND: dict[str, Callable[[Random, str], Made]] = {
    "performer": performer,
    "bigbird": bigbird,
    "conformer": conformer,
}
