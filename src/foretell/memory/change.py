"""What changes to a step make of its memory: one function a change, from tape to tape."""

from __future__ import annotations

from foretell.memory.autocast import autocast
from foretell.memory.edit import (
    parameter_bytes,
    resized,
    states,
    with_workspace,
    without_update,
)
from foretell.memory.fuse import fused
from foretell.memory.recompute import recomputed
from foretell.memory.tape import Tape
from foretell.memory.workspace import copied

_ADAM = 2  # numbers of state for each of a parameter, from which on there is a denominator


def batch(tape: Tape, times: float) -> Tape:
    """So many times as many samples."""
    return resized(tape, times)


def half_precision(tape: Tape) -> Tape:
    """Autocast to bf16 or fp16."""
    return autocast(tape)


def tensor_cores(tape: Tape) -> Tape:
    """TF32: the same tensors; convolutions copy theirs to channels last."""
    return with_workspace(tape, lambda op, n: copied(n, 4) if op.workspace else 0.0)


def channels_last(tape: Tape) -> Tape:
    """Channels last: the same tensors; tensor cores take them as they are.

    Plain fp32 does not: cuDNN turns them to channels first, runs the kernels it has for that, and
    turns the result back (`nhwcToNchwKernel` around FFTs and matmuls, H200, cuDNN 9.19).
    """
    is_half = any(s.item == 2 for s in tape.storages if s.is_float)
    return with_workspace(tape, lambda op, n: 0.0 if is_half else op.workspace + copied(n, 4))


def checkpoint(tape: Tape) -> Tape:
    """Activations made again in the backward pass, block by block or all at once."""
    return recomputed(tape)


def foreach_optimizer(tape: Tape) -> Tape:
    """All parameters at once: what the loop makes for one is made for all (Adam's denominators)."""
    return without_update(tape, parameter_bytes(tape) if states(tape) >= _ADAM else 0.0)


def fused_optimizer(tape: Tape) -> Tape:
    """One pass over all parameters: nothing is made on the way."""
    return without_update(tape)


def compiled(tape: Tape) -> Tape:
    """Light ops fused, what they keep made again."""
    return fused(tape)
