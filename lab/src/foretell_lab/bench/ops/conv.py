"""Convolutions of images, volumes and rows, with both gradients, in both memory layouts.

Padding is (r − 1)/2 where filters overlap and 0 where they do not (patches), so that the output
of stride 1 has the size of the input. `convt2d` is the transposed convolution. A volume keeps its
depth: strides are of its height and width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from foretell_lab.bench.call import Build, Call, Place
from foretell_lab.bench.case import Case, case, dims, fill, one_of, published, snap

_PARTS = ("forward", "dgrad", "wgrad")
_BATCHES = (8, 16, 16, 32, 32, 32, 64, 64, 64, 64, 128, 128, 256)
# What a what-if compares: always these, and the rest for every third layer.
_ALWAYS = (("fp32", "nchw"), ("tf32", "nchw"), ("bf16", "nchw"), ("bf16", "nhwc"))
_OFTEN = (("fp32", "nhwc"), ("tf32", "nhwc"), ("fp16", "nchw"), ("fp16", "nhwc"))
_VOLUMES = "8x3x64x3x3x16x112 8x64x128x3x3x16x56 8x128x256x3x3x8x28 8x256x256x3x3x8x28"
_VOLUMES += " 8x256x512x3x3x4x14 8x64x144x1x3x16x56 8x144x64x3x1x16x56 2x32x32x3x3x64x64"
_VOLUMES += " 2x32x64x3x3x32x64 2x64x128x3x3x32x32 4x4x16x3x3x128x128 4x16x32x3x3x64x64"
_VOLUMES += " 4x32x64x3x3x32x32 4x64x128x3x3x16x16 1x1x32x3x3x128x128"
_TRANSPOSED = "64x512x256x4x4 64x256x128x4x8 64x128x64x4x16 64x64x3x4x32 8x1024x512x2x16"
_TRANSPOSED += " 8x512x256x2x32 8x256x128x2x64 8x128x64x2x128 128x256x256x2x14"


def cases() -> Iterator[Case]:
    """Every convolution to measure."""
    for i, layer in enumerate(published("conv")):
        shape = {key: int(value) for key, value in layer.items() if key != "network"}
        batch = _batch(i, shape)
        yield from _each_way("conv2d", i, {"n": batch, **shape})
        other = batch // 2 if i % 3 == 2 and batch > 8 else 2 * batch
        yield from _each_way("conv2d", 1, {"n": other, **shape})  # the same layer, another batch
    for i, shape in enumerate(_drawn()):
        yield from _each_way("conv2d", i, shape)
    for i, shape in enumerate(_volumes()):
        yield from _each_way("conv3d", 3 * i + 1, shape)
    for i, shape in enumerate([*_more_volumes(), *_clips()]):
        yield from _each_way("conv3d", i, shape)
    for i, shape in enumerate([*_lines(), *_ends()]):
        yield from _each_way("conv2d", 3 * i + 1, shape)
    for i, shape in enumerate(_transposed()):
        yield from _each_way("convt2d", 3 * i + 1, shape)


def _each_way(op: str, i: int, shape: dict[str, int]) -> Iterator[Case]:
    for dtype, layout in _ALWAYS + (_OFTEN if i % 3 == 0 else ()):
        for part in _PARTS:
            if part != "dgrad" or shape["c"] > 4:  # nothing asks for the gradient of a picture
                yield case(op, part, dtype, layout, **shape)


def _batch(i: int, shape: dict[str, int]) -> int:
    """A usual batch, halved until the larger image is at most 200 M elements."""
    pixels = shape["h"] * shape["w"] * max(shape["c"], shape["k"] // shape["stride"] ** 2)
    batch = one_of(_BATCHES, i)
    while batch > 1 and batch * pixels > 2e8:
        batch //= 2
    return batch


def _drawn() -> Iterator[dict[str, int]]:
    """Layers that were not published: filters of 1, 3, 5, 7, dense, grouped and depthwise."""
    for i, point in enumerate(fill(90, (8, 256), (8, 1024), (8, 1024), (7, 224))):
        c, k = snap(point[1], (16, 8, 32, 1)[i % 4]), snap(point[2], (16, 8, 32, 1)[i % 4])
        groups = (1, 1, 1, 0, 1, 4)[i % 6] or c
        c, k = (c, c) if groups == c else (-(-c // groups) * groups, -(-k // groups) * groups)
        side = round(point[3])
        shape = {
            "c": c,
            "k": k,
            "r": one_of((1, 1, 3, 3, 3, 5, 7), i),
            "stride": 2 if i % 4 == 2 else 1,
        }
        shape |= {"s": shape["r"], "groups": groups, "h": side, "w": side}
        batch = max(1, min(round(point[0]), int(1e8 / (side * side * max(c, k)))))
        yield _ordered({"n": batch, **shape})


def _volumes() -> Iterator[dict[str, int]]:
    """Video and volume networks: C3D, R(2+1)D, 3-D U-Net, CosmoFlow."""
    for n, c, k, r, s, t, h in dims(_VOLUMES):
        yield {
            "n": n,
            "c": c,
            "k": k,
            "r": r,
            "s": s,
            "stride": 1,
            "groups": 1,
            "t": t,
            "h": h,
            "w": h,
        }


# Batch, channels in and out, taps along time and across, stride, groups, frames, side.
_CLIPS = "8x64x64x1x3x1x1x4x28 8x256x64x1x1x1x1x4x28 8x64x256x1x1x1x1x4x28 8x128x128x1x3x2x1x4x28"
_CLIPS += " 8x512x256x3x1x1x1x4x14 8x8x8x1x3x1x1x32x28 8x32x8x3x1x1x1x32x28 8x8x32x1x1x1x1x32x28"
_CLIPS += " 8x3x64x1x7x2x1x8x112 8x3x8x5x7x2x1x32x112 8x45x64x3x1x1x1x8x56 8x64x144x1x3x1x1x8x56"
_CLIPS += " 8x54x54x3x3x1x54x13x80 8x108x108x3x3x1x108x13x40 8x216x216x3x3x1x216x13x20"
_CLIPS += " 8x54x54x3x3x2x54x13x80 8x432x432x3x3x1x432x13x10 8x24x24x5x1x1x24x13x80"
_CLIPS += (
    " 8x24x54x1x1x1x1x13x80 8x96x216x1x1x1x1x13x20 8x216x96x1x1x1x1x13x20 4x1x32x3x3x1x1x64x64"
)
_CLIPS += " 16x64x64x3x3x1x1x8x56 16x128x128x3x3x1x1x4x28 16x256x256x3x3x1x1x2x14"


def _more_volumes() -> Iterator[dict[str, int]]:
    """Volumes as they fall: cubes and clips, filters deep, flat and of one tap."""
    draws = fill(40, (1, 32), (4, 512), (8, 512), (4, 64), (7, 64))
    for i, (n, c, k, t, h) in enumerate(draws):
        c, k = snap(c, (16, 8, 32, 1)[i % 4]), snap(k, (16, 8, 32)[i % 3])
        t, h = round(t), round(h)
        r, s = ((3, 3), (1, 3), (3, 1), (1, 1), (3, 3), (5, 3))[i % 6]
        n = max(1, min(round(n), int(6e7 / (t * h * h * max(c, k)))))
        if n * t * h * h * max(c, k) < 2e8:
            yield _volume(n, c, k, r, s, 2 if i % 5 == 3 else 1, 1, t, h)


def _clips() -> Iterator[dict[str, int]]:
    """Layers of SlowFast, R(2+1)D, X3D, 3-D ResNets."""
    for sizes in dims(_CLIPS):
        yield _volume(*sizes)


def _volume(
    n: int, c: int, k: int, r: int, s: int, stride: int, groups: int, t: int, h: int
) -> dict[str, int]:
    return {
        "n": n, "c": c, "k": k, "r": r, "s": s, "stride": stride, "groups": groups,
        "t": t, "h": h, "w": h,
    }  # fmt: skip


# Batch, channels in and out, taps, stride, groups, length: speech nets, vocoders, Mamba, Conformer.
_LINES = "8x768x768x128x1x16x250 8x512x512x3x2x1x8000 8x512x512x3x2x1x2000 8x512x512x2x2x1x500"
_LINES += " 8x1x512x10x5x1x80000 8x80x384x3x1x1x3000 8x384x384x3x2x1x3000 16x256x256x31x1x256x200"
_LINES += " 16x512x512x15x1x512x400 8x1024x1024x4x1x1024x512 16x256x256x7x1x1x512"
_LINES += " 16x128x128x3x1x1x512 16x128x128x11x1x1x512 16x64x64x7x1x1x4096 16x32x32x11x1x1x8192"
_LINES += " 16x16x16x3x1x1x16384 16x1024x1024x128x1x16x400 4x64x128x2x1x1x8000 4x64x64x1x1x1x8000"
_LINES += " 64x64x128x1x1x1x2048 64x128x1024x1x1x1x2048 8x512x512x32x1x8x600 8x256x256x64x1x4x1000"
_LINES += " 32x384x384x9x1x384x256 16x768x768x65x1x32x300 16x256x512x5x2x2x1200"


def _lines() -> Iterator[dict[str, int]]:
    """1-D convolutions, as images of one row."""
    for n, c, k, taps, stride, groups, length in dims(_LINES):
        yield {"n": n, "c": c, "k": k, "r": 1, "s": taps, "stride": stride, "groups": groups, "h": 1, "w": length}  # noqa: E501  # fmt: skip


# Batch, channels in and out, taps, stride, side: first and last layers, whose channels are odd.
_ENDS = "8x256x21x1x1x64 8x256x19x1x1x128 8x512x150x1x1x64 8x48x3x1x1x256 16x64x1x1x1x128"
_ENDS += " 4x256x91x1x1x64 8x128x2x1x1x256 32x64x3x3x1x64 64x128x3x3x1x32 16x128x4x3x1x32"
_ENDS += " 16x320x4x3x1x32 8x64x1x3x1x128 512x4x32x8x4x84 640x3x16x3x1x64 128x4x32x8x4x84"
_ENDS += " 64x4x320x3x1x32 32x3x64x3x1x64 64x3x128x3x1x32 8x1x48x3x1x256 8x3x32x3x2x512"
_ENDS += " 8x1x64x7x1x256 16x9x64x5x2x64 256x32x64x4x2x20 256x64x64x3x1x9 8x256x36x3x1x32"


def _ends() -> Iterator[dict[str, int]]:
    """The first layers of nets over pictures and frames, the last of those that make maps."""
    for n, c, k, r, stride, side in dims(_ENDS):
        yield {"n": n, "c": c, "k": k, "r": r, "s": r, "stride": stride, "groups": 1, "h": side, "w": side}  # noqa: E501  # fmt: skip


def _transposed() -> Iterator[dict[str, int]]:
    """Generators and decoders: DCGAN, U-Net, the masks of Mask R-CNN."""
    for n, c, k, r, h in dims(_TRANSPOSED):
        yield {"n": n, "c": c, "k": k, "r": r, "s": r, "stride": 2, "groups": 1, "h": h, "w": h}


def _ordered(shape: dict[str, int]) -> dict[str, int]:
    return {key: shape[key] for key in ("n", "c", "k", "r", "s", "stride", "groups", "h", "w")}


def padding(case: Case) -> list[int]:
    """Padding of each spatial dim."""
    pads = [(f - 1) // 2 if case["stride"] < f else 0 for f in (case["r"], case["s"])]
    return [pads[0], pads[1], pads[1]] if case.op == "conv3d" else pads


def convolution(case: Case, place: Place) -> Call:
    """A convolution or one of its gradients."""
    stride, pads, groups = [case["stride"]] * len(padding(case)), padding(case), case["groups"]
    if case["h"] == 1 or case.op == "conv3d":
        stride[0] = 1
    x, weight = _operands(case, place)
    transposed, zeros = case.op == "convt2d", [0] * len(pads)
    ones = [1] * len(pads)

    def forward() -> torch.Tensor:
        return torch.convolution(x, weight, None, stride, pads, ones, transposed, zeros, groups)

    if case.direction == "forward":
        x.requires_grad_(), weight.requires_grad_()
        return Call(forward, fresh=(x.detach(),))
    gradient = torch.randn_like(forward())
    mask = [case.direction == "dgrad", case.direction == "wgrad", False]
    call = torch.ops.aten.convolution_backward
    settings = (stride, pads, ones, transposed, zeros, groups, mask)
    return Call(lambda: call(gradient, x, weight, None, *settings), fresh=(gradient,))


def _operands(case: Case, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
    n, c, k, r, s = (case[name] for name in "nckrs")
    depth = [case["t"]] if case.op == "conv3d" else []
    deep = [r] if case.op == "conv3d" else []
    tall = s if case.op == "conv3d" else r
    ends = (c, k) if case.op == "convt2d" else (k, c // case["groups"])
    x = place.image(n, c, *depth, case["h"], case["w"], dtype=case.dtype, layout=case.layout)
    weight = place.image(*ends, *deep, tall, s, dtype=case.dtype, layout=case.layout)
    return x, weight


BUILD: dict[str, Build] = dict.fromkeys(("conv2d", "conv3d", "convt2d"), convolution)
