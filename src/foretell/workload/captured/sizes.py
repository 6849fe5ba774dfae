"""The sizes of what a call makes, from what it is given."""

from __future__ import annotations

import math
from collections.abc import Sequence

from foretell.cost.aten import Call, Dims

# Matmuls, and where the two factors begin.
PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1, "_grouped_mm": 0}
LOOK_UPS = ("embedding", "index_select", "gather")


def made_by(call: Call) -> Dims:
    """The sizes of what a call makes."""
    if call.op in PRODUCTS:
        a, b = call.dims[PRODUCTS[call.op]], call.dims[PRODUCTS[call.op] + 1]
        return (*a[:-1], b[-1])
    if call.op in LOOK_UPS:
        return (*call.dims[1], *call.dims[0][1:]) if len(call.dims) > 1 else call.dims[0]
    if call.op == "index":
        return _looked_up(call)
    if any(call.lists):
        return _joined(call)
    if call.op == "convolution":
        return _slid(call)
    if ("pool2d" in call.op or "pool3d" in call.op) and len(call.dims[0]) == 2 + _sides(call):
        return _pooled(call)
    if call.op in ("mean", "sum") and call.numbers(1):
        dims = call.dims[0]
        gone = {i % len(dims) for i in call.numbers(1)}
        return tuple(1 if i in gone else d for i, d in enumerate(dims))
    return spread([call.dims[i] for i in call.tensors()])


def _joined(call: Call) -> Dims:
    """Tensors one behind the other, along the side where they differ; empty ones add nothing."""
    first = [d for d in next(group for group in call.lists if group) if math.prod(d)]
    if not first:
        return (0,)
    said = (call.numbers(1) or (-1,))[0] if call.op == "cat" else -1
    if any(len(d) != len(first[0]) for d in first):
        return (sum(map(math.prod, first)),)
    at = next((i for i in range(len(first[0])) if len({d[i] for d in first}) > 1), said)
    at %= len(first[0])
    return (*first[0][:at], sum(d[at] for d in first), *first[0][at + 1 :])


def _looked_up(call: Call) -> Dims:
    """What indices leave of a tensor: sides without one stay, the others become theirs."""
    x = call.dims[0]
    given = call.lists[1] if len(call.lists) > 1 and call.lists[1] else call.dims[1:2]
    taken = [d for d in given if d]
    if not taken or len(given) > len(x):
        return x
    first = next(i for i, d in enumerate(given) if d)
    rest = [side for i, side in enumerate(x) if i >= len(given) or not given[i]]
    return (*rest[:first], *spread(taken), *rest[first:])


def _sides(call: Call) -> int:
    return 3 if "3d" in call.op else 2


def _slid(call: Call) -> Dims:
    """What a window leaves of an image, or makes of it where it is transposed."""
    x, w = call.dims[0], call.dims[1]
    stride, pad, dilation = (each(call.numbers(i) or (i // 4,), len(w) - 2) for i in (3, 4, 5))
    turned = call.values[6] in ("True", "1")
    sides = [
        (s - 1) * t - 2 * p + d * (k - 1) + 1 if turned else (s + 2 * p - d * (k - 1) - 1) // t + 1
        for s, k, t, p, d in zip(x[2:], w[2:], stride, pad, dilation, strict=True)
    ]
    groups = (call.numbers(8) or (1,))[-1]
    return (x[0], w[1] * groups if turned else w[0], *sides)


def _pooled(call: Call) -> Dims:
    x = call.dims[0]
    if call.op.startswith("_adaptive"):
        return (*x[:2], *each(call.numbers(1) or (1,), _sides(call)))
    kernel = each(call.numbers(1) or (1,), _sides(call))
    stride, pad = (
        each(call.numbers(i) or usual, _sides(call)) for i, usual in ((2, kernel), (3, (0,)))
    )
    up = call.values[-1] in ("True", "1")
    sides = [
        (s + 2 * p - k + (t - 1 if up else 0)) // t + 1
        for s, k, t, p in zip(x[2:], kernel, stride, pad, strict=True)
    ]
    return (*x[:2], *sides)


def each(numbers: tuple[int, ...], many: int) -> tuple[int, ...]:
    return numbers if len(numbers) == many else (numbers[-1],) * many


def spread(several: Sequence[Dims]) -> Dims:
    """The sizes that tensors have when they are spread to each other; the largest where not."""
    width = max((len(d) for d in several), default=0)
    padded = [(1,) * (width - len(d)) + d for d in several]
    out = tuple(max(sizes) for sizes in zip(*padded, strict=True))
    fits = all(all(s in (1, o) for s, o in zip(d, out, strict=True)) for d in padded)
    return out if fits else max(several, key=math.prod, default=())
