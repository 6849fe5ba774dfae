"""Llama: grouped queries, rotary positions, RMS norms, a gated feed-forward, no bias."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from foretell.spec import Spec
from foretell.workload.models import transformer
from foretell.workload.op import Op
from foretell.workload.workload import Layer, Workload


@dataclass(frozen=True)
class Llama(Spec):
    """A decoder of Llama's shape; as it stands, Llama-2 7B (Touvron et al. 2023, table 1)."""

    name: ClassVar[str] = "llama"
    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    groups: int = 0  # heads of keys and values; as many as `heads` where 0
    inner: int = 11008
    seq: int = 4096
    vocab: int = 32000
    tied: bool = False
    batch: int = 1
    dtype: str = "bf16"

    def workload(self) -> Workload:
        """The model's layers."""
        seq, hidden = self.seq, self.hidden
        first = transformer.embedding(seq, hidden, self.vocab, positions=0, dropout=False)
        last = transformer.head(seq, hidden, self.vocab, self._norm("norm"))
        return Workload(
            str(self),
            (first, self._block(), last),
            self.batch,
            self.dtype,
            (("embedding/words", "head/logits"),) if self.tied else (),
            tokens=seq,
        )

    def _norm(self, name: str) -> Op:
        return transformer.norm(name, self.seq, self.hidden, kernel="rms_norm", bias=False)

    def _block(self) -> Layer:
        seq, hidden, heads = self.seq, self.hidden, self.heads
        groups, depth = self.groups or heads, transformer.depth(hidden, heads)
        options = {"causal": True, "dropout": False, "rotary": True}
        pieces = [
            self._norm("norm.attention"),
            *transformer.attention(seq, hidden, heads, groups, depth, bias=False, **options),
            *transformer.residual("residual.attention", seq, hidden, bias=False, dropout=False),
            self._norm("norm.mlp"),
            *transformer.feed_forward(
                seq, hidden, self.inner, bias=False, gated=True, kernel="silu"
            ),
            *transformer.residual("residual.mlp", seq, hidden, bias=False, dropout=False),
        ]
        return transformer.block("block", pieces, seq, hidden, self.layers)
