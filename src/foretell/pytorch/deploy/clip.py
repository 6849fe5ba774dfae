"""The norm of all gradients under any plan, each counted once, and gradients clipped by it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from foretell.pytorch.deploy.buckets import local

Tensor = Any


def clip(made: Any, most: float) -> Tensor:
    """Scale gradients so that their norm is at most so much; the norm before. On every rank."""
    norm = gradient_norm(made)
    factor = (most / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
    for parameter in made.here.values():
        if parameter.grad is not None:
            local(parameter.grad).mul_(factor.to(parameter.grad.dtype))
    return norm


def gradient_norm(made: Any) -> Tensor:
    """The norm over the gradients of the whole model; called on every rank."""
    if made.copies is None:
        made.copies = _copies(made)
    total = torch.zeros((), device=made.places.device)
    for name, parameter in made.here.items():
        if parameter.grad is not None:
            total += local(parameter.grad).float().square().sum() / made.copies[name]
    dist.all_reduce(total)
    return total.sqrt()


def owns(made: Any, parameter: Tensor) -> bool:
    """Whether this rank updates a parameter: not where another does it for all."""
    syncs = getattr(made.sync, "parts", None)
    for sync in syncs.values() if syncs is not None else [made.sync]:
        server: Any = getattr(sync, "server", None)
        if server is None:
            continue
        for name, one in server.parameters.items():
            if one is parameter:
                return bool(server.owner[name] == server.rank)
    return True


def _copies(made: Any) -> dict[str, int]:
    """How many ranks have the gradient of the same part of each parameter."""
    mine = {name: _part(made, p) for name, p in made.here.items() if owns(made, p)}
    each: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(each, mine)
    count = Counter((name, part) for rows in each for name, part in rows.items())
    return {name: count[name, part] for name, part in mine.items()}


def _part(made: Any, parameter: Tensor) -> tuple[int, ...]:
    """Which part of a parameter this rank has."""
    if id(parameter) in made.splits:
        return (dist.get_rank(made.splits[id(parameter)][2]),)
    if not hasattr(parameter, "placements"):
        return ()
    at = parameter.device_mesh.get_coordinate()
    return tuple(c if p.is_shard() else 0 for c, p in zip(at, parameter.placements, strict=True))
