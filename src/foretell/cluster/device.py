"""One accelerator (or CPU) as data: what its maker promises, before any efficiency is applied.

Units are SI base units: flop/s, bytes, bytes/s, seconds, hertz, watts. Nothing here is measured
but `timed`; how close real kernels come to these numbers is the business of `foretell.cost`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foretell.errors import InputError, unknown

FORMATS = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8", "fp4")

# What a format runs as where a device lacks it, as PyTorch does: bf16 and fp16 on hardware without
# them compute in fp32; tf32 is a way to do fp32; fp8 and fp4 are widened to fp16 first.
_INSTEAD = {"tf32": "fp32", "fp16": "fp32", "bf16": "fp32", "fp8": "fp16", "int8": "fp16"}
_INSTEAD |= {"fp4": "fp8"}


@dataclass(frozen=True)
class Device:
    """A kind of device: peak rates by number format, memory, and what bounds small kernels."""

    name: str  # preset name, lower case: `a100-80`
    title: str  # what people call it: `NVIDIA A100 80GB SXM`
    vendor: str  # nvidia, amd, cpu
    arch: str  # kepler, pascal, volta, turing, ampere, ada, hopper, blackwell, cdna2, cdna3, x86
    memory: float  # bytes
    memory_bandwidth: float  # bytes/s, peak of the data sheet
    flops: Mapping[str, float]  # dense peak by format: fp32, tf32, fp16, bf16, fp8, int8, fp64
    units: int  # streaming multiprocessors, compute units or cores
    clock: float  # hertz, boost: the clock the peak rates are quoted at
    l2: float  # bytes of last-level cache on the chip
    # Kineto traces of an H200 and a V100 show cudaLaunchKernel at 7-9 µs with the profiler on,
    # and kernels down to 0.7-1.3 µs; without the profiler a launch is about 5 µs.
    launch: float = 5e-6  # seconds the host spends to launch one kernel
    floor: float = 2e-6  # seconds the smallest kernel takes on the device
    watts: float = 0.0  # board power
    price: float = 0.0  # money per hour, 0 where unknown
    sources: Mapping[str, str] = field(default_factory=dict)  # where each number comes from
    bus: str = "pcie3"  # link preset by which it reaches its host
    node: str = "pcie3-box"  # node preset it usually stands in
    # what its ops took here (→ foretell.cost.timed); None: formulas price them
    timed: Any = field(default=None, repr=False, compare=False)

    def peak(self, dtype: str) -> float:
        """Dense peak flop/s for a number format, or for the one it runs as where it is missing."""
        if dtype not in FORMATS:
            raise unknown("number format", dtype, FORMATS)
        runs_as = dtype
        while runs_as not in self.flops and runs_as in _INSTEAD:
            runs_as = _INSTEAD[runs_as]
        if runs_as not in self.flops:
            hint = f"add `{runs_as}` to its `flops`; it has {', '.join(sorted(self.flops))}"
            raise InputError(f"device `{self.name}` has no {runs_as} rate", hint=hint)
        return self.flops[runs_as]
