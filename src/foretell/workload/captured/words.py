"""Recorded calls on words: linear layers, attention, norms, tables and the loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from foretell.workload.captured.model import Model, Piece, kept_of, own_dtype, weights_of, width
from foretell.workload.captured.recorded import as_recorded, summed_back
from foretell.workload.captured.roles import Core, is_expert, wide
from foretell.workload.captured.sizes import PRODUCTS
from foretell.workload.captured.windows import fully, gathered
from foretell.workload.models import transformer
from foretell.workload.op import Exchange, Op, Tensor

NORMS = {"native_layer_norm": "norm", "_fused_rms_norm": "rms_norm"}


def linear(model: Model, at: int, name: str) -> list[Piece]:
    row, roles = model.rows[at], model.roles
    inner, out = wide(row)
    rows = model.per_sample(row.size / out)
    dims = {"tokens": max(rows, 1.0), "in": float(inner), "out": float(out)}
    if model.images and rows <= 1:
        return [*gathered(model, name), *fully(model, row, name)]
    splits, most, options = _ways(model, at, dims)
    weights = weights_of(row, name, ("in", "out"), ("out",))
    saved = kept_of(model, row, ("batch", "tokens", "out"), dims)
    op = Op(name, "matmul", dims, splits, weights, saved, most, options=options)
    before, behind = [], []
    if at in roles.enters:
        before = [*transformer.enter(f"{name}.enter", int(dims["tokens"]), inner)]
    if at in roles.row:
        behind = [*transformer.leave(f"{name}.leave", int(dims["tokens"]), out)]
    return [*before, op, *behind, *summed_back(model, at, name, ("mm", "sum", "bmm"))]


def _ways(
    model: Model, at: int, dims: Mapping[str, float]
) -> tuple[dict[str, str], dict[str, int], dict[str, Any]]:
    roles = model.roles
    splits = {"cp": "tokens"} if dims["tokens"] == model.tokens > 1 else {}
    if at in roles.column:
        return {"tp": "out"} | splits, {"tp": roles.column[at]}, {}
    if at in roles.row:
        return {"tp": "in"} | splits, {"tp": roles.row[at]}, {}
    if at in roles.words:
        return {"tp": "out"} | splits, {}, {"vocabulary": True}
    return splits, {}, {}


def norm(model: Model, at: int, name: str) -> list[Piece]:
    row = model.rows[at]
    cols = row.call.dims[0][-1]
    tokens = model.per_sample(row.size / cols)
    dims = {"tokens": tokens, "cols": float(cols)}
    splits = transformer.ROWS if tokens == model.tokens > 1 else {}
    saved = kept_of(model, row, ("batch", "tokens", "cols"), dims)
    weights = weights_of(row, name, ("cols",), ("cols",))
    options = {"kernel": NORMS[row.op]}
    op = Op(name, "norm", dims, splits, weights, saved, options=options)
    return [op, *summed_back(model, at, name, (f"{row.op}_backward",))]


def embedding(model: Model, at: int, name: str) -> list[Piece]:
    row = model.rows[at]
    vocab, hidden = row.call.dims[0][0], row.call.dims[0][-1]
    tokens = max(model.per_sample(row.call.size(1)), 1 / model.batch)
    dims = {"tokens": max(tokens, 1.0), "hidden": float(hidden), "vocab": float(vocab)}
    splits = {"cp": "tokens"} if tokens == model.tokens > 1 else {}
    weights = weights_of(row, name, ("vocab", "hidden"), ())
    saved = kept_of(model, row, ("batch", "tokens", "hidden"), dims)
    more: list[Piece] = []
    if at in model.roles.words:
        splits = {"tp": "vocab", **splits}
        more = [transformer.leave(f"{name}.leave", int(tokens), hidden)[0]]
    options = {"dense": True}  # its gradient is a whole table
    return [Op(name, "embedding", dims, splits, weights, saved, options=options), *more]


def loss(model: Model, at: int, name: str) -> list[Piece]:
    """Cross entropy over words, split with them where they are."""
    row = model.rows[at]
    vocab = row.call.dims[0][-1]
    tokens = max(model.per_sample(row.size / vocab), 1.0)
    dims = {"tokens": tokens, "vocab": float(vocab)}
    splits = {"cp": "tokens"} if tokens == model.tokens > 1 else {}
    saved = kept_of(model, row, ("batch", "tokens", "vocab"), dims)
    sums: list[Piece] = []
    if any(i in model.roles.words for i in row.sources):
        splits = {"tp": "vocab", **splits}
        one = Exchange(
            name, "tp", "all_reduce", "", {"tokens": tokens}, {"cp": "tokens"}, dtype="fp32"
        )
        sums = [one] * 3  # the largest, the sum of exponentials, the word that was right
    # PyTorch's own loss holds its gradient and that of the logits at once.
    every = ("batch", "tokens", "vocab")
    brief = (
        Tensor("gradients", every, own_dtype(model, row), "eager", 2.0),
        Tensor("logits", every, "", "!eager"),
    )
    return [Op(name, "loss", dims, splits, saved=saved, brief=brief), *sums]


def attention(model: Model, at: int, name: str) -> list[Piece]:
    """One op for a core, at its last row; rows before it are part of it."""
    core = model.roles.cores[at]
    if at != core.last:
        return []
    dims = {"heads": core.many, "queries": core.queries, "keys": core.keys, "depth": core.depth}
    can_split = any(i in model.roles.column for i in core.feeds)
    splits = {"tp": "heads"} if can_split else {}
    most = {"tp": min(core.heads, core.groups or core.heads)} if can_split else {}
    more: list[Piece] = []
    if core.queries == core.keys == model.tokens:
        splits |= {"cp": "queries"}
        gathered = {"tokens": core.keys, "hidden": 2 * (core.groups or core.heads) * core.depth}
        by = {"tp": "hidden"} if can_split else {}
        more = [Exchange(f"{name}.keys", "cp", "all_gather", "reduce_scatter", gathered, by)]
    options: dict[str, Any] = {"causal": core.causal, "dropout": core.dropout}
    if core.fused:
        options["sdpa"] = True
    elif core.queries != model.tokens:
        options["biased"] = True  # windows: their scores have a bias by place
    sizes = {k: float(v) for k, v in dims.items()}
    saved = _scores(model, core, sizes)
    return [*more, Op("attention", "attention", sizes, splits, (), saved, most, options=options)]


def _scores(model: Model, core: Core, dims: Mapping[str, float]) -> tuple[Tensor, ...]:
    """What was kept of a fused core; what another program keeps that is not fused."""
    rows, scores = ("batch", "heads", "queries", "depth"), ("batch", "heads", "queries", "keys")
    if not core.fused:
        kept = sum(model.rows[i].kept for i in core.rows)
        size = math.prod(dims[d] for d in scores[1:])
        times = model.per_sample(kept) / width(model) / size
        return (Tensor("softmax", scores, when="!flash", times=times),) if kept else ()
    found = list(kept_of(model, model.rows[core.last], rows, dims))
    apart = "!flash&!eager"
    found.append(Tensor("softmax", scores, when=apart))
    if core.dropout:
        found.append(Tensor("mask", scores, "bool", when=apart))
        found.append(Tensor("dropped", scores, when=apart))
    return tuple(found)


def batched(model: Model, at: int, name: str) -> list[Piece]:
    """A product of two tensors, one a sample or more."""
    row = model.rows[at]
    if is_expert(row):
        return experts(model, at, name)
    if row.op not in ("bmm", "baddbmm"):
        return [as_recorded(model, at, name)]
    a, b = row.call.dims[PRODUCTS[row.op]], row.call.dims[PRODUCTS[row.op] + 1]
    sizes = (model.per_sample(a[0]), a[1], b[-1], a[-1])
    dims = dict(zip("bmnk", map(float, sizes), strict=True))
    saved = kept_of(model, row, ("batch", "b", "m", "n"), dims)
    return [Op(name, "product", dims, saved=saved)]


def experts(model: Model, at: int, name: str) -> list[Piece]:
    """A product of every expert over the words that go to it; words go there and back by `ep`."""
    row, roles = model.rows[at], model.roles
    inner, out = wide(row)
    many = float(row.call.dims[1][0])
    dims = {"tokens": model.per_sample(row.size / out), "experts": many}
    dims |= {"in": float(inner), "out": float(out)}
    splits = {"ep": "experts"}
    most = {"ep": int(many)}
    if at in roles.column or at in roles.row:
        splits["tp"] = "out" if at in roles.column else "in"
        most["tp"] = roles.column.get(at) or roles.row[at]
    weights = weights_of(row, name, ("experts", "in", "out"), ())
    saved = kept_of(model, row, ("batch", "tokens", "out"), dims)
    op = Op(name, "experts", dims, splits, weights, saved, most)
    tokens = int(dims["tokens"])
    before: list[Piece] = []
    behind: list[Piece] = []
    if at in roles.enters or at not in roles.row:
        before = [_dealt(name, tokens, inner), *transformer.enter(f"{name}.enter", tokens, inner)]
    if at in roles.row or at not in roles.column:
        behind = [*transformer.leave(f"{name}.leave", tokens, out), _dealt(name, tokens, out)]
    return [*before, op, *behind]


def _dealt(name: str, tokens: int, width: int) -> Exchange:
    """Words on their way to the ranks of their experts, or back."""
    moved = {"tokens": float(tokens), "hidden": float(width)}
    return Exchange(f"{name}.experts", "ep", "all_to_all", "all_to_all", moved)
