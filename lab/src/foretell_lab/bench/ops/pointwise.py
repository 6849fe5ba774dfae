"""Operators that treat each element alone: activations, arithmetic, casts, dropout, fills.

Sizes run from a thousand to 200 M elements. Two operands are of one shape unless the layout says
otherwise: row (a vector along rows), channel (one number a channel of an image), each (one number
an image), scalar (a plain number), mixed (fp32 and bf16 together).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from foretell_lab.bench.call import DTYPES, Build, Call, Place, forward_or_backward
from foretell_lab.bench.case import Case, case, fill, one_of, sizes

_SMALLEST, _LARGEST = 1e3, 2e8

UNARY: dict[str, Callable[[Any], Any]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "leaky_relu": F.leaky_relu,
    "relu6": F.relu6,
    "elu": F.elu,
    "mish": F.mish,
    "softplus": F.softplus,
    "exp": torch.exp,
    "pow": lambda x: x.pow(3.0),
    "dropout": lambda x: F.dropout(x, 0.1, training=True),
}
BINARY: dict[str, Callable[..., Any]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "add_": lambda x, y: x.add_(y),
    "mul_": lambda x, y: x.mul_(y),
    "where": lambda x, y: torch.where(y, x, 0.0),
    "masked_fill": lambda x, y: x.masked_fill(y, 0.0),
}
# What a for-loop optimizer is made of, in place on fp32.
UPDATES: dict[str, Callable[..., Any]] = {
    "addcmul_": lambda x, y, z: x.addcmul_(y, y, value=0.1),  # as Adam squares a gradient
    "addcdiv_": lambda x, y, z: x.addcdiv_(y, z, value=0.1),
    "lerp_": lambda x, y, z: x.lerp_(y, 0.1),
    "sqrt": lambda x, y, z: torch.sqrt(x),
    "rsqrt": lambda x, y, z: torch.rsqrt(x),
    "add_alpha_": lambda x, y, z: x.add_(y, alpha=0.1),
    "zero_": lambda x, y, z: x.zero_(),
    "fill_": lambda x, y, z: x.fill_(1.0),
}
_CASTS = ("fp32>bf16", "bf16>fp32", "fp32>fp16", "fp16>fp32", "fp32>fp32", "bf16>bf16")


def cases() -> Iterator[Case]:
    """Every pointwise operator to measure."""
    for j, op in enumerate(UNARY):
        common = op in ("relu", "gelu", "silu", "dropout", "tanh", "hardswish")
        for i, n in enumerate(_sizes(14 if common else 8, j)):
            for dtype in ("fp32", "bf16") + (("fp16",) if common and i % 2 else ()):
                for direction in ("forward", "backward"):
                    yield case(op, direction, dtype, "-", n=n)
    for j, op in enumerate(BINARY):
        common = op in ("add", "mul", "add_")
        for i, n in enumerate(_sizes(14 if common else 8, j)):
            for dtype in ("fp32", "bf16") + (("fp16",) if common and i % 2 else ()):
                yield case(op, "forward", dtype, "-", n=n)
    for j, op in enumerate(UPDATES):
        for n in _sizes(10, j):
            yield case(op, "forward", "fp32", "-", n=n)
    for j, dtype in enumerate(_CASTS):
        for n in _sizes(16, j):
            yield case("copy", "forward", dtype, "-", n=n)
    yield from _uneven()


def _sizes(count: int, j: int) -> list[int]:
    """Sizes of the j-th operator: not those of the one before."""
    return sizes(count + j % 5, _SMALLEST, _LARGEST)[j % 5 :]


def _uneven() -> Iterator[Case]:
    for i, (n, c, side) in enumerate(fill(20, (8, 128), (16, 2048), (4, 112))):
        shape = {"n": round(n), "c": round(c / 8) * 8, "h": round(side), "w": round(side)}
        if shape["n"] * shape["c"] * shape["h"] ** 2 > 2e8:
            shape["n"] = 8
        for dtype in ("fp32", "bf16"):
            yield case(one_of(("add", "mul"), i), "forward", dtype, "channel", **shape)
            yield case("mul", "forward", dtype, "each", **shape)
            yield case("add_", "forward", dtype, "channel", **shape)
    for i, (m, n) in enumerate(fill(14, (256, 65536), (64, 4096))):
        for dtype in ("fp32", "bf16"):
            yield case(one_of(("add", "mul"), i), "forward", dtype, "row", m=round(m), n=round(n))
    for j, (op, layout) in enumerate((("add", "mixed"), ("mul", "mixed"), ("mul", "scalar"))):
        for n in _sizes(10, j):
            for dtype in ("fp32", "bf16"):
                yield case(op, "forward", dtype, layout, n=n)


def unary(case: Case, place: Place) -> Call:
    """An activation or another function of one tensor."""
    x = place.randn(case["n"], dtype=case.dtype)
    x = x.abs().add_(0.1) if case.op == "pow" else x
    return forward_or_backward(case, UNARY[case.op], (x.requires_grad_(),))


def binary(case: Case, place: Place) -> Call:
    """Arithmetic of two tensors, perhaps of different shape or format."""
    x, y = _pair(case, place)
    y = y > 0 if case.op in ("where", "masked_fill") else y
    function = BINARY[case.op]
    return Call(lambda: function(x, y), fresh=(x,))


def _pair(case: Case, place: Place) -> tuple[Any, Any]:
    dims = [case[name] for name in ("m", "n", "c", "h", "w") if name in dict(case.shape)]
    x = place.randn(*dims, dtype=case.dtype)
    if case.layout == "scalar":
        return x, 0.5
    if case.layout == "mixed":
        return x, place.randn(*dims, dtype="fp32" if case.dtype == "bf16" else "bf16")
    other = {
        "row": [1, dims[-1]],
        "channel": [1, *dims[1:2], 1, 1],
        "each": [*dims[:1], 1, 1, 1],
    }.get(case.layout, dims)
    return x, place.randn(*other, dtype=case.dtype)


def update(case: Case, place: Place) -> Call:
    """One of the pieces of an optimizer step; nothing is fresh, the state is long evicted."""
    x, y, z = (place.randn(case["n"]).abs_().add_(0.1) for _ in range(3))
    function = UPDATES[case.op]
    return Call(lambda: function(x, y, z))


def copy(case: Case, place: Place) -> Call:
    """A copy from one format to another, or the same."""
    source, target = case.dtype.split(">")
    x = place.randn(case["n"], dtype=source)
    if source == target:
        return Call(lambda: x.clone(), fresh=(x,))
    return Call(lambda: x.to(DTYPES[target]), fresh=(x,))


BUILD: dict[str, Build] = {
    **dict.fromkeys(UNARY, unary),
    **dict.fromkeys(BINARY, binary),
    **dict.fromkeys(UPDATES, update),
    "copy": copy,
}
