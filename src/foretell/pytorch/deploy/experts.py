"""Experts over ranks: modules with a matrix for each expert, given which tokens go to which.

Such a module has parameters with one leading entry for each expert, and takes tokens, the experts
each goes to, and their weights. Every pair of token and expert is computed by itself, so that

    over tensor ranks     each rank has some experts, computes their pairs, and results are summed
    over context ranks    each rank has some tokens and all experts
    over data ranks (ep)  each rank has some experts; pairs go to them and back by all-to-all

Its own forward runs on the experts of the rank, numbered from zero.
"""

from __future__ import annotations

from collections.abc import Iterator
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


class Experts:
    """One such module of a split model (→ graph_split): tokens over `cp`, experts over `tp`."""

    def __init__(self, module: Module, split: Any) -> None:
        self.module, self.split, self.own = module, split, module.forward
        self.mesh, self.rows, self.axis, self.whole = split.mesh, split.cp, split.tp, split.whole
        self.many = _leading(module)
        each = [p.placements for p in module.parameters()]
        if self.axis is not None and not all(how[self.axis] == Shard(0) for how in each):
            self.axis = None  # they do not share evenly: every rank has all
        module.forward = self._forward

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        found = routed(args, kwargs)
        if found is None or found[0].shape[0] % self.mesh.size(self.rows or 0):
            return self._everywhere(args, kwargs)
        part = list(self.whole)
        if self.rows is not None:
            part[self.rows] = Shard(0)
        grads, out = list(part), list(part)
        if self.axis is not None:
            grads[self.axis] = out[self.axis] = Partial()
        mine = [self.split.local(x, part, grads) for x in found]
        rank, first = 0, 0
        if self.axis is not None:
            rank = self.mesh.get_local_rank(self.axis)
            first = rank * (self.many // self.mesh.size(self.axis))
        # the sum over those pairs whose experts are here
        (tokens, index, weights), many = mine, _leading(self.module, is_local=True)
        each, flat = _pairs(index)
        here = ((flat >= first) & (flat < first + many)).nonzero().flatten()
        own = (flat[here] - first)[:, None]
        some = self._compute(tokens[each[here]], own, weights.flatten()[here, None])
        made = torch.zeros_like(tokens).index_add(0, each[here], some.to(tokens.dtype))
        return DTensor.from_local(made, self.mesh, out, run_check=False)

    def _compute(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        grads = list(self.whole)
        if self.rows is not None:
            grads[self.rows] = Partial()
        if self.axis is not None:
            grads[self.axis] = Shard(0)
        own = {n: p.to_local(grad_placements=grads) for n, p in self.module.named_parameters()}
        return _called(self.module, self.own, own, (tokens, index, weights))

    def _everywhere(self, args: Any, kwargs: Any) -> Any:
        """A call of another kind: all of it on every rank."""
        own = {n: self.split.plain(p) for n, p in self.module.named_parameters()}
        values = torch.utils._pytree.tree_map(self.split.plain, (args, kwargs))
        with _holding(self.module, own):
            found = self.own(*values[0], **values[1])
        return DTensor.from_local(found, self.mesh, self.whole, run_check=False)


class Dispatched:
    """One such module, its experts over data-parallel ranks: pairs go to them by all-to-all."""

    def __init__(self, name: str, module: Module, mesh: Any) -> None:
        self.name, self.module, self.mesh = name, module, mesh  # copies × ep
        self.group, self.size = mesh.get_group("ep"), mesh.size(1)
        self.many, self.own = _leading(module), module.forward
        if self.many % self.size:
            raise InputError(
                f"ep={self.size}: `{name}` has {self.many} experts, which {self.size} ranks cannot "
                "share evenly",
                hint="choose an ep that divides them",
            )
        for key, p in list(module._parameters.items()):
            how = [Replicate(), Shard(0)]
            made = nn.Parameter(
                distribute_tensor(p.detach(), mesh, how, src_data_rank=None),
                requires_grad=p.requires_grad,
            )
            module._parameters[key] = made
            if mesh.size(0) > 1 and p.requires_grad:
                made.register_post_accumulate_grad_hook(self._mean)
        module.forward = self._forward

    def _mean(self, parameter: Tensor) -> None:
        """Ranks with the same experts agree; a gradient is there on each, zeros where unused."""
        grad = local(parameter.grad)
        dist.all_reduce(grad, group=self.mesh.get_group(0))
        grad.div_(self.mesh.size(0))

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        found = routed(args, kwargs)
        if found is None:
            raise InputError(
                f"ep: `{self.name}` is not given tokens, the experts of each and their weights",
                hint="run it without ep",
            )
        tokens, index, weights = found
        each, flat = _pairs(index)
        owner = flat // (self.many // self.size)
        order = torch.argsort(owner, stable=True)
        counts = torch.bincount(owner, minlength=self.size)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        sent, got = counts.tolist(), theirs.tolist()
        rows = _exchange(tokens[each[order]], sent, got, self.group)
        ids = _exchange(flat[order], sent, got, self.group)
        share = _exchange(weights.flatten()[order], sent, got, self.group)
        first = dist.get_rank(self.group) * (self.many // self.size)
        made = self._compute(rows, (ids - first)[:, None], share[:, None])
        back = _exchange(made, got, sent, self.group)
        return torch.zeros_like(tokens).index_add(0, each[order], back.to(tokens.dtype))

    def _compute(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        # gradients come from the tokens of every rank of the group, and the mean is wanted; FSDP,
        # which leaves experts out, may have tokens in a shorter format
        share = 1 / self.size
        named = self.module.named_parameters()
        own = {n: times(p.to_local(), share).to(tokens.dtype) for n, p in named}
        return _called(self.module, self.own, own, (tokens, index, weights))


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


def _leading(module: Module, *, is_local: bool = False) -> int:
    parameter = next(module.parameters())
    return len(local(parameter.detach()) if is_local else parameter)


def _exchange(x: Tensor, sent: list[int], got: list[int], group: Any) -> Tensor:
    """Rows to the ranks they are for; their gradients come back the same way."""

    def moved(x: Tensor, out: list[int], into: list[int]) -> Tensor:
        found = x.new_empty((sum(into), *x.shape[1:]))
        dist.all_to_all_single(found, x.contiguous(), into, out, group=group)
        return found

    return both_ways(x, lambda y: moved(y, sent, got), lambda g: moved(g, got, sent))
