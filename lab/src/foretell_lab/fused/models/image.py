"""Models of images: ResNet, VGG, MobileNet, ConvNeXt, ViT, Swin and a U-Net."""

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
    GroupNorm,
    LayerNorm,
    Linear,
    dropout,
    entropy,
    noise,
    stored,
)
from foretell_lab.fused.models.text import Layer, Made, merged, softmax_attention

Tensor = Any


def _image(chance: Random, precision: str, channels: int, side: int) -> Tensor:
    """A batch of images, channels second or last."""
    most = max(1, (96 << 20) // (channels * side * side))
    batch = min(most, chance.choice((4, 8, 16, 32, 64, 96, 128, 256)))
    x = torch.randn(batch, channels, side, side, dtype=stored(precision))
    if chance.random() < 0.4:
        x = x.to(memory_format=torch.channels_last)
    return x.requires_grad_(True)


def _square(y: Tensor) -> Tensor:
    return (y.float() ** 2).mean()


class Bottleneck(nn.Module):  # type: ignore[misc]
    """Three convolutions and a shortcut."""

    def __init__(self, c: int, inner: int, precision: str, stride: int) -> None:
        super().__init__()
        out = 4 * inner
        self.convs = nn.ModuleList(
            [
                Conv(c, inner, 1, precision),
                Conv(inner, inner, 3, precision, stride),
                Conv(inner, out, 1, precision),
            ]
        )
        self.norms = nn.ModuleList([BatchNorm(n, precision) for n in (inner, inner, out)])
        self.skip = Conv(c, out, 1, precision, stride) if stride > 1 or c != out else None
        self.skip_norm = BatchNorm(out, precision)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.convs[0](x)))
        y = F.relu(self.norms[1](self.convs[1](y)))
        y = self.norms[2](self.convs[2](y))
        return F.relu(y + (x if self.skip is None else self.skip_norm(self.skip(x))))


def resnet(chance: Random, precision: str) -> Made:
    """Two blocks of one ResNet stage, with the stem or the head at the ends."""
    inner, side = chance.choice(((64, 56), (128, 28), (256, 14), (512, 7)))
    x = _image(chance, precision, 4 * inner, side)
    blocks = [Bottleneck(4 * inner, inner, precision, s) for s in (1, chance.choice((1, 2)))]
    return nn.Sequential(*blocks), (x,), _square


class Stem(nn.Module):  # type: ignore[misc]
    """The first and last layers of ResNet: pooling and the loss."""

    def __init__(self, width: int, precision: str) -> None:
        super().__init__()
        self.conv, self.norm = Conv(3, width, 7, precision, 2), BatchNorm(width, precision)
        self.head, self.precision = Linear(width, 1000, precision), precision

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 3, 2, 1)
        return self.head(x.mean((2, 3)))


def stem(chance: Random, precision: str) -> Made:
    """Stem, pooling, mean, head and loss."""
    x = _image(chance, precision, 3, chance.choice((128, 160, 224)))
    model = Stem(chance.choice((32, 64)), precision)
    return model, (x,), lambda y: entropy(precision, y)


class Vgg(nn.Module):  # type: ignore[misc]
    """Convolutions with bias and ReLU, pooling, and linear layers with dropout."""

    def __init__(self, c: int, k: int, side: int, precision: str) -> None:
        super().__init__()
        self.convs = nn.ModuleList([Conv(n, k, 3, precision, bias=True) for n in (c, k)])
        self.linears = nn.ModuleList(
            [Linear(k * 49, 1024, precision), Linear(1024, 1000, precision)]
        )
        self.side = side

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = F.relu(conv(x))
        x = F.max_pool2d(x, 2)
        x = F.adaptive_avg_pool2d(x, 7).flatten(1)
        return self.linears[1](dropout(F.relu(self.linears[0](x)), 0.5))


def vgg(chance: Random, precision: str) -> Made:
    """One stage of VGG and its classifier."""
    c, k, side = chance.choice(
        ((3, 64, 112), (64, 128, 112), (128, 256, 56), (256, 512, 28), (512, 512, 14))
    )
    x = _image(chance, precision, max(c, 3), side)
    return Vgg(c, k, side, precision), (x,), lambda y: entropy(precision, y)


class Inverted(nn.Module):  # type: ignore[misc]
    """MobileNet's and EfficientNet's block: expand, depthwise, squeeze, project."""

    def __init__(self, c: int, times: int, size: int, precision: str, act: str) -> None:
        super().__init__()
        n = c * times
        self.expand, self.project = Conv(c, n, 1, precision), Conv(n, c, 1, precision)
        self.deep = Conv(n, n, size, precision, groups=n)
        self.norms = nn.ModuleList([BatchNorm(w, precision) for w in (n, n, c)])
        self.less, self.more = (
            Conv(n, c // 4, 1, precision, bias=True),
            Conv(c // 4, n, 1, precision, bias=True),
        )
        self.act = {"silu": F.silu, "hardswish": F.hardswish, "relu6": F.relu6}[act]
        self.squeeze = act != "relu6"

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.norms[0](self.expand(x)))
        y = self.act(self.norms[1](self.deep(y)))
        if self.squeeze:
            gate = self.more(F.silu(self.less(y.mean((2, 3), keepdim=True))))
            y = y * torch.sigmoid(gate)
        return x + self.norms[2](self.project(y))


def mobilenet(chance: Random, precision: str) -> Made:
    """Two inverted blocks."""
    c, side = chance.choice(((16, 112), (24, 56), (40, 28), (80, 14), (112, 14), (192, 7)))
    act, size = chance.choice(("silu", "hardswish", "relu6")), chance.choice((3, 5))
    x = _image(chance, precision, c, side)
    model = nn.Sequential(
        *(Inverted(c, chance.choice((4, 6)), size, precision, act) for _ in range(2))
    )
    return model, (x,), _square


class Next(nn.Module):  # type: ignore[misc]
    """ConvNeXt: a wide depthwise filter, norm and layers over channels last, a scale."""

    def __init__(self, c: int, precision: str) -> None:
        super().__init__()
        self.deep, self.norm = (
            Conv(c, c, 7, precision, groups=c, bias=True),
            LayerNorm(c, precision),
        )
        self.up, self.down = Linear(c, 4 * c, precision), Linear(4 * c, c, precision)
        self.scale = nn.Parameter(torch.empty(c, dtype=stored(precision)))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.deep(x).permute(0, 2, 3, 1))
        y = self.down(F.gelu(self.up(y))) * self.scale
        return x + y.permute(0, 3, 1, 2)


def convnext(chance: Random, precision: str) -> Made:
    """Two blocks of ConvNeXt."""
    c, side = chance.choice(((96, 56), (128, 56), (192, 28), (256, 28), (384, 14), (768, 7)))
    x = _image(chance, precision, c, side)
    return nn.Sequential(Next(c, precision), Next(c, precision)), (x,), _square


class Vit(nn.Module):  # type: ignore[misc]
    """Patches, a class token, positions and two layers."""

    def __init__(self, width: int, precision: str) -> None:
        super().__init__()
        kind = stored(precision)
        self.patch = nn.Parameter(torch.empty(width, 3, 16, 16, dtype=kind))
        self.token = nn.Parameter(torch.empty(1, 1, width, dtype=kind))
        self.places = nn.Parameter(torch.empty(1, 197, width, dtype=kind))
        self.layers = nn.ModuleList(
            [Layer(width, width // 64, precision, "gelu", before=True) for _ in range(2)]
        )
        self.norm, self.head = LayerNorm(width, precision), Linear(width, 1000, precision)

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv2d(x, self.patch, stride=16).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), 1) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


def vit(chance: Random, precision: str) -> Made:
    """A short vision transformer."""
    width = chance.choice((192, 384, 768, 1024))
    x = noise(chance.choice((8, 16, 32, 64, 128)), 3, 224, 224, precision=precision)
    return Vit(width, precision), (x,), lambda y: entropy(precision, y)


class SwinBlock(nn.Module):  # type: ignore[misc]
    """Shifted windows: roll, cut into windows, attention with a bias and mask, and back."""

    def __init__(self, c: int, heads: int, window: int, shift: int, precision: str) -> None:
        super().__init__()
        self.norms = nn.ModuleList([LayerNorm(c, precision) for _ in range(2)])
        self.qkv, self.out = Linear(c, 3 * c, precision), Linear(c, c, precision)
        self.up, self.down = Linear(c, 4 * c, precision), Linear(4 * c, c, precision)
        n = window * window
        self.places = nn.Parameter(torch.empty(1, heads, n, n, dtype=stored(precision)))
        self.heads, self.window, self.shift, self.precision = heads, window, shift, precision

    def windows(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        n = self.window
        x = x.view(b, h // n, n, w // n, n, c).permute(0, 1, 3, 2, 4, 5)
        return x.reshape(-1, n * n, c)

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        n = self.window
        y = self.norms[0](x)
        y = torch.roll(y, (-self.shift, -self.shift), (1, 2)) if self.shift else y
        y = self.windows(y)
        parts = self.qkv(y).view(y.shape[0], n * n, 3, self.heads, c // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        y = self.out(merged(softmax_attention(q, k, v, self.precision, bias=self.places)))
        y = y.view(b, h // n, w // n, n, n, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        y = torch.roll(y, (self.shift, self.shift), (1, 2)) if self.shift else y
        x = x + y
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def swin(chance: Random, precision: str) -> Made:
    """Two blocks of Swin, the second shifted."""
    c, side = chance.choice(((96, 56), (192, 28), (384, 14), (128, 56), (256, 28), (512, 14)))
    batch = chance.choice((4, 8, 16, 32, 64))
    blocks = [SwinBlock(c, c // 32, 7, shift, precision) for shift in (0, 3)]
    x = noise(batch, side, side, c, precision=precision, grad=True)
    return nn.Sequential(*blocks), (x,), _square


class UnetBlock(nn.Module):  # type: ignore[misc]
    """Group norm, SiLU, convolution, twice, with a shift by the time step and a shortcut."""

    def __init__(self, c: int, k: int, precision: str) -> None:
        super().__init__()
        self.norms = nn.ModuleList([GroupNorm(n, precision) for n in (c, k)])
        self.convs = nn.ModuleList([Conv(n, k, 3, precision, bias=True) for n in (c, k)])
        self.skip, self.time = Conv(c, k, 1, precision, bias=True), Linear(512, k, precision)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.convs[0](F.silu(self.norms[0](x)))
        y = y + self.time(F.silu(time))[:, :, None, None]
        y = self.convs[1](dropout(F.silu(self.norms[1](y)), 0.1))
        return self.skip(x) + y


class Unet(nn.Module):  # type: ignore[misc]
    """Down, up and a join of both, as diffusion models do."""

    def __init__(self, c: int, precision: str) -> None:
        super().__init__()
        self.down = UnetBlock(c, 2 * c, precision)
        self.up = UnetBlock(3 * c, c, precision)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.down(F.avg_pool2d(x, 2), time)
        y = F.interpolate(y, scale_factor=2, mode="nearest")
        return self.up(torch.cat((x.to(y.dtype), y), 1), time)


def unet(chance: Random, precision: str) -> Made:
    """Two levels of a diffusion U-Net."""
    c, side = chance.choice(((64, 64), (128, 32), (128, 64), (192, 32), (256, 16), (320, 32)))
    batch = min(chance.choice((4, 8, 16, 32)), (64 << 20) // (c * side * side))
    x = noise(batch, c, side, side, precision=precision, grad=True)
    return Unet(c, precision), (x, noise(batch, 512, precision=precision)), _square


IMAGE: dict[str, Callable[[Random, str], Made]] = {
    "resnet": resnet,
    "stem": stem,
    "vgg": vgg,
    "mobilenet": mobilenet,
    "convnext": convnext,
    "vit": vit,
    "swin": swin,
    "unet": unet,
}
