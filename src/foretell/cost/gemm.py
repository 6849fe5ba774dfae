"""Matmuls as a library runs them, tile by tile, and convolutions as the matmuls they become.

The kernel is the fastest of a few tile shapes (tₘ×tₙ) and ways to split k, s, each costing

    compute   c = b·⌈m/tₘ⌉·⌈n/tₙ⌉·s blocks, o at a time on each of U units, in whole waves; a block
              is 2·tₘ·tₙ·(k/s + k₀) flop at the tile's efficiency e₀·a/(a + a₀), a = tₘtₙ/(tₘ+tₙ)
              (its flop per byte); too few resident blocks hide latency less (→ `_compute`)
    power     a board sustains watts/energy flop/s; its rate falls towards that (→ `throttled`)
    memory    one wave reads the rows of A and columns of B under it once; the next wave reads them
              again unless the second-level cache kept them (→ `_traffic`, `_memory`)
    fabric    every block reads its (tₘ + tₙ)·k operands through the cache (→ `_fabric`)

and overlapping, so that t = (Σ tᵢᵖ)^(1/p) + start. A split adds a pass over the partial sums.

Convolutions as the matmuls a library turns them into, and the fastest of its ways.

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
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell import portable
from foretell.cost.limits import Limits, nearest

Array = npt.NDArray[np.float64]
Fitted = Mapping[str, float]
Tile = tuple[Array, Array]  # rows and columns of C
# Tiles (rows × columns of a row-major C) that libraries choose from, by the names of their kernels:
# `volta_sgemm_32x128_tn` in NeuSight's columns (32 columns by 128 rows),
# `cutlass_80_simt_sgemm_256x128`, `sm80_xmma_gemm_…_tilesize64x64x8` in the traces of the H200.
_VOLTA = ((128, 128), (64, 128), (64, 64), (128, 32), (32, 128), (32, 64), (32, 32))
_NEW = ((256, 128), (128, 256), (128, 128), (64, 128), (128, 64), (64, 64), (128, 32), (32, 128))
_SGEMM = {
    "pascal": ((128, 32), (64, 64), (32, 128)),
    "volta": _VOLTA,
    "turing": _VOLTA,
    "ampere": ((64, 128), (128, 32), (32, 128), (64, 64), (32, 64), (32, 32)),
    "hopper": (*_NEW, (32, 32)),
}
_SGEMM_BATCHED = {
    "pascal": ((64, 128),),
    "volta": ((64, 64), (128, 32), (32, 128)),
    "turing": ((64, 128), (64, 64), (32, 128)),
    "ampere": ((128, 128),),
    "hopper": ((128, 128), (64, 128), (64, 64), (32, 64), (64, 32), (32, 32)),
}
# Matrix-unit tiles of CUTLASS and cuBLAS names (`cutlass_…_256x128_…`, `nvjet_…_128x16_…`).
_TENSOR = (
    *((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64)),
    *((32, 128), (16, 128), (128, 32), (128, 16)),
)
_CHUNK = 512  # rows at a time: with a dozen tiles the columns stay in a processor's cache
_LINE = 16  # elements: no load is wider than this many of the smallest format


_STEPS = {2.0: 1, 4.0: 2, 8.0: 3}
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
class Product:
    """Matmuls as columns of one length."""

    b: Array
    m: Array
    n: Array
    k: Array
    strided: Array  # 1 where both operands are contiguous along k, as in a linear layer's forward
    align: Array  # bytes every row of every operand starts at a multiple of
    turned: Array  # operands that are not contiguous along k
    fetched: tuple[Array, Array]  # elements that A and B hold in memory

    def __getitem__(self, rows: Any) -> "Product":
        first, second = self.fetched
        names = ("b", "m", "n", "k", "strided", "align", "turned")
        columns = {name: getattr(self, name)[rows] for name in names}
        return Product(**columns, fetched=(first[rows], second[rows]))


def product(b: Array, m: Array, n: Array, k: Array, ta: Array, tb: Array, size: float) -> Product:
    """Plain matmuls: A is k×m where `ta`, B is n×k where `tb`."""
    strided = tb * (1 - ta)
    line = int(_LINE / min(size, 1.0))  # numbers of four bits: twice as many in as many bytes
    contiguous = np.gcd(np.gcd(np.where(ta > 0, m, k).astype(int), n.astype(int)), line)
    contiguous = np.where(tb > 0, np.gcd(contiguous, k.astype(int)), contiguous)
    return Product(b, m, n, k, strided, contiguous * size, ta + 1 - tb, (m * k, n * k))


def seconds(
    limits: Limits, fitted: Fitted, ops: Product, times: Array | float = 1.0
) -> Array:  # fmt: skip
    """Time of each matmul on its own, from the fastest tile and split; so many times as long."""
    many = ops.b > 1
    alone = replace(ops, b=np.ones(len(many)))
    if limits.pipe == "tensor":  # one set of tiles for both
        alone = alone[~many]
    out = np.zeros(len(many))
    tiles = _tiles(limits.arch, limits.pipe, batched=False)
    single = best(limits, fitted, alone, tiles, may_split=True)
    out[~many] = single if limits.pipe == "tensor" else single[~many]
    if many.any():
        tiles = _tiles(limits.arch, limits.pipe, batched=True)
        out[many] = best(limits, fitted, ops[many], tiles, may_split=False)
    # Vector tiles differ where there are many matmuls: many never take less than one.
    return times * (out if limits.pipe == "tensor" else np.maximum(out, single))


@lru_cache
def _tiles(arch: str, pipe: str, batched: bool) -> Tile:
    known = _SGEMM_BATCHED if batched else _SGEMM
    shapes = _TENSOR if pipe == "tensor" else known.get(nearest(arch, known), known["volta"])
    rows, columns = np.array(shapes, float).T
    return rows, columns


def best(limits: Limits, fitted: Fitted, ops: Product, tiles: Tile, *, may_split: bool) -> Array:
    """Time with the fastest of some tiles, and of k whole or split to fill the device."""
    least, (rows, cols) = np.empty(len(ops.b)), tiles
    resident = _resident(fitted, tiles)
    for at in range(0, len(least), _CHUNK):
        part = ops[at : at + _CHUNK, None]
        grid = np.ceil(part.m / rows), np.ceil(part.n / cols)
        splits, aligned = [np.ones((1, 1))], _aligned(limits, fitted, part)
        if may_split:
            splits.append(_fill(limits, fitted, part, grid, resident))
        times = []
        for split in splits:
            blocks = part.b * grid[0] * grid[1] * split
            deep = np.ceil(part.k / split / fitted["step_k"]) * fitted["step_k"]
            work, rate = _compute(limits, fitted, blocks, deep, tiles, resident)
            rate = np.minimum(rate * _upright(limits, fitted, part.turned), aligned)
            compute = throttled(limits, fitted, work, rate)
            here = limits.units * resident  # blocks at once
            read, window = _traffic(limits, fitted, part, grid, tiles, here / split)
            flight = np.minimum(blocks, here) * (rows + cols)
            memory = _memory(limits, fitted, part, read, window, flight)
            fabric = blocks * (rows + cols) * deep * limits.size
            fabric /= np.minimum(limits.units, blocks) * limits.clock * fitted["fabric"]
            busy = norm(fitted["overlap"], compute, memory, fabric)
            sums = part.b * part.m * part.n * split * 8 / (limits.bandwidth * fitted["split_rate"])
            sums = np.where(split > 1, fitted["split_start"] + sums, 0.0)
            times.append(busy + limits.floor + fitted["cycles"] / limits.clock + sums)
        least[at : at + _CHUNK] = np.min(times, axis=0).min(axis=1)
    return least


def _fill(limits: Limits, fitted: Fitted, ops: Product, grid: Tile, resident: Array) -> Array:
    """The split of k that fills the device once, as far as k allows."""
    blocks = ops.b * grid[0] * grid[1]
    room = np.floor(limits.units * resident / blocks)
    return np.clip(np.minimum(room, np.floor(ops.k / fitted["split_k"])), 1.0, fitted["split_most"])


def _resident(fitted: Fitted, tile: Tile) -> Array:
    """Blocks one unit holds: its registers hold `area` sums."""
    return np.clip(np.floor(fitted["area"] / (tile[0] * tile[1])), 1.0, fitted["resident"])


def _compute(
    limits: Limits, fitted: Fitted, blocks: Array, deep: Array, tile: Tile, resident: Array
) -> tuple[Array, Array]:
    """Flop with those of idle units, and the rate that busy ones have."""
    rows, cols = tile
    waves = np.floor(blocks / (limits.units * resident))
    last = np.ceil((blocks - waves * limits.units * resident) / limits.units)
    # Share of the peak that sums in flight on a unit can keep busy, in full waves and in the last.
    enough, to = fitted["hide_area"] * limits.ease, fitted["hide_power"]
    hidden = portable.power(np.minimum(1.0, resident * rows * cols / enough), to)
    late = portable.power(np.minimum(1.0, np.maximum(last, 1.0) * rows * cols / enough), to)
    turns = waves * resident / hidden + last / late
    shape = rows * cols / (rows + cols)
    efficiency = fitted["peak"] * shape / (shape + fitted["half_shape"])
    efficiency *= limits.fitted[f"quality_{limits.pipe}"]
    if limits.ease < 1:
        efficiency = 1 - (1 - efficiency) * limits.ease
    if limits.shares and limits.pipe == "simt":
        efficiency *= fitted["sharing"]
    work = turns * 2 * rows * cols * (deep + fitted["start_k"] * limits.ease)
    return work * limits.units, limits.peak * np.minimum(1.0, efficiency)


def _aligned(limits: Limits, fitted: Fitted, ops: Product) -> Array:
    """Flop/s that odd strides leave to the matrix units: wide loads need rows at 16 bytes.

    Many matmuls at once, as those of heads, have slower kernels for it on some architectures; below
    8 bytes all formats have that of one element a load.
    """
    if limits.pipe != "tensor":
        return np.array(np.inf)
    narrow = fitted["narrow"] * portable.power(ops.align / 2, fitted["narrow_power"])
    batched = np.where(ops.align >= 8, limits.unaligned, min(limits.unaligned, limits.odd))
    narrow = np.where(ops.b > 1, np.minimum(narrow, batched), narrow)
    return np.where(ops.align >= 16, np.inf, limits.units * limits.clock * narrow)


def _upright(limits: Limits, fitted: Fitted, turned: Array) -> Array | float:
    """Share of the rate in tf32 where one operand, or both, are not contiguous along k.

    Hopper's matrix instructions read operands of 16 bits either way, others along k alone (PTX ISA,
    wgmma.mma_async: imm-trans-a, imm-trans-b): gradients of weights run as older kernels.
    The shares are medians of `linear` rows in tf32 of `tables/measured/h200.csv.gz`, 2e10 flop or
    more: 0.96 of the price as it was along k, 0.86 to 0.88 with one turned, 0.58 with both.
    """
    if limits.pipe != "tensor" or limits.size != 4 or limits.arch != "hopper":
        return 1.0
    one, both = fitted["turned_one"], fitted["turned_both"]
    return np.where(turned > 1, both, np.where(turned > 0, one, 1.0))


def throttled(limits: Limits, fitted: Fitted, work: Array, rate: Array) -> Array:
    """Time of `work` flop at `rate` on a board whose power sustains less."""
    q = fitted["power"]
    free = work / rate
    sustained = limits.sustained * (1 + limits.burst / free)
    slowed: Array = free * norm(q, np.ones(1), rate / sustained)
    return slowed


def norm(p: float, *terms: Array) -> Array:
    """(Σ xᵖ)^(1/p): times that overlap, the longest counting most; quick where p is 2, 4 or 8."""
    if p not in _STEPS:
        return portable.power(sum(portable.power(x, p) for x in terms), 1 / p)
    total: Any = 0
    for x in terms:
        for _ in range(_STEPS[p]):
            x = np.square(x)
        total = total + x
    for _ in range(_STEPS[p]):
        total = np.sqrt(total)
    out: Array = total
    return out


def _memory(
    limits: Limits, fitted: Fitted, ops: Product, read: Array, window: Array, flight: Array
) -> Array:
    """Seconds to move what is read; `flight` are rows and columns of blocks at once."""
    moved = ops.b * limits.size * (read + ops.m * ops.n)
    busy = np.minimum(1.0, flight / (limits.units * fitted["flight"]))
    share = portable.power(busy, fitted["flight_power"])
    # Rows a whole stride apart walk more pages than an old memory unit can translate at once; a
    # product of few rows streams through them instead.
    walked = np.sqrt(window * limits.size / limits.l2) * ops.m / (ops.m + fitted["stream_rows"])
    pages = limits.fitted["pages"] * walked * ops.strided
    wide = limits.stream * fitted["bandwidth"]
    out: Array = moved / (wide * share) * (1 + pages)
    return out


def _traffic(
    limits: Limits, fitted: Fitted, ops: Product, grid: Tile, tile: Tile, most: Array
) -> tuple[Array, Array]:
    """Elements of A and B one matmul reads from memory, and those within reach of one wave.

    `most` are blocks at once, for each part of k.
    """
    (down, across), (rows, cols) = grid, tile
    wave = np.minimum(down * across, np.maximum(most, 1))
    # Blocks are issued along a row of C; newer libraries walk nearly square patches instead.
    tall = np.clip(np.sqrt(wave * cols / rows), 1.0, down)
    wide = np.clip(wave / tall, 1.0, across)
    along = np.minimum(across, wave)
    if fitted["square"] < 1:
        wide = along * portable.power(wide / along, fitted["square"])
    tall = np.clip(wave / wide, 1.0, down)
    first, second = ops.fetched
    read = first + _again(limits, fitted, first, across / wide)
    read = read + second + _again(limits, fitted, second, down / tall)
    window = (np.minimum(tall * rows, ops.m) + np.minimum(wide * cols, ops.n)) * ops.k
    return read, window


def _again(limits: Limits, fitted: Fitted, held: Array, passes: Array) -> Array:
    """Elements of an operand read again by later waves: those the cache could not keep."""
    lost = 1 - 1 / (1 + (held * limits.size / (fitted["keep"] * limits.l2)) ** 2)
    return np.maximum(passes - 1, 0.0) * held * lost


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


def conv_seconds(limits: Limits, product: Fitted, fitted: Fitted, op: str, ops: Conv) -> Array:
    """Time of each convolution, `op` being conv, conv_dgrad or conv_wgrad."""
    out = _direct(limits, product, fitted, op, ops)
    out += _turned(limits, fitted, ops)
    plain = (ops.r == 3) & (ops.s == 3) & (ops.stride == 1) & (ops.groups == 1)
    if limits.pipe == "simt" and plain.any():
        for f in (2, 4):
            out[plain] = np.minimum(
                out[plain], _winograd(limits, product, fitted, op, ops[plain], f)
            )
    apart = _is_apart(limits, ops)
    if apart.any():
        out[apart] = _one_by_one(limits, product, fitted, op, ops[apart])
    alone = (ops.groups > 1) & (ops.groups == ops.c)
    out[alone] = _depthwise(limits, fitted, op, ops[alone])
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
    zero = np.zeros(len(m))
    ops = Product(a.groups, m, n, depth, zero, align, zero, fetched)
    tiles = _TILES[0], _TILES[1]
    time = best(limits, product, ops, tiles, may_split=True)
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
    ops = Product(many, m, n, depth, zero, np.full(len(m), 16.0), zero, fetched)
    shapes = _WINOGRAD_TILES[f][0], _WINOGRAD_TILES[f][1]
    time = best(limits, product, ops, shapes, may_split=op == "conv_wgrad")
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
