"""AlexNet (Krizhevsky 2014), DenseNet-121 (Huang et al. 2016), Inception-v3 (Szegedy et al. 2015).

As torchvision builds them; Inception with its second classifier, whose loss counts 0.4.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from foretell_lab.samples.sample import Sample, classified, images

_MOMENTUM = "sgd:momentum=0.9"
# Width, window, stride, padding, whether a pool follows.
_ALEXNET = (
    (64, 11, 4, 2, True), (192, 5, 1, 2, True), (384, 3, 1, 1, False), (256, 3, 1, 1, False),
    (256, 3, 1, 1, True),
)  # fmt: skip
_GROWTH, _LAYERS = 32, (6, 12, 24, 16)  # of DenseNet-121


def alexnet(batch: int = 128) -> Sample:
    """AlexNet on 224×224 images."""
    return images(AlexNet, batch, _MOMENTUM)


def densenet121(batch: int = 64) -> Sample:
    """DenseNet-121 on 224×224 images."""
    return images(DenseNet, batch, _MOMENTUM)


def inception_v3(batch: int = 64) -> Sample:
    """Inception-v3 on 299×299 images."""
    made = images(Inception, batch, _MOMENTUM, 299)
    return made._replace(loss=_both)


def _both(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return classified(output[0], target) + 0.4 * classified(output[1], target)


class AlexNet(nn.Module):  # type: ignore[misc]
    """Five convolutions and three matmuls."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        wide = 3
        for width, window, stride, pad, pools in _ALEXNET:
            layers += [nn.Conv2d(wide, width, window, stride, pad), nn.ReLU(inplace=True)]
            layers += [nn.MaxPool2d(3, 2)] if pools else []
            wide = width
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((6, 6))
        self.classifier = nn.Sequential(
            *(nn.Dropout(0.5), nn.Linear(wide * 36, 4096), nn.ReLU(inplace=True)),
            *(nn.Dropout(0.5), nn.Linear(4096, 4096), nn.ReLU(inplace=True)),
            nn.Linear(4096, 1000),
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))
        return found


class Dense(nn.Module):  # type: ignore[misc]
    """One layer of a dense block: it is given all that was made before."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.norm1, self.relu1 = nn.BatchNorm2d(wide), nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(wide, 4 * _GROWTH, 1, bias=False)
        self.norm2, self.relu2 = nn.BatchNorm2d(4 * _GROWTH), nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(4 * _GROWTH, _GROWTH, 3, padding=1, bias=False)

    def forward(self, made: list[Tensor]) -> Tensor:
        x = self.conv1(self.relu1(self.norm1(torch.cat(made, 1))))
        found: Tensor = self.conv2(self.relu2(self.norm2(x)))
        return found


class DenseBlock(nn.ModuleList):  # type: ignore[misc]
    """Layers, each of which adds channels."""

    def forward(self, x: Tensor) -> Tensor:
        made = [x]
        for layer in self:
            made.append(layer(made))
        return torch.cat(made, 1)


class DenseNet(nn.Module):  # type: ignore[misc]
    """DenseNet-121."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(*_dense_layers())
        self.classifier = nn.Linear(1024, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.relu(self.features(x), inplace=True)
        x = nn.functional.adaptive_avg_pool2d(x, (1, 1))
        found: Tensor = self.classifier(torch.flatten(x, 1))
        return found


def _dense_layers() -> Iterator[nn.Module]:
    yield from (nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True))
    yield nn.MaxPool2d(3, 2, 1)
    wide = 64
    for block, many in enumerate(_LAYERS):
        yield DenseBlock([Dense(wide + k * _GROWTH) for k in range(many)])
        wide += many * _GROWTH
        if block < len(_LAYERS) - 1:
            yield from (nn.BatchNorm2d(wide), nn.ReLU(inplace=True))
            yield from (nn.Conv2d(wide, wide // 2, 1, bias=False), nn.AvgPool2d(2, 2))
            wide //= 2
    yield nn.BatchNorm2d(wide)


class Conv(nn.Module):  # type: ignore[misc]
    """A convolution, its normalisation and relu."""

    def __init__(self, wide_in: int, wide: int, window: int | tuple[int, int] = 1,
                 stride: int = 1, pad: int | tuple[int, int] = 0) -> None:  # fmt: skip
        super().__init__()
        self.conv = nn.Conv2d(wide_in, wide, window, stride, pad, bias=False)
        self.bn = nn.BatchNorm2d(wide, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.bn(self.conv(x)), inplace=True)


class Branches(nn.ModuleList):  # type: ignore[misc]
    """Ways beside each other, joined."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self], 1)


def _branches(*ways: list[nn.Module]) -> Branches:
    return Branches([nn.Sequential(*way) for way in ways])


def _a(wide: int, pooled: int) -> Branches:
    return _branches(
        [Conv(wide, 64)],
        [Conv(wide, 48), Conv(48, 64, 5, 1, 2)],
        [Conv(wide, 64), Conv(64, 96, 3, 1, 1), Conv(96, 96, 3, 1, 1)],
        [nn.AvgPool2d(3, 1, 1), Conv(wide, pooled)],
    )


def _c(mid: int) -> Branches:
    row, column, along, across = (1, 7), (7, 1), (0, 3), (3, 0)
    return _branches(
        [Conv(768, 192)],
        [Conv(768, mid), Conv(mid, mid, row, 1, along), Conv(mid, 192, column, 1, across)],
        [
            *(Conv(768, mid), Conv(mid, mid, column, 1, across), Conv(mid, mid, row, 1, along)),
            *(Conv(mid, mid, column, 1, across), Conv(mid, 192, row, 1, along)),
        ],
        [nn.AvgPool2d(3, 1, 1), Conv(768, 192)],
    )


def _e(wide: int) -> Branches:
    row, column = (1, 3), (3, 1)
    return _branches(
        [Conv(wide, 320)],
        [Conv(wide, 384), _branches([Conv(384, 384, row, 1, (0, 1))],
                                    [Conv(384, 384, column, 1, (1, 0))])],
        [Conv(wide, 448), Conv(448, 384, 3, 1, 1),
         _branches([Conv(384, 384, row, 1, (0, 1))], [Conv(384, 384, column, 1, (1, 0))])],
        [nn.AvgPool2d(3, 1, 1), Conv(wide, 192)],
    )  # fmt: skip


class Inception(nn.Module):  # type: ignore[misc]
    """Inception-v3: the stem, eleven joints of branches, two classifiers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            *(Conv(3, 32, 3, 2), Conv(32, 32, 3), Conv(32, 64, 3, 1, 1), nn.MaxPool2d(3, 2)),
            *(Conv(64, 80), Conv(80, 192, 3), nn.MaxPool2d(3, 2)),
        )
        b = _branches(
            [Conv(288, 384, 3, 2)],
            [Conv(288, 64), Conv(64, 96, 3, 1, 1), Conv(96, 96, 3, 2)],
            [nn.MaxPool2d(3, 2)],
        )
        self.first = nn.Sequential(
            *(_a(192, 32), _a(256, 64), _a(288, 64), b, _c(128), _c(160), _c(160), _c(192))
        )
        row, column = Conv(192, 192, (1, 7), 1, (0, 3)), Conv(192, 192, (7, 1), 1, (3, 0))
        d = _branches(
            [Conv(768, 192), Conv(192, 320, 3, 2)],
            [Conv(768, 192), row, column, Conv(192, 192, 3, 2)],
            [nn.MaxPool2d(3, 2)],
        )
        self.aux = nn.Sequential(
            *(nn.AvgPool2d(5, 3), Conv(768, 128), Conv(128, 768, 5)),
            *(nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Linear(768, 1000)),
        )
        self.second = nn.Sequential(d, _e(1280), _e(2048))
        self.head = nn.Sequential(
            *(nn.AdaptiveAvgPool2d((1, 1)), nn.Dropout(0.5), nn.Flatten(), nn.Linear(2048, 1000))
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(self.stem(x))
        aux = self.aux(x)
        return self.head(self.second(x)), aux
