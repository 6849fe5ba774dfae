"""What one device offers one kernel: rates, fitted constants, and the clock its power limit
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
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.cluster.node import FORMATS, Device
from foretell.errors import unknown

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
    return parse(tomllib.loads(text))


@cache
def passes() -> dict[str, Any]:
    """What PyTorch's kernels and calls take beside flops and bytes: `tables/passes.toml`."""
    text = files("foretell.cost").joinpath("tables", "passes.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def parse(table: Mapping[str, Any]) -> Constants:
    """Constants from a table of tables."""
    parts = (f for f in Constants.__dataclass_fields__)
    return Constants(**{part: {k: dict(v) for k, v in table[part].items()} for part in parts})


def write(constants: Constants) -> str:
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


def limits(device: Device, dtype: str, arches: Arches) -> Limits:
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
