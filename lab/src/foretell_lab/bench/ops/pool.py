"""Pooling and resizing of images, forward and backward, in both memory layouts.

max_pool, avg_pool   windows of r×r, `stride` apart, padded where r is odd
adaptive_pool        to out×out cells by average
nearest, bilinear    `times` larger sides
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F

from foretell_lab.bench.call import Build, Call, Place, forward_or_backward
from foretell_lab.bench.case import Case, case, dims, fill, one_of

# Layers of ResNet, VGG, AlexNet, DenseNet, Inception, U-Net: channels, side, window, stride.
_KNOWN = dims("64x112x3x2 64x224x2x2 128x112x2x2 256x56x2x2 512x28x2x2 64x55x3x2 192x27x3x2")
_KNOWN += dims("256x13x3x2 192x35x3x1 768x17x3x1")
_GLOBAL = dims("512x7x1 2048x7x1 1280x7x1 1024x7x1 512x7x7 256x6x6 960x7x1 72x28x1 480x14x1")
_GLOBAL += dims("1920x7x1 96x112x1 240x14x1")


def cases() -> Iterator[Case]:
    """Every pooling to measure."""
    drawn = [
        (round(c / 8) * 8, round(h), 2 + i % 2, 2)
        for i, (c, h) in enumerate(fill(10, (16, 512), (8, 200)))
    ]
    for i, (c, side, r, stride) in enumerate([*_KNOWN, *drawn]):
        shape = {"n": _batch(i, c, side), "c": c, "h": side, "w": side, "r": r, "stride": stride}
        yield from _each("max_pool", shape)
        if i % 2:
            yield from _each("avg_pool", shape)
    for i, (c, side, out) in enumerate(_GLOBAL):
        yield from _each(
            "adaptive_pool", {"n": _batch(i, c, side), "c": c, "h": side, "w": side, "out": out}
        )
    for i, point in enumerate(fill(12, (16, 512), (7, 128))):
        c, side = round(point[0] / 8) * 8, round(point[1])
        shape = {"n": _batch(i, c, 2 * side), "c": c, "h": side, "w": side, "times": 2}
        yield from _each(one_of(("nearest", "bilinear"), i), shape)


def _batch(i: int, c: int, side: int) -> int:
    return max(1, min(one_of((16, 32, 64, 64, 128), i), int(2e8 / (c * side * side))))


def _each(op: str, shape: dict[str, int]) -> Iterator[Case]:
    for dtype in ("fp32", "bf16"):
        for layout in ("nchw", "nhwc"):
            for direction in ("forward", "backward"):
                yield case(op, direction, dtype, layout, **shape)


def pool(case: Case, place: Place) -> Call:
    """A pooling or resizing of one image batch."""
    dims = (case["n"], case["c"], case["h"], case["w"])
    x = place.image(*dims, dtype=case.dtype, layout=case.layout, grad=True)
    r, stride = case.size("r", 2), case.size("stride", 2)
    functions = {
        "max_pool": lambda x: F.max_pool2d(x, r, stride, (r - 1) // 2),
        "avg_pool": lambda x: F.avg_pool2d(x, r, stride, (r - 1) // 2),
        "adaptive_pool": lambda x: F.adaptive_avg_pool2d(x, case["out"]),
        "nearest": lambda x: F.interpolate(x, scale_factor=case["times"]),
        "bilinear": lambda x: F.interpolate(
            x, scale_factor=case["times"], mode="bilinear", align_corners=False
        ),
    }
    return forward_or_backward(case, functions[case.op], (x,))


_OPS = ("max_pool", "avg_pool", "adaptive_pool", "nearest", "bilinear")
BUILD: dict[str, Build] = dict.fromkeys(_OPS, pool)
