"""What a plan asks of a model, looked at and refused by name before anything is changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from foretell.errors import InputError, unknown
from foretell.plan import Plan, unsupported
from foretell.plan.check import torch_names
from foretell.plan.unsupported import ModelFacts, own_plans, require_runnable
from foretell.pytorch.deploy import channels, shard, spatial
from foretell.pytorch.deploy.experts import experts_of
from foretell.pytorch.deploy.graph_split import step_splits
from foretell.pytorch.deploy.precision import precision_of, refusal, require_fp8, require_layers
from foretell.pytorch.deploy.regions import require_parameters
from foretell.pytorch.deploy.tensor import SEQUENCE, blocks, lone, named, said
from foretell.pytorch.deploy.units import units
from foretell.pytorch.deploy.uses import Call, Uses, tied_names, tokens_of, uses_of
from foretell.workload.captured.weights import StepSplits


@dataclass(frozen=True)
class Splitting:
    """What is known of how a model splits."""

    layout: Mapping[str, str] | None = None  # as it was given, or as the model says
    by_graph: StepSplits | None = None  # from its captured step, where no layout is known
    tied: frozenset[str] = frozenset()  # parameters with several names, or used by several layers
    changed: frozenset[str] = frozenset()  # layers whose outputs are changed in place
    is_lone: bool = False  # linear layers are split one by one, where any are


def require_deployable(
    model: Any, plan: Plan, device: str, layout: Mapping[str, str] | None, call: Call | None
) -> Splitting:
    """Raise where a plan cannot run a model on a device; how the model splits."""
    every = [one.plan for one in own_plans(plan)] if plan.segments else [plan]
    widest = max(every, key=lambda one: (one.tp, one.sp))  # splits layers over most ranks
    by_graph = None if layout else _by_graph(model, widest, call)
    layout = layout or said(model)
    uses = Uses() if by_graph else _uses(model, widest, layout, call)
    known = facts(model, layout, widest.tp, by_graph, uses.outside)
    no_format = refusal(model, precision_of(plan), device)
    require_runnable(plan, replace(known, why_no_format=no_format))
    require_parameters(plan, model)
    _require_gradients(plan, model)
    _require_sends(plan, device)
    _require_tokens(model, widest, layout, call)
    if precision_of(plan) == "fp8":
        require_layers(model)
        if device == "cuda":
            require_fp8("fp8", device)
    tied = frozenset(tied_names(model) | uses.outside)
    is_lone = not named(model, layout, tied)
    return Splitting(layout, by_graph, tied, frozenset(uses.changed), is_lone)


def facts(
    model: Any,
    layout: Mapping[str, str] | None = None,
    tp: int = 1,
    by_graph: StepSplits | None = None,
    outside: Collection[str] = (),  # parameters that are used outside their layer's call
) -> ModelFacts:
    """What of a model decides which plans can run it."""
    ways = named(model, layout or said(model), outside)
    attentions = by_graph.attentions if by_graph else 0
    layers = sum(way != SEQUENCE for way in ways.values()) or len(lone(model, tp, outside))
    return ModelFacts(
        type(model).__name__,
        tensor_layers=layers + (len(by_graph.parameters) if by_graph else 0),
        token_blocks=len(blocks(model, ways)) or attentions,
        why_no_images=spatial.refusal(model),
        expert_layers=len(experts_of(model)),
        is_by_graph=by_graph is not None,
    )


def _uses(model: Any, plan: Plan, layout: Mapping[str, str] | None, call: Call | None) -> Uses:
    """What a forward does with the layers that ranks would split."""
    layers: list[str] = []
    if plan.tp > 1:
        layers += [n for n, way in named(model, layout).items() if way != SEQUENCE]
        layers += lone(model, plan.tp)
    if plan.filter > 1 or plan.channel > 1:
        layers += [n for n, m in model.named_modules() if isinstance(m, channels.LAYERS)]
    return uses_of(model, dict.fromkeys(layers), call)


def _by_graph(model: Any, plan: Plan, call: Call | None) -> StepSplits | None:
    """How a captured step of a model splits, where the plan asks for more than is known of it."""
    asks_tokens = plan.cp > 1 or (plan.sp and plan.tp > 1)
    if call is None or plan.tp * plan.cp == 1 or plan.pp > 1 or plan.stages or plan.groups:
        return None
    ways = named(model, said(model))
    layers = any(w != SEQUENCE for w in ways.values()) or bool(lone(model, plan.tp))
    known = bool(blocks(model, ways)) if asks_tokens else layers
    if known and not (experts_of(model) and not asks_tokens):
        return None
    try:
        found = step_splits(model, *call)
    except Exception:  # what cannot be captured is split as far as its structure shows
        return None
    splits = any(one.kind != "words" for one in found.parameters.values())
    return found if found.attentions and (asks_tokens or splits) else None


def _require_tokens(
    model: Any, plan: Plan, layout: Mapping[str, str] | None, call: Call | None
) -> None:
    """Raise where ranks cannot share the tokens of a block evenly."""
    over = {"cp": plan.cp, "sp": plan.tp if plan.sp else 1}
    if max(over.values()) == 1:
        return
    found = tokens_of(model, blocks(model, named(model, layout)) or units(model), call)
    for word, size in over.items():
        odd = next((name for name, tokens in found.items() if tokens % size), None)
        if odd is not None:
            raise InputError(
                f"{word}: `{odd or type(model).__name__}` is given {found[odd]} tokens, which "
                f"{size} ranks cannot share evenly",
                hint="choose a number of ranks that divides them, or pad the batch",
            )


def _require_gradients(plan: Plan, model: Any) -> None:
    """Raise where ranks cannot put gradients together."""
    sparse = [n for n, m in model.named_modules() if getattr(m, "sparse", False) is True]
    if sparse and plan.ranks > 1:
        raise InputError(
            f"`{sparse[0]}` makes sparse gradients, which ranks do not add up",
            hint="leave out sparse=True, and take an optimizer for dense gradients",
        )
    if plan.zero >= 2 and plan.dp * plan.cp > 1:
        shard.require_one_format(model, plan.zero)


def _require_sends(plan: Plan, device: str) -> None:
    """Raise where gloo would carry what it does not from the memory of a GPU.

    Stages abort there (`writev: Bad address`); FSDP of small models ended in SIGSEGV inside gloo
    (torch 2.11, two ranks on one H200).
    """
    staged = plan.pp > 1 or plan.stages or plan.groups or plan.segments
    what = "stages" if staged else f"zero={plan.zero}" if plan.zero >= 2 and plan.dp > 1 else ""
    word = str(dist.get_backend_config()) if what and device == "cuda" else ""
    each = dict(part.split(":", 1) for part in word.split(",") if ":" in part)  # or as cpu:gloo,…
    if each.get("cuda", word) == "gloo":
        raise InputError(
            f"{what} on ranks that share a GPU: gloo does not send what is in its memory",
            hint="give each rank a GPU of its own (NCCL), or run with --device cpu",
        )


def require_fillable(plan: Plan) -> None:
    """Raise where a model without values cannot be filled part by part."""
    if not shard.fills_parts(plan):
        raise InputError(
            f"a model on the meta device runs with zero=2 or zero=3 and dp alone, not `{plan}`",
            hint="make the model with values on every rank",
        )


def check_names(plan: Plan, model: Any) -> Plan:
    """The plan with the model's names for parameters; raise where it has no such parameter."""
    known = dict(model.named_parameters())

    def own(name: str) -> str:
        found = next((word for word in torch_names(name) if word in known), None)
        if found is None:
            raise unknown("parameter in the plan", name, known)
        return found

    sync = tuple((own(row[0]), *row[1:]) for row in plan.sync)
    return plan.but(sync=sync, buckets=tuple(tuple(map(own, b)) for b in plan.buckets))


def require_batch(plan: Plan, samples: int) -> None:
    """Raise where a plan's schedule is for another number of samples."""
    wanted = plan.global_batch or samples
    if samples and samples != wanted:
        raise InputError(
            f"a batch of {samples} samples for a plan of {wanted} a step",
            hint=f"let the batch have {wanted}, or schedule with another micro_batch or -n",
        )


def require_apart(plan: Plan, modules: Mapping[int, Any]) -> None:
    """Raise where stages of one rank share a parameter that FSDP would shard twice."""
    if plan.zero < 2 or plan.dp * plan.cp == 1:
        return
    seen: dict[int, int] = {}
    for stage, module in modules.items():
        for name, parameter in module.named_parameters():
            if seen.setdefault(id(parameter), stage) != stage:
                raise InputError(
                    f"zero={plan.zero}: stages {seen[id(parameter)]} and {stage} of one rank share "
                    f"`{name}`, which FSDP can shard only once",
                    hint="take zero=1, or let stages with tied weights be on different ranks",
                )


def require_own_loop(plan: Plan) -> None:
    """Raise where a plan takes its steps itself."""
    if found := unsupported.in_own_loop(plan):
        raise InputError(
            f"a plan cannot be run in a loop of one's own with {found[0]}",
            hint="take its steps: foretell.deploy(model, optimizer, plan).step(inputs, target), "
            "or `foretell run`",
        )
