"""A model in pipeline stages without a trace: every stage runs the model's own forward.

    before the blocks      on every stage, from the batch: masks, angles, positions; what the
                           embedding gives counts on the first stage alone
    blocks of the stage    take what the stage before sent; others are passed by
    behind the last block  on the last stage; the forward of others ends with their last block

The blocks are the children of the model's largest container; one forward on an example shows that
each takes what the one before gave, and which parameters are used before and behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from foretell.errors import InputError
from foretell.pytorch.deploy.messages import untouched
from foretell.pytorch.deploy.units import even_ends, size_of, units

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
            block.forward = self._intercepted(place, block.forward)

    def _intercepted(self, place: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.is_looking:
                return self._look(place, forward, args, kwargs)
            return (self.run or self._run)(place, forward, args, kwargs)

        return call

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
    held = [size_of(model.get_submodule(name)) for name in names]
    apart = {id(p): p.numel() for p in model.parameters()}
    held[0] += sum(apart[i] for i in found.front)
    held[-1] += sum(apart[i] for i in found.behind)
    if layers and (len(layers) != num or sum(layers) != len(names)):
        raise InputError(
            f"layers={'+'.join(map(str, layers))} for {num} stages of {len(names)} blocks",
            hint="give one number for each stage; they add up to the blocks of the model",
        )
    ends = [sum(layers[: s + 1]) for s in range(num)] if layers else even_ends(held, num)
    return [
        ForwardStage(found, first, end, len(call[0]))
        for first, end in zip([0, *ends[:-1]], ends, strict=True)
    ]


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
