"""CosmoFlow: three-dimensional convolutions over a simulated universe, four parameters of it out.

Widths and the 9.44 million parameters as in Oyama et al. 2020 (arXiv 2007.12856, table 1), the same
at 128³, 256³ and 512³: larger cubes are halved more often, so that 2³ is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from foretell.errors import InputError
from foretell.spec import Spec
from foretell.workload.models.cnn import Image, Net
from foretell.workload.workload import Op, Workload

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
