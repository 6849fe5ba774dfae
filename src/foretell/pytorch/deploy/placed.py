"""A plan's stages on the user's own model: any layers on any ranks, there and back.

    0-1 input / 0 h.0*2 / 1 h.0*2 / 0-1 head

Layers of a plan that was found for a script are named by its modules (`h.0*2`: the next two like
it), so the same script runs it. A stage on several ranks is split over them layer by layer: linear
layers and convolutions by their outputs, embeddings by their rows; what cannot be split is done by
each of them. Copies of the model (two directions) share their parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from foretell.errors import InputError
from foretell.plan import Plan
from foretell.plan.stage_placement import StageSpec, stage_spec
from foretell.pytorch.deploy.actions import Pipeline, parse
from foretell.pytorch.deploy.channels import split_all, split_parameters
from foretell.pytorch.deploy.collective import Shared, new_groups
from foretell.pytorch.deploy.recompute import recompute
from foretell.pytorch.deploy.staging import FIRST, LAST, Traced, cut, trace
from foretell.pytorch.deploy.ties import holders

Module = Any
Homes = dict[str, int]  # the stage of each layer, of one copy of the model


@dataclass(frozen=True)
class Placed:
    """A pipeline, the stages of this rank, and what it shares with others."""

    pipeline: Pipeline
    modules: dict[int, Module]
    shared: Shared
    is_plain: bool  # nothing but the first stage reads the batch, as torch's runtime has it
    parameters: dict[str, Any]  # of this rank, by their names in the whole model
    splits: dict[int, Any]  # by id of a parameter: dim, sizes, group


def place(model: Module, plan: Plan, rank: int) -> Placed:
    """The stages of a plan made of a model; asked on all ranks at once."""
    stages = [stage_spec(texts) for texts in plan.stages]
    names = list(dict.fromkeys(name for one in stages for name, _ in one.layers))
    traced = trace(model, names)
    cuts = {s: made for made in _copies(stages, traced) for s in made.stage.values()}
    every = range(len(stages))
    pipeline = Pipeline(parse(plan.actions), tuple(cuts[s].after[s] for s in every))
    _check_ranks(stages, pipeline)
    modules = {s: cuts[s].module(s) for s in every}
    known = {id(p): name for name, p in model.named_parameters()}
    held = {s: [known[id(p)] for p in modules[s].parameters()] for s in every}
    homes = {name: [stages[s].ranks for s in every if name in held[s]] for name in known.values()}
    sharing = list(holders(homes, rank))
    for s in every:
        _do_otherwise(modules[s], stages[s].ways, cuts[s].layers(s))
    mine = {s: modules[s] for s in pipeline.on(rank)}
    splits = _split(mine, stages)
    here = dict(_renamed(mine, held))
    shared = [(here[name], ranks) for name, ranks in sharing]
    is_plain = not any(cuts[s].reads[s] for s in every[1:])
    return Placed(pipeline, mine, shared, is_plain, here, splits)


def _copies(stages: Sequence[StageSpec], traced: Traced) -> list[Any]:
    """The model cut as each of its copies is; most plans have one."""
    seen = Counter(name for one in stages for name, times in one.layers if not times)
    copies = min(seen.values(), default=1)
    homes: list[Homes] = [{} for _ in range(copies)]
    total: Counter[str] = Counter()
    for one in stages:
        for name, times in one.layers:
            total[name] += times or 1
    units = {name: _like(traced, name, many // copies) for name, many in total.items()}
    turn: Counter[str] = Counter()
    for s, one in enumerate(stages):
        for name, times in one.layers:
            for _ in range(times or 1):
                copy, at = divmod(turn[name], len(units[name]))
                homes[copy][units[name][at]] = s
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
    stage = found[FIRST]
    for unit in traced.units:
        stage = found.setdefault(unit, stage)
    return found


def _check_ranks(stages: Sequence[StageSpec], pipeline: Pipeline) -> None:
    for s, one in enumerate(stages):
        if pipeline.ranks[s] != tuple(sorted(one.ranks)):
            raise InputError(
                f"stage {s} is on ranks {list(one.ranks)}, and ranks {list(pipeline.ranks[s])} "
                "have actions for it",
                hint="give every rank a row with the actions of its own stages",
            )


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


def _split(mine: Mapping[int, Module], stages: Sequence[StageSpec]) -> dict[int, Any]:
    """Split the layers of wide stages over their ranks."""
    wide = sorted({stages[s].ranks for s in mine if len(stages[s].ranks) > 1})
    groups = new_groups(wide)
    parts: dict[int, tuple[Any, Any]] = {}  # copies and tied layers share theirs
    found: dict[int, Any] = {}
    for s, module in mine.items():
        if len(stages[s].ranks) > 1:
            read = {id(p) for p in module.parameters() if _is_read(module, p)}
            group = groups[stages[s].ranks]
            made = split_all(module, group, read=read, parts=parts)
            found |= {id(p): how for p, how in split_parameters(module, made, group)}
    return found


def _is_read(module: Module, parameter: Any) -> bool:
    """Whether the traced forward takes a parameter in its own hands."""
    taken = [n.target for n in module.graph.nodes if n.op == "get_attr"]
    return any(module.get_parameter(name) is parameter for name in taken if _has(module, name))


def _has(module: Module, name: str) -> bool:
    return name in dict(module.named_parameters(remove_duplicate=False))


def _renamed(
    mine: Mapping[int, Module], held: Mapping[int, Sequence[str]]
) -> Iterator[tuple[str, Any]]:
    """The parameters of this rank by the names that the whole model has for them."""
    for s, module in mine.items():
        yield from zip(held[s], module.parameters(), strict=True)
