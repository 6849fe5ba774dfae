"""Normalisations and softmaxes, forward and backward.

Batch norm takes its weights in fp32 whatever the image is, as autocast runs it; layer, group and
RMS norm take everything in one format. `cross_entropy` is log-softmax and the loss together.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from foretell_lab.bench.call import Build, Call, Place, forward_or_backward
from foretell_lab.bench.case import Case, case, fill, one_of, published, wholes

_BOTH = ("forward", "backward")
# Rows × columns of well-known models: tokens × width, windows × width, attention scores, classes.
_WIDTHS = (96, 128, 192, 256, 384, 512, 768, 768, 1024, 1280, 1536, 2048, 2560, 4096, 5120, 8192)
_SCORES = (49, 64, 128, 128, 197, 256, 384, 512, 1024, 2048)
_CLASSES = (2, 10, 100, 1000, 1000, 21841, 30522, 32000, 50257, 128256)


def cases() -> Iterator[Case]:
    """Every normalisation to measure."""
    yield from _batch_norms()
    rows = [(one_of((2048, 4096, 8192, 16384, 50176), i), w) for i, w in enumerate(_WIDTHS)]
    for i, (m, n) in enumerate(rows + list(wholes(34, (64, 262144), (32, 16384)))):
        yield from _each("layer_norm", i, m=m, n=n)
        if i % 3 == 0:
            yield from _each("rms_norm", 1, m=m, n=n)
    for i, s in enumerate(_SCORES):
        yield from _each("softmax", i, m=s * one_of((96, 192, 384, 384, 768), i), n=s)
    for i, (m, n) in enumerate(wholes(26, (256, 1048576), (16, 8192))):
        yield from _each("softmax", i, m=m, n=n)
    for i, n in enumerate(_CLASSES * 2):
        m = one_of((32, 64, 128, 256), i) if n < 30000 else one_of((1024, 4096, 8192), i)
        yield from _each("cross_entropy", i, m=m, n=n)
    for i, point in enumerate(fill(16, (2, 64), (32, 1024), (8, 128))):
        n, c, side = round(point[0]), round(point[1] / 32) * 32, round(point[2])
        yield from _each("group_norm", i, n=n, c=c, h=side, w=side, groups=32)


def _each(op: str, i: int, **shape: int) -> Iterator[Case]:
    size = shape["m"] * shape["n"] if "m" in shape else shape["n"] * shape["c"] * shape["h"] ** 2
    if size > 6e8:
        return
    for dtype in ("fp32", "bf16") + (("fp16",) if i % 3 == 0 else ()):
        for direction in _BOTH:
            yield case(op, direction, dtype, "-", **shape)


def _batch_norms() -> Iterator[Case]:
    layers = published("conv")[::4]
    known = [(int(v["k"]), max(1, int(v["h"]) // int(v["stride"]))) for v in layers]
    drawn = [(round(c / 8) * 8, round(h)) for c, h in fill(25, (8, 2048), (4, 224))]
    for i, (c, side) in enumerate(dict.fromkeys(known + drawn)):
        n = one_of((16, 32, 32, 64, 64, 64, 128, 128, 256), i)
        while n > 2 and n * c * side * side > 2e8:
            n //= 2
        for dtype, layout in (
            ("fp32", "nchw"),
            ("bf16", "nchw"),
            ("fp32", "nhwc"),
            ("bf16", "nhwc"),
        ):
            for direction in _BOTH:
                yield case("batch_norm", direction, dtype, layout, n=n, c=c, h=side, w=side)
                if dtype == "bf16" and i % 3 == 0:
                    yield case("batch_norm", direction, "fp16", layout, n=n, c=c, h=side, w=side)


def batch_norm(case: Case, place: Place) -> Call:
    """Batch norm in training: statistics of the batch, running ones updated."""
    c, dims = case["c"], (case["n"], case["c"], case["h"], case["w"])
    x = place.image(*dims, dtype=case.dtype, layout=case.layout, grad=True)
    weight, bias = place.randn(c, grad=True), place.randn(c, grad=True)
    mean, var = torch.zeros(c, device=place.device), torch.ones(c, device=place.device)

    def function(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, mean, var, weight, bias, training=True)

    return forward_or_backward(case, function, (x, weight, bias))


def row_norm(case: Case, place: Place) -> Call:
    """Layer or RMS norm of rows."""
    m, n = case["m"], case["n"]
    x, weight = (place.randn(*dims, dtype=case.dtype, grad=True) for dims in ((m, n), (n,)))
    if case.op == "rms_norm":
        return forward_or_backward(case, lambda x, w: F.rms_norm(x, (n,), w), (x, weight))
    bias = place.randn(n, dtype=case.dtype, grad=True)
    return forward_or_backward(case, lambda x, w, b: F.layer_norm(x, (n,), w, b), (x, weight, bias))


def group_norm(case: Case, place: Place) -> Call:
    """Group norm of an image."""
    dims = (case["n"], case["c"], case["h"], case["w"])
    x, groups = place.randn(*dims, dtype=case.dtype, grad=True), case["groups"]
    weight, bias = (place.randn(case["c"], dtype=case.dtype, grad=True) for _ in range(2))
    return forward_or_backward(
        case, lambda x, w, b: F.group_norm(x, groups, w, b), (x, weight, bias)
    )


def softmax(case: Case, place: Place) -> Call:
    """Softmax of rows."""
    x = place.randn(case["m"], case["n"], dtype=case.dtype, grad=True)
    return forward_or_backward(case, lambda x: F.softmax(x, dim=-1), (x,))


def cross_entropy(case: Case, place: Place) -> Call:
    """Log-softmax of rows and the negative log likelihood of one class each."""
    x = place.randn(case["m"], case["n"], dtype=case.dtype, grad=True)
    target = place.whole(case["n"], case["m"])
    return forward_or_backward(case, lambda x: F.cross_entropy(x, target), (x,))


BUILD: dict[str, Build] = {
    "batch_norm": batch_norm,
    "layer_norm": row_norm,
    "rms_norm": row_norm,
    "group_norm": group_norm,
    "softmax": softmax,
    "cross_entropy": cross_entropy,
}
