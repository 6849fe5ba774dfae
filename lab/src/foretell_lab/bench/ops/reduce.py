"""Reductions, sorts and scans. `m` rows of `n`; the layout says what is reduced.

rows      along each row (the mean of a softmax, a norm's statistics)
columns   down the columns (the gradient of a bias)
all       to one number (a loss, a norm)
pixels    an image to one number a channel and image (global average pooling)
channels  an image to one number a channel (the bias of a convolution)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from foretell_lab.bench.call import Build, Call, Place
from foretell_lab.bench.case import Case, case, fill, one_of, sizes, wholes

_DIMS: dict[str, tuple[int, ...]] = {
    "rows": (1,), "columns": (0,), "all": (), "pixels": (2, 3), "channels": (0, 2, 3),
}  # fmt: skip
_REDUCE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda x, dims: x.sum(dims) if dims else x.sum(),
    "mean": lambda x, dims: x.mean(dims) if dims else x.mean(),
    "amax": lambda x, dims: x.amax(dims) if dims else x.amax(),
    "norm": lambda x, dims: torch.linalg.vector_norm(x, dim=dims or None),
    "var": lambda x, dims: x.var(dims) if dims else x.var(),
}
_SCAN: dict[str, Callable[[Any], Any]] = {
    "cumsum": lambda x: x.cumsum(-1),
    "argmax": lambda x: x.argmax(-1),
    "topk": lambda x: x.topk(min(5, x.shape[-1]), -1),
    "sort": lambda x: x.sort(-1),
}


def cases() -> Iterator[Case]:
    """Every reduction to measure."""
    for i, (m, n) in enumerate(wholes(36, (64, 262144), (32, 32768))):
        if m * n < 4e8:
            for dtype in ("fp32", "bf16") + (("fp16",) if i % 4 == 0 else ()):
                yield case("sum", "forward", dtype, "columns", m=m, n=n)
                yield case(
                    one_of(("sum", "mean", "amax", "var"), i), "forward", dtype, "rows", m=m, n=n
                )
    for i, n in enumerate(sizes(14, 1e3, 2e8)):
        for dtype in ("fp32", "bf16"):
            yield case(one_of(("sum", "mean", "norm"), i), "forward", dtype, "all", m=1, n=n)
    for n in sizes(10, 1e3, 1e8):
        yield case("norm", "forward", "fp32", "all", m=1, n=n)
    for images, c, side in fill(18, (8, 128), (16, 2048), (4, 112)):
        shape = {"n": round(images), "c": round(c / 8) * 8, "h": round(side), "w": round(side)}
        if shape["n"] * shape["c"] * shape["h"] ** 2 < 2e8:
            for dtype in ("fp32", "bf16"):
                yield case("mean", "forward", dtype, "pixels", **shape)
                yield case("sum", "forward", dtype, "channels", **shape)
    for i, (m, n) in enumerate(wholes(20, (8, 8192), (64, 65536))):
        yield case(tuple(_SCAN)[i % 4], "forward", "fp32", "rows", m=m, n=n)


def reduction(case: Case, place: Place) -> Call:
    """A reduction along what the layout says."""
    x, dims = _operand(case, place), _DIMS[case.layout]
    function = _REDUCE[case.op]
    return Call(lambda: function(x, dims), fresh=(x,))


def scan(case: Case, place: Place) -> Call:
    """A sort, scan or search of each row."""
    x, function = _operand(case, place), _SCAN[case.op]
    return Call(lambda: function(x), fresh=(x,))


def _operand(case: Case, place: Place) -> Any:
    dims = [case[name] for name in ("m", "n", "c", "h", "w") if name in dict(case.shape)]
    return place.randn(*dims, dtype=case.dtype)


BUILD: dict[str, Build] = {**dict.fromkeys(_REDUCE, reduction), **dict.fromkeys(_SCAN, scan)}
