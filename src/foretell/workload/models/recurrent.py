"""Models that go over the words of a sample one after another.

Rnnlm    words through layers of LSTM to the next word
Mamba    state-space models: Mamba (Gu and Dao 2023) and Mamba-2 (Dao and Gu 2024). A block is a
         gated product on the way out, a short convolution along the words, the scan, and the way
         back. Mamba's scan is one kernel bound by memory; Mamba-2's is matmuls of chunks of words.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from foretell.spec import Spec
from foretell.workload.models import transformer
from foretell.workload.models.transformer import Piece
from foretell.workload.workload import Layer, Op, Tensor, Workload

_GATES = 4


@dataclass(frozen=True)
class Rnnlm(Spec):
    """A language model of LSTM layers.

    As it stands, the large model of Zaremba et al. 2014 on Penn Treebank: 66 million parameters.
    """

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
        pieces = [Op("lstm", "recurrent", dims, {}, weights, (kept,), options={"gates": _GATES})]
        if self.dropout:
            rows = {"tokens": float(seq), "cols": float(hidden)}
            mask = (Tensor("mask", ("batch", "tokens", "cols"), "bool"),)
            options = {"kernel": "dropout", "passes": 2.5, "back": 2.5}
            pieces.append(Op("dropout", "pointwise", rows, saved=mask, options=options))
        name = "lstm.first" if inner != hidden or times == 1 else "lstm"
        return transformer.block_of(name, pieces, seq, hidden, times)

    def _head(self) -> Layer:
        norm = transformer.norm_op("norm", self.seq, self.hidden)
        last = transformer.head(self.seq, self.hidden, self.vocab, norm)
        weights = (Tensor("logits", ("in", "out")), Tensor("logits.bias", ("out",)))
        ops = transformer.changed(last.ops[1:], "logits", weights=weights, pads={})
        return replace(last, ops=ops)


_KEPT = ("scores", "states")  # products of chunks whose results the backward needs


@dataclass(frozen=True)
class Mamba(Spec):
    """A decoder of state-space blocks; as it stands, Mamba 2.8B."""

    name: ClassVar[str] = "mamba"
    layers: int = 64
    hidden: int = 2560
    inner: int = 0  # width of a block; 2 × hidden where 0
    state: int = 16  # numbers kept of each channel
    kernel: int = 4  # words the convolution sees
    rank: int = 0  # of the step sizes; hidden / 16 where 0
    heads: int = 0  # Mamba-2: channels share their step size by head; Mamba where 0
    groups: int = 1  # Mamba-2: groups of heads with the same input and output of the state
    chunk: int = 256  # Mamba-2: words worked out at once
    seq: int = 2048
    vocab: int = 50280
    tied: bool = True
    batch: int = 1
    dtype: str = "bf16"

    def workload(self) -> Workload:
        seq, hidden = self.seq, self.hidden
        first = transformer.embedding(seq, hidden, self.vocab, positions=0, dropout=False)
        last = transformer.head(seq, hidden, self.vocab, self._norm("norm"))
        tied = (("embedding/words", "head/logits"),) if self.tied else ()
        layers = (first, self._block(), last)
        return Workload(str(self), layers, self.batch, self.dtype, tied, tokens=seq)

    @property
    def _wide(self) -> int:
        return self.inner or 2 * self.hidden

    def _norm(self, name: str) -> Op:
        return transformer.norm_op(name, self.seq, self.hidden, kernel="rms_norm", bias=False)

    def _block(self) -> Layer:
        seq, hidden, wide = self.seq, self.hidden, self._wide
        mixed = self.groups * self.state * 2  # what enters and leaves the state, Mamba-2
        out = 2 * wide + (mixed + self.heads if self.heads else 0)
        most = self.heads or wide
        pieces: list[Piece] = [
            self._norm("norm"),
            *transformer.enter("enter.mixer", seq, hidden),
            transformer.column("in", seq, hidden, out, bias=False, most=most),
            self._convolution(wide + (mixed if self.heads else 0)),
            *(self._chunks() if self.heads else self._scan()),
            transformer.row("out", seq, wide, hidden, bias=False, most=most),
            *transformer.leave("leave.mixer", seq, hidden),
            *transformer.residual("residual", seq, hidden),
        ]
        return transformer.block_of("block", pieces, seq, hidden, self.layers)

    def _convolution(self, wide: int) -> Op:
        """Each channel over a few words, then SiLU: one kernel, bound by memory."""
        dims = {"tokens": float(self.seq), "cols": float(wide), "kernel": float(self.kernel)}
        weights = (Tensor("conv.weight", ("cols", "kernel")), Tensor("conv.bias", ("cols",)))
        kept = (Tensor("input", ("batch", "tokens", "cols")),)
        options = {"passes": 2.0 / self.kernel, "back": 4.0 / self.kernel}
        split = {"tp": "cols"}
        return Op("conv", "pointwise", dims, split, weights, kept, options=options)

    def _scan(self) -> list[Piece]:
        """Step sizes, input and output of the state from the words, then the scan."""
        seq, wide, rank = self.seq, self._wide, self.rank or -(-self.hidden // 16)
        small = rank + 2 * self.state
        dims = {"tokens": float(seq), "cols": float(wide), "state": float(self.state)}
        weights = (Tensor("decay", ("cols", "state")), Tensor("skip", ("cols",)))
        kept = tuple(Tensor(n, ("batch", "tokens", "cols")) for n in ("x", "step", "gate"))
        # x, step and gate are read and y is written; the backward reads them with dy, writes three
        passes = {"passes": 4.0 / self.state, "back": 8.0 / self.state, "kernel": "exp"}
        project = transformer.row("states", seq, wide, small, bias=False, most=wide)
        steps = transformer.column("steps", seq, rank, wide, bias=True, most=wide)
        split = {"tp": "cols"}
        return [project, steps, Op("scan", "pointwise", dims, split, weights, kept, options=passes)]

    def _chunks(self) -> list[Piece]:
        """Products of chunks (Mamba-2, section 6): inside each, into its state, out of the last."""
        chunk = min(self.chunk, self.seq)
        many, depth = -(-self.seq // chunk), self._wide // self.heads
        b, state = float(many * self.heads), float(self.state)
        split = {"tp": "b"}
        sizes = {
            "scores": (chunk, chunk, state),
            "inside": (chunk, depth, chunk),
            "states": (state, depth, chunk),
            "outside": (chunk, depth, state),
        }
        made: list[Piece] = []
        for name, (m, n, k) in sizes.items():
            saved = (Tensor("output", ("batch", "b", "m", "n")),) if name in _KEPT else ()
            product = {"b": b, "m": float(m), "n": float(n), "k": float(k)}
            made.append(Op(name, "product", product, split, saved=saved))
        dims = {"tokens": float(self.seq), "cols": float(self._wide)}
        each = (Tensor(name, (), times=float(self.heads)) for name in ("decay", "skip", "steps"))
        weights = (*each, Tensor("norm", ("cols",)))
        kept = tuple(Tensor(n, ("batch", "tokens", "cols")) for n in ("x", "gate"))
        options = {"passes": 3.0, "back": 5.0}
        gate = Op("gate", "pointwise", dims, {"tp": "cols"}, weights, kept, options=options)
        return [*made, gate]
