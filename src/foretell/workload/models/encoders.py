"""Encoders of words and of images.

Bert     a norm behind each half and learned positions (Devlin et al. 2018)
Vit      an image as a row of patches, with a word for the class (Dosovitskiy et al. 2020)
Flava    an encoder for images, one for words, one for both (Singh et al. 2022, arXiv 2112.04482).
         The first two do not wait for each other; the third reads what both made, side by side.
Swin     attention inside windows, shifted in every other block (Liu et al. 2021). As torchvision
         builds it: scores are not fused (each has a bias by place, shifted ones a mask), and images
         are rolled and cut into windows by copies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from foretell.spec import Spec
from foretell.workload.models import transformer
from foretell.workload.models.cnn import patched, patches_of
from foretell.workload.models.transformer import Piece
from foretell.workload.models.transformer import linear_op as dense
from foretell.workload.workload import Layer, Op, Tensor, Workload


@dataclass(frozen=True)
class Bert(Spec):
    """An encoder of words; as it stands, BERT base with its pooler."""

    name: ClassVar[str] = "bert"
    layers: int = 12
    hidden: int = 768
    heads: int = 12
    inner: int = 0  # width of the feed-forward; 4 × hidden where 0
    seq: int = 128
    vocab: int = 30522
    positions: int = 512
    # what stands behind the encoder: a pooler, masked words, both and the next sentence, spans
    head: Literal["pooler", "mlm", "pretrain", "qa"] = "pooler"
    masked: int = 0  # words that are predicted; all where 0
    dropout: bool = True
    batch: int = 32
    dtype: str = "fp32"

    def workload(self) -> Workload:
        tied = (("embedding/words", "head/decoder"),) if self._predicts else ()
        layers = (self._embedding(), self._block(), self._head())
        return Workload(str(self), layers, self.batch, self.dtype, tied, tokens=self.seq)

    @property
    def _predicts(self) -> bool:
        return self.head in ("mlm", "pretrain")

    def _embedding(self) -> Layer:
        seq, hidden = self.seq, self.hidden
        first = transformer.embedding(
            seq, hidden, self.vocab, positions=self.positions, dropout=self.dropout
        )
        kinds = {"tokens": float(seq), "hidden": float(hidden), "kinds": 2.0}
        weight = (Tensor("kinds", ("kinds", "hidden")),)
        more: list[Piece] = [
            Op("kinds", "embedding", kinds, {"cp": "tokens"}, weight),
            *transformer.residual("sum", seq, hidden) * 2,
            transformer.norm_op("norm", seq, hidden),
        ]
        at = len(first.ops) - self.dropout
        return replace(first, ops=(*first.ops[:at], *more, *first.ops[at:]))

    def _block(self) -> Layer:
        seq, hidden, heads, drop = self.seq, self.hidden, self.heads, self.dropout
        depth = transformer.head_width(hidden, heads)
        options = {"bias": True, "causal": False, "dropout": drop}
        pieces: list[Piece] = [
            *transformer.attention(seq, hidden, heads, heads, depth, apart=True, **options),
            *transformer.residual("residual.attention", seq, hidden, dropout=drop),
            transformer.norm_op("norm.attention", seq, hidden),
            *transformer.feed_forward(seq, hidden, self.inner or 4 * hidden, bias=True),
            *transformer.residual("residual.mlp", seq, hidden, dropout=drop),
            transformer.norm_op("norm.mlp", seq, hidden),
        ]
        return transformer.block_of("block", pieces, seq, hidden, self.layers)

    def _head(self) -> Layer:
        pieces = self._words() if self._predicts else []
        if self.head in ("pooler", "pretrain"):
            pieces += [dense("pooler", self.hidden, self.hidden, 1)]
        if self.head == "pretrain":
            pieces += [dense("next", self.hidden, 2, 1)]
        if self.head == "qa":
            pieces += [dense("spans", self.hidden, 2, self.seq)]
        if not self._predicts:
            pieces.append(Op("loss", "loss", {"vocab": float(self.hidden)}))
        return transformer.block_of("head", pieces, self.seq, self.hidden, is_block=False)

    def _words(self) -> list[Piece]:
        """A product, GELU and a norm, then the words themselves; with a bias each."""
        many, hidden = self.masked or self.seq, self.hidden
        last = transformer.head(many, hidden, self.vocab, transformer.norm_op("norm", many, hidden))
        weights = (Tensor("decoder", ("in", "out")), Tensor("decoder.bias", ("out",)))
        ops = transformer.changed(last.ops, "logits", name="decoder", weights=weights, pads={})
        dims = {"tokens": float(many), "cols": float(hidden)}
        kept = (Tensor("input", ("batch", "tokens", "cols")),)
        gelu = Op("gelu", "pointwise", dims, saved=kept, options={"kernel": "gelu", "back": 3.0})
        return [dense("transform", hidden, hidden, many), gelu, *ops]


def _column(name: str, seq: int, inner: int, out: int, heads: int) -> Op:
    return transformer.column(name, seq, inner, out, bias=True, most=heads)


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
        seq = patches_of(self.image, self.patch) + self.extra
        inner = self.inner or 4 * self.hidden
        pieces = transformer.encoded(seq, self.hidden, self.heads, inner, bias=False)
        block = transformer.block_of("block", pieces, seq, self.hidden, self.layers)
        layers = (self._patches(seq), block, self._head(seq))
        return Workload(str(self), layers, self.batch, self.dtype, tokens=seq)

    def _patches(self, seq: int) -> Layer:
        rows = {"tokens": float(seq), "cols": float(self.hidden)}
        weights = (Tensor("positions", ("tokens", "cols")), Tensor("class", ("extra", "cols")))
        dims = rows | {"extra": float(self.extra), "hidden": rows["cols"]}
        place = Op("positions", "embedding", dims, {}, weights)
        copy = {"kernel": "copy", "passes": 2.0, "back": 2.0}
        joined = Op("cat", "pointwise", rows, options=copy)
        pieces = [*patched(3, self.image, self.patch, self.hidden), joined, place]
        return transformer.block_of("patches", pieces, seq, self.hidden, is_block=False)

    def _head(self, seq: int) -> Layer:
        pieces: list[Piece] = [transformer.norm_op("norm", seq, self.hidden)]
        pieces += [dense("head", self.hidden, self.classes)] * self.extra
        pieces.append(Op("loss", "loss", {"vocab": float(self.classes)}))
        return transformer.block_of("head", pieces, seq, self.hidden, is_block=False)


@dataclass(frozen=True)
class Flava(Spec):
    """As it stands, the published model (section 4 of the paper)."""

    name: ClassVar[str] = "flava"
    layers: int = 12  # of the encoder of images, and as many of words
    joint: int = 0  # of the encoder of both; half of `layers` where 0
    hidden: int = 768
    heads: int = 12
    inner: int = 0  # width of the feed-forward; 4 × hidden where 0
    image: int = 224
    patch: int = 16
    seq: int = 77
    vocab: int = 30522
    batch: int = 64
    dtype: str = "fp16"

    def workload(self) -> Workload:
        """The model's layers: images first, then words, then both."""
        patches = patches_of(self.image, self.patch) + 1
        both, seq = self.joint or max(self.layers // 2, 1), patches + self.seq + 1
        words = transformer.embedding(
            self.seq, self.hidden, self.vocab, positions=self.seq, dropout=False
        )
        layers = (
            self._patches(patches),
            self._encoder("image", patches, self.layers, ("patches",)),
            replace(words, name="words", after=("",)),
            self._encoder("text", self.seq, self.layers, ("words",)),
            self._encoder("joint", seq, both, ("image", "text")),
            self._head(seq),
        )
        return Workload(str(self), layers, self.batch, self.dtype, tokens=seq)

    def _patches(self, seq: int) -> Layer:
        dims = {"tokens": float(seq), "hidden": float(self.hidden)}
        place = Op("positions", "embedding", dims, {}, (Tensor("positions", tuple(dims)),))
        pieces = [*patched(3, self.image, self.patch, self.hidden), place]
        made = transformer.block_of("patches", pieces, seq, self.hidden, is_block=False)
        return replace(made, after=("",))

    def _encoder(self, name: str, seq: int, times: int, after: tuple[str, ...]) -> Layer:
        inner = self.inner or 4 * self.hidden
        pieces = transformer.encoded(seq, self.hidden, self.heads, inner, bias=True)
        return replace(transformer.block_of(name, pieces, seq, self.hidden, times), after=after)

    def _head(self, seq: int) -> Layer:
        """Whether image and text belong together: one product from the first word."""
        pieces: list[Piece] = [
            transformer.norm_op("norm", seq, self.hidden),
            dense("match", self.hidden, 2),
            Op("loss", "loss", {"vocab": 2.0}),
        ]
        made = transformer.block_of("head", pieces, seq, self.hidden, is_block=False)
        return replace(made, after=("joint",))


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
                layers.append(transformer.block_of(name, pieces, side * side, hidden, times))
        layers.append(self._head(side, hidden))
        return Workload(str(self), tuple(layers), self.batch, self.dtype, tokens=side * side)

    def _patches(self, side: int) -> Layer:
        seq = side * side
        pieces = [
            *patched(3, self.image, self.patch, self.width),
            _copied("permute", seq, self.width),
        ]
        pieces.append(transformer.norm_op("norm", seq, self.width))
        return transformer.block_of("patches", pieces, seq, self.width, is_block=False)

    def _block(self, side: int, hidden: int, heads: int, *, shifts: bool) -> list[Piece]:
        """Windows that do not fit are padded, so that every window is whole."""
        seq, whole = side * side, (-(-side // self.window) * self.window) ** 2
        moves: list[Piece] = [_copied("roll", whole, hidden)] if shifts else []
        drop = [_point("drop", seq, hidden, passes=2.0, back=2.0)] if self.drops else []
        added = transformer.residual("residual", seq, hidden)
        return [
            transformer.norm_op("norm.attention", seq, hidden),
            *moves,
            _copied("windows", whole, hidden),
            _column("qkv", whole, hidden, 3 * hidden, heads),
            *self._scores(whole, hidden, heads, shifts=shifts),
            _copied("context", whole, hidden),
            transformer.row("projection", whole, hidden, hidden, bias=True, most=heads),
            _copied("image", whole, hidden),
            *moves,
            *drop,
            *added,
            transformer.norm_op("norm.mlp", seq, hidden),
            *transformer.feed_forward(seq, hidden, 4 * hidden, bias=True),
            *drop,
            *added,
        ]

    def _scores(self, seq: int, hidden: int, heads: int, *, shifts: bool) -> list[Piece]:
        words, split = self.window**2, {"tp": "heads"}
        dims = {"heads": float(seq // words * heads), "queries": float(words), "keys": float(words)}
        table = dims | {"places": float((2 * self.window - 1) ** 2), "each": float(heads)}
        weight = (Tensor("places", ("places", "each")),)
        rows = ("batch", "heads", "queries", "depth")
        kept = (
            Tensor("query", rows, times=1.0),
            Tensor("key and value", rows, times=2.0),
            Tensor("softmax", ("batch", "heads", "queries", "keys")),
        )
        options = {"biased": True, "dropout": False}
        wide = dims | {"depth": hidden / heads}
        core = Op("attention", "attention", wide, split, saved=kept, options=options)
        bias = Op("bias", "biased", table, split, weight, options={"passes": 2.0, "back": 1.0})
        mask = Op("mask", "biased", dims, split, options={"passes": 2.0, "back": 0.0})
        # each is laid out for its product; gradients of the three are put together and added
        turned = [_copied(f"{name}.permute", seq, hidden) for name in ("query", "key", "value")]
        parts = _point("qkv.parts", seq, 3 * hidden, passes=0.0, back=10.0, many=5)
        masks = [mask] if shifts else []
        return [parts, *turned, _copied("scale", seq, hidden), core, bias, *masks]

    def _head(self, side: int, hidden: int) -> Layer:
        pieces: list[Piece] = [
            transformer.norm_op("norm", side * side, hidden),
            Op("mean", "mean", {"c": float(hidden), "h": float(side), "w": float(side)}),
            dense("head", hidden, self.classes),
            Op("loss", "loss", {"vocab": float(self.classes)}),
        ]
        return transformer.block_of("head", pieces, side * side, hidden, is_block=False)


def _merge(side: int, hidden: int, stage: int) -> Layer:
    """Four neighbours become one word of twice the width."""
    seq, four = side * side, 2 * hidden
    weight = (Tensor("merge.weight", ("in", "out")),)
    dims = {"tokens": float(seq), "in": float(four), "out": float(hidden)}
    saved = (Tensor("input", ("batch", "tokens", "in")),)
    pieces: list[Piece] = [
        _copied("merge.cat", seq, four),
        transformer.norm_op("merge.norm", seq, four),
        Op("merge", "matmul", dims, {"cp": "tokens"}, weight, saved),
    ]
    return transformer.block_of(f"merge{stage}", pieces, seq, hidden, is_block=False)


def _copied(name: str, tokens: int, cols: int) -> Op:
    """A tensor laid out anew, and its gradient back."""
    return _point(name, tokens, cols, kernel="copy", passes=2.0, back=2.0)


def _point(name: str, tokens: int, cols: int, **options: Any) -> Op:
    """Work on every element of a row of words."""
    dims = {"tokens": float(tokens), "cols": float(cols)}
    return Op(name, "pointwise", dims, {"cp": "tokens"}, options=options)
