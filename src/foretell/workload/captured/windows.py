"""Recorded calls on images: windows, pools, norms of channels, means, and what is behind them."""

from __future__ import annotations

import math
from dataclasses import replace

from foretell.cost.aten import Dims
from foretell.workload.captured.model import Model, Piece, image_of, kept_of, weights_of, width
from foretell.workload.captured.recorded import as_recorded
from foretell.workload.captured.roles import is_linear, wide
from foretell.workload.captured.row import Row
from foretell.workload.captured.sizes import each
from foretell.workload.models.windows import (
    Image,
    Window,
    convolution,
    gathers,
    halos,
    product,
    splits_of,
)
from foretell.workload.op import Op, Tensor

_POOLS = {"max_pool2d_with_indices": "max", "avg_pool2d": "mean"}
_POOLS |= {"max_pool3d_with_indices": "max", "avg_pool3d": "mean"}


def convolved(model: Model, row: Row, name: str) -> list[Piece]:
    """A convolution with its bias, and the communication of its split."""
    call = row.call
    turned = call.values[6] in ("True", "1")
    image, asked, out = _window(model, row, turned)
    bias = bool(call.dims[2])
    made = convolution(name, image, out, asked, bias=bias)
    model.first = False
    if not model.images:  # a few patches before words: left whole
        made = [replace(p, splits={}, most={}) for p in made if isinstance(p, Op)]
    window = ("k", "c", *"rst"[: len(asked.sides)])
    return [_own(model, row, piece, window) if isinstance(piece, Op) else piece for piece in made]


def _own(model: Model, row: Row, op: Op, window: tuple[str, ...]) -> Op:
    """The convolution or its bias, with the parameters it was seen to read and what it kept."""
    weights = weights_of(row, op.name.removesuffix(".bias"), window, ("c",))
    if op.kind != "conv":
        return replace(op, weights=tuple(w for w in weights if w.dims == ("c",)))
    share = 1 / float(op.options.get("groups", 1))
    mine = tuple(replace(w, times=share) for w in weights if w.dims == window)
    return replace(op, weights=mine, saved=(*op.saved, *_whole_kept(model, row, op)))


def _whole_kept(model: Model, row: Row, op: Op) -> tuple[Tensor, ...]:
    """What a convolution made is kept whole, however its channels are split."""
    if not row.kept:
        return ()
    sides = [d for d in ("h", "w", "d") if d in op.dims]
    size = math.prod(op.dims[d] for d in sides)
    times = model.per_sample(row.kept) / width(model) / size
    return (Tensor("output", ("batch", *sides), times=times),)


def _window(model: Model, row: Row, turned: bool) -> tuple[Image, Window, int]:
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
    asked = Window(turn[1], stride, turn[2], groups, first, model.whole or not model.images)
    return image, replace(asked, turned=turned), out


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


def fully(model: Model, row: Row, name: str) -> list[Piece]:
    """A linear layer of an image network: filters are outputs, channels inputs."""
    inner, out = wide(row)
    bias = len(row.reads) > 1
    last = not any(is_linear(r) for r in model.rows[list(model.rows).index(row) + 1 :])
    made = product(name, inner, out, bias=bias, last=last)
    saved = (Tensor("output", ("batch",), times=model.per_sample(row.kept) / width(model)),)
    weights = weights_of(row, name, ("in", "out"), ("out",))
    return [
        replace(p, weights=weights, saved=saved if row.kept else ()) if isinstance(p, Op) else p
        for p in made
    ]


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
    asked = Window(
        (*kernel[-2:], *kernel[:-2]), stride, (*pads[-2:], *pads[:-2]), 1, False,
        model.whole or not model.images,
    )  # fmt: skip
    ops: list[Piece] = list(halos(name, image, image.c, asked)) if model.images else []
    dims = image.dims()
    splits = {} if asked.whole else splits_of(image)
    saved = kept_of(model, row, ("batch", *dims), dims)
    options = {"of": _POOLS[row.op]}
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
