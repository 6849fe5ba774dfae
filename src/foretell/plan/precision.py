"""Number formats as people run them: what computes, what is kept, and the bytes of each parameter.

fp32            parameters, gradients and optimizer state in fp32; convolutions in tf32 where the
                device has it, as cuDNN does unless it is told not to (PyTorch's default)
tf32            the same, matmuls in tf32 too
fp32-ieee       no tf32 at all (`torch.backends.fp32_precision = "ieee"`)
bf16-true       everything in bf16, optimizer state included (`model.bfloat16()`)
bf16-mixed      autocast over fp32 parameters: weights are cast before use (fp16-mixed alike)
bf16-master     bf16 parameters and compute, fp32 master weights and gradient reduction
fp16-master     the same in fp16 with fp16 gradients, as DeepSpeed's fp16 engine
fp8, nvfp4      bf16-master whose matmuls run in eight or four bits
"""

from __future__ import annotations

from dataclasses import dataclass

from foretell.errors import unknown


@dataclass(frozen=True)
class Precision:
    """The formats of one way to train; bytes of one parameter."""

    compute: str  # format of matmuls
    weight: float  # the parameter as the model holds it
    gradient: float
    master: float = 0.0  # its fp32 copy, where there is one
    moment: float = 4.0  # each moment of the optimizer
    casts: bool = False  # autocast: weights are cast each step, norms and loss run in fp32
    convolution: str = ""  # format of convolutions where it is not that of matmuls

    @property
    def updated(self) -> float:
        """Bytes of the copy of a parameter that the optimizer updates."""
        return self.master or self.weight


PRECISIONS = {
    "fp32": Precision("fp32", 4.0, 4.0, convolution="tf32"),
    "fp32-ieee": Precision("fp32", 4.0, 4.0),
    "tf32": Precision("tf32", 4.0, 4.0),
    "bf16-true": Precision("bf16", 2.0, 2.0, moment=2.0),
    "fp16-true": Precision("fp16", 2.0, 2.0, moment=2.0),
    "bf16-mixed": Precision("bf16", 4.0, 4.0, casts=True),
    "fp16-mixed": Precision("fp16", 4.0, 4.0, casts=True),
    "bf16-master": Precision("bf16", 2.0, 4.0, master=4.0),
    "fp16-master": Precision("fp16", 2.0, 2.0, master=4.0),
    "fp8": Precision("fp8", 2.0, 4.0, master=4.0),
    "nvfp4": Precision("fp4", 2.0, 4.0, master=4.0),
    "fp64": Precision("fp64", 8.0, 8.0, moment=8.0),
}


def precision_of(name: str) -> Precision:
    """The precision of this name."""
    if name not in PRECISIONS:
        raise unknown("precision", name, PRECISIONS)
    return PRECISIONS[name]


@dataclass(frozen=True)
class Optimizer:
    """How often an update reads or writes each tensor of a parameter, and the moments it keeps."""

    moments: int
    parameter: float
    gradient: float
    moment: float  # all moments together
    scratch: float = 0.0  # temporaries, as wide as a moment

    def moved(self, precision: Precision) -> float:
        """Bytes one update moves for each parameter."""
        copied = precision.weight if precision.master else 0.0  # the half copy, written back
        unscaled = 2.0 if precision.compute == "fp16" and precision.casts else 0.0  # GradScaler
        return (
            self.parameter * precision.updated
            + (self.gradient + unscaled) * precision.gradient
            + (self.moment + self.scratch) * precision.moment
            + copied
        )


# Counted in torch/optim/adam.py and sgd.py (2.11): `foreach` runs one kernel for each operation
# (weight decay, lerp, mul, addcmul, sqrt, div, add, addcdiv), `fused` one for all of them.
OPTIMIZERS = {
    ("adam", "foreach"): Optimizer(2, 4.0, 2.0, 8.0, 6.0),
    ("adam", "fused"): Optimizer(2, 2.0, 1.0, 4.0),
    ("momentum", "foreach"): Optimizer(1, 2.0, 2.0, 4.0),
    ("momentum", "fused"): Optimizer(1, 2.0, 1.0, 2.0),
    ("sgd", "foreach"): Optimizer(0, 2.0, 1.0, 0.0),
    ("sgd", "fused"): Optimizer(0, 2.0, 1.0, 0.0),
}
