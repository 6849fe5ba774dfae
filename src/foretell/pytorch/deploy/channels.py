"""Convolutions and linear layers split by filters (outputs) or channels (inputs) over ranks.

    filter    y = [ W_0 x | W_1 x | … ]      each rank makes some outputs, all gather them
    channel   y = Σ_r W_r x_r                each rank reads some inputs, all sum

An embedding has its rows where a linear layer has outputs: by `filter` each rank looks up those
that are its own, and all sum.

Each rank keeps only its part of the weight. Inputs and outputs are whole on every rank, so any
layers may be split beside others that are not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from foretell.errors import InputError, unknown
from foretell.pytorch.deploy.collective import (
    SPLIT,
    Split,
    copy_in,
    cut,
    even,
    gather,
    part_of,
    sum_out,
)
from foretell.pytorch.deploy.uses import tied_names

Tensor = Any
Module = Any
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
# what reads the weights of its layers itself
WHOLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
WAYS = {"filter": 0, "channel": 1}  # the dim of the weight that is split


def split_channels(model: Module, ways: Mapping[str, str], group: Any = None) -> None:
    """Split the named layers by `filter` or `channel`; parameters say how (→ `split_of`)."""
    size = dist.get_world_size(group)
    for name, way in ways.items():
        layer = model.get_submodule(name)
        why = refusal(layer, way, size)
        if why:
            raise InputError(f"`{name}` cannot be split by {way}: {why}")
        sizes = even(layer.weight.shape[WAYS[way]], size)
        _keep_part(layer, way, sizes, group)
        call = _rows if isinstance(layer, nn.Embedding) else _CALLS[way]
        layer.forward = partial(call, layer, sizes, group)


def split_all(
    module: Module,
    group: Any,
    *,
    read: Collection[int] = (),  # ids of weights that something else reads, and needs whole
    parts: dict[int, tuple[Any, Any]] | None = None,  # by id: weights split before, and their part
) -> None:
    """Split by outputs every layer that can be; tied ones stay one."""
    parts = {} if parts is None else parts
    closed = tuple(f"{n}." for n, m in module.named_modules() if isinstance(m, WHOLE))
    for name, layer in list(module.named_modules()):
        if type(layer) not in (*LAYERS, nn.Embedding) or name.startswith(closed):
            continue
        before = layer.weight
        is_done = any(before is part for _, part in parts.values())
        if is_done or id(before) in read or refusal(layer, "filter", dist.get_world_size(group)):
            continue
        split_channels(module, {name: "filter"}, group)
        _, layer.weight = parts.setdefault(id(before), (before, layer.weight))


def all_layers(model: Any, way: str, size: int, tied: Collection[str]) -> dict[str, str]:
    """Every layer that has enough filters or channels; the first reads too few channels."""
    tied = {*tied, *tied_names(model)}
    closed = tuple(f"{n}." for n, m in model.named_modules() if isinstance(m, WHOLE))
    found = {
        n: way
        for n, m in model.named_modules()
        if isinstance(m, LAYERS)
        and "weight" in m._parameters  # not made of others
        and m.weight.shape[WAYS[way]] >= size
        and getattr(m, "groups", 1) == 1
        and not {f"{n}.weight", f"{n}.bias"} & tied
        and not n.startswith(closed)
    }
    if not found:
        raise InputError(f"no layer of the model can be split by {way} over {size} ranks")
    return found


def refusal(layer: Module, way: str, size: int) -> str:
    """Why a layer cannot be split so, or nothing."""
    if way not in WAYS:
        raise unknown("way to split a layer", way, WAYS)
    if isinstance(layer, nn.Embedding):
        if way != "filter":
            return "an embedding has no inputs"
        if layer.max_norm is not None or layer.sparse or layer.scale_grad_by_freq:
            return "its rows are changed or counted as they are read"
        few = layer.num_embeddings < size
        return f"it has {layer.num_embeddings} rows for {size} ranks" if few else ""
    if not isinstance(layer, LAYERS):
        return f"{type(layer).__name__} is neither linear nor a convolution"
    if getattr(layer, "groups", 1) != 1:
        return f"it has {layer.groups} groups"
    if layer.weight.shape[WAYS[way]] < size:
        return f"it has {layer.weight.shape[WAYS[way]]} of them for {size} ranks"
    if getattr(layer, "padding_mode", "zeros") != "zeros":
        return f"it pads with {layer.padding_mode}"
    return ""


def _keep_part(layer: Module, way: str, sizes: list[int], group: Any) -> None:
    for name, dim in (("weight", WAYS[way]), ("bias", 0)):
        whole = getattr(layer, name, None)
        if whole is None or (name == "bias" and way == "channel"):
            continue
        part = part_of(whole.detach(), dim, sizes, group).clone()
        setattr(layer, name, nn.Parameter(part, whole.requires_grad))
        setattr(getattr(layer, name), SPLIT, Split(dim, sizes, group))


def _filters(layer: Module, sizes: list[int], group: Any, x: Tensor) -> Tensor:
    y = _apply(layer, copy_in(x, group), layer.bias)
    return gather(y, _channel_dim(layer, y), sizes, group)


def _channels(layer: Module, sizes: list[int], group: Any, x: Tensor) -> Tensor:
    y = sum_out(_apply(layer, cut(x, _channel_dim(layer, x), sizes, group), None), group)
    if layer.bias is None:
        return y
    shape = [-1 if d == _channel_dim(layer, y) % y.dim() else 1 for d in range(y.dim())]
    return y + layer.bias.view(shape)


def _rows(layer: Module, sizes: list[int], group: Any, x: Tensor) -> Tensor:
    """Look up one's own rows, nothing for others; what pads has no gradient, as in the whole."""
    rank = dist.get_rank(group)
    first = sum(sizes[:rank])
    mine = (x >= first) & (x < first + sizes[rank])
    found = nn.functional.embedding(torch.where(mine, x - first, 0), layer.weight)
    if layer.padding_idx is not None:
        found = torch.where((x == layer.padding_idx).unsqueeze(-1), found.detach(), found)
    return sum_out(found * mine.unsqueeze(-1), group)


_CALLS = {"filter": _filters, "channel": _channels}


def _apply(layer: Module, x: Tensor, bias: Tensor) -> Tensor:
    if isinstance(layer, nn.Linear):
        return nn.functional.linear(x, layer.weight, bias)
    call = {3: torch.conv1d, 4: torch.conv2d, 5: torch.conv3d}[x.dim()]
    return call(x, layer.weight, bias, layer.stride, layer.padding, layer.dilation, 1)


def _channel_dim(layer: Module, x: Tensor) -> int:
    return x.dim() - 1 if isinstance(layer, nn.Linear) else 1
