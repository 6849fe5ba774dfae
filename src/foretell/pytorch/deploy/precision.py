"""Mixed precision: matmuls in a shorter format, parameters and sums as they were."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from foretell.errors import unknown
from foretell.plan import Plan
from foretell.pytorch.deploy.buckets import local
from foretell.spec import split

DTYPES = {
    "": None,
    "fp32": None,
    "fp32-ieee": None,
    "tf32": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,  # of what is no matmul of a linear layer (→ fp8.py)
}


def dtype_of(word: str) -> Any:
    """The torch dtype of a plan's word; None for full precision."""
    if word not in DTYPES:
        raise unknown("dtype that can be run", word, [w for w in DTYPES if w])
    return DTYPES[word]


def mixed(word: str, device: str) -> AbstractContextManager[Any]:
    """Forward and loss run inside this."""
    dtype = dtype_of(word)
    if dtype is None:
        return nullcontext()
    context: AbstractContextManager[Any] = torch.autocast(device, dtype=dtype)
    return context


def scaler(word: str, device: str) -> Any:
    """What keeps small gradients of fp16 from vanishing; None where they do not."""
    return torch.amp.GradScaler(device) if word == "fp16" else None


def unscaled() -> float:
    """By what a loss is multiplied where gradients do not vanish."""
    return 1.0


def scale_losses(pipeline: Any, scaler: Any, device: str) -> None:
    """Let the losses of a pipeline be multiplied as a scaler says, on ranks without one too."""
    scaler.scale(torch.zeros((), device=device))  # which makes its state
    pipeline.scale = scaler.get_scale


def unscale(scaler: Any, optimizer: Any, parameters: Iterable[Any]) -> Any:
    """Undo the scale of gradients here, parts of split ones too; 1 where one is not finite.

    As `GradScaler.unscale_`, which takes no split gradients beside whole ones; its state is set.
    """
    grads: dict[Any, list[Any]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            grad = local(parameter.grad)
            grads.setdefault(grad.dtype, []).append(grad)
    found = torch.zeros((), device=scaler._scale.device)
    factor = scaler._scale.double().reciprocal().float()
    for same in grads.values():
        torch._amp_foreach_non_finite_check_and_unscale_(same, found, factor)
    state = scaler._per_optimizer_states[id(optimizer)]
    state["found_inf_per_device"], state["stage"] = {found.device: found}, OptState.UNSCALED
    return found


def precision_of(plan: Plan) -> str:
    """The format of matmuls: the plan's own, or that of its `amp` what-if."""
    for spec in plan.whatifs:
        name, options = split(spec)
        if name == "amp":
            return options.get("dtype", "bf16")
    return plan.dtype or plan.precision.removesuffix("-mixed")
