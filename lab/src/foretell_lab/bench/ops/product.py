"""matmuls: linear layers with their two gradients, and batched matmuls.

linear   forward y = x·Wᵀ + b, dgrad gy·W, wgrad gyᵀ·x;  m rows, n features out, k in
         layout nk: W is stored n×k (torch.nn.Linear); kn: k×n (HF Conv1D, plain matmul)
bmm      layout nn, nt, tn: which operand is read transposed
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from foretell_lab.bench.call import Build, Call, Place
from foretell_lab.bench.case import Case, case, dims, one_of, wholes

_PARTS = ("forward", "dgrad", "wgrad")
# Widths of published transformers, BERT-tiny to Llama-70B, and what their blocks multiply.
_WIDTHS = (128, 256, 384, 512, 768, 768, 1024, 1024, 1280, 1536, 1600, 2048, 2560, 4096, 5120, 8192)
_ROWS = (256, 512, 1024, 2048, 4096, 4096, 8192, 8192, 16384)
_BLOCKS = ((1, 1), (3, 1), (4, 1), (1, 4), (8 / 3, 1), (1, 8 / 3), (2, 1))
_VOCABULARIES = (30522, 50257, 50265, 32000, 32128, 51200, 119547, 128256)
# Windowed transformers stage by stage (Swin): rows of one image × width.
_WINDOWS = dims("3136x96 784x192 196x384 49x768")
# Heads of convolutional networks and layers of recommenders (DLRM, NCF, Wide & Deep, DeepFM).
_HEADS = dims("512x1000 1024x1000 1280x1000 2048x1000 4096x1000 25088x4096 4096x4096 9216x4096")
_HEADS += dims("960x1280 2048x10 512x100")
_TOWERS = dims("13x512 512x256 256x64 415x1024 479x1024 1024x1024 1024x512 256x1 432x400 400x400")
_TOWERS += dims("128x64 64x32 367x512 39x16")


def cases() -> Iterator[Case]:
    """Every product to measure."""
    for i, (m, n, k) in enumerate(_linear_sizes()):
        for dtype in ("fp32", "tf32", "bf16") + (("fp16",) if i % 3 == 0 else ()):
            for part in _PARTS:
                yield case("linear", part, dtype, "kn" if i % 7 == 3 else "nk", m=m, n=n, k=k)
                if i % 4 == 1 and dtype != "tf32":  # the same layer at twice the batch
                    yield case("linear", part, dtype, "nk", m=2 * m, n=n, k=k)
    for i, (b, m, n, k) in enumerate(_batched_sizes()):
        for dtype in ("fp32", "tf32", "bf16") + (("fp16",) if i % 3 == 0 else ()):
            for layout in ("nn", "nt", "tn"):
                yield case("bmm", "forward", dtype, layout, b=b, m=m, n=n, k=k)


def _linear_sizes() -> Iterator[tuple[int, ...]]:
    for i, width in enumerate(_WIDTHS * 6):
        out, into = _BLOCKS[i % len(_BLOCKS)]
        yield one_of(_ROWS, i), _even(width * out), _even(width * into)
    for i in range(16):
        yield (
            one_of((1024, 2048, 4096, 8192), i),
            one_of(_VOCABULARIES, i),
            one_of((512, 768, 1024), i),
        )
    for i, (rows, width) in enumerate(_WINDOWS * 4):
        out, into = _BLOCKS[i // 4 % 4]
        yield rows * one_of((32, 64, 64, 128), i), _even(width * out), _even(width * into)
    for i, (into, out) in enumerate(_HEADS + _HEADS[:4]):
        yield one_of((32, 64, 64, 128, 256), i), out, into
    for i, (into, out) in enumerate(_TOWERS * 2):
        yield one_of((512, 1024, 2048, 2048, 4096, 8192, 32768), i), out, into
    yield from wholes(150, (16, 131072), (16, 16384), (16, 16384))


def _batched_sizes() -> Iterator[tuple[int, ...]]:
    for i in range(24):  # attention written out: scores s×s over d, then values
        heads = one_of((4, 8, 12, 12, 16), i) * one_of((4, 8, 16, 32), i + 5)
        rows, depth = (
            one_of((64, 128, 128, 197, 256, 384, 512, 1024), i),
            one_of((32, 64, 64, 128), i),
        )
        yield (heads, rows, rows, depth) if i % 2 else (heads, rows, depth, rows)
    for i in range(8):  # windows of 7×7 patches (Swin)
        windows = one_of((64, 32, 16, 128), i) * (4096, 3072, 1536, 768)[i % 4] // 16
        yield (windows, 49, 49, 32) if i % 2 else (windows, 49, 32, 49)
    for i in range(6):  # dot interactions of recommenders
        yield (
            one_of((512, 2048, 8192), i),
            (27, 40, 9)[i % 3],
            (27, 40, 9)[i % 3],
            one_of((16, 64, 128), i),
        )
    yield from wholes(50, (2, 2048), (16, 2048), (16, 2048), (16, 1024))


def _even(value: float) -> int:
    return round(value / 8) * 8


def linear(case: Case, place: Place) -> Call:
    """One of the three matmuls of a linear layer."""
    m, n, k = case["m"], case["n"], case["k"]
    weight = _weight(case, place)
    if case.direction == "forward":
        x = place.randn(m, k, dtype=case.dtype, grad=True)
        bias = place.randn(n, dtype=case.dtype, grad=True)
        weight.requires_grad_()
        return Call(lambda: F.linear(x, weight, bias), fresh=(x,))
    gradient = place.randn(m, n, dtype=case.dtype)
    if case.direction == "dgrad":
        return Call(lambda: torch.mm(gradient, weight), fresh=(gradient,))
    x = place.randn(m, k, dtype=case.dtype)
    if case.layout == "kn":
        return Call(lambda: torch.mm(x.t(), gradient), fresh=(gradient,))
    return Call(lambda: torch.mm(gradient.t(), x), fresh=(gradient,))


def _weight(case: Case, place: Place) -> torch.Tensor:
    """The n×k weight, whichever way it is stored."""
    if case.layout == "kn":
        return place.randn(case["k"], case["n"], dtype=case.dtype).t()
    return place.randn(case["n"], case["k"], dtype=case.dtype)


def bmm(case: Case, place: Place) -> Call:
    """A batch of matmuls, one operand perhaps read transposed."""
    b, m, n, k = case["b"], case["m"], case["n"], case["k"]
    left = place.randn(*((b, k, m) if case.layout == "tn" else (b, m, k)), dtype=case.dtype)
    right = place.randn(*((b, n, k) if case.layout == "nt" else (b, k, n)), dtype=case.dtype)
    first = left.transpose(1, 2) if case.layout == "tn" else left
    second = right.transpose(1, 2) if case.layout == "nt" else right
    return Call(lambda: torch.bmm(first, second), fresh=(left,))


BUILD: dict[str, Build] = {"linear": linear, "bmm": bmm}
