"""EfficientNet (Tan and Le 2019): one network found by search, scaled in width, depth and image."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from foretell.errors import unknown
from foretell.spec import Spec
from foretell.workload.models.cnn import Image, Net
from foretell.workload.models.mobilenet import Block, inverted, rounded
from foretell.workload.workload import Workload

# b → width, depth, image (torchvision's crops)
SCALES = {
    0: (1.0, 1.0, 224),
    1: (1.0, 1.1, 240),
    2: (1.1, 1.2, 288),
    3: (1.2, 1.4, 300),
    4: (1.4, 1.8, 380),
    5: (1.6, 2.2, 456),
    6: (1.8, 2.6, 528),
    7: (2.0, 3.1, 600),
}
# expansion, window, stride, channels, blocks: table 1 of the paper
_ROWS = (
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)


@dataclass(frozen=True)
class Efficientnet(Spec):
    """Inverted residuals with squeeze and excite, swish everywhere."""

    name: ClassVar[str] = "efficientnet"
    b: int = 0  # 0 to 7
    image: int = 0  # that of the variant where 0
    classes: int = 1000
    batch: int = 64
    dtype: str = "fp32"

    def workload(self) -> Workload:
        """The model's layers."""
        if self.b not in SCALES:
            raise unknown("EfficientNet b", str(self.b), map(str, SCALES))
        width, depth, side = SCALES[self.b]
        side = self.image or side
        net = Net(Image(3, side, side))
        net.conv(rounded(32 * width), 3, 2, act="silu")
        net.cut("stem", is_block=False)
        for row, (grow, window, stride, out, many) in enumerate(_ROWS):
            for i in range(math.ceil(many * depth)):
                first = stride if not i else 1
                _block(net, grow, window, first, rounded(out * width))
                net.cut(f"block{row + 1}.{min(i, 1)}")
        net.conv(4 * net.at.c, act="silu")
        net.mean()
        net.dropout()
        net.linear(self.classes, last=True)
        net.loss(self.classes)
        net.cut("head", is_block=False)
        return Workload(str(self), tuple(net.layers), self.batch, self.dtype)


def _block(net: Net, grow: int, window: int, stride: int, out: int) -> None:
    inner = rounded(grow * net.at.c)
    squeeze = max(1, net.at.c // 4)
    inverted(net, Block(inner, out, window, stride, squeeze, "silu", "sigmoid", "silu"))
