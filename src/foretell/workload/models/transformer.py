"""The pieces of transformers, as Megatron splits them: column, then row, an all-reduce each.

Dims are of one sample. `tp` splits heads and the inner width of the feed-forward; `sp` splits
tokens where `tp` splits nothing (norms, residuals); `cp` splits tokens everywhere. What each op
keeps for its backward follows Korthikanti et al. (arXiv 2205.05198, section 4): 34·s·b·h + 5·a·s²·b
bytes in 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from foretell.errors import InputError
from foretell.workload.workload import Exchange, Layer, Op, Tensor

ROWS = {"sp": "tokens", "cp": "tokens"}  # how a tensor outside the tensor-parallel part is split
_ROW = ("batch", "tokens", "cols")
_FED = (Tensor("input", ("batch", "tokens", "in")),)  # what a product keeps of its own
_SCORES = ("batch", "heads", "queries", "keys")
# Filling masked scores in place has at once in the backward: gradient, two copies, result.
_BRIEF = (Tensor("gradients", _SCORES, when="torch-softmax", times=4.0),)
Piece = Op | Exchange


def depth(hidden: int, heads: int) -> int:
    """The width of one head."""
    if heads < 1 or hidden % heads:
        raise InputError(
            f"hidden={hidden} cannot be split over heads={heads}",
            hint="hidden is a multiple of heads",
        )
    return hidden // heads


def norm(
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


def dense(name: str, inner: int, out: int, tokens: int = 0, *, keeps: bool = False) -> Op:
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

    Options: causal, dropout, rotary, windows (→ `foretell.workload.kernels`).
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
    return [down, norm(f"{name}.norm", seq, normed, kernel="rms_norm", bias=False)]


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
    return block("embedding", ops, seq, hidden, is_block=False)


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
    return block("head", pieces, seq, hidden, is_block=False)


def encoded(seq: int, hidden: int, heads: int, inner: int, *, bias: bool) -> list[Piece]:
    """Attention to all words and a feed-forward, each behind a norm; `bias`: in the residuals."""
    options = {"bias": True, "causal": False, "dropout": False}
    return [
        norm("norm.attention", seq, hidden),
        *attention(seq, hidden, heads, heads, depth(hidden, heads), **options),
        *residual("residual.attention", seq, hidden, bias=bias),
        norm("norm.mlp", seq, hidden),
        *feed_forward(seq, hidden, inner, bias=True),
        *residual("residual.mlp", seq, hidden, bias=bias),
    ]


def block(
    name: str, pieces: Sequence[Piece], seq: int, hidden: int, times: int = 1, *,
    is_block: bool = True,
) -> Layer:  # fmt: skip
    """A layer over words, repeated; one that is no block is not counted when stages are cut."""
    sizes = {"tokens": seq, "cols": hidden}
    return Layer(name, tuple(pieces), Tensor("hidden", _ROW), sizes, times, ROWS, is_block)
