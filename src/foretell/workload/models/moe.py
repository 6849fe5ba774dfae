"""Mixture of experts: each word goes to the `top` of several feed-forwards.

As it stands, Mixtral 8x7B (Jiang et al. 2024): 46.7 billion parameters, 12.9 of them at work.
Experts are dealt out over data-parallel ranks (`ep`): words go there and back by all-to-all, an
even share to every expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from foretell.spec import Spec
from foretell.workload.models import transformer
from foretell.workload.models.transformer import Piece
from foretell.workload.op import Exchange, Op, Tensor
from foretell.workload.workload import Layer, Workload


@dataclass(frozen=True)
class Moe(Spec):
    """A decoder of Llama's shape with experts."""

    name: ClassVar[str] = "moe"
    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    groups: int = 8  # heads of keys and values
    experts: int = 8
    top: int = 2  # experts that each word goes to
    inner: int = 14336
    gated: bool = True
    seq: int = 4096
    vocab: int = 32000
    tied: bool = False
    dropout: bool = False
    batch: int = 1
    dtype: str = "bf16"

    def workload(self) -> Workload:
        """The model's layers."""
        seq, hidden = self.seq, self.hidden
        first = transformer.embedding(seq, hidden, self.vocab, positions=0, dropout=self.dropout)
        last = transformer.head(seq, hidden, self.vocab, self._norm("norm"))
        tied = (("embedding/words", "head/logits"),) if self.tied else ()
        layers = (first, self._block(), last)
        return Workload(str(self), layers, self.batch, self.dtype, tied, tokens=seq)

    def _norm(self, name: str) -> Op:
        return transformer.norm(name, self.seq, self.hidden, kernel="rms_norm", bias=False)

    def _block(self) -> Layer:
        seq, hidden, heads = self.seq, self.hidden, self.heads
        options = {"causal": True, "dropout": self.dropout, "rotary": True}
        pieces = [
            self._norm("norm.attention"),
            *transformer.attention(
                seq, hidden, heads, self.groups, hidden // heads, bias=False, **options
            ),
            *transformer.residual(
                "residual.attention", seq, hidden, bias=False, dropout=self.dropout
            ),
            self._norm("norm.mlp"),
            *self._experts(),
            *transformer.residual("residual.mlp", seq, hidden, bias=False, dropout=self.dropout),
        ]
        return transformer.block("block", pieces, seq, hidden, self.layers)

    def _experts(self) -> list[Piece]:
        seq, hidden, inner = self.seq, self.hidden, self.inner
        wide, many = (2 if self.gated else 1) * inner, seq * self.top
        gate = (Tensor("router", ("hidden", "experts")),)
        dims = {"tokens": float(seq), "experts": float(self.experts), "hidden": float(hidden)}
        moved = {"tokens": float(many), "hidden": float(hidden)}
        there = Exchange("experts", "ep", "all_to_all", "all_to_all", moved, {"cp": "tokens"})
        kernel = {"kernel": "silu", "passes": 3.0 if self.gated else 2.0, "back": 5.0}
        kept = (Tensor("input", ("batch", "tokens", "cols"), times=wide / inner),)
        rows = {"tokens": float(many), "cols": float(inner)}
        split = {"tp": "cols", "cp": "tokens"}
        return [
            Op("router", "route", dims, {"cp": "tokens"}, gate, options={"top": self.top}),
            there,
            *transformer.enter("enter.experts", many, hidden),
            self._product("up", hidden, wide, "out"),
            Op("act", "pointwise", rows, split, saved=kept, options=kernel),
            self._product("down", inner, hidden, "in"),
            *transformer.leave("leave.experts", many, hidden),
            there,
            Op("combine", "pointwise", moved, {"cp": "tokens"}, options={"passes": 2.0}),
        ]

    def _product(self, name: str, inner: int, out: int, split: str) -> Op:
        dims = {"tokens": float(self.seq * self.top), "experts": float(self.experts)}
        dims |= {"in": float(inner), "out": float(out)}
        weights = (Tensor(f"{name}.weight", ("experts", "in", "out")),)
        saved = (Tensor("input", ("batch", "tokens", "in")),)
        axes = {"ep": "experts", "tp": split, "cp": "tokens"}
        most = {"ep": self.experts, "tp": self.inner}
        return Op(name, "experts", dims, axes, weights, saved, most)
