"""More models of images: ViTDet's windows, an autoencoder, DenseNet, ShuffleNet, a shifting MLP.

They widen what is trained on by windows, group norms, concatenations, shuffled and rolled channels.
None of them is a model kept out of training; each shares building blocks with many.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from foretell_lab.fused.models.image import _image, _square
from foretell_lab.fused.models.parts import (
    BatchNorm,
    Conv,
    GroupNorm,
    LayerNorm,
    Linear,
    noise,
    stored,
)
from foretell_lab.fused.models.text import (
    Made,
    heads_of,
    merged,
    softmax_attention,
)

Tensor = Any


class WindowBlock(nn.Module):  # type: ignore[misc]
    """ViTDet: attention inside square windows, with a bias by position."""

    def __init__(self, c: int, heads: int, window: int, precision: str) -> None:
        super().__init__()
        self.norms = nn.ModuleList([LayerNorm(c, precision) for _ in range(2)])
        self.qkv, self.out = Linear(c, 3 * c, precision), Linear(c, c, precision)
        self.up, self.down = Linear(c, 4 * c, precision), Linear(4 * c, c, precision)
        n = window * window
        self.places = nn.Parameter(torch.empty(1, heads, n, n, dtype=stored(precision)))
        self.heads, self.window, self.precision = heads, window, precision

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        n = self.window
        y = self.norms[0](x).view(b, h // n, n, w // n, n, c).transpose(2, 3)
        y = y.reshape(-1, n * n, c)
        q, k, v = (heads_of(t, self.heads) for t in self.qkv(y).chunk(3, -1))
        y = self.out(merged(softmax_attention(q, k, v, self.precision, bias=self.places)))
        y = y.view(b, h // n, w // n, n, n, c).transpose(2, 3).reshape(b, h, w, c)
        x = x + y
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def vitdet(chance: Random, precision: str) -> Made:
    """Two blocks of a ViT with windows."""
    c, window = chance.choice(((192, 14), (384, 14), (768, 14), (128, 8), (256, 8), (512, 8)))
    batch, side = chance.choice((2, 4, 8, 16)), window * chance.choice((2, 4))
    x = noise(batch, side, side, c, precision=precision, grad=True)
    blocks = [WindowBlock(c, c // 64, window, precision) for _ in range(2)]
    return nn.Sequential(*blocks), (x,), _square


class Coder(nn.Module):  # type: ignore[misc]
    """An autoencoder's levels: group norm, SiLU, convolutions, larger by the nearest neighbour."""

    def __init__(self, c: int, precision: str) -> None:
        super().__init__()
        self.norms = nn.ModuleList([GroupNorm(c, precision) for _ in range(3)])
        self.convs = nn.ModuleList([Conv(c, c, 3, precision, bias=True) for _ in range(3)])
        self.end = Conv(c, 3, 3, precision, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.convs[0](F.silu(self.norms[0](x)))
        x = x + self.convs[1](F.silu(self.norms[1](y)))
        x = self.convs[2](F.interpolate(x, scale_factor=2, mode="nearest"))
        return torch.tanh(self.end(F.silu(self.norms[2](x))))


def autoencoder(chance: Random, precision: str) -> Made:
    """One level of an image autoencoder and its end."""
    c, side = chance.choice(((32, 64), (64, 64), (96, 48), (128, 32), (256, 32), (384, 16)))
    x = _image(chance, precision, c, side)
    return Coder(c, precision), (x,), _square


class Dense(nn.Module):  # type: ignore[misc]
    """DenseNet: each layer reads what all before it gave, then a transition halves both."""

    def __init__(self, c: int, grow: int, precision: str) -> None:
        super().__init__()
        widths = [c + i * grow for i in range(3)]
        self.norms = nn.ModuleList([BatchNorm(w, precision) for w in widths])
        self.convs = nn.ModuleList([Conv(w, grow, 3, precision) for w in widths])
        self.last = c + 3 * grow
        self.norm = BatchNorm(self.last, precision)
        self.squeeze = Conv(self.last, self.last // 2, 1, precision)

    def forward(self, x: Tensor) -> Tensor:
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = torch.cat((x, conv(F.relu(norm(x))).to(x.dtype)), 1)
        return F.avg_pool2d(self.squeeze(F.relu(self.norm(x))), 2)


def dense(chance: Random, precision: str) -> Made:
    """A dense block and its transition."""
    c, side = chance.choice(((64, 56), (128, 28), (256, 14), (96, 56), (192, 28), (512, 8)))
    x = _image(chance, precision, c, side)
    return Dense(c, chance.choice((32, 48)), precision), (x,), _square


class Shuffle(nn.Module):  # type: ignore[misc]
    """ShuffleNet: half the channels pass, half are filtered, then both are shuffled."""

    def __init__(self, c: int, precision: str) -> None:
        super().__init__()
        n = c // 2
        self.first, self.last = Conv(n, n, 1, precision), Conv(n, n, 1, precision)
        self.deep = Conv(n, n, 3, precision, groups=n)
        self.norms = nn.ModuleList([BatchNorm(n, precision) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, 1)
        y = F.relu(self.norms[0](self.first(right)))
        y = F.relu(self.norms[2](self.last(self.norms[1](self.deep(y)))))
        b, _, h, w = x.shape
        return torch.stack((left.to(y.dtype), y), 2).reshape(b, -1, h, w)


def shuffle(chance: Random, precision: str) -> Made:
    """Two blocks of ShuffleNet."""
    c, side = chance.choice(((48, 28), (116, 28), (176, 28), (232, 14), (352, 14), (704, 7)))
    x = _image(chance, precision, c, side)
    return nn.Sequential(Shuffle(c, precision), Shuffle(c, precision)), (x,), _square


class Shift(nn.Module):  # type: ignore[misc]
    """S²-MLP: quarters of the channels move one place each way; no attention."""

    def __init__(self, c: int, precision: str) -> None:
        super().__init__()
        self.norms = nn.ModuleList([LayerNorm(c, precision) for _ in range(2)])
        self.enter, self.leave = Linear(c, c, precision), Linear(c, c, precision)
        self.up, self.down = Linear(c, 4 * c, precision), Linear(4 * c, c, precision)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.enter(self.norms[0](x)))
        ways = ((1, 1), (-1, 1), (1, 2), (-1, 2))
        parts = [torch.roll(t, *way) for t, way in zip(y.chunk(4, -1), ways, strict=True)]
        x = x + self.leave(torch.cat(parts, -1))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def shift(chance: Random, precision: str) -> Made:
    """Two blocks of a shifting MLP."""
    c, side = chance.choice(((96, 32), (192, 32), (384, 16), (192, 28), (384, 14), (512, 14)))
    x = noise(chance.choice((4, 8, 16, 32, 64)), side, side, c, precision=precision, grad=True)
    return nn.Sequential(Shift(c, precision), Shift(c, precision)), (x,), _square


MORE_IMAGE: dict[str, Callable[[Random, str], Made]] = {
    "vitdet": vitdet,
    "autoencoder": autoencoder,
    "dense": dense,
    "shuffle": shuffle,
    "shift": shift,
}
