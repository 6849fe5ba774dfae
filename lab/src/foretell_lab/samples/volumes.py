"""CosmoFlow (Oyama et al. 2020) and 3D U-Net (Çiçek et al. 2016): convolutions over cubes."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from foretell_lab.samples.sample import Sample

_COSMO = (16, 32, 64, 128, 256, 256, 256)


def cosmoflow(batch: int = 1, size: int = 128) -> Sample:
    """CosmoFlow on cubes of 128: four numbers from four red shifts."""

    def data() -> tuple[Tensor, Tensor]:
        return torch.empty(batch, 4, size, size, size), torch.empty(batch, 4)

    return Sample(CosmoFlow, data, nn.functional.mse_loss, "sgd:momentum=0.9")


def unet3d(batch: int = 1, size: int = 128) -> Sample:
    """3D U-Net on cubes of 128: a class for every voxel."""

    def data() -> tuple[Tensor, Tensor]:
        cube = (batch, size, size, size)
        return torch.empty(batch, 3, *cube[1:]), torch.empty(cube, dtype=torch.int64)

    return Sample(partial(Unet, 3, 3, 32), data, nn.functional.cross_entropy, "sgd:momentum=0.9")


class CosmoFlow(nn.Module):  # type: ignore[misc]
    """Seven convolutions, halved behind each until 2³ is left, and three matmuls."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        wide = 4
        for k, width in enumerate(_COSMO):
            conv = nn.Conv3d(wide, width, 3, 2 if k == 3 else 1, 1, bias=False)
            layers += [conv, nn.LeakyReLU(inplace=True)]
            layers += [nn.MaxPool3d(2, 2)] if k < 3 or 3 < k < 6 else []
            wide = width
        self.features = nn.Sequential(*layers)
        self.head = nn.Sequential(
            *(nn.Flatten(), nn.Linear(8 * wide, 2048, bias=False), nn.LeakyReLU(inplace=True)),
            *(nn.Dropout(0.5), nn.Linear(2048, 256, bias=False), nn.LeakyReLU(inplace=True)),
            *(nn.Dropout(0.5), nn.Linear(256, 4, bias=False)),
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.features(x))
        return found


def _conv(wide_in: int, wide: int) -> nn.Sequential:
    """A convolution; its norm has no factors."""
    norm = nn.BatchNorm3d(wide, affine=False)
    return nn.Sequential(nn.Conv3d(wide_in, wide, 3, padding=1), norm, nn.ReLU(inplace=True))


class Unet(nn.Module):  # type: ignore[misc]
    """Down and up again with what was there at each size joined in."""

    def __init__(self, channels: int, classes: int, width: int, levels: int = 4) -> None:
        super().__init__()
        self.pool = nn.MaxPool3d(2, 2)
        self.down, self.up, self.joined = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        wide = channels
        for level in range(levels):
            inner = width << level
            self.down.append(nn.Sequential(_conv(wide, inner), _conv(inner, 2 * inner)))
            wide = 2 * inner
        for level in reversed(range(levels - 1)):
            kept = 2 * (width << level)
            self.up.append(nn.ConvTranspose3d(wide, wide, 2, 2, bias=False))
            self.joined.append(nn.Sequential(_conv(wide + kept, kept), _conv(kept, kept)))
            wide = kept
        self.head = nn.Conv3d(wide, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        beside = []
        for level, down in enumerate(self.down):
            x = down(self.pool(x) if level else x)
            beside.append(x)
        for up, joined, kept in zip(self.up, self.joined, beside[-2::-1], strict=True):
            x = joined(torch.cat([up(x), kept], 1))
        found: Tensor = self.head(x)
        return found
