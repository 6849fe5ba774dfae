"""DenseNet (Huang et al. 2016): each layer is given all that the ones before it made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from foretell.errors import unknown
from foretell.spec import Spec
from foretell.workload.models.cnn import Image, Net
from foretell.workload.workload import Workload

# depth → growth, channels of the stem, layers of each block
BLOCKS = {
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
        if self.depth not in BLOCKS:
            raise unknown("depth of a DenseNet", str(self.depth), map(str, BLOCKS))
        growth, stem, blocks = BLOCKS[self.depth]
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
        net.linear(self.classes, last=True)
        net.loss(self.classes)
        net.cut("head", is_block=False)
        return Workload(str(self), tuple(net.layers), self.batch, self.dtype)


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
