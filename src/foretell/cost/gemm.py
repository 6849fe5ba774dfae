"""Matrix products C[b] = A[b]·B[b] of m×k by k×n, as a library would run them: tile by tile.

The kernel is the fastest of a few tile shapes (tₘ×tₙ) and ways to split k, s, each costing

    compute   c = b·⌈m/tₘ⌉·⌈n/tₙ⌉·s blocks, o at a time on each of U units, in whole waves; a block
              is 2·tₘ·tₙ·(k/s + k₀) flop at the tile's efficiency e₀·a/(a + a₀), a = tₘtₙ/(tₘ+tₙ)
              (its flop per byte); too few resident blocks hide latency less (→ `_compute`)
    power     the board sustains watts/energy flop/s; the two rates add like resistances (→ `_throttled`)
    memory    one wave reads the rows of A and columns of B under it once; the next wave reads them
              again unless the second-level cache kept them (→ `_traffic`, `_memory`)
    fabric    every block reads its (tₘ + tₙ)·k operands through the cache (→ `_fabric`)

and overlapping, so that t = (Σ tᵢᵖ)^(1/p) + start. A split adds a pass over the partial sums.
"""

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from foretell.cost.limits import Limits, nearest

Array = npt.NDArray[np.float64]
Fitted = Mapping[str, float]

# Tiles (rows × columns of a row-major C) named by the kernels in truth/kernels: sgemm by
# architecture from NeuSight's columns, `32x128` there being 32 columns by 128 rows.
_SGEMM = {
    "pascal": ((128, 32), (64, 64), (32, 128)),
    "volta": ((128, 128), (64, 128), (64, 64), (128, 32), (32, 128), (32, 64), (32, 32)),
    "ampere": ((64, 128), (128, 32), (32, 128), (64, 64), (32, 64), (32, 32)),
}
_SGEMM_BATCHED = {
    "pascal": ((64, 128),),
    "volta": ((64, 64), (128, 32), (32, 128)),
    "turing": ((64, 128), (64, 64), (32, 128)),
    "ampere": ((128, 128),),
}
# Matrix-unit tiles of CUTLASS and cuBLAS names (`cutlass_…_256x128_…`, `nvjet_…_128x16_…`).
_TENSOR = (
    *((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64)),
    *((32, 128), (16, 128), (128, 32), (128, 16)),
)


def seconds(
    limits: Limits, fitted: Fitted, b: Array, m: Array, n: Array, k: Array, strided: Array
) -> Array:
    """Time of each product on its own, from the fastest tile and split.

    `strided` is 1 where both operands are contiguous along k (A row-major, B column-major, as in
    the forward of a linear layer) and 0 elsewhere.
    """
    dims = tuple(np.asarray(d, float)[:, None] for d in (b, m, n, k, strided))
    out = np.empty(len(b))
    many = b > 1
    for part, batched in ((~many, False), (many, True)):
        if part.any():
            tiles = _tiles(limits.arch, limits.pipe, batched)
            out[part] = _best(limits, fitted, [d[part] for d in dims], tiles, not batched)
    return out


@lru_cache
def _tiles(arch: str, pipe: str, batched: bool) -> tuple[Array, Array]:
    known = _SGEMM_BATCHED if batched else _SGEMM
    shapes = _TENSOR if pipe == "tensor" else known.get(nearest(arch, known), known["volta"])
    rows, columns = np.array(shapes, float).T
    return rows, columns


def _best(
    limits: Limits, fitted: Fitted, dims: list[Array], tiles: tuple[Array, Array], may_split: bool
) -> Array:
    whole = tiled(limits, fitted, dims, tiles, np.ones((1, 1)))
    if may_split:
        whole = np.minimum(whole, tiled(limits, fitted, dims, tiles, _fill(limits, fitted, dims, tiles)))
    best: Array = whole.min(axis=1)
    return best


def _fill(limits: Limits, fitted: Fitted, dims: list[Array], tile: tuple[Array, Array]) -> Array:
    """The split of k that fills the device once, as far as k allows."""
    b, m, n, k, _ = dims
    rows, cols = tile
    blocks = b * np.ceil(m / rows) * np.ceil(n / cols)
    room = np.floor(limits.units * _resident(fitted, rows, cols) / blocks)
    return np.clip(np.minimum(room, np.floor(k / fitted["split_k"])), 1.0, 32.0)


def tiled(
    limits: Limits, fitted: Fitted, dims: list[Array], tile: tuple[Array, Array], split: Array
) -> Array:
    """Time with one tile shape and one split of k; arrays broadcast against each other."""
    b, m, n, k, strided = dims
    rows, cols = tile
    down, across = np.ceil(m / rows), np.ceil(n / cols)
    blocks = b * down * across * split
    deep = np.ceil(k / split / fitted["step_k"]) * fitted["step_k"]
    compute = _compute(limits, fitted, blocks, deep, rows, cols)
    memory = _memory(limits, fitted, dims, (down, across), tile, split)
    fabric = blocks * (rows + cols) * deep * limits.size
    fabric /= np.minimum(limits.units, blocks) * limits.clock * fitted["fabric"]
    p = fitted["overlap"]
    busy = (compute**p + memory**p + fabric**p) ** (1 / p)
    sums = fitted["split_start"] + b * m * n * split * 8 / (limits.bandwidth * fitted["split_rate"])
    start = limits.floor + fitted["cycles"] / limits.clock
    total: Array = busy + start + np.where(split > 1, sums, 0.0)
    return total


def _resident(fitted: Fitted, rows: Array, cols: Array) -> Array:
    """Blocks one unit holds: its registers hold `area` sums."""
    return np.clip(np.floor(fitted["area"] / (rows * cols)), 1.0, fitted["resident"])


def _compute(
    limits: Limits, fitted: Fitted, blocks: Array, deep: Array, rows: Array, cols: Array
) -> Array:
    resident = _resident(fitted, rows, cols)
    waves = np.floor(blocks / (limits.units * resident))
    last = np.ceil((blocks - waves * limits.units * resident) / limits.units)
    turns = waves * resident / _hidden(fitted, resident * rows * cols)
    turns += last / _hidden(fitted, np.maximum(last, 1.0) * rows * cols)
    shape = rows * cols / (rows + cols)
    efficiency = fitted["peak"] * shape / (shape + fitted["half_shape"])
    efficiency = np.minimum(1.0, efficiency * limits.fitted[f"quality_{limits.pipe}"])
    work = turns * 2 * rows * cols * (deep + fitted["start_k"])
    return _throttled(limits, fitted, work * limits.units, limits.peak * efficiency)


def _hidden(fitted: Fitted, sums: Array) -> Array:
    """Share of the peak that `sums` accumulators in flight on a unit can keep busy."""
    hidden: Array = np.minimum(1.0, sums / fitted["hide_area"]) ** fitted["hide_power"]
    return hidden


def _throttled(limits: Limits, fitted: Fitted, work: Array, rate: Array) -> Array:
    q = fitted["power"]
    free = work / rate
    sustained = limits.sustained * (1 + limits.burst / free)
    slowed: Array = free * (1 + (rate / sustained) ** q) ** (1 / q)
    return slowed


def _memory(
    limits: Limits,
    fitted: Fitted,
    dims: list[Array],
    grid: tuple[Array, Array],
    tile: tuple[Array, Array],
    split: Array,
) -> Array:
    b, m, n, _, strided = dims
    read, window = _traffic(limits, fitted, dims, grid, tile, split)
    moved = b * limits.size * (read + m * n)
    resident = limits.units * _resident(fitted, *tile)
    flight = np.minimum(b * grid[0] * grid[1] * split, resident) * (tile[0] + tile[1])
    share = np.minimum(1.0, flight / (limits.units * fitted["flight"])) ** fitted["flight_power"]
    # Rows a whole stride apart walk more pages than an old memory unit can translate at once.
    pages = limits.fitted["pages"] * np.sqrt(window * limits.size / limits.l2) * strided * m/(m+fitted["reach"]*16)
    out: Array = moved / (limits.bandwidth * fitted["bandwidth"] * share) * (1 + pages)
    return out


def _traffic(
    limits: Limits,
    fitted: Fitted,
    dims: list[Array],
    grid: tuple[Array, Array],
    tile: tuple[Array, Array],
    split: Array,
) -> tuple[Array, Array]:
    """Elements of A and B one product reads from memory, and those within reach of one wave."""
    _, m, n, k, _ = dims
    (down, across), (rows, cols) = grid, tile
    wave = np.minimum(down * across, np.maximum(limits.units * _resident(fitted, *tile) / split, 1))
    # Blocks are issued along a row of C; newer libraries walk nearly square patches instead.
    tall = np.clip(np.sqrt(wave * cols / rows), 1.0, down)
    wide = np.clip(wave / tall, 1.0, across)
    walk = fitted["square"]
    wide = np.minimum(across, wave) ** (1 - walk) * wide**walk
    tall = np.clip(wave / wide, 1.0, down)
    keep = fitted["keep"] * limits.l2
    a, c = m * k, n * k
    again_a, again_c = np.maximum(across / wide, 1.0), np.maximum(down / tall, 1.0)
    lost_a = 1 - 1 / (1 + (a * limits.size / keep) ** 2)
    lost_c = 1 - 1 / (1 + (c * limits.size / keep) ** 2)
    read = a * (1 + (again_a - 1) * lost_a) + c * (1 + (again_c - 1) * lost_c)
    window = (np.minimum(tall * rows, m) + np.minimum(wide * cols, n)) * k
    return read, window
