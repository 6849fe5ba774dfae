"""Fused regions, compiled one by one: what a plan fuses together is one compiled call.

A region names modules here (single ops: → `op_regions`). One module is compiled in place; several
in a row in one nn.Sequential are compiled together. Everything else stays eager, so that a plan
fuses what it says and nothing more.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from foretell.errors import InputError
from foretell.plan import Plan
from foretell.pytorch.deploy.units import row

Module = Any


def speaks_of_ops(plan: Plan, model: Module) -> bool:
    """Whether a plan fuses or orders single ops of a captured step, not whole modules."""
    known = dict(model.named_modules())
    return bool(plan.late) or any(name not in known for region in plan.regions for name in region)


def compile_regions(
    model: Module, regions: Sequence[Sequence[str]], *, backend: str = "inductor"
) -> None:
    """Compile each region of the model by itself."""
    rows: dict[str, list[list[str]]] = {}
    for region in regions:
        parent, names = refusable(model, region)
        if len(names) == 1:
            module = model.get_submodule(region[0])
            module.forward = torch.compile(module.forward, backend=backend)
        else:
            rows.setdefault(parent, []).append(names)
    for parent, runs in rows.items():
        box = model.get_submodule(parent)
        box.forward = partial(_forward, _segments(box, runs, backend))


def refusable(model: Module, region: Sequence[str]) -> tuple[str, list[str]]:
    """The container of a region and its children there, or an error that says why not."""
    known = dict(model.named_modules(remove_duplicate=False))
    missing = [name for name in region if name not in known]
    if missing:
        raise InputError(
            f"region {'+'.join(region)} names `{missing[0]}`, which is no module of the model",
            hint="name modules as model.named_modules() does",
        )
    parents = {name.rpartition(".")[0] for name in region}
    if len(region) > 1 and (len(parents) > 1 or not isinstance(known[min(parents)], nn.Sequential)):
        raise InputError(f"region {'+'.join(region)} is not in one nn.Sequential")
    parent = min(parents)
    names = [name.rpartition(".")[2] for name in region]
    if len(region) > 1:
        order = [n for n, _ in row(known[parent])]
        first = order.index(names[0])
        if order[first : first + len(names)] != names:
            raise InputError(f"region {'+'.join(region)} is not one row of modules")
    return parent, names


def _segments(box: nn.Sequential, runs: list[list[str]], backend: str) -> list[Any]:
    """The children of a container, each run of a region as one compiled call."""
    first = {run[0]: run for run in runs}
    inside = {name for run in runs for name in run[1:]}
    found: list[Any] = []
    for name, child in row(box):
        if name in first:
            run = nn.Sequential(*(box.get_submodule(n) for n in first[name]))
            found.append(torch.compile(run, backend=backend))
        elif name not in inside:
            found.append(child)
    return found


def _forward(segments: Sequence[Any], x: Any) -> Any:
    for segment in segments:
        x = segment(x)
    return x
