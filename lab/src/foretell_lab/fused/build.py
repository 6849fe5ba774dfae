"""Regions made runnable: as a graph of torch ops, as tensors to feed it, as compiled code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from foretell_lab.fused.region import Encoded, Entry, Region

Tensor = Any
_RANDOM = {"rand", "randn", "native_dropout", "bernoulli"}  # ops that draw numbers


def operator(name: str) -> Any:
    """The op behind `aten.add.Tensor`."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found


def graph_of(region: Region, device: str) -> fx.GraphModule:
    """The region as a graph of torch ops."""
    graph = fx.Graph()
    values: list[fx.Node] = [graph.placeholder(f"x{i}") for i in range(len(region.entries))]

    def value(reference: list[int]) -> fx.Node:
        node, result = values[reference[1]], reference[2]
        return node if result < 0 else graph.call_function(_item, (node, result))

    for op in region.ops:
        args, kwargs = decoded(op.args, value, device), decoded(op.kwargs, value, device)
        values.append(graph.call_function(operator(op.name), tuple(args), kwargs))
    graph.output(tuple(value([0, node, result]) for node, result in region.outputs))
    return fx.GraphModule(torch.nn.Module(), graph)


def _item(values: Sequence[Any], which: int) -> Any:
    return values[which]


def decoded(encoded: Encoded, value: Callable[[Any], Any], device: str) -> Any:
    """Arguments with values in the place of references, and torch's words for formats."""
    if isinstance(encoded, dict):
        if "torch" in encoded:
            return torch.device(device) if encoded["torch"] == "device" else _torch(encoded)
        return {key: decoded(part, value, device) for key, part in encoded.items()}
    if isinstance(encoded, list):
        if len(encoded) == 3 and encoded[0] == "%":
            return value(encoded)
        return [decoded(part, value, device) for part in encoded]
    return encoded


def _torch(encoded: dict[str, str]) -> Any:
    return getattr(torch, encoded["torch"])


def fake_entries(region: Region, mode: FakeTensorMode, device: str) -> list[Tensor]:
    """Tensors of the right shape without memory behind them."""
    with mode:
        return [
            torch.empty_strided(e.shape, e.stride, dtype=getattr(torch, e.dtype), device=device)
            for e in region.entries
        ]


def real_entry(entry: Entry, device: str) -> Tensor:
    """A tensor of random numbers, as it lies in memory."""
    dtype = getattr(torch, entry.dtype)
    extent = 1 + sum((n - 1) * s for n, s in zip(entry.shape, entry.stride, strict=True))
    if dtype.is_floating_point:
        flat = torch.randn(extent, device=device, dtype=dtype)
    else:
        flat = torch.randint(entry.high, (extent,), device=device).to(dtype)
    return flat.as_strided(entry.shape, entry.stride)


@cache
def _decompositions() -> Any:
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def compiled(region: Region, device: str) -> Callable[[list[Tensor]], Any]:
    """The region through Inductor, as it compiles the graph of a training step."""
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.fx_passes.replace_random import replace_random_passes
    from torch._inductor.virtualized import V

    mode = FakeTensorMode()
    entries = fake_entries(region, mode, device)
    with mode, torch.no_grad():
        lowered = make_fx(graph_of(region, device), decomposition_table=_decompositions())(*entries)
    if any(op.name.split(".")[1] in _RANDOM for op in region.ops):
        with V.set_fake_mode(mode):
            replace_random_passes(lowered)
    made: Callable[[list[Tensor]], Any] = compile_fx_inner(lowered, entries)
    return made
