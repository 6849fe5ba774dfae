"""A plan that fuses ops, predicted: the lanes of the search, simulated for what the plan says.

What `foretell predict` prints for such a plan is what the planner that found it printed.
"""

from __future__ import annotations

import math
from dataclasses import replace

from foretell.cluster import Cluster
from foretell.errors import InputError
from foretell.graph import Graph
from foretell.plan import Plan
from foretell.plan.op_names import COPY
from foretell.predict.predict import FOUR_IN_FIVE, Prediction, utilisation
from foretell.search.fusion.from_graph import from_graph
from foretell.search.fusion.from_workload import Memory, from_workload
from foretell.search.fusion.lower import lower
from foretell.search.fusion.plans import buckets_from, fusion_of
from foretell.search.fusion.problem import Problem
from foretell.search.fusion.score import Evaluator, Scored
from foretell.search.fusion.steps import eager_plan, referred, run_of, scale_of, workload_of
from foretell.simulate import simulate
from foretell.workload import Workload

_ALONE = ("tp", "pp", "cp", "filter", "channel", "height", "width", "depth")


def fuses(plan: Plan) -> bool:
    """Whether a plan says what becomes of single ops or messages: more than layers and sizes."""
    made = bool(plan.model) and bool(plan.buckets) and not plan.sync and not plan.groups
    said = plan.regions or plan.late or plan.parts or plan.update == "by-message"
    return bool(said) or (made and _is_plain(plan))


def _is_plain(plan: Plan) -> bool:
    """Whether only data is split."""
    degrees = plan.degrees()
    return all(degrees.get(axis, 1) == 1 for axis in _ALONE) and not plan.stages


def predict_fused(plan: Plan, model: Workload | Graph, cluster: Cluster) -> Prediction:
    """The step of a plan with fused ops or messages of its own, as its planner reports it."""
    _require_plain(plan, cluster)
    problem = problem_of(plan, model, cluster)
    judge, scored = judged(plan, problem)
    return _predicted(plan, _sized(plan, model), cluster, judge, scored)


def judged(plan: Plan, problem: Problem) -> tuple[Evaluator, Scored]:
    """The way to fuse that a plan says, simulated."""
    judge = Evaluator(problem, plan.update == "by-message", plan.zero == 2)
    buckets = buckets_from(plan, problem) if plan.buckets else None
    return judge, judge.score(fusion_of(plan, problem), buckets)


def _require_plain(plan: Plan, cluster: Cluster) -> None:
    beside = [f"{axis}={n}" for axis, n in plan.degrees().items() if n > 1 and axis != "dp"]
    beside += [f for f in ("sync", "stages", "groups", "shares", "whatifs") if getattr(plan, f)]
    beside += [f"zero={plan.zero}"] if plan.zero not in (0, 2) else []
    beside += [f"recompute={plan.recompute}"] if plan.recompute not in ("none", "full") else []
    if beside:
        raise InputError(
            f"fused ops or messages of a plan beside {', '.join(beside)}",
            hint="they are priced for a plain data-parallel step",
        )
    if plan.dp != cluster.size:
        raise InputError(
            f"dp={plan.dp} makes {plan.dp} ranks; `{cluster.name}` has {cluster.size}",
            hint="a plan of fused ops is made for all ranks of its cluster",
        )


def _sized(plan: Plan, model: Workload | Graph) -> Workload | Graph:
    """The workload with the samples a rank has in the plan."""
    if isinstance(model, Graph) or not plan.global_batch:
        return model
    return replace(model, batch=plan.global_batch // plan.dp)


def problem_of(plan: Plan, model: Workload | Graph, cluster: Cluster) -> Problem:
    """The step of a plan, with matmuls open to a compiler where it fuses any."""
    model = _sized(plan, model)

    def made(epilogue: bool) -> Problem:
        if isinstance(model, Graph):
            return from_graph(model, cluster, epilogue=epilogue, learned=True, zero=plan.zero)
        return from_workload(
            model, cluster, epilogue=epilogue, learned=True, memory=_memory(plan, model),
            run=run_of(model, plan),
        )  # fmt: skip

    problem = made(False)
    kinds = dict(zip((op.name for op in problem.ops), problem.kinds, strict=True))
    inside = (name.removesuffix(COPY) for region in plan.regions for name in region)
    if any(kinds.get(name) == "template" for name in inside):
        problem = made(True)
    return referred(problem, model, cluster, plan)


def _memory(plan: Plan, model: Workload) -> Memory:
    """What the plan does to fit into memory."""
    repeats = model.batch // plan.micro_batch if plan.micro_batch else 1
    if plan.micro_batch and model.batch % plan.micro_batch:
        raise InputError(
            f"{model.batch} samples of a rank in micro-batches of {plan.micro_batch}",
            hint="give a micro-batch that divides them",
        )
    return Memory(repeats, plan.recompute == "full", plan.zero)


def _predicted(
    plan: Plan, model: Workload | Graph, cluster: Cluster, judge: Evaluator, scored: Scored
) -> Prediction:
    problem = judge.problem
    stretch = scale_of(problem)
    seconds = float(simulate(lower(judge, scored, stretch)).seconds)
    workload = workload_of(model)
    plan = _explicit(plan, workload)
    held, room = scored.fusion.held, problem.room
    assert problem.reference is not None
    factor = math.exp(FOUR_IN_FIVE * problem.reference.sigma)
    compute = stretch * problem.repeats * float(scored.cost[scored.fusion.order].sum())
    update, idle = stretch * judge.update, stretch * scored.launches
    return Prediction(
        plan=plan,
        step=seconds,
        low=seconds / factor,
        high=seconds * factor,
        peak=held,
        missing=max(held - room, 0.0),
        breakdown={
            "compute_s": compute,
            "exchange_s": 0.0,
            "reduce_s": max(seconds - compute - update - idle, 0.0),
            "update_s": max(min(update, seconds - compute - idle), 0.0),
            "idle_s": idle,
        },
        memory={"state": problem.held, "activations": held - problem.held},
        advice="accumulate more micro-batches, recompute, or zero=2" if held > room else "",
        utilisation=utilisation(plan, workload, cluster, seconds),
    )


def _explicit(plan: Plan, workload: Workload) -> Plan:
    """The plan with the batch, framework and precision that it runs in."""
    named = eager_plan(workload, plan)
    return plan.but(
        global_batch=plan.global_batch or workload.batch * plan.dp,
        framework=named.framework, precision=named.precision, dtype=named.dtype,
        optimizer=named.optimizer,
    )  # fmt: skip
