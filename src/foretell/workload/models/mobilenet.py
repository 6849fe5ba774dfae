"""Inverted residuals: MobileNet v2 (Sandler et al. 2018) and v3 (Howard et al. 2019) as torchvision
builds them; EfficientNet (Tan and Le 2019), one network found by search, scaled in width, depth and
image.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from foretell.errors import unknown
from foretell.spec import Spec
from foretell.workload.models.cnn import Image, Net
from foretell.workload.workload import Workload


class Block(NamedTuple):
    """An inverted residual: out to `inner` channels, a window over each, back to `out`."""

    inner: int
    out: int
    window: int
    stride: int
    squeeze: int = 0  # width of squeeze and excite, none where 0
    act: str = "relu6"
    gate: str = "hardsigmoid"
    squeeze_act: str = "relu"


def inverted(net: Net, block: Block) -> None:
    """Add an inverted residual; its sum is there where sizes stay the same."""
    given = net.at
    if block.inner != given.c:
        net.conv(block.inner, act=block.act)
    net.conv(block.inner, block.window, block.stride, groups=block.inner, act=block.act)
    if block.squeeze:
        net.squeeze(block.squeeze, block.squeeze_act, block.gate)
    net.conv(block.out, act="")
    if net.at == given:
        net.add()
    else:
        net.keep()


def rounded(width: float, to: int = 8) -> int:
    """The nearest multiple of `to`, at least `to`, and never less than nine tenths of it."""
    near = max(to, int(width + to / 2) // to * to)
    return near + to if near < 0.9 * width else near


# expansion, channels, blocks, stride of the first: table 2 of the paper
_V2 = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


@dataclass(frozen=True)
class MobilenetV2(Spec):
    """Inverted residuals with linear bottlenecks."""

    name: ClassVar[str] = "mobilenet_v2"
    width: float = 1.0
    image: int = 224
    classes: int = 1000
    batch: int = 128
    dtype: str = "fp32"

    def workload(self) -> Workload:
        """The model's layers."""
        net = Net(Image(3, self.image, self.image))
        net.conv(rounded(32 * self.width), 3, 2, act="relu6")
        net.cut("stem", is_block=False)
        for row, (grow, out, many, stride) in enumerate(_V2):
            for i in range(many):
                block = Block(grow * net.at.c, rounded(out * self.width), 3, stride if not i else 1)
                inverted(net, block)
                net.cut(f"block{row + 1}.{min(i, 1)}")
        net.conv(rounded(1280 * max(1.0, self.width)), act="relu6")
        net.mean()
        net.dropout()
        return net.classified(self)


# window, inner, out, squeezed, activation, stride: tables 1 and 2 of the paper
_LARGE = (
    (3, 16, 16, False, "relu", 1),
    (3, 64, 24, False, "relu", 2),
    (3, 72, 24, False, "relu", 1),
    (5, 72, 40, True, "relu", 2),
    (5, 120, 40, True, "relu", 1),
    (5, 120, 40, True, "relu", 1),
    (3, 240, 80, False, "hardswish", 2),
    (3, 200, 80, False, "hardswish", 1),
    (3, 184, 80, False, "hardswish", 1),
    (3, 184, 80, False, "hardswish", 1),
    (3, 480, 112, True, "hardswish", 1),
    (3, 672, 112, True, "hardswish", 1),
    (5, 672, 160, True, "hardswish", 2),
    (5, 960, 160, True, "hardswish", 1),
    (5, 960, 160, True, "hardswish", 1),
)
_SMALL = (
    (3, 16, 16, True, "relu", 2),
    (3, 72, 24, False, "relu", 2),
    (3, 88, 24, False, "relu", 1),
    (5, 96, 40, True, "hardswish", 2),
    (5, 240, 40, True, "hardswish", 1),
    (5, 240, 40, True, "hardswish", 1),
    (5, 120, 48, True, "hardswish", 1),
    (5, 144, 48, True, "hardswish", 1),
    (5, 288, 96, True, "hardswish", 2),
    (5, 576, 96, True, "hardswish", 1),
    (5, 576, 96, True, "hardswish", 1),
)
Rows = Sequence[tuple[int, int, int, bool, str, int]]


@dataclass(frozen=True)
class MobilenetV3(Spec):
    """Found by search: squeeze and excite here and there, hard swish in the second half."""

    name: ClassVar[str] = "mobilenet_v3"
    small: bool = False
    width: float = 1.0
    image: int = 224
    classes: int = 1000
    batch: int = 128
    dtype: str = "fp32"

    def workload(self) -> Workload:
        """The model's layers."""
        rows: Rows = _SMALL if self.small else _LARGE
        net = Net(Image(3, self.image, self.image))
        net.conv(rounded(16 * self.width), 3, 2, act="hardswish")
        net.cut("stem", is_block=False)
        for i, (window, inner, out, squeezed, act, stride) in enumerate(rows):
            wide = rounded(inner * self.width)
            squeeze = rounded(wide // 4) if squeezed else 0
            inverted(net, Block(wide, rounded(out * self.width), window, stride, squeeze, act))
            net.cut(f"block{i + 1}")
        net.conv(6 * net.at.c, act="hardswish")
        net.mean()
        net.linear(
            rounded((1024 if self.small else 1280) * self.width), act="hardswish", dropout=True
        )
        return net.classified(self)


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
        return net.classified(self)


def _block(net: Net, grow: int, window: int, stride: int, out: int) -> None:
    inner = rounded(grow * net.at.c)
    squeeze = max(1, net.at.c // 4)
    inverted(net, Block(inner, out, window, stride, squeeze, "silu", "sigmoid", "silu"))
