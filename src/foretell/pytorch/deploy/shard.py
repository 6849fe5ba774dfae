"""Parameters sharded over data-parallel ranks: FSDP2, unit by unit."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from foretell.pytorch.deploy.units import units


def shard(
    model: Any,
    mesh: Any,
    *,
    keep: bool = False,  # parameters between forward and backward (ZeRO 2), or not (ZeRO 3)
    dtype: Any = None,  # of compute; parameters stay as they are
    reduce_dtype: Any = None,  # of gradients on the wire
    offload: bool = False,
) -> Any:
    """Shard each unit and then what is left of the model, over one axis or copies × parts."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype)
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": not keep,
        "mp_policy": policy,
        "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
    }
    for unit in units(model).values():
        if unit is not model:
            fully_shard(unit, **options)
    return fully_shard(model, **options)


@contextmanager
def no_sync(model: Any) -> Iterator[None]:
    """Add gradients up without reducing them."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


@contextmanager
def quiet() -> Iterator[None]:
    """Without FSDP's warning about views: a linear layer gives one, and nobody writes to it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        yield
