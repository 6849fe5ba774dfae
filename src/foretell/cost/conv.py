"""Convolutions as the matmuls a library turns them into, and the fastest of its ways.

An image of n×c×h×w meets k filters of (c/groups)×r×s and leaves n×k×p×q.

    direct     implicit product: fwd (npq)×k over crs, dgrad (nhw)×c over krs/stride²,
               wgrad k×(crs) over npq; A is read once though it is used r·s times (→ `_direct`)
    winograd   r = s = 3, stride 1, vector pipe: (f+2)² matmuls of (npq/f²)×k over c, in one kernel
               for f = 2, in passes through memory for f = 4 (→ `_winograd`)
    depthwise  groups = c = k: no product, every element is touched r·s times (→ `_depthwise`)
    grouped    one kernel where groups are 4, 8, 16 or 32 channels wide; else one group after the
               other, each cut out of the image and put into the result (→ `_one_by_one`)
    layout     matrix units want channels last: other layouts are turned over and back, except a
               1×1 convolution, which is a plain product either way (→ `_turned`)
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.cost import gemm
from foretell.cost.limits import Limits

Array = npt.NDArray[np.float64]
Fitted = Mapping[str, float]

# Tiles of `scudnn_128x64`, `xmma_fprop_implicit_gemm_…_tilesize128x128`: pixels × filters.
_TILES = np.array([(128, 128), (128, 64), (128, 32), (64, 64), (32, 32)], float).T
# `scudnn_winograd_128x128_…_tile148` works on patches of 2×2 pixels in blocks that cover 8×8 of
# them, 32 filters at a time; the passes with f = 4 call the sgemm tiles.
_WINOGRAD_TILES = {
    2: np.array([(128, 32)], float).T,
    4: np.array([(128, 128), (64, 128), (64, 64)], float).T,
}
_WIDTHS = (4.0, 8.0, 16.0, 32.0)  # channels of a group that one kernel treats all groups of
# Depthwise kernels of halves with channels last take this share of the time (conv2d rows of
# tables/measured/h200.csv.gz with groups = c, bf16 and fp16, nhwc, 50 µs or more; sums of seconds).
_CHANNELS_LAST = {"conv": 0.38, "conv_dgrad": 0.22, "conv_wgrad": 0.22}


@dataclass(frozen=True)
class Conv:
    """Convolutions as columns of one length; `nhwc` is 1 where channels are last in memory."""

    n: Array
    c: Array
    h: Array
    w: Array
    k: Array
    r: Array
    s: Array
    stride: Array
    groups: Array
    p: Array
    q: Array
    nhwc: Array

    def __getitem__(self, rows: Any) -> "Conv":
        return Conv(**{name: column[rows] for name, column in vars(self).items()})

    @property
    def sizes(self) -> tuple[Array, Array, Array]:
        """Elements of the input, the filters and the output."""
        filters = self.k * self.c / self.groups * self.r * self.s
        return self.n * self.c * self.h * self.w, filters, self.n * self.k * self.p * self.q


def seconds(limits: Limits, product: Fitted, fitted: Fitted, op: str, asked: Conv) -> Array:
    """Time of each convolution, `op` being conv, conv_dgrad or conv_wgrad."""
    out = _direct(limits, product, fitted, op, asked)
    out += _turned(limits, fitted, asked)
    plain = (asked.r == 3) & (asked.s == 3) & (asked.stride == 1) & (asked.groups == 1)
    if limits.pipe == "simt" and plain.any():
        for f in (2, 4):
            out[plain] = np.minimum(
                out[plain], _winograd(limits, product, fitted, op, asked[plain], f)
            )
    apart = _is_apart(limits, asked)
    if apart.any():
        out[apart] = _one_by_one(limits, product, fitted, op, asked[apart])
    alone = (asked.groups > 1) & (asked.groups == asked.c)
    out[alone] = _depthwise(limits, fitted, op, asked[alone])
    return out


def _direct(limits: Limits, product: Fitted, fitted: Fitted, op: str, a: Conv) -> Array:
    image, filters, result = a.sizes
    c, k = a.c / a.groups, a.k / a.groups
    pixels, window = a.n * a.p * a.q, a.r * a.s
    if op == "conv_dgrad":
        m, n, depth = a.n * a.h * a.w, c, k * window / a.stride**2
        fetched = result / a.groups, filters / a.groups
    elif op == "conv_wgrad":
        m, n, depth = k, c * window, pixels
        fetched = result / a.groups, image / a.groups
    else:
        m, n, depth = pixels, k, c * window
        fetched = image / a.groups, filters / a.groups
    align = _align(a, c, k) * limits.size
    asked = gemm.Product(a.groups, m, n, depth, np.zeros(len(m)), align, fetched)
    tiles = _TILES[0], _TILES[1]
    time = gemm.best(limits, product, asked, tiles, may_split=True)
    one = (a.r == 1) & (a.s == 1)
    slow = np.where(one, fitted[f"slow_{op}_1x1"], fitted[f"slow_{op}"])
    slow = slow * limits.fitted[f"conv_{limits.pipe}"]
    slow = slow * np.where(a.stride > 1, fitted[f"slow_{op}_strided"], 1.0)
    out: Array = time * (1 + (slow - 1) * limits.ease)
    return out


def _is_apart(limits: Limits, a: Conv) -> npt.NDArray[np.bool_]:
    """Groups that cuDNN has no kernel of matrix units for.

    Grouped rows of `tables/measured/h200.csv.gz` in halves with channels last run 1 to 5 kernels
    where groups are 8, 16 or 32 wide, and 3 kernels a group where they are 56 wide.
    """
    width = a.c / a.groups
    is_known = (width == a.k / a.groups) & np.isin(width, _WIDTHS)
    found: npt.NDArray[np.bool_] = (a.groups > 1) & (a.nhwc > 0) & ~is_known
    return found & (limits.pipe == "tensor")


def _one_by_one(limits: Limits, product: Fitted, fitted: Fitted, op: str, a: Conv) -> Array:
    """Each group as a convolution of its own, and passes that cut it out and put it back."""
    image, _, result = a.sizes
    one = replace(a, c=a.c / a.groups, k=a.k / a.groups, groups=np.ones(len(a.n)))
    each = _direct(limits, product, fitted, op, one) + 2 * limits.floor
    stream = limits.stream * fitted["stream"]
    out: Array = a.groups * each + 2 * (image + result) * limits.size / stream
    return out


def _align(a: Conv, c: Array, k: Array) -> Array:
    """Elements that rows start at multiples of: pixels lie together unless channels are last."""
    channels = np.gcd(np.gcd(c.astype(int), k.astype(int)), 16)
    pixels = np.gcd((a.p * a.q).astype(int), 16)
    plain = (a.r == 1) & (a.s == 1) & (a.stride == 1) & (a.nhwc == 0)
    out: Array = np.where(plain, pixels, channels).astype(float)
    return out


def _winograd(limits: Limits, product: Fitted, fitted: Fitted, op: str, a: Conv, f: int) -> Array:
    image, filters, result = a.sizes
    points = float((f + 2) ** 2)
    side = 8 if f == 2 else f
    tiles = a.n * np.ceil(a.p / side) * np.ceil(a.q / side) * (side / f) ** 2
    m, n, depth = {
        "conv": (tiles, a.k, a.c),
        "conv_dgrad": (tiles, a.c, a.k),
        "conv_wgrad": (a.k, a.c, tiles),
    }[op]
    many, zero = np.full(len(m), points), np.zeros(len(m))
    fetched = (image / points, filters / points) if f == 2 else (m * depth, n * depth)
    asked = gemm.Product(many, m, n, depth, zero, np.full(len(m), 16.0), fetched)
    shapes = _WINOGRAD_TILES[f][0], _WINOGRAD_TILES[f][1]
    time = gemm.best(limits, product, asked, shapes, may_split=op == "conv_wgrad")
    time = time * fitted[f"slow_winograd{f}"] * limits.fitted["winograd"]
    if f == 2:
        return time
    # the transformed tensors are written by one pass and read by the next
    grown = tiles * points * (a.c + a.k) + filters / 9 * points
    passes = (image + result + filters + grown) * limits.size
    stream = limits.stream * fitted["stream"]
    return time + passes / stream + 2 * limits.floor


def _depthwise(limits: Limits, fitted: Fitted, op: str, a: Conv) -> Array:
    image, _, result = a.sizes
    touched = image if op == "conv_dgrad" else result
    cycles = fitted[f"depthwise_{op}"] + fitted[f"depthwise_{op}_tap"] * a.r * a.s
    if limits.pipe == "tensor":
        cycles = cycles * np.where(a.nhwc > 0, _CHANNELS_LAST[op], 1.0)
    out: Array = touched * cycles / (limits.units * limits.clock) + limits.floor
    return out


def _turned(limits: Limits, fitted: Fitted, a: Conv) -> Array:
    """Passes that turn the image and the result to channels last and back."""
    if limits.pipe != "tensor":
        return np.zeros(len(a.n))
    image, _, result = a.sizes
    stream = limits.stream * fitted["stream"]
    turned = 2 * (image + result) * limits.size / stream + 3 * limits.floor
    plain = (a.nhwc > 0) | ((a.r == 1) & (a.s == 1) & (a.stride == 1))
    return np.where(plain, 0.0, turned)
