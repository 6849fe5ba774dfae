"""matmuls C[b] = A[b]·B[b] of m×k by k×n, as a library would run them: tile by tile.

The kernel is the fastest of a few tile shapes (tₘ×tₙ) and ways to split k, s, each costing

    compute   c = b·⌈m/tₘ⌉·⌈n/tₙ⌉·s blocks, o at a time on each of U units, in whole waves; a block
              is 2·tₘ·tₙ·(k/s + k₀) flop at the tile's efficiency e₀·a/(a + a₀), a = tₘtₙ/(tₘ+tₙ)
              (its flop per byte); too few resident blocks hide latency less (→ `_compute`)
    power     a board sustains watts/energy flop/s; its rate falls towards that (→ `throttled`)
    memory    one wave reads the rows of A and columns of B under it once; the next wave reads them
              again unless the second-level cache kept them (→ `_traffic`, `_memory`)
    fabric    every block reads its (tₘ + tₙ)·k operands through the cache (→ `_fabric`)

and overlapping, so that t = (Σ tᵢᵖ)^(1/p) + start. A split adds a pass over the partial sums.
"""

from collections.abc import Callable, Mapping
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


@dataclass(frozen=True)
class Product:
    """Matmuls as columns of one length."""

    b: Array
    m: Array
    n: Array
    k: Array
    strided: Array  # 1 where both operands are contiguous along k, as in a linear layer's forward
    align: Array  # bytes every row of every operand starts at a multiple of
    fetched: tuple[Array, Array]  # elements that A and B hold in memory

    def __getitem__(self, rows: Any) -> "Product":
        first, second = self.fetched
        names = ("b", "m", "n", "k", "strided", "align")
        columns = {name: getattr(self, name)[rows] for name in names}
        return Product(**columns, fetched=(first[rows], second[rows]))


def product(b: Array, m: Array, n: Array, k: Array, ta: Array, tb: Array, size: float) -> Product:
    """Plain matmuls: A is k×m where `ta`, B is n×k where `tb`."""
    strided = tb * (1 - ta)
    line = int(_LINE / min(size, 1.0))  # numbers of four bits: twice as many in as many bytes
    contiguous = np.gcd(np.gcd(np.where(ta > 0, m, k).astype(int), n.astype(int)), line)
    contiguous = np.where(tb > 0, np.gcd(contiguous, k.astype(int)), contiguous)
    return Product(b, m, n, k, strided, contiguous * size, (m * k, n * k))


def seconds(limits: Limits, fitted: Fitted, asked: Product) -> Array:
    """Time of each matmul on its own, from the fastest tile and split."""
    many = asked.b > 1
    alone = replace(asked, b=np.ones(len(many)))
    if limits.pipe == "tensor":  # one set of tiles for both
        alone = alone[~many]
    out = np.zeros(len(many))
    tiles = _tiles(limits.arch, limits.pipe, batched=False)
    single = best(limits, fitted, alone, tiles, may_split=True)
    out[~many] = single if limits.pipe == "tensor" else single[~many]
    if many.any():
        tiles = _tiles(limits.arch, limits.pipe, batched=True)
        out[many] = best(limits, fitted, asked[many], tiles, may_split=False)
    # Vector tiles differ where there are many matmuls: many never take less than one.
    return out if limits.pipe == "tensor" else np.maximum(out, single)


@lru_cache
def _tiles(arch: str, pipe: str, batched: bool) -> Tile:
    known = _SGEMM_BATCHED if batched else _SGEMM
    shapes = _TENSOR if pipe == "tensor" else known.get(nearest(arch, known), known["volta"])
    rows, columns = np.array(shapes, float).T
    return rows, columns


def best(limits: Limits, fitted: Fitted, asked: Product, tiles: Tile, *, may_split: bool) -> Array:
    """Time with the fastest of some tiles, and of k whole or split to fill the device."""
    least = np.empty(len(asked.b))
    for at in range(0, len(least), _CHUNK):
        rows = slice(at, at + _CHUNK)
        part = asked[rows, None]
        times = tiled(limits, fitted, part, tiles, np.ones((1, 1)))
        if may_split:
            split = _fill(limits, fitted, part, tiles)
            times = np.minimum(times, tiled(limits, fitted, part, tiles, split))
        least[rows] = times.min(axis=1)
    return least


def _fill(limits: Limits, fitted: Fitted, asked: Product, tile: Tile) -> Array:
    """The split of k that fills the device once, as far as k allows."""
    rows, cols = tile
    blocks = asked.b * np.ceil(asked.m / rows) * np.ceil(asked.n / cols)
    room = np.floor(limits.units * _resident(fitted, tile) / blocks)
    return np.clip(
        np.minimum(room, np.floor(asked.k / fitted["split_k"])), 1.0, fitted["split_most"]
    )


def tiled(limits: Limits, fitted: Fitted, asked: Product, tile: Tile, split: Array) -> Array:
    """Time with one tile shape and one split of k; arrays broadcast against each other."""
    rows, cols = tile
    grid = np.ceil(asked.m / rows), np.ceil(asked.n / cols)
    blocks = asked.b * grid[0] * grid[1] * split
    deep = np.ceil(asked.k / split / fitted["step_k"]) * fitted["step_k"]
    compute = _compute(limits, fitted, blocks, deep, tile, asked.align)
    memory = _memory(limits, fitted, asked, grid, tile, split)
    fabric = blocks * (rows + cols) * deep * limits.size
    fabric /= np.minimum(limits.units, blocks) * limits.clock * fitted["fabric"]
    busy = norm(fitted["overlap"], compute, memory, fabric)
    partial = asked.b * asked.m * asked.n * split * 8 / (limits.bandwidth * fitted["split_rate"])
    sums = np.where(split > 1, fitted["split_start"] + partial, 0.0)
    total: Array = busy + limits.floor + fitted["cycles"] / limits.clock + sums
    return total


def _resident(fitted: Fitted, tile: Tile) -> Array:
    """Blocks one unit holds: its registers hold `area` sums."""
    return np.clip(np.floor(fitted["area"] / (tile[0] * tile[1])), 1.0, fitted["resident"])


def _compute(
    limits: Limits, fitted: Fitted, blocks: Array, deep: Array, tile: Tile, align: Array
) -> Array:
    rows, cols = tile
    resident = _resident(fitted, tile)
    waves = np.floor(blocks / (limits.units * resident))
    last = np.ceil((blocks - waves * limits.units * resident) / limits.units)
    turns = waves * resident / _hidden(limits, fitted, resident * rows * cols)
    turns += last / _hidden(limits, fitted, np.maximum(last, 1.0) * rows * cols)
    shape = rows * cols / (rows + cols)
    efficiency = fitted["peak"] * shape / (shape + fitted["half_shape"])
    efficiency *= limits.fitted[f"quality_{limits.pipe}"]
    if limits.ease < 1:
        efficiency = 1 - (1 - efficiency) * limits.ease
    if limits.shares and limits.pipe == "simt":
        efficiency *= fitted["sharing"]
    rate = np.minimum(limits.peak * np.minimum(1.0, efficiency), _aligned(limits, fitted, align))
    work = turns * 2 * rows * cols * (deep + fitted["start_k"] * limits.ease)
    return throttled(limits, fitted, work * limits.units, rate)


def _hidden(limits: Limits, fitted: Fitted, sums: Array) -> Array:
    """Share of the peak that `sums` accumulators in flight on a unit can keep busy."""
    enough = fitted["hide_area"] * limits.ease
    return portable.power(np.minimum(1.0, sums / enough), fitted["hide_power"])


def _aligned(limits: Limits, fitted: Fitted, align: Array) -> Array:
    """Flop/s that odd strides leave to the matrix units: wide loads need rows at 16 bytes."""
    if limits.pipe != "tensor":
        return np.array(np.inf)
    narrow = fitted["narrow"] * portable.power(align / 2, fitted["narrow_power"])
    return np.where(align >= 16, np.inf, limits.units * limits.clock * narrow)


def throttled(limits: Limits, fitted: Fitted, work: Array, rate: Array) -> Array:
    """Time of `work` flop at `rate` on a board whose power sustains less."""
    q = fitted["power"]
    free = work / rate
    sustained = limits.sustained * (1 + limits.burst / free)
    slowed: Array = free * norm(q, np.ones(1), rate / sustained)
    return slowed


_STEPS = {2.0: 1, 4.0: 2, 8.0: 3}


def norm(p: float, *terms: Array) -> Array:
    """(Σ xᵖ)^(1/p): times that overlap, the longest counting most; quick where p is 2, 4 or 8."""
    if p in _STEPS:
        steps = range(_STEPS[p])
        total = sum(_each(np.square, steps, x) for x in terms)
        return _each(np.sqrt, steps, total)
    return portable.power(sum(portable.power(x, p) for x in terms), 1 / p)


def _each(step: Callable[[Array], Array], steps: range, x: Any) -> Array:
    for _ in steps:
        x = step(x)
    out: Array = x
    return out


def _memory(
    limits: Limits, fitted: Fitted, asked: Product, grid: Tile, tile: Tile, split: Array
) -> Array:
    read, window = _traffic(limits, fitted, asked, grid, tile, split)
    moved = asked.b * limits.size * (read + asked.m * asked.n)
    resident = limits.units * _resident(fitted, tile)
    flight = np.minimum(asked.b * grid[0] * grid[1] * split, resident) * (tile[0] + tile[1])
    busy = np.minimum(1.0, flight / (limits.units * fitted["flight"]))
    share = portable.power(busy, fitted["flight_power"])
    # Rows a whole stride apart walk more pages than an old memory unit can translate at once; a
    # product of few rows streams through them instead.
    walked = np.sqrt(window * limits.size / limits.l2) * asked.m / (asked.m + fitted["stream_rows"])
    pages = limits.fitted["pages"] * walked * asked.strided
    wide = limits.stream * fitted["bandwidth"]
    out: Array = moved / (wide * share) * (1 + pages)
    return out


def _traffic(
    limits: Limits, fitted: Fitted, asked: Product, grid: Tile, tile: Tile, split: Array
) -> tuple[Array, Array]:
    """Elements of A and B one matmul reads from memory, and those within reach of one wave."""
    (down, across), (rows, cols) = grid, tile
    wave = np.minimum(down * across, np.maximum(limits.units * _resident(fitted, tile) / split, 1))
    # Blocks are issued along a row of C; newer libraries walk nearly square patches instead.
    tall = np.clip(np.sqrt(wave * cols / rows), 1.0, down)
    wide = np.clip(wave / tall, 1.0, across)
    along = np.minimum(across, wave)
    if fitted["square"] < 1:
        wide = along * portable.power(wide / along, fitted["square"])
    tall = np.clip(wave / wide, 1.0, down)
    first, second = asked.fetched
    read = first + _again(limits, fitted, first, across / wide)
    read = read + second + _again(limits, fitted, second, down / tall)
    window = (np.minimum(tall * rows, asked.m) + np.minimum(wide * cols, asked.n)) * asked.k
    return read, window


def _again(limits: Limits, fitted: Fitted, held: Array, passes: Array) -> Array:
    """Elements of an operand read again by later waves: those the cache could not keep."""
    lost = 1 - 1 / (1 + (held * limits.size / (fitted["keep"] * limits.l2)) ** 2)
    return np.maximum(passes - 1, 0.0) * held * lost
