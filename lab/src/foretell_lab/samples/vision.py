"""ResNet-50 (He et al. 2015, stride in the 3×3) and VGG-16 (Simonyan & Zisserman 2014)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from foretell_lab.samples.sample import Sample, images

_DEPTHS, _GROWTH = (3, 4, 6, 3), 4
_VGG = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)  # 0: pool


def resnet50(batch: int = 64) -> Sample:
    """ResNet-50 on 224×224 images."""
    return images(ResNet, batch, "sgd:momentum=0.9")


def vgg16(batch: int = 64) -> Sample:
    """VGG-16 on 224×224 images."""
    return images(Vgg, batch, "sgd:momentum=0.9")


class Bottleneck(nn.Module):  # type: ignore[misc]
    """Three convolutions and a way around them."""

    def __init__(self, wide_in: int, width: int, stride: int) -> None:
        super().__init__()
        wide = width * _GROWTH
        self.conv1 = nn.Conv2d(wide_in, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, wide, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(wide)
        self.relu = nn.ReLU(inplace=True)
        around = nn.Sequential(
            nn.Conv2d(wide_in, wide, 1, stride, bias=False), nn.BatchNorm2d(wide)
        )
        self.downsample = around if stride > 1 or wide_in != wide else None

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        found: Tensor = self.relu(out)
        return found


class ResNet(nn.Module):  # type: ignore[misc]
    """ResNet-50."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layers = nn.Sequential(*_blocks())
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(512 * _GROWTH, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        found: Tensor = self.fc(torch.flatten(self.avgpool(self.layers(x)), 1))
        return found


def _blocks() -> Iterator[nn.Module]:
    wide = 64
    for stage, depth in enumerate(_DEPTHS):
        width = 64 * 2**stage
        for k in range(depth):
            yield Bottleneck(wide, width, 2 if stage and not k else 1)
            wide = width * _GROWTH


class Vgg(nn.Module):  # type: ignore[misc]
    """VGG-16."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(*_features())
        self.avgpool = nn.AdaptiveAvgPool2d((7, 7))
        self.classifier = nn.Sequential(
            *(nn.Linear(512 * 7 * 7, 4096), nn.ReLU(True), nn.Dropout(0.5)),
            *(nn.Linear(4096, 4096), nn.ReLU(True), nn.Dropout(0.5)),
            nn.Linear(4096, 1000),
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))
        return found


def _features() -> Iterator[nn.Module]:
    wide = 3
    for width in _VGG:
        if width:
            yield nn.Conv2d(wide, width, 3, padding=1)
            yield nn.ReLU(inplace=True)
            wide = width
        else:
            yield nn.MaxPool2d(2, 2)
