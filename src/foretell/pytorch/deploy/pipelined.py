"""A plan's pipeline on this rank: how many micro-batches, which stages, and what runs them.

pp=2                                    as many stages as ranks, or chunks of them
0-1 input / 0 h.0*2 / 1 h.0*2 / 0-1 head   any layers on any ranks, there and back
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from foretell.errors import InputError
from foretell.plan import Plan
from foretell.plan.stage_placement import StageSpec, stage_spec
from foretell.pytorch.deploy.actions import Pipeline, parse
from foretell.pytorch.deploy.actions import pipeline as pipeline_of
from foretell.pytorch.deploy.blocks import Blocks
from foretell.pytorch.deploy.channels import split_all
from foretell.pytorch.deploy.collective import Places, Shared, new_groups
from foretell.pytorch.deploy.forward_stages import forward_stages
from foretell.pytorch.deploy.precision import dtype_of, mixed, precision_of
from foretell.pytorch.deploy.recompute import recompute
from foretell.pytorch.deploy.units import (
    FIRST,
    LAST,
    Cut,
    Traced,
    cut,
    cut_line,
    in_stages,
    is_line,
    trace,
    units,
)
from foretell.pytorch.deploy.uses import holders

Loss = Callable[[Any, Any], Any]
Module = Any
Homes = dict[str, int]  # the stage of each layer, of one copy of the model


class Stages(NamedTuple):
    """A model in stages, as far as this rank has to know."""

    modules: dict[int, Any]  # of this rank; copies of a stage are one where they share a rank
    held: list[tuple[str, tuple[int, ...]]]  # parameters of several ranks, and those that hold them
    shape: Pipeline


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


def pieces(inputs: Sequence[Any], target: Any, num: int) -> list[tuple[tuple[Any, ...], Any]]:
    """A batch in so many micro-batches: inputs and target of each."""
    each = zip(*(x.chunk(num) for x in inputs), strict=True)
    return list(zip(each, [None] * num if target is None else target.chunk(num), strict=True))


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
    order = places.order("pp")
    rank = order.index(places.at["pp"])
    same = {s: k for k, stages in enumerate(shape.copies) for s in stages}
    num = len(shape.copies) or shape.num_stages
    pieces, after = cut_model(model, num, _layers(plan, shape, order, num), call)
    shape = _following(shape, after) if after else shape
    every = [pieces[same.get(s, s)] for s in range(shape.num_stages)]
    held = _held(shape, every, names, rank)
    modules = {s: pieces[same.get(s, s)] for s in shape.on(rank)}
    return Stages(modules, held, shape)


def _held(
    shape: Pipeline, pieces: Sequence[Any], names: Mapping[str, str], rank: int
) -> list[tuple[str, tuple[int, ...]]]:
    """Parameters that stages on several ranks have, and those ranks: one order on every rank."""
    homes: dict[str, list[tuple[int, ...]]] = {}
    for s, piece in enumerate(pieces):
        for name in {names[n] for n, _ in piece.named_parameters()}:
            homes.setdefault(name, []).append(shape.ranks[s])
    return list(holders({name: homes[name] for name in names if name in homes}, rank))


def cut_model(
    model: Any, num: int, layers: Sequence[int], call: Any
) -> tuple[list[Any], tuple[tuple[int, ...], ...]]:
    """A model's stages, and which others each follows; nothing where they are in a line."""
    if is_line(model):
        return list(cut_line(model, num, layers)), ()
    try:
        traced = in_stages(model, num, layers)
    except InputError:
        if call is None or not any(units(model)):
            raise
        return list(forward_stages(model, num, layers, call)), ()
    return [traced.module(s) for s in range(num)], traced.after


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


def _layers(plan: Plan, shape: Pipeline, order: Sequence[int], num: int) -> tuple[int, ...]:
    """Layers of each stage; a rank's own are split over its chunks."""
    if not plan.layers or len(plan.layers) == num:
        return plan.layers
    chunks = num // plan.pp
    homes = [order[ranks[0]] for ranks in shape.ranks[:num]]
    every = [(plan.layers[home], homes[:s].count(home)) for s, home in enumerate(homes)]
    return tuple(many // chunks + (chunk < many % chunks) for many, chunk in every)


def placed_stages(model: Module, plan: Plan, names: Mapping[str, str], rank: int) -> Stages:
    """The stages that a plan places one by one, made of a model; asked on all ranks at once.

    Layers of a plan that was found for a script are named by its modules (`h.0*2`: the next two
    like it), so the same script runs it. A stage on several ranks is split over them layer by
    layer: linear layers and convolutions by their outputs, embeddings by their rows; what cannot
    be split is done by each of them. Copies of the model (two directions) share their parameters.
    """
    stages = [stage_spec(texts) for texts in plan.stages]
    traced = trace(model, list(dict.fromkeys(name for one in stages for name, _ in one.layers)))
    cuts = {s: made for made in _copies(stages, traced) for s in made.stage.values()}
    every = range(len(stages))
    pipeline = Pipeline(parse(plan.actions), tuple(cuts[s].after[s] for s in every))
    for s, one in enumerate(stages):
        if pipeline.ranks[s] != tuple(sorted(one.ranks)):
            raise InputError(
                f"stage {s} is on ranks {list(one.ranks)}, and ranks {list(pipeline.ranks[s])} "
                "have actions for it",
                hint="give every rank a row with the actions of its own stages",
            )
    modules = {s: cuts[s].module(s) for s in every}
    held = _held(pipeline, [modules[s] for s in every], names, rank)
    for s in every:
        _do_otherwise(modules[s], stages[s].ways, cuts[s].layers(s))
    mine = {s: modules[s] for s in pipeline.on(rank)}
    _split(mine, stages)
    return Stages(mine, held, pipeline)


def _copies(stages: Sequence[StageSpec], traced: Traced) -> list[Cut]:
    """The model cut as each of its copies is; most plans have one."""
    seen = Counter(name for one in stages for name, times in one.layers if not times)
    copies = min(seen.values(), default=1)
    homes: list[Homes] = [{} for _ in range(copies)]
    total: Counter[str] = Counter()
    for one in stages:
        for name, times in one.layers:
            total[name] += times or 1
    found = {name: _like(traced, name, many // copies) for name, many in total.items()}
    turn: Counter[str] = Counter()
    for s, one in enumerate(stages):
        for name, times in one.layers:
            for _ in range(times or 1):
                copy, at = divmod(turn[name], len(found[name]))
                homes[copy][found[name][at]] = s
                turn[name] += 1
    return [cut(traced, _filled(home, traced), len(stages)) for home in homes]


def _like(traced: Traced, name: str, many: int) -> list[str]:
    """The modules that a repeated layer stands for: so many like the first, in order of call."""
    if name in (FIRST, LAST):
        return [name]
    first = _shapes(traced, name)
    found = [u for u in traced.units[traced.units.index(name) :] if _shapes(traced, u) == first]
    if len(found) < many:
        raise InputError(
            f"the plan has layer `{name}` {many} times, the model {len(found)} modules like it",
            hint="make the plan from this very script: foretell schedule SCRIPT --on CLUSTER",
        )
    return found[:many]


def _shapes(traced: Traced, unit: str) -> list[tuple[int, ...]]:
    return [tuple(p.shape) for p in traced.model.get_submodule(unit).parameters()]


def _filled(home: Homes, traced: Traced) -> Homes:
    """Modules that the plan does not name (an activation between layers) go with those before."""
    claimed = [home[u] for u in traced.units if u in home] or [*home.values()]
    found = {FIRST: claimed[0], LAST: claimed[-1]} | home
    for before, unit in pairwise([FIRST, *traced.units]):
        found.setdefault(unit, found[before])
    return found


def _do_otherwise(module: Module, ways: Sequence[str], layers: Sequence[str]) -> None:
    """What a plan has done another way in a stage."""
    if "frozen" in ways:
        module.requires_grad_(False)
    if "recompute" in ways:
        recompute({name: module.get_submodule(name) for name in layers})
    if "offload" in ways:
        forward = module.forward

        def away(*args: Any) -> Any:
            with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
                return forward(*args)

        module.forward = away


def _split(mine: Mapping[int, Module], stages: Sequence[StageSpec]) -> None:
    """Split the layers of wide stages over their ranks."""
    wide = sorted({stages[s].ranks for s in mine if len(stages[s].ranks) > 1})
    groups = new_groups(wide)
    parts: dict[int, tuple[Any, Any]] = {}  # copies and tied layers share theirs
    for s, module in mine.items():
        if len(stages[s].ranks) > 1:
            known = dict(module.named_parameters(remove_duplicate=False))
            read = {id(known.get(n.target)) for n in module.graph.nodes if n.op == "get_attr"}
            split_all(module, groups[stages[s].ranks], read=read, parts=parts)


def runtime(stages: Stages, plan: Plan, places: Places, loss: Loss, shared: Shared) -> Blocks:
    """What runs the stages of this rank."""
    num = stages.shape.micro_batches * len(set(stages.shape.lines))
    return Blocks(
        stages.shape, stages.modules, mixing(stages.modules, plan, places, loss),
        group=places.group("pp"), device=torch.device(places.device), shared=shared,
        weights=weights_of(plan, places, num),
    )  # fmt: skip


def mixing(modules: Mapping[int, Any], plan: Plan, places: Places, loss: Loss) -> Loss:
    """Let stages run in the plan's precision, and the loss too."""
    word, kind = precision_of(plan), places.device

    def lossy(output: Any, target: Any) -> Any:
        with mixed(word, kind):
            return loss(output, target)

    for module in {id(m): m for m in modules.values()}.values():
        if dtype_of(word) is not None:  # no loop of ours is around it
            module.forward = mixed(word, kind)(module.forward)
    return lossy
