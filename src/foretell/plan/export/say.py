"""Errors of exporters for fields that the other program has no setting for."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from foretell.errors import InputError
from foretell.plan.framework import framework_of
from foretell.plan.plan import Plan

# Of a prediction, not of a run: no program needs them.
_SILENT = {"framework", "model", "cluster"}


def require(plan: Plan, program: str, said: set[str]) -> None:
    """Raise where a plan has fields that a program has no setting for."""
    plain = Plan()
    if plan.placement == tuple(range(plan.ranks)):
        plan = plan.but(placement=())
    left = [
        f.name
        for f in fields(plan)
        if f.name not in said | _SILENT and getattr(plan, f.name) != getattr(plain, f.name)
    ]
    if left:
        raise InputError(
            f"{program} has no words for {', '.join(f'`{n}`' for n in left)} of this plan",
            hint="leave it out, or run the plan with `foretell run`",
        )


def overlapped(plan: Plan, otherwise: bool) -> bool:
    """Whether gradients are reduced during the backward, as the plan was priced.

    What it says itself, or else its framework's way; `otherwise` where it names no framework.
    """
    if plan.overlap is not None:
        return plan.overlap
    return framework_of(plan.framework).overlaps if plan.framework else otherwise


def tp_overlapped(plan: Plan) -> bool:
    """Whether collectives of tensor parallelism hide behind matmuls, as the plan was priced."""
    if plan.tp_overlap is not None:
        return plan.tp_overlap
    own = framework_of(plan.framework).tp_overlap if plan.framework else False
    return own and plan.tp > 1


def ep_overlapped(plan: Plan) -> bool:
    """Whether expert exchanges run beside another micro-batch's compute, as it was priced."""
    own = framework_of(plan.framework).ep_overlap if plan.framework else False
    said = own if plan.ep_overlap is None else plan.ep_overlap
    return said and plan.ep > 1


def number_format(plan: Plan, program: str, words: dict[str, str]) -> str:
    """A program's word for the format that a plan computes in; fp32 where it does not say."""
    mixed = plan.precision.removesuffix("-mixed")
    own = plan.dtype or mixed or "fp32"
    is_other = bool(plan.dtype and mixed) and mixed != own
    if own not in words or is_other or plan.precision.endswith(("-true", "-master")):
        said = " and ".join(filter(None, (plan.dtype, plan.precision)))
        raise InputError(f"{program} has no word for the plan's {said}")
    return words[own]


def batch_of_rank(plan: Plan) -> int:
    """Samples that a rank takes at once; 0 where the plan does not say."""
    return plan.micro_batch or plan.global_batch // plan.dp


def accumulation(plan: Plan) -> int:
    """Micro-batches that a rank takes in one step; 1 where the plan does not say."""
    if not plan.micro_batch or not plan.global_batch:
        return 1
    return max(1, plan.global_batch // (plan.dp * plan.micro_batch))


def whole(value: Any, what: str) -> int:
    """A whole number out of another program's file."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{what} is {value!r}, not a whole number")
    return value
