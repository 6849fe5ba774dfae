"""The optimizer of a split model: its parameters on this rank, clipping by the norm of all,
averages.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from foretell.errors import InputError
from foretell.plan import Plan
from foretell.pytorch.deploy.buckets import local
from foretell.pytorch.deploy.collective import everyones, split_of

Tensor = Any


STAGE = "foretell_stage"  # attribute of a parameter that one stage trains: the group of stages


class Ema:
    """average = decay · average + (1 − decay) · parameter, after every update."""

    def __init__(self, decay: float, parameters: Mapping[str, Tensor]) -> None:
        if not 0 < decay < 1:
            raise InputError(f"a decay of {decay:g}", hint="it is between 0 and 1, say 0.999")
        self.decay = decay
        self.kept = {name: p.detach().clone() for name, p in parameters.items()}

    def update(self, parameters: Mapping[str, Tensor]) -> None:
        """Move the averages towards the parameters."""
        with torch.no_grad():
            for name, parameter in parameters.items():
                local(self.kept[name]).lerp_(local(parameter.detach()), 1 - self.decay)


def clip(made: Any, most: float) -> Tensor:
    """Scale gradients so that their norm is at most so much; the norm before. On every rank."""
    return _scaled(made.here.values(), gradient_norm(made), most)


def _scaled(parameters: Iterable[Tensor], norm: Tensor, most: float) -> Tensor:
    """Scale gradients of a norm so that it is at most so much, as torch.nn.utils does."""
    factor = (most / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            grad = local(parameter.grad)
            grad.mul_(factor.to(grad.device, grad.dtype))
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
    is_most, world, total = math.isinf(kind), dist.get_world_size(), torch.zeros(())
    for parameter in parameters:
        grad, stages = parameter.grad, getattr(parameter, STAGE, None)
        total = total.to(parameter.device)
        if grad is None or not local(grad).numel():  # another stage has it
            continue
        held = local(grad).detach().abs().float()
        parts = 1 if stages is None else dist.get_world_size(stages)  # each on as many ranks
        for dim, one in enumerate(getattr(grad, "placements", ())):
            parts *= 1 if one.is_replicate() else grad.device_mesh.size(dim)
        share = held.max() if is_most else held.pow(kind).sum() * (parts / world)
        total = torch.maximum(total, share) if is_most else total + share
    dist.all_reduce(total, op=dist.ReduceOp.MAX if is_most else dist.ReduceOp.SUM)
    return total if is_most else total.pow(1.0 / kind)


def clip_norm(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *_: Any,
    **__: Any,
) -> Tensor:
    """As torch.nn.utils.clip_grad_norm_, also where some gradients are split over ranks."""
    each = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    return _scaled(each, total_norm(each, float(norm_type)), max_norm)


def clip_value(
    parameters: Tensor | Iterable[Tensor], clip_value: float, *_: Any, **__: Any
) -> None:
    """As torch.nn.utils.clip_grad_value_, also where some gradients are split over ranks."""
    for parameter in [parameters] if isinstance(parameters, torch.Tensor) else parameters:
        if parameter.grad is not None:
            local(parameter.grad).clamp_(-clip_value, clip_value)


def owns(made: Any, parameter: Tensor) -> bool:
    """Whether this rank updates a parameter: not where another does it for all."""
    return all(one is None or one.owns(parameter) for one in (made.sync, made.pipeline))


def _copies(made: Any) -> dict[str, int]:
    """How many ranks have the gradient of the same part of each parameter."""
    mine = {name: _part(p) for name, p in made.here.items() if owns(made, p)}
    count = Counter((name, part) for rows in everyones(mine) for name, part in rows.items())
    return {name: count[name, part] for name, part in mine.items()}


def _part(parameter: Tensor) -> tuple[int, ...]:
    """Which part of a parameter this rank has."""
    split = split_of(parameter)
    if split is not None:
        return (dist.get_rank(split.group),)
    if not hasattr(parameter, "placements"):
        return ()
    at = parameter.device_mesh.get_coordinate()
    return tuple(
        0 if p.is_replicate() else c for c, p in zip(at, parameter.placements, strict=True)
    )


def repoint(optimizer: Any, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Replace each parameter by what it became; drop those that are on other ranks.

    Names tell which became which; parameters of other models stay. State that is there already (a
    checkpoint was loaded) is split as its parameter is.
    """
    names = {id(p): n for n, p in before.items()}
    if all(after.get(n) is p for n, p in before.items()):
        return
    for one in getattr(optimizer, "each", [optimizer]):
        for group in one.param_groups:
            each = [after.get(names[id(p)]) if id(p) in names else p for p in group["params"]]
            group["params"][:] = [p for p in each if p is not None]  # LBFGS keeps this very list
        for old in [p for p in one.state if id(p) in names]:
            new, state = after.get(names[id(old)]), one.state.pop(old)
            if new is not None:
                one.state[new] = {k: _like(v, old, new) for k, v in state.items()}


def _like(value: Any, old: Tensor, new: Tensor) -> Any:
    """What an optimizer keeps of a parameter, split as the parameter is now."""
    if value is None or getattr(value, "shape", None) != old.shape or type(new.data) is type(value):
        return value
    if not hasattr(new, "placements"):
        raise InputError(
            "the optimizer has been stepped before the model was deployed",
            hint="deploy first; load the optimizer's state afterwards",
        )
    return distribute_tensor(value, new.device_mesh, new.placements)


class Several:
    """Optimizers of parts of one model, as far as deploying needs one."""

    def __init__(self, each: Sequence[Any]) -> None:
        self.each = list(each)
        self.defaults = each[0].defaults if each else {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for one in self.each for group in one.param_groups]

    def register_step_pre_hook(self, hook: Any) -> Any:
        return _together([one.register_step_pre_hook(hook) for one in self.each])

    def register_step_post_hook(self, hook: Any) -> Any:
        return _together([one.register_step_post_hook(hook) for one in self.each])


def _together(handles: Sequence[Any]) -> Any:
    """Handles of several hooks as one."""
    return SimpleNamespace(remove=lambda: [one.remove() for one in handles])


def tuned(optimizer: Any, plan: Plan) -> None:
    """Turn on the kernels that a plan names for the update; asked on all ranks at once."""
    names = {spec.partition(":")[0] for spec in plan.whatifs}
    words = [
        word
        for word in ("foreach", "fused")
        if plan.optimizer_kernels == word or f"{word}-optimizer" in names
    ]
    for word in words:
        _require_kernels(optimizer, word)
        for group in optimizer.param_groups:
            group[word] = True
            group["foreach" if word == "fused" else "fused"] = False
        if word == "fused" and isinstance(optimizer, torch.optim.SGD):
            optimizer.register_step_pre_hook(_begin_momentum)
    for group in optimizer.param_groups:
        if _is_mixed(group):  # one by one: torch's kernels for many take one kind
            group.update({word: False for word in ("foreach", "fused") if word in group})


def _require_kernels(optimizer: Any, word: str) -> None:
    """Raise on every rank where an update of that kind does not take the parameters of one."""
    groups = optimizer.param_groups
    is_split = any(isinstance(p.data, DTensor) for group in groups for p in group["params"])
    is_sgd = isinstance(optimizer, torch.optim.SGD)
    found = {
        f"{type(optimizer).__name__} has no {word} update": word not in optimizer.defaults,
        f"a {word} update takes parameters that are all split over ranks, or none; under tp some "
        "are and some are not": any(map(_is_mixed, groups)),
        "a fused update of SGD takes no parameters that are split over ranks": (
            word == "fused" and is_sgd and is_split
        ),
    }
    each = everyones(next((why for why, is_so in found.items() if is_so), ""))
    if any(each):
        raise InputError(max(each), hint="leave optimizer_kernels out of the plan")


def _begin_momentum(optimizer: Any, *_: Any) -> None:
    """Begin the momentum of parameters that first have a gradient later than others.

    Torch's fused SGD takes all or none without; what it adds to zeros is what it begins with.
    """
    for group in optimizer.param_groups:
        used = [p for p in group["params"] if p.grad is not None]
        bare = [p for p in used if optimizer.state[p].get("momentum_buffer") is None]
        if group["momentum"] and not group["dampening"] and len(bare) < len(used):
            for p in bare:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)


def _is_mixed(group: Mapping[str, Any]) -> bool:
    """Whether some parameters are split over ranks and others are whole."""
    return len({isinstance(p.data, DTensor) for p in group["params"]}) > 1
