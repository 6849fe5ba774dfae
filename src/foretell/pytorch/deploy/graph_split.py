"""Tensor, sequence and context parallel of a model as it is, from the graph of its step.

Parameters are DTensors, split as the captured dataflow says (→ workload.captured.weights), and
so is every activation: a forward that reads shapes or counts heads sees those of one process.
Matmuls with parameters and attention run on local tensors:

    matmul     a split output asks for whole inputs; split inputs leave partial sums, reduced at
               once: to whole activations, or to a part of the tokens each (sequence parallel)
    attention  heads over tensor ranks; queries over context ranks, which see all keys and values

Anything else is an operator of DTensor; one that DTensor has no rule for runs whole on every rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from foretell.errors import InputError
from foretell.pytorch.capture import capture
from foretell.pytorch.deploy.collective import both_ways, same
from foretell.pytorch.deploy.experts import Experts, experts_of, require_experts, split_experts
from foretell.pytorch.deploy.tensor import add_up, require_even
from foretell.pytorch.deploy.units import units
from foretell.pytorch.deploy.uses import is_wide, untouched
from foretell.workload.captured.weights import StepSplits, parameter_splits

Module = Any
Tensor = Any
_TOKENS, _HEADS = 1, 1  # dims: samples × tokens × features, samples × heads × tokens × depth
_LOSSES = {f for name, f in vars(F).items() if name.endswith(("_loss", "cross_entropy"))}
# DTensor takes the mean of means of a loss, whatever labels are left out, and looks for layouts of
# the attention inside torch's own layer for minutes
_WHOLE = _LOSSES | {F.multi_head_attention_forward}
_SAME = 1e-4  # relative: how near a module is to the linear layer it is taken for


def step_splits(model: Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> StepSplits:
    """How the parameters of a model split, from one captured step on such arguments."""
    graph = capture(model, (tuple(args), dict(kwargs)), _total, on="cpu")
    return parameter_splits(graph)


def _total(model: Module, batch: Any) -> Tensor:
    """A number that depends on all a model gives: what is done with it plays no part."""
    args, kwargs = batch
    found = [x for x in tree_leaves(model(*args, **kwargs)) if isinstance(x, torch.Tensor)]
    return sum(x.float().sum() for x in found if x.is_floating_point())


class GraphSplit:
    """A model whose parameters and activations are DTensors on one mesh."""

    def __init__(
        self,
        model: Module,
        mesh: Any,
        splits: StepSplits,
        *,
        sp: bool = False,
        expert_mesh: Any = None,  # of their parameters, where data-parallel ranks share experts
    ) -> None:
        self.mesh, self.axes = mesh, list(mesh.mesh_dim_names)
        self.tp = self.axes.index("tp") if "tp" in self.axes else None
        self.cp = self.axes.index("cp") if "cp" in self.axes else None
        self.sp = sp and self.tp is not None
        self.whole = [Replicate()] * len(self.axes)
        self.mode = _Distributed(self)
        # a plain tensor beside a DTensor is the same on every rank
        DTensor._op_dispatcher._allow_implicit_replication = True
        self._split_parameters(model, splits, expert_mesh)
        blocks = [block for name, block in units(model).items() if name]
        if self.sp or self.cp is not None:
            if not blocks or not splits.attentions:
                word = "sp" if self.cp is None else "cp"
                raise InputError(
                    f"{word}: {type(model).__name__} has no blocks with attention between tokens"
                )
            blocks[0].register_forward_pre_hook(self._enter, with_kwargs=True)
        alone = {id(block) for block in blocks}
        for module in model.modules():  # any may be recomputed outside the model's own forward
            is_own = not type(module).__module__.startswith("torch.nn.")
            if is_own or id(module) in alone or next(module.children(), None) is not None:
                module.forward = self._inside(module.forward)
        model.forward = self._outermost(model.forward)

    def _split_parameters(self, model: Module, splits: StepSplits, expert_mesh: Any) -> None:
        """Put DTensors in the places of the parameters; tied ones stay one."""
        experts = experts_of(model)
        for name in experts if expert_mesh is not None else ():
            require_experts(name, model.get_submodule(name), expert_mesh)
        lines = {n: m for n, m in model.named_modules() if n not in experts}
        sides = {n: side for n, m in lines.items() if (side := _side(m)) is not None}
        made: dict[int, Tensor] = {}
        names: dict[int, list[str]] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(p), []).append(name)
        for module in model.modules():
            for key, p in list(module._parameters.items()):
                if p is None:
                    continue
                if id(p) not in made:
                    if any(name.rpartition(".")[0] in experts for name in names[id(p)]):
                        one = split_experts(p, expert_mesh or self.mesh, over_tensor=True)
                    else:
                        one = self._split(p, _split_dim(names[id(p)], p, splits, sides))
                    made[id(p)] = one
                    if p.requires_grad:
                        one.register_post_accumulate_grad_hook(add_up)
                module._parameters[key] = made[id(p)]
        for name, side in sides.items():
            if not isinstance(lines[name], nn.Linear):
                lines[name].forward = functools.partial(self._through, lines[name], side)
        for name in experts:
            Experts(name, model.get_submodule(name), self)

    def _split(self, p: Tensor, dim: int | None) -> Tensor:
        """A parameter on the mesh, given the dim that tensor ranks may share."""
        how = list(self.whole)
        if self.tp is not None and dim is not None and p.shape[dim] % self.mesh.size(self.tp) == 0:
            how[self.tp] = Shard(dim)
        held = distribute_tensor(p.detach(), self.mesh, how, src_data_rank=None)
        return nn.Parameter(held, requires_grad=p.requires_grad)

    def _outermost(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Whole plain tensors outside, DTensors inside."""
        inner = self._inside(forward)

        def given_out(x: Any) -> Any:  # a loss is a tensor of its own, which may be written to
            made = self.plain(x)
            return made.clone() if made is not x and made.numel() == 1 else made

        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            return tree_map(given_out, inner(*args, **kwargs))

        return call

    def _inside(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            with nullcontext() if self.mode.is_on else self.mode:
                return forward(*args, **kwargs)

        return call

    def plain(self, x: Any) -> Any:
        """The whole of a DTensor; anything else as it is."""
        return _local(x, self.whole, self.whole) if isinstance(x, DTensor) else x

    def _enter(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Each rank takes its part of the tokens where the blocks begin."""
        if args and is_wide(args[0]):
            return (self._tokens(args[0]), *args[1:]), kwargs
        key = next((k for k, x in kwargs.items() if is_wide(x)), None)
        return None if key is None else (args, kwargs | {key: self._tokens(kwargs[key])})

    def _tokens(self, x: Tensor) -> Tensor:
        held = self._given(x)
        how = list(held.placements)
        for axis in (self.cp, self.tp if self.sp else None):
            if axis is not None:
                require_even(x, self.mesh[self.axes[axis]], self.axes[axis])
                how[axis] = Shard(_TOKENS)
        return held.redistribute(placements=how)

    def _held(self, x: Tensor) -> Tensor:
        return DTensor.from_local(x, self.mesh, self.whole, run_check=False)

    def settled(self, x: Any) -> Any:
        """Partial sums reduced at once: to whole activations, or to a part of the tokens."""
        if not isinstance(x, DTensor) or not any(p.is_partial() for p in x.placements):
            return x
        how = [Replicate() if p.is_partial() else p for p in x.placements]
        fits = x.dim() >= 3 and x.shape[_TOKENS] % self.mesh.size() == 0
        if self.sp and self.tp is not None and fits and x.placements[self.tp].is_partial():
            how[self.tp] = Shard(_TOKENS)
        found = x.redistribute(placements=how)
        if found.requires_grad and any(p.is_partial() and p != Partial() for p in x.placements):
            found.register_hook(_added_up)
        return found

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """A matmul with a parameter, on local tensors."""
        x, weight = self._given(x), self._given(weight)
        last, hows = x.dim() - 1, list[tuple[Any, ...]]()
        for mine, theirs in zip(x.placements, weight.placements, strict=True):
            if theirs == Shard(0):  # outputs are split: inputs whole
                hows.append((Replicate(), Shard(last), Partial(), theirs))
            elif theirs == Shard(1):  # inputs are split
                hows.append((Shard(last), Partial(), Shard(last), theirs))
            elif mine.is_shard() and mine.dim != last:  # samples or tokens
                hows.append((mine, mine, mine, Partial()))
            else:
                hows.append((Replicate(), Replicate(), Replicate(), theirs))
        ins, outs, grads_x, grads_w = zip(*hows, strict=True)
        made = F.linear(_local(x, ins, grads_x), weight.to_local(grad_placements=list(grads_w)))
        found = self.settled(DTensor.from_local(made, self.mesh, list(outs), run_check=False))
        return found if bias is None else self.settled(found + bias)

    def _through(self, module: Module, side: int, x: Tensor) -> Tensor:
        """A module that is a linear layer by another name; `side`: the dim of its outputs."""
        weight = module.weight if side == 0 else module.weight.t()
        return self.linear(x, weight, module.bias)

    def attention(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Each rank some heads, and of some tokens the queries."""
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        arguments = dict(zip(names, args, strict=False)) | kwargs
        q, k, v = (self._given(arguments[name]) for name in names[:3])
        if q.dim() != 4:
            return self.replicated(func, args, kwargs)
        how_q, how_k = list(self.whole), list(self.whole)
        grads_k = list(self.whole)
        if self.tp is not None:
            size = self.mesh.size(self.tp)
            if all(x.shape[_HEADS] % size == 0 for x in (q, k, v)):
                how_q[self.tp] = how_k[self.tp] = grads_k[self.tp] = Shard(_HEADS)
        if self.cp is not None and q.shape[2] % self.mesh.size(self.cp) == 0:
            how_q[self.cp], grads_k[self.cp] = Shard(2), Partial()
        local = {"query": _local(q, how_q, how_q)}
        for name, x in (("key", k), ("value", v)):
            local[name] = _local(x, how_k, grads_k)
        mask = self._mask(arguments.get("attn_mask"), q, how_q)
        causal = bool(arguments.get("is_causal"))
        if causal and how_q[self.cp or 0] == Shard(2):
            rows, keys = torch.arange(q.shape[2]), torch.arange(k.shape[2])
            whole = (keys[None, :] <= rows[:, None]).to(q.device)
            mask, causal = self._mask(whole, q, how_q), False
        made = func(**arguments | local | {"attn_mask": mask, "is_causal": causal})
        return DTensor.from_local(made, self.mesh, how_q, run_check=False)

    def _given(self, x: Tensor) -> Tensor:
        return x if isinstance(x, DTensor) else self._held(x)

    def local(self, x: Tensor, how: Sequence[Any], grads: Sequence[Any]) -> Tensor:
        """The part of a tensor that is here, once it lies as asked."""
        return _local(self._given(x), how, grads)

    def _mask(self, mask: Any, q: Tensor, how: Sequence[Any]) -> Any:
        """The part of a mask that is about this rank's heads and queries."""
        if mask is None:
            return None
        mask = self.plain(mask)
        for axis, one in enumerate(how):
            if not one.is_shard():
                continue
            dim = one.dim - q.dim()  # masks may lack leading dims
            if mask.dim() >= -dim and mask.shape[dim] == q.shape[one.dim] > 1:
                mask = mask.chunk(self.mesh.size(axis), dim)[self.mesh.get_local_rank(axis)]
        return mask

    def replicated(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator on whole tensors, the same on every rank."""
        name = getattr(func, "__name__", "")
        first = args[0] if args else None
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        if writes and isinstance(first, DTensor) and list(first.placements) != self.whole:
            raise InputError(
                f"`{name}` writes into a tensor that is split over ranks",
                hint="a plan with dp, zero or pp leaves activations whole",
            )
        args, kwargs = tree_map(self.plain, (args, kwargs))
        return tree_map(
            lambda x: self._held(x) if isinstance(x, torch.Tensor) else x, func(*args, **kwargs)
        )


class _Distributed(TorchFunctionMode):  # type: ignore[misc]
    """Sees every operator of a forward whose activations are DTensors."""

    def __init__(self, split: GraphSplit) -> None:
        super().__init__()
        self.split, self.is_on = split, False

    def __enter__(self) -> Any:
        self.is_on = True
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.is_on = False
        super().__exit__(*error)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _has_split((*args, *kwargs.values())):
            return func(*args, **kwargs)
        if func is F.linear:
            return self.split.linear(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self.split.attention(func, args, kwargs)
        if func in _WHOLE:
            return self.split.replicated(func, args, kwargs)
        try:
            found = func(*args, **kwargs)
        except InputError:
            raise
        except (NotImplementedError, RuntimeError, ValueError, AssertionError):
            return self.split.replicated(func, args, kwargs)  # which raises what is the user's own
        if not isinstance(found, DTensor):
            return found
        if sum(isinstance(p, _StridedShard) for p in found.placements) > 1:
            return self.split.replicated(func, args, kwargs)  # torch cannot split it again
        return self.split.settled(found)


def _local(x: Tensor, how: Sequence[Any], grads: Sequence[Any]) -> Tensor:
    """The part of a DTensor that is here, once it lies as asked; and how its gradient will lie."""
    held = x.contiguous().redistribute(placements=list(how))
    if not x.is_floating_point():
        return held.to_local()
    mine = held.to_local(grad_placements=list(grads)).contiguous()
    return both_ways(mine, same, torch.Tensor.contiguous)  # DTensor assumes gradients in order


def _added_up(g: Tensor) -> Tensor:
    """A gradient without partial sums: DTensor cannot turn them into the parts of a mean."""
    if not isinstance(g, DTensor) or not any(p.is_partial() for p in g.placements):
        return g
    return g.redistribute(placements=[Replicate() if p.is_partial() else p for p in g.placements])


def _has_split(values: Sequence[Any]) -> bool:
    """Whether a call is given a DTensor, itself or in a list."""
    return any(
        isinstance(x, DTensor) or (isinstance(x, list | tuple) and _has_split(x)) for x in values
    )


def _split_dim(
    names: Sequence[str],
    p: Tensor,
    splits: StepSplits,
    sides: Mapping[str, int],
) -> int | None:
    """The dim of a parameter that tensor ranks share; None where it stays whole."""
    known = next((splits.parameters[n] for n in names if n in splits.parameters), None)
    if known is None or p.dim() > 2:
        return None
    if known.kind == "words":
        return 0 if p.dim() == 2 else None
    if p.dim() == 1:
        return 0 if known.kind == "column" else None
    side = next((s for n in names if (s := sides.get(n.rpartition(".")[0])) is not None), None)
    if side is None:
        return None
    return side if known.kind == "column" else 1 - side


def _side(module: Module) -> int | None:
    """The dim of a module's weight that makes its outputs, where it is a linear layer; else None.

    It is asked, not named: with one matrix and at most one bias, it gives what `linear` gives.
    """
    own = dict(module.named_parameters())
    weight, bias = own.get("weight"), own.get("bias")
    if isinstance(module, nn.Linear):
        return 0
    if not own or not set(own) <= {"weight", "bias"} or weight is None or weight.dim() != 2:
        return None
    if isinstance(module, nn.Embedding | nn.Bilinear) or next(module.children(), None) is not None:
        return None
    for side in (1, 0):
        with torch.no_grad(), untouched(module):
            x = torch.linspace(-1, 1, 2 * weight.shape[1 - side]).to(weight).reshape(1, 2, -1)
            wanted = F.linear(x, weight if side == 0 else weight.t(), bias)
            try:
                found = module(x)
            except Exception:  # it takes something else
                continue
        if not isinstance(found, torch.Tensor) or found.shape != wanted.shape:
            continue
        if float((found - wanted).abs().max()) <= _SAME * float(wanted.abs().max().clamp_min(1)):
            return side
    return None
