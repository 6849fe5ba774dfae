"""One training step of a model as a list of torch ops, from tensors without memory.

Forward and backward are traced together, undecomposed: the ops are those an eager step runs.
"""

from __future__ import annotations

import operator as python_operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from foretell_lab.fused.region import Encoded

Tensor = Any
_SAME = {"detach", "alias", "lift_fresh_copy"}  # ops that give their argument
_DROPPED = {"layout", "pin_memory"}


@dataclass(frozen=True)
class Meta:
    """What is known of one result."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Step:
    """One op of a captured step; arguments refer to values by number: entries first, then ops."""

    name: str  # empty for an entry
    args: Encoded
    kwargs: Encoded
    results: tuple[Meta, ...]
    single: bool  # gives a tensor, not several


@dataclass(frozen=True)
class Captured:
    """All values of a step, and which (value, result) it gives back."""

    steps: tuple[Step, ...]
    outputs: frozenset[tuple[int, int]]


def capture(function: Callable[..., Any], entries: Sequence[Tensor]) -> Captured:
    """The ops a function runs on fake tensors."""
    return read(make_fx(function)(*entries).graph)


def capture_step(
    make: Callable[[], tuple[Any, tuple[Tensor, ...], Callable[..., Any]]],
) -> Captured:
    """The ops of forward and backward of a model; `make` gives model, inputs and loss."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, inputs, loss = make()
        parameters = dict(model.named_parameters())

        def step(parameters: dict[str, Tensor], *inputs: Tensor) -> list[Tensor]:
            out = loss(functional_call(model, parameters, inputs))
            wanted = list(parameters.values()) + [t for t in inputs if t.requires_grad]
            return [g for g in torch.autograd.grad(out, wanted, allow_unused=True) if g is not None]

        return read(make_fx(step)(parameters, *inputs).graph)


def read(graph: fx.Graph) -> Captured:
    """A traced graph as steps."""
    known: dict[fx.Node, tuple[int, int]] = {}
    steps: list[Step] = []
    outputs: frozenset[tuple[int, int]] = frozenset()
    for node in graph.nodes:
        if node.op == "output":
            outputs = frozenset(known[n] for n in node.all_input_nodes)
        elif node.op == "call_function" and node.target is python_operator.getitem:
            known[node] = (known[node.args[0]][0], node.args[1])
        elif node.op == "call_function" and _plain(node) in _SAME:
            known[node] = known[node.args[0]]
        elif node.op in ("placeholder", "get_attr", "call_function"):
            known[node] = (len(steps), -1)
            steps.append(_step(node, known))
    return Captured(tuple(steps), outputs)


def _plain(node: fx.Node) -> str:
    return str(node.target).split(".")[1]


def _step(node: fx.Node, known: dict[fx.Node, tuple[int, int]]) -> Step:
    value = node.meta.get("val", node.meta.get("tensor_meta"))
    single = not isinstance(value, (tuple, list))
    results = tuple(_meta(v) for v in ([value] if single else value))
    if node.op != "call_function":
        return Step("", [], {}, results, single)
    kwargs = {k: v for k, v in node.kwargs.items() if k not in _DROPPED and v is not None}
    args = [encoded(a, known) for a in node.args]
    return Step(str(node.target), args, encoded(kwargs, known), results, single)


def _meta(value: Any) -> Meta:
    if not isinstance(value, torch.Tensor):
        return Meta((), (), "none")
    return Meta(tuple(value.shape), tuple(value.stride()), _name(value.dtype))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def encoded(value: Any, known: dict[fx.Node, tuple[int, int]]) -> Encoded:
    """Arguments as plain data."""
    if isinstance(value, fx.Node):
        return ["%", *known[value]]
    if isinstance(value, dict):
        return {k: encoded(v, known) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [encoded(v, known) for v in value]
    if isinstance(value, torch.device):
        return {"torch": "device"}
    if isinstance(value, (torch.dtype, torch.memory_format)):
        return {"torch": str(value).removeprefix("torch.")}
    return value
