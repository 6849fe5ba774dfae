"""A plan's pipeline on this rank: how many micro-batches, which stages, and what runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from foretell.errors import InputError
from foretell.plan import Plan
from foretell.pytorch.deploy.actions import Pipeline
from foretell.pytorch.deploy.blocks import Blocks
from foretell.pytorch.deploy.collective import Shared
from foretell.pytorch.deploy.forward_stages import forward_stages
from foretell.pytorch.deploy.mesh import Places
from foretell.pytorch.deploy.orders import pipeline as pipeline_of
from foretell.pytorch.deploy.precision import dtype_of, mixed, precision_of
from foretell.pytorch.deploy.stages import Staged
from foretell.pytorch.deploy.staging import in_stages
from foretell.pytorch.deploy.ties import holders
from foretell.pytorch.deploy.units import cut, is_line, units

Loss = Callable[[Any, Any], Any]


class Stages(NamedTuple):
    """A model in stages, as far as this rank has to know."""

    modules: dict[int, Any]  # of this rank; copies of a stage are one where they share a rank
    held: list[tuple[str, tuple[int, ...]]]  # parameters of several ranks, and those that hold them
    shape: Pipeline
    is_plain: bool  # torch's own runtime can take it


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
    samples = samples or _mine(plan, places) or plan.global_batch // plan.dp
    if is_padded(plan):
        samples = max(plan.shares)
    if not samples:
        raise InputError(
            "how many samples a rank has in a step is not known, and a pipeline needs it",
            hint="give the plan a global_batch, or deploy with samples=…",
        )
    if not plan.micro_batch and samples % plan.pp:
        raise InputError(
            f"{samples} samples do not make pp={plan.pp} equal micro-batches",
            hint="give the plan a micro_batch that divides them",
        )
    return micro_batches(plan, samples) if plan.micro_batch else plan.pp


def is_padded(plan: Plan) -> bool:
    """Whether ranks with fewer micro-batches take some that count nothing.

    Ranks of FSDP gather parameters together, for every micro-batch.
    """
    return plan.zero >= 2 and plan.micro_batch > 0 and len(set(plan.shares)) > 1


def padded(plan: Plan, tensor: Any) -> Any:
    """A rank's samples with some of them repeated, as many as the rank with most has."""
    if tensor is None or not is_padded(plan):
        return tensor
    return tensor[torch.arange(max(plan.shares), device=tensor.device) % len(tensor)]


def weights_of(plan: Plan, places: Places, num: int) -> list[float]:
    """By what the mean loss of each of a rank's micro-batches counts in its gradients.

    FSDP gives the plain mean over ranks, so uneven shares are weighed here; our own sync does that
    itself.
    """
    if plan.zero < 2 or not plan.shares:
        return [1 / num] * num
    mine = _mine(plan, places)
    own = mine // plan.micro_batch if is_padded(plan) else num
    return [mine * plan.dp / sum(plan.shares) / own * (k < own) for k in range(num)]


def _mine(plan: Plan, places: Places) -> int:
    return plan.shares[places.at["dp"]] if plan.shares else 0


def stages_of(
    model: Any,
    plan: Plan,
    shape: Pipeline,
    places: Places,
    names: Mapping[str, str],
    call: Any = None,  # arguments of a forward, for a model that cannot be traced
) -> Stages:
    """Cut a model into the stages of a pipeline."""
    rank = places.order("pp").index(places.at["pp"])
    same = {s: k for k, stages in enumerate(shape.copies) for s in stages}
    num = len(shape.copies) or shape.num_stages
    pieces, after = cut_model(model, num, _layers(plan, shape, places, num), call)
    shape = _following(shape, after) if after else shape
    homes: dict[str, list[tuple[int, ...]]] = {}
    for s in range(shape.num_stages):
        for name in {names[n] for n, p in pieces[same.get(s, s)].named_parameters()}:
            homes.setdefault(name, []).append(shape.ranks[s])
    order = [name for name in names if name in homes]  # the same on every rank
    held = list(holders({name: homes[name] for name in order}, rank))
    modules = {s: pieces[same.get(s, s)] for s in shape.on(rank)}
    return Stages(modules, held, shape, plan.cp == 1 and _is_plain(shape, pieces))


def cut_model(
    model: Any, num: int, layers: Sequence[int], call: Any
) -> tuple[list[Any], tuple[tuple[int, ...], ...]]:
    """A model's stages, and which others each follows; nothing where they are in a line."""
    if is_line(model):
        return list(cut(model, num, layers)), ()
    try:
        traced = in_stages(model, num, layers)
    except InputError:
        if call is None or not any(units(model)):
            raise
        return list(forward_stages(model, num, layers, call)), ()
    return [traced.module(s) for s in range(num)], traced.after


def _is_plain(shape: Pipeline, pieces: Sequence[Any]) -> bool:
    """One line of stages, the batch read by the first alone, gradients that go all the way.

    Where the first stage is frozen, torch's runtime loses weight gradients of a backward in two.
    """
    reads = any(getattr(piece, "reads", ()) for piece in pieces[1:])
    is_frozen = not any(p.requires_grad for p in pieces[0].parameters())
    return shape.is_line and not reads and not (shape.halves and is_frozen)


def _following(shape: Pipeline, after: tuple[tuple[int, ...], ...]) -> Pipeline:
    """The pipeline of a model whose stages may read from any before them."""
    many = len(shape.copies[0]) if shape.copies else 1
    if many == 1:
        return replace(shape, after=after)
    found: list[tuple[int, ...]] = [()] * shape.num_stages
    for which in range(many):
        for s, befores in enumerate(after):
            found[shape.copies[s][which]] = tuple(shape.copies[b][which] for b in befores)
    return replace(shape, after=tuple(found))


def _layers(plan: Plan, shape: Pipeline, places: Places, num: int) -> tuple[int, ...]:
    """Layers of each stage; a rank's own are split over its chunks."""
    if not plan.layers or len(plan.layers) == num:
        return plan.layers
    chunks = num // plan.pp
    homes = [places.order("pp")[ranks[0]] for ranks in shape.ranks[:num]]
    every = [(plan.layers[home], homes[:s].count(home)) for s, home in enumerate(homes)]
    return tuple(many // chunks + (chunk < many % chunks) for many, chunk in every)


def runtime(
    stages: Stages, plan: Plan, places: Places, loss: Loss, shared: Shared
) -> Staged | Blocks:
    """Torch's runtime for a line of stages, our own executor for any other shape."""
    lossy, kind = mixing(stages.modules, plan, places, loss), places.device
    runs = Staged if stages.is_plain else Blocks
    options = {"group": places.group("pp"), "device": torch.device(kind), "shared": shared}
    num = stages.shape.micro_batches * len(set(stages.shape.lines))
    options |= {"weights": weights_of(plan, places, num)}
    return runs(stages.shape, stages.modules, lossy, **options)


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
