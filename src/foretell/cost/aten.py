"""What PyTorch operators ask of a device: an aten call as kernels that a price is known for.

Traces and captured graphs speak of operators as PyTorch was asked for them: the op is `addmm`, the
shape its inputs, `in=768+4096x768+768x3072,types=…` (→ `foretell.cost.aten_call`). Prices know
classes of kernels (→ `foretell.cost.kernel`). `kernels` turns one into the other; what it has no
rule for is priced by its flop and bytes.
"""

from __future__ import annotations

from functools import lru_cache

from foretell.cost.aten_call import Call, Kernel, read
from foretell.cost.aten_rules import RULES


def is_call(shape: str) -> bool:
    """Whether a shape speaks of an operator's inputs."""
    return shape.startswith("in=")


@lru_cache(maxsize=1 << 16)
def kernels(op: str, shape: str, moved: float = 0.0, flops: float = 0.0) -> tuple[Kernel, ...]:
    """The kernels behind one task; one of flop and bytes alone where no rule knows the operator."""
    call = read(op, shape, moved, flops)
    rule = RULES.get(op)
    try:
        found = rule(call) if rule else []
    except (IndexError, ValueError):  # inputs another version of the operator does not have
        found = []
    return tuple(found) or (_plain(call),)


def _plain(call: Call) -> Kernel:
    """An operator without a rule: memory-bound unless its flop say otherwise."""
    moved = call.moved or call.input_bytes()
    if call.flops > 16 * moved:  # no pointwise function of PyTorch takes more flop a byte
        return Kernel("bare", "", moved, call.flops)
    return Kernel("elementwise", "", max(moved, 1.0), call.flops)
