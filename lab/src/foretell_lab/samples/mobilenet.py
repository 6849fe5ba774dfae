"""MobileNetV3-Large (Howard et al. 2019): depthwise convolutions with squeeze and excitation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from foretell_lab.samples.sample import Sample, images

# Filter, expanded width, width, squeeze and excitation, hard swish, stride (table 1 of the paper).
_BLOCKS = (
    (3, 16, 16, False, False, 1), (3, 64, 24, False, False, 2), (3, 72, 24, False, False, 1),
    (5, 72, 40, True, False, 2), (5, 120, 40, True, False, 1), (5, 120, 40, True, False, 1),
    (3, 240, 80, False, True, 2), (3, 200, 80, False, True, 1), (3, 184, 80, False, True, 1),
    (3, 184, 80, False, True, 1), (3, 480, 112, True, True, 1), (3, 672, 112, True, True, 1),
    (5, 672, 160, True, True, 2), (5, 960, 160, True, True, 1), (5, 960, 160, True, True, 1),
)  # fmt: skip


def mobilenet_v3_large(batch: int = 128) -> Sample:
    """MobileNetV3-Large on 224×224 images."""
    return images(MobileNet, batch, "sgd:momentum=0.9")


class ConvNorm(nn.Sequential):  # type: ignore[misc]
    """A convolution, its normalisation and perhaps an activation."""

    def __init__(
        self,
        wide_in: int,
        wide: int,
        filter: int = 1,
        stride: int = 1,
        groups: int = 1,
        act: type[nn.Module] | None = nn.ReLU,
    ) -> None:
        conv = nn.Conv2d(wide_in, wide, filter, stride, filter // 2, groups=groups, bias=False)
        norm = nn.BatchNorm2d(wide, eps=0.001, momentum=0.01)
        super().__init__(conv, norm, *([act(inplace=True)] if act else []))


class Squeeze(nn.Module):  # type: ignore[misc]
    """Scales channels by what their means say."""

    def __init__(self, width: int) -> None:
        super().__init__()
        narrow = max(8, int(width / 4 + 4) // 8 * 8)  # a quarter, in eights
        narrow += 8 if narrow < 0.9 * width / 4 else 0
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1, self.fc2 = nn.Conv2d(width, narrow, 1), nn.Conv2d(narrow, width, 1)
        self.relu, self.gate = nn.ReLU(), nn.Hardsigmoid()

    def forward(self, x: Tensor) -> Tensor:
        scale: Tensor = self.gate(self.fc2(self.relu(self.fc1(self.avgpool(x)))))
        return scale * x


class Block(nn.Module):  # type: ignore[misc]
    """Wide, depthwise, squeezed, narrow; with a way around where shapes allow."""

    def __init__(
        self, wide_in: int, filter: int, wide: int, width: int, squeeze: bool, swish: bool,
        stride: int,
    ) -> None:  # fmt: skip
        super().__init__()
        act = nn.Hardswish if swish else nn.ReLU
        layers: list[nn.Module] = [ConvNorm(wide_in, wide, act=act)] if wide != wide_in else []
        layers.append(ConvNorm(wide, wide, filter, stride, wide, act=act))
        layers += [Squeeze(wide)] if squeeze else []
        layers.append(ConvNorm(wide, width, act=None))
        self.block = nn.Sequential(*layers)
        self.is_around = stride == 1 and wide_in == width

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(x)
        if self.is_around:
            out += x
        return out


class MobileNet(nn.Module):  # type: ignore[misc]
    """MobileNetV3-Large."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [ConvNorm(3, 16, 3, 2, act=nn.Hardswish)]
        wide = 16
        for row in _BLOCKS:
            layers.append(Block(wide, *row))
            wide = row[2]
        self.features = nn.Sequential(*layers, ConvNorm(wide, 6 * wide, act=nn.Hardswish))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(
            *(nn.Linear(6 * wide, 1280), nn.Hardswish(inplace=True)),
            *(nn.Dropout(0.2, inplace=True), nn.Linear(1280, 1000)),
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))
        return found
