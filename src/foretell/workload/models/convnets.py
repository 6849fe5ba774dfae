"""Convolutional networks that classify images, layer by layer.

AlexNet     as torchvision builds it (Krizhevsky 2014, "one weird trick")
VGG         3×3 convolutions in five groups, three wide matmuls (Simonyan and Zisserman 2014)
ResNet      and its kin: ResNeXt, wide ones, squeeze and excite, deep stems (He et al. 2015). As
            torchvision and timm build them: the stride of a bottleneck is in its 3×3
            convolution (v1.5)
DenseNet    each layer is given all that the ones before it made (Huang et al. 2016)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from foretell.errors import unknown
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
        net.at = net.at._replace(h=6, w=6)  # an adaptive pool makes any image 6×6
        net.flat()
        net.dropout()
        net.linear(4096, act="relu", dropout=True)
        net.linear(4096, act="relu")
        return net.classified(self)


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
        return net.classified(self)


# depth → whether blocks are bottlenecks, and blocks of each of four stages
RESIDUAL = {
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
        net = Net(Image(3, self.image, self.image))
        self.body(net)
        net.mean()
        return net.classified(self)

    def body(self, net: Net) -> list[Image]:
        """Stem and stages; the images behind each stage."""
        if self.depth not in RESIDUAL:
            raise unknown("depth of a ResNet", str(self.depth), map(str, RESIDUAL))
        self._stem(net)
        narrow, blocks = RESIDUAL[self.depth]
        found = []
        for stage, many in enumerate(blocks):
            for i in range(many):
                self._block(net, 64 << stage, 2 if stage and not i else 1, narrow)
                net.cut(f"stage{stage + 1}.{min(i, 1)}")
            found.append(net.at)
        return found

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


# depth → growth, channels of the stem, layers of each block
DENSE = {
    121: (32, 64, (6, 12, 24, 16)),
    161: (48, 96, (6, 12, 36, 24)),
    169: (32, 64, (6, 12, 32, 32)),
    201: (32, 64, (6, 12, 48, 32)),
}


@dataclass(frozen=True)
class Densenet(Spec):
    """A densely connected network for images."""

    name: ClassVar[str] = "densenet"
    depth: int = 121
    image: int = 224
    classes: int = 1000
    batch: int = 64
    dtype: str = "fp32"

    def workload(self) -> Workload:
        """The model's layers."""
        if self.depth not in DENSE:
            raise unknown("depth of a DenseNet", str(self.depth), map(str, DENSE))
        growth, stem, blocks = DENSE[self.depth]
        net = Net(Image(3, self.image, self.image))
        net.conv(stem, 7, 2)
        net.pool(3, 2, 1)
        net.cut("stem", is_block=False)
        for block, many in enumerate(blocks):
            for i in range(many):
                _dense(net, growth, i)
                net.cut(f"block{block + 1}.{i + 1}")
            if block < len(blocks) - 1:
                _transition(net, many)
                net.cut(f"transition{block + 1}")
        net.norm()
        net.act("relu")
        net.mean()
        return net.classified(self)


def _dense(net: Net, growth: int, made: int) -> None:
    """Join what is there, norm it, and make `growth` more channels of it."""
    before = net.at
    if made:
        net.join([before], sums=made)  # all but the newest are used by the layers behind, too
    net.norm(kept=not made)
    net.act("relu")
    net.conv(4 * growth)
    net.conv(growth, 3, norm=False, act="")
    net.at = before._replace(c=before.c + growth)


def _transition(net: Net, made: int) -> None:
    """Half the channels at half the size."""
    net.join([net.at], sums=made)
    net.norm(kept=False)
    net.act("relu")
    net.conv(net.at.c // 2, norm=False, act="")
    net.pool(2, 2, kind="mean")
