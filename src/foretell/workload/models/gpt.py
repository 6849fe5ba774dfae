"""GPT as Megatron trains it: learned positions, a norm before each half, GELU, tied embedding.

The vocabulary is padded to a multiple of 128 a rank (`--make-vocab-size-divisible-by`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from foretell.spec import Spec
from foretell.workload.models import transformer
from foretell.workload.op import Op, Tensor
from foretell.workload.workload import Layer, Workload


@dataclass(frozen=True)
class Gpt(Spec):
    """A decoder of GPT-2 and GPT-3's shape."""

    name: ClassVar[str] = "gpt"
    layers: int
    hidden: int
    heads: int
    seq: int = 1024
    vocab: int = 51200
    inner: int = 0  # width of the feed-forward; 4 × hidden where 0
    positions: int = 0  # learned positions; as many as `seq` where 0
    dropout: bool = True
    tied: bool = True  # one matrix for words and logits
    tanh: bool = False  # GELU spelled out with tanh, an operator each (Hugging Face's `gelu_new`)
    batch: int = 1
    dtype: str = "fp16"

    def workload(self) -> Workload:
        """The model's layers."""
        seq, hidden = self.seq, self.hidden
        first = transformer.embedding(
            seq, hidden, self.vocab, positions=self.positions or seq, dropout=self.dropout
        )
        last = transformer.head(seq, hidden, self.vocab, transformer.norm("norm", seq, hidden))
        return Workload(
            str(self),
            (first, self._block(), last),
            self.batch,
            self.dtype,
            (("embedding/words", "head/logits"),) if self.tied else (),
            tokens=seq,
        )

    def _block(self) -> Layer:
        seq, hidden, heads = self.seq, self.hidden, self.heads
        depth, drop = transformer.depth(hidden, heads), self.dropout
        pieces = [
            transformer.norm("norm.attention", seq, hidden),
            *transformer.attention(
                seq, hidden, heads, heads, depth, bias=True, causal=True, dropout=drop
            ),
            *transformer.residual("residual.attention", seq, hidden, bias=True, dropout=drop),
            transformer.norm("norm.mlp", seq, hidden),
            *transformer.feed_forward(seq, hidden, self.inner or 4 * hidden, bias=True),
            *transformer.residual("residual.mlp", seq, hidden, bias=True, dropout=drop),
        ]
        if self.tanh:
            pieces = [_spelled(piece) for piece in pieces]
        return transformer.block("block", pieces, seq, hidden, self.layers)


def _spelled(piece: transformer.Piece) -> transformer.Piece:
    """x/2·(1 + tanh(√(2/π)·(x + 0.044715·x³))): eight kernels, eleven for its gradient.

    The power keeps x, tanh what it made, the last product both its factors.
    """
    if piece.name != "gelu" or not isinstance(piece, Op) or piece.when != "!fused":
        return piece
    options = {"passes": 18.0, "calls": 8, "back": 30.0, "many": 11}
    kept = tuple(Tensor(n, ("batch", "tokens", "cols")) for n in ("x", "tanh", "half", "factor"))
    return replace(piece, saved=kept, options=options)
