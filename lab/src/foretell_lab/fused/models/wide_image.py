"""Still more models of images: windows and grids, levels joined, group norms with conditions.

They widen what is trained on by what was predicted worst on families left out: group norms and
their gradients, windows cut and put back, images made larger and joined. None of them is a model
kept out of training; each shares building blocks with many.
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
    dropout,
    noise,
    stored,
)
from foretell_lab.fused.models.text import Made, heads_of, merged, softmax_attention

Tensor = Any


def _larger(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="nearest")


class Mlp(nn.Module):  # type: ignore[misc]
    """Norm, up, GELU, down."""

    def __init__(self, c: int, precision: str, rate: float = 0.0) -> None:
        super().__init__()
        self.norm, self.rate = LayerNorm(c, precision), rate
        self.up, self.down = Linear(c, 4 * c, precision), Linear(4 * c, c, precision)

    def forward(self, x: Tensor) -> Tensor:
        return x + dropout(self.down(F.gelu(self.up(self.norm(x)))), self.rate)


class GridBlock(nn.Module):  # type: ignore[misc]
    """MaxViT: attention among the places of a window, or of a grid laid over the image."""

    def __init__(self, c: int, window: int, grid: bool, precision: str) -> None:
        super().__init__()
        self.norm, self.mlp = LayerNorm(c, precision), Mlp(c, precision)
        self.qkv, self.out = Linear(c, 3 * c, precision), Linear(c, c, precision)
        n = window * window
        self.places = nn.Parameter(torch.empty(1, c // 32, n, n, dtype=stored(precision)))
        self.window, self.order, self.precision = window, (2, 4) if grid else (1, 3), precision

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        n, grid = self.window, self.order == (2, 4)
        cut = (b, n, h // n, n, w // n, c) if grid else (b, h // n, n, w // n, n, c)
        order = (0, 2, 4, 1, 3, 5) if grid else (0, 1, 3, 2, 4, 5)
        back = (0, 3, 1, 4, 2, 5) if grid else (0, 1, 3, 2, 4, 5)
        y = self.norm(x).view(cut).permute(order).reshape(-1, n * n, c)
        q, k, v = (heads_of(t, c // 32) for t in self.qkv(y).chunk(3, -1))
        y = self.out(merged(softmax_attention(q, k, v, self.precision, bias=self.places)))
        y = y.view(*(cut[i] for i in order)).permute(back).reshape(b, h, w, c)
        return self.mlp(x + y)


def maxvit(chance: Random, precision: str) -> Made:
    """A window block and a grid block."""
    c, side, n = chance.choice(((64, 56, 7), (96, 28, 7), (128, 28, 7), (256, 14, 7), (192, 32, 8)))
    x = noise(chance.choice((4, 8, 16, 32, 64)), side, side, c, precision=precision, grad=True)
    return nn.Sequential(*(GridBlock(c, n, g, precision) for g in (False, True))), (x,), _square


class HireBlock(nn.Module):  # type: ignore[misc]
    """Hire-MLP: rows are rolled, cut into regions that one layer mixes, and put back."""

    def __init__(self, c: int, size: int, step: int, precision: str) -> None:
        super().__init__()
        self.norm, self.mlp, self.size, self.step = (
            LayerNorm(c, precision), Mlp(c, precision, 0.1), size, step
        )  # fmt: skip
        self.mix, self.back = (
            Linear(c * size, c // 2, precision),
            Linear(c // 2, c * size, precision),
        )
        self.own = Linear(c, c, precision)

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        y, n = self.norm(x), self.size
        z = torch.roll(y, self.step, 1) if self.step else y
        z = z.reshape(b, h // n, n, w, c).permute(0, 1, 3, 2, 4).reshape(b, h // n, w, n * c)
        z = self.back(F.relu(self.mix(z)))
        z = z.view(b, h // n, w, n, c).permute(0, 1, 3, 2, 4).reshape(b, h, w, c)
        z = torch.roll(z, -self.step, 1) if self.step else z
        return self.mlp(x + z + self.own(y))


def hire(chance: Random, precision: str) -> Made:
    """Two blocks of Hire-MLP, the second rolled."""
    c, side, n = chance.choice(((64, 56, 4), (128, 28, 4), (320, 14, 2), (96, 48, 3), (256, 16, 2)))
    x = noise(chance.choice((4, 8, 16, 32, 64)), side, side, c, precision=precision, grad=True)
    return nn.Sequential(*(HireBlock(c, n, s, precision) for s in (0, 1))), (x,), _square


class TwinsBlock(nn.Module):  # type: ignore[misc]
    """Twins: windows whose tokens come as rows, and keys from a smaller image for all of it."""

    def __init__(self, c: int, window: int, precision: str) -> None:
        super().__init__()
        self.norms = nn.ModuleList([LayerNorm(c, precision) for _ in range(3)])
        self.qkv, self.q = Linear(c, 3 * c, precision), Linear(c, c, precision)
        self.kv = Linear(c, 2 * c, precision)
        self.less = Conv(c, c, window, precision, window, bias=True)
        self.mlps = nn.ModuleList([Mlp(c, precision) for _ in range(2)])
        self.window, self.precision = window, precision

    def _local(self, x: Tensor, side: int) -> Tensor:
        b, _, c = x.shape
        n, m = self.window, side // self.window
        y = x.view(b, m, n, m, n, c).transpose(2, 3).reshape(b, m * m, n * n, 3, c // 3)
        q, k, v = y.view(b * m * m, n * n, 3, c // 96, 32).permute(2, 0, 3, 1, 4)
        y = softmax_attention(q, k, v, self.precision).transpose(1, 2)
        return y.reshape(b, m, m, n, n, c // 3).transpose(2, 3).reshape(b, side * side, c // 3)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        side = int(t**0.5)
        x = self.mlps[0](x + self._local(self.qkv(self.norms[0](x)), side))
        y = self.norms[1](x)
        small = self.less(y.transpose(1, 2).reshape(b, c, side, side)).flatten(2).transpose(1, 2)
        k, v = (heads_of(s, c // 32) for s in self.kv(self.norms[2](small)).chunk(2, -1))
        mixed = softmax_attention(heads_of(self.q(y), c // 32), k, v, self.precision)
        return self.mlps[1](x + merged(mixed))


def twins(chance: Random, precision: str) -> Made:
    """A local and a global block of Twins."""
    c, side = chance.choice(((64, 56), (96, 28), (128, 28), (256, 14), (192, 28)))
    x = noise(chance.choice((4, 8, 16, 32)), side * side, c, precision=precision, grad=True)
    return TwinsBlock(c, 7, precision), (x,), _square


class Level(nn.Module):  # type: ignore[misc]
    """Convolution, group norm, ReLU."""

    def __init__(self, c: int, k: int, precision: str, size: int = 3, stride: int = 1) -> None:
        super().__init__()
        self.conv, self.norm = Conv(c, k, size, precision, stride), GroupNorm(k, precision)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


class Pyramid(nn.Module):  # type: ignore[misc]
    """Feature pyramids: levels are added from small to large, then joined for the masks."""

    def __init__(self, c: int, precision: str) -> None:
        super().__init__()
        self.enter = nn.ModuleList([Level(c, c, precision, 1, s) for s in (1, 2)])
        self.ways = nn.ModuleList([Level(c, c, precision) for _ in range(3)])
        self.end = Level(2 * c, c, precision)

    def forward(self, x: Tensor) -> Tensor:
        large, small = (enter(x) for enter in self.enter)
        large = self.ways[0](large + _larger(small))
        small = _larger(self.ways[1](small))
        joined = torch.cat((large, self.ways[2](small)), 1)
        return torch.sigmoid(self.end(joined))


def pyramid(chance: Random, precision: str) -> Made:
    """Two levels of a feature pyramid with its joined end."""
    c, side = chance.choice(((64, 64), (96, 56), (128, 32), (160, 40), (256, 28), (256, 16)))
    x = _image(chance, precision, c, side)
    return Pyramid(c, precision), (x,), _square


class Preactivated(nn.Module):  # type: ignore[misc]
    """Big Transfer's ResNet: group norm and ReLU before each convolution, weights made even."""

    def __init__(self, c: int, inner: int, stride: int, precision: str) -> None:
        super().__init__()
        sizes = ((c, inner, 1, 1), (inner, inner, 3, stride), (inner, c, 1, 1))
        self.norms = nn.ModuleList([GroupNorm(a, precision) for a, _, _, _ in sizes])
        self.convs = nn.ModuleList([Conv(a, b, k, precision, s) for a, b, k, s in sizes])
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for norm, conv in zip(self.norms, self.convs, strict=True):
            weight = conv.weight
            spread, middle = torch.var_mean(weight, (1, 2, 3), correction=0, keepdim=True)
            even = ((weight - middle) * torch.rsqrt(spread + 1e-8)).to(weight.dtype)
            y = F.relu(norm(y))
            y, even = (t.to(torch.bfloat16) if conv.precision == "amp" else t for t in (y, even))
            y = F.conv2d(y, even, None, conv.stride, conv.pad)
        return y + (F.avg_pool2d(x, 2) if self.stride > 1 else x)


def transfer(chance: Random, precision: str) -> Made:
    """Two blocks of Big Transfer."""
    inner, side = chance.choice(((64, 56), (96, 56), (128, 28), (256, 14), (512, 8)))
    x = _image(chance, precision, 4 * inner, side)
    blocks = [Preactivated(4 * inner, inner, s, precision) for s in (1, 2)]
    return nn.Sequential(*blocks), (x,), _square


class Conditioned(nn.Module):  # type: ignore[misc]
    """A generator's block: norms scaled and shifted by a condition, an image of another size."""

    def __init__(self, c: int, k: int, precision: str, group: bool, larger: bool) -> None:
        super().__init__()
        norm = GroupNorm if group else BatchNorm
        self.norms = nn.ModuleList([norm(n, precision) for n in (c, k)])
        self.convs = nn.ModuleList([Conv(n, k, 3, precision, bias=True) for n in (c, k)])
        self.tells = nn.ModuleList([Linear(256, 2 * n, precision) for n in (c, k)])
        self.skip, self.larger, self.group = Conv(c, k, 1, precision), larger, group

    def _conditioned(self, i: int, x: Tensor, about: Tensor) -> Tensor:
        scale, shift = self.tells[i](about)[:, :, None, None].chunk(2, 1)
        y = self.norms[i](x) * (1 + scale) + shift
        return F.silu(y) if self.group else F.relu(y)

    def forward(self, x: Tensor, about: Tensor) -> Tensor:
        resize = _larger if self.larger else (lambda t: F.avg_pool2d(t, 2))
        y = self.convs[0](resize(self._conditioned(0, x, about)))
        y = self.convs[1](dropout(self._conditioned(1, y, about), 0.1))
        return (self.skip(resize(x)) + y) * 0.7071


class Generator(nn.Module):  # type: ignore[misc]
    """Two conditioned blocks and an image."""

    def __init__(self, c: int, precision: str, group: bool, larger: bool) -> None:
        super().__init__()
        self.first = Conditioned(c, c, precision, group, larger)
        self.second = Conditioned(c, c // 2, precision, group, larger)
        self.norm, self.end = GroupNorm(c // 2, precision), Conv(c // 2, 3, 3, precision, bias=True)

    def forward(self, x: Tensor, about: Tensor) -> Tensor:
        x = self.second(self.first(x, about), about)
        return torch.tanh(self.end(F.silu(self.norm(x))))


def generator(chance: Random, precision: str) -> Made:
    """A generator or an encoder of images that is given a class."""
    c, side = chance.choice(((64, 32), (128, 16), (128, 32), (192, 16), (256, 16), (384, 8)))
    x = _image(chance, precision, c, side)
    batch = min(len(x), 64)
    x = x.detach()[:batch].requires_grad_(True)
    model = Generator(c, precision, chance.random() < 0.7, chance.random() < 0.6)
    return model, (x, noise(batch, 256, precision=precision)), _square


WIDE_IMAGE: dict[str, Callable[[Random, str], Made]] = {
    "maxvit": maxvit,
    "hire": hire,
    "twins": twins,
    "pyramid": pyramid,
    "transfer": transfer,
    "generator": generator,
}
