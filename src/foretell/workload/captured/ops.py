"""Recorded calls as ops of a workload: what each computes, keeps, and how it may be split.

Matmuls, convolutions, attention, norms, tables and losses become the kinds that built-in models
are made of; everything else keeps its kernels (→ `recorded`).

Chains of pointwise work are there a second time, as the one kernel that a fusing program makes of
them. It reads what comes from outside, writes what is used outside, and keeps no more than that;
its backward reads both and the gradient. A chain that reduces over the last dim in a module whose
parameters are vectors is a norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from foretell.cost.aten import Dims, kernels
from foretell.cost.kernel import parse_shape as parse
from foretell.graph import Graph
from foretell.workload.captured.roles import Core, Roles, is_expert, is_linear, is_through, wide
from foretell.workload.captured.rows import PRODUCTS, ForwardCall, each
from foretell.workload.models import transformer
from foretell.workload.models.cnn import (
    Image,
    Window,
    convolution,
    gathers,
    halos,
    product,
    splits_of,
)
from foretell.workload.workload import BYTES, Exchange, Op, Tensor

Piece = Op | Exchange


@dataclass
class Model:
    """The whole step while its rows are turned into ops."""

    graph: Graph
    rows: Sequence[ForwardCall]
    roles: Roles
    batch: int
    dtype: str
    tokens: int  # of a sample; 1 where it has none
    images: bool  # convolutions, and nothing that attends
    last_image: int = -1  # the last row that looks at more than one pixel
    whole: bool = False  # images are no longer split from here on
    first: bool = True  # no convolution came yet

    def per_sample(self, size: float) -> float:
        return size / self.batch


def named_dims(model: Model, at: int) -> tuple[dict[str, float], dict[str, str]]:
    """Named sizes of one sample of what a row makes, and what may split them."""
    row = model.rows[at]
    if not row.live:
        return {"n": max(row.size, 1.0)}, {}
    n = model.per_sample(row.size)
    image = image_of(row)
    if model.images and image and row.out[0] == model.batch:
        return image.dims(), {} if model.whole else splits_of(image)
    if model.tokens > 1 and n >= model.tokens and n % model.tokens == 0:
        dims = {"tokens": float(model.tokens), "cols": n / model.tokens}
        if at in model.roles.inside:
            return dims, {"tp": "cols", "cp": "tokens"}
        return dims, dict(transformer.ROWS) if model.roles.row else {"cp": "tokens"}
    return {"n": max(n, 1.0)}, {"tp": "n"} if at in model.roles.inside else {}


def image_of(row: ForwardCall) -> Image | None:
    """Channels and sides of what a row makes, where that is an image."""
    dims = row.out
    if len(dims) not in (4, 5):
        return None
    return Image(dims[1], *dims[-2:], *dims[2:-2])


def kernels_of(model: Model, task: int, n: float) -> list[tuple[Any, ...]]:
    """Kernels of a task for `foretell.workload.workload`: class, shape by size, bytes, format."""
    graph = model.graph
    op, shape, dtype = (graph.text_of(c, task) for c in ("op", "shape", "dtype"))
    if not shape.startswith("in="):
        return []
    moved, flops = float(graph.bytes[task]), float(graph.flops[task])
    found = []
    for kernel in kernels(op, shape, moved, flops):
        sizes = dict(parse(kernel.shape))
        scaled = ("m",) if kernel.op == "gemm" else ("n", "rows")
        grows = tuple((k, v / n) for k, v in sizes.items() if k in scaled)
        fixed = tuple((k, v) for k, v in sizes.items() if k not in scaled)
        own = "" if is_usual(dtype, model.dtype) else priced_as(dtype)
        size = kernel.bytes / n * (1.0 if own else 2.0 / BYTES[priced_as(dtype)])
        work = 2.0 * math.prod(sizes.get(k, 1.0) for k in "bmnk") / n
        work = work if kernel.op == "gemm" else 0.0
        found += [(kernel.op, grows, fixed, size, own, work)] * int(kernel.times)
    return found


def is_usual(dtype: str, main: str) -> bool:
    return dtype == main or {dtype, main} == {"fp32", "tf32"}


def priced_as(dtype: str) -> str:
    return dtype if dtype in ("fp64", "fp32", "tf32", "fp16", "bf16") else "fp32"


def own_dtype(model: Model, row: ForwardCall) -> str:
    """The format of a row where it is not the workload's."""
    return "" if is_usual(row.dtype, model.dtype) else priced_as(row.dtype)


def weights_of(
    row: ForwardCall, name: str, first: tuple[str, ...], second: tuple[str, ...]
) -> tuple[Tensor, ...]:
    """The parameters of a row by the dims of its op: the matrix first, then the bias."""
    found: list[Tensor] = []
    for path, size in (*row.tied, *row.weights):
        is_matrix = size == _matrix(row) and all(t.dims != first for t in found)
        found.append(Tensor(leaf(path, name), first if is_matrix else second))
    return tuple(found)


def _matrix(row: ForwardCall) -> float:
    """Elements of the parameter that a call multiplies with or looks up in."""
    at = {"convolution": 1, "embedding": 0}.get(row.op, -1)
    if row.op in PRODUCTS:
        at = PRODUCTS[row.op] + 1
    return float(row.call.size(at)) if at >= 0 else row.reads[0]


def leaf(path: str, name: str) -> str:
    return f"{name}.{path.rpartition('.')[2]}"


def kept_of(
    model: Model, row: ForwardCall, dims: tuple[str, ...], sizes: Mapping[str, float]
) -> tuple[Tensor, ...]:
    """Outputs of the row that are saved until the backward pass."""
    if not row.kept:
        return ()
    own = own_dtype(model, row)
    per = row.kept / (model.batch if "batch" in dims else 1)
    size = math.prod(sizes[d] for d in dims if d != "batch")
    wide = BYTES[own] if own else BYTES[model.dtype]
    return (Tensor("output", dims, own, times=per / wide / size),)


def as_recorded(model: Model, at: int, name: str, *, when: str = "") -> Op:
    """A row with the kernels that were recorded for it."""
    row = model.rows[at]
    dims, splits = named_dims(model, at)
    n = math.prod(dims.values())
    whole = model.batch * n if row.live else n
    forward = tuple(k for i in row.tasks for k in kernels_of(model, i, whole))
    back = tuple(k for i in row.back for k in kernels_of(model, i, whole))
    saved = kept_of(model, row, (("batch",) if row.live else ()) + tuple(dims), dims)
    options: dict[str, Any] = {"forward": forward, "backward": back}
    if not row.live:
        options["once"] = True
    weights = tuple(
        Tensor(leaf(path, name), (), times=size) for path, size in (*row.weights, *row.tied)
    )
    return Op(name, "recorded", dims, splits, weights, saved, options=options, when=when)


def summed_back(model: Model, at: int, name: str, usual: tuple[str, ...]) -> list[Piece]:
    """Backward kernels of a row beside those its kind has: gradients of two users added up."""
    row = model.rows[at]
    more = [i for i in row.back if model.graph.text_of("op", i) not in usual]
    if not more:
        return []
    dims, splits = named_dims(model, at)
    whole = model.batch * math.prod(dims.values())
    back = tuple(k for i in more for k in kernels_of(model, i, whole))
    options = {"forward": (), "backward": back}
    return [Op(f"{name}.sum", "recorded", dims, splits, options=options, when="!fused")]


_REDUCES = ("mean", "sum", "var", "linalg_vector_norm")


def fused(model: Model, parts: Sequence[tuple[int, list[Piece]]]) -> list[Piece]:
    """The pieces of a layer, each chain once as recorded and once as one kernel.

    A chain waits for more of it while what comes in between does not use it.
    """
    norms = {model.rows[at].path for at, _ in parts if model.rows[at].op in _REDUCES}
    out: list[Piece] = []
    chain: list[tuple[int, Op]] = []
    for at, pieces in parts:
        one = pieces[0] if len(pieces) == 1 else None
        free = one if isinstance(one, Op) and _is_pointwise(model.rows[at], one) else None
        apart = bool(chain) and _is_border(model.rows[chain[-1][0]], model.rows[at], norms)
        if free and not apart and _can_join(model, chain, at, free):
            chain.append((at, free))
            continue
        if free or {i for i, _ in chain} & set(model.rows[at].after):
            out += _flushed(model, chain)
            chain = []
        if free:
            chain = [(at, free)]
        else:
            out += pieces
    return out + _flushed(model, chain)


def _is_border(one: ForwardCall, two: ForwardCall, norms: set[str]) -> bool:
    """Norms begin and end with their module."""
    return one.path != two.path and (one.path in norms or two.path in norms)


def _is_pointwise(row: ForwardCall, op: Op) -> bool:
    is_free = op.kind == "recorded" and not op.when and not op.options.get("once")
    return is_free and (is_through(row) or row.op in _REDUCES)


def _can_join(model: Model, chain: list[tuple[int, Op]], at: int, op: Op) -> bool:
    """Whether a row uses what the chain makes and is split as it is."""
    if not chain:
        return False
    mine = {i for i, _ in chain}
    is_fed = bool(mine & set(model.rows[at].after))
    shared = set(model.rows[at].after) & {j for i in mine for j in model.rows[i].after}
    return (is_fed or bool(shared)) and op.splits == chain[0][1].splits


def _flushed(model: Model, chain: list[tuple[int, Op]]) -> list[Piece]:
    if len(chain) < 2:
        return [op for _, op in chain]
    rows = [at for at, _ in chain]
    inside = [replace(op, when="!fused", weights=()) for _, op in chain]
    weights = tuple(w for _, op in chain for w in op.weights)
    whole = _whole(model, rows, chain)
    options = {"forward": (), "backward": (), "once": True}
    # parameters are there however the chain runs
    held = Op(f"{whole.name}.weights", "recorded", {"n": 1.0}, {}, weights, options=options)
    return [*([held] if weights else []), *inside, whole]


def _whole(model: Model, rows: list[int], chain: list[tuple[int, Op]]) -> Op:
    """The chain as one kernel."""
    main = max((op for _, op in chain), key=lambda op: math.prod(op.dims.values()))
    name = f"{chain[0][1].name}.chain"
    given, made = _outside(model, rows)
    kept = _kept(model, rows, given, made, main)
    if _is_norm(model, chain, main):
        rms: dict[str, Any] = {"kernel": "rms_norm"}
        return Op(name, "norm", main.dims, main.splits, (), kept, options=rms, when="fused")
    n = model.batch * math.prod(main.dims.values())
    width = BYTES[model.dtype]
    reads, writes = (sum(model.rows[i].size for i in some) * width for some in (given, made))
    recorded = sum(k[3] * n for _, op in chain for k in op.options["backward"])
    back = min(recorded * width / 2.0, 2 * reads + writes)
    shape = (("n", 1.0),), (("uneven", 0.0),)
    half = 2.0 / width / n
    options: dict[str, Any] = {
        "forward": (("elementwise", *shape, (reads + writes) * half, "", 0.0),)
    }
    options["backward"] = (("elementwise", *shape, back * half, "", 0.0),) if back else ()
    return Op(name, "recorded", main.dims, main.splits, (), kept, options=options, when="fused")


def _is_norm(model: Model, chain: list[tuple[int, Op]], main: Op) -> bool:
    reduces = any(model.rows[at].op in _REDUCES for at, _ in chain)
    return reduces and any(op.weights for _, op in chain) and {"tokens", "cols"} <= set(main.dims)


def _outside(model: Model, rows: list[int]) -> tuple[list[int], list[int]]:
    """Rows outside whose results the chain reads, and its own that are used outside."""
    mine = set(rows)
    given = sorted({j for i in rows for j in model.rows[i].after if j not in mine})
    used = {j for i, row in enumerate(model.rows) if i not in mine for j in row.after}
    made = sorted(mine & used) or [rows[-1]]
    return [i for i in given if model.rows[i].live], made


def _kept(
    model: Model, rows: list[int], given: list[int], made: list[int], main: Op
) -> tuple[Tensor, ...]:
    """Its outputs that are used outside, and its inputs where the backward pass needs them."""
    width = BYTES[model.dtype]
    size = sum(_half(model, model.rows[i]) for i in made)
    drops = [model.rows[i] for i in rows if "dropout" in model.rows[i].op]
    masks = sum(row.kept - _half(model, row) for row in drops)
    needs = any(model.rows[i].kept and i not in made for i in rows)
    size += masks
    size += sum(model.rows[i].size * width for i in given if needs and not model.rows[i].kept)
    if not size:
        return ()
    whole = model.batch * math.prod(main.dims.values())
    return (Tensor("output", ("batch", *main.dims), times=size / width / whole),)


def _half(model: Model, row: ForwardCall) -> float:
    """Bytes of what a row made, where it is kept, in the workload's format."""
    return min(row.kept, row.size * BYTES[model.dtype])


NORMS = {"native_layer_norm": "norm", "_fused_rms_norm": "rms_norm"}


_CASTS = ("torch.float32", "torch.bfloat16", "torch.float16")
_LOSSES = ("nll_loss_forward", "nll_loss2d_forward")


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
        size, by = {"tokens": tokens}, {"cp": "tokens"}
        one = Exchange(name, "tp", "all_reduce", "", size, by, dtype="fp32")
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
    """Tensors saved by fused attention, and by attention that is not fused."""
    rows, scores = ("batch", "heads", "queries", "depth"), ("batch", "heads", "queries", "keys")
    if not core.fused:
        kept = sum(model.rows[i].kept for i in core.rows)
        size = math.prod(dims[d] for d in scores[1:])
        times = model.per_sample(kept) / BYTES[model.dtype] / size
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
        enter = transformer.enter(f"{name}.enter", tokens, inner)
        before = [_token_exchange(name, tokens, inner), *enter]
    if at in roles.row or at not in roles.column:
        leave = transformer.leave(f"{name}.leave", tokens, out)
        behind = [*leave, _token_exchange(name, tokens, out)]
    return [*before, op, *behind]


def _token_exchange(name: str, tokens: int, width: int) -> Exchange:
    """Words on their way to the ranks of their experts, or back."""
    moved = {"tokens": float(tokens), "hidden": float(width)}
    return Exchange(f"{name}.experts", "ep", "all_to_all", "all_to_all", moved)


def convolved(model: Model, row: ForwardCall, name: str) -> list[Piece]:
    """A convolution with its bias, and the communication of its split."""
    image, window, out = _window(model, row, row.call.values[6] in ("True", "1"))
    made = convolution(name, image, out, window, bias=bool(row.call.dims[2]))
    model.first = False
    if not model.images:  # a few patches before words: left whole
        made = [replace(p, splits={}, most={}) for p in made if isinstance(p, Op)]
    weight_dims = ("k", "c", *"rst"[: len(window.sides)])
    return [
        _own(model, row, piece, weight_dims) if isinstance(piece, Op) else piece for piece in made
    ]


def _own(model: Model, row: ForwardCall, op: Op, window: tuple[str, ...]) -> Op:
    """The convolution or its bias, with the parameters it was seen to read and what it kept."""
    weights = weights_of(row, op.name.removesuffix(".bias"), window, ("c",))
    if op.kind != "conv":
        return replace(op, weights=tuple(w for w in weights if w.dims == ("c",)))
    share = 1 / float(op.options.get("groups", 1))
    mine = tuple(replace(w, times=share) for w in weights if w.dims == window)
    return replace(op, weights=mine, saved=(*op.saved, *_whole_kept(model, row, op)))


def _whole_kept(model: Model, row: ForwardCall, op: Op) -> tuple[Tensor, ...]:
    """The output of a convolution is saved unsharded, however its channels are split."""
    if not row.kept:
        return ()
    sides = [d for d in ("h", "w", "d") if d in op.dims]
    size = math.prod(op.dims[d] for d in sides)
    times = model.per_sample(row.kept) / BYTES[model.dtype] / size
    return (Tensor("output", ("batch", *sides), times=times),)


def _window(model: Model, row: ForwardCall, turned: bool) -> tuple[Image, Window, int]:
    """The image a window goes over, the window, and the channels it makes."""
    call = row.call
    x, w = call.dims[0], call.dims[1]
    numbers = [call.numbers(i) or (1,) for i in (3, 4, 5)]
    stride, groups = numbers[0][-1], (call.numbers(8) or (1,))[-1]
    kernel = w[2:]
    pads = _pads(each(call.numbers(4) or (0,), len(kernel)), kernel, numbers[2])
    sides, channels, out = x[2:], x[1], w[0]
    if turned:
        sides = tuple(
            (s - 1) * stride - 2 * p + k for s, p, k in zip(sides, pads, kernel, strict=True)
        )
        channels, out = w[1] * groups, x[1]
    flat = len(sides) == 1
    sides, kernel = ((1, *sides), (1, *kernel)) if flat else (sides, kernel)
    pads = [0, *pads] if flat else pads
    turn = (*sides[-2:], *sides[:-2]), (*kernel[-2:], *kernel[:-2]), (*pads[-2:], *pads[:-2])
    image = Image(channels, *turn[0])
    first = model.first and not any(model.rows[i].live for i in row.after)
    window = Window(turn[1], stride, turn[2], groups, first, model.whole or not model.images)
    return image, replace(window, turned=turned), out


def _pads(pads: Dims, kernel: Dims, dilation: Dims) -> list[int]:
    """Padding that leaves as many places for a dense window as there are for a spread one."""
    wide = each(dilation, len(kernel))
    return [max(p - (k - 1) * (d - 1) // 2, 0) for p, k, d in zip(pads, kernel, wide, strict=True)]


def gathered(model: Model, name: str) -> list[Piece]:
    """Images that are split are gathered once, before the first work that needs them whole."""
    if model.whole or not model.images or model.last_image < 0:
        return []
    model.whole = True
    image = next(
        (image_of(r) for r in reversed(model.rows[: model.last_image + 1]) if image_of(r)), None
    )
    return list(gathers(f"{name}.gather", image)) if image else []


def fully(model: Model, row: ForwardCall, name: str) -> list[Piece]:
    """A linear layer of an image network: filters are outputs, channels inputs."""
    inner, out = wide(row)
    bias = len(row.reads) > 1
    last = not any(is_linear(r) for r in model.rows[list(model.rows).index(row) + 1 :])
    made = product(name, inner, out, bias=bias, last=last)
    times = model.per_sample(row.kept) / BYTES[model.dtype]
    saved = (Tensor("output", ("batch",), times=times),) if row.kept else ()
    weights = weights_of(row, name, ("in", "out"), ("out",))
    return [replace(p, weights=weights, saved=saved) if isinstance(p, Op) else p for p in made]


def batch_norm(model: Model, at: int, name: str) -> list[Piece]:
    """Statistics of each channel, split with the image."""
    row = model.rows[at]
    image = image_of(row) or Image(row.out[1], *([1, 1] if len(row.out) < 3 else [row.out[-1], 1]))
    splits = {} if model.whole or not model.images else splits_of(image)
    dims = image.dims()
    weights = weights_of(row, name, ("c",), ("c",))
    saved = kept_of(model, row, ("batch", *dims), dims)
    return [Op(name, "batch_norm", dims, splits, weights, saved)]


def pool(model: Model, at: int, name: str) -> list[Piece]:
    """A pool, with halos where the image is split."""
    row, call = model.rows[at], model.rows[at].call
    x = call.dims[0]
    sides = len(x) - 2
    if sides not in (2, 3):
        return [as_recorded(model, at, name)]
    image = Image(x[1], *x[-2:], *x[2:-2])
    kernel = each(call.numbers(1) or (1,), sides)
    stride, pads = (call.numbers(2) or kernel)[-1], each(call.numbers(3) or (0,), sides)
    window = Window(
        (*kernel[-2:], *kernel[:-2]), stride, (*pads[-2:], *pads[:-2]), 1, False,
        model.whole or not model.images,
    )  # fmt: skip
    ops: list[Piece] = list(halos(name, image, image.c, window)) if model.images else []
    dims = image.dims()
    splits = {} if window.whole else splits_of(image)
    saved = kept_of(model, row, ("batch", *dims), dims)
    options = {"of": "max" if row.op.startswith("max") else "mean"}
    return [*ops, Op(name, "pool", dims, splits, saved=saved, options=options)]


def mean(model: Model, at: int, name: str) -> list[Piece]:
    """The mean of all pixels; the last of them gathers the image."""
    row = model.rows[at]
    dims = row.call.dims[0]
    gone = {i % len(dims) for i in row.call.numbers(1)}
    if not model.images or len(dims) not in (4, 5) or gone != set(range(2, len(dims))):
        return [as_recorded(model, at, name)]
    image = Image(dims[1], *dims[-2:], *dims[2:-2])
    before = gathered(model, name) if at > model.last_image else []
    splits = {} if model.whole else splits_of(image)
    saved = kept_of(model, row, ("batch", "c"), image.dims())
    return [*before, Op(name, "mean", image.dims(), splits, saved=saved)]


def pieces_of(model: Model, at: int, name: str) -> list[Piece]:
    """The ops and exchanges of one row."""
    row = model.rows[at]
    if at in model.roles.cores:
        return attention(model, at, name)
    if is_linear(row) and row.live:
        return linear(model, at, name)
    if row.op == "convolution" and row.live:
        return convolved(model, row, name)
    if row.op == "_log_softmax":
        return loss(model, at, name)
    rule = _RULES.get(row.op)
    if rule is not None and row.live:
        return rule(model, at, name)
    return [as_recorded(model, at, name, when=_when(model, row))]


def _when(model: Model, row: ForwardCall) -> str:
    """Which programs run a call too: those that hold halves cast nothing, as autocast does."""
    is_cast = row.op == "copy_" and any(value in _CASTS for value in row.call.values)
    if is_cast and "autocast" in model.graph.facts:
        return "eager"
    return "!fused" if row.op in _LOSSES else ""


_RULES: dict[str, Callable[[Model, int, str], list[Piece]]] = {
    **dict.fromkeys(NORMS, norm),
    "native_batch_norm": batch_norm,
    **dict.fromkeys(("max_pool2d_with_indices", "max_pool3d_with_indices"), pool),
    **dict.fromkeys(("avg_pool2d", "avg_pool3d"), pool),
    "embedding": embedding,
    "mean": mean,
    **dict.fromkeys(("bmm", "baddbmm", "_grouped_mm"), batched),
}
