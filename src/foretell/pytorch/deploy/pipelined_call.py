"""A model in pipeline stages inside a loop that is not ours: one call is all micro-batches forward.

    before and behind the blocks   on every rank, alike: outputs and losses are whole everywhere
    blocks                         each rank its own; micro-batches go from rank to rank, their
                                   gradients back when the loop calls its backward (GPipe order)

Parameters outside the blocks have the same gradient on every rank; those of a block are trained on
one rank, and sent to the others when the model's state is asked for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from foretell.errors import InputError
from foretell.pytorch.deploy.forward_stages import Blocks, given_to, replaced
from foretell.pytorch.deploy.optimizer import STAGE
from foretell.pytorch.deploy.units import even_ends, size_of, units
from foretell.pytorch.deploy.whole import own_numbers

Module = Any
Tensor = Any


class PipelinedCall:
    """The blocks of a model over the ranks of a pipeline group, called as one."""

    def __init__(self, model: Module, plan: Any, places: Any, call: Any) -> None:
        names = [name for name in units(model) if name]
        if len(names) < plan.pp:
            raise InputError(
                f"pp={plan.pp}: {type(model).__name__} has {len(names)} blocks one after another"
            )
        if call is None:
            raise InputError(
                f"pp={plan.pp} needs a call of the model to look at", hint="give it an example"
            )
        self.model, self.each, self.group = model, plan.micro_batch, places.group("pp")
        self.order = places.order("pp")
        ranks = dist.get_process_group_ranks(self.group)
        self.ranks = [ranks[self.order.index(stage)] for stage in range(plan.pp)]
        self.stage = places.at["pp"]
        self.blocks = Blocks(model, names)
        self.blocks.look(*call)
        self.blocks.run = self._run
        held = [size_of(model.get_submodule(name)) for name in names]
        ends = list(plan.layers) and [sum(plan.layers[: s + 1]) for s in range(plan.pp)]
        self.ends = ends or even_ends(held, plan.pp)
        if self.ends[-1] != len(names):
            raise InputError(f"layers={plan.layers} for {len(names)} blocks")
        self.first, self.end = [0, *self.ends][self.stage], self.ends[self.stage]
        self._calls: list[tuple[Callable[..., Any], Any, Any]] = []
        self._start: Tensor = None
        self._passed: Tensor = None
        for _, p in self.parameters():
            setattr(p, STAGE, self.group)
        model.register_state_dict_pre_hook(lambda *_: self.share())

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter of a block, by its name."""
        for block in self.blocks.names:
            for name, p in self.model.get_submodule(block).named_parameters():
                yield f"{block}.{name}", p

    @property
    def others(self) -> frozenset[str]:
        """Names of the parameters of other stages."""
        mine = tuple(f"{name}." for name in self.blocks.names[self.first : self.end])
        return frozenset(n for n, _ in self.parameters() if not n.startswith(mine))

    def owner(self, name: str) -> int:
        """The rank that trains a parameter of a block; -1 where every rank does."""
        for place, block in enumerate(self.blocks.names):
            if name.startswith(f"{block}."):
                return int(self.ranks[sum(place >= end for end in self.ends)])
        return -1

    def share(self) -> None:
        """Give every rank the parameters and buffers of all blocks."""
        for block in self.blocks.names:
            source = self.owner(f"{block}.")
            module = self.model.get_submodule(block)
            for tensor in (*module.parameters(), *module.buffers()):
                held = tensor.detach()
                dist.broadcast(getattr(held, "_local_tensor", held), src=source, group=self.group)

    def share_state(self, optimizer: Any) -> None:
        """Let the state that an optimizer gives be that of all stages, as one process has it."""
        mine = {id(p) for n, p in self.parameters() if self.owner(n) == dist.get_rank()}

        def fill(optimizer: Any) -> None:
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            for name, p in self.parameters():
                if id(p) in held:
                    self._fill(optimizer, p, self.owner(name))

        def clear(optimizer: Any, state: Any) -> Any:
            for _, p in self.parameters():
                if id(p) not in mine:
                    optimizer.state.pop(p, None)
            return state

        optimizer.register_state_dict_pre_hook(fill)
        optimizer.register_state_dict_post_hook(clear)

    def _fill(self, optimizer: Any, parameter: Tensor, source: int) -> None:
        """One parameter's state, from the rank that updates it to all."""
        is_here = dist.get_rank() == source
        state = dict(optimizer.state.get(parameter, {})) if is_here else {}
        shapes = [(k, v.to("meta") if _is_tensor(v) else v) for k, v in state.items()]
        box = [shapes if is_here else None]
        dist.broadcast_object_list(box, src=source, group=self.group)
        for key, value in box[0] or []:
            if not _is_tensor(value):
                state.setdefault(key, value)
                continue
            device = state[key].device if is_here else parameter.device
            sent = state[key].contiguous() if is_here else torch.empty_like(value, device=device)
            dist.broadcast(sent, src=source, group=self.group)
            state.setdefault(key, sent)
        if state and not is_here:
            optimizer.state[parameter] = state

    def shared(self, name: str, tensor: Tensor | None, like: Tensor) -> Tensor | None:
        """A tensor of one parameter, from the rank that has it to all; None where it has none."""
        source = self.owner(name)
        if source < 0:
            return tensor
        there = torch.tensor([int(tensor is not None)])
        dist.broadcast(there, src=source, group=self.group)
        if not int(there):
            return None
        held = like if tensor is None else tensor
        found = held.contiguous() if dist.get_rank() == source else torch.empty_like(like)
        dist.broadcast(found, src=source, group=self.group)
        return found

    def _run(self, place: int, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note the calls of this rank's blocks; with the last block all of them run."""
        given = given_to(args, kwargs)
        if place == 0:
            self._calls, self._start = [], given
            self._require_plain()
        elif given is not self._passed:
            raise InputError(
                f"pp: `{self.blocks.names[place]}` is not called with just what the block before "
                "it gave"
            )
        if self.first <= place < self.end:
            self._calls.append((forward, args, kwargs))
        start = self._start
        if place + 1 < len(self.blocks.names):  # whatever reads it meets no number
            self._passed = start.new_full((), torch.nan).expand(start.shape)
        else:
            grad = torch.is_grad_enabled()
            anchor = torch.zeros((), device=start.device, requires_grad=grad)
            self._passed = _Stages.apply(start, anchor, self)
            self._calls, self._start = [], None
        more = self.blocks.more
        return self._passed if more is None else (self._passed, *[None] * more)

    def _require_plain(self) -> None:
        if any(getattr(m, "gradient_checkpointing", False) for m in self.model.modules()):
            raise InputError(
                "pp: the script recomputes activations itself",
                hint="leave that out of the script, or pp out of the plan",
            )

    def parts(self, samples: int) -> int:
        """Micro-batches of a call."""
        if self.each:
            return samples // self.each if samples % self.each == 0 else 1
        return len(self.ranks) if samples % len(self.ranks) == 0 else 1

    def compute(self, x: Tensor, part: int, parts: int, samples: int) -> Tensor:
        """This rank's blocks on one micro-batch; what keeps state is new for each."""
        copies: dict[int, Any] = {}

        def piece(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                by_sample = parts > 1 and value.dim() and len(value) == samples
                return value.chunk(parts)[part] if by_sample else value
            if value is None or isinstance(value, bool | int | float | str):
                return value
            if id(value) not in copies:
                copies[id(value)] = copy.deepcopy(value) if _keeps_state(value) else value
            return copies[id(value)]

        for forward, args, kwargs in self._calls:
            args, kwargs = replaced(args, kwargs, _HERE)
            args, kwargs = tree_map(piece, (args, kwargs))
            args = tuple(x if a is _HERE else a for a in args)
            made = forward(*args, **{k: x if v is _HERE else v for k, v in kwargs.items()})
            x = made[0] if isinstance(made, tuple) else made
        return x


class _Here:
    """Stands for what the block before gives."""


_HERE = _Here()


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _keeps_state(value: Any) -> bool:
    """Whether something other than a function or a setting is handed from block to block."""
    return hasattr(value, "__dict__") and not callable(value) and value is not _HERE


class _Stages(torch.autograd.Function):  # type: ignore[misc]
    """All blocks of all ranks, there and back."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, anchor: Tensor, call: PipelinedCall) -> Tensor:
        samples, parts = len(start), call.parts(len(start))
        ranks, at = call.ranks, call.stage
        ctx.call, ctx.kept, sent, ends = call, [], [], []
        trains = anchor.requires_grad
        with own_numbers(at):
            for part, chunk in enumerate(start.chunk(parts)):
                x = chunk.detach().clone() if at == 0 else _from(ranks[at - 1], chunk, call)
                x.requires_grad_(trains)
                with torch.enable_grad() if trains else nullcontext():
                    y = call.compute(x, part, parts, samples)
                if y.shape != x.shape or y.dtype != x.dtype:
                    raise InputError("pp: blocks give another shape or format than they take")
                ctx.kept += [(x, y)] if trains else []
                if at + 1 < len(ranks):
                    sent.append(_to(ranks[at + 1], y.detach(), call))
                else:
                    ends.append(y.detach())
        found = torch.cat(ends) if ends else torch.empty_like(start).contiguous()
        _done(sent)
        dist.broadcast(found, src=ranks[-1], group=call.group)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        call, kept, sent, ends = ctx.call, ctx.kept, [], []
        ranks, at, chunks = call.ranks, call.stage, grad.chunk(len(ctx.kept))
        for (x, y), chunk in zip(kept, chunks, strict=True):
            mine = chunk if at + 1 == len(ranks) else _from(ranks[at + 1], chunk, call)
            torch.autograd.backward(y, mine)
            if at:
                sent.append(_to(ranks[at - 1], x.grad, call))
            else:
                ends.append(x.grad)
        ctx.kept = []
        found = torch.cat(ends) if ends else torch.empty_like(grad).contiguous()
        _done(sent)
        dist.broadcast(found, src=ranks[0], group=call.group)
        return found, None, None


def _from(rank: int, like: Tensor, call: PipelinedCall) -> Tensor:
    found = torch.empty_like(like).contiguous()
    dist.recv(found, src=rank, group=call.group)
    return found


def _to(rank: int, tensor: Tensor, call: PipelinedCall) -> tuple[Any, Tensor]:
    ready = tensor.contiguous()
    return dist.isend(ready, dst=rank, group=call.group), ready


def _done(sent: list[tuple[Any, Tensor]]) -> None:
    for work, _ in sent:
        work.wait()
