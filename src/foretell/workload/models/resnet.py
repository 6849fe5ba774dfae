"""ResNets (He et al. 2015) and their kin: ResNeXt, wide ones, squeeze and excite, deep stems.

As torchvision and timm build them: the stride of a bottleneck is in its 3×3 convolution (v1.5).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from foretell.errors import unknown
from foretell.spec import Spec
from foretell.workload.models.cnn import Image, Net
from foretell.workload.workload import Workload

# depth → whether blocks are bottlenecks, and blocks of each of four stages
BLOCKS = {
    18: (False, (2, 2, 2, 2)),
    26: (True, (2, 2, 2, 2)),
    34: (False, (3, 4, 6, 3)),
    50: (True, (3, 4, 6, 3)),
    101: (True, (3, 4, 23, 3)),
    152: (True, (3, 8, 36, 3)),
    200: (True, (3, 24, 36, 3)),
}


@dataclass(frozen=True)
class Resnet(Spec):
    """A residual network for images."""

    name: ClassVar[str] = "resnet"
    depth: int = 50
    groups: int = 1  # of the 3×3 convolutions: 32 in ResNeXt
    base: int = 64  # width of one group in the first stage
    squeeze: bool = False  # squeeze and excite in each block
    deep: bool = False  # a stem of three 3×3 convolutions instead of one 7×7
    early: bool = False  # a bottleneck's stride in its first convolution (version 1, as Chainer's)
    pooled: bool = False  # shortcuts halve by a mean before a 1×1 convolution without stride
    image: int = 224
    classes: int = 1000
    batch: int = 64
    dtype: str = "fp32"

    def workload(self) -> Workload:
        """The model's layers."""
        if self.depth not in BLOCKS:
            raise unknown("depth of a ResNet", str(self.depth), map(str, BLOCKS))
        net = Net(Image(3, self.image, self.image))
        self._stem(net)
        narrow, blocks = BLOCKS[self.depth]
        for stage, many in enumerate(blocks):
            for i in range(many):
                stride = 2 if stage and not i else 1
                self._block(net, 64 << stage, stride, narrow)
                net.cut(f"stage{stage + 1}.{min(i, 1)}")
        net.mean()
        net.linear(self.classes, last=True)
        net.loss(self.classes)
        net.cut("head", is_block=False)
        return Workload(str(self), tuple(net.layers), self.batch, self.dtype)

    def _stem(self, net: Net) -> None:
        if self.deep:
            net.conv(32, 3, 2)
            net.conv(32, 3)
            net.conv(64, 3)
        else:
            net.conv(64, 7, 2)
        net.pool(3, 2, 1)
        net.cut("stem", is_block=False)

    def _block(self, net: Net, width: int, stride: int, narrow: bool) -> None:
        given, out = net.at, width * (4 if narrow else 1)
        if narrow:
            inner = width * self.base // 64 * self.groups
            net.conv(inner, 1, stride if self.early else 1)
            net.conv(inner, 3, 1 if self.early else stride, groups=self.groups)
            net.conv(out, act="")
        else:
            net.conv(width, 3, stride)
            net.conv(width, 3, act="")
        if self.squeeze:
            net.squeeze(max(out // 16, 8), gate="sigmoid")
        self._shortcut(net, given, stride)
        net.add("relu")

    def _shortcut(self, net: Net, given: Image, stride: int) -> None:
        made = net.at
        if given == made:
            return
        net.at = given
        if self.pooled and stride > 1:
            net.pool(2, 2, kind="mean", up=True)
            stride = 1
        net.conv(made.c, 1, stride, act="")
