"""RetinaNet (Lin et al. 2017): boxes and classes at every place of a pyramid of images."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from foretell.spec import Spec
from foretell.workload.models.cnn import Image, Net
from foretell.workload.models.convnets import Resnet
from foretell.workload.workload import Exchange, Layer, Op, Workload


@dataclass(frozen=True)
class Retinanet(Spec):
    """A ResNet whose norms are frozen, a pyramid, two heads; as it stands, torchvision's."""

    name: ClassVar[str] = "retinanet"
    depth: int = 50
    image: int = 800
    width: int = 256  # channels of the pyramid
    classes: int = 91
    anchors: int = 9  # boxes tried at each place
    batch: int = 4
    dtype: str = "fp32"

    def workload(self) -> Workload:
        """The model's layers."""
        net = Net(Image(3, self.image, self.image))
        images = Resnet(depth=self.depth).body(net)
        net.whole = True
        levels = self._pyramid(net, images)
        for i, level in enumerate(levels):
            self._heads(net, level, own=i == 0)
            net.cut(f"heads{i}", is_block=False)
        body = [_frozen(layer) for layer in net.layers]
        return Workload(str(self), tuple(body), self.batch, self.dtype)

    def _pyramid(self, net: Net, images: list[Image]) -> list[Image]:
        """The last three images at one width, the coarser added to the finer; two coarser yet."""
        levels: list[Image] = []
        for i, image in enumerate(reversed(images[1:])):
            net.at = image
            net.conv(self.width, 1, bias=True, norm=False, act="")
            if i:
                net.add()
            net.conv(self.width, 3, bias=True, norm=False, act="")
            levels.insert(0, net.at)
        net.at = levels[-1]
        for act in ("relu", ""):
            net.conv(self.width, 3, 2, pad=1, bias=True, norm=False, act=act)
            levels.append(net.at)
        net.cut("pyramid", is_block=False)
        return levels

    def _heads(self, net: Net, level: Image, *, own: bool) -> None:
        """Four convolutions and one that answers, for classes and for boxes; shared by levels."""
        first = len(net.ops)
        for out, passes in ((self.classes, 4.0), (4, 3.0)):
            net.at = level
            for _ in range(4):
                net.conv(self.width, 3, bias=True, norm=False, act="relu")
            net.conv(self.anchors * out, 3, bias=True, norm=False, act="")
            net._point(f"loss{out}", (), passes=passes, back=3.0)
        if not own:
            net.ops[first:] = [_shared(op) for op in net.ops[first:]]


def _shared(op: Op | Exchange) -> Op | Exchange:
    return replace(op, weights=()) if isinstance(op, Op) else op


def _frozen(layer: Layer) -> Layer:
    """Batch norms that only scale and shift, without statistics, weights or anything kept."""
    ops = [
        Op(op.name, "pointwise", op.dims, op.splits, options={"passes": 2.0, "back": 2.0})
        if isinstance(op, Op) and op.kind == "batch_norm"
        else op
        for op in layer.ops
    ]
    return replace(layer, ops=tuple(ops))
