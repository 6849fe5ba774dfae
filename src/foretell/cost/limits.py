"""What one device offers one kernel: its rates for a number format, and what is fitted for its kind.

A `Limits` joins the data sheet (`foretell.cluster.Device`) with the fitted constants of the
device's architecture. An architecture nobody measured borrows from the nearest one that was,
so a new device needs a preset and nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from foretell.cluster.device import Device

SIZES = {"fp64": 8, "fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1, "fp4": 0.5}

# Generations in order of release, by maker: the nearest by this order lends its constants.
LINEAGE = (
    ("kepler", "maxwell", "pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell"),
    ("gcn", "vega", "cdna", "cdna1", "cdna2", "cdna3"),
)

# Energy of one flop by format, against fp16 on the matrix pipe or fp32 on the vector pipe: an
# operand of twice the bits costs about twice the energy to move and multiply (Horowitz, ISSCC 2014).
_ENERGY = {"fp64": 2.0, "tf32": 2.0, "fp8": 0.5, "int8": 0.5, "fp4": 0.25}

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
    burst: float = 0.0  # seconds a cold board runs above `sustained`; 0 in the middle of training


def limits(device: Device, dtype: str, arches: Arches) -> Limits:
    """Join a device with what is fitted for its architecture."""
    fitted = arches[nearest(device.arch, arches)]
    pipe = _pipe(device, dtype)
    energy = fitted[f"joules_{pipe}"] * _ENERGY.get(dtype, 1.0)
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
        size=SIZES[dtype],
        fitted=fitted,
    )


def nearest(arch: str, known: Mapping[str, object]) -> str:
    """The architecture among the known that is closest in time, the newer of two as near."""
    if arch in known:
        return arch
    for line in LINEAGE:
        if arch in line:
            at = line.index(arch)
            near = sorted((i for i, a in enumerate(line) if a in known), key=lambda i: abs(i - at - 0.1))
            if near:
                return line[near[0]]
    return "other"


def _pipe(device: Device, dtype: str) -> str:
    """Formats that run well above twice the fp32 rate do so on matrix units."""
    if dtype in ("fp64", "fp32"):
        return "simt"
    return "tensor" if device.peak(dtype) > 2.5 * device.peak("fp32") else "simt"
