"""Models of images near those known: heads of detectors, heat maps, branches, gates.

They widen what is trained on by levels joined for masks, boxes and their overlaps, heat maps,
filters with gaps, sums over neighbouring channels, the most and the mean of channels. None is a
model kept out of training.
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
    BatchNorm,
    Conv,
    GroupNorm,
    Linear,
    dropout,
    half,
    noise,
    wide,
)
from foretell_lab.fused.models.text import Made

Tensor = Any


def picture(chance: Random, precision: str, channels: int, side: int) -> Tensor:
    """A batch of images, channels second or last; from few places to many."""
    most = chance.choice((1 << 20, 6 << 20, 24 << 20, 64 << 20)) // (channels * side * side)
    batch = max(1, min(most, chance.choice((1, 2, 3, 6, 8, 12, 24, 32, 48, 64, 128))))
    x = noise(batch, channels, side, side, precision=precision)
    if chance.random() < 0.4:
        x = x.to(memory_format=torch.channels_last)
    return x.requires_grad_(True)


def larger(x: Tensor, times: int = 2) -> Tensor:
    """An image some times as large."""
    return F.interpolate(x, scale_factor=times, mode="nearest")


def pixels(y: Tensor) -> Tensor:
    """Cross entropy of every place, channels being classes; unlabelled places do not count."""
    scores = F.log_softmax(y.float(), 1)[:, 0]
    counts = (y[:, -1].detach() > -1.0).float()
    return -(scores * counts).sum() / counts.sum().clamp_min(1.0)


class Unit(nn.Module):  # type: ignore[misc]
    """Convolution, batch norm, activation."""

    def __init__(
        self, c: int, k: int, size: int, precision: str, act: Any = F.relu, **extra: Any
    ) -> None:
        super().__init__()
        self.conv, self.norm = Conv(c, k, size, precision, **extra), BatchNorm(k, precision)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x)))


class Masks(nn.Module):  # type: ignore[misc]
    """SegFormer's head: tokens of four levels made equally wide and large, joined to classes."""

    def __init__(self, widths: list[int], inner: int, classes: int, precision: str) -> None:
        super().__init__()
        self.levels = nn.ModuleList([Linear(w, inner, precision) for w in widths])
        self.join = Unit(len(widths) * inner, inner, 1, precision)
        self.end = Conv(inner, classes, 1, precision, bias=True)

    def forward(self, *given: Tensor) -> Tensor:
        images = []
        for i, (level, x) in enumerate(zip(self.levels, given, strict=True)):
            side = int(x.shape[1] ** 0.5)
            y = level(x).transpose(1, 2).reshape(len(x), -1, side, side)
            images.append(larger(y, 2**i) if i else y)
        y = self.join(torch.cat(images[::-1], 1))
        return self.end(y * dropout(y.new_ones(*y.shape[:2], 1, 1), 0.1))


def segformer(chance: Random, precision: str) -> Made:
    """The head of SegFormer over tokens of four levels."""
    widths = chance.choice(([32, 64, 160, 256], [64, 128, 320, 512], [24, 48, 96, 192]))
    inner, side = chance.choice((96, 144, 256, 768)), chance.choice((24, 32, 56, 64, 120, 128))
    batch = max(1, min(chance.choice((1, 2, 4, 8, 16)), (24 << 20) // (inner * side * side)))
    given = [
        noise(batch, (side >> i) ** 2, w, precision=precision, grad=True)
        for i, w in enumerate(widths)
    ]
    return Masks(widths, inner, chance.choice((19, 21, 150)), precision), tuple(given), pixels


class Boxes(nn.Module):  # type: ignore[misc]
    """FCOS: two towers shared by all levels tell classes, distances to sides, and centres."""

    def __init__(self, c: int, classes: int, levels: int, precision: str) -> None:
        super().__init__()
        self.convs = nn.ModuleList([Conv(c, c, 3, precision, bias=True) for _ in range(4)])
        self.norms = nn.ModuleList([GroupNorm(c, precision) for _ in range(4)])
        self.ends = nn.ModuleList([Conv(c, n, 3, precision, bias=True) for n in (classes, 4, 1)])
        self.scales = nn.Parameter(torch.ones(levels))

    def _tower(self, x: Tensor, first: int) -> Tensor:
        for i in (first, first + 1):
            x = F.relu(self.norms[i](self.convs[i](x)))
        return x

    def forward(self, *levels: Tensor) -> tuple[Tensor, ...]:
        scores = []
        for x, scale in zip(levels, self.scales, strict=True):
            a, b = self._tower(x, 0), self._tower(x, 2)
            sides = torch.exp(self.ends[1](b).float() * scale)
            ends = (self.ends[0](a), sides, self.ends[2](b))
            scores.append([t.permute(0, 2, 3, 1).flatten(1, 2) for t in ends])
        return tuple(torch.cat(parts, 1).float() for parts in zip(*scores, strict=True))


def _found(outputs: tuple[Tensor, ...]) -> Tensor:
    """A focal loss of classes, overlaps of boxes with those around them, centres."""
    scores, sides, centre = outputs
    p = torch.sigmoid(scores)
    focal = 0.75 * p.square() * F.softplus(scores)
    wanted = sides.detach().flip(1)
    least, most = torch.minimum(sides, wanted), torch.maximum(sides, wanted)
    shared = (least[..., 0] + least[..., 2]) * (least[..., 1] + least[..., 3])
    hull = (most[..., 0] + most[..., 2]) * (most[..., 1] + most[..., 3])
    both = sum((t[..., 0] + t[..., 2]) * (t[..., 1] + t[..., 3]) for t in (sides, wanted)) - shared
    overlap = shared / (both + 1e-7) - (hull - both) / hull.clamp_min(1e-7)
    near = (wanted.amin(-1) / wanted.amax(-1)).clamp_min(0.0).sqrt()
    centred = F.softplus(centre[..., 0]) - centre[..., 0] * near
    return focal.mean() + ((1 - overlap) * near).sum() / near.sum() + centred.mean()


def fcos(chance: Random, precision: str) -> Made:
    """The heads of FCOS over two or three levels, with their losses."""
    c, side, levels = chance.choice((96, 128, 192, 256)), chance.choice((28, 40, 64)), 2
    first = picture(chance, precision, c, side)
    rest = [noise(len(first), c, side // 2, side // 2, precision=precision, grad=True)]
    if chance.random() < 0.5:
        rest.append(noise(len(first), c, side // 4, side // 4, precision=precision, grad=True))
        levels = 3
    return Boxes(c, chance.choice((20, 80, 91)), levels, precision), (first, *rest), _found


class Hourglass(nn.Module):  # type: ignore[misc]
    """An hourglass: norms before convolutions, down by the most of four, up again and added."""

    def __init__(self, c: int, joints: int, precision: str) -> None:
        super().__init__()
        sizes = ((c, c // 2, 1), (c // 2, c // 2, 3), (c // 2, c, 1))
        self.norms = nn.ModuleList([BatchNorm(a, precision) for _ in "ab" for a, _, _ in sizes])
        convs = [Conv(a, b, k, precision, bias=True) for _ in "ab" for a, b, k in sizes]
        self.convs = nn.ModuleList(convs)
        self.end, self.back = (
            Conv(c, joints, 1, precision, bias=True),
            Conv(joints, c, 1, precision),
        )

    def _block(self, x: Tensor, first: int) -> Tensor:
        y = x
        for i in range(first, first + 3):
            y = self.convs[i](F.relu(self.norms[i](y)))
        return x + y

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        low = self._block(F.max_pool2d(x, 2), 0)
        y = self._block(x + larger(low), 3)
        heat = self.end(y)
        return heat, x + y + self.back(heat)


def _heat(outputs: tuple[Tensor, Tensor]) -> Tensor:
    """A focal loss of heat maps, and what goes to the next hourglass."""
    heat, y = outputs
    p = torch.sigmoid(heat.float()).clamp(1e-4, 1 - 1e-4)
    bump = torch.exp(-heat.detach().float().square())
    there = (bump > 0.9).float()
    far = (1 - bump).pow(4) * p.square() * torch.log(1 - p) * (1 - there)
    return -(torch.log(p) * (1 - p).square() * there + far).mean() + _square(y)


def hourglass(chance: Random, precision: str) -> Made:
    """One hourglass with its heat maps."""
    c, side = chance.choice(((256, 64), (128, 64), (192, 48), (144, 32), (384, 16), (80, 96)))
    model = Hourglass(c, chance.choice((16, 17, 21)), precision)
    return model, (picture(chance, precision, c, side),), _heat


class Gaps(nn.Module):  # type: ignore[misc]
    """DeepLab: filters with gaps of several widths and the mean of the image, side by side."""

    def __init__(self, c: int, inner: int, precision: str) -> None:
        super().__init__()
        self.convs = nn.ModuleList([Conv(c, inner, k, precision) for k in (1, 3, 3, 1)])
        self.norms = nn.ModuleList([BatchNorm(inner, precision) for _ in range(4)])
        self.join = Unit(4 * inner, inner, 1, precision)
        self.end, self.precision = Conv(inner, 21, 1, precision, bias=True), precision

    def forward(self, x: Tensor) -> Tensor:
        made = []
        for conv, norm, gap in zip(self.convs[:3], self.norms, (1, 6, 12), strict=False):
            image, weight = half(self.precision, x, conv.weight)
            y = F.conv2d(image, weight, None, 1, gap * (weight.shape[-1] // 2), gap)
            made.append(F.relu(norm(y)))
        whole = self.convs[3](x.mean((2, 3), keepdim=True))
        whole = self.norms[3](whole) if len(x) > 1 else whole  # one value has no spread
        made.append(F.relu(whole).expand(made[0].shape))
        return self.end(dropout(self.join(torch.cat(made, 1)), 0.5))


def deeplab(chance: Random, precision: str) -> Made:
    """DeepLab's head."""
    c, inner = chance.choice(((320, 256), (256, 144), (576, 96), (160, 192), (768, 256)))
    x = picture(chance, precision, c, chance.choice((20, 28, 33, 48, 64)))
    return Gaps(c, inner, precision), (x,), pixels


class Inception(nn.Module):  # type: ignore[misc]
    """Inception: four branches of filters and a pool, joined; channels damped by neighbours."""

    def __init__(self, c: int, inner: int, precision: str) -> None:
        super().__init__()
        self.one = Unit(c, inner, 1, precision)
        self.three = nn.Sequential(Unit(c, inner, 1, precision), Unit(inner, inner, 3, precision))
        self.five = nn.Sequential(
            Unit(c, inner // 4, 1, precision), Unit(inner // 4, inner // 2, 5, precision)
        )
        self.pool = Unit(c, inner // 2, 1, precision)
        self.precision = precision

    def forward(self, x: Tensor) -> Tensor:
        pooled = F.max_pool2d(x, 3, 1, 1)
        y = torch.cat((self.one(x), self.three(x), self.five(x), self.pool(pooled)), 1)
        squares = F.pad(wide(self.precision, y).square(), (0, 0, 0, 0, 2, 2))
        c = y.shape[1]
        near = sum(squares[:, i : i + c] for i in range(5))
        return y / (1.0 + 2e-5 * near).pow(0.75)


def inception(chance: Random, precision: str) -> Made:
    """A block of Inception with local response norm."""
    c, inner, side = chance.choice(
        ((192, 64, 28), (256, 128, 28), (480, 192, 14), (528, 160, 14), (832, 256, 7), (96, 48, 35))
    )
    return Inception(c, inner, precision), (picture(chance, precision, c, side),), _square


class Attended(nn.Module):  # type: ignore[misc]
    """CBAM: channels scaled by their mean and most, then places by those of all channels."""

    def __init__(self, c: int, precision: str) -> None:
        super().__init__()
        self.first, self.second = (Unit(c, c, 3, precision, act) for act in (F.relu, nn.Identity()))
        self.less, self.more = Linear(c, c // 8, precision), Linear(c // 8, c, precision)
        self.place, self.norm = Conv(2, 1, 7, precision), BatchNorm(1, precision)

    def _gate(self, pooled: Tensor) -> Tensor:
        return self.more(F.relu(self.less(pooled)))

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x))
        scores = self._gate(y.mean((2, 3))) + self._gate(y.amax((2, 3)))
        y = y * torch.sigmoid(scores)[:, :, None, None]
        seen = torch.cat((y.mean(1, keepdim=True), y.amax(1, keepdim=True)), 1)
        return F.relu(x + y * torch.sigmoid(self.norm(self.place(seen))))


def cbam(chance: Random, precision: str) -> Made:
    """A residual block attended over channels and places."""
    c, side = chance.choice(((64, 56), (128, 28), (96, 56), (320, 14), (512, 7), (24, 112)))
    return Attended(c, precision), (picture(chance, precision, c, side),), _square


NEAR_IMAGE: dict[str, Callable[[Random, str], Made]] = {
    "segformer": segformer,
    "fcos": fcos,
    "hourglass": hourglass,
    "deeplab": deeplab,
    "inception": inception,
    "cbam": cbam,
}
