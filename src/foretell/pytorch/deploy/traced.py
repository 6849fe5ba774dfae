"""A step as AOT autograd traces it, by the names a plan has for its ops; a plan compared with it.

The trace has the operators that eager PyTorch runs, one node each, forward and backward in one
graph, in the order they are issued: what `foretell.plan.file` counts.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx.node import map_arg

from foretell.errors import InputError, unknown
from foretell.plan import Plan
from foretell.plan.file import COPY, made_for, named_ops, numbered, parameter_print
from foretell.pytorch.capture.words import inputs_of, op_word, shape_text

Node = Any
TAG = "partitioner_tag"  # where AOT autograd writes the side of a node
# One operator, by the names it has with and without its buffers written in place.
_SAME = {
    "_native_batch_norm_legit_functional": "native_batch_norm",
    "_native_batch_norm_legit": "native_batch_norm",
    "cudnn_batch_norm": "native_batch_norm",
}
_UNMARKED = ("_unsafe_view", "_reshape_alias")  # views that do not say so


def is_op(node: Node) -> bool:
    """Whether a node is an operator."""
    return node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)


def is_backward(node: Node) -> bool:
    """Whether a node is of the backward."""
    return bool(node.meta.get(TAG) == "is_backward")


def is_item(node: Node) -> bool:
    """Whether a node is one of several results."""
    return node.op == "call_function" and node.target is operator.getitem


def is_free(node: Node) -> bool:
    """Whether a node only looks at memory: a view, or one of several results."""
    if is_item(node):
        return True
    if not is_op(node):
        return False
    results = node.target._schema.returns
    aliases = [r.alias_info is not None and not r.alias_info.is_write for r in results]
    return any(aliases) or _word(node) in _UNMARKED


def named_nodes(graph: Any) -> dict[str, Node]:
    """Every operator of a joint graph by its name in a plan."""
    count: Counter[str] = Counter()
    return {numbered(_word(n), is_backward(n), count): n for n in graph.nodes if is_op(n)}


def _word(node: Node) -> str:
    name = node.target._schema.name.partition("::")[2]
    return _SAME[name] if name in _SAME else op_word(node.target)


def sizes_given(node: Node) -> str:
    """The sizes of what an op is given, as a capture writes them."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    text = shape_text(node.target, inputs_of(node.target, args, kwargs))
    return next((part[3:] for part in text.split(",") if part.startswith("in=")), "")


def require_parameters(plan: Plan, model: Any) -> None:
    """Raise where a plan was made for other parameters than those of the model."""
    if "." not in plan.model:
        return
    own = parameter_print(
        {n: p.numel() * p.element_size() for n, p in model.named_parameters() if p.requires_grad}
    )
    wanted = plan.model.partition(".")[0]
    if own != wanted:
        raise InputError(
            f"the plan was made for parameters {wanted}; those of this model are {own}",
            hint="`foretell capture` this script again, and plan again",
        )


def require_ops(plan: Plan, nodes: Mapping[str, Node]) -> None:
    """Raise where a plan speaks of ops that the step does not run, or runs on other sizes."""
    names = named_ops(plan.regions, plan.late)
    for name in names:
        if name not in nodes:
            raise unknown("op in the plan", name, nodes)
    _require_sides(plan, nodes)
    parameters = plan.model.partition(".")[0]
    sizes = {name: sizes_given(nodes[name]) for name in names}
    if plan.model and plan.model != made_for(parameters, list(sizes.items())):
        shown = ", ".join(f"{n} of {size}" for n, size in list(sizes.items())[:3])
        raise InputError(
            f"the plan's ops are given other sizes here: {shown} …",
            hint="capture with the batch that a rank has, and --kernels-of what it runs on (cpu)",
        )


def _require_sides(plan: Plan, nodes: Mapping[str, Node]) -> None:
    """Raise unless each region is of one side and each op in one region."""
    seen: set[str] = set()
    for region in plan.regions:
        own = [name for name in region if not name.endswith(COPY)]
        if len({is_backward(nodes[name]) for name in own}) > 1:
            raise InputError(
                f"the region {'+'.join(region)} spans forward and backward",
                hint=f"write `{own[0]}{COPY}` for what the backward recomputes",
            )
        again = [name for name in own if name in seen]
        if again:
            raise InputError(f"`{again[0]}` is in several regions of the plan")
        seen |= set(own)
