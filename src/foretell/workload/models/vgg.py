"""VGG (Simonyan and Zisserman 2014): 3×3 convolutions in five groups, three wide matmuls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from foretell.errors import unknown
from foretell.spec import Spec
from foretell.workload.models.cnn import Image, Net
from foretell.workload.workload import Workload

# depth → convolutions of each group
CONVS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
WIDTHS = (64, 128, 256, 512, 512)


@dataclass(frozen=True)
class Vgg(Spec):
    """A VGG network; without batch norm as it was published."""

    name: ClassVar[str] = "vgg"
    depth: int = 16
    norm: bool = False
    up: bool = False  # pools round sides up, as Chainer's do
    width: int = 4096  # of the two matmuls before the last
    image: int = 224
    classes: int = 1000
    batch: int = 64
    dtype: str = "fp32"

    def workload(self) -> Workload:
        """The model's layers."""
        if self.depth not in CONVS:
            raise unknown("depth of a VGG", str(self.depth), map(str, CONVS))
        net = Net(Image(3, self.image, self.image))
        for group, many in enumerate(CONVS[self.depth]):
            for i in range(many):
                net.conv(WIDTHS[group], 3, bias=True, norm=self.norm)
                if i == many - 1:
                    net.pool(2, 2, up=self.up)
                net.cut(f"conv{group + 1}.{i + 1}")
        net.flat()
        net.linear(self.width, act="relu", dropout=True)
        net.linear(self.width, act="relu", dropout=True)
        net.linear(self.classes, last=True)
        net.loss(self.classes)
        net.cut("head", is_block=False)
        return Workload(str(self), tuple(net.layers), self.batch, self.dtype)
