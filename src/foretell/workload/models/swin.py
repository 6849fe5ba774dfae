"""Swin (Liu et al. 2021): attention inside windows, shifted in every other block.

As torchvision builds it: scores are not fused (each has a bias by place, shifted ones a mask), and
images are rolled and cut into windows by copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from foretell.spec import Spec
from foretell.workload.models import transformer
from foretell.workload.models.cnn import Image, Net
from foretell.workload.models.transformer import Piece
from foretell.workload.models.vit import classifier
from foretell.workload.workload import Layer, Op, Tensor, Workload


@dataclass(frozen=True)
class Swin(Spec):
    """A hierarchy of windows; as it stands, Swin-T."""

    name: ClassVar[str] = "swin"
    width: int = 96
    blocks: tuple[int, ...] = (2, 2, 6, 2)
    heads: tuple[int, ...] = (3, 6, 12, 24)
    window: int = 7
    patch: int = 4
    image: int = 224
    classes: int = 1000
    drops: bool = True  # stochastic depth: a factor a sample on each branch
    batch: int = 64
    dtype: str = "fp32"

    def workload(self) -> Workload:
        """The model's layers."""
        side, hidden = self.image // self.patch, self.width
        layers = [self._patches(side)]
        for stage, (many, heads) in enumerate(zip(self.blocks, self.heads, strict=True)):
            if stage:
                side, hidden = side // 2, 2 * hidden
                layers.append(_merge(side, hidden, stage))
            for shifted in (False, True):
                times = (many + 1 - shifted) // 2
                name = f"stage{stage + 1}.{'shifted' if shifted else 'plain'}"
                shifts = shifted and side > self.window
                pieces = self._block(side, hidden, heads, shifts=shifts)
                layers.append(transformer.block(name, pieces, side * side, hidden, times))
        layers.append(self._head(side, hidden))
        return Workload(str(self), tuple(layers), self.batch, self.dtype, tokens=side * side)

    def _patches(self, side: int) -> Layer:
        net = Net(Image(3, self.image, self.image))
        net.conv(self.width, self.patch, self.patch, pad=0, bias=True, norm=False, act="")
        seq = side * side
        pieces = [*net.ops, copied("permute", seq, self.width)]
        pieces.append(transformer.norm("norm", seq, self.width))
        return _outside("patches", pieces, seq, self.width)

    def _block(self, side: int, hidden: int, heads: int, *, shifts: bool) -> list[Piece]:
        """Windows that do not fit are padded, so that every window is whole."""
        seq, whole = side * side, (-(-side // self.window) * self.window) ** 2
        moves: list[Piece] = [copied("roll", whole, hidden)] if shifts else []
        drop = [point("drop", seq, hidden, passes=2.0, back=2.0)] if self.drops else []
        added = transformer.residual("residual", seq, hidden, bias=False, dropout=False)
        return [
            transformer.norm("norm.attention", seq, hidden),
            *moves,
            copied("windows", whole, hidden),
            transformer.column("qkv", whole, hidden, 3 * hidden, bias=True, most=heads),
            *self._scores(whole, hidden, heads, shifts=shifts),
            copied("context", whole, hidden),
            transformer.row("projection", whole, hidden, hidden, bias=True, most=heads),
            copied("image", whole, hidden),
            *moves,
            *drop,
            *added,
            transformer.norm("norm.mlp", seq, hidden),
            *transformer.feed_forward(seq, hidden, 4 * hidden, bias=True),
            *drop,
            *added,
        ]

    def _scores(self, seq: int, hidden: int, heads: int, *, shifts: bool) -> list[Piece]:
        words = self.window**2
        many = seq // words * heads
        dims = {"heads": float(many), "queries": float(words), "keys": float(words)}
        table = dims | {"places": float((2 * self.window - 1) ** 2), "each": float(heads)}
        weight = (Tensor("places", ("places", "each")),)
        scores = ("batch", "heads", "queries", "keys")
        kept = tuple(Tensor(name, ("batch", "heads", "queries", "depth"), times=times)
                     for name, times in (("query", 1.0), ("key and value", 2.0)))  # fmt: skip
        options = {"biased": True, "dropout": False}
        core = Op("attention", "attention", dims | {"depth": hidden / heads}, {"tp": "heads"},
                  saved=(*kept, Tensor("softmax", scores)), options=options)  # fmt: skip
        split = {"tp": "heads"}
        bias = Op("bias", "biased", table, split, weight, options={"passes": 2.0, "back": 1.0})
        mask = Op("mask", "biased", dims, split, options={"passes": 2.0, "back": 0.0})
        # each is laid out for its product; gradients of the three are put together and added
        turned = [copied(f"{name}.permute", seq, hidden) for name in ("query", "key", "value")]
        parts = point("qkv.parts", seq, 3 * hidden, passes=0.0, back=10.0, many=5)
        masks = [mask] if shifts else []
        return [parts, *turned, copied("scale", seq, hidden), core, bias, *masks]

    def _head(self, side: int, hidden: int) -> Layer:
        seq = side * side
        pieces: list[Piece] = [transformer.norm("norm", seq, hidden)]
        pieces.append(Op("mean", "mean", {"c": float(hidden), "h": float(side), "w": float(side)}))
        pieces.append(classifier(hidden, self.classes))
        pieces.append(Op("loss", "loss", {"vocab": float(self.classes)}))
        return _outside("head", pieces, seq, hidden)


def _merge(side: int, hidden: int, stage: int) -> Layer:
    """Four neighbours become one word of twice the width."""
    seq, four = side * side, 2 * hidden
    weight = (Tensor("merge.weight", ("in", "out")),)
    dims = {"tokens": float(seq), "in": float(four), "out": float(hidden)}
    saved = (Tensor("input", ("batch", "tokens", "in")),)
    pieces: list[Piece] = [
        copied("merge.cat", seq, four),
        transformer.norm("merge.norm", seq, four),
        Op("merge", "matmul", dims, {"cp": "tokens"}, weight, saved),
    ]
    return _outside(f"merge{stage}", pieces, seq, hidden)


def copied(name: str, tokens: int, cols: int) -> Op:
    """A tensor laid out anew, and its gradient back."""
    return point(name, tokens, cols, kernel="copy", passes=2.0, back=2.0)


def point(name: str, tokens: int, cols: int, **options: Any) -> Op:
    """Work on every element of a row of words."""
    dims = {"tokens": float(tokens), "cols": float(cols)}
    return Op(name, "pointwise", dims, {"cp": "tokens"}, options=options)


def _outside(name: str, pieces: list[Piece], seq: int, hidden: int) -> Layer:
    made = transformer.block(name, pieces, seq, hidden, 1)
    return Layer(name, made.ops, made.carries, made.sizes, 1, made.splits, is_block=False)
