"""A plan's pipeline on this rank: how many micro-batches, which stages, and what runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from foretell.errors import InputError
from foretell.plan import Plan
from foretell.pytorch.deploy.actions import Pipeline
from foretell.pytorch.deploy.blocks import Blocks
from foretell.pytorch.deploy.mesh import Places
from foretell.pytorch.deploy.orders import pipeline as pipeline_of
from foretell.pytorch.deploy.precision import dtype_of, mixed, precision_of
from foretell.pytorch.deploy.stages import Staged
from foretell.pytorch.deploy.units import cut

Loss = Callable[[Any, Any], Any]


def shape_of(plan: Plan, places: Places, samples: int, given: Pipeline | None) -> Pipeline:
    """The pipeline that was given, or the plan's, its ranks as their group numbers them."""
    shape = given or pipeline_of(plan, _num(plan, places, samples))
    order = places.order("pp")
    if len(shape.orders) != len(order):
        raise InputError(f"a pipeline of {len(shape.orders)} ranks for pp={len(order)}")
    return replace(shape, orders=tuple(shape.orders[place] for place in order))


def micro_batches(plan: Plan, samples: int) -> int:
    """In how many pieces a rank takes its share of the batch."""
    each = plan.micro_batch or samples
    if samples % each:
        raise InputError(f"{samples} samples are no multiple of micro_batch={each}")
    return samples // each


def _num(plan: Plan, places: Places, samples: int) -> int:
    """Micro-batches of a step; the actions say, where there are any."""
    if plan.actions:
        return 0
    shares = plan.shares
    mine = shares[places.at["dp"]] if shares else plan.global_batch // plan.dp
    samples = samples or mine
    if not samples:
        raise InputError(
            "how many samples a rank has in a step is not known, and a pipeline needs it",
            hint="give the plan a global_batch, or deploy with samples=…",
        )
    return micro_batches(plan, samples) if plan.micro_batch else plan.pp


def stages_of(model: Any, plan: Plan, shape: Pipeline, places: Places) -> dict[int, Any]:
    """The stages of this rank; copies of a stage are one module where they share a rank."""
    rank = places.order("pp").index(places.at["pp"])
    same = {s: k for k, stages in enumerate(shape.copies) for s in stages}
    num = len(shape.copies) or shape.num_stages
    pieces = cut(model, num, _layers(plan, num))
    return {s: pieces[same.get(s, s)] for s in shape.on(rank)}


def _layers(plan: Plan, num: int) -> tuple[int, ...]:
    """Layers of each stage; a rank's own are dealt out over its chunks."""
    if not plan.layers or len(plan.layers) == num:
        return plan.layers
    chunks = num // plan.pp
    return tuple(
        plan.layers[s % plan.pp] // chunks + (s // plan.pp < plan.layers[s % plan.pp] % chunks)
        for s in range(num)
    )


def runtime(
    shape: Pipeline, modules: Mapping[int, Any], plan: Plan, places: Places, loss: Loss
) -> Staged | Blocks:
    """Torch's runtime for a line of stages, our own executor for any other shape."""
    lossy, kind = mixing(modules, plan, places, loss), places.device
    runs = Staged if shape.is_line else Blocks
    return runs(shape, modules, lossy, group=places.group("pp"), device=torch.device(kind))


def mixing(modules: Mapping[int, Any], plan: Plan, places: Places, loss: Loss) -> Loss:
    """Let stages run in the plan's precision, and the loss too."""
    word, kind = precision_of(plan), places.device

    def lossy(output: Any, target: Any) -> Any:
        with mixed(word, kind):
            return loss(output, target)

    for module in {id(m): m for m in modules.values()}.values():
        _mix(module, word, kind)
    return lossy


def _mix(module: Any, word: str, device: str) -> None:
    """Run a stage's forward in mixed precision: no loop of ours is around it."""
    forward = module.forward

    def inside(*args: Any, **kwargs: Any) -> Any:
        with mixed(word, device):
            return forward(*args, **kwargs)

    if dtype_of(word) is not None:
        module.forward = inside
