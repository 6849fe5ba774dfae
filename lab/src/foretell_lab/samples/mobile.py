"""MobileNetV2 (Sandler et al. 2018) and EfficientNet-B0 (Tan & Le 2019): inverted residuals."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from foretell_lab.samples.sample import Sample, images

# Expansion, window, stride of the first, channels, blocks: table 2 of the one, 1 of the other.
_V2 = (
    (1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 3, 2, 32, 3), (6, 3, 2, 64, 4), (6, 3, 1, 96, 3),
    (6, 3, 2, 160, 3), (6, 3, 1, 320, 1),
)  # fmt: skip
_B0 = (
    (1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3), (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4), (6, 3, 1, 320, 1),
)  # fmt: skip


def mobilenet_v2(batch: int = 128) -> Sample:
    """MobileNetV2 on 224×224 images."""
    return images(partial(Mobile, _V2, nn.ReLU6, False), batch, "sgd:momentum=0.9")


def efficientnet_b0(batch: int = 64) -> Sample:
    """EfficientNet-B0 on 224×224 images."""
    return images(partial(Mobile, _B0, nn.SiLU, True), batch, "sgd:momentum=0.9")


def _conv(
    wide_in: int, wide: int, window: int = 1, stride: int = 1, groups: int = 1,
    act: type[nn.Module] | None = None,
) -> nn.Sequential:  # fmt: skip
    conv = nn.Conv2d(wide_in, wide, window, stride, window // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(wide), *([act(inplace=True)] if act else []))


class Squeeze(nn.Module):  # type: ignore[misc]
    """Scales channels by what their means say."""

    def __init__(self, wide: int, narrow: int) -> None:
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1, self.fc2 = nn.Conv2d(wide, narrow, 1), nn.Conv2d(narrow, wide, 1)
        self.act, self.gate = nn.SiLU(inplace=True), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        scale: Tensor = self.gate(self.fc2(self.act(self.fc1(self.avgpool(x)))))
        return scale * x


class Block(nn.Module):  # type: ignore[misc]
    """Wide, a window over each channel, narrow; with a way around where shapes allow."""

    def __init__(
        self, wide_in: int, width: int, grow: int, window: int, stride: int,
        act: type[nn.Module], squeezed: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        wide = grow * wide_in
        layers: list[nn.Module] = [_conv(wide_in, wide, act=act)] if grow > 1 else []
        layers.append(_conv(wide, wide, window, stride, wide, act))
        layers += [Squeeze(wide, max(1, wide_in // 4))] if squeezed else []
        self.block = nn.Sequential(*layers, _conv(wide, width))
        self.is_around = stride == 1 and wide_in == width

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(x)
        return x + out if self.is_around else out


class Mobile(nn.Module):  # type: ignore[misc]
    """A network of inverted residuals."""

    def __init__(
        self, rows: tuple[tuple[int, ...], ...], act: type[nn.Module], squeezed: bool
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [_conv(3, 32, 3, 2, act=act)]
        wide = 32
        for grow, window, stride, width, many in rows:
            for k in range(many):
                first = stride if not k else 1
                layers.append(Block(wide, width, grow, window, first, act, squeezed))
                wide = width
        self.features = nn.Sequential(*layers, _conv(wide, 1280, act=act))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Dropout(0.2, inplace=squeezed), nn.Linear(1280, 1000))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))
        return found
