"""Sizes of what an operator makes, and of the workspace it takes, from the sizes of its inputs.

A rule answers with the tensors that an operator allocates as its results, in their order. It gets
the call alone; what no rule knows is worked out by `flow` from the operators inside. Workspaces of
cuDNN's convolutions follow from the kernels that ran; the largest counts, since each engine gives
its own back before the next asks:

    fft        input, filter and output as spectra: a tile of T×T numbers becomes T×(T/2+1) complex
               ones; of each image two tiles at a time. Forward the filter is transposed first,
               and kept in both layouts                                        → `_fft`
    winograd   4×4 tiles of input and output become 6×6 numbers                → `_winograd`
    copies     tensor cores want channels last: input, output and filter once more where the
               tensors are channels first                                      → `copied`
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from math import ceil, prod

from foretell.memory import recurrent
from foretell.memory.tape import CODES, FLOATS, ITEMS, Call, Dims, Key
from foretell.operators import rules, window

Rule = Callable[[Call], list[Key]]


def broadcast(call: Call) -> list[Key]:
    """One result as large as all inputs together, in the widest of their formats."""
    inputs = [t for t in call.tensors() if t[1]]
    if not inputs:
        return []
    rank = max(len(d) for d, _ in inputs)
    padded = [(1,) * (rank - len(d)) + tuple(d) for d, _ in inputs]
    sizes = tuple(max(column) if 0 not in column else 0 for column in zip(*padded, strict=True))
    return [(sizes, _widest(inputs, rank))]


def _widest(inputs: list[Key], rank: int) -> str:
    """Tensors without sizes (numbers) do not widen others of their sort."""
    whole = [t for d, t in inputs if len(d) or not rank] or [t for _, t in inputs]
    floats = [t for t in whole if t in FLOATS]
    if floats:
        mixed = {"c10::Half", "c10::BFloat16"} <= set(floats)
        return "float" if mixed else min(floats, key=FLOATS.index)
    return whole[0]


def like(k: int) -> Rule:
    """One result of the size and format of an input."""
    return lambda c: [t] if (t := c.tensor(k)) is not None else []


def likes(*which: int) -> Rule:
    """Results of the sizes and formats of several inputs."""
    return lambda c: [t for k in which if (t := c.tensor(k)) is not None]


def test(call: Call) -> list[Key]:
    return [(d, "bool") for d, _ in broadcast(call)]


def product(first: int, second: int) -> Rule:
    """A matmul, batched or not."""

    def rule(call: Call) -> list[Key]:
        a, b = call.tensor(first), call.tensor(second)
        return [((*a[0][:-1], b[0][-1]), a[1])] if a and b and len(a[0]) > 1 and b[0] else []

    return rule


def convolution(call: Call) -> list[Key]:
    x, w = call.tensor(0), call.tensor(1)
    if not x or not w or len(x[0]) < 3:
        return []
    stride, pad, dilate = (call.ints(k) or [d] for k, d in ((3, 1), (4, 0), (5, 1)))
    turned, more = call.flag(6), call.ints(7) or [0]
    sizes = window(x[0][2:], w[0][2:], stride, pad, dilate, more, turned=turned)
    groups = (call.ints(8) or [1])[0]
    channels = w[0][1] * groups if turned else w[0][0]
    return [((x[0][0], channels, *sizes), x[1])]


def convolution_backward(call: Call) -> list[Key]:
    """Gradients of input, weight and bias, as far as the last argument asks for them."""
    wanted = call.values[10] if len(call.values) > 10 else "[True, True, True]"
    mask = [word.strip(" []") == "True" for word in wanted.split(",")]
    made = [t for t, is_wanted in zip((call.tensor(1), call.tensor(2)), mask, strict=False)
            if is_wanted and t]  # fmt: skip
    bias = call.ints(3)
    if len(mask) > 2 and mask[2] and bias:
        made.append((tuple(bias), made[0][1] if made else "float"))
    return made


def batch_norm(call: Call) -> list[Key]:
    x = call.tensor(0)
    stats: Key = ((x[0][1],), "float") if x and len(x[0]) > 1 else ((), "float")
    return [x, stats, stats] if x else []


def batch_norm_backward(call: Call) -> list[Key]:
    x, y = call.tensor(0), call.tensor(1)
    return [x, *[((x[0][1],), "float")] * 2] if x and y and len(x[0]) > 1 else []


def layer_norm(call: Call) -> list[Key]:
    x, over = call.tensor(0), call.ints(1)
    if not x or not over:
        return []
    rows = ((prod(x[0][: -len(over)]),), "float")
    return [x, rows, rows]


def rms_norm(call: Call) -> list[Key]:
    return layer_norm(call)[:2]


def group_norm(call: Call) -> list[Key]:
    x, groups = call.tensor(0), call.ints(6)
    stats: Key = ((x[0][0] * (groups or [1])[0],), x[1]) if x and x[0] else ((), "float")
    return [x, stats, stats] if x else []


def softmax(call: Call) -> list[Key]:
    x = call.tensor(0)
    return [(x[0], "float" if call.flag(2) else x[1])] if x else []


def dropout(call: Call) -> list[Key]:
    x = call.tensor(0)
    return [x, (x[0], "bool")] if x else []


def reduced(call: Call) -> list[Key]:
    """A sum, mean or the like over some dims (all where none are named)."""
    x = call.tensor(0)
    if not x:
        return []
    over, keep = call.ints(1), call.flag(2)
    kept = [n % len(x[0]) for n in over or []] if x[0] else []
    if not over:
        return [((), x[1])]
    sizes = [1 if i in kept else n for i, n in enumerate(x[0]) if keep or i not in kept]
    return [(tuple(sizes), x[1])]


def pooled(call: Call) -> list[Key]:
    """Pooling with kernel, stride and padding; with indices where the operator makes them."""
    x, kernel = call.tensor(0), call.ints(1)
    if not x or not kernel or len(kernel) > len(x[0]):
        return []
    up = call.flag(5 if "max" in call.name else 4)
    sides = x[0][-len(kernel) :]
    made = window(sides, kernel, call.ints(2) or kernel, call.ints(3) or [0], up=up)
    out: Key = ((*x[0][: -len(kernel)], *made), x[1])
    return [out, (out[0], "long int")] if "indices" in call.name else [out]


def adaptive(call: Call) -> list[Key]:
    x, size = call.tensor(0), call.ints(1)
    return [((*x[0][: -len(size)], *size), x[1])] if x and size else []


def embedding(call: Call) -> list[Key]:
    table, where = call.tensor(0), call.tensor(1)
    return [((*where[0], *table[0][1:]), table[1])] if table and where else []


def embedding_backward(position: int) -> Rule:
    """The dense gradient of a table of so many rows."""

    def rule(call: Call) -> list[Key]:
        grad, rows = call.tensor(0), call.ints(position)
        return [((rows[0], grad[0][-1]), grad[1])] if grad and rows and grad[0] else []

    return rule


def embedding_bag(call: Call) -> list[Key]:
    table, bags, where = call.tensor(0), call.tensor(2), call.tensor(1)
    if not table or not bags or not where:
        return []
    offsets: Key = ((where[0][0] if where[0] else 1,), "long int")
    return [((*bags[0], table[0][1]), table[1]), offsets, offsets]


def attention(call: Call) -> list[Key]:
    """The result, and a number for each row of the scores."""
    q, v = call.tensor(0), call.tensor(2)
    if not q or not v:
        return []
    return [((*q[0][:-1], v[0][-1]), q[1]), (q[0][:-1], "float")]


def joined(call: Call) -> list[Key]:
    """`cat` or `stack` of a list of tensors."""
    parts = call.dims[0] if call.dims else ()
    sizes: list[Dims] = [d for d in parts if isinstance(d, tuple) and d != (0,)]
    if not sizes:
        return []
    at = (call.ints(1) or [0])[0]
    if call.name == "stack":
        one = list(sizes[0])
        one.insert(at % (len(one) + 1), len(sizes))
        return [(tuple(one), "")]
    whole = list(sizes[0])
    if whole:
        whole[at % len(whole)] = sum(d[at] for d in sizes)
    return [(tuple(whole), "")]


def sized(position: int, dtype: int | None = None, model: int | None = None) -> Rule:
    """A new tensor of sizes that are an argument."""

    def rule(call: Call) -> list[Key]:
        sizes = call.ints(position)
        base = call.tensor(model) if model is not None else None
        code = call.code(dtype) if dtype is not None else None
        return [(tuple(sizes), code or (base[1] if base else "float"))] if sizes else []

    return rule


def alike(dtype: int | None = None) -> Rule:
    """A new tensor like the first input, maybe in another format."""

    def rule(call: Call) -> list[Key]:
        x, code = call.tensor(0), call.code(dtype) if dtype is not None else None
        return [(x[0], code or x[1])] if x else []

    return rule


def resized(call: Call) -> list[Key]:
    """`resize_` of an empty tensor is where it gets its memory."""
    x, sizes = call.tensor(0), call.ints(1)
    return [(tuple(sizes), x[1])] if x and sizes and 0 in x[0] else []


def scalar_loss(call: Call) -> list[Key]:
    x = call.tensor(0)
    return [((), x[1]), ((), x[1])] if x else []


def indexed(call: Call) -> list[Key]:
    """`gather`: as large as its index."""
    x, where = call.tensor(0), call.tensor(2)
    return [(where[0], x[1])] if x and where else []


def selected(call: Call) -> list[Key]:
    """`index_select`: one side is as long as its index."""
    x, at, where = call.tensor(0), call.ints(1), call.tensor(2)
    if not (x and at and where and x[0]):
        return []
    dims = list(x[0])
    dims[at[0]] = prod(where[0])
    return [(tuple(dims), x[1])]


RULES: dict[str, Rule] = rules("makes", {**globals(), **vars(recurrent)})

__all__ = ["CODES", "RULES", "Rule", "broadcast"]


_FFT = re.compile(r"fft2d_r2c_(\d+)x")
_FLIP = re.compile(r"flip_filter")
_WINOGRAD = re.compile(r"winograd_nonfused|winogradForward\w*4x4")
_COPY = re.compile(r"nchwToNhwc|nhwcToNchw")
_REORDER = re.compile(r"region_transform_ABC")
_LINE, _VOLUME = 3, 5  # dims of what convolutions go over
_AT_ONCE = 2  # tiles of one image
_TILE, _GROWN = 4, 36  # numbers a side of a Winograd tile, and numbers it becomes


def workspace(call: Call) -> tuple[float, str]:
    """Bytes, and what another batch or another choice of kernels would need to know.

    That is: numbers in input, output and filter, the bytes that are the filter's, and for forward
    spectra the flop of the convolution.
    """
    sides = _sides(call)
    if sides is None:
        return 0.0, ""
    x, y, w, dtype = sides
    kernels = [name for c in call.walk() for name in c.kernels]
    item = ITEMS.get(dtype, 4)
    found = [(0.0, 0.0)]
    is_turned = any(map(_FLIP.search, kernels))
    is_filter = is_turned and call.name == "convolution_backward"
    if len(x) == _VOLUME:
        kernels = [name for name in kernels if _COPY.search(name)]
    for tile in {int(m[1]) for name in kernels if (m := _FFT.search(name))}:
        is_whole = is_filter and any(f"fft2d_r2c_{tile}x{tile}<float>(" in k for k in kernels)
        is_twice = any(map(_REORDER.search, kernels))
        found.append(
            _fft_filter(x, y, w, tile, is_twice) if is_whole else _fft(x, y, w, tile, is_turned)
        )
    if any(map(_WINOGRAD.search, kernels)):
        found.append(_winograd(x, y, w))
    numbers = [prod(x), prod(y), prod(w)]
    if any(map(_COPY.search, kernels)):
        found.append((copied(numbers[:2], item), copied(numbers[2:], item)))
    is_deep = len(w) > 1 and w[1] > 1  # one filter a channel has kernels of its own
    data, filters = max(found, key=sum)
    work = [2.0 * prod(y) * prod(w[1:])] if is_turned else []
    text = ":".join(f"{n:.0f}" for n in [*numbers, filters, *work])
    return data + filters, text if is_deep else ""


def copied(numbers: Sequence[float], item: int) -> float:
    """Bytes of copies in another layout of input, output and filter."""
    return float(sum(numbers) * item)


def _sides(call: Call) -> tuple[Dims, Dims, Dims, str] | None:
    """Sizes of input, output and filter of a convolution or of its backward."""
    if call.name == "convolution":
        x, y, w = call.tensor(0), next(iter(convolution(call)), None), call.tensor(1)
    elif call.name == "convolution_backward":
        x, y, w = call.tensor(1), call.tensor(0), call.tensor(2)
    else:
        return None
    if x is None or y is None or w is None or not _LINE <= len(x[0]) == len(w[0]) <= _VOLUME:
        return None
    return _sides_of(x), _sides_of(y), _sides_of(w), x[1]


def _sides_of(key: Key) -> Dims:
    """The sizes of an image or volume; a line is an image one pixel high."""
    return (*key[0][:2], 1, *key[0][2:]) if len(key[0]) == _LINE else key[0]


def _fft(x: Dims, y: Dims, w: Dims, tile: int, is_turned: bool) -> tuple[float, float]:
    """Bytes of the spectra of tensors and of filters, 8 a complex number.

    Of 211 convolutions of VGG-16, ResNet-18 and a detector (H200, cuDNN 9.19, traced with
    `profile_memory`) 183 ask for what is worked out here to within 0.15 MiB, 207 to within 2.
    """
    is_whole = max(x[2] + w[2] - 1, x[3] + w[3] - 1) <= tile
    at_once = x[0] * (1 if is_whole else _AT_ONCE)
    spectrum = tile * (tile // 2 + 1) * 8.0
    filters = spectrum * w[0] * w[1]
    if is_turned:
        return spectrum * at_once * 2 * x[1], 2 * filters + 4.0 * prod(w)
    return spectrum * at_once * (x[1] + y[1]), filters


def _fft_filter(x: Dims, y: Dims, w: Dims, tile: int, is_twice: bool) -> tuple[float, float]:
    """Bytes of a filter's gradient by spectra of whole images.

    One side of the images is turned round first. Where spectra are put into another order before
    they are multiplied, both orders are there; the result then takes the place of the first.
    """
    spectrum = tile * (tile // 2 + 1) * 8.0
    images = spectrum * x[0] * (x[1] + y[1]) * (2 if is_twice else 1)
    return images + 4.0 * prod(y), 0.0 if is_twice else spectrum * w[0] * w[1]


def _winograd(x: Dims, y: Dims, w: Dims) -> tuple[float, float]:
    tiles = ceil(y[2] / _TILE) * ceil(y[3] / _TILE)
    return 4.0 * _GROWN * x[0] * tiles * (x[1] + y[1]), 4.0 * _GROWN * w[0] * w[1]
