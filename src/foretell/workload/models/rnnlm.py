"""RNNLM: words through layers of LSTM to the next word.

As it stands, the large model of Zaremba et al. 2014 on Penn Treebank: 66 million parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from foretell.spec import Spec
from foretell.workload.models import transformer
from foretell.workload.workload import Layer, Op, Tensor, Workload

_GATES = 4


@dataclass(frozen=True)
class Rnnlm(Spec):
    """A language model of LSTM layers."""

    name: ClassVar[str] = "rnnlm"
    layers: int = 2
    hidden: int = 1500
    embedding: int = 0  # width of a word; as wide as a layer where 0
    seq: int = 35
    vocab: int = 10000
    tied: bool = False
    dropout: bool = True
    batch: int = 20
    dtype: str = "fp32"

    def workload(self) -> Workload:
        """The model's layers."""
        wide = self.embedding or self.hidden
        first = transformer.embedding(self.seq, wide, self.vocab, positions=0, dropout=self.dropout)
        layers = [first, self._lstm(wide, 1)]
        if self.layers > 1:
            layers.append(self._lstm(self.hidden, self.layers - 1))
        layers.append(self._head())
        tied = (("embedding/words", "head/logits"),) if self.tied else ()
        return Workload(str(self), tuple(layers), self.batch, self.dtype, tied, tokens=self.seq)

    def _lstm(self, inner: int, times: int) -> Layer:
        seq, hidden = self.seq, self.hidden
        dims = {"steps": float(seq), "in": float(inner), "hidden": float(hidden)}
        weights = (
            Tensor("fed", ("in", "hidden"), times=_GATES),
            Tensor("turn", ("hidden", "hidden"), times=_GATES),
            Tensor("biases", ("hidden",), times=2.0 * _GATES),
        )
        kept = Tensor("gates", ("batch", "steps", "hidden"), times=_GATES + 2.0)
        cell = Op("lstm", "recurrent", dims, {}, weights, (kept,), options={"gates": _GATES})
        pieces = [cell, *self._dropped()]
        name = "lstm.first" if inner != hidden or times == 1 else "lstm"
        return transformer.block(name, pieces, seq, hidden, times)

    def _dropped(self) -> list[transformer.Piece]:
        if not self.dropout:
            return []
        rows = {"tokens": float(self.seq), "cols": float(self.hidden)}
        mask = (Tensor("mask", ("batch", "tokens", "cols"), "bool"),)
        options = {"kernel": "dropout", "passes": 2.5, "back": 2.5}
        return [Op("dropout", "pointwise", rows, saved=mask, options=options)]

    def _head(self) -> Layer:
        norm = transformer.norm("norm", self.seq, self.hidden)
        last = transformer.head(self.seq, self.hidden, self.vocab, norm)
        weights = (Tensor("logits", ("in", "out")), Tensor("logits.bias", ("out",)))
        ops = [_weighing(op, weights) for op in last.ops[1:]]
        return Layer("head", tuple(ops), last.carries, last.sizes, 1, last.splits, is_block=False)


def _weighing(op: transformer.Piece, weights: tuple[Tensor, ...]) -> transformer.Piece:
    if not isinstance(op, Op) or op.name != "logits":
        return op
    return Op(op.name, op.kind, op.dims, op.splits, weights, options=op.options)
