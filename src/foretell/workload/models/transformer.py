"""What transformers are made of, experts among it, and decoders.

The pieces of transformers, as Megatron splits them: column, then row, an all-reduce each.

Dims are of one sample. `tp` splits heads and the inner width of the feed-forward; `sp` splits
tokens where `tp` splits nothing (norms, residuals); `cp` splits tokens everywhere. What each op
keeps for its backward follows Korthikanti et al. (arXiv 2205.05198, section 4): 34·s·b·h + 5·a·s²·b
bytes in 16 bits.

Mixture of experts as it is run: router, permutation, all-to-all, grouped matmuls, and back.

Each word goes to the `top` of several feed-forwards. Experts are split over data-parallel ranks
(`ep`): words go there and back by all-to-all, and are put in order of the rank's own experts where
it has fewer than all. `imbalance` is how much more than an even share the busiest rank has to do,
which the others wait for; with a `capacity` factor, buffers are padded (or words dropped) to it.

Decoders of language models, dense or with experts: GPT, Llama, Gemma, Mixtral, DeepSeek …

One builder for all of them; a family is a set of defaults. Options that Hugging Face's configs have
may be written by those names too (→ `foretell.workload.load`). Where only some layers differ
(windows, experts, the first dense ones), the model has a layer of each kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, ClassVar, Literal

from foretell.errors import InputError
from foretell.spec import Spec
from foretell.workload.workload import Exchange, Layer, Op, Tensor, Workload

ROWS = {"sp": "tokens", "cp": "tokens"}  # how a tensor outside the tensor-parallel part is split
_ROW = ("batch", "tokens", "cols")
_FED = (Tensor("input", ("batch", "tokens", "in")),)  # what a product keeps of its own
_SCORES = ("batch", "heads", "queries", "keys")
# Filling masked scores in place has at once in the backward: gradient, two copies, result.
_BRIEF = (Tensor("gradients", _SCORES, when="torch-softmax", times=4.0),)
Piece = Op | Exchange


def head_width(hidden: int, heads: int) -> int:
    """The width of one head."""
    if heads < 1 or hidden % heads:
        raise InputError(
            f"hidden={hidden} cannot be split over heads={heads}",
            hint="hidden is a multiple of heads",
        )
    return hidden // heads


def norm_op(
    name: str, seq: int, hidden: int, *, kernel: str = "norm", bias: bool = True,
    consumers: int = 1, composite: bool = False,
) -> Op:  # fmt: skip
    """A norm over the hidden dim; it keeps its input, and its output for the product behind it.

    Under autocast each of its consumers keeps a cast of its own; a composite one keeps more.
    """
    weights = [Tensor(f"{name}.{part}", ("cols",)) for part in ("weight", "bias")[: 1 + bias]]
    kept = [Tensor("input", _ROW), Tensor("output", _ROW)]
    if consumers > 1:  # the rest is what eager PyTorch saves besides
        kept += [Tensor("casts", _ROW, when="eager&amp", times=consumers - 1.0)]
    if composite:
        kept += [Tensor("wide", _ROW, when="eager&!amp", times=2.0)]
        kept += [Tensor("normalised", _ROW, "fp32", when="eager&amp")]
    options = {"kernel": kernel, "consumers": consumers, "composite": composite}
    dims = {"tokens": seq, "cols": hidden}
    return Op(name, "norm", dims, ROWS, tuple(weights), tuple(kept), options=options)


def _weights(name: str, bias: bool) -> tuple[Tensor, ...]:
    """The matrix of a linear layer, and its bias where there is one."""
    return (Tensor(f"{name}.weight", ("in", "out")), Tensor(f"{name}.bias", ("out",)))[: 1 + bias]


def column(name: str, seq: int, inner: int, out: int, *, bias: bool, most: int) -> Op:
    """Column-parallel linear; its input is saved by the producer."""
    dims, split = {"tokens": seq, "in": inner, "out": out}, {"tp": "out", "cp": "tokens"}
    return Op(name, "matmul", dims, split, _weights(name, bias), most={"tp": most})


def row(name: str, seq: int, inner: int, out: int, *, bias: bool, most: int) -> Op:
    """A product over split-out inputs: partial sums, to be reduced; it keeps its input."""
    dims, split = {"tokens": seq, "in": inner, "out": out}, {"tp": "in", "cp": "tokens"}
    return Op(name, "matmul", dims, split, _weights(name, bias), _FED, most={"tp": most})


def linear_op(name: str, inner: int, out: int, tokens: int = 0, *, keeps: bool = False) -> Op:
    """A linear layer with a bias that every rank does, over some words or one sample as it is."""
    dims = {"tokens": float(tokens)} if tokens else {}
    dims |= {"in": float(inner), "out": float(out)}
    return Op(name, "matmul", dims, weights=_weights(name, True), saved=_FED if keeps else ())


def enter(name: str, seq: int, hidden: int) -> tuple[Exchange, ...]:
    """Into the tensor-parallel part: gradients come back as partial sums."""
    dims, cp = {"tokens": seq, "hidden": hidden}, {"cp": "tokens"}
    return (
        Exchange(name, "tp", "", "all_reduce", dims, cp, unless="sp"),
        Exchange(name, "sp", "all_gather", "reduce_scatter", dims, cp, kept=False),
    )


def leave(name: str, seq: int, hidden: int) -> tuple[Exchange, ...]:
    """Out of the tensor-parallel part: partial sums become one tensor."""
    dims, cp = {"tokens": seq, "hidden": hidden}, {"cp": "tokens"}
    return (
        Exchange(name, "tp", "all_reduce", "", dims, cp, unless="sp"),
        Exchange(name, "sp", "reduce_scatter", "all_gather", dims, cp),
    )


def residual(
    name: str, seq: int, hidden: int, *, bias: bool = False, dropout: bool = False
) -> list[Piece]:
    """Bias, dropout and the sum with the residual: one kernel where the stack fuses, else each."""
    dims = {"tokens": seq, "cols": hidden}
    mask = (Tensor("mask", _ROW, "bool"),) if dropout else ()
    passes = 3.0 + (0.5 if dropout else 0.0)
    back = 1.5 + (1.0 if dropout else 0.0)
    parts: list[Piece] = [_point(name, dims, mask, "fused", passes=passes, back=back)]
    if bias:
        apart = "!fused&!eager"  # PyTorch's matmuls add their bias themselves
        parts.append(_point(f"{name}.bias", dims, (), apart, passes=2.0, back=1.0))
    if dropout:
        kernel = {"kernel": "dropout", "passes": 2.5, "back": 2.5}
        parts.append(_point(f"{name}.dropout", dims, mask, "!fused", **kernel))
    return [*parts, _point(f"{name}.add", dims, (), "!fused", passes=3.0, back=0.0, stream=True)]


def _point(
    name: str, dims: Mapping[str, float], saved: tuple[Tensor, ...], when: str, **options: Any
) -> Op:
    return Op(name, "pointwise", dims, ROWS, saved=saved, when=when, options=options)


def attention(
    seq: int,
    hidden: int,
    heads: int,
    groups: int,
    depth: int,
    *,
    bias: bool,
    out_bias: bool | None = None,
    apart: bool = False,
    **options: Any,
) -> list[Piece]:
    """Queries, keys and values (a product each where `apart`), scores, and back to the hidden dim.

    Options: causal, dropout, rotary, windows (→ `foretell.workload.workload`).
    """
    last = bias if out_bias is None else out_bias
    most = groups if groups < heads else heads
    widths = {"query": heads, "key": groups, "value": groups}
    widths = widths if apart else {"qkv": heads + 2 * groups}
    split = {"tp": "heads", "cp": "queries"}
    dims = {"heads": heads, "queries": seq, "keys": seq, "depth": depth}
    share = groups / heads
    core = Op("attention", "attention", dims, split, saved=_kept(options, share), options=options,
              brief=_BRIEF)  # fmt: skip
    gathered = {"tokens": seq, "hidden": 2 * groups * depth}
    return [
        *enter("enter.attention", seq, hidden),
        *(column(n, seq, hidden, depth * h, bias=bias, most=most) for n, h in widths.items()),
        *_rotary(seq, heads + groups, depth, bool(options.get("rotary"))),
        _moved("qkv.transpose", seq, heads + 2 * groups, depth),
        Exchange("keys", "cp", "all_gather", "reduce_scatter", gathered, {"tp": "hidden"}),
        core,
        _moved("context.transpose", seq, heads, depth),
        row("projection", seq, heads * depth, hidden, bias=last, most=most),
        *leave("leave.attention", seq, hidden),
    ]


def latent_attention(
    seq: int,
    hidden: int,
    heads: int,
    depth: int,
    ranks: tuple[int, int, int, int],
    *,
    bias: bool,
    **options: Any,
) -> list[Piece]:
    """Attention over low-rank queries, keys and values (DeepSeek-V2, arXiv 2405.04434, 2.1).

    `ranks` are those of queries (0: of full rank), of keys and values, the width of the key with
    positions that all heads share, and that of a head's values. Every rank makes the whole latent
    vectors; heads are split behind them, so that it is these that sequence parallelism gathers.
    """
    q_rank, kv_rank, rope, value = ranks
    width = (q_rank or hidden) + kv_rank + rope
    dims = {"heads": heads, "queries": seq, "keys": seq, "depth": depth, "value": value}
    split = {"tp": "heads", "cp": "queries"}
    core = Op("attention", "attention", dims, split, saved=_kept(options, 1.0), options=options)
    gathered = {"tokens": seq, "hidden": heads * (depth + value)}
    return [
        *(_latent("query", seq, hidden, q_rank, q_rank) if q_rank else []),
        *_latent("keys", seq, hidden, kv_rank + rope, kv_rank),
        *enter("enter.attention", seq, width),
        column("query", seq, q_rank or hidden, heads * depth, bias=bias, most=heads),
        column("keys", seq, kv_rank, heads * (depth - rope + value), bias=bias, most=heads),
        *_rotary(seq, heads, depth, bool(options.get("rotary"))),
        _moved("qkv.transpose", seq, 3 * heads, depth),
        Exchange("keys", "cp", "all_gather", "reduce_scatter", gathered, {"tp": "hidden"}),
        core,
        _moved("context.transpose", seq, heads, value),
        row("projection", seq, heads * value, hidden, bias=bias, most=heads),
        *leave("leave.attention", seq, hidden),
    ]


def _latent(name: str, seq: int, hidden: int, out: int, normed: int) -> list[Piece]:
    """Down to a latent vector, of which a part is normed."""
    dims = {"tokens": seq, "in": hidden, "out": out}
    down = Op(f"{name}.down", "matmul", dims, ROWS, _weights(f"{name}.down", False))
    return [down, norm_op(f"{name}.norm", seq, normed, kernel="rms_norm", bias=False)]


def head_norms(seq: int, heads: int, groups: int, depth: int, whole: bool) -> list[Piece]:
    """RMS norms of queries and keys, head by head or over all heads of each."""
    made: list[Piece] = []
    for name, many in (("query.norm", heads), ("key.norm", groups)):
        weights = (Tensor(f"{name}.weight", ("cols",)),)
        if whole:
            dims, split = {"tokens": seq, "cols": many * depth}, {"tp": "cols", "cp": "tokens"}
        else:
            dims = {"tokens": seq, "heads": many, "cols": depth}
            split = {"tp": "heads", "cp": "tokens"}
        kept = (Tensor("input", ("batch", *dims)),)
        kernel = {"kernel": "rms_norm"}
        made.append(Op(name, "norm", dims, split, weights, kept, options=kernel))
    return made


def changed(pieces: Iterable[Piece], name: str, /, **what: Any) -> tuple[Piece, ...]:
    """Pieces of which the op of one name is another way."""
    return tuple(
        replace(op, **what) if isinstance(op, Op) and op.name == name else op for op in pieces
    )


def renamed(piece: Piece, name: str) -> Piece:
    """The same piece, with its weights, under names that begin with another."""
    if isinstance(piece, Exchange):
        return replace(piece, name=f"{name}.{piece.name}")
    weights = tuple(replace(w, name=f"{name}.{w.name}") for w in piece.weights)
    return replace(piece, name=f"{name}.{piece.name}", weights=weights)


def _kept(options: Mapping[str, Any], share: float) -> tuple[Tensor, ...]:
    """Queries, keys and values; unless flash also the scores after softmax and after dropout."""
    rows, scores = ("batch", "heads", "queries", "depth"), _SCORES
    kept = [Tensor("query", rows), Tensor("key and value", rows, times=2 * share)]
    kept += [Tensor("softmax", scores, when="!flash")]
    if options.get("dropout", True):
        kept += [Tensor("mask", scores, "bool", when="!flash")]
        kept += [Tensor("dropped", scores, when="!flash")]
    return (*kept, Tensor("log of sums", rows[:3], "fp32", when="flash"))


def _rotary(seq: int, heads: int, depth: int, wanted: bool) -> list[Piece]:
    if not wanted:
        return []
    dims, split = {"tokens": seq, "heads": heads, "depth": depth}, {"tp": "heads", "cp": "tokens"}
    options = {"passes": 2.0, "back": 2.0}
    more = {"passes": 10.0, "back": 12.0, "calls": 10, "many": 12, "rotary": True}
    return [
        Op("rotary", "pointwise", dims, split, when="fused", options=options),
        Op("rotary", "pointwise", dims, split, when="!fused", options=more),
    ]


def _moved(name: str, seq: int, heads: int, depth: int) -> Op:
    """A copy into the order that batched matmuls want; flash attention reads any order."""
    dims, split = {"tokens": seq, "heads": heads, "depth": depth}, {"tp": "heads", "cp": "tokens"}
    return Op(name, "pointwise", dims, split, when="!flash", options={"kernel": "copy"})


def feed_forward(
    seq: int, hidden: int, inner: int, *, bias: bool, gated: bool = False, kernel: str = "gelu"
) -> list[Piece]:
    """Out to the inner width and back; gated (SwiGLU) has two matmuls on the way out."""
    wide = 2 * inner if gated else inner
    return [
        *enter("enter.mlp", seq, hidden),
        column("up", seq, hidden, wide, bias=bias, most=inner),
        *_activation(seq, inner, wide, bias, kernel),
        row("down", seq, inner, hidden, bias=bias, most=inner),
        *leave("leave.mlp", seq, hidden),
    ]


def _activation(seq: int, inner: int, wide: int, bias: bool, kernel: str) -> list[Piece]:
    """The activation keeps its input; its output is kept by the product behind it."""
    split, ratio = {"tp": "cols", "cp": "tokens"}, wide / inner
    dims = {"tokens": seq, "cols": inner}
    saved = (Tensor("input", _ROW, times=ratio),)
    one = {"kernel": kernel, "passes": 1 + ratio, "back": 1 + 2 * ratio}
    parts: list[Piece] = [
        Op(kernel, "pointwise", dims, split, saved=saved, when="fused", options=one),
        Op(kernel, "pointwise", dims, split, saved=saved, when="!fused", options=one),
    ]
    if bias:
        added = {"passes": 2.0, "back": 1.0}
        apart = "!fused&!eager"
        parts.insert(1, Op("up.bias", "pointwise", dims, split, when=apart, options=added))
    if ratio > 1:
        more = {"passes": 3.0, "back": 5.0}
        made = (Tensor("activated", _ROW),)
        parts.append(Op("gate", "pointwise", dims, split, saved=made, when="!fused", options=more))
    return parts


def embedding(seq: int, hidden: int, vocab: int, *, positions: int, dropout: bool) -> Layer:
    """Words, learned positions where there are any, and dropout."""
    dims = {"tokens": seq, "hidden": hidden, "vocab": vocab}
    split = {"tp": "vocab", "cp": "tokens"}
    words = (Tensor("words", ("vocab", "hidden")),)
    ops: list[Piece] = [Op("words", "embedding", dims, split, words, pads={"vocab": 128})]
    ops += [leave("leave.words", seq, hidden)[0]]
    if positions:
        place = {"tokens": seq, "hidden": hidden, "positions": positions}
        learned = (Tensor("positions", ("positions", "hidden")),)
        ops.append(Op("positions", "embedding", place, {"cp": "tokens"}, learned))
    if dropout:
        rows, mask = {"tokens": seq, "cols": hidden}, (Tensor("mask", _ROW, "bool"),)
        options = {"kernel": "dropout", "passes": 2.5, "back": 2.5}
        ops.append(Op("dropout", "pointwise", rows, ROWS, saved=mask, options=options))
    return block_of("embedding", ops, seq, hidden, is_block=False)


def head(seq: int, hidden: int, vocab: int, final: Op) -> Layer:
    """The last norm, the matmul with the vocabulary and the loss in fp32."""
    dims, weights = {"tokens": seq, "in": hidden, "out": vocab}, Tensor("logits", ("in", "out"))
    logits = Op("logits", "matmul", dims, {"tp": "out", "cp": "tokens"}, (weights,),
                pads={"out": 128}, options={"vocabulary": True})  # fmt: skip
    rows = ("batch", "tokens", "vocab")
    kept = (
        Tensor("probabilities", rows, "fp32", when="!eager&!fp32-loss"),
        Tensor("log probabilities", rows, "fp32", when="fp32-loss"),
        Tensor("log probabilities", rows, when="eager&!fp32-loss"),
    )
    # plain PyTorch has the gradient of the loss and of the logits beside them for a moment
    brief = (
        Tensor("logits", rows, when="!eager&!fp32-loss"),
        Tensor("gradients", rows, "fp32", when="fp32-loss", times=2.0),
        Tensor("gradients", rows, when="eager&!fp32-loss", times=2.0),
    )
    dims = {"tokens": seq, "vocab": vocab}
    split = {"tp": "vocab", "cp": "tokens"}
    loss = Op("loss", "loss", dims, split, saved=kept, pads={"vocab": 128}, brief=brief)
    sums = Exchange("loss", "tp", "all_reduce", "", {"tokens": seq}, {"cp": "tokens"}, dtype="fp32")
    enters = enter("enter.logits", seq, hidden)
    pieces: list[Piece] = [final, *enters, logits, loss, sums, sums, sums]
    return block_of("head", pieces, seq, hidden, is_block=False)


def encoded(seq: int, hidden: int, heads: int, inner: int, *, bias: bool) -> list[Piece]:
    """Attention to all words and a feed-forward, each behind a norm; `bias`: in the residuals."""
    options = {"bias": True, "causal": False, "dropout": False}
    return [
        norm_op("norm.attention", seq, hidden),
        *attention(seq, hidden, heads, heads, head_width(hidden, heads), **options),
        *residual("residual.attention", seq, hidden, bias=bias),
        norm_op("norm.mlp", seq, hidden),
        *feed_forward(seq, hidden, inner, bias=True),
        *residual("residual.mlp", seq, hidden, bias=bias),
    ]


def block_of(
    name: str, pieces: Sequence[Piece], seq: int, hidden: int, times: int = 1, *,
    is_block: bool = True,
) -> Layer:  # fmt: skip
    """A layer over words, repeated; one that is no block is not counted when stages are cut."""
    sizes = {"tokens": seq, "cols": hidden}
    return Layer(name, tuple(pieces), Tensor("hidden", _ROW), sizes, times, ROWS, is_block)


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
        made = feed_forward(
            self.seq, self.hidden, inner, bias=self.bias, gated=self.gated, kernel=self.act
        )
        return [renamed(piece, "shared") for piece in made]


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
        first = embedding(
            self.seq, self.hidden, self.vocab, positions=self._places(), dropout=self.dropout
        )
        last = head(self.seq, self.hidden, self.vocab, self._norm("norm"))
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
            head_width(self.hidden, self.heads)
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
            made.append(block_of(name, self._block(kind), self.seq, self.hidden, times))
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
        made = norm_op(
            name, self.seq, self.hidden, kernel="rms_norm" if is_rms else "norm",
            bias=self.norm == "layer", consumers=consumers.get(name, 1),
            composite=self.norm == "rms-composite",
        )  # fmt: skip
        return replace(made, weights=()) if self.norm == "none" else made

    def _residual(self, name: str) -> list[Piece]:
        return residual(name, self.seq, self.hidden, bias=self.bias == "all", dropout=self.dropout)

    def _attention(self) -> list[Piece]:
        heads, depth = self.heads, self.depth or self.hidden // self.heads
        options: dict[str, Any] = {"causal": True, "dropout": self.dropout}
        options |= {"rotary": True} if self.rotary else {}
        if self.window:
            share = min((self.windowed or self.layers) / self.layers, 1.0)
            options["windows"] = ((self.window, share), *(((0, 1.0 - share),) if share < 1 else ()))
        if self.kv_rank:
            ranks = (self.q_rank, self.kv_rank, self.rope, self.value or depth)
            return latent_attention(
                self.seq, self.hidden, heads, depth, ranks, bias=self.bias == "all", **options
            )
        groups = self.groups or heads
        out_bias = self.bias in ("attention", "all")
        made = attention(
            self.seq, self.hidden, heads, groups, depth, bias=self.bias != "no", out_bias=out_bias,
            **options,
        )  # fmt: skip
        if self.qk_norm == "no":
            return made
        at = next(i for i, piece in enumerate(made) if piece.name == "qkv") + 1
        norms = head_norms(self.seq, heads, groups, depth, self.qk_norm == "whole")
        return [*made[:at], *norms, *made[at:]]

    def _mlp(self, sparse: bool) -> list[Piece]:
        inner, bias = self.inner or 4 * self.hidden, self.bias == "all"
        if not sparse:
            return feed_forward(
                self.seq, self.hidden, inner, bias=bias, gated=self.gated, kernel=self.act
            )
        sizes = Sizes(
            self.seq, self.hidden, self.expert_inner or inner, self.experts, self.top,
            self.gated, bias, self.capacity, self.imbalance, self.act,
        )  # fmt: skip
        return sizes.pieces(self.shared)

    def _ahead(self, head: Layer) -> list[Layer]:
        """Multi-token prediction: two norms, a product, a block, and the head once more."""
        if not self.mtp:
            return []
        seq, hidden = self.seq, self.hidden
        made = linear_op("join", 2 * hidden, hidden, seq, keeps=True)
        join = replace(made, splits=ROWS, weights=made.weights[:1])
        again = changed(head.ops, "logits", weights=())
        norms = [self._norm("norm.words"), self._norm("norm.hidden")]
        pieces = [*norms, join, *self._block(self._is_sparse(self.layers - 1)), *again]
        return [block_of("mtp", pieces, seq, hidden, self.mtp, is_block=False)]


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
