"""Decoders of language models, dense or with experts: GPT, Llama, Gemma, Mixtral, DeepSeek …

One builder for all of them; a family is a set of defaults. Options that Hugging Face's configs have
may be written by those names too (→ `foretell.workload.config`). Where only some layers differ
(windows, experts, the first dense ones), the model has a layer of each kind.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, ClassVar, Literal

from foretell.errors import InputError
from foretell.spec import Spec
from foretell.workload.models import experts, transformer
from foretell.workload.models.transformer import Piece
from foretell.workload.workload import Layer, Op, Tensor, Workload

MOST = 2**40  # of any size: beyond it is a slip
MOST_LAYERS = 2**16


@dataclass(frozen=True)
class Decoder(Spec):
    """Blocks of causal attention and a feed-forward, words before and behind them."""

    name: ClassVar[str] = "decoder"
    layers: int
    hidden: int
    heads: int
    groups: int = 0  # heads of keys and values; as many as `heads` where 0
    depth: int = 0  # width of one head; hidden / heads where 0
    inner: int = 0  # width of the feed-forward; 4 × hidden where 0
    seq: int = 4096
    vocab: int = 32000
    positions: int = 0  # learned positions; none where 0
    rotary: bool = True
    gated: bool = True  # two matmuls on the way out (SwiGLU)
    act: Literal["silu", "gelu", "relu"] = "silu"
    # `rms` is one kernel (nn.RMSNorm), `rms-composite` an operator each (Hugging Face's)
    norm: Literal["rms", "rms-composite", "layer", "layer-no-bias", "none"] = "rms"
    # around each half: before, behind, both, or one half beside the other behind one norm or two
    norms: Literal["pre", "post", "sandwich", "parallel", "parallel2"] = "pre"
    qk_norm: Literal["no", "head", "whole"] = "no"  # of queries and keys: by head, or all heads
    bias: Literal["no", "qkv", "attention", "all"] = "no"
    window: int = 0  # keys a query sees at most; all where 0
    windowed: int = 0  # layers that have the window; all where 0
    q_rank: int = 0  # latent attention (DeepSeek): rank of the queries, of full rank where 0
    kv_rank: int = 0  # of keys and values; ordinary attention where 0
    rope: int = 0  # of `depth`: the part of a head that has positions, one key for all heads
    value: int = 0  # width of a head's values; `depth` where 0
    experts: int = 0  # feed-forwards of a layer to choose from; dense where 0
    top: int = 2  # experts that each word goes to
    expert_inner: int = 0  # width of one expert; `inner` where 0
    shared: int = 0  # width of the experts that every word goes to
    dense: int = 0  # first layers that have no experts
    every: int = 1  # layers from one with experts to the next
    capacity: float = 0.0  # words an expert takes, of an even share; whatever comes where 0
    imbalance: float = 1.0  # words of the busiest rank's experts, of an even share
    mtp: int = 0  # further words predicted, a block each (multi-token prediction)
    lora: int = 0  # rank of adapters beside frozen weights; everything is trained where 0
    # matmuls of a block that have adapters beside them
    lora_on: Literal["all", "qkv", "projection", "up", "down"] = "all"
    tied: bool = False  # one matrix for words and logits
    dropout: bool = False
    tanh: bool = False  # GELU spelled out with tanh, an operator each (Hugging Face's `gelu_new`)
    batch: int = 1
    dtype: str = "bf16"

    def workload(self) -> Workload:
        self._check()
        first = transformer.embedding(
            self.seq, self.hidden, self.vocab, positions=self._places(), dropout=self.dropout
        )
        last = transformer.head(self.seq, self.hidden, self.vocab, self._norm("norm"))
        layers = (first, *self._blocks(), *self._ahead(last), last)
        tied = (("embedding/words", "head/logits"),) if self.tied else ()
        made = Workload(str(self), layers, self.batch, self.dtype, tied, tokens=self.seq)
        if not self.lora:
            return made
        return replace(made, layers=tuple(map(self._adapted, layers)))

    def _adapted(self, layer: Layer) -> Layer:
        """LoRA (Hu et al. 2021): frozen weights, two small trained matmuls beside each product."""
        ops: list[Piece] = []
        for op in layer.ops:
            if not isinstance(op, Op):
                ops.append(op)
                continue
            ops.append(replace(op, weights=tuple(replace(w, frozen=True) for w in op.weights)))
            is_wanted = self.lora_on in ("all", op.name)
            if layer.is_block and op.kind == "matmul" and op.weights and is_wanted:
                ops += _adapters(op, self.lora)
        return replace(layer, ops=tuple(ops))

    def _check(self) -> None:
        for name in ("layers", "hidden", "heads", "seq", "vocab", "top", "every"):
            if not 1 <= getattr(self, name) <= MOST:
                raise InputError(f"{name}={getattr(self, name)}", hint="sizes are 1 or more")
        if self.layers > MOST_LAYERS:
            raise InputError(f"layers={self.layers}", hint=f"at most {MOST_LAYERS}")
        if not self.depth:
            transformer.depth(self.hidden, self.heads)
        if self.groups and self.heads % self.groups:
            raise InputError(
                f"heads={self.heads} cannot be split into groups={self.groups}",
                hint="heads is a multiple of groups (num_key_value_heads)",
            )
        if self.experts and self.top > self.experts:
            raise InputError(f"top={self.top} of experts={self.experts}")

    def _places(self) -> int:
        return self.positions

    def _blocks(self) -> list[Layer]:
        """Layers in order; equal neighbours are one that repeats."""
        sparse = [self._is_sparse(i) for i in range(self.layers)]
        runs = [(kind, len(list(many))) for kind, many in groupby(sparse)]
        plain = len(runs) == 1
        made, seen = [], Counter[bool]()
        for kind, times in runs:  # those of a kind are counted from 0
            name = "block" if plain else f"{'sparse' if kind else 'dense'}{seen[kind] or ''}"
            seen[kind] += 1
            made.append(transformer.block(name, self._block(kind), self.seq, self.hidden, times))
        return made

    def _is_sparse(self, i: int) -> bool:
        return bool(self.experts) and i >= self.dense and (i + 1) % self.every == 0

    def _block(self, sparse: bool) -> list[Piece]:
        pieces = self._halves(self._attention(), self._mlp(sparse))
        return [_spelled(piece) for piece in pieces] if self.tanh else pieces

    def _halves(self, attention: list[Piece], mlp: list[Piece]) -> list[Piece]:
        """Both halves with their norms and residuals."""
        sums = [self._residual("residual.attention"), self._residual("residual.mlp")]
        before = [self._norm("norm.attention"), self._norm("norm.mlp")]
        if self.norms.startswith("parallel"):
            first = before if self.norms == "parallel2" else before[:1]
            # halves side by side are summed before one exchange does for both
            none = [p.name in ("leave.attention", "enter.mlp") for p in (*attention, *mlp)]
            both = [p for p, is_so in zip((*attention, *mlp), none, strict=True) if not is_so]
            return [*first, *both, *sums[0], *sums[1]]
        if self.norms == "post":
            return [*attention, before[0], *sums[0], *mlp, before[1], *sums[1]]
        behind = [self._norm("norm.attention.out"), self._norm("norm.mlp.out")]
        if self.norms == "pre":
            return [before[0], *attention, *sums[0], before[1], *mlp, *sums[1]]
        return [before[0], *attention, behind[0], *sums[0], before[1], *mlp, behind[1], *sums[1]]

    def _norm(self, name: str) -> Op:
        is_rms = self.norm.startswith("rms")
        # matmuls that read it: queries, keys and values apart, gate and up
        consumers = {"norm.attention": 3 if self.rotary else 1, "norm.mlp": 1 + self.gated}
        made = transformer.norm(
            name, self.seq, self.hidden, kernel="rms_norm" if is_rms else "norm",
            bias=self.norm == "layer", consumers=consumers.get(name, 1),
            composite=self.norm == "rms-composite",
        )  # fmt: skip
        return replace(made, weights=()) if self.norm == "none" else made

    def _residual(self, name: str) -> list[Piece]:
        return transformer.residual(
            name, self.seq, self.hidden, bias=self.bias == "all", dropout=self.dropout
        )

    def _attention(self) -> list[Piece]:
        heads, depth = self.heads, self.depth or self.hidden // self.heads
        options: dict[str, Any] = {"causal": True, "dropout": self.dropout}
        options |= {"rotary": True} if self.rotary else {}
        if self.window:
            share = min((self.windowed or self.layers) / self.layers, 1.0)
            options["windows"] = ((self.window, share), *(((0, 1.0 - share),) if share < 1 else ()))
        if self.kv_rank:
            ranks = (self.q_rank, self.kv_rank, self.rope, self.value or depth)
            return transformer.latent_attention(
                self.seq, self.hidden, heads, depth, ranks, bias=self.bias == "all", **options
            )
        groups = self.groups or heads
        out_bias = self.bias in ("attention", "all")
        made = transformer.attention(
            self.seq, self.hidden, heads, groups, depth, bias=self.bias != "no", out_bias=out_bias,
            **options,
        )  # fmt: skip
        if self.qk_norm == "no":
            return made
        at = next(i for i, piece in enumerate(made) if piece.name == "qkv") + 1
        norms = transformer.head_norms(self.seq, heads, groups, depth, self.qk_norm == "whole")
        return [*made[:at], *norms, *made[at:]]

    def _mlp(self, sparse: bool) -> list[Piece]:
        inner, bias = self.inner or 4 * self.hidden, self.bias == "all"
        if not sparse:
            return transformer.feed_forward(
                self.seq, self.hidden, inner, bias=bias, gated=self.gated, kernel=self.act
            )
        sizes = experts.Sizes(
            self.seq, self.hidden, self.expert_inner or inner, self.experts, self.top,
            self.gated, bias, self.capacity, self.imbalance, self.act,
        )  # fmt: skip
        return sizes.pieces(self.shared)

    def _ahead(self, head: Layer) -> list[Layer]:
        """Multi-token prediction: two norms, a product, a block, and the head once more."""
        if not self.mtp:
            return []
        seq, hidden = self.seq, self.hidden
        made = transformer.dense("join", 2 * hidden, hidden, seq, keeps=True)
        join = replace(made, splits=transformer.ROWS, weights=made.weights[:1])
        again = transformer.changed(head.ops, "logits", weights=())
        norms = [self._norm("norm.words"), self._norm("norm.hidden")]
        pieces = [*norms, join, *self._block(self._is_sparse(self.layers - 1)), *again]
        return [transformer.block("mtp", pieces, seq, hidden, self.mtp, is_block=False)]


@dataclass(frozen=True)
class Gpt(Decoder):
    """GPT-2 and GPT-3 as Megatron trains them: learned positions, GELU, biases, tied embedding.

    The vocabulary is padded to a multiple of 128 a rank (`--make-vocab-size-divisible-by`).
    """

    name: ClassVar[str] = "gpt"
    seq: int = 1024
    vocab: int = 51200
    positions: int = 0  # as many as `seq` where 0
    rotary: bool = False
    gated: bool = False
    act: Literal["silu", "gelu", "relu"] = "gelu"
    norm: Literal["rms", "rms-composite", "layer", "layer-no-bias", "none"] = "layer"
    bias: Literal["no", "qkv", "attention", "all"] = "all"
    tied: bool = True
    dropout: bool = True
    dtype: str = "fp16"

    def _places(self) -> int:
        return self.positions or self.seq


@dataclass(frozen=True)
class Llama(Decoder):
    """Llama: grouped queries, rotary positions, RMS norms, gated, no bias.

    As it stands, Llama-2 7B (Touvron et al. 2023, table 1).
    """

    name: ClassVar[str] = "llama"
    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    inner: int = 11008


@dataclass(frozen=True)
class Moe(Decoder):
    """A decoder of Llama's shape with experts; as it stands, Mixtral 8x7B (Jiang et al. 2024)."""

    name: ClassVar[str] = "moe"
    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    groups: int = 8
    experts: int = 8
    inner: int = 14336


def _spelled(piece: Piece) -> Piece:
    """x/2·(1 + tanh(√(2/π)·(x + 0.044715·x³))): eight kernels, eleven for its gradient.

    The power keeps x, tanh what it made, the last product both its factors.
    """
    if piece.name != "gelu" or not isinstance(piece, Op) or piece.when != "!fused":
        return piece
    options = {"passes": 18.0, "calls": 8, "back": 30.0, "many": 11}
    kept = tuple(Tensor(n, ("batch", "tokens", "cols")) for n in ("x", "tanh", "half", "factor"))
    return replace(piece, saved=kept, options=options)


def _adapters(op: Op, rank: int) -> list[Op]:
    """Down to the rank and up again, split as the matmul is; the sum of both outputs."""
    rows = {"tokens": op.dims.get("tokens", 1.0)}
    split = op.splits.get("tp", "")
    axes = {axis: dim for axis, dim in op.splits.items() if dim == "tokens"}
    made = []
    for end, own, inner, out in (
        ("a", "in", op.dims["in"], float(rank)),
        ("b", "out", float(rank), op.dims["out"]),
    ):
        name = f"{op.name}.lora_{end}"
        weights = (Tensor(name, ("in", "out")),)
        kept = (Tensor("input", ("batch", "tokens", "in")),) if end == "b" else ()
        splits = axes | ({"tp": own} if split == own else {})
        dims = rows | {"in": inner, "out": out}
        made.append(Op(name, "matmul", dims, splits, weights, kept, options={"bare": True}))
    sums = rows | {"cols": op.dims["out"]}
    cut = axes | ({"tp": "cols"} if split == "out" else {})
    added = {"passes": 3.0, "back": 0.0}
    return [*made, Op(f"{op.name}.lora", "pointwise", sums, cut, options=added)]
