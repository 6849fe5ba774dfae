"""What it takes to run a case: tensors in their place and a function that issues the operator once.

A training step has just written the tensor that flows through an operator (the activation forward,
the gradient backward) and has long evicted everything else (weights, what forward saved, optimizer
state). A call names what is `fresh`; the clock makes the rest cold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from foretell.errors import unknown
from foretell_lab.bench.case import Case

Tensor = Any
DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int64": torch.int64,
    "bool": torch.bool,
}


@dataclass(frozen=True)
class Call:
    """A case made ready: `run` issues it once."""

    run: Callable[[], object]
    fresh: Sequence[Tensor] = ()  # what the step has written just before
    uses_engine: bool = False  # runs through the autograd engine, whose start is not the op's


@dataclass(frozen=True)
class Place:
    """Where tensors are made."""

    device: Any

    def randn(self, *dims: int, dtype: str = "fp32", grad: bool = False) -> Tensor:
        """Random numbers: zeros would run faster than training does."""
        made = torch.randn(dims, dtype=DTYPES[dtype], device=self.device)
        return made.requires_grad_(grad)

    def image(self, *dims: int, dtype: str, layout: str, grad: bool = False) -> Tensor:
        """Random numbers with channels second, or last in memory."""
        made = torch.randn(dims, dtype=DTYPES[dtype], device=self.device)
        if layout == "nhwc":
            last = torch.channels_last if len(dims) == 4 else torch.channels_last_3d
            made = made.to(memory_format=last)
        return made.requires_grad_(grad)

    def whole(self, high: int, *dims: int) -> Tensor:
        """Random whole numbers below `high`."""
        return torch.randint(high, dims, device=self.device)

    @property
    def is_cuda(self) -> bool:
        return str(self.device).startswith("cuda")


Build = Callable[[Case, Place], Call]


def forward_or_backward(
    case: Case, function: Callable[..., Tensor], inputs: Sequence[Tensor]
) -> Call:
    """A call of the function, or of the gradients of those inputs that want one."""
    if case.direction == "forward":
        return Call(lambda: function(*inputs), fresh=_floating(inputs[:1]))
    if case.direction != "backward":
        raise unknown("direction", case.direction, ("forward", "backward"))
    out = function(*inputs)
    gradient = torch.randn_like(out)
    wanted = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad]
    return Call(
        lambda: torch.autograd.grad(out, wanted, gradient, retain_graph=True),
        fresh=(gradient,),
        uses_engine=True,
    )


def use_precision(dtype: str) -> None:
    """Let fp32 matmuls and convolutions use tf32 or not, as a case asks."""
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    torch.backends.cudnn.allow_tf32 = dtype == "tf32"


def _floating(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(t for t in tensors if isinstance(t, torch.Tensor) and t.is_floating_point())
