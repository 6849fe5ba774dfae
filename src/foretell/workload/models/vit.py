"""ViT (Dosovitskiy et al. 2020): an image as a row of patches, with a word for the class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from foretell.errors import InputError
from foretell.spec import Spec
from foretell.workload.models import transformer
from foretell.workload.models.cnn import Image, Net
from foretell.workload.models.transformer import Piece
from foretell.workload.workload import Layer, Op, Tensor, Workload


@dataclass(frozen=True)
class Vit(Spec):
    """An encoder of patches; as it stands, ViT-B/16."""

    name: ClassVar[str] = "vit"
    layers: int = 12
    hidden: int = 768
    heads: int = 12
    inner: int = 0  # width of the feed-forward; 4 × hidden where 0
    patch: int = 16
    image: int = 224
    classes: int = 1000
    extra: int = 1  # words besides the patches: the class, and a teacher's where distilled
    batch: int = 64
    dtype: str = "fp32"

    def workload(self) -> Workload:
        """The model's layers."""
        if self.image % self.patch:
            raise InputError(f"an image of {self.image} has no whole patches of {self.patch}")
        seq = (self.image // self.patch) ** 2 + self.extra
        layers = (self._patches(seq), self._block(seq), self._head(seq))
        return Workload(str(self), layers, self.batch, self.dtype, tokens=seq)

    def _patches(self, seq: int) -> Layer:
        net = Net(Image(3, self.image, self.image))
        net.conv(self.hidden, self.patch, self.patch, pad=0, bias=True, norm=False, act="")
        dims = {"tokens": float(seq), "cols": float(self.hidden), "extra": float(self.extra)}
        weights = (Tensor("positions", ("tokens", "cols")), Tensor("class", ("extra", "cols")))
        rows = {"tokens": float(seq), "cols": float(self.hidden)}
        place = Op("positions", "embedding", dims | {"hidden": rows["cols"]}, {}, weights)
        joined = Op(
            "cat", "pointwise", rows, options={"kernel": "copy", "passes": 2.0, "back": 2.0}
        )
        made = transformer.block("patches", [*net.ops, joined, place], seq, self.hidden, 1)
        return _outside(made)

    def _block(self, seq: int) -> Layer:
        hidden, heads = self.hidden, self.heads
        options = {"causal": False, "dropout": False}
        pieces = [
            transformer.norm("norm.attention", seq, hidden),
            *transformer.attention(
                seq, hidden, heads, heads, transformer.depth(hidden, heads), bias=True, **options
            ),
            *transformer.residual("residual.attention", seq, hidden, bias=False, dropout=False),
            transformer.norm("norm.mlp", seq, hidden),
            *transformer.feed_forward(seq, hidden, self.inner or 4 * hidden, bias=True),
            *transformer.residual("residual.mlp", seq, hidden, bias=False, dropout=False),
        ]
        return transformer.block("block", pieces, seq, hidden, self.layers)

    def _head(self, seq: int) -> Layer:
        pieces: list[Piece] = [transformer.norm("norm", seq, self.hidden)]
        pieces += [classifier(self.hidden, self.classes) for _ in range(self.extra)]
        pieces.append(Op("loss", "loss", {"vocab": float(self.classes)}))
        return _outside(transformer.block("head", pieces, seq, self.hidden, 1))


def classifier(hidden: int, classes: int) -> Op:
    """A product from one word to classes."""
    weights = (Tensor("head.weight", ("in", "out")), Tensor("head.bias", ("out",)))
    return Op("head", "matmul", {"in": float(hidden), "out": float(classes)}, weights=weights)


def _outside(layer: Layer) -> Layer:
    """A layer that is not split to stages."""
    return Layer(layer.name, layer.ops, layer.carries, layer.sizes, 1, layer.splits, is_block=False)
