"""Mixture of experts as it is run: router, permutation, all-to-all, grouped matmuls, and back.

Each word goes to the `top` of several feed-forwards. Experts are split over data-parallel ranks
(`ep`): words go there and back by all-to-all, and are put in order of the rank's own experts where
it has fewer than all. `imbalance` is how much more than an even share the busiest rank has to do,
which the others wait for; with a `capacity` factor, buffers are padded (or words dropped) to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from foretell.workload.models import transformer
from foretell.workload.models.transformer import ROWS, Piece
from foretell.workload.workload import Exchange, Op, Tensor


@dataclass(frozen=True)
class Sizes:
    """Sizes common to the experts of a layer."""

    seq: int
    hidden: int
    inner: int  # of one expert
    experts: int
    top: int
    gated: bool
    bias: bool
    capacity: float = 0.0
    imbalance: float = 1.0
    act: str = "silu"

    @property
    def routed(self) -> float:
        """Words that the experts of a rank take, of one sample; a word counts for each expert."""
        return self.seq * self.top * (self.capacity or self.imbalance)

    def pieces(self, shared: int = 0) -> list[Piece]:
        """The experts that are chosen, then those that every word goes to."""
        seq, hidden, many = self.seq, self.hidden, self.routed
        gate = (Tensor("router", ("hidden", "experts")),)
        dims = {"tokens": float(seq), "experts": float(self.experts), "hidden": float(hidden)}
        moved = {"tokens": float(many), "hidden": float(hidden)}
        there = Exchange("experts", "ep", "all_to_all", "all_to_all", moved, ROWS, copies=self.top)
        return [
            Op("router", "route", dims, ROWS, gate, options={"top": self.top}),
            self._words("permute", float(seq * self.top)),
            there,
            self._order("order"),
            *self._inside("enter.experts", ("", "all_reduce"), ("all_gather", "reduce_scatter")),
            self._product("up", hidden, self._wide, "out"),
            self._activation(),
            self._product("down", self.inner, hidden, "in"),
            *self._bias_added(),
            *self._inside("leave.experts", ("all_reduce", ""), ("reduce_scatter", "all_gather")),
            self._order("order.back"),
            there,
            self._words("combine", self.routed),
            *self._shared(shared),
        ]

    def _inside(self, name: str, plain: tuple[str, str], sequence: tuple[str, str]) -> list[Piece]:
        """Between the ranks that split each expert, as around any tensor-parallel part."""
        dims = {"tokens": self.routed, "hidden": float(self.hidden)}
        split = {"cp": "tokens", "eseq": "tokens"}
        kept = name.startswith("leave")
        return [
            Exchange(name, "etp", *plain, dims, split, unless="sp"),
            Exchange(name, "esp", *sequence, dims, split, kept=kept),
        ]

    @property
    def _wide(self) -> int:
        return (2 if self.gated else 1) * self.inner

    def _order(self, name: str) -> Op:
        """Words by expert behind the all-to-all: a copy where a rank has some of the experts."""
        dims = {"tokens": self.routed, "hidden": float(self.hidden), "experts": float(self.experts)}
        options = {"padded": bool(self.capacity)}
        return Op(name, "regroup", dims, {**ROWS, "ep": "experts"}, options=options)

    def _words(self, kind: str, routed: float) -> Op:
        """Words put in the order of all experts, or added up behind them."""
        dims = {"tokens": routed, "hidden": float(self.hidden), "experts": float(self.experts)}
        options = {"top": self.top, "padded": bool(self.capacity)}
        return Op(kind, kind, dims, {**ROWS, "ep": "experts"}, options=options)

    def _activation(self) -> Op:
        ratio = self._wide / self.inner
        options = {"kernel": self.act, "passes": 1 + ratio, "back": 1 + 2 * ratio}
        kept = (Tensor("input", ("batch", "tokens", "cols"), times=ratio),)
        rows = {"tokens": self.routed, "cols": float(self.inner)}
        split = {"etp": "cols", "eseq": "tokens", "cp": "tokens"}
        return Op("act", "pointwise", rows, split, saved=kept, options=options)

    def _product(self, name: str, inner: int, out: int, split: str) -> Op:
        dims = {"tokens": self.routed, "experts": float(self.experts)}
        dims |= {"in": float(inner), "out": float(out)}
        weights: tuple[Tensor, ...] = (Tensor(f"{name}.weight", ("experts", "in", "out")),)
        if self.bias:
            weights += (Tensor(f"{name}.bias", ("experts", "out")),)
        saved = (Tensor("input", ("batch", "tokens", "in")),)
        axes = {"ep": "experts", "etp": split, "eseq": "tokens", "cp": "tokens"}
        most = {"ep": self.experts, "etp": self.inner}
        more = self.capacity or self.imbalance
        options: dict[str, float] = {"useful": min(1.0 / more, 1.0)} if more != 1 else {}
        options |= {"padded": 1.0} if self.capacity else {}
        return Op(name, "experts", dims, axes, weights, saved, most, options=options)

    def _bias_added(self) -> list[Piece]:
        """The bias behind the experts, weighed word by word where each has a launch of its own."""
        dims = {"tokens": self.routed, "experts": float(self.experts), "cols": float(self.hidden)}
        axes = {"ep": "experts", "eseq": "tokens", "cp": "tokens"}
        return [Op("down.bias", "expert_bias", dims, axes, when="one-by-one")] if self.bias else []

    def _shared(self, inner: int) -> list[Piece]:
        """A dense feed-forward beside them, under names of its own."""
        if not inner:
            return []
        made = transformer.feed_forward(
            self.seq, self.hidden, inner, bias=self.bias, gated=self.gated, kernel=self.act
        )
        return [transformer.renamed(piece, "shared") for piece in made]
