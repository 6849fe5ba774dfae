"""BERT (Devlin et al. 2018): an encoder with a norm behind each half and learned positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from foretell.spec import Spec
from foretell.workload.models import transformer
from foretell.workload.models.transformer import Piece
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
        """The model's layers."""
        tied = (("embedding/words", "head/decoder"),) if self._predicts else ()
        return Workload(
            str(self),
            (self._embedding(), self._block(), self._head()),
            self.batch,
            self.dtype,
            tied,
            tokens=self.seq,
        )

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
            *transformer.residual("sum", seq, hidden, bias=False, dropout=False),
            *transformer.residual("sum", seq, hidden, bias=False, dropout=False),
            transformer.norm("norm", seq, hidden),
        ]
        at = len(first.ops) - (1 if self.dropout else 0)
        ops = (*first.ops[:at], *more, *first.ops[at:])
        return Layer("embedding", ops, first.carries, first.sizes, 1, first.splits, is_block=False)

    def _block(self) -> Layer:
        seq, hidden, heads, drop = self.seq, self.hidden, self.heads, self.dropout
        attention = transformer.attention(
            seq,
            hidden,
            heads,
            heads,
            transformer.depth(hidden, heads),
            bias=True,
            causal=False,
            dropout=drop,
        )
        pieces = [
            *apart(attention, seq, hidden, heads),
            *transformer.residual("residual.attention", seq, hidden, bias=False, dropout=drop),
            transformer.norm("norm.attention", seq, hidden),
            *transformer.feed_forward(seq, hidden, self.inner or 4 * hidden, bias=True),
            *transformer.residual("residual.mlp", seq, hidden, bias=False, dropout=drop),
            transformer.norm("norm.mlp", seq, hidden),
        ]
        return transformer.block("block", pieces, seq, hidden, self.layers)

    def _head(self) -> Layer:
        pieces: list[Piece] = []
        if self._predicts:
            pieces += self._words()
        if self.head in ("pooler", "pretrain"):
            pieces += [_fc("pooler", 1, self.hidden, self.hidden)]
        if self.head == "pretrain":
            pieces += [_fc("next", 1, self.hidden, 2)]
        if self.head == "qa":
            pieces += [_fc("spans", self.seq, self.hidden, 2)]
        if not self._predicts:
            pieces.append(Op("loss", "loss", {"vocab": float(self.hidden)}))
        made = transformer.block("head", pieces, self.seq, self.hidden, 1)
        return Layer("head", made.ops, made.carries, made.sizes, 1, made.splits, is_block=False)

    def _words(self) -> list[Piece]:
        """A product, GELU and a norm, then the words themselves; with a bias each."""
        many, hidden = self.masked or self.seq, self.hidden
        last = transformer.head(many, hidden, self.vocab, transformer.norm("norm", many, hidden))
        logits = next(op for op in last.works() if op.name == "logits")
        weights = (Tensor("decoder", ("in", "out")), Tensor("decoder.bias", ("out",)))
        ops = [Op("decoder", op.kind, op.dims, op.splits, weights, options=op.options)
               if op is logits else op for op in last.ops]  # fmt: skip
        dims = {"tokens": float(many), "cols": float(hidden)}
        kept = (Tensor("input", ("batch", "tokens", "cols")),)
        gelu = Op("gelu", "pointwise", dims, saved=kept, options={"kernel": "gelu", "back": 3.0})
        return [_fc("transform", many, hidden, hidden), gelu, *ops]


def _fc(name: str, tokens: int, inner: int, out: int) -> Op:
    weights = (Tensor(f"{name}.weight", ("in", "out")), Tensor(f"{name}.bias", ("out",)))
    dims = {"tokens": float(tokens), "in": float(inner), "out": float(out)}
    return Op(name, "matmul", dims, weights=weights)


def apart(pieces: list[Piece], seq: int, hidden: int, heads: int) -> list[Piece]:
    """Attention with a product each for queries, keys and values."""
    out: list[Piece] = []
    for piece in pieces:
        if piece.name != "qkv":
            out.append(piece)
            continue
        names = ("query", "key", "value")
        out += [transformer.column(n, seq, hidden, hidden, bias=True, most=heads) for n in names]
    return out
