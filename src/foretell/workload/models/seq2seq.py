"""An encoder and a decoder that looks at what it made: the original Transformer, T5 and mT5."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from foretell.cost.kernel import added_rows
from foretell.spec import Spec
from foretell.workload.models import transformer
from foretell.workload.models.cnn import Image, Net
from foretell.workload.models.transformer import Piece
from foretell.workload.workload import Layer, Op, Tensor, Workload


@dataclass(frozen=True)
class Sizes:
    """Sizes common to all blocks of a model."""

    hidden: int
    heads: int
    depth: int
    inner: int
    bias: bool
    dropout: bool
    kernel: str  # activation of the feed-forward
    gated: bool
    norm: str  # norm, with a bias, or rms_norm, without
    ahead: bool  # norms before each half, not behind
    apart: bool = False  # queries, keys and values by products of their own; scores have a bias

    def encoder(self, seq: int, times: int) -> Layer:
        """A block of the encoder."""
        own = self._half("attention", seq, self._attention(seq, causal=False))
        return transformer.block_of("encoder", [*own, *self._mlp(seq)], seq, self.hidden, times)

    def decoder(self, seq: int, memory: int, times: int) -> Layer:
        """A block of the decoder: itself, then what the encoder made, then each word alone."""
        pieces = [
            *self._half("attention", seq, self._attention(seq, causal=True)),
            *self._half("cross", seq, self._cross(seq, memory)),
            *self._mlp(seq),
        ]
        return transformer.block_of("decoder", pieces, seq, self.hidden, times)

    def last_norm(self, name: str, seq: int) -> Op:
        """A norm of the model's kind."""
        bias = self.norm == "norm"
        return transformer.norm_op(name, seq, self.hidden, kernel=self.norm, bias=bias)

    def _half(self, name: str, seq: int, inner: list[Piece]) -> list[Piece]:
        norm = self.last_norm(f"norm.{name}", seq)
        added = transformer.residual(f"residual.{name}", seq, self.hidden, dropout=self.dropout)
        return [norm, *inner, *added] if self.ahead else [*inner, *added, norm]

    def _attention(self, seq: int, *, causal: bool) -> list[Piece]:
        options = {"bias": self.bias, "causal": causal, "dropout": self.dropout}
        heads = self.heads
        made = transformer.attention(
            seq, self.hidden, heads, heads, self.depth, apart=self.apart, **options
        )
        return [own for piece in made for own in self._apart(piece, seq)] if self.apart else made

    def _apart(self, piece: Piece, seq: int) -> list[Piece]:
        """Queries, keys and values one by one; the gradients of what they share are added up."""
        if piece.name == "value":
            dims = {"tokens": float(seq), "cols": float(self.hidden)}
            options = {"passes": 0.0, "back": 6.0, "many": 2}
            rows, when = transformer.ROWS, "!fused"
            added = Op("qkv.sum", "pointwise", dims, rows, when=when, options=options)
            return [piece, added]
        if piece.name == "qkv.transpose" and isinstance(piece, Op):
            dims = dict(piece.dims) | {"heads": float(self.heads)}
            return [replace(piece, name=f"{name}.transpose", dims=dims) for name in _QKV]
        if piece.name != "attention":
            return [piece]
        # a number by distance added to every score, its gradient summed over samples
        dims = {k: v for k, v in piece.dims.items() if k != "depth"} | {"each": float(self.heads)}
        split = {"tp": "heads", "cp": "queries"}
        return [piece, Op("bias", "biased", dims, split, when="!flash", options={"back": 1.0})]

    def _mlp(self, seq: int) -> list[Piece]:
        inner = transformer.feed_forward(
            seq, self.hidden, self.inner, bias=self.bias, gated=self.gated, kernel=self.kernel
        )
        return self._half("mlp", seq, inner)

    def _cross(self, seq: int, memory: int) -> list[Piece]:
        """Queries of the decoder, keys and values of the encoder."""
        wide = self.heads * self.depth
        out: list[Piece] = []
        for piece in self._attention(seq, causal=False):
            if piece.name == "qkv":
                out.append(self._column("cross.query", seq, wide))
                out.append(self._column("cross.keys", memory, 2 * wide))
            elif piece.name in _QKV:
                long = seq if piece.name == "query" else memory
                out.append(self._column(f"cross.{piece.name}", long, wide))
            elif piece.name != "bias":  # distances are for words of one side
                made = transformer.renamed(piece, "cross")
                keys = {"keys": float(memory)} if "keys" in piece.dims else {}
                is_op = isinstance(piece, Op)
                out.append(replace(made, dims=dict(piece.dims) | keys) if is_op else made)
        return out

    def _column(self, name: str, seq: int, out: int) -> Op:
        return transformer.column(name, seq, self.hidden, out, bias=self.bias, most=self.heads)


_QKV = ("query", "key", "value")


def _middle(first: Layer, name: str, norm: list[Piece], *, own: bool = False) -> Layer:
    """Layers between encoder and decoder: final norm of the one, embedding of the other.

    Both share the matrix of words, unless the decoder's is its own; positions they do not share.
    """
    ops = first.ops if own else transformer.changed(first.ops, "words", weights=())
    return replace(first, name=name, ops=(*norm, *ops))


@dataclass(frozen=True)
class Transformer(Spec):
    """Attention is all you need (Vaswani et al. 2017); as it stands, the base model."""

    name: ClassVar[str] = "transformer"
    layers: int = 6
    hidden: int = 512
    heads: int = 8
    inner: int = 2048
    decoder: int = 0  # blocks of the decoder; as many as `layers` where 0
    ahead: bool = False  # norms before each half, not behind
    act: Literal["relu", "gelu"] = "relu"
    seq: int = 64  # words of the source
    target: int = 0  # words of the target; as many where 0
    positions: int = 0  # learned positions of the source; fixed ones where 0
    targets: int = 0  # and of the target
    frames: int = 0  # channels of sound: two convolutions instead of words (Whisper)
    vocab: int = 37000  # "about 37000 tokens" shared by both languages
    dropout: bool = True
    batch: int = 64
    dtype: str = "fp32"

    def workload(self) -> Workload:
        """The model's layers; one matrix for both languages and the logits."""
        seq, target = self.seq, self.target or self.seq
        depth = transformer.head_width(self.hidden, self.heads)
        sizes = Sizes(
            self.hidden, self.heads, depth, self.inner, True, self.dropout, self.act, False,
            "norm", self.ahead,
        )  # fmt: skip
        first = self._sound() if self.frames else self._words(seq, self.positions)
        second = self._words(target, self.targets)
        last = transformer.head(target, self.hidden, self.vocab, sizes.last_norm("norm", target))
        behind: list[Piece] = [sizes.last_norm("norm.encoder", seq)] if self.ahead else []
        if not self.ahead:  # norms stand behind each half already
            last = replace(last, ops=last.ops[1:])
        layers = (
            first,
            sizes.encoder(seq, self.layers),
            _middle(second, "target", behind, own=bool(self.frames)),
            sizes.decoder(target, seq, self.decoder or self.layers),
            last,
        )
        tied = (("target/words" if self.frames else "embedding/words", "head/logits"),)
        return Workload(str(self), layers, self.batch, self.dtype, tied, tokens=target)

    def _words(self, seq: int, positions: int) -> Layer:
        return transformer.embedding(
            seq, self.hidden, self.vocab, positions=positions, dropout=self.dropout
        )

    def _sound(self) -> Layer:
        """Two convolutions over frames, the second of stride 2, and positions."""
        net = Net(Image(self.frames, 1, 2 * self.seq))
        for stride in (1, 2):
            net.plain(self.hidden, (1, 3), stride, "gelu")
        dims = {"tokens": float(self.seq), "hidden": float(self.hidden)}
        place = Op("positions", "embedding", dims, {}, (Tensor("positions", tuple(dims)),))
        pieces = [*net.ops, place]
        return transformer.block_of("embedding", pieces, self.seq, self.hidden, is_block=False)


@dataclass(frozen=True)
class T5(Spec):
    """T5 (Raffel et al. 2019); as it stands, the small model. mT5 gates and unties."""

    name: ClassVar[str] = "t5"
    layers: int = 6  # of the encoder, and as many of the decoder
    hidden: int = 512
    heads: int = 8
    depth: int = 64  # of one head
    inner: int = 2048
    gated: bool = False  # gated GELU instead of ReLU (version 1.1 and mT5)
    tied: bool = True
    seq: int = 512
    target: int = 114
    vocab: int = 32128
    buckets: int = 32  # of relative positions, a number for each head
    dropout: bool = True
    batch: int = 8
    dtype: str = "bf16"

    def workload(self) -> Workload:
        kernel = "gelu" if self.gated else "relu"
        sizes = Sizes(
            self.hidden, self.heads, self.depth, self.inner, False, self.dropout, kernel,
            self.gated, "rms_norm", True, True,
        )  # fmt: skip
        first = self._words(self.seq, "encoder")
        second = _middle(self._words(self.target, "decoder"), "target", [])
        norm: list[Piece] = [sizes.last_norm("norm.encoder", self.seq), self._places("decoder")]
        last = transformer.head(
            self.target, self.hidden, self.vocab, sizes.last_norm("norm", self.target)
        )
        layers = (
            first,
            sizes.encoder(self.seq, self.layers),
            replace(second, ops=(*norm, *second.ops[:-1])),  # places stand in front already
            sizes.decoder(self.target, self.seq, self.layers),
            last,
        )
        tied = (("embedding/words", "head/logits"),) if self.tied else ()
        return Workload(str(self), layers, self.batch, self.dtype, tied, tokens=self.target)

    def _words(self, seq: int, side: str) -> Layer:
        made = transformer.embedding(
            seq, self.hidden, self.vocab, positions=0, dropout=self.dropout
        )
        return replace(made, ops=(*made.ops, self._places(side)))

    def _places(self, side: str) -> Op:
        """A number for each distance and head, looked up for every pair of words once a step."""
        seq = self.seq if side == "encoder" else self.target
        pairs, heads = float(seq * seq), float(self.heads)
        weight = Tensor(f"places.{side}", (), times=self.buckets * heads)
        added = float(added_rows(pairs, self.buckets)) / pairs
        there = ("embedding", (("n", heads), ("rows", 1.0)), (), 4.0 * heads, "", 0.0)
        back = ("embedding_backward", (("n", heads), ("rows", added)), (), 4.0 * heads, "", 0.0)
        options = {"forward": (there,), "backward": (back,), "once": True}
        return Op(f"places.{side}", "recorded", {"n": pairs}, weights=(weight,), options=options)


@dataclass(frozen=True)
class Mt5(T5):
    """mT5 (Xue et al. 2020); as it stands, the small model."""

    name: ClassVar[str] = "mt5"
    layers: int = 8
    heads: int = 6
    inner: int = 1024
    gated: bool = True
    tied: bool = False
    vocab: int = 250112
