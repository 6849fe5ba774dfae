"""Three-dimensional convolutions.

CosmoFlow: over a simulated universe, four parameters of it out. Widths and the 9.44 million
parameters as in Oyama et al. 2020 (arXiv 2007.12856, table 1), the same at 128³, 256³ and 512³:
larger cubes are halved more often, so that 2³ is left.

3D U-Net (Çiçek et al. 2016): down and up again with what was there at each size joined in.
19 069 955 parameters as published; convolutions are padded to keep their size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from foretell.errors import InputError
from foretell.spec import Spec
from foretell.workload.models.cnn import Image, Net
from foretell.workload.workload import Op, Tensor, Workload

_LEFT = 2  # side of the cube that is left


@dataclass(frozen=True)
class Cosmoflow(Spec):
    """Seven convolutions, halved between, and three matmuls."""

    name: ClassVar[str] = "cosmoflow"
    size: int = 128  # side of the cube
    channels: int = 4  # red shifts
    widths: tuple[int, ...] = (16, 32, 64, 128, 256, 256, 256)
    fc: tuple[int, ...] = (2048, 256, 4)
    norm: bool = False
    split: int = 2  # layers that may be split along a side; images are gathered behind them
    batch: int = 1
    dtype: str = "fp32"

    def workload(self) -> Workload:
        """The model's layers."""
        net = Net(Image(self.channels, self.size, self.size, self.size))
        for i, width in enumerate(self.widths):
            strided = i == 3 and net.at.h > _LEFT
            net.conv(width, 3, 2 if strided else 1, norm=self.norm, act="leaky")
            if net.at.h > _LEFT and (not strided or self._is_behind(net, i)):
                net.pool(2, 2)
            if i + 1 == self.split:
                net.gather()
            net.cut(f"conv{i + 1}")
        if net.at.h != _LEFT:
            raise InputError(
                f"a cube of {self.size} is not halved to {_LEFT} in {len(self.widths)} layers",
                hint="sizes are 128, 256 or 512",
            )
        self._head(net)
        return Workload(str(self), tuple(net.layers), self.batch, self.dtype)

    def _is_behind(self, net: Net, i: int) -> bool:
        """Whether one halving a convolution would not be enough from here on."""
        return net.at.h >> (len(self.widths) - 1 - i) > _LEFT

    def _head(self, net: Net) -> None:
        net.flat()
        for width in self.fc[:-1]:
            net.linear(width, bias=False, act="leaky", dropout=True)
        net.linear(self.fc[-1], bias=False, last=True)
        net.ops.append(Op("loss", "pointwise", {"c": float(self.fc[-1])}))
        net.cut("head", is_block=False)


@dataclass(frozen=True)
class Unet3d(Spec):
    """A network that labels every voxel."""

    name: ClassVar[str] = "unet3d"
    size: int = 128  # side of the cube
    channels: int = 3
    classes: int = 3
    width: int = 32  # channels of the first convolution
    levels: int = 4  # sizes, the whole one included
    batch: int = 1
    dtype: str = "fp32"

    def workload(self) -> Workload:
        """The model's layers."""
        if self.size % (1 << (self.levels - 1)):
            raise InputError(
                f"a cube of {self.size} cannot be halved {self.levels - 1} times",
                hint=f"give a multiple of {1 << (self.levels - 1)}",
            )
        net = Net(Image(self.channels, self.size, self.size, self.size))
        beside = self._down(net)
        for level, kept in reversed(list(enumerate(beside[:-1]))):
            net.up(net.at.c, bias=False)
            net.join([net.at, kept])
            _conv(net, kept.c)
            _conv(net, kept.c)
            net.cut(f"up{level + 1}")
        self._head(net)
        return Workload(str(self), tuple(net.layers), self.batch, self.dtype)

    def _down(self, net: Net) -> list[Image]:
        beside = []
        for level in range(self.levels):
            if level:
                net.pool(2, 2)
            width = self.width << level
            _conv(net, width)
            _conv(net, 2 * width)
            beside.append(net.at)
            net.cut(f"down{level + 1}")
        return beside

    def _head(self, net: Net) -> None:
        net.conv(self.classes, bias=True, norm=False, act="")
        splits = {"height": "h", "width": "w", "depth": "d"}
        kept = (Tensor("probabilities", ("batch", "c", "h", "w", "d"), "fp32"),)
        options = {"passes": 4.0, "back": 3.0, "dtype": "fp32"}
        net.ops.append(Op("loss", "pointwise", net.at.dims(), splits, saved=kept, options=options))
        net.cut("head", is_block=False)


def _conv(net: Net, out: int) -> None:
    """A convolution with bias; its norm has no factors, as Caffe's."""
    net.conv(out, 3, bias=True, norm=False, act="")
    net.norm(affine=False)
    net.act("relu")
