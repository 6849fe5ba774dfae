"""What all searches share: the planners by name, the price of any plan, several seeds and workers.

A planner is a frozen dataclass that looks for the plan with the shortest step. Its fields are its
options, its docstring is its help, `str()` is its spec. It is deterministic: a planner that draws
has a seed, and only an explicit time limit lets the clock decide.

Nodes of a mixed cluster are sorted by their own numbers before the search (`in_order`), so that a
plan does not depend on the order in a file; its ranks are renamed afterwards (`renamed`). With
several workers a seeded planner runs once per seed and the best plan is kept; the oracle shares
its sweep. Either way the answer is that of one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any, ClassVar

import numpy as np

from foretell import portable
from foretell.cluster import Cluster
from foretell.errors import InputError
from foretell.graph import Graph
from foretell.graph.graph import Array, group_text, ranks_of
from foretell.graph.show import span
from foretell.plan import Plan, lower
from foretell.plan.program import lowered
from foretell.pool import Alone, Pool
from foretell.predict import Prediction, predict_many, predicted
from foretell.search.fusion.fused_step import FusedStep, fuses, problem_of, require_plain
from foretell.spec import Spec, split
from foretell.spec import parse as parse_spec
from foretell.workload import Workload

ROUNDS = 200  # of moving a bound's weights
Progress = Callable[[str, float], None]  # what is being done, and the best step so far
# name -> (module in this room, class in it). A new planner is one class and one line here.
PLANNERS: dict[str, tuple[str, str]] = {
    "joint": ("joint", "Joint"),
    "oracle": ("oracle.planner", "Oracle"),
    "paradl": ("oracle.planner", "ParaDL"),
    "placement": ("placement.planner", "PlacementPlanner"),
    "tag": ("placement.planner", "Tag"),
    "fusion": ("fusion.planner", "FusionPlanner"),
    "disco": ("fusion.planner", "Disco"),
    "schedule": ("schedule.find", "PipelinePlanner"),
    "tessel": ("schedule.find", "Tessel"),
}
Model = Workload | Graph


@dataclass(frozen=True)
class Planned:
    """A plan that was found, and the baselines it was compared with."""

    plan: Plan
    predicted: float  # seconds of its step
    baseline: float  # of what people do without a planner
    baselines: Mapping[str, float]  # all that was compared, by name
    bound: float | None  # seconds no plan of the space can be below, where that is known
    evaluations: int  # plans that were priced or simulated
    cpu: float  # seconds the search took
    notes: tuple[str, ...] = field(default=())
    low: float = 0.0  # the 80 % interval of the predicted step
    high: float = 0.0
    prediction: Prediction | None = None  # of the plan: its memory and breakdown
    alternatives: tuple[Prediction, ...] = ()  # other plans that fit, fastest first
    stopped: bool = False  # Ctrl-C ended the search: the best plan so far
    own: Planned | None = None  # what our search of the same space finds with the same budget


def silent(words: str, best: float) -> None:
    """No-op progress callback."""


@dataclass(frozen=True)
class Planner(Spec):
    """A way to look for a plan."""

    source: ClassVar[str] = ""  # where the method comes from

    def plan(self, workload: Workload, cluster: Cluster, progress: Progress = silent) -> Planned:
        """The best plan found."""
        raise NotImplementedError

    def own(self) -> Planner | None:
        """Our search of a published method's space with the method's budget; None where it is."""
        return None


def planners() -> dict[str, type[Planner]]:
    """Every planner's class by its name."""
    return {name: _load(name) for name in PLANNERS}


def parse(text: str) -> Planner:
    """The planner a spec stands for, such as `oracle:simulate=16`."""
    name, _ = split(text)
    kinds = {known: _load(known) if known == name else Planner for known in PLANNERS}
    found = parse_spec(text, kinds, "planner")
    assert isinstance(found, Planner)
    return found


def _load(name: str) -> type[Planner]:
    module, kind = PLANNERS[name]
    found: type[Planner] = getattr(import_module(f"foretell.search.{module}"), kind)
    return found


def in_order(cluster: Cluster) -> tuple[int, ...]:
    """Ranks of a cluster, node by node: the fastest devices first, larger nodes before smaller."""
    if len(cluster.devices_by_kind()) == 1:
        return tuple(range(cluster.size))
    nodes: dict[int, list[int]] = {}
    for rank, node in enumerate(cluster.nodes.tolist()):
        nodes.setdefault(node, []).append(rank)
    order = sorted(nodes, key=lambda node: _key(cluster, nodes[node]))
    return tuple(rank for node in order for rank in nodes[node])


def _key(cluster: Cluster, ranks: list[int]) -> tuple[Any, ...]:
    """What sorts a node: its devices and its network, never its place."""
    devices = [cluster.devices[rank] for rank in ranks]
    peaks = tuple(sorted((-d.peak("bf16"), -d.memory, d.name) for d in devices))
    nics = tuple(sorted(-nic.bandwidth for nic in cluster.node(ranks[0]).nics))
    return peaks, -len(ranks), nics


def renamed(plan: Plan, ranks: tuple[int, ...], cluster: Cluster) -> Plan:
    """A plan for `cluster.subset(ranks)` as one for the cluster itself: rank i becomes ranks[i]."""
    if ranks == tuple(range(cluster.size)):
        return plan
    made = plan.cluster and cluster.fingerprint()
    if plan.segments:
        rows = tuple((row[0], _rename_group(row[1], ranks), *row[2:]) for row in plan.segments)
        return plan.but(segments=rows, cluster=made)
    if plan.groups:
        rows = tuple(
            (*row[:3], *(_rename_share(item, ranks) for item in row[3:])) for row in plan.groups
        )
        return plan.but(groups=rows, cluster=made)
    if plan.stages:
        rows = tuple((_rename_group(row[0], ranks), *row[1:]) for row in plan.stages)
        acts = {ranks[rank]: row for rank, row in enumerate(plan.actions)}
        orders = tuple(acts.get(rank, ()) for rank in range(max(acts) + 1))
        return plan.but(stages=rows, actions=orders, cluster=made)
    inner = plan.placement or tuple(range(plan.ranks))
    placement = tuple(ranks[rank] for rank in inner)
    return plan.but(placement=placement, cluster=made)


def _rename_group(text: str, ranks: tuple[int, ...]) -> str:
    return group_text(ranks[rank] for rank in ranks_of(text))


def _rename_share(item: str, ranks: tuple[int, ...]) -> str:
    rank, _, samples = item.partition(":")
    return f"{ranks[int(rank)]}:{samples}"


def searcher(
    planner: Planner, model: Model, pool: Pool | None = None, seeds: int = 1
) -> Callable[..., Planned]:
    """What looks for a planner's best plan on a cluster, from so many seeds."""
    pool = pool or Alone()
    search = _search_of(planner, model)
    if not hasattr(planner, "seed"):
        if seeds > 1:
            raise InputError(f"`{planner.name}` draws nothing: {seeds} seeds find the same")
        if pool.size == 1:
            return search
        if "pool" not in signature(search).parameters:
            raise InputError(
                f"`{planner.name}` searches in one process", hint="leave --jobs and --on-ray out"
            )
        return partial(search, pool=pool)
    if seeds == 1 and pool.size == 1:
        return search
    return partial(_from_seeds, planner, pool, seeds)


def _search_of(planner: Any, model: Model) -> Callable[..., Planned]:
    """How the planner takes this model: a captured step itself, or what a workload says of one."""
    found: Callable[..., Planned] = planner.plan_graph if isinstance(model, Graph) else planner.plan
    return found


def _from_seeds(
    planner: Any, pool: Pool, seeds: int, model: Model, cluster: Cluster, progress: Progress
) -> Planned:
    """The shortest step, of the first seed that has it; what all of them cost."""
    variants = [replace(planner, seed=planner.seed + k) for k in range(seeds)]
    work = partial(_searched, model=model, cluster=cluster)
    found = pool.map(
        work, variants, lambda done, all_: progress(f"{done} of {all_} searches", float("nan"))
    )
    at = min(range(len(found)), key=lambda k: found[k].predicted)
    steps = [one.predicted for one in found]
    note = f"best of {len(found)} seeds, {span(min(steps))} to {span(max(steps))}"
    best: Planned = found[at]
    return replace(
        best,
        evaluations=sum(one.evaluations for one in found),
        cpu=sum(one.cpu for one in found),
        notes=(*best.notes, *([note] if len(found) > 1 else [])),
    )


def _searched(planner: Planner, model: Model, cluster: Cluster) -> Planned:
    return _search_of(planner, model)(model, cluster, silent)


def priced(plan: Plan, model: Workload | Graph, cluster: Cluster) -> Prediction:
    """The predicted step of a plan: of fused ops where it names them, of layers otherwise."""
    if fuses(plan):
        require_plain(plan, cluster)
        problem = problem_of(plan, model, cluster)
        return predicted(FusedStep.of(plan, problem, model, cluster))
    return predict_many([plan], _with_layers(model), cluster)[0]


def graph_of(plan: Plan, model: Workload | Graph, cluster: Cluster) -> Graph:
    """The step of a plan as a graph."""
    if fuses(plan):
        require_plain(plan, cluster)
        step = FusedStep.of(plan, problem_of(plan, model, cluster), model, cluster)
        return lowered(step, step.program("stage"))
    return lower(plan, _with_layers(model), cluster)


def _with_layers(model: Workload | Graph) -> Workload:
    if isinstance(model, Graph):
        raise InputError(
            "a captured step has no layers to split", hint="capture it with `foretell capture`"
        )
    return model


def priced_many(
    plans: Sequence[Plan], model: Workload | Graph, cluster: Cluster
) -> list[Prediction]:
    """The same of several plans; those that name no single ops are priced together."""
    rest = [plan for plan in plans if not fuses(plan)]
    if len(rest) < 2 or isinstance(model, Graph):
        return [priced(plan, model, cluster) for plan in plans]
    found = iter(predict_many(rest, model, cluster))
    return [priced(plan, model, cluster) if fuses(plan) else next(found) for plan in plans]


def shared_work(work: Array, many: Array) -> float:
    """Seconds of a sample that passes all layers, each on any device, at the least.

    With w[ℓ, k] the seconds of layer ℓ on a device of kind k and N[k] devices, weights y ≥ 0 with
    Σ y·N = 1 give (a linear program's dual)

        seconds ≥ Σ over ℓ of min over k of y[k]·w[ℓ, k]

    Weights begin at the speed of each kind and move to the kinds that layers prefer, while it pays.
    """
    speed = 1 / work.sum(axis=0)
    share = many * speed / (many * speed).sum()
    best = 0.0
    for turn in range(ROUNDS if len(many) > 1 else 1):
        cost = work * (share / many)
        least = cost.argmin(axis=1)
        took = cost.min(axis=1)
        best = max(best, float(took.sum()))
        busy = np.bincount(least, weights=took, minlength=len(many)) / took.sum()
        share = share * portable.exp((busy - share) / math.sqrt(turn + 1))
        share /= share.sum()
    return best * (1 - 1e-12)  # rounding


def repredicted(found: Planned, again: Prediction) -> Planned:
    """What a planner found, with the step that `predict` gives its plan: one plan, one number."""
    bound = None if found.bound is None else min(found.bound, again.step)
    return replace(
        found, predicted=again.step, low=again.low, high=again.high, bound=bound, prediction=again
    )
