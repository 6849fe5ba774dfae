"""Sequence parallel: between the split layers of a block each tensor rank has some of the tokens.

    … tokens whole │ block: norms, residuals and dropouts on a part of the tokens │ tokens whole …

Inside a block linear layers gather the tokens they need and hand out parts of what they add up
(colwise and rowwise over dim 1), norms see their own tokens alone. Blocks in a row pass parts on.
Every layer with parameters of such a block has to be known, or what it learns would differ from
rank to rank: a block with any other is left whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from foretell.errors import InputError

Module = Any
SEQUENCE = "sequence"  # a layout's word for a layer that sees its own tokens alone
_TOKENS = 1  # the dim of tokens: samples come first


def blocks(model: Module, layout: Mapping[str, str]) -> dict[str, Module]:
    """The modules all of whose layers are known to work on parts of the tokens."""
    owners = {name.rpartition(".")[0] for name, way in layout.items() if way == SEQUENCE}
    found = {name: model.get_submodule(name) for name in sorted(owners)}
    return {name: block for name, block in found.items() if _is_known(name, block, layout)}


def split_tokens(model: Module, mesh: Any, layout: Mapping[str, str]) -> set[str]:
    """Split the layers of every block; which of the layout's layers that were."""
    found = blocks(model, layout)
    if not found:
        raise InputError(
            f"sp: {type(model).__name__} has no block whose layers are all known",
            hint="give it a `tensor_layout` with `sequence` for norms, colwise and rowwise for all "
            "linear layers of a block",
        )
    ways = {
        "colwise": lambda: ColwiseParallel(input_layouts=Shard(_TOKENS)),
        "rowwise": lambda: RowwiseParallel(output_layouts=Shard(_TOKENS)),
        SEQUENCE: lambda: SequenceParallel(use_local_output=True),
    }
    inside = {n: way for n, way in layout.items() if any(_is_in(n, block) for block in found)}
    parallelize_module(model, mesh, {name: ways[way]() for name, way in inside.items()})
    for name in (n for n, way in inside.items() if way == SEQUENCE):
        for parameter in model.get_submodule(name).parameters():
            parameter.register_post_accumulate_grad_hook(add_up)
    for row in rows(model, found):
        row[0].register_forward_pre_hook(lambda _, args, m=mesh: _part(args, m))
        row[-1].register_forward_hook(lambda _, __, out, m=mesh: tokens_as(out, m, _PART, _WHOLE))
    for block in found.values():
        _gather_attention(block, mesh)
    return set(inside)


_WHOLE, _PART = Replicate(), Shard(_TOKENS)


def _is_in(name: str, block: str) -> bool:
    return not block or name.startswith(f"{block}.")


def _is_known(name: str, block: Module, layout: Mapping[str, str]) -> bool:
    """Whether everything with parameters is in the layout, or attention that gathers by itself."""
    dot = f"{name}." if name else ""
    for inner, module in block.named_modules():
        own = any(True for _ in module.parameters(recurse=False))
        if own and f"{dot}{inner}" not in layout and not _in_attention(block, inner):
            return False
    return True


def _in_attention(block: Module, name: str) -> bool:
    parts = name.split(".")
    paths = (".".join(parts[:k]) for k in range(1, len(parts) + 1))
    return any(isinstance(block.get_submodule(p), nn.MultiheadAttention) for p in paths)


def rows(model: Module, found: Mapping[str, Module]) -> Iterator[list[Module]]:
    """Blocks in a row, which an nn.Sequential calls one after another; others stand alone."""
    boxes = [m for m in model.modules() if type(m) is nn.Sequential]
    known = {id(block): block for block in found.values()}
    pairs = {
        id(a): id(b) for box in boxes for a, b in pairwise(box) if {id(a), id(b)} <= set(known)
    }
    for start in [k for k in known if k not in pairs.values()]:
        row = [start]
        while row[-1] in pairs:
            row.append(pairs[row[-1]])
        yield [known[k] for k in row]


def _part(args: tuple[Any, ...], mesh: Any) -> tuple[Any, ...]:
    """The first argument in parts; what else a block is given (masks) is about all tokens."""
    require_even(args[0], mesh, "sp")
    return (tokens_as(args[0], mesh, _WHOLE, _PART), *args[1:])


def require_even(x: Any, mesh: Any, word: str) -> None:
    """Raise unless every rank gets as many tokens."""
    tokens = x.shape[_TOKENS]
    if tokens % mesh.size():
        raise InputError(
            f"{word}: {tokens} tokens, which {mesh.size()} ranks cannot share evenly",
            hint="choose a number of ranks that divides them",
        )


def tokens_as(x: Any, mesh: Any, before: Any, after: Any) -> Any:
    """From one way of holding tokens to another, and its gradient the same way back."""
    held = DTensor.from_local(x, mesh, [before], run_check=False)
    return held.redistribute(placements=[after]).to_local()


def _gather_attention(block: Module, mesh: Any) -> None:
    """Attention that is one module works on all tokens on every rank."""
    for module in block.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.register_forward_pre_hook(lambda _, args, m=mesh: _gathered(args, m))
            module.register_forward_hook(
                lambda _, __, out, m=mesh: (tokens_as(out[0], m, _WHOLE, _PART), *out[1:])
            )


def _gathered(args: tuple[Any, ...], mesh: Any) -> tuple[Any, ...]:
    """Queries, keys and values whole; those that are the same are gathered once."""
    whole = {id(x): x for x in args[:3]}
    whole = {key: tokens_as(x, mesh, _PART, _WHOLE) for key, x in whole.items()}
    return tuple(whole[id(x)] for x in args[:3]) + args[3:]


def add_up(parameter: Any) -> None:
    """A norm learns from every rank's tokens."""
    grad = parameter.grad
    if isinstance(grad, DTensor) and grad.placements != parameter.placements:
        parameter.grad = grad.redistribute(placements=parameter.placements)
