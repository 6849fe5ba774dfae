"""Activation checkpointing: run a unit's forward again in the backward in place of keeping it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

# The core of attention is cheap to run again and large to keep (Korthikanti et al. 2022, §5);
# everything else is kept. On a GPU one fused op is the core, elsewhere a matmul and a softmax.
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
    for unit in units.values():
        if getattr(unit.forward, "func", None) is not _again:  # copies of a stage share a unit
            unit.forward = partial(_again, unit.forward, unit, _Sees(unit) if selective else None)


def _again(forward: Any, unit: Any, sees: _Sees | None, *args: Any, **kwargs: Any) -> Any:
    """Run a unit again in the backward; the first time it is seen whether only its core can be."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    is_known = sees is not None and sees.is_done
    if sees is not None and is_known and not sees.has_core:
        return forward(*args, **kwargs)
    selective = sees is not None and is_known and not sees.changes
    context = partial(_contexts, unit, selective)
    with sees if sees is not None and not is_known else nullcontext():
        return checkpoint(forward, *args, use_reentrant=False, context_fn=context, **kwargs)


class _Sees(TorchDispatchMode):  # type: ignore[misc]
    """Whether a unit has a core of attention, and changes in place what would be kept."""

    def __init__(self, unit: Any) -> None:
        super().__init__()
        self.unit = unit
        self.has_core = self.changes = self.is_done = False

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.has_core |= op in _CORE
        if op._schema.is_mutable and args:
            self.changes |= all(args[0] is not b for b in self.unit.buffers())
        return op(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        self.is_done = True
        super().__exit__(*error)


def _contexts(unit: Any, selective: bool) -> tuple[Any, Any]:
    """What is around the forward, and around its second run: that leaves buffers as they are."""
    first, second = nullcontext(), nullcontext()
    if selective:
        first, second = create_selective_checkpoint_contexts(_policy)
    return first, _SameBuffers(unit, second)


class _SameBuffers:
    """Puts buffers back; entered as often as the forward is run again."""

    def __init__(self, unit: Any, inner: Any) -> None:
        self.unit, self.inner, self.before = unit, inner, list[Any]()

    def __enter__(self) -> None:
        self.before.append([(b, b.detach().clone()) for b in self.unit.buffers()])
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> Any:
        try:
            return self.inner.__exit__(*error)
        finally:
            for buffer, old in self.before.pop():
                buffer.data.copy_(old)


def _policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    if op._schema.is_mutable:  # of buffers, which are put back
        return CheckpointPolicy.MUST_RECOMPUTE
    return CheckpointPolicy.PREFER_RECOMPUTE if op in _CORE else CheckpointPolicy.MUST_SAVE
