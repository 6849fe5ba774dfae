"""Places farther off: StyleGAN, PointNet and ConvLSTM.

They widen what is trained on by filters made anew for every image, points without order and
recurrent cells of whole images. None of them is a model kept out of training.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from foretell_lab.fused.models.parts import (
    BatchNorm,
    Conv,
    Linear,
    dropout,
    half,
    noise,
    stored,
)
from foretell_lab.fused.models.text import Made

Tensor = Any


class Styled(nn.Module):  # type: ignore[misc]
    """StyleGAN 2: a filter of its own for every image, made even; noise, a slope, a clamp."""

    def __init__(self, c: int, k: int, style: int, precision: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(k, c, 3, 3, dtype=stored(precision)))
        self.tell, self.precision = Linear(style, c, precision), precision
        self.bias = nn.Parameter(torch.zeros(k, dtype=stored(precision)))
        self.loud = nn.Parameter(torch.zeros((), dtype=stored(precision)))

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        b, c, h, w = x.shape
        made = self.weight[None] * (self.tell(style) + 1)[:, None, :, None, None]
        made = made * torch.rsqrt(made.square().sum((2, 3, 4), keepdim=True) + 1e-8)
        image, made = half(self.precision, x.reshape(1, b * c, h, w), made.flatten(0, 1))
        y = F.conv2d(image, made, None, 1, 1, 1, b).view(b, -1, h, w)
        y = y + torch.randn(b, 1, h, w, dtype=y.dtype, device=y.device) * self.loud
        y = F.leaky_relu(y + self.bias[:, None, None], 0.2) * 1.4142
        return torch.clamp(y, -256, 256)


class Style(nn.Module):  # type: ignore[misc]
    """The way to a style, two styled layers at two sizes, an image added up."""

    def __init__(self, c: int, k: int, precision: str) -> None:
        super().__init__()
        self.ways = nn.ModuleList([Linear(256, 256, precision) for _ in range(2)])
        self.layers = nn.ModuleList([Styled(c, k, 256, precision), Styled(k, k, 256, precision)])
        self.images = nn.ModuleList([Conv(k, 3, 1, precision, bias=True) for _ in range(2)])

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        z = z * torch.rsqrt(z.square().mean(1, keepdim=True) + 1e-8)
        for way in self.ways:
            z = F.leaky_relu(way(z) * 0.01, 0.2) * 1.4142
        y = self.layers[0](x, z)
        image = F.interpolate(self.images[0](y), scale_factor=2, mode="nearest")
        y = self.layers[1](F.interpolate(y, scale_factor=2, mode="nearest"), z)
        return image + self.images[1](y)


def stylegan(chance: Random, precision: str) -> Made:
    """Two layers of StyleGAN 2."""
    c, k, side = chance.choice(
        ((512, 512, 8), (512, 256, 16), (256, 128, 32), (128, 64, 64), (96, 80, 48), (192, 96, 24))
    )
    batch = chance.choice((2, 4, 8, 16, 32))
    x = noise(batch, c, side, side, precision=precision, grad=True)
    model = Style(c, k, precision)
    z = noise(batch, 256, precision=precision)
    return model, (x, z), lambda y: F.softplus(-y.float().mean((1, 2, 3))).mean()


class Points(nn.Module):  # type: ignore[misc]
    """PointNet: the same layers for every point, the most of all points, a turn near orthogonal."""

    def __init__(self, widths: tuple[int, int, int], precision: str) -> None:
        super().__init__()
        a, b, c = widths
        sizes = ((3, a), (a, a), (a, b), (b, c))
        self.layers = nn.ModuleList([Linear(i, o, precision) for i, o in sizes])
        self.norms = nn.ModuleList([BatchNorm(o, precision) for _, o in sizes])
        self.turn, self.head = Linear(c, a * a, precision), Linear(a + c, 50, precision)
        self.precision = precision

    def _next(self, i: int, x: Tensor) -> Tensor:
        return F.relu(self.norms[i](self.layers[i](x).transpose(1, 2)).transpose(1, 2))

    def forward(self, x: Tensor) -> Tensor:
        near = self._next(1, self._next(0, x))
        whole = self._next(3, self._next(2, near)).amax(1)
        b, n, a = near.shape
        turn = self.turn(whole).view(b, a, a) + torch.eye(a, device=x.device, dtype=x.dtype)
        turned = torch.bmm(*half(self.precision, near, turn))
        off = torch.bmm(turn, turn.transpose(1, 2)) - torch.eye(a, device=x.device, dtype=x.dtype)
        all_of = torch.cat((turned, whole.unsqueeze(1).expand(b, n, -1).to(turned.dtype)), -1)
        scores = F.log_softmax(self.head(dropout(all_of, 0.3)).float(), -1)
        return (
            -scores[..., 0].mean() + 1e-3 * torch.linalg.vector_norm(off.float(), dim=(1, 2)).mean()
        )


def pointnet(chance: Random, precision: str) -> Made:
    """Points of shapes, each told its part."""
    widths = chance.choice(((64, 128, 1024), (32, 96, 320), (48, 192, 576), (64, 256, 1000)))
    points = chance.choice((512, 1024, 2048, 2500))
    x = noise(chance.choice((4, 8, 16, 24, 32, 64)), points, 3, precision=precision, grad=True)
    return Points(widths, precision), (x,), lambda y: y


class Weather(nn.Module):  # type: ignore[misc]
    """ConvLSTM: gates from convolutions, a share of the cell in each gate, over three steps."""

    def __init__(self, c: int, k: int, side: int, precision: str) -> None:
        super().__init__()
        self.enter, self.end = Conv(c, 4 * k, 3, precision, bias=True), Conv(k, c, 1, precision)
        self.again = Conv(k, 4 * k, 5, precision)
        self.peeps = nn.Parameter(torch.empty(3, k, side, side, dtype=stored(precision)))

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        outs = []
        for t in range(x.shape[1]):
            i, f, g, o = (self.enter(x[:, t]) + self.again(h)).chunk(4, 1)
            i, f = torch.sigmoid(i + self.peeps[0] * c), torch.sigmoid(f + self.peeps[1] * c)
            c = f * c + i * torch.tanh(g)
            h = torch.sigmoid(o + self.peeps[2] * c) * torch.tanh(c)
            outs.append(torch.sigmoid(self.end(h)))
        return torch.stack(outs, 1)


def convlstm(chance: Random, precision: str) -> Made:
    """Three steps of a forecast of images."""
    c, k, side = chance.choice(((4, 64, 16), (16, 64, 32), (1, 32, 64), (16, 128, 16), (3, 96, 24)))
    batch = chance.choice((4, 8, 16, 32, 64))
    x = noise(batch, 3, c, side, side, precision=precision, grad=True)
    h, cell = (noise(batch, k, side, side, precision=precision) for _ in range(2))
    return Weather(c, k, side, precision), (x, h, cell), lambda y: (y.float() - 0.5).abs().mean()


FAR_PLACES: dict[str, Callable[[Random, str], Made]] = {
    "stylegan": stylegan,
    "pointnet": pointnet,
    "convlstm": convlstm,
}
