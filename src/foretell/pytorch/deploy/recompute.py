"""Activation checkpointing: run a unit's forward again in the backward in place of keeping it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

# The core of attention is cheap to run again and large to keep (Korthikanti et al. 2022, §5);
# everything else is kept. On a GPU one fused op is the core, elsewhere a product and a softmax.
_aten = torch.ops.aten
_CORE = {
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._softmax.default,
    _aten.bmm.default,
}


def recompute(units: Mapping[str, Any], *, selective: bool = False) -> None:
    """Checkpoint each unit: all of it, or of attention only the core."""
    options: dict[str, Any] = {"use_reentrant": False}
    if selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    for unit in units.values():
        if getattr(unit.forward, "func", None) is not _again:  # copies of a stage share a unit
            unit.forward = partial(_again, unit.forward, options)


def _again(forward: Any, options: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, **options, **kwargs)


def _policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    return CheckpointPolicy.PREFER_RECOMPUTE if op in _CORE else CheckpointPolicy.MUST_SAVE
