"""Images near those known that are made, matched or told apart, and how images come in.

They widen what is trained on by channels sent on part by part, branches added before an
activation, cheap copies of channels, shifted matmuls, couplings and their determinants, weights
scaled by their largest stretch, bytes made numbers. None is a model kept out of training.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from foretell_lab.fused.models.image import _square
from foretell_lab.fused.models.near_image import Unit, picture
from foretell_lab.fused.models.parts import (
    BatchNorm,
    Conv,
    LayerNorm,
    Linear,
    half,
    noise,
    stored,
    wide,
)
from foretell_lab.fused.models.text import Made

Tensor = Any


class Res2NetBlock(nn.Module):  # type: ignore[misc]
    """Res2Net: channels in parts, each part given the result of the one before it."""

    def __init__(self, c: int, inner: int, parts: int, precision: str) -> None:
        super().__init__()
        each = inner // parts
        self.enter, self.end = Unit(c, inner, 1, precision), Conv(inner, c, 1, precision)
        self.ways = nn.ModuleList([Unit(each, each, 3, precision) for _ in range(parts - 1)])
        self.norm = BatchNorm(c, precision)

    def forward(self, x: Tensor) -> Tensor:
        first, *rest = self.enter(x).chunk(len(self.ways) + 1, 1)
        made, y = [first], None
        for way, part in zip(self.ways, rest, strict=True):
            y = way(part if y is None else part + y)
            made.append(y)
        return F.relu(x + self.norm(self.end(torch.cat(made, 1))))


def res2net(chance: Random, precision: str) -> Made:
    """A block of Res2Net."""
    c, inner, side = chance.choice(
        ((256, 96, 56), (256, 104, 56), (512, 192, 28), (1024, 416, 14), (320, 144, 28))
    )
    return Res2NetBlock(c, inner, 4, precision), (picture(chance, precision, c, side),), _square


class Branches(nn.Module):  # type: ignore[misc]
    """RepVGG: a filter of nine places, one of one and none at all, each with a norm, added."""

    def __init__(self, c: int, precision: str) -> None:
        super().__init__()
        self.three, self.one = Conv(c, c, 3, precision), Conv(c, c, 1, precision)
        self.norms = nn.ModuleList([BatchNorm(c, precision) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.norms
        return F.relu(a(self.three(x)) + b(self.one(x)) + c(x))


def repvgg(chance: Random, precision: str) -> Made:
    """Two blocks of RepVGG."""
    c, side = chance.choice(((48, 112), (96, 56), (192, 28), (160, 28), (384, 14), (1280, 7)))
    model = nn.Sequential(*(Branches(c, precision) for _ in range(2)))
    return model, (picture(chance, precision, c, side),), _square


class Ghost(nn.Module):  # type: ignore[misc]
    """GhostNet: half the channels by a full filter, the other half cheaply from the first."""

    def __init__(self, c: int, inner: int, precision: str) -> None:
        super().__init__()
        self.full = nn.ModuleList(
            [Unit(c, inner // 2, 1, precision), Unit(inner, c // 2, 1, precision, nn.Identity())]
        )
        self.cheap = nn.ModuleList(
            [Unit(n, n, 3, precision, act, groups=n)
             for n, act in ((inner // 2, F.relu), (c // 2, nn.Identity()))]
        )  # fmt: skip
        self.less, self.more = (
            Linear(inner, inner // 4, precision),
            Linear(inner // 4, inner, precision),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.full[0](x)
        y = torch.cat((y, self.cheap[0](y)), 1)
        gate = F.hardsigmoid(self.more(F.relu(self.less(y.mean((2, 3))))))
        y = self.full[1](y * gate[:, :, None, None])
        return x + torch.cat((y, self.cheap[1](y)), 1)


def ghostnet(chance: Random, precision: str) -> Made:
    """A block of GhostNet."""
    c, inner, side = chance.choice(
        ((24, 72, 56), (40, 120, 28), (80, 200, 14), (112, 672, 14), (160, 960, 7), (16, 48, 112))
    )
    return Ghost(c, inner, precision), (picture(chance, precision, c, side),), _square


class Flow(nn.Module):  # type: ignore[misc]
    """Optical flow: matmuls of one image with the other shifted, then a flow told from them."""

    def __init__(self, c: int, reach: int, precision: str) -> None:
        super().__init__()
        n = (2 * reach + 1) ** 2
        self.convs = nn.ModuleList(
            [Conv(n + c, 96, 3, precision, bias=True), Conv(96, 2, 3, precision, bias=True)]
        )
        self.reach, self.precision = reach, precision

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        r, (h, w) = self.reach, x.shape[2:]
        x, y = (t / (t.square().mean(1, keepdim=True) + 1e-6).sqrt() for t in (x, y))
        wider = F.pad(y, (r, r, r, r))
        shifts = [(i, j) for i in range(2 * r + 1) for j in range(2 * r + 1)]
        costs = [(x * wider[:, :, i : i + h, j : j + w]).mean(1) for i, j in shifts]
        scores = F.leaky_relu(torch.cat((torch.stack(costs, 1), x), 1), 0.1)
        return self.convs[1](F.leaky_relu(self.convs[0](scores), 0.1))


def _smooth(flow: Tensor) -> Tensor:
    """How far from a guess, gently, and how uneven."""
    flow = flow.float()
    apart = (flow - flow.detach().flip(0)).square().sum(1).add(1e-6).pow(0.45)
    uneven = (flow[..., 1:] - flow[..., :-1]).abs().mean()
    return apart.mean() + uneven + (flow[:, :, 1:] - flow[:, :, :-1]).abs().mean()


def flow(chance: Random, precision: str) -> Made:
    """One level of an optical flow."""
    c, side = chance.choice(((32, 96), (64, 48), (96, 28), (128, 16), (196, 14)))
    x = picture(chance, precision, c, side)
    y = torch.randn_like(x).requires_grad_(True)
    return Flow(c, chance.choice((1, 1, 2)), precision), (x, y), _smooth


class Coupled(nn.Module):  # type: ignore[misc]
    """Glow: a scale for each channel, channels mixed, half of them moved by the other half."""

    def __init__(self, c: int, inner: int, precision: str) -> None:
        super().__init__()
        kind = stored(precision)
        self.shift, self.scale = (nn.Parameter(torch.zeros(c, 1, 1, dtype=kind)) for _ in range(2))
        self.mix = Conv(c, c, 1, precision)
        sizes = ((c // 2, inner, 3), (inner, inner, 1), (inner, c, 3))
        self.net = nn.ModuleList([Conv(a, b, k, precision, bias=True) for a, b, k in sizes])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        b, c, h, w = x.shape
        x = x.view(b, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4)
        x = x.reshape(b, 4 * c, h // 2, w // 2)
        kept, moved = self.mix((x + self.shift) * torch.exp(self.scale)).chunk(2, 1)
        y = F.relu(self.net[1](F.relu(self.net[0](kept))))
        scores = self.net[2](y).float()
        scale = torch.sigmoid(scores[:, 1::2] + 2.0)
        moved = (moved + scores[:, ::2]) * scale
        volume = torch.log(scale).sum((1, 2, 3)) + self.scale.float().sum() * h * w / 4
        return torch.cat((kept.float(), moved), 1), volume


def _likely(scores: tuple[Tensor, Tensor]) -> Tensor:
    z, volume = scores
    return -((-0.5 * (z.square() + 1.8379)).sum((1, 2, 3)) + volume).mean() / z[0].numel()


def glow(chance: Random, precision: str) -> Made:
    """A step of Glow with its likelihood."""
    c, side = chance.choice(((3, 64), (6, 32), (12, 32), (24, 16), (12, 64), (48, 8)))
    x = picture(chance, precision, c, side).detach().contiguous().requires_grad_(True)
    return Coupled(4 * c, chance.choice((96, 192, 512)), precision), (x,), _likely


class Critic(nn.Module):  # type: ignore[misc]
    """A discriminator of patches: strides, weights by their stretch, slopes, spread of a batch."""

    def __init__(self, c: int, precision: str) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            [Conv(c, 2 * c, 4, precision, 2), Conv(2 * c, 2 * c, 4, precision)]
        )
        self.end = Conv(2 * c + 1, 1, 3, precision, bias=True)
        self.precision = precision

    def _even(self, conv: Any, x: Tensor) -> Tensor:
        flat = conv.weight.flatten(1)
        right = flat.detach().sum(0)
        left = flat.detach() * right
        stretch = ((flat * right).sum(1) * left.sum(1)).sum() / left.square().sum().sqrt()
        x, weight = half(self.precision, x, conv.weight / (stretch + 1e-4))
        y = wide(self.precision, F.conv2d(x, weight, None, conv.stride, 1))
        spread, middle = torch.var_mean(y, (2, 3), correction=0, keepdim=True)
        return F.leaky_relu((y - middle) * torch.rsqrt(spread + 1e-5), 0.2)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = self._even(conv, x)
        b, c, h, w = x.shape
        groups = 1 + (b + 1) % 2  # two, where the batch is even
        apart = x.reshape(groups, b // groups, c, h, w).float()
        apart = (apart - apart.mean(0)).square().mean(0).add(1e-8).sqrt().mean((1, 2, 3))
        spread = apart.to(x.dtype).view(1, -1, 1, 1, 1).expand(groups, -1, 1, h, w)
        return self.end(torch.cat((x, spread.reshape(b, 1, h, w)), 1))


def _hinge(y: Tensor) -> Tensor:
    real, made = y.float().chunk(2) if len(y) > 1 else (y, y)
    return F.relu(1 - real).mean() + F.relu(1 + made).mean() - 0.1 * torch.tanh(made).mean()


def critic(chance: Random, precision: str) -> Made:
    """The middle of a discriminator."""
    c, side = chance.choice(((64, 64), (96, 48), (128, 32), (24, 120), (192, 32), (320, 16)))
    x = picture(chance, precision, c, side)
    x = torch.cat((x, x)).detach().requires_grad_(True)
    return Critic(c, precision), (x,), _hinge


class Arriving(nn.Module):  # type: ignore[misc]
    """Images as they arrive: bytes, mirrored, made even, mixed with others, then patches."""

    def __init__(self, width: int, patch: int, side: int, precision: str) -> None:
        super().__init__()
        self.conv, self.side = Conv(3, width, patch, precision, patch, bias=True), side
        self.conv.pad = 0
        self.norm, self.precision = LayerNorm(width, precision), precision

    def forward(self, x: Tensor, bright: Tensor, mirrored: Tensor, share: Tensor) -> Tensor:
        x = x.permute(0, 3, 1, 2) if x.shape[-1] == 3 else x
        x = x[:, :, 4 : 4 + self.side, 2 : 2 + self.side].float() / 255.0
        x = torch.where(mirrored, x.flip(3), x) * bright
        x = (x - x.mean((1, 2, 3), keepdim=True)) * (2.0 - bright) + 0.5
        x = (x.clamp(0.0, 1.0) - 0.45) / 0.225
        x = share * x + (1 - share) * x.roll(1, 0)
        y = self.conv(x.to(stored(self.precision)))
        return self.norm(y.flatten(2).transpose(1, 2))


def arriving(chance: Random, precision: str) -> Made:
    """What is done to images on the device before a model."""
    side, patch = chance.choice(((224, 16), (192, 16), (96, 8), (32, 4), (160, 32), (64, 8)))
    batch, more = chance.choice((3, 8, 24, 32, 64, 128)), side + 8
    shape = (batch, more, more, 3) if chance.random() < 0.5 else (batch, 3, more, more)
    x = torch.zeros(shape, dtype=torch.uint8)
    scores = [noise(batch, 1, 1, 1, precision="fp32", grad=True) for _ in range(2)]
    mirrored = torch.zeros(batch, 1, 1, 1, dtype=torch.bool)
    width = chance.choice((96, 192, 384, 768))
    return Arriving(width, patch, side, precision), (x, scores[0], mirrored, scores[1]), _square


NEAR_MIXED: dict[str, Callable[[Random, str], Made]] = {
    "res2net": res2net,
    "repvgg": repvgg,
    "ghostnet": ghostnet,
    "flow": flow,
    "glow": glow,
    "critic": critic,
    "arriving": arriving,
}
