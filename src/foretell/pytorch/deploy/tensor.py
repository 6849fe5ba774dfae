"""Tensor parallel on DTensor, where it is known how the layers of a model go together.

    colwise   a linear layer's outputs are split; its input is whole
    rowwise   its inputs are split, as a colwise layer before it leaves them; the output is summed
    sequence  a norm, which may see some of the tokens alone

A layout comes from the model (`tensor_layout`, or the `_tp_plan` of a transformers model), or is
read off its structure: two linear layers in a row with only pointwise layers between them. Where
there are no such, each linear layer is split by itself, its output gathered or summed.

Sequence and context parallel: tokens of a sample over ranks, in blocks whose layers are known.

    … tokens whole │ blocks: a part of the tokens; attention of it to all of them │ tokens whole …

Sequence parallel: between the split layers of a block each tensor rank has some of the tokens.
Linear layers gather the tokens they need and hand out parts of what they add up (colwise and
rowwise over dim 1), norms see their own tokens alone. Every layer with parameters of such a block
has to be known, or what it learns would differ from rank to rank: a block with any other is left
whole.

Context parallel: weights are whole on every rank, and queries of a rank's tokens see all keys and
values. Inside the blocks gradients count as many times as there are ranks, since each rank's tokens
are only a part of them: so what keeps data-parallel ranks together keeps these together, too.
torch's own context_parallel has no attention for CPUs; this works wherever DTensor does. A block
that mixes tokens by other means than attention is found out in the first step, and refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from foretell.errors import InputError, unknown
from foretell.pytorch.deploy.collective import times
from foretell.pytorch.deploy.units import row
from foretell.pytorch.deploy.uses import copied, tied_names

Module = Any
SEQUENCE = "sequence"  # a layout's word for a layer that sees its own tokens alone
_TOKENS = 1  # the dim of tokens: samples come first
_WHOLE, _PART = Replicate(), Shard(_TOKENS)
_SAME = 1e-3  # relative: sums in another order stay far below, another result does not


def blocks(model: Module, layout: Mapping[str, str]) -> dict[str, Module]:
    """The modules all of whose layers are known to work on parts of the tokens."""
    owners = {name.rpartition(".")[0] for name, way in layout.items() if way == SEQUENCE}
    found = {name: model.get_submodule(name) for name in sorted(owners)}
    return {name: block for name, block in found.items() if _is_known(name, block, layout)}


def _require_blocks(model: Module, layout: Mapping[str, str], word: str) -> dict[str, Module]:
    found = blocks(model, layout)
    if not found:
        raise InputError(
            f"{word}: {type(model).__name__} has no block whose layers are all known",
            hint="give it a `tensor_layout` with `sequence` for norms, colwise and rowwise for all "
            "linear layers of a block",
        )
    return found


def split_tokens(model: Module, mesh: Any, layout: Mapping[str, str]) -> set[str]:
    """Split the layers of every block; which of the layout's layers that were."""
    found = _require_blocks(model, layout, "sp")
    ways = {
        "colwise": lambda: ColwiseParallel(input_layouts=Shard(_TOKENS)),
        "rowwise": lambda: RowwiseParallel(output_layouts=Shard(_TOKENS)),
        SEQUENCE: lambda: SequenceParallel(use_local_output=True),
    }
    dots = tuple(f"{block}." if block else "" for block in found)
    inside = {n: way for n, way in layout.items() if n.startswith(dots)}
    parallelize_module(model, mesh, {name: ways[way]() for name, way in inside.items()})
    for name in (n for n, way in inside.items() if way == SEQUENCE):
        for parameter in model.get_submodule(name).parameters():
            parameter.register_post_accumulate_grad_hook(add_up)
    for run in rows(model, found):
        run[0].register_forward_pre_hook(lambda _, args, m=mesh: _part(args, m))
        run[-1].register_forward_hook(lambda _, __, out, m=mesh: tokens_as(out, m, _PART, _WHOLE))
    for block in found.values():
        _gather_attention(block, mesh)
    return set(inside)


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


class Context:
    """Blocks in a row that share the tokens of a sample."""

    def __init__(self, row: Sequence[Module], mesh: Any) -> None:
        self.row, self.mesh = list(row), mesh
        self.is_checked, self.is_checking, self.is_on = False, False, True
        for block in self.row:
            block.forward = partial(self._attending, block.forward)
            for module in block.modules():
                if isinstance(module, nn.MultiheadAttention):
                    module.register_forward_pre_hook(self._ask_all, with_kwargs=True)
        # tokens are cut for context ranks first, then for tensor ranks (sp), and gathered last
        self.row[0].register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True)
        self.row[-1].register_forward_hook(self._end)

    def _begin(self, _: Any, args: tuple[Any, ...], more: dict[str, Any]) -> Any:
        if self.is_checking:
            return None
        x = args[0]
        require_even(x, self.mesh, "cp")
        if not self.is_checked and bool(x.any()):  # zeros are for finding shapes
            self.is_checked = True
            self._check(x.detach(), args[1:], more)
            if isinstance(self.row[0], FSDPModule):
                self.row[0].unshard()  # the check has dropped its weights again
        part = times(tokens_as(x, self.mesh, _WHOLE, _PART), 1 / self.mesh.size())
        return (part, *args[1:]), more

    def _end(self, _: Any, __: Any, out: Any) -> Any:
        if self.is_checking:
            return None
        return tokens_as(times(out, self.mesh.size()), self.mesh, _PART, _WHOLE)

    def _attending(self, forward: Callable[..., Any], *args: Any, **more: Any) -> Any:
        with _Attention(self.mesh) if self.is_on else nullcontext():
            return forward(*args, **more)

    def _ask_all(self, module: Any, args: tuple[Any, ...], more: dict[str, Any]) -> Any:
        """Queries of this rank's tokens, keys and values of all."""
        if not self.is_on:
            return None
        dim = 1 if module.batch_first else 0
        query, *rest = args[:3]
        all_ = {id(x): _all(x, dim, self.mesh) for x in rest}
        mask = _rows(more.get("attn_mask"), query.shape[dim], self.mesh)
        own = {"attn_mask": mask, "is_causal": False} if mask is not None else {}
        return (query, *(all_[id(x)] for x in rest), *args[3:]), more | own

    def _check(self, x: Any, others: tuple[Any, ...], more: dict[str, Any]) -> None:
        """Raise unless the blocks give the same with their tokens split."""
        with torch.no_grad(), _still(self.row):
            self.is_checking, self.is_on = True, False
            whole = self._through(x, others, more)
            self.is_on = True
            part = self._through(tokens_as(x, self.mesh, _WHOLE, _PART), others, more)
            found = tokens_as(part, self.mesh, _PART, _WHOLE)
            self.is_checking = False
        off = float((found - whole).abs().max() / whole.abs().max().clamp_min(1e-12))
        if off > _SAME:
            kind = type(self.row[0]).__name__
            raise InputError(
                f"cp: {kind} gives another result when each rank has some of the tokens "
                f"(off by {off:.2g})",
                hint="tokens may meet in scaled_dot_product_attention or nn.MultiheadAttention "
                "alone, and their places may not be counted inside a block",
            )

    def _through(self, x: Any, others: tuple[Any, ...], more: dict[str, Any]) -> Any:
        for block in self.row:
            x = block(x, *others, **more)
        return x


def split_context(model: Module, mesh: Any, layout: Any) -> list[Context]:
    """Split the tokens in every row of known blocks."""
    return [Context(row, mesh) for row in rows(model, _require_blocks(model, layout, "cp"))]


class _Attention(TorchFunctionMode):  # type: ignore[misc]
    """Lets queries of some tokens see the keys and values of all."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.mesh = mesh

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        more = kwargs or {}
        if func is not scaled_dot_product_attention:
            return func(*args, **more)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        arguments = dict(zip(names, args, strict=False)) | more
        query = arguments["query"]
        all_ = {
            name: _all(arguments[name], query.dim() - 2, self.mesh) for name in ("key", "value")
        }
        mask = _rows(arguments.get("attn_mask"), query.shape[-2], self.mesh)
        if arguments.get("is_causal"):  # which keys came before this rank's tokens
            tokens, keys = (torch.arange(x.shape[-2]) for x in (query, all_["key"]))
            own = tokens + self.mesh.get_local_rank() * len(tokens)
            mask = (keys[None, :] <= own[:, None]).to(query.device)
        return func(**arguments | all_ | {"attn_mask": mask, "is_causal": False})


def _all(x: Any, dim: int, mesh: Any) -> Any:
    """The tokens of all ranks; what they learn from it is added up for each."""
    held = DTensor.from_local(x, mesh, [Shard(dim)], run_check=False)
    return held.redistribute(placements=[_WHOLE]).to_local(grad_placements=[Partial()])


def _rows(mask: Any, tokens: int, mesh: Any) -> Any:
    """The rows of a mask that are this rank's tokens."""
    if mask is None or mask.shape[-2] != tokens * mesh.size():
        return mask
    return mask.narrow(-2, mesh.get_local_rank() * tokens, tokens)


@contextmanager
def _still(row: Sequence[Module]) -> Iterator[None]:
    """Without dropout, so that both ways can be compared."""
    before = [(m, m.training) for block in row for m in block.modules()]
    try:
        for module, _ in before:
            module.training = False
        yield
    finally:
        for module, was in before:
            module.training = was


_STYLES: dict[str, Any] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
_LONE = {  # a layer whose neighbours are not known: its input is whole, and so is its output
    "lone-colwise": lambda: ColwiseParallel(output_layouts=Replicate()),
    "lone-rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
}
_POINTWISE = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.Identity)


def split_tensors(
    model: Module,
    mesh: Any,
    layout: Mapping[str, str] | None = None,
    *,
    tokens: bool = False,
    tied: Collection[str] = (),  # parameters that other layers use too, of other stages maybe
    changed: Collection[str] = (),  # layers whose outputs are changed in place
) -> Module:
    """Split the layers of a layout (known ones where none is given) over the ranks of a mesh.

    With `tokens`, blocks of which every layer is known hold a part of the tokens between them.
    """
    tied = {*tied, *tied_names(model)}
    chosen = named(model, layout, tied)
    if not any(way in _STYLES for way in chosen.values()):
        chosen = lone(model, mesh.size(), tied)
    for name, way in chosen.items():
        _check(name, model.get_submodule(name), way, mesh.size())
        if way != SEQUENCE and f"{name}.weight" in tied:
            raise InputError(
                f"tp: the weight of `{name}` is used by another layer too, which is not split as "
                "it is",
                hint="leave it out of `tensor_layout`, or untie it",
            )
    done = split_tokens(model, mesh, chosen) if tokens else set()
    ways = _STYLES | _LONE
    left = {n: ways[way]() for n, way in chosen.items() if n not in done and way in ways}
    made = parallelize_module(model, mesh, left)
    for name in left.keys() & set(changed):
        copied(made.get_submodule(name))
    return made


def lone(model: Module, ranks: int, tied: Collection[str] = ()) -> dict[str, str]:
    """Linear layers that may be split by themselves: by outputs where even, else by inputs.

    They are called as modules and have a weight of their own.
    """
    shared = {n.rpartition(".")[0] for n in (*tied, *tied_names(model))}
    found: dict[str, str] = {}
    for name, layer in model.named_modules():
        if not is_plain(layer) or name in shared:
            continue
        if layer.out_features % ranks == 0:
            found[name] = "lone-colwise"
        elif layer.in_features % ranks == 0:
            found[name] = "lone-rowwise"
    return found


def named(
    model: Module, layout: Mapping[str, str] | None, tied: Collection[str] = ()
) -> dict[str, str]:
    """The layers that a layout names by pattern; where none is given, those that are known."""
    for pattern, way in (layout or {}).items():
        if way not in (*_STYLES, SEQUENCE):
            raise unknown(f"way to split `{pattern}`", way, (*_STYLES, SEQUENCE))
    if not layout:
        return known(model, tied)
    kinds = {n: isinstance(m, nn.Linear) for n, m in model.named_modules()}
    return {  # layers of other ways than ours are left whole
        n: way for n, is_linear in kinds.items() for pattern, way in layout.items()
        if fnmatchcase(n, pattern) and (way in _STYLES if is_linear else way == SEQUENCE)
    }  # fmt: skip


def said(model: Module) -> dict[str, str] | None:
    """What a model says itself of how its layers split."""
    found = getattr(model, "tensor_layout", None)
    if found:
        return dict(found() if callable(found) else found)
    theirs = getattr(model, "_tp_plan", None)  # of transformers, with more ways than ours
    ours = {name: way for name, way in dict(theirs or {}).items() if way in _STYLES}
    return ours or None


def known(model: Module, tied: Collection[str] = ()) -> dict[str, str]:
    """Which layers split how, as far as the structure of a model shows."""
    found: dict[str, str] = {}
    shared = {n.rpartition(".")[0] for n in (*tied, *tied_names(model))}
    for name, module in model.named_modules():
        dot = f"{name}." if name else ""
        if isinstance(module, nn.Sequential):
            found |= _pairs(module, dot, shared)
        elif isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            found |= {f"{dot}linear1": "colwise", f"{dot}linear2": "rowwise"}
            norms = [n for n, _ in module.named_children() if n.startswith("norm")]
            is_encoder = isinstance(module, nn.TransformerEncoderLayer)
            has_tokens = is_encoder and module.self_attn.batch_first
            found |= {f"{dot}{n}": SEQUENCE for n in norms if has_tokens}
    return found


def is_plain(layer: Module) -> bool:
    """Whether a layer is linear as nn.Linear is, and its weight no result of other parameters."""
    return type(layer) is nn.Linear and "weight" in layer._parameters


def _pairs(box: nn.Sequential, dot: str, tied: Collection[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    first = ""
    for name, child in row(box):
        if is_plain(child) and f"{dot}{name}" not in tied:
            if first:
                found |= {first: "colwise", f"{dot}{name}": "rowwise"}
                first = ""
            else:
                first = f"{dot}{name}"
        elif not isinstance(child, _POINTWISE):
            first = ""
    return found


def _check(name: str, layer: Module, way: str, size: int) -> None:
    if way not in _STYLES:
        return
    if "weight" not in layer._parameters:
        raise InputError(
            f"tp: the weight of `{name}` is made of other parameters, which are not split",
            hint="leave it out of `tensor_layout`",
        )
    width = layer.out_features if way == "colwise" else layer.in_features
    if width % size:
        raise InputError(
            f"`{name}` has {width} {'outputs' if way == 'colwise' else 'inputs'}, "
            f"which {size} ranks cannot share evenly",
            hint="choose a tp that divides it",
        )
