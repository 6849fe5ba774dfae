"""Convolutional networks, layer by layer: those that classify images, find boxes, label volumes.

Each class says which paper it is of and whose code it follows; tables of widths and depths stand
before the class that they are of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from foretell.errors import InputError, unknown
from foretell.spec import Spec
from foretell.workload.models.cnn import Image, Net, Sides
from foretell.workload.workload import Exchange, Op, Tensor, Workload


@dataclass(frozen=True)
class Alexnet(Spec):
    """Five convolutions and three matmuls."""

    name: ClassVar[str] = "alexnet"
    image: int = 224
    classes: int = 1000
    batch: int = 128
    dtype: str = "fp32"

    def workload(self) -> Workload:
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


# A branch of convolutions: the width of a 1×1 window, or width and window (and a third number where
# it halves the image, without padding); `max` or `mean` is a pool.
Branch = Sequence[int | str | tuple[int, Sides] | tuple[int, Sides, int]]


@dataclass(frozen=True)
class InceptionV3(Spec):
    """Branches of convolutions of different sizes (Szegedy et al. 2015), as torchvision's."""

    name: ClassVar[str] = "inception_v3"
    aux: bool = True  # the second classifier, there in training only
    image: int = 299
    classes: int = 1000
    batch: int = 64
    dtype: str = "fp32"

    def workload(self) -> Workload:
        net = Net(Image(3, self.image, self.image))
        net.conv(32, 3, 2, pad=0)
        net.conv(32, 3, pad=0)
        net.conv(64, 3)
        net.pool(3, 2)
        net.conv(80)
        net.conv(192, 3, pad=0)
        net.pool(3, 2)
        net.cut("stem", is_block=False)
        for i, pooled in enumerate((32, 64, 64)):
            _joined(net, f"a{i + 1}", [[64], [48, (64, 5)], [64, *_TWICE], ["mean", pooled]])
        _joined(net, "b", [[(384, 3, 2)], [64, (96, 3), (96, 3, 2)], ["max"]])
        for i, width in enumerate((128, 160, 160, 192)):
            _joined(net, f"c{i + 1}", _long(width))
        if self.aux:
            self._second(net)
        _joined(
            net, "d", [[192, (320, 3, 2)], [192, (192, _ROW), (192, _COLUMN), (192, 3, 2)], ["max"]]
        )
        for i in range(2):
            _forked(net)
            net.cut(f"e{i + 1}")
        net.mean()
        net.dropout()
        return net.classified(self)

    def _second(self, net: Net) -> None:
        given = net.at
        net.pool(5, 3, kind="mean")
        net.conv(128)
        net.conv(768, 5, pad=0)
        net.mean()
        net.linear(self.classes, last=True)
        net.loss(self.classes)
        net.at = given
        net.cut("aux", is_block=False)


_TWICE, _ROW, _COLUMN = ((96, 3), (96, 3)), (1, 7), (7, 1)


def _long(width: int) -> list[Branch]:
    """Branches of rows and columns of seven."""
    short = (width, _ROW), (192, _COLUMN)
    long = (width, _COLUMN), (width, _ROW), (width, _COLUMN), (192, _ROW)
    return [[192], [width, *short], [width, *long], ["mean", 192]]


def _joined(net: Net, name: str, branches: Sequence[Branch]) -> None:
    given = net.at
    made = [_branch(net, given, branch) for branch in branches]
    net.at = made[0]
    net.join(made)
    net.cut(name)


def _branch(net: Net, given: Image, branch: Branch) -> Image:
    net.at = given
    for item in branch:
        if item == "max":
            net.pool(3, 2)
        elif isinstance(item, str):
            net.pool(3, 1, 1, kind="mean")
        elif isinstance(item, int):
            net.conv(item)
        elif len(item) == 3:
            net.conv(item[0], item[1], item[2], pad=0)
        else:
            net.conv(*item)
    return net.at


def _forked(net: Net) -> None:
    """Two of the branches end in a row and a column side by side."""
    given = net.at
    made = [_branch(net, given, [320])]
    forks: list[Branch] = [[384], [448, (384, 3)]]
    for before in forks:
        fork = _branch(net, given, before)
        made += [_branch(net, fork, [(384, side)]) for side in ((1, 3), (3, 1))]
    made.append(_branch(net, given, ["mean", 192]))
    net.at = given
    net.join(made)


def inverted(
    net: Net, inner: int, out: int, window: int, stride: int, *,
    squeeze: int = 0, act: str = "relu6", gate: str = "hardsigmoid", squeeze_act: str = "relu",
) -> None:  # fmt: skip
    """Add an inverted residual: out to `inner` channels, a window over each, back to `out`.

    `squeeze` is the width of squeeze and excite; its sum is there where sizes stay the same.
    """
    given = net.at
    if inner != given.c:
        net.conv(inner, act=act)
    net.conv(inner, window, stride, groups=inner, act=act)
    if squeeze:
        net.squeeze(squeeze, squeeze_act, gate)
    net.conv(out, act="")
    if net.at == given:
        net.add()
    else:
        net.keep()


def rounded(width: float) -> int:
    """The nearest multiple of 8, at least 8, and never less than nine tenths of it."""
    near = max(8, int(width + 4) // 8 * 8)
    return near + 8 if near < 0.9 * width else near


# expansion, channels, blocks, stride of the first: table 2 of the paper
_V2 = (
    (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2),
    (6, 320, 1, 1),
)  # fmt: skip


@dataclass(frozen=True)
class MobilenetV2(Spec):
    """Inverted residuals with linear bottlenecks (Sandler et al. 2018), as torchvision's."""

    name: ClassVar[str] = "mobilenet_v2"
    width: float = 1.0
    image: int = 224
    classes: int = 1000
    batch: int = 128
    dtype: str = "fp32"

    def workload(self) -> Workload:
        net = Net(Image(3, self.image, self.image))
        net.conv(rounded(32 * self.width), 3, 2, act="relu6")
        net.cut("stem", is_block=False)
        for row, (grow, out, many, stride) in enumerate(_V2):
            for i in range(many):
                wide = rounded(out * self.width)
                inverted(net, grow * net.at.c, wide, 3, 1 if i else stride)
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


@dataclass(frozen=True)
class MobilenetV3(Spec):
    """Found by search: squeeze and excite here and there, hard swish in the second half.

    Howard et al. 2019, as torchvision builds it.
    """

    name: ClassVar[str] = "mobilenet_v3"
    small: bool = False
    width: float = 1.0
    image: int = 224
    classes: int = 1000
    batch: int = 128
    dtype: str = "fp32"

    def workload(self) -> Workload:
        rows = _SMALL if self.small else _LARGE
        net = Net(Image(3, self.image, self.image))
        net.conv(rounded(16 * self.width), 3, 2, act="hardswish")
        net.cut("stem", is_block=False)
        for i, (window, inner, out, squeezed, act, stride) in enumerate(rows):
            wide = rounded(inner * self.width)
            squeeze = rounded(wide // 4) if squeezed else 0
            inverted(net, wide, rounded(out * self.width), window, stride, squeeze=squeeze, act=act)
            net.cut(f"block{i + 1}")
        net.conv(6 * net.at.c, act="hardswish")
        net.mean()
        last = rounded((1024 if self.small else 1280) * self.width)
        net.linear(last, act="hardswish", dropout=True)
        return net.classified(self)


# b → width, depth, image (torchvision's crops)
SCALES = {
    0: (1.0, 1.0, 224), 1: (1.0, 1.1, 240), 2: (1.1, 1.2, 288), 3: (1.2, 1.4, 300),
    4: (1.4, 1.8, 380), 5: (1.6, 2.2, 456), 6: (1.8, 2.6, 528), 7: (2.0, 3.1, 600),
}  # fmt: skip
# expansion, window, stride, channels, blocks: table 1 of the paper
_EFFICIENT = (
    (1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3), (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4), (6, 3, 1, 320, 1),
)  # fmt: skip


@dataclass(frozen=True)
class Efficientnet(Spec):
    """Inverted residuals with squeeze and excite, swish everywhere (Tan and Le 2019).

    One network found by search, scaled in width, depth and image.
    """

    name: ClassVar[str] = "efficientnet"
    b: int = 0  # 0 to 7
    image: int = 0  # that of the variant where 0
    classes: int = 1000
    batch: int = 64
    dtype: str = "fp32"

    def workload(self) -> Workload:
        if self.b not in SCALES:
            raise unknown("EfficientNet b", str(self.b), map(str, SCALES))
        width, depth, side = SCALES[self.b]
        side = self.image or side
        net = Net(Image(3, side, side))
        net.conv(rounded(32 * width), 3, 2, act="silu")
        net.cut("stem", is_block=False)
        for row, (grow, window, stride, out, many) in enumerate(_EFFICIENT):
            for i in range(math.ceil(many * depth)):
                inverted(
                    net, rounded(grow * net.at.c), rounded(out * width), window, 1 if i else stride,
                    squeeze=max(1, net.at.c // 4), act="silu", gate="sigmoid", squeeze_act="silu",
                )  # fmt: skip
                net.cut(f"block{row + 1}.{min(i, 1)}")
        net.conv(4 * net.at.c, act="silu")
        net.mean()
        net.dropout()
        return net.classified(self)


@dataclass(frozen=True)
class Retinanet(Spec):
    """Boxes and classes at every place of a pyramid of images (Lin et al. 2017).

    A ResNet whose norms are frozen, a pyramid, two heads; as it stands, torchvision's.
    """

    name: ClassVar[str] = "retinanet"
    depth: int = 50
    image: int = 800
    width: int = 256  # channels of the pyramid
    classes: int = 91
    anchors: int = 9  # boxes tried at each place
    batch: int = 4
    dtype: str = "fp32"

    def workload(self) -> Workload:
        net = Net(Image(3, self.image, self.image))
        images = Resnet(depth=self.depth).body(net)
        net.whole = True
        for i, level in enumerate(self._pyramid(net, images)):
            self._heads(net, level, own=i == 0)
            net.cut(f"heads{i}", is_block=False)
        body = [replace(layer, ops=tuple(map(_frozen, layer.ops))) for layer in net.layers]
        return Workload(str(self), tuple(body), self.batch, self.dtype)

    def _pyramid(self, net: Net, images: list[Image]) -> list[Image]:
        """The last three images at one width, the coarser added to the finer; two coarser yet."""
        levels: list[Image] = []
        for i, image in enumerate(reversed(images[1:])):
            net.at = image
            net.plain(self.width)
            if i:
                net.add()
            net.plain(self.width, 3)
            levels.insert(0, net.at)
        net.at = levels[-1]
        for act in ("relu", ""):
            levels.append(net.plain(self.width, 3, 2, act))
        net.cut("pyramid", is_block=False)
        return levels

    def _heads(self, net: Net, level: Image, *, own: bool) -> None:
        """Four convolutions and one that answers, for classes and for boxes; shared by levels."""
        first = len(net.ops)
        for out, passes in ((self.classes, 4.0), (4, 3.0)):
            net.at = level
            for _ in range(4):
                net.plain(self.width, 3, act="relu")
            net.plain(self.anchors * out, 3)
            net.point(f"loss{out}", (), passes=passes, back=3.0)
        if not own:
            shared = net.ops[first:]
            net.ops[first:] = [replace(o, weights=()) if isinstance(o, Op) else o for o in shared]


def _frozen(op: Op | Exchange) -> Op | Exchange:
    """A batch norm that only scales and shifts, without statistics, weights or anything kept."""
    if not isinstance(op, Op) or op.kind != "batch_norm":
        return op
    return Op(op.name, "pointwise", op.dims, op.splits, options={"passes": 2.0, "back": 2.0})


_LEFT = 2  # side of the cube that is left


@dataclass(frozen=True)
class Cosmoflow(Spec):
    """Four parameters of a simulated universe: seven convolutions, halved between, three matmuls.

    Widths and the 9.44 million parameters as in Oyama et al. 2020 (arXiv 2007.12856, table 1), the
    same at 128³, 256³ and 512³: larger cubes are halved more often, so that 2³ is left.
    """

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
        net = Net(Image(self.channels, self.size, self.size, self.size))
        for i, width in enumerate(self.widths):
            strided = i == 3 and net.at.h > _LEFT
            net.conv(width, 3, 2 if strided else 1, norm=self.norm, act="leaky")
            # whether one halving a convolution would not be enough from here on
            is_behind = net.at.h >> max(len(self.widths) - 1 - i, 0) > _LEFT
            if net.at.h > _LEFT and (not strided or is_behind):
                net.pool(2, 2)
            if i + 1 == self.split:
                net.gather()
            net.cut(f"conv{i + 1}")
        if net.at.h != _LEFT:
            raise InputError(
                f"a cube of {self.size} is not halved to {_LEFT} in {len(self.widths)} layers",
                hint="sizes are 128, 256 or 512",
            )
        net.flat()
        for width in self.fc[:-1]:
            net.linear(width, bias=False, act="leaky", dropout=True)
        net.linear(self.fc[-1], bias=False, last=True)
        net.ops.append(Op("loss", "pointwise", {"c": float(self.fc[-1])}))
        return net.headed(self)


@dataclass(frozen=True)
class Unet3d(Spec):
    """A network that labels every voxel: down and up again, with what was there at each size.

    Çiçek et al. 2016; 19 069 955 parameters as published; convolutions are padded to keep sizes.
    """

    name: ClassVar[str] = "unet3d"
    size: int = 128  # side of the cube
    channels: int = 3
    classes: int = 3
    width: int = 32  # channels of the first convolution
    levels: int = 4  # sizes, the whole one included
    batch: int = 1
    dtype: str = "fp32"

    def workload(self) -> Workload:
        if self.size % (1 << (self.levels - 1)):
            raise InputError(
                f"a cube of {self.size} cannot be halved {self.levels - 1} times",
                hint=f"give a multiple of {1 << (self.levels - 1)}",
            )
        net = Net(Image(self.channels, self.size, self.size, self.size))
        beside = []
        for level in range(self.levels):
            if level:
                net.pool(2, 2)
            _normed(net, self.width << level)
            beside.append(_normed(net, 2 * (self.width << level)))
            net.cut(f"down{level + 1}")
        for level, kept in reversed(list(enumerate(beside[:-1]))):
            net.up(net.at.c)
            net.join([net.at, kept])
            _normed(net, kept.c)
            _normed(net, kept.c)
            net.cut(f"up{level + 1}")
        net.plain(self.classes)
        splits = {"height": "h", "width": "w", "depth": "d"}
        made = (Tensor("probabilities", ("batch", "c", "h", "w", "d"), "fp32"),)
        options = {"passes": 4.0, "back": 3.0, "dtype": "fp32"}
        net.ops.append(Op("loss", "pointwise", net.at.dims(), splits, saved=made, options=options))
        return net.headed(self)


def _normed(net: Net, out: int) -> Image:
    """A convolution with bias; its norm has no factors, as Caffe's."""
    net.plain(out, 3)
    net.norm(affine=False)
    return net.act("relu")
