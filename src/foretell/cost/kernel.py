"""Seconds of a kernel by formula: what limits a device, matmuls and convolutions, all others.

Shapes of kernels as text: `key=value,key=value`, read into one column a key.

    gemm       b,m,n,k and ta,tb (1 where A is stored k×m, B is stored n×k)
    conv       n,c,h,w,k,r,s and stride,pad,groups,nhwc,p,q (d,t: depth of image and filter in 3-D)
    attention  b,heads,sq,sk,d and causal,direction (fwd, bwd),dropout,math (1 where not fused),
               window (keys a query sees at most),flash2 (1: not the chip's own kernels)
    others     n (elements), rows, cols, uneven (1 where inputs are broadcast or strided)

Numbers may be written as words: yes, no, fwd, bwd. A key that a text lacks reads as nan.

What one device offers one kernel: rates, fitted constants, and the clock its power limit
allows.

A `Limits` joins the data sheet (`foretell.cluster.Device`) with the fitted constants of the
device's architecture. An architecture that was not measured borrows from the nearest one that was,
so a new device needs a preset and nothing else.

The fitted constants of the kernel formulas, as one value.

`tables/kernel.toml` is written by `benchmarks/fit_kernels.py`; `shipped` reads it once. A fit or a
test may make another `Constants` and hand it to `foretell.cost.kernel`.

The clock a board settles at when a whole step runs for ever within its power limit.

Short benchmarks run at the nominal clock. In training the board averages its power over the step:
with tₜ seconds of matrix kernels that use E joules of dynamic energy at the nominal clock, tₛ of
kernels bound by memory and tᵢ idle, the relative clock u ≤ 1 solves

    tₜ/u·(S − W) + E·u^(a−1) + tₛ·(P − W) + tᵢ·(S − W) = 0                              → `clock`

S static power, P power while streaming, W the limit, a the exponent. Matrix kernels then take 1/u
times as long; memory keeps its pace. S grows with the units of a chip and P with the bandwidth of
its memory, so that a board capped below its design power has less left for its matrix units.

Matmuls as a library runs them, tile by tile, and convolutions as the matmuls they become.

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

How long compute kernels take on a device, from their op, shape and number format.

    price = seconds(device, "gemm", "bf16", ["m=4096,n=4096,k=4096"])
    price.seconds, price.sigma

Every kernel is an op (`gemm`, `conv`, `conv_dgrad`, `conv_wgrad`, `attention`, or a class bound by
memory), a number format and a shape (→ `foretell.cost.kernel`). Where the shape is missing, flop
and
bytes alone give a roofline. `sigma` is the spread of ln(measured/priced) on
kernels the constants were not fitted to: exp(±1.28·sigma) bounds 80 %.

Fused attention (flash): softmax(Q·Kᵀ)·V without the scores ever reaching memory.

A block owns `tile` queries of one head and walks the keys they see: all, about half of them where
causal, at most `window` of them. It does 4·tile·keys·d flop forward, 2.5 times that backward (five
matmuls for two), `edge` of a tile on the diagonal where causal, and `ahead` (`behind` in the
backward) keys' worth of work besides: loads before the first product, the gradient of Q summed in
fp32. Blocks go out in
waves like the tiles of a product, at `peak` of what the pipe can do, while each score takes
`scores` cycles of a unit for its exponential and `dropout` more for a random number. Q, K, V and O
move once. Unfused attention is two matmuls and a softmax.

Kernels written for the chip (cuDNN, FlashAttention-3) are what PyTorch and Transformer Engine pick
by default; FlashAttention-2 (`flash2`) keeps Ampere's instructions, which reach a share of a newer
chip's peak. `benchmarks/fit_attention.py` fits both to an H200; on A100 FlashAttention-2 (Dao 2023,
fig. 4-6) reaches 190-220 forward, 170-200 backward of 312 Tflop/s at d = 128.

Kernels that move more than they compute: time by what they touch.

    stream   bytes / (bandwidth · share), faster where the bytes still lie in the second-level cache
    issue    elements / (units · clock · rate): instructions, not bytes, bound odd strides, small
             formats and transcendental functions
    turns    rows · cycles / (units · clock): ops that give each row to one block pay for every row
    lone     the longest row at one block's pace, for ops that give each channel to one block: few
             channels leave most of the device idle

They overlap as t = (Σ tᵢᵖ)^(1/p) + start. Constants are fitted per class of op (→ `seconds`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from importlib.resources import files
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from foretell import portable
from foretell.cluster.node import FORMATS, Device
from foretell.errors import InputError, unknown
from foretell.graph.graph import Array as AnyArray

Columns = Mapping[str, AnyArray]

_WORDS = {"yes": 1.0, "no": 0.0, "true": 1.0, "false": 0.0, "fwd": 0.0, "bwd": 1.0}


def shape_columns(
    shapes: Sequence[str] | Mapping[str, npt.ArrayLike], length: int
) -> dict[str, AnyArray]:
    """One column a key; columns already given are made floats of one length."""
    if isinstance(shapes, Mapping):
        return {k: _broadcast(v, length) for k, v in shapes.items()}
    found: dict[str, AnyArray] = {}
    for i, text in enumerate(shapes):
        for key, value in parse_shape(text):
            if key not in found:
                found[key] = np.full(length, np.nan)
            found[key][i] = value
    return found


def _broadcast(values: npt.ArrayLike, length: int) -> AnyArray:
    return np.broadcast_to(np.asarray(values, float), (length,))


@lru_cache(maxsize=1 << 16)
def parse_shape(text: str) -> tuple[tuple[str, float], ...]:
    """`b=1,m=64` → ((b, 1.0), (m, 64.0))."""
    return tuple(_pair(item, text) for item in text.split(",") if item.strip())


def _pair(item: str, text: str) -> tuple[str, float]:
    key, _, value = item.partition("=")
    value = value.strip()
    try:
        return key.strip(), _WORDS[value] if value in _WORDS else float(value)
    except ValueError:
        raise InputError(
            f"`{item}` in shape `{text}` is not `key=number`",
            hint="write a shape as `b=1,m=64,n=64,k=64`",
        ) from None


def write_shape(shape: Mapping[str, float]) -> str:
    """The text of a shape: `parse` reads it back."""
    return ",".join(
        f"{k}={int(v) if float(v).is_integer() else float(v)!r}" for k, v in shape.items()
    )


def is_call(shape: str) -> bool:
    """Whether a shape speaks of an operator's inputs."""
    return shape.startswith("in=")


Numbers = dict[str, float]


Array = npt.NDArray[np.float64]
LOWEST = 0.3  # of the nominal clock: no board was seen below
STEPS = 40  # halvings of the interval: 1e-12 of the clock
# Bytes an element takes; formats without a rate of their own run on the vector lanes like fp32.
SIZES = {"fp64": 8, "fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1, "fp4": 0.5}
# Generations in order of release, by maker: the nearest by this order lends its constants.
LINEAGE = (
    ("kepler", "maxwell", "pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell"),
    ("vega", "cdna", "cdna2", "cdna3", "cdna4"),
)
_OTHER = "volta"  # lends to makers that were not measured
# Units of 128 lanes share half of them with integers (GA102 white paper, 2021); A100's 64 do not.
_SHARING = {"ampere", "ada", "hopper", "blackwell"}
_WITHOUT_MATRIX_UNITS = {"kepler", "maxwell", "pascal", "vega", "x86"}
# Energy of one flop by format, against fp16 on the matrix pipe or fp32 on the vector pipe: operands
# of twice the bits cost about twice to move and multiply (Horowitz, ISSCC 2014, fig. 1.1.9).
_ENERGY = {
    "simt": {"fp64": 2.0},
    "tensor": {"tf32": 2.0, "fp8": 0.5, "int8": 0.5, "fp4": 0.25},
}
Arches = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Constants:
    """Constants by part of the model; what each means stands where it is used."""

    gemm: Mapping[str, Numbers]  # by pipe
    conv: Mapping[str, Numbers]  # by pipe
    memory: Mapping[str, Numbers]  # by class of op, and what all share under `all`
    attention: Mapping[str, Numbers]  # by pipe
    roofline: Mapping[str, Numbers]  # by pipe: kernels known by flop and bytes alone
    arch: Mapping[str, Numbers]  # by architecture
    sigma: Mapping[str, Numbers]  # by class of op: spread of ln(measured/priced)


@cache
def shipped() -> Constants:
    """The constants that come with the package."""
    text = files("foretell.cost").joinpath("tables", "kernel.toml").read_text(encoding="utf-8")
    return parse_constants(tomllib.loads(text))


@cache
def passes() -> dict[str, Any]:
    """What PyTorch's kernels and calls take beside flops and bytes: `tables/passes.toml`."""
    text = files("foretell.cost").joinpath("tables", "passes.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def parse_constants(table: Mapping[str, Any]) -> Constants:
    """Constants from a table of tables."""
    parts = (f for f in Constants.__dataclass_fields__)
    return Constants(**{part: {k: dict(v) for k, v in table[part].items()} for part in parts})


def write_constants(constants: Constants) -> str:
    """The text of `tables/kernel.toml`; four digits are more than the data can tell."""
    lines = ["# Written by benchmarks/fit_kernels.py from measured kernels: do not edit."]
    for part in Constants.__dataclass_fields__:
        for name, numbers in getattr(constants, part).items():
            lines += ["", f"[{part}.{name}]", *(f"{k} = {_number(v)}" for k, v in numbers.items())]
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    text = f"{value:.4g}"
    return text if any(c in text for c in ".en") else f"{text}.0"


@cache
def table() -> dict[str, dict[str, Any]]:
    """Power constants by device architecture."""
    text = files("foretell.cost").joinpath("tables", "power.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def joules(device: Device, dtype: str, kind: str = "") -> float:
    """Dynamic energy of one flop of the matrix units; 0 where the architecture has no row.

    `kind` is what else than a matmul runs on them: `attention`, `flash2`.
    """
    row: Mapping[str, Any] = table().get(device.arch, {})
    if dtype in ("fp32", "fp64"):
        return 0.0
    return float(row.get("joules", 0.0)) * float(row.get(kind or dtype, 1.0))


def slowest_of(boards: int) -> float:
    """Standard deviations from the mean to the slowest of some boards, as expected (Blom 1958)."""
    return NormalDist().inv_cdf((boards - 0.375) / (boards + 0.25))


def clock(
    device: Device, matrix: Array, energy: Array, streaming: Array, idle: Array, spread: float = 0.0
) -> Array:
    """Relative clock of each step, from seconds at the nominal clock and joules.

    Boards of one kind differ in the energy of a flop, which at the power limit is their pace: with
    `spread` the clock is that of the board so many standard deviations slower than the mean.
    """
    row = table().get(device.arch)
    if row is None or not device.watts:
        return np.ones_like(matrix)
    limit = device.watts
    static = row["static"] * device.units
    other = static + row["byte"] * device.memory_bandwidth
    fixed = streaming * (other - limit) + idle * (static - limit)
    power = row["exponent"] - 1
    energy = energy * (1 + row["exponent"] * row.get("spread", 0.0) * spread)

    def excess(u: Array) -> Array:
        out: Array = matrix / u * (static - limit) + energy * u**power + fixed
        return out

    low, high = np.full_like(matrix, LOWEST), np.ones_like(matrix)
    free = excess(high) <= 0
    for _ in range(STEPS):
        middle = (low + high) / 2
        hot = excess(middle) > 0
        low, high = np.where(hot, low, middle), np.where(hot, middle, high)
    return np.where(free, 1.0, low)


SIZES |= {"int64": 8, "int32": 4, "bool": 1, "complex64": 8, "none": 4}


@dataclass(frozen=True)
class Limits:
    """Rates of one device for one number format, in SI units."""

    arch: str
    pipe: str  # `tensor` for matrix units, `simt` for the vector lanes
    units: float
    clock: float
    peak: float  # flop/s
    bandwidth: float  # bytes/s
    l2: float  # bytes
    floor: float  # seconds the smallest kernel takes
    sustained: float  # flop/s the board's power allows for ever; infinite where unknown
    size: float  # bytes an element takes
    fitted: Mapping[str, float]  # constants of the architecture
    shares: bool = False  # whether half the vector lanes also do the integer work of addresses
    fp32: float = 0.0  # flop/s of fp32 matmuls
    unaligned: float = float("inf")  # flop a unit and clock of batched matmuls with odd strides
    odd: float = float("inf")  # of those whose rows start at less than 8 bytes
    burst: float = 0.0  # seconds a cold board runs above `sustained`; 0 in the middle of training

    @property
    def ease(self) -> float:
        """The share of a tile's overhead that shows; less where matrix units are slow.

        GeForce boards add in fp32 at half rate: 256 multiply-adds a clock and unit, a quarter of an
        A100's 1024. What feeds them has four times as long, so a quarter of what it costs shows.
        Checked on an RTX 3090 (timm's table) and five more boards (Lambda's).
        """
        rate = self.peak / (self.units * self.clock)
        return min(1.0, rate / 2048) if self.pipe == "tensor" and rate < 600 else 1.0

    @property
    def stream(self) -> float:
        """Bytes/s that a long copy reaches."""
        return self.bandwidth * self.fitted["stream"]


def limits_of(device: Device, dtype: str, arches: Arches) -> Limits:
    """Join a device with what is fitted for its architecture."""
    if dtype not in SIZES:
        raise unknown("number format", dtype, SIZES)
    fitted = arches[nearest(device.arch, arches)]
    size, dtype = SIZES[dtype], dtype if dtype in FORMATS else "fp32"
    pipe = pipe_of(device, dtype)
    energy = fitted[f"joules_{pipe}"] * _ENERGY[pipe].get(dtype, 1.0)
    unaligned: Mapping[str, float] = passes()["unaligned"].get(device.arch, {})
    return Limits(
        arch=device.arch,
        pipe=pipe,
        units=float(device.units),
        clock=device.clock,
        peak=device.peak(dtype),
        bandwidth=device.memory_bandwidth,
        l2=device.l2,
        floor=device.floor,
        sustained=device.watts / energy if device.watts > 0 else float("inf"),
        size=size,
        fitted=fitted,
        fp32=device.peak("fp32"),
        unaligned=unaligned.get(dtype, float("inf")),
        odd=min(unaligned.values(), default=float("inf")),
        shares=device.arch in _SHARING and device.flops["fp32"] > 192 * device.units * device.clock,
    )


def nearest(arch: str, known: Mapping[str, object]) -> str:
    """The architecture among the known that is closest in time, the newer of two as near."""
    if arch in known:
        return arch
    for line in LINEAGE:
        if arch in line:
            at = line.index(arch) + 0.1
            near = sorted((i for i, a in enumerate(line) if a in known), key=lambda i: abs(i - at))
            if near:
                return line[near[0]]
    return _OTHER if _OTHER in known else next(iter(known))


def pipe_of(device: Device, dtype: str) -> str:
    """Which units multiply matrices of a format: the vector lanes where it has no own rate."""
    if dtype in ("fp64", "fp32") or device.arch in _WITHOUT_MATRIX_UNITS:
        return "simt"
    has_rate = dtype in device.flops or device.peak(dtype) > device.peak("fp32")
    return "tensor" if has_rate else "simt"


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

    def __getitem__(self, rows: Any) -> Product:
        first, second = self.fetched
        names = ("b", "m", "n", "k", "strided", "align", "turned")
        columns = {name: getattr(self, name)[rows] for name in names}
        return Product(**columns, fetched=(first[rows], second[rows]))


def matmul(b: Array, m: Array, n: Array, k: Array, ta: Array, tb: Array, size: float) -> Product:
    """Plain matmuls: A is k×m where `ta`, B is n×k where `tb`."""
    strided = tb * (1 - ta)
    line = int(_LINE / min(size, 1.0))  # numbers of four bits: twice as many in as many bytes
    contiguous = np.gcd(np.gcd(np.where(ta > 0, m, k).astype(int), n.astype(int)), line)
    contiguous = np.where(tb > 0, np.gcd(contiguous, k.astype(int)), contiguous)
    return Product(b, m, n, k, strided, contiguous * size, ta + 1 - tb, (m * k, n * k))


def matmul_seconds(
    limits: Limits, fitted: Fitted, ops: Product, times: Array | float = 1.0
) -> Array:  # fmt: skip
    """Time of each matmul on its own, from the fastest tile and split; so many times as long."""
    many = ops.b > 1
    alone = replace(ops, b=np.ones(len(many)))
    if limits.pipe == "tensor":  # one set of tiles for both
        alone = alone[~many]
    out = np.zeros(len(many))
    tiles = _tiles(limits.arch, limits.pipe, batched=False)
    single = best_tile(limits, fitted, alone, tiles, may_split=True)
    out[~many] = single if limits.pipe == "tensor" else single[~many]
    if many.any():
        tiles = _tiles(limits.arch, limits.pipe, batched=True)
        out[many] = best_tile(limits, fitted, ops[many], tiles, may_split=False)
    # Vector tiles differ where there are many matmuls: many never take less than one.
    return times * (out if limits.pipe == "tensor" else np.maximum(out, single))


@lru_cache
def _tiles(arch: str, pipe: str, batched: bool) -> Tile:
    known = _SGEMM_BATCHED if batched else _SGEMM
    shapes = _TENSOR if pipe == "tensor" else known.get(nearest(arch, known), known["volta"])
    rows, columns = np.array(shapes, float).T
    return rows, columns


def best_tile(
    limits: Limits, fitted: Fitted, ops: Product, tiles: Tile, *, may_split: bool
) -> Array:
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
            busy = overlapped(fitted["overlap"], compute, memory, fabric)
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
    slowed: Array = free * overlapped(q, np.ones(1), rate / sustained)
    return slowed


def overlapped(p: float, *terms: Array) -> Array:
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

    def __getitem__(self, rows: Any) -> Conv:
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
    time = best_tile(limits, product, ops, tiles, may_split=True)
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
    time = best_tile(limits, product, ops, shapes, may_split=op == "conv_wgrad")
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


_DEEP = 128.0  # wider heads leave the backward too few registers
Formula = Callable[[], Array]  # with the input it has


Shapes = Sequence[str] | Mapping[str, npt.ArrayLike] | None
# What an op is priced as where it has no class of its own.
_CLASSES = {
    "gelu": "activation",
    "silu": "activation",
    "tanh": "activation",
    "sigmoid": "activation",
    "exp": "activation",
    "relu": "elementwise",
    "cast": "copy",
    "cat": "copy",
    "transpose": "copy",
    "layer_norm": "norm",
    "rms_norm": "norm",
    "layer_norm_backward": "norm_backward",
    "rms_norm_backward": "norm_backward",
    "log_softmax": "softmax",
    "log_softmax_backward": "softmax_backward",
    "loss": "softmax",
    "mean": "reduce",
    "sum": "reduce",
}
# Launches' worth of host time that one eager PyTorch call takes, dispatch and autograd included:
# the shortest readings of NeuSight's events (A100, P4 and T4 hosts) less the 7 µs of an empty pair
# of events in its model labels, over the 5 µs of `Device.launch`.
_CALLS = {"elementwise": 4.4, "softmax": 5.2, "norm": 7.8, "gemm": 7.0, "conv": 12.6}
_CALL = 5.0  # any other
# Chips whose matrix units reach their rate only with instructions FlashAttention-2 does not use.
_NEWER = ("hopper", "blackwell")
# Head widths that have a kernel, the next one runs what lies between: FlashAttention-2's are those
# of its HEADDIM_SWITCH (csrc/flash_attn/src/static_switch.h), cuDNN's were read off an H200 (d = 40
# to 192 in benchmarks/measured/h200/attention.csv: 72, 80, 96 and 112 take the time of 128).
_FLASH2_WIDTHS = (32.0, 64.0, 96.0, 128.0, 192.0, 256.0)
_CHIP_WIDTHS = (64.0, 128.0, 192.0, 256.0)
# PyTorch has no fused attention for them (pytorch/pytorch issue 141958, 2024, of gfx908).
_WITHOUT_FUSED_ATTENTION = ("vega", "cdna")
_BARE = 1.5  # a kernel known by flop and bytes alone is surer of nothing than its class is
_NEEDS = {
    "gemm": ("m", "n", "k"),
    "conv": ("n", "c", "h", "w", "k", "r", "s"),
    "conv_dgrad": ("n", "c", "h", "w", "k", "r", "s"),
    "conv_wgrad": ("n", "c", "h", "w", "k", "r", "s"),
    "attention": ("sq", "sk", "d"),
}


@dataclass(frozen=True)
class Attention:
    """Attentions as columns of one length; causal, backward and dropout are 0 or 1."""

    b: Array
    heads: Array
    sq: Array
    sk: Array
    d: Array
    causal: Array
    backward: Array
    dropout: Array
    window: Array  # keys a query sees at most; 0: all


def visible(sk: Array | float, causal: Array | float, window: Array | float) -> Array:
    """Keys that a query sees on average: of a causal window w over s, w − w·(w − 1)/2s."""
    size = np.where(np.asarray(window) > 0, np.minimum(window, sk), sk)
    out: Array = np.where(np.asarray(causal) > 0, size - size * (size - 1) / (2 * sk), size)
    return out


def padded(depth: Array, widths: Sequence[float]) -> Array:
    """The width of the kernel that runs heads of some depth: the next one that exists."""
    known = np.array([*widths, np.inf])
    found = known[np.searchsorted(known, depth)]
    return np.where(np.isfinite(found), found, depth)


def attention_seconds(
    limits: Limits, product: Fitted, fitted: Fitted, a: Attention, widths: Sequence[float] = ()
) -> Array:
    """Time of each fused attention."""
    is_back = a.backward > 0
    blocks = a.b * a.heads * np.ceil(a.sq / fitted["tile"])
    resident = fitted["resident"]
    turns = np.ceil(blocks / (limits.units * resident))
    rows = turns * limits.units * resident * fitted["tile"]
    seen = visible(a.sk, a.causal, a.window)
    walked = seen + np.where(is_back, fitted["behind"], fitted["ahead"])
    walked = walked + np.where(a.causal > 0, fitted["tile"] * fitted["edge"], 0.0)
    wide = np.maximum(padded(a.d, widths), fitted["depth"])
    deep = np.maximum(wide / _DEEP, 1.0) ** fitted["deep"]
    times = np.where(is_back, 2.5 * fitted["backward"] * deep, 1.0)
    work = 4 * rows * walked * wide * times
    compute = throttled(limits, product, work, np.array(limits.peak * fitted["peak"]))
    cycles = (fitted["scores"] + fitted["dropout"] * a.dropout) * np.where(is_back, 2.0, 1.0)
    scores = rows * walked * cycles / (limits.units * limits.clock)
    tensors = a.b * a.heads * a.d * (2 * a.sq + 2 * a.sk) * np.where(is_back, 2.0, 1.0)
    memory = tensors * limits.size / (limits.stream * fitted["bandwidth"])
    busy = overlapped(fitted["overlap"], compute, scores, memory)
    out: Array = busy + limits.floor * fitted["launches"] * np.where(is_back, 2.0, 1.0)
    return out


# PyTorch adds up gradients of looked-up rows one by one up to this many and sorts them where more
# were (ATen/native/cuda/Embedding.cu). Where a table has far fewer rows than that, a further one
# then takes a twentieth (embedding rows of `tables/measured/h200.csv.gz`: 2048 in a table of 1024
# 55 µs, 4096 of 2 87 µs, 34624 of 96 131 µs, 65536 of 1000 152 µs).
_ONE_BY_ONE, _FEW, _SORTED = 3072.0, 4.0, 0.05


def added_rows(rows: Any, table: Any) -> Any:
    """Rows that the gradient of a look-up costs, where `rows` were taken from a table."""
    quick = np.minimum(rows, _ONE_BY_ONE) + _SORTED * np.maximum(rows - _ONE_BY_ONE, 0.0)
    return np.where(_FEW * np.asarray(table) < rows, quick, rows)


def memory_bound_seconds(
    limits: Limits,
    shared: Mapping[str, float],
    fitted: Mapping[str, float],
    moved: Array,
    n: Array,
    rows: Array,
    uneven: Array,
) -> Array:
    """Time of each kernel; `moved` bytes over `n` elements in `rows` rows.

    `uneven` is 1 where inputs are broadcast, strided or of mixed formats.
    """
    kept = 1 / (1 + portable.power(moved / (shared["keep"] * limits.l2), 4.0))
    gain = 1 + (shared["cache"] - 1) * kept
    rate = np.where(uneven > 0, fitted["rate_uneven"], fitted["rate"])
    cycles = limits.units * limits.clock
    rows = np.maximum(rows, 1.0)
    terms = (
        moved / (limits.stream * fitted["bandwidth"] * gain),
        n / (cycles * rate),
        rows * fitted["cycles_row"] / cycles,
        n / rows * fitted["cycles_lone"] / limits.clock,
    )
    p = shared["overlap"]
    busy = portable.power(sum(portable.power(term, p) for term in terms), 1 / p)
    out: Array = limits.floor * (shared["start"] + fitted["start"]) + busy
    return out


class Price(NamedTuple):
    """Seconds of each kernel and the spread of their logarithm."""

    seconds: Array
    sigma: Array


class Group(NamedTuple):
    """Kernels of one op and one format: the input of a formula."""

    limits: Limits
    constants: Constants
    op: str
    shape: dict[str, Array]
    flops: Array
    bytes: Array

    def column(self, key: str, otherwise: float | Array) -> Array:
        """A column of the shape with its gaps filled."""
        if key not in self.shape:
            return np.broadcast_to(np.asarray(otherwise, float), self.flops.shape)
        values = self.shape[key]
        return np.where(np.isnan(values), otherwise, values)

    def take(self, rows: npt.NDArray[np.bool_]) -> Group:
        """Some of the kernels."""
        shape = {key: values[rows] for key, values in self.shape.items()}
        return self._replace(shape=shape, flops=self.flops[rows], bytes=self.bytes[rows])

    def knows(self, *keys: str) -> npt.NDArray[np.bool_]:
        """Rows that have all of some keys."""
        known = np.full(self.flops.shape, True)
        for key in keys:
            known &= ~np.isnan(self.shape[key]) if key in self.shape else False
        return known


def seconds(
    device: Device,
    op: str | Sequence[str],
    dtype: str | Sequence[str],
    shape: Shapes = None,
    flops: npt.ArrayLike | None = None,
    bytes: npt.ArrayLike | None = None,
    *,
    constants: Constants | None = None,
    burst: float = 0.0,
) -> Price:
    """Time of each kernel on one device; `op` and `dtype` may be one for all or one each.

    `burst` is for boards timed cold: seconds for which they may exceed their power.
    """
    constants = constants or shipped()
    length = length_of(op, dtype, shape, flops, bytes)
    sizes = shape_columns(shape or {}, length)
    work, moved = _filled(flops, length), _filled(bytes, length)
    out, sigma = np.empty(length), np.empty(length)
    for (name, kind), rows in groups_of(op, dtype, length):
        given = replace(limits_of(device, kind, constants.arch), burst=burst)
        part = {k: v[rows] for k, v in sizes.items()}
        group = Group(given, constants, name, part, work[rows], moved[rows])
        known, took = _known(group), roofline(group)
        if known.any():
            rule = _RULES.get(class_of(name, constants), _memory_bound)
            took[known] = rule(group.take(known))()
        out[rows], sigma[rows] = took, _sigma(group, known)
        if device.timed is not None:
            took = device.timed.price(name, kind, part, moved[rows])
            out[rows] = np.where(np.isnan(took), out[rows], took)
            sigma[rows] = np.where(np.isnan(took), sigma[rows], device.timed.sigma)
    return Price(out, sigma)


def host_seconds(device: Device, op: str) -> float:
    """Time the host takes to dispatch one eager call; a captured graph pays `launch` alone."""
    name = class_of(op).removesuffix("_backward").removesuffix("_dgrad").removesuffix("_wgrad")
    return device.launch * _CALLS.get(name, _CALL)


def class_of(op: str, constants: Constants | None = None) -> str:
    """The class whose formula prices an op."""
    known = (constants or shipped()).memory
    if op in ("gemm", "conv", "conv_dgrad", "conv_wgrad", "attention") or op in known:
        return op
    return _CLASSES.get(op, "bare")


def length_of(*given: object) -> int:
    for value in given:
        if isinstance(value, Mapping):
            sizes = [np.size(v) for v in value.values()]
            if sizes:
                return max(sizes)
        elif value is not None and not isinstance(value, str):
            return np.size(value)  # type: ignore[arg-type]
    return 1


def _filled(values: npt.ArrayLike | None, length: int) -> Array:
    """Numbers of one length; what is zero or missing is unknown."""
    if values is None:
        return np.full(length, np.nan)
    given = np.broadcast_to(np.asarray(values, float), (length,))
    return np.where(given > 0, given, np.nan)


def groups_of(
    op: str | Sequence[str], dtype: str | Sequence[str], length: int
) -> list[tuple[tuple[str, str], npt.NDArray[np.intp]]]:
    if isinstance(op, str) and isinstance(dtype, str):
        return [((op, dtype), np.arange(length))]
    ops = np.broadcast_to(np.asarray(op, str), (length,))
    dtypes = np.broadcast_to(np.asarray(dtype, str), (length,))
    pairs, index = np.unique(np.stack([ops, dtypes]), axis=1, return_inverse=True)
    order = np.argsort(index, kind="stable")
    parts = np.split(order, np.cumsum(np.bincount(index.ravel()))[:-1])
    return [((str(o), str(d)), rows) for (o, d), rows in zip(pairs.T, parts, strict=True)]


def _known(group: Group) -> npt.NDArray[np.bool_]:
    """Rows whose shape the formula of the op knows enough of; the roofline prices the others."""
    name = class_of(group.op, group.constants)
    if name == "bare":
        return np.full(group.flops.shape, False)
    if name in _NEEDS:
        return group.knows(*_NEEDS[name])
    return ~np.isnan(group.bytes) | group.knows("n") | group.knows("rows", "cols")


def _sigma(group: Group, known: npt.NDArray[np.bool_]) -> Array:
    name = class_of(group.op, group.constants)
    table = group.constants.sigma
    row = table.get(f"{name}_{group.limits.pipe}") or table.get(name) or table["bare"]
    seen = group.limits.arch in group.constants.arch and group.limits.fitted["measured"] > 0
    bare = max(_BARE * row["unseen"], table["bare"]["unseen"])
    return np.where(known, row["seen" if seen else "unseen"], bare)


def _gemm(group: Group) -> Formula:
    given = group.limits
    b, m, n, k = (group.column(key, 1.0) for key in ("b", "m", "n", "k"))
    ta, tb = group.column("ta", 0.0), group.column("tb", 0.0)
    call = matmul(b, m, n, k, ta, tb, given.size)
    fitted = group.constants.gemm[given.pipe]
    return partial(matmul_seconds, given, fitted, call, _grouped(group, fitted))


def _grouped(group: Group, fitted: Mapping[str, float]) -> Array | float:
    """How many times as long as batched matmuls those of experts take (1), or their weights' (2).

    Rows of each expert are known on the device alone: one kernel walks over all experts.
    """
    if "grouped" not in group.shape or "grouped" not in fitted:
        return 1.0
    kind = group.column("grouped", 0.0)
    plain = fitted["grouped_fp8"] if group.limits.size < 2 else fitted["grouped"]
    weights = max(plain, fitted["grouped_wgrad"])
    return np.where(kind > 1, weights, np.where(kind > 0, plain, 1.0))


def _conv(group: Group) -> Formula:
    given = group.limits
    parts = group.constants
    fitted = parts.gemm[given.pipe], parts.conv[given.pipe]
    return partial(conv_seconds, given, *fitted, group.op, _convolution(group))


def _convolution(group: Group) -> Conv:
    """A convolution's columns; a third dimension is folded into the rows."""
    get = group.column
    stride, pad = get("stride", 1.0), get("pad", 0.0)
    h, w, r, s = (get(key, 1.0) for key in ("h", "w", "r", "s"))
    depth, deep = get("d", 1.0), get("t", 1.0)
    p = get("p", np.floor((h + 2 * pad - r) / stride) + 1)
    q = get("q", np.floor((w + 2 * pad - s) / stride) + 1)
    out = np.where(depth > 1, np.floor((depth + 2 * pad - deep) / stride) + 1, 1.0)
    flat = {"h": h * depth, "p": np.maximum(p * out, 1.0), "q": np.maximum(q, 1.0), "r": r * deep}
    return Conv(
        n=get("n", 1.0),
        c=get("c", 1.0),
        w=w,
        k=get("k", 1.0),
        s=s,
        stride=stride,
        groups=get("groups", 1.0),
        nhwc=get("nhwc", 0.0),
        **flat,
    )


def _attention(group: Group) -> Formula:
    get = group.column
    sizes = [get(key, 1.0) for key in ("b", "heads", "sq", "sk", "d")]
    flags = ("causal", "direction", "dropout", "window")
    call = Attention(*sizes, *(get(k, 0.0) for k in flags))
    return partial(_fused_or_not, group, call)


def _fused_or_not(group: Group, call: Attention) -> Array:
    """Attention by the kernels that its device has."""
    get = group.column
    given, parts = group.limits, group.constants
    product = parts.gemm[given.pipe]
    widths: Sequence[float] = ()
    if given.pipe == "tensor":
        widths = _CHIP_WIDTHS if given.arch in _NEWER else _FLASH2_WIDTHS
    out = attention_seconds(given, product, parts.attention[given.pipe], call, widths)
    older = (get("flash2", 0.0) > 0) & (given.pipe == "tensor") & (given.arch in _NEWER)
    if older.any():
        flash2 = parts.attention["flash2"]
        out = np.where(older, attention_seconds(given, product, flash2, call, _FLASH2_WIDTHS), out)
    if given.arch in _WITHOUT_FUSED_ATTENTION:
        return written_seconds(call, given.size, given.fp32, given.bandwidth)
    apart = get("math", 0.0) > 0
    return np.where(apart, _unfused(group, call), out) if apart.any() else out


class _Written(NamedTuple):
    """What attention costs written out: rates of a device, and what is moved."""

    products: float  # share of the fp32 peak
    score: float  # bytes a score
    dropped: float  # more of them with dropout
    number: float  # bytes a number of the queries
    seconds: float  # for all its kernels to begin and end


def written_seconds(a: Attention, item: float, fp32: float, bandwidth: float) -> Array:
    """Attention written out by PyTorch: matmuls in fp32, and passes over the scores."""
    known: dict[str, Any] = passes()["written"]
    there, back = (_Written(*cost) for cost in known["wide" if item > 2 else "half"])
    is_back, queries = a.backward > 0, a.b * a.heads * a.sq
    share, score, dropped, number, start = (
        np.where(is_back, *pair) for pair in zip(back, there, strict=True)
    )
    scores = queries * a.sk
    flops = np.where(is_back, 8.0, 4.0) * scores * a.d
    moved = (score + dropped * (a.dropout > 0)) * scores + number * queries * a.d
    out: Array = flops / (share * fp32) + moved / (float(known["stream"]) * bandwidth) + start
    return out


def _unfused(group: Group, a: Attention) -> Array:
    """Two matmuls and a softmax forward; twice the matmuls and its gradient backward."""
    given, parts = group.limits, group.constants
    zero, many = np.zeros(len(a.b)), a.b * a.heads
    scores = matmul(many, a.sq, a.sk, a.d, zero, zero + 1, given.size)
    values = matmul(many, a.sq, a.d, a.sk, zero, zero, given.size)
    fitted = parts.gemm[given.pipe]
    products = matmul_seconds(given, fitted, scores) + matmul_seconds(given, fitted, values)
    n = many * a.sq * a.sk
    back = a.backward > 0
    shared = parts.memory["all"]
    soft = [
        memory_bound_seconds(
            given, shared, parts.memory[name], passes * n * given.size, n, n / a.sk, zero
        )
        for name, passes in (("softmax", 2), ("softmax_backward", 3))
    ]
    return np.where(back, 2 * products + soft[1], products + soft[0])


def _memory_bound(group: Group) -> Formula:
    given, parts = group.limits, group.constants
    name = class_of(group.op, parts)
    half = f"{name}_half" if given.size < 4 else name  # libraries have other kernels for halves
    fitted = parts.memory.get(half, parts.memory[name])
    rows, cols = group.column("rows", np.nan), group.column("cols", np.nan)
    n = group.column("n", rows * cols)
    moved = np.where(np.isnan(group.bytes), fitted["passes"] * n * given.size, group.bytes)
    n = np.where(np.isnan(n), moved / (fitted["passes"] * given.size), n)
    cols = np.where(np.isnan(cols), np.minimum(n, 1024.0), cols)
    rows = np.where(np.isnan(rows), n / cols, rows)
    uneven = group.column("uneven", 0.0)
    shared = parts.memory["all"]
    return partial(memory_bound_seconds, given, shared, fitted, moved, n, rows, uneven)


def roofline(group: Group) -> Array:
    """Flop and bytes alone: the share of the peak grows with the work each unit has."""
    given, fitted = group.limits, group.constants.roofline[group.limits.pipe]
    work, moved = np.nan_to_num(group.flops), np.nan_to_num(group.bytes)
    each = work / given.units
    share = fitted["peak"] * each / (each + fitted["half_flops"])
    rate = given.peak * np.where(work > 0, np.minimum(share, 1.0), 1.0)
    compute = throttled(given, fitted, np.maximum(work, 1.0), rate)
    memory = moved / (given.stream * fitted["bandwidth"])
    return given.floor + overlapped(fitted["overlap"], compute, memory)


_RULES: dict[str, Callable[[Group], Formula]] = {
    "gemm": _gemm,
    "conv": _conv,
    "conv_dgrad": _conv,
    "conv_wgrad": _conv,
    "attention": _attention,
}
