"""DeepSpeed: its JSON configuration (deepspeed.ai/docs/config-json): data parallel and ZeRO."""

from __future__ import annotations

import json
from typing import Any

from foretell.errors import InputError
from foretell.plan.export.say import accumulation, overlapped, require, whole
from foretell.plan.plan import Plan

_SAID = {"dp", "zero", "micro_batch", "global_batch", "dtype", "grad_dtype", "offload", "overlap"}
_SAID |= {"bucket_mb", "optimizer", "precision"}
_LENGTHS = ("fp32", "fp16", "bf16")
_FORMATS: dict[
    str, dict[str, Any]
] = {  # parameters in a short format beside those in fp32, or torch's autocast
    "bf16": {"bf16": {"enabled": True}},
    "bf16-master": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True}},
    "bf16-mixed": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "fp16-mixed": {"torch_autocast": {"enabled": True, "dtype": "float16"}},
}
_MOMENTUM = 0.9  # torch's usual value: a plan says only that there is momentum


def deepspeed(plan: Plan) -> dict[str, str]:
    """Its configuration file; the learning rate is the user's."""
    require(plan, "DeepSpeed's configuration", _SAID)
    if not plan.micro_batch and not plan.global_batch:
        raise InputError(
            "DeepSpeed's configuration has to say a batch, and this plan does not",
            hint="add micro_batch=… or global_batch=…",
        )
    bucket = int(plan.bucket_mb * 2**20 / 4)  # it counts elements, of gradients in fp32 here
    zero: dict[str, Any] = {"stage": plan.zero, "overlap_comm": overlapped(plan, True)}
    zero |= {"reduce_bucket_size": bucket}
    if plan.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    found: dict[str, Any] = {"zero_optimization": zero} | _format(plan)
    if plan.grad_dtype in _LENGTHS:
        found["communication_data_type"] = plan.grad_dtype
    if plan.micro_batch:
        found["train_micro_batch_size_per_gpu"] = plan.micro_batch
        found["gradient_accumulation_steps"] = accumulation(plan)
    if plan.global_batch:
        found["train_batch_size"] = plan.global_batch
    found["optimizer"] = _optimizer(plan)
    return {"deepspeed.json": json.dumps(found, indent=2) + "\n"}


def _format(plan: Plan) -> dict[str, Any]:
    """The section of the format that a plan computes in; none for fp32."""
    said = {plan.dtype, plan.precision} - {"", "fp32"}
    if len(said) > 1 or not said <= set(_FORMATS):
        words = " and ".join(sorted(said))
        raise InputError(f"DeepSpeed's configuration has no word for the plan's {words}")
    return dict(_FORMATS[said.pop()]) if said else {}


def read_deepspeed(text: str, ranks: int) -> Plan:
    """The plan in a DeepSpeed configuration for so many ranks; `auto` sets nothing."""
    try:
        given = json.loads(text)
    except ValueError as error:
        raise InputError(f"this is no DeepSpeed configuration: {error}") from None
    zero = given.get("zero_optimization", {})
    found: dict[str, Any] = {"dp": ranks, "zero": whole(zero.get("stage", 0), "zero's `stage`")}
    for name, field in (
        ("train_micro_batch_size_per_gpu", "micro_batch"),
        ("train_batch_size", "global_batch"),
    ):
        if name in given and given[name] != "auto":
            found[field] = whole(given[name], f"`{name}`")
    found["dtype"] = next((d for d in ("bf16", "fp16") if _is_on(given, d)), "")
    if _is_on(given, "torch_autocast"):
        is_half = given["torch_autocast"].get("dtype") == "float16"
        found["precision"] = "fp16-mixed" if is_half else "bf16-mixed"
    found["offload"] = "offload_optimizer" in zero
    if isinstance(zero.get("reduce_bucket_size"), int | float):
        found["bucket_mb"] = zero["reduce_bucket_size"] * 4 / 2**20
    if zero.get("overlap_comm") is False:
        found["overlap"] = False
    found["grad_dtype"] = str(given.get("communication_data_type") or "")
    return Plan(**found | _read_optimizer(given.get("optimizer", {})))


def _read_optimizer(given: dict[str, Any]) -> dict[str, str]:
    kind = str(given.get("type", "Adam")).lower()
    if "adam" in kind:
        return {"optimizer": "adam"}
    if kind != "sgd":
        raise InputError(f"DeepSpeed's optimizer `{given['type']}` has no name in a plan")
    return {"optimizer": "momentum" if given.get("params", {}).get("momentum") else "sgd"}


def _is_on(given: dict[str, Any], name: str) -> bool:
    section = given.get(name)
    return isinstance(section, dict) and section.get("enabled") is True


def _optimizer(plan: Plan) -> dict[str, Any]:
    if plan.optimizer in ("", "adam"):
        return {"type": "Adam", "params": {}}
    return {
        "type": "SGD",
        "params": {"momentum": _MOMENTUM} if plan.optimizer == "momentum" else {},
    }
