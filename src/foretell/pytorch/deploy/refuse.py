"""What of a plan cannot be run, and why: known before anything is launched, without torch."""

from __future__ import annotations

from foretell.errors import InputError
from foretell.plan import Plan

# what-ifs that have a way to be run; any other changes a prediction only
RUNNABLE = (
    "amp",
    "channels-last",
    "checkpoint",
    "compile",
    "foreach-optimizer",
    "fused-optimizer",
    "tf32",
)


def refusals(plan: Plan) -> list[str]:
    """Every reason why a plan cannot be deployed; none where it can."""
    images = max(plan.spatial, default=1) > 1
    split = plan.filter > 1 or plan.channel > 1
    found = {
        f"cp={plan.cp}: no runtime here deals the tokens of a sample out": plan.cp > 1,
        f"ep={plan.ep}: no runtime here deals experts out": plan.ep > 1,
        "sp: norms are not split over tensor-parallel ranks": plan.sp,
        "offload: only FSDP keeps optimizer state on the host (zero=2 or 3)": (
            plan.offload and plan.zero < 2
        ),
        "images are split beside tensors or stages": images and (plan.tp > 1 or plan.pp > 1),
        "filters or channels are split beside tensors, stages or images": (
            split and (plan.tp > 1 or plan.pp > 1 or images)
        ),
        "both filters and channels are split": plan.filter > 1 and plan.channel > 1,
        f"zero={plan.zero} beside split images, filters or channels": (
            plan.zero >= 2 and (images or split)
        ),
        f"zero={plan.zero} beside pp={plan.pp}": plan.zero >= 1 and plan.pp > 1,
        f"zero={plan.zero} with a choice of sync or buckets": (
            plan.zero >= 2 and bool(plan.sync or plan.buckets)
        ),
        f"recompute={plan.recompute} of split images": plan.recompute != "none" and images,
        "recompute=selective of stages": plan.recompute == "selective" and plan.pp > 1,
        f"dtype={plan.dtype} is not fp32, tf32, bf16 or fp16": (
            plan.dtype not in ("", "fp32", "tf32", "bf16", "fp16")
        ),
        f"dtype=fp16 beside pp={plan.pp}: losses are not scaled there": (
            plan.dtype == "fp16" and plan.pp > 1
        ),
        "sync names sharded parameters and tp > 1": bool(plan.sync) and plan.tp > 1,
        "groups: layers on ranks of their own have no runtime here": bool(plan.groups),
    }
    reasons = [why for why, is_so in found.items() if is_so]
    return reasons + _odd_whatifs(plan) + _odd_sync(plan)


def require_runnable(plan: Plan) -> None:
    """Raise with every reason why a plan cannot be deployed."""
    reasons = refusals(plan)
    if reasons:
        raise InputError(
            "this plan cannot be deployed:\n  " + "\n  ".join(reasons),
            hint="`foretell predict` prices it all the same",
        )


def _odd_whatifs(plan: Plan) -> list[str]:
    odd = [spec for spec in plan.whatifs if spec.partition(":")[0] not in RUNNABLE]
    return [f"what-if `{spec}`: nobody has said how to run it" for spec in odd]


def _odd_sync(plan: Plan) -> list[str]:
    return [
        f"sync `{'+'.join(row)}` is not a parameter and a way" for row in plan.sync if len(row) != 2
    ]
