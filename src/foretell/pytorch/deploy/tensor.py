"""Tensor parallel on DTensor, where it is known how the layers of a model go together.

    colwise   a linear layer's outputs are split; its input is whole
    rowwise   its inputs are split, as a colwise layer before it leaves them; the output is summed
    sequence  a norm, which may see some of the tokens alone (→ tokens.py)

A layout comes from the model (`tensor_layout`, or the `_tp_plan` of a transformers model), or is
read off its structure: two linear layers in a row with only pointwise layers between them. Where
there are no such, each linear layer is split by itself, its output gathered or summed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from foretell.errors import InputError, unknown
from foretell.pytorch.deploy.tokens import SEQUENCE, split_tokens
from foretell.pytorch.deploy.units import row
from foretell.pytorch.deploy.uses import copied, tied_names

Module = Any
_STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
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
        return _split_lone(model, mesh, tied, changed)
    for name, way in chosen.items():
        _check(name, model.get_submodule(name), way, mesh.size())
        if way != SEQUENCE and f"{name}.weight" in tied:
            raise InputError(
                f"tp: the weight of `{name}` is used by another layer too, which is not split as "
                "it is",
                hint="leave it out of `tensor_layout`, or untie it",
            )
    done = split_tokens(model, mesh, chosen) if tokens else set()
    left = {n: way for n, way in chosen.items() if n not in done and way in _STYLES}
    made = parallelize_module(model, mesh, {n: _STYLES[way]() for n, way in left.items()})
    for name in left.keys() & set(changed):
        copied(made.get_submodule(name))
    return made


def _split_lone(
    model: Module, mesh: Any, tied: Collection[str], changed: Collection[str]
) -> Module:
    """Split each linear layer by itself."""
    for name, way in lone(model, mesh.size(), tied).items():
        layer = parallelize_module(model.get_submodule(name), mesh, _LONE[way]())
        if name in changed:
            copied(layer)
    return model


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
    return _matched(model, layout) if layout else known(model, tied)


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
            found |= {f"{dot}{n}": SEQUENCE for n in norms if _samples_first(module)}
    return found


def is_plain(layer: Module) -> bool:
    """Whether a layer is linear as nn.Linear is, and its weight no result of other parameters."""
    return type(layer) is nn.Linear and "weight" in layer._parameters


def _samples_first(layer: Module) -> bool:
    return bool(layer.self_attn.batch_first) and isinstance(layer, nn.TransformerEncoderLayer)


def _matched(model: Module, said: Mapping[str, str]) -> dict[str, str]:
    """The layers that patterns name; of other ways than ours they are left whole."""
    kinds = {n: isinstance(m, nn.Linear) for n, m in model.named_modules()}
    return {
        n: way for n, is_linear in kinds.items() for pattern, way in said.items()
        if fnmatchcase(n, pattern) and (way in _STYLES if is_linear else way == SEQUENCE)
    }  # fmt: skip


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
    if way == SEQUENCE:
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
