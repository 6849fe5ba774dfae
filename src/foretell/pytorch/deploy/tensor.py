"""Tensor parallel on DTensor, where it is known how the layers of a model go together.

    colwise   a linear layer's outputs are split; its input is whole
    rowwise   its inputs are split, as a colwise layer before it leaves them; the output is summed

A layout comes from the model (`tensor_layout`, or the `_tp_plan` of a transformers model), or is
read off its structure: two linear layers in a row with only pointwise layers between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from foretell.errors import InputError, unknown

Module = Any
_STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
_POINTWISE = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.Identity)


def split_tensors(model: Module, mesh: Any, layout: Mapping[str, str] | None = None) -> Module:
    """Split the layers of a layout (known ones where none is given) over the ranks of a mesh."""
    chosen = dict(layout or known(model))
    if not chosen:
        raise InputError(
            f"nobody has said how the layers of {type(model).__name__} split into tensors",
            hint="give the model an attribute `tensor_layout`: {layer: colwise | rowwise}",
        )
    for name, way in chosen.items():
        _check(name, model.get_submodule(name), way, mesh.size())
    plan = {name: _STYLES[way]() for name, way in chosen.items()}
    return parallelize_module(model, mesh, plan)


def known(model: Module) -> dict[str, str]:
    """Which layers split how, as far as the model says or its structure shows."""
    said = getattr(model, "tensor_layout", None) or getattr(model, "_tp_plan", None)
    if said:
        return _matched(model, said() if callable(said) else said)
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        dot = f"{name}." if name else ""
        if isinstance(module, nn.Sequential):
            found |= _pairs(module, dot)
        elif isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            found |= {f"{dot}linear1": "colwise", f"{dot}linear2": "rowwise"}
    return found


def _matched(model: Module, said: Mapping[str, str]) -> dict[str, str]:
    """The layers that patterns name; ways other than the two are left whole."""
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    return {
        n: way for n in names for pattern, way in said.items()
        if fnmatchcase(n, pattern) and way in _STYLES
    }  # fmt: skip


def _pairs(box: nn.Sequential, dot: str) -> dict[str, str]:
    found: dict[str, str] = {}
    first = ""
    for name, child in box.named_children():
        if isinstance(child, nn.Linear):
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
        raise unknown(f"way to split `{name}`", way, _STYLES)
    if not isinstance(layer, nn.Linear):
        raise InputError(f"`{name}` is a {type(layer).__name__}, not a linear layer")
    width = layer.out_features if way == "colwise" else layer.in_features
    if width % size:
        raise InputError(
            f"`{name}` has {width} {'outputs' if way == 'colwise' else 'inputs'}, "
            f"which {size} ranks cannot share evenly",
            hint="choose a tp that divides it",
        )
