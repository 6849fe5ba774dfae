"""Models of images farther off: EfficientNet, RegNet, NFNet, V-Net and VQ-VAE.

They widen what is trained on by channels gated by their own means, weights made even in every step,
norms of single images, nearest codes, images unfolded from channels and losses over places. None of
them is a model kept out of training.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from foretell_lab.fused.models.image import _image, _square
from foretell_lab.fused.models.parts import (
    BatchNorm,
    Conv,
    Scale,
    half,
    stored,
    wide,
)
from foretell_lab.fused.models.text import Made

Tensor = Any


class Excite(nn.Module):  # type: ignore[misc]
    """Squeeze and excitation: channels are scaled by a gate made of their means."""

    def __init__(self, c: int, inner: int, precision: str, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.less, self.more = (
            Conv(c, inner, 1, precision, bias=True),
            Conv(inner, c, 1, precision, bias=True),
        )
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.more(self.act(self.less(x.mean((2, 3), keepdim=True)))))


class Swished(nn.Module):  # type: ignore[misc]
    """EfficientNet: wider, depthwise, gated, narrower; whole images are dropped."""

    def __init__(self, c: int, wider: int, size: int, stride: int, precision: str) -> None:
        super().__init__()
        n = c * wider
        self.convs = nn.ModuleList(
            [
                Conv(c, n, 1, precision),
                Conv(n, n, size, precision, stride, groups=n),
                Conv(n, c, 1, precision),
            ]
        )
        self.norms = nn.ModuleList([BatchNorm(k, precision) for k in (n, n, c)])
        self.gate, self.stride = Excite(n, max(4, c // 4), precision, F.silu), stride

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.norms[0](self.convs[0](x)))
        y = self.gate(F.silu(self.norms[1](self.convs[1](y))))
        y = self.norms[2](self.convs[2](y))
        if self.stride > 1:
            return y
        kept = torch.rand(len(y), 1, 1, 1, dtype=y.dtype, device=y.device) + 0.8
        return x + y / 0.8 * kept.floor()


def efficientnet(chance: Random, precision: str) -> Made:
    """Two blocks of EfficientNet."""
    c, side = chance.choice(((24, 56), (40, 28), (48, 48), (80, 14), (112, 14), (192, 7), (320, 8)))
    size, wider = chance.choice((3, 5)), chance.choice((1, 4, 6))
    x = _image(chance, precision, c, side)
    blocks = [Swished(c, wider, size, s, precision) for s in (1, chance.choice((1, 2)))]
    return nn.Sequential(*blocks), (x,), _square


class Grouped(nn.Module):  # type: ignore[misc]
    """RegNet: a bottleneck as wide as its ends, in groups, gated."""

    def __init__(self, c: int, group: int, stride: int, precision: str) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            [
                Conv(c, c, 1, precision),
                Conv(c, c, 3, precision, stride, c // group),
                Conv(c, c, 1, precision),
            ]
        )
        self.norms = nn.ModuleList([BatchNorm(c, precision) for _ in range(4)])
        self.skip = Conv(c, c, 1, precision, stride) if stride > 1 else None
        self.gate = Excite(c, c // 4, precision, F.relu)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.convs[0](x)))
        y = self.norms[2](self.convs[2](self.gate(F.relu(self.norms[1](self.convs[1](y))))))
        return F.relu(y + (x if self.skip is None else self.norms[3](self.skip(x))))


def regnet(chance: Random, precision: str) -> Made:
    """Two blocks of RegNet."""
    c, group, side = chance.choice(
        ((72, 24, 56), (120, 24, 28), (216, 24, 28), (232, 58, 28), (336, 24, 14), (448, 56, 14),
         (576, 24, 14), (784, 56, 7), (1008, 56, 7))
    )  # fmt: skip
    x = _image(chance, precision, c, side)
    blocks = [Grouped(c, group, s, precision) for s in (1, chance.choice((1, 2)))]
    return nn.Sequential(*blocks), (x,), _square


class Normless(nn.Module):  # type: ignore[misc]
    """NFNet: no norm of what flows; weights are made even and scaled, branches start at zero."""

    def __init__(self, c: int, inner: int, beta: float, smooth: bool, precision: str) -> None:
        super().__init__()
        sizes = ((c, inner, 1), (inner, inner, 3), (inner, c, 1))
        self.convs = nn.ModuleList([Conv(a, b, k, precision, bias=True) for a, b, k in sizes])
        gains = [torch.ones(b, 1, 1, 1, dtype=stored(precision)) for _, b, _ in sizes]
        self.gains = nn.ParameterList([nn.Parameter(g) for g in gains])
        self.start = nn.Parameter(torch.zeros((), dtype=stored(precision)))
        self.gate, self.beta = Excite(c, c // 2, precision, F.relu), beta
        self.act = F.gelu if smooth else F.silu

    def _even(self, i: int) -> Tensor:
        weight = self.convs[i].weight
        spread, middle = torch.var_mean(weight, (1, 2, 3), correction=0, keepdim=True)
        fan = weight[0].numel()
        scale = torch.rsqrt(torch.clamp_min(spread * fan, 1e-4)) * self.gains[i]
        return weight * scale - middle * scale

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(x) * 1.7868 * self.beta
        for i, conv in enumerate(self.convs):
            y, weight, bias = half(conv.precision, y, self._even(i), conv.bias)
            y = F.conv2d(y, weight, bias, 1, conv.pad)
            y = self.act(y) * 1.7868 if i < 2 else y
        return x + 0.2 * self.start * (2 * self.gate(y))


def nfnet(chance: Random, precision: str) -> Made:
    """Two blocks of NFNet."""
    c, inner, side = chance.choice(
        (
            (96, 48, 56),
            (256, 128, 48),
            (512, 256, 24),
            (768, 384, 12),
            (1536, 384, 8),
            (320, 80, 28),
        )
    )
    x, smooth = _image(chance, precision, c, side), chance.random() < 0.6
    blocks = [Normless(c, inner, b, smooth, precision) for b in (1.0, 0.91)]
    return nn.Sequential(*blocks), (x,), _square


class Image(Scale):
    """Instance norm: every channel of every image by itself."""

    def forward(self, x: Tensor) -> Tensor:
        y = wide(self.precision, x)
        spread, middle = torch.var_mean(y, (2, 3), correction=0, keepdim=True)
        y = (y - middle) * torch.rsqrt(spread + 1e-5)
        weight, bias = (cast(Tensor, t)[:, None, None] for t in (self.weight, self.bias))
        return y * weight + bias


class Volume(nn.Module):  # type: ignore[misc]
    """V-Net: convolutions beside a shortcut, down and up by strides, joined; slopes are learned."""

    def __init__(self, c: int, single: bool, precision: str) -> None:
        super().__init__()
        norm = Image if single else BatchNorm
        sizes = (c, 2 * c, 2 * c, c)
        self.norms = nn.ModuleList([norm(k, precision) for k in sizes])
        self.convs = nn.ModuleList(
            [
                Conv(c, c, 5, precision, bias=True),
                Conv(c, 2 * c, 3, precision, 2, bias=True),
                Conv(2 * c, 2 * c, 3, precision, bias=True),
                Conv(2 * c, c, 3, precision, bias=True),
            ]
        )
        self.up, self.end = Conv(2 * c, 4 * c, 1, precision), Conv(c, 2, 1, precision, bias=True)
        self.slopes = nn.Parameter(torch.empty(4, 2 * c, dtype=stored(precision)))

    def _next(self, i: int, x: Tensor) -> Tensor:
        y = self.norms[i](self.convs[i](x))
        slope = self.slopes[i][: y.shape[1], None, None]
        return torch.where(y > 0, y, y * slope)

    def forward(self, x: Tensor) -> Tensor:
        first = self._next(0, x) + x
        low = self._next(1, first)
        low = self._next(2, low) + low
        up = unfolded(self.up(low))
        joined = torch.cat((up, first.to(up.dtype)), 1)
        return F.softmax(self.end(self._next(3, joined) + up).float(), 1)


def unfolded(x: Tensor) -> Tensor:
    """An image twice as large, from four times the channels."""
    b, c, h, w = x.shape
    y = x.view(b, c // 4, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3)
    return y.reshape(b, c // 4, 2 * h, 2 * w)


def _dice(y: Tensor) -> Tensor:
    """How little two masks overlap, and how surely each place is predicted."""
    p, wanted = y[:, 1], (y[:, 0].detach() > 0.3).to(y.dtype)
    over = 2 * (p * wanted).sum((1, 2)) + 1
    all_of = (p.square() + wanted).sum((1, 2)) + 1
    sure = -(wanted * torch.log(p + 1e-6) + (1 - wanted) * torch.log1p(1e-6 - p)).mean()
    return (1 - over / all_of).mean() + sure


def vnet(chance: Random, precision: str) -> Made:
    """Two levels of a V-Net."""
    c, side = chance.choice(
        ((16, 128), (32, 96), (32, 64), (48, 80), (64, 48), (128, 32), (96, 24))
    )
    x = _image(chance, precision, c, side)
    return Volume(c, chance.random() < 0.6, precision), (x,), _dice


class Codes(nn.Module):  # type: ignore[misc]
    """VQ-VAE: places are coded by the nearest code; residual convolutions make an image of them."""

    def __init__(self, c: int, codes: int, precision: str) -> None:
        super().__init__()
        self.book = nn.Parameter(torch.empty(codes, c, dtype=stored(precision)))
        self.enter = Conv(c, c, 1, precision, bias=True)
        self.wide = nn.ModuleList([Conv(c, c // 4, 3, precision, bias=True) for _ in range(2)])
        self.back = nn.ModuleList([Conv(c // 4, c, 1, precision, bias=True) for _ in range(2)])
        self.end = Conv(c, 12, 3, precision, bias=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.enter(x).permute(0, 2, 3, 1)
        flat = z.reshape(-1, z.shape[-1])
        products = torch.matmul(*half(self.enter.precision, flat, self.book.t()))
        far = flat.square().sum(1, keepdim=True) + self.book.square().sum(1) - 2 * products
        code = F.embedding(torch.argmin(far, 1), self.book).view(z.shape)
        scores = (code - z.detach()).square().mean() + 0.25 * (code.detach() - z).square().mean()
        y = (z + (code - z).detach()).permute(0, 3, 1, 2)
        for wider, back in zip(self.wide, self.back, strict=True):
            y = y + back(F.relu(wider(F.relu(y))))
        return torch.sigmoid(unfolded(self.end(F.relu(y)))), scores


def vqvae(chance: Random, precision: str) -> Made:
    """Codes and decoder of a VQ-VAE."""
    c, side = chance.choice(((64, 32), (128, 32), (128, 16), (256, 16), (192, 24), (96, 40)))
    x = _image(chance, precision, c, side).detach()[:64].requires_grad_(True)
    model = Codes(c, chance.choice((256, 512, 1000, 1024)), precision)
    return model, (x,), lambda y: (y[0].float() - 0.5).abs().mean() + y[1].float()


FAR_IMAGE: dict[str, Callable[[Random, str], Made]] = {
    "efficientnet": efficientnet,
    "regnet": regnet,
    "nfnet": nfnet,
    "vnet": vnet,
    "vqvae": vqvae,
}
