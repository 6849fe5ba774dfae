"""Mixed precision: matmuls in a shorter format, parameters and sums as they were."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from foretell.errors import unknown
from foretell.plan import Plan
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


def precision_of(plan: Plan) -> str:
    """The format of matmuls: the plan's own, or that of its `amp` what-if."""
    for spec in plan.whatifs:
        name, options = split(spec)
        if name == "amp":
            return options.get("dtype", "bf16")
    return plan.dtype or plan.precision.removesuffix("-mixed")
