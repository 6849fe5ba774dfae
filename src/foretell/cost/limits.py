"""What one device offers one kernel: rates for a number format, and what is fitted for its kind.

A `Limits` joins the data sheet (`foretell.cluster.Device`) with the fitted constants of the
device's architecture. An architecture that was not measured borrows from the nearest one that was,
so a new device needs a preset and nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from foretell.cluster.device import FORMATS, Device
from foretell.errors import unknown

# Bytes an element takes; formats without a rate of their own run on the vector lanes like fp32.
SIZES = {"fp64": 8, "fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1, "fp4": 0.5}
SIZES |= {"int64": 8, "int32": 4, "bool": 1, "complex64": 8, "none": 4}

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
