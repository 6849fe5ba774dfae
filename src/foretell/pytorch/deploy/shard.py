"""Parameters sharded over data-parallel ranks: FSDP2, unit by unit."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from foretell.pytorch.deploy.ties import shared_names
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
    tied = {
        id(p) for names in shared_names(model).values() for p in [model.get_parameter(names[0])]
    }
    for unit in units(model).values():
        if unit is not model and not any(id(p) in tied for p in unit.parameters()):
            fully_shard(unit, **options)  # what is tied to other units is left to the whole
    made = fully_shard(model, **options)
    made.set_reduce_scatter_unused_params(True)  # ranks may use different experts
    return made


class Usage:
    """Which sharded parameters a step used: those that no rank did keep no gradient."""

    def __init__(self, modules: Iterable[Any], group: Any) -> None:
        self.group, self.seen = group, set[int]()
        self.parameters = list[Any]()
        for module in modules:
            for inner in module.modules():
                if isinstance(inner, FSDPModule):
                    for part in inner._get_fsdp_state()._fsdp_param_groups:
                        self._watch(part)

    def _watch(self, part: Any) -> None:
        """Look for gradients before torch reduces them; a name torch marks as private."""
        first = len(self.parameters)
        self.parameters += [p.sharded_param for p in part.fsdp_params]
        reduce = part.post_backward

        def looking(*args: Any) -> Any:
            for place, parameter in enumerate(part.fsdp_params, first):
                if _has_gradient(parameter):
                    self.seen.add(place)
            return reduce(*args)

        part.post_backward = looking

    def finish(self) -> None:
        """Drop the zeros that stand for no gradient anywhere; the ranks of a group ask together."""
        trained = [i for i, p in enumerate(self.parameters) if p.requires_grad]
        if not trained:
            return
        absent = [i not in self.seen for i in trained]
        flags = torch.tensor([not a for a in absent], dtype=torch.int32)
        flags = flags.to(self.parameters[0].device)
        dist.all_reduce(flags, group=self.group)
        if any(absent):
            for place, used in zip(trained, flags.tolist(), strict=True):
                if not used:
                    self.parameters[place].grad = None
        self.seen.clear()


def _has_gradient(parameter: Any) -> bool:
    if parameter.unsharded_accumulated_grad is not None:
        return True
    whole = getattr(parameter, "_unsharded_param", None)
    return whole is not None and whole.grad is not None


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
