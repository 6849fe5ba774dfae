"""Experts over ranks: modules with a matrix for each expert, given which tokens go to which.

Such a module has parameters with one leading entry for each expert, and takes tokens, the experts
each goes to, and their weights. Every pair of token and expert is computed by itself, so that

    over tensor ranks     each rank has some experts, computes their pairs, and results are summed
    over context ranks    each rank has some tokens and all experts
    over data ranks (ep)  each rank has some experts; pairs go to them and back by all-to-all

With ep, tensor ranks divide the experts of each rank further, and context ranks the tokens.

Its own forward runs on the experts of the rank, numbered from zero.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils.stateless import _reparametrize_module

from foretell.errors import InputError
from foretell.pytorch.deploy.buckets import local
from foretell.pytorch.deploy.collective import both_ways, times

Module = Any
Tensor = Any
Routed = tuple[Tensor, Tensor, Tensor]  # tokens × features, tokens × experts of each, their weights


def experts_of(model: Module) -> dict[str, int]:
    """Modules that hold a matrix for each expert, and how many experts each has."""
    found: dict[str, int] = {}
    for name, module in model.named_modules():
        own = [p for p in module._parameters.values() if p is not None]
        many = {p.shape[0] if p.dim() else 0 for p in own}
        if len(many) == 1 and max(many) > 1 and sum(p.dim() == 3 for p in own) >= 2:
            found[name] = max(many)
    return found


def split_experts(p: Tensor, mesh: Any, *, over_tensor: bool) -> Tensor:
    """A parameter with one entry for each expert, the entries split over `ep`, then `tp`."""
    rows, left = list[Any](), len(p)
    for dim, axis in enumerate(mesh.mesh_dim_names):
        is_split = axis == "ep" or (over_tensor and axis == "tp" and left % mesh.size(dim) == 0)
        rows.append(Shard(0) if is_split else Replicate())
        left //= mesh.size(dim) if is_split else 1
    made = distribute_tensor(p.detach(), mesh, rows, src_data_rank=None)
    return nn.Parameter(made, requires_grad=p.requires_grad)


class _Shared:
    """A module whose experts are on several ranks, of which this one has a run of them."""

    def __init__(self, name: str, module: Module) -> None:
        self.name, self.module, self.own = name, module, module.forward
        parameter = next(module.parameters())
        self.mesh, self.many = parameter.device_mesh, len(parameter)
        self.axes = list(self.mesh.mesh_dim_names)
        self.ep = self.axes.index("ep") if "ep" in self.axes else None
        split = [dim for dim, one in enumerate(parameter.placements) if one.is_shard()]
        self.axis = next((dim for dim in split if dim != self.ep), None)
        self.parts = self.mesh.size(self.axis) if self.axis is not None else 1
        self.here = len(local(parameter.detach()))
        at = self.mesh.get_coordinate()
        self.part = at[self.axis] if self.axis is not None else 0
        place = at[self.ep] if self.ep is not None else 0
        self.first = (place * self.parts + self.part) * self.here
        module.forward = self._forward

    def _average(self, axes: Collection[str]) -> None:
        """Let ranks with the same experts have the mean gradient; all have one, zeros maybe."""
        groups = [self.mesh.get_group(d) for d, axis in enumerate(self.axes) if axis in axes]
        groups = [group for group in groups if dist.get_world_size(group) > 1]

        def average(parameter: Tensor) -> None:
            grad = local(parameter.grad)
            for group in groups:
                dist.all_reduce(grad, group=group)
                grad.div_(dist.get_world_size(group))

        for p in self.module.parameters():
            if p.requires_grad and groups:
                p.register_post_accumulate_grad_hook(average)

    def _sums(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """For each token the sum over those of its experts that this rank answers for."""
        each, flat = _pairs(index)
        mine = (flat // self.here % self.parts == self.part).nonzero().flatten()
        each, flat, share = each[mine], flat[mine], weights.flatten()[mine]
        if self.ep is None:
            some = self._compute(tokens[each], (flat - self.first)[:, None], share[:, None])
            return torch.zeros_like(tokens).index_add(0, each, some.to(tokens.dtype))
        group = self.mesh.get_group(self.ep)
        owner = flat // (self.here * self.parts)
        order = torch.argsort(owner, stable=True)
        counts = torch.bincount(owner, minlength=self.mesh.size(self.ep))
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=group)
        sent, got = counts.tolist(), theirs.tolist()
        rows = _exchange(tokens[each[order]], sent, got, group)
        ids = _exchange(flat[order], sent, got, group)
        share = _exchange(share[order], sent, got, group)
        made = self._compute(rows, (ids - self.first)[:, None], share[:, None])
        back = _exchange(made, got, sent, group)
        return torch.zeros_like(tokens).index_add(0, each[order], back.to(tokens.dtype))

    def _compute(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        # gradients come from the tokens of every rank of `ep`, and the mean is wanted; FSDP, which
        # leaves experts out, may have tokens in a shorter format
        share = 1.0 if self.ep is None else 1 / self.mesh.size(self.ep)
        named = self.module.named_parameters()
        own = {n: times(self._local(p), share).to(tokens.dtype) for n, p in named}
        return _called(self.module, self.own, own, (tokens, index, weights))

    def _local(self, p: Tensor) -> Tensor:
        return p.to_local()

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def _refuse(self) -> None:
        raise InputError(
            f"ep: `{self.name}` is not given tokens, the experts of each and their weights",
            hint="run it without ep",
        )


class Experts(_Shared):
    """One such module of a split model (→ graph_split): tokens over `cp`, experts over `tp`."""

    def __init__(self, name: str, module: Module, split: Any) -> None:
        super().__init__(name, module)
        self.split, self.context = split, False  # whether tokens are split now
        self._average(["copies"])

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        found, split = routed(args, kwargs), self.split
        if found is None:
            return self._everywhere(args, kwargs)
        tokens = list(split.whole)
        self.context = split.cp is not None and len(found[0]) % split.mesh.size(split.cp) == 0
        if self.context:
            tokens[split.cp] = Shard(0)
        grads, out = list(tokens), list(tokens)
        if self.axis is not None:
            grads[split.tp] = out[split.tp] = Partial()
        made = self._sums(*(split.local(x, tokens, grads) for x in found))
        return DTensor.from_local(made, split.mesh, out, run_check=False)

    def _local(self, p: Tensor) -> Tensor:
        is_summed = [self.context and axis == "cp" for axis in self.axes]
        pairs = zip(p.placements, is_summed, strict=True)
        return p.to_local(grad_placements=[Partial() if summed else how for how, summed in pairs])

    def _everywhere(self, args: Any, kwargs: Any) -> Any:
        """A call of another kind: all of it on every rank."""
        if self.ep is not None:
            self._refuse()
        own = {n: self.split.plain(p) for n, p in self.module.named_parameters()}
        values = torch.utils._pytree.tree_map(self.split.plain, (args, kwargs))
        with _holding(self.module, own):
            found = self.own(*values[0], **values[1])
        return DTensor.from_local(found, self.split.mesh, self.split.whole, run_check=False)


class Dispatched(_Shared):
    """One such module of a model that is not split so: its tokens are those of the rank."""

    def __init__(self, name: str, module: Module, mesh: Any) -> None:
        require_experts(name, module, mesh)
        for key, p in list(module._parameters.items()):
            module._parameters[key] = split_experts(p, mesh, over_tensor=False)
        super().__init__(name, module)
        self._average(["copies", "cp"])

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        found = routed(args, kwargs)
        return self._refuse() if found is None else self._sums(*found)


def require_experts(name: str, module: Module, mesh: Any) -> None:
    """Raise where ranks cannot share experts evenly."""
    many, size = _leading(module), mesh.size(mesh.mesh_dim_names.index("ep"))
    if many % size:
        raise InputError(
            f"ep={size}: `{name}` has {many} experts, which {size} ranks cannot share evenly",
            hint="choose an ep that divides them",
        )


def routed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Routed | None:
    """Tokens, the experts of each and their weights, where a call has just these."""
    given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    if len(given) != 3 or len(args) + len(kwargs) != 3:
        return None
    whole = [x for x in given if not x.is_floating_point()]
    if len(whole) != 1 or whole[0].dim() != 2 or given[0] is whole[0]:
        return None
    tokens, (weights,) = given[0], [x for x in given[1:] if x.is_floating_point()] or (None,)
    if weights is None or weights.shape != whole[0].shape or tokens.dim() != 2:
        return None
    return (tokens, whole[0], weights) if len(tokens) == len(weights) else None


def _pairs(index: Tensor) -> tuple[Tensor, Tensor]:
    """The token and the expert of every pair."""
    tokens, each = index.shape
    return torch.arange(tokens, device=index.device).repeat_interleave(each), index.flatten()


def _called(module: Module, own: Any, parameters: dict[str, Tensor], values: Routed) -> Tensor:
    """A module's own forward on some experts; every parameter has a gradient, zero where unused."""
    used = sum(p.sum() for p in parameters.values()) * 0
    if not len(values[0]):
        return values[0] + used + values[2].sum() * 0
    with _holding(module, parameters):
        return own(*values) + used


@contextmanager
def _holding(module: Module, parameters: dict[str, Tensor]) -> Iterator[None]:
    """Other tensors in the places of a module's parameters, and as many experts as they have."""
    many, here = _leading(module), len(next(iter(parameters.values())))
    counts = {k: v for k, v in vars(module).items() if type(v) is int and v == many}
    module.__dict__.update(dict.fromkeys(counts, here))
    try:
        with _reparametrize_module(module, parameters):
            yield
    finally:
        module.__dict__.update(counts)


def _leading(module: Module) -> int:
    return len(next(module.parameters()))


def _exchange(x: Tensor, sent: list[int], got: list[int], group: Any) -> Tensor:
    """Rows to the ranks they are for; their gradients come back the same way."""

    def moved(x: Tensor, out: list[int], into: list[int]) -> Tensor:
        found = x.new_empty((sum(into), *x.shape[1:]))
        dist.all_to_all_single(found, x.contiguous(), into, out, group=group)
        return found

    return both_ways(x, lambda y: moved(y, sent, got), lambda g: moved(g, got, sent))
