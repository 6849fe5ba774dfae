"""The norm of all gradients under any plan, each counted once, and gradients clipped by it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from foretell.pytorch.deploy.buckets import local

Tensor = Any
STAGE = "foretell_stage"  # attribute of a parameter that one stage trains: the group of stages


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


def total_norm(parameters: Iterable[Tensor], kind: float = 2.0) -> Tensor:
    """The norm of gradients in a loop of one's own, of which some are split over ranks."""
    is_most = math.isinf(kind)
    totals: dict[Any, Tensor] = {}
    for parameter in parameters:
        grad, stages = parameter.grad, getattr(parameter, STAGE, None)
        if grad is None and stages is None:
            continue
        one = torch.zeros((), device=parameter.device)
        if grad is not None and local(grad).numel():  # not where another stage has it
            part = local(grad).detach().abs().float()
            one = part.max() if is_most else part.pow(kind).sum()
        how = (grad.device_mesh, tuple(grad.placements)) if hasattr(grad, "placements") else None
        before = totals.get((how, stages))
        both = one if before is None else (max(before, one) if is_most else before + one)
        totals[how, stages] = both
    if not totals:
        return torch.zeros(())
    op = dist.ReduceOp.MAX if is_most else dist.ReduceOp.SUM
    for (how, stages), total in totals.items():
        for dim, one in enumerate(how[1] if how is not None else ()):
            if one.is_shard():
                dist.all_reduce(total, op=op, group=how[0].get_group(dim))
        if stages is not None:
            dist.all_reduce(total, op=op, group=stages)
    every = torch.stack(list(totals.values()))
    return every.max() if is_most else every.sum().pow(1.0 / kind)


def clip_norm(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *_: Any,
    **__: Any,
) -> Tensor:
    """As torch.nn.utils.clip_grad_norm_, also where some gradients are split over ranks."""
    each = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    norm = total_norm(each, float(norm_type))
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in each:
        if parameter.grad is not None:
            grad = local(parameter.grad)
            grad.mul_(factor.to(grad.device, grad.dtype))
    return norm


def clip_value(
    parameters: Tensor | Iterable[Tensor], clip_value: float, *_: Any, **__: Any
) -> None:
    """As torch.nn.utils.clip_grad_value_, also where some gradients are split over ranks."""
    for parameter in [parameters] if isinstance(parameters, torch.Tensor) else parameters:
        if parameter.grad is not None:
            local(parameter.grad).clamp_(-clip_value, clip_value)


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
