"""Inception-v3 (Szegedy et al. 2015) as torchvision builds it, its second classifier included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from foretell.spec import Spec
from foretell.workload.models.cnn import Image, Net, Sides
from foretell.workload.workload import Workload

Conv = tuple[int, Sides, int, Sides]  # width, window, stride, padding
Branch = Sequence[Conv | str]  # `max` or `mean`: a pool


@dataclass(frozen=True)
class InceptionV3(Spec):
    """Branches of convolutions of different sizes, joined."""

    name: ClassVar[str] = "inception_v3"
    aux: bool = True  # the second classifier, there in training only
    image: int = 299
    classes: int = 1000
    batch: int = 64
    dtype: str = "fp32"

    def workload(self) -> Workload:
        """The model's layers."""
        net = Net(Image(3, self.image, self.image))
        _stem(net)
        for i, pooled in enumerate((32, 64, 64)):
            _joined(net, f"a{i + 1}", _a(pooled))
        _joined(net, "b", _B)
        for i, width in enumerate((128, 160, 160, 192)):
            _joined(net, f"c{i + 1}", _c(width))
        if self.aux:
            self._second(net)
        _joined(net, "d", _D)
        for i in range(2):
            _e(net)
            net.cut(f"e{i + 1}")
        self._head(net)
        return Workload(str(self), tuple(net.layers), self.batch, self.dtype)

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

    def _head(self, net: Net) -> None:
        net.mean()
        net.dropout()
        net.linear(self.classes, last=True)
        net.loss(self.classes)
        net.cut("head", is_block=False)


def _stem(net: Net) -> None:
    net.conv(32, 3, 2, pad=0)
    net.conv(32, 3, pad=0)
    net.conv(64, 3)
    net.pool(3, 2)
    net.conv(80)
    net.conv(192, 3, pad=0)
    net.pool(3, 2)
    net.cut("stem", is_block=False)


def _one(width: int) -> Conv:
    return (width, 1, 1, 0)


def _a(pooled: int) -> list[Branch]:
    return [
        [_one(64)],
        [_one(48), (64, 5, 1, 2)],
        [_one(64), (96, 3, 1, 1), (96, 3, 1, 1)],
        ["mean", _one(pooled)],
    ]


_B: list[Branch] = [
    [(384, 3, 2, 0)],
    [_one(64), (96, 3, 1, 1), (96, 3, 2, 0)],
    ["max"],
]


def _c(width: int) -> list[Branch]:
    row, column = (1, 7), (7, 1)
    along, across = (0, 3), (3, 0)
    return [
        [_one(192)],
        [_one(width), (width, row, 1, along), (192, column, 1, across)],
        [
            _one(width),
            (width, column, 1, across),
            (width, row, 1, along),
            (width, column, 1, across),
            (192, row, 1, along),
        ],
        ["mean", _one(192)],
    ]


_D: list[Branch] = [
    [_one(192), (320, 3, 2, 0)],
    [_one(192), (192, (1, 7), 1, (0, 3)), (192, (7, 1), 1, (3, 0)), (192, 3, 2, 0)],
    ["max"],
]


def _joined(net: Net, name: str, branches: Sequence[Branch]) -> None:
    given, made = net.at, []
    for branch in branches:
        net.at = given
        made.append(_branch(net, branch))
    net.at = made[0]
    net.join(made)
    net.cut(name)


def _branch(net: Net, branch: Branch) -> Image:
    for item in branch:
        if item == "max":
            net.pool(3, 2)
        elif isinstance(item, str):
            net.pool(3, 1, 1, kind="mean")
        else:
            width, window, stride, pad = item
            net.conv(width, window, stride, pad=pad)
    return net.at


def _e(net: Net) -> None:
    """Two of the branches end in a row and a column side by side."""
    given = net.at
    made = [_branch(net, [_one(320)])]
    for before in ([_one(384)], [_one(448), (384, 3, 1, 1)]):
        net.at = given
        fork = _branch(net, before)
        made.append(_branch(net, [(384, (1, 3), 1, (0, 1))]))
        net.at = fork
        made.append(_branch(net, [(384, (3, 1), 1, (1, 0))]))
    net.at = given
    made.append(_branch(net, ["mean", _one(192)]))
    net.join(made)
