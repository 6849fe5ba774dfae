"""A model in pipeline stages without a trace: every stage runs the model's own forward.

    before the blocks      on every stage, from the batch: masks, angles, positions; what the
                           embedding gives counts on the first stage alone
    blocks of the stage    take what the stage before sent; others are passed by
    behind the last block  on the last stage; the forward of others ends with their last block

The blocks are the children of the model's largest container; one forward on an example shows that
each takes what the one before gave, and which parameters are used before and behind them.

In a loop that is not ours (`PipelinedCall`) one call is the forward of all micro-batches, and their
gradients go back when the loop calls its backward (GPipe order). What is before and behind the
blocks runs on every rank, alike; parameters of a block are trained on one rank, and sent to the
others when the model's state is asked for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from foretell.errors import InputError
from foretell.pytorch.deploy.collective import said_by
from foretell.pytorch.deploy.optimizer import STAGE
from foretell.pytorch.deploy.units import size_of, stage_ends, units
from foretell.pytorch.deploy.uses import untouched
from foretell.pytorch.deploy.whole import own_numbers

Module = Any
Tensor = Any
Node = Any


class _Ended(BaseException):
    """The forward of a stage is over: user code must not catch it."""

    def __init__(self, output: Tensor) -> None:
        self.output = output


@dataclass
class Blocks:
    """The blocks of a model in the order of their calls, and what a stage runs of them."""

    model: Module
    names: list[str]
    front: set[int] = field(default_factory=set)  # ids of parameters used before the blocks
    behind: set[int] = field(default_factory=set)
    first: int = 0  # of the stage that runs
    end: int = 0
    given: Tensor = None  # what the stage before sent
    more: int | None = None  # things a block gives behind its tensor; None where no tuple
    is_looking: bool = False  # the example goes through: what is seen is noted
    run: Callable[..., Any] | None = None  # a block's call; that of a stage where None
    _at: int = 0
    _last: Tensor = None
    _front_nodes: set[Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        for place, name in enumerate(self.names):
            block = self.model.get_submodule(name)
            block.forward = partial(self._called, place, block.forward)

    def _called(self, place: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = self._look if self.is_looking else self.run or self._run
        return call(place, forward, args, kwargs)

    def _run(self, place: int, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if place < self.first:
            given = given_to(args, kwargs)
            return (given, *[None] * self.more) if self.more is not None else given
        if place == self.first and self.given is not None:
            args, kwargs = replaced(args, kwargs, self.given)
        made = forward(*args, **kwargs)
        if place + 1 == self.end < len(self.names):
            raise _Ended(made[0] if isinstance(made, tuple) else made)
        return made

    def _look(self, place: int, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note what a block is given, and refuse what stages could not send."""
        name, given = self.names[place], given_to(args, kwargs)
        if place != self._at or (place and given is not self._last):
            raise InputError(
                f"pp: `{name}` is not called with just what the block before it gave",
                hint="stages are cut between blocks that follow one another",
            )
        if place == 0:
            self._front_nodes = set(_nodes([given]))
            self.front = self._used(self._front_nodes)
            given = given.detach().requires_grad_(given.is_floating_point())
            args, kwargs = replaced(args, kwargs, given)
        others = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        learnt = [x for x in others if x is not given and x.requires_grad]
        made = forward(*args, **kwargs)
        rest = tree_leaves(made[1:]) if isinstance(made, tuple) else []
        if learnt or any(isinstance(x, torch.Tensor) and x.requires_grad for x in rest):
            raise InputError(
                f"pp: `{name}` takes or gives more that is learnt than one tensor",
                hint="a stage sends one tensor to the next",
            )
        hidden = made[0] if isinstance(made, tuple) else made
        if hidden.shape != given.shape:
            raise InputError(f"pp: `{name}` gives {tuple(hidden.shape)} for {tuple(given.shape)}")
        self._at += 1
        self.more = len(made) - 1 if isinstance(made, tuple) else None
        self._last = hidden.detach().requires_grad_()
        return (self._last, *made[1:]) if isinstance(made, tuple) else self._last

    def look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """One forward on an example: the order of blocks, what is before and behind them."""
        self.is_looking = True
        try:
            with torch.enable_grad(), untouched(self.model):
                made = self.model(*args, **kwargs)
        finally:
            self.is_looking = False
        if self._at != len(self.names):
            raise InputError(
                f"pp: `{self.names[self._at]}` is not called",
                hint="stages are cut between blocks that follow one another",
            )
        outputs = [x for x in tree_leaves(made) if isinstance(x, torch.Tensor)]
        nodes = set(_nodes(outputs))
        self.behind = self._used(nodes)
        inner = {n for n in nodes & self._front_nodes if not hasattr(n, "variable")}
        if inner:
            raise InputError(
                "pp: what is computed before the blocks is used behind them again",
                hint="a stage sends one tensor to the next, from block to block",
            )
        self._last, self._front_nodes = None, set()

    def _used(self, nodes: set[Node]) -> set[int]:
        """The parameters that some nodes of autograd's graph read, by id."""
        leaves = {id(n.variable) for n in nodes if hasattr(n, "variable")}
        return leaves & {id(p) for p in self.model.parameters()}


class ForwardStage(nn.Module):  # type: ignore[misc]
    """One stage: some blocks, and what is before the first or behind the last of them."""

    def __init__(self, blocks: Blocks, first: int, end: int, inputs: int) -> None:
        super().__init__()
        self.span = (first, end)
        self.reads = tuple(range(inputs))
        object.__setattr__(self, "blocks", blocks)  # the whole model is no part of a stage
        for name in blocks.names[first:end]:
            _put(self, name, blocks.model.get_submodule(name))
        wanted = set[int]()
        wanted |= blocks.front if first == 0 else set()
        wanted |= blocks.behind if end == len(blocks.names) else set()
        dots = tuple(f"{name}." for name in blocks.names)
        for name, module in blocks.model.named_modules():
            own = dict(module.named_parameters(recurse=False))
            is_leaf = next(module.children(), None) is None
            is_state = (
                is_leaf and not own and first == 0 and next(module.buffers(), None) is not None
            )
            is_used = any(id(p) in wanted for p in own.values()) or is_state
            if f"{name}.".startswith(dots) or not is_used:
                continue
            if is_leaf:
                _put(self, name, module)
                continue
            for key, p in own.items():  # a parameter of a module that holds others, too
                if id(p) in wanted:
                    _box(self, name).register_parameter(key, p)

    def forward(self, *args: Any) -> Any:
        blocks = self.blocks
        blocks.first, blocks.end = self.span
        given, batch = (args[0], args[1:]) if self.span[0] else (None, args)
        blocks.given = given
        try:
            return blocks.model(*batch)
        except _Ended as ended:
            return ended.output
        finally:
            blocks.given = None


def forward_stages(
    model: Module, num: int, layers: Sequence[int], call: tuple[Any, dict[str, Any]]
) -> list[ForwardStage]:
    """A model in so many stages of about as many parameters each, or of `layers` blocks."""
    names = [name for name in units(model) if name]
    if len(names) < num:
        raise InputError(f"pp: {len(names)} blocks of {type(model).__name__} for {num} stages")
    if call[1] or not all(isinstance(x, torch.Tensor) for x in call[0]):
        raise InputError("pp: stages take tensors, and only positional ones")
    found = Blocks(model, names)
    found.look(*call)
    ends = _ends(found, num, layers)
    return [
        ForwardStage(found, first, end, len(call[0]))
        for first, end in zip([0, *ends[:-1]], ends, strict=True)
    ]


def _ends(blocks: Blocks, num: int, layers: Sequence[int], *, with_ends: bool = True) -> list[int]:
    """Behind which block each stage ends; what is before and behind the blocks may count, too."""
    model, names = blocks.model, blocks.names
    held = [size_of(model.get_submodule(name)) for name in names]
    if with_ends:
        each = {id(p): p.numel() for p in model.parameters()}
        held[0] += sum(each[i] for i in blocks.front)
        held[-1] += sum(each[i] for i in blocks.behind)
    return stage_ends(held, num, layers, range(len(names)))


def given_to(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What a block takes from the one before: its first tensor."""
    found = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)), None)
    if found is None:
        raise InputError("pp: a block is called without a tensor")
    return found


def replaced(args: tuple[Any, ...], kwargs: dict[str, Any], new: Tensor) -> Any:
    """The arguments of a block with another tensor from the one before."""
    old = given_to(args, kwargs)
    changed = tuple(new if x is old else x for x in args)
    return changed, {k: new if x is old else x for k, x in kwargs.items()}


def _nodes(tops: Sequence[Tensor]) -> Iterator[Node]:
    """Every node of autograd's graph below some tensors."""
    left = [x.grad_fn for x in tops if x.grad_fn is not None]
    seen = set(left)
    while left:
        node = left.pop()
        yield node
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                left.append(below)


def _box(stage: Module, path: str) -> Module:
    """The container at a path inside a stage, made where it is not there."""
    for part in path.split(".") if path else ():
        if part not in stage._modules:
            stage.add_module(part, nn.Module())
        stage = stage._modules[part]
    return stage


def _put(stage: Module, path: str, module: Module) -> None:
    """A module of the whole model, under the name it has there."""
    above, _, name = path.rpartition(".")
    _box(stage, above).add_module(name, module)


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
        self.ends = _ends(self.blocks, plan.pp, plan.layers, with_ends=False)
        self.first, self.end = [0, *self.ends][self.stage], self.ends[self.stage]
        self.sync: Any = None  # of data-parallel ranks, where there are any
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
        # tensors are not pickled: `torch.save`, which does it, is the script's
        shapes = [(k, v.to("meta") if torch.is_tensor(v) else v) for k, v in state.items()]
        for key, value in said_by(source, shapes, self.group):
            if not torch.is_tensor(value):
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
            if any(getattr(m, "gradient_checkpointing", False) for m in self.model.modules()):
                raise InputError(
                    "pp: the script recomputes activations itself",
                    hint="leave that out of the script, or pp out of the plan",
                )
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
            if id(value) not in copies:  # no function and no setting: it keeps state
                is_state = hasattr(value, "__dict__") and not callable(value)
                copies[id(value)] = copy.deepcopy(value) if is_state else value
            return copies[id(value)]

        for forward, args, kwargs in self._calls:
            args, kwargs = replaced(args, kwargs, _HERE)
            args, kwargs = tree_map(piece, (args, kwargs))
            args = tuple(x if a is _HERE else a for a in args)
            made = forward(*args, **{k: x if v is _HERE else v for k, v in kwargs.items()})
            x = made[0] if isinstance(made, tuple) else made
        return x

    def received(self, rank: int, like: Tensor) -> Tensor:
        found = torch.empty_like(like).contiguous()
        dist.recv(found, src=rank, group=self.group)
        return found

    def sent(self, rank: int, tensor: Tensor) -> tuple[Any, Tensor]:
        ready = tensor.contiguous()
        return dist.isend(ready, dst=rank, group=self.group), ready

    def shared_end(
        self, ends: list[Tensor], like: Tensor, source: int, sent: list[tuple[Any, Tensor]]
    ) -> Tensor:
        """What one end of the pipeline has of all micro-batches, on every rank."""
        found = torch.cat(ends) if ends else torch.empty_like(like).contiguous()
        for work, _ in sent:
            work.wait()
        dist.broadcast(found, src=source, group=self.group)
        return found


_HERE = object()  # stands for what the block before gives


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
                x = chunk.detach().clone() if at == 0 else call.received(ranks[at - 1], chunk)
                x.requires_grad_(trains)
                with torch.enable_grad() if trains else nullcontext():
                    y = call.compute(x, part, parts, samples)
                if y.shape != x.shape or y.dtype != x.dtype:
                    raise InputError("pp: blocks give another shape or format than they take")
                ctx.kept += [(x, y)] if trains else []
                if at + 1 < len(ranks):
                    sent.append(call.sent(ranks[at + 1], y.detach()))
                else:
                    ends.append(y.detach())
        return call.shared_end(ends, start, ranks[-1], sent)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        call, kept, sent, ends = ctx.call, ctx.kept, [], []
        ranks, at, chunks = call.ranks, call.stage, grad.chunk(len(ctx.kept))
        with call.sync.no_sync() if call.sync is not None else nullcontext():
            for (x, y), chunk in zip(kept, chunks, strict=True):
                mine = chunk if at + 1 == len(ranks) else call.received(ranks[at + 1], chunk)
                torch.autograd.backward(y, mine)
                if at:
                    sent.append(call.sent(ranks[at - 1], x.grad))
                else:
                    ends.append(x.grad)
        if call.sync is not None:  # gradients of all micro-batches are reduced once
            call.sync.finish_later()
        ctx.kept = []
        return call.shared_end(ends, grad, ranks[0], sent), None, None
