"""AlexNet as torchvision builds it (Krizhevsky 2014, "one weird trick")."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from foretell.spec import Spec
from foretell.workload.models.cnn import Image, Net
from foretell.workload.workload import Workload


@dataclass(frozen=True)
class Alexnet(Spec):
    """Five convolutions and three matmuls."""

    name: ClassVar[str] = "alexnet"
    image: int = 224
    classes: int = 1000
    batch: int = 128
    dtype: str = "fp32"

    def workload(self) -> Workload:
        """The model's layers."""
        net = Net(Image(3, self.image, self.image))
        # width, window, stride, padding, whether a pool follows
        for width, window, stride, pad, pools in (
            (64, 11, 4, 2, True),
            (192, 5, 1, 2, True),
            (384, 3, 1, 1, False),
            (256, 3, 1, 1, False),
            (256, 3, 1, 1, True),
        ):
            net.conv(width, window, stride, pad=pad, bias=True, norm=False)
            if pools:
                net.pool(3, 2)
            net.cut(f"conv{len(net.layers) + 1}")
        self._head(net)
        return Workload(str(self), tuple(net.layers), self.batch, self.dtype)

    def _head(self, net: Net) -> None:
        net.at = net.at._replace(h=6, w=6)  # an adaptive pool makes any image 6×6
        net.flat()
        net.dropout()
        net.linear(4096, act="relu", dropout=True)
        net.linear(4096, act="relu")
        net.linear(self.classes, last=True)
        net.loss(self.classes)
        net.cut("head", is_block=False)
