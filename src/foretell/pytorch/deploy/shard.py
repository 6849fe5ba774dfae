"""Parameters sharded over data-parallel ranks: FSDP2, unit by unit."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._pytree import tree_map

from foretell.errors import InputError
from foretell.plan import Plan
from foretell.pytorch.deploy.buckets import local
from foretell.pytorch.deploy.collective import everyones
from foretell.pytorch.deploy.deferred import Deferred, Place, placed, with_memory
from foretell.pytorch.deploy.units import is_box, units
from foretell.pytorch.deploy.uses import shared_names, trial


def shard(
    model: Any,
    mesh: Any,
    *,
    keep: bool = False,  # parameters between forward and backward (ZeRO 2), or not (ZeRO 3)
    dtype: Any = None,  # of compute; parameters stay as they are
    reduce_dtype: Any = None,  # of gradients on the wire
    offload: bool = False,
    in_units: bool = True,  # every unit is always called
    apart: Collection[Any] = (),  # parameters that ranks share in another way
) -> Any:
    """Shard each unit and then what is left of the model, over one axis or copies × parts.

    Units that ranks may or may not call (experts) are not gathered one by one: ranks would wait for
    each other. FSDP cannot cut parameters without dimensions.
    """
    # a linear layer gives one, and nothing writes to it
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype)
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": not keep,
        "mp_policy": policy,
        "offload_policy": _on_host() if offload else OffloadPolicy(),
        "ignored_params": {p for p in model.parameters() if not p.dim()} | set(apart),
    }
    for parameter in model.parameters():
        if not parameter.is_contiguous():  # channels last, which FSDP does not take
            parameter.data = parameter.data.contiguous()
    tied = {
        id(p) for names in shared_names(model).values() for p in [model.get_parameter(names[0])]
    }
    for unit in units(model).values() if in_units else ():
        if unit is not model and not any(id(p) in tied for p in unit.parameters()):
            fully_shard(unit, **options)  # what is tied to other units is left to the whole
    return fully_shard(model, **options)


def require_one_format(model: Any, zero: int) -> None:
    """Raise where a unit, or what is left of the model, has trained parameters of two formats."""
    each = [unit for unit in units(model).values() if unit is not model]
    inside = {id(p) for unit in each for p in unit.parameters()}
    rest = [(n, p) for n, p in model.named_parameters() if id(p) not in inside]
    for rows in (rest, *(list(unit.named_parameters()) for unit in each)):
        first: dict[Any, str] = {}
        for name, p in rows:
            if p.requires_grad and p.dim():
                first.setdefault(p.dtype, name)
        if len(first) > 1:
            (one, a), (other, b), *_ = first.items()
            raise InputError(
                f"zero={zero}: `{a}` is in {one} and `{b}` in {other}, and FSDP gathers parameters "
                "of one format together",
                hint="give both one dtype, or take zero=1",
            )


def _on_host() -> CPUOffloadPolicy:
    """Optimizer state in host memory, pinned where a GPU reads it."""
    return CPUOffloadPolicy(pin_memory=torch.cuda.is_available())


def fills_parts(plan: Plan) -> bool:
    """Whether ranks can be given their parts of a model that they never hold whole."""
    others = (plan.stages, plan.groups, plan.regions, plan.late, plan.actions, plan.offload)
    return plan.zero >= 2 and plan.ranks == plan.dp > 1 and not any(others)


def held(model: Any) -> dict[str, Any]:
    """The values of parameters and buffers, and their places where they have none, by any name."""
    found = dict(model.named_parameters(remove_duplicate=False))
    found |= dict(model.named_buffers(remove_duplicate=False))
    return {name: tensor.detach() for name, tensor in found.items()}


def fill(model: Any, whole: Mapping[str, Any], device: Any, made: Deferred | None) -> None:
    """Give the ranks of a sharded model its values, one tensor at a time.

    `whole` is the state before sharding. With what was noted of its making every rank makes the
    values itself and keeps its parts; else they are on the first rank, and on the meta device on
    others. No rank but that one holds more than its parts and one whole tensor.
    """
    if any(t.is_meta for t in whole.values()):
        model.to_empty(device=device)
    if made is not None:
        _make(model, whole, made)
        return
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, tensor in named.items():
        first = whole.get(name)
        here = local(tensor.detach())
        if not hasattr(tensor, "placements"):
            if dist.get_rank() == 0 and first is not None:
                here.copy_(first.detach())
            dist.broadcast(here, src=0)
            continue
        if dist.get_rank() == 0 and first is not None:
            sent = first.detach().to(device).contiguous()
        else:
            sent = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        parts = distribute_tensor(sent, tensor.device_mesh, tensor.placements)
        here.copy_(parts.to_local())


def _make(model: Any, whole: Mapping[str, Any], made: Deferred) -> None:
    """Make the values of a model on every rank, and keep this rank's parts."""
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    wanted: dict[int, list[tuple[Any, Place]]] = {}
    for name, tensor in named.items():
        if whole[name].is_meta:
            place = placed(whole[name])
            wanted.setdefault(place.key, []).append((tensor, place))
        else:
            _keep(tensor, whole[name].detach())
    for rows, storage in made.values(wanted):
        for tensor, place in rows:
            _keep(tensor, place.on(storage))
    ends = everyones(hashlib.sha256(made.ends.numpy().tobytes()).hexdigest())
    if len(set(ends)) > 1:
        odd = next(r for r, end in enumerate(ends) if end != ends[0])
        raise InputError(
            f"rank {odd} draws other random numbers for the model than rank 0",
            hint="every rank has to make the same model",
        )


def _keep(tensor: Any, values: Any) -> None:
    """Copy this rank's part of some values."""
    here = local(tensor.detach())
    if hasattr(tensor, "placements"):
        shape, first = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        for dim, (begin, size) in enumerate(zip(first, shape, strict=True)):
            values = values.narrow(dim, min(begin, values.shape[dim]), size)
    here.copy_(values)


def always_called(model: Any, example: tuple[Any, ...] | None) -> bool:
    """Whether every unit is called whatever the data says, as far as an example can show.

    An nn.Sequential calls all of its layers; a forward over other containers is tried with tensors
    that have no values.
    """
    found = list(units(model).values())
    boxes = [m for m in model.modules() if is_box(m) and not isinstance(m, nn.Sequential)]
    listed = [b for b in boxes if found and any(u is found[0] for u in b.children())]
    if example is None or not listed or found == [model]:
        return True
    called = set[int]()
    try:
        with with_memory(model), trial(model) as fake:
            for unit in found:
                unit.register_forward_pre_hook(lambda m, _: called.add(id(m)))
            model(*tree_map(fake, example))
    except (DataDependentOutputException, DynamicOutputShapeException):
        return False
    except Exception:  # other things that such tensors cannot do say nothing of calls
        return True
    return called == {id(u) for u in found}


class Usage:
    """Which sharded parameters a step used: those that no rank did keep no gradient.

    Ranks may use different experts, so a rank gives zeros for what it did not use: negative ones. A
    sum of them is a negative zero only where no rank had anything to add to it, which therefore
    needs no message. Parameters without dimensions are not sharded: their gradients are averaged
    here.
    """

    def __init__(self, modules: Iterable[Any], group: Any) -> None:
        modules = list(modules)
        self.group, self.absent = group, dict[int, Any]()  # sharded parameters not used here
        scalars = [p for m in modules for p in m.parameters() if not p.dim() and p.requires_grad]
        self.scalars = list({id(p): p for p in scalars}.values())
        for part in (part for module in modules for part in _parts(module)):
            self._watch(part)

    def _watch(self, part: Any) -> None:
        """Look for gradients before torch reduces them; a name torch marks as private."""
        reduce = part.post_backward

        def looking(*args: Any) -> Any:
            for parameter in part.fsdp_params:
                whole = getattr(parameter, "_unsharded_param", None)
                if parameter.unsharded_accumulated_grad is not None or whole is None:
                    continue
                is_here = whole.requires_grad and whole.untyped_storage().size()
                if whole.grad is None and is_here:  # ranks reduce the same number of values
                    whole.grad = torch.full_like(whole, -0.0)
                    self.absent[id(parameter)] = parameter
            return reduce(*args)

        part.post_backward = looking

    def average_in_backward(self, model: Any) -> None:
        """Average the gradients of scalars as they are made, for a loop that is not ours."""

        def average(parameter: Any) -> None:
            if all(part.reduce_grads for part in _parts(model)):  # else they add up
                dist.all_reduce(parameter.grad, group=self.group)
                parameter.grad /= dist.get_world_size(self.group)

        for scalar in self.scalars:
            scalar.register_post_accumulate_grad_hook(average)
        self.scalars = []

    def _average_scalars(self) -> None:
        """Give every rank the mean gradient of each scalar that any rank used."""
        if not self.scalars:
            return
        size = dist.get_world_size(self.group)
        rows = [(0.0, 0.0) if p.grad is None else (1.0, float(p.grad)) for p in self.scalars]
        both = torch.tensor(rows, dtype=torch.float64, device="cpu").to(self.scalars[0].device)
        dist.all_reduce(both, group=self.group)
        for scalar, (used, total) in zip(self.scalars, both.tolist(), strict=True):
            scalar.grad = torch.full_like(scalar, total / size) if used else None

    def finish(self) -> None:
        """Drop the zeros that stand for no gradient anywhere."""
        self._average_scalars()
        for parameter in self.absent.values():
            whole = parameter.sharded_param
            if whole.grad is not None:
                grad = local(whole.grad)
                if bool(((grad == 0) & grad.signbit()).all()):
                    whole.grad = None
        self.absent.clear()


def _groups(state: Any) -> list[Any]:
    """The parameters that a unit gathers together; torch 2.11 has at most one such group."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _parts(model: Any) -> list[Any]:
    """What is gathered together, of all units of a model."""
    units = [m for m in model.modules() if isinstance(m, FSDPModule)]
    return [part for unit in units for part in _groups(unit._get_fsdp_state())]


def hold(module: Any) -> None:
    """Before a backward of one of several micro-batches: gradients add up, parameters stay."""
    if isinstance(module, FSDPModule):
        _set_backward(module, is_last=False)


def reduce(module: Any) -> None:
    """After the backward of all micro-batches: reduce what `hold` has kept."""
    if not isinstance(module, FSDPModule):
        return
    _set_backward(module, is_last=True)
    state = module._get_fsdp_state()
    for each in state._state_ctx.all_states:
        for part in _groups(each):
            part.post_backward()
    state._root_post_backward_final_callback()


def _set_backward(module: Any, *, is_last: bool) -> None:
    module.set_is_last_backward(is_last)
    module.set_reshard_after_backward(is_last)
    module.set_requires_gradient_sync(is_last)


@contextmanager
def no_sync(model: Any) -> Iterator[None]:
    """Add gradients up without reducing them."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
