"""The step of a plan as a graph, so that a page shows what a plan does and not only what it says.

Plans that fuse ops or name messages are the planner's own: they are laid out as it lays them out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from foretell.cluster import Cluster
from foretell.errors import InputError
from foretell.graph.graph import Graph
from foretell.plan import Plan, lower
from foretell.workload import Workload
from foretell.workload import load as load_workload

if TYPE_CHECKING:
    from foretell.search.fusion.problem import Problem

Model = Workload | Graph


def model_of(text: str) -> Model:
    """The workload a plan was made for, or the captured step, as the user named it."""
    if text.endswith((".graph", ".txt")):
        from foretell.graph import load

        return load(Path(text))
    return load_workload(text, scripts=True)


def steps_of(plan: Plan, model: Model, cluster: Cluster) -> list[tuple[str, Graph]]:
    """The step under a plan; of one that fuses ops with its baseline above it."""
    if plan.buckets or plan.regions:
        return _fused(plan, _problem(plan, model, cluster))
    if isinstance(model, Graph):
        raise InputError(
            f"the plan `{str(plan)[:60]}` divides a model, and a captured step is divided already",
            hint="name the workload: --of gpt:layers=24,…",
        )
    return [("under the plan", lower(plan, model, cluster, detail="layer"))]


def gradient_bytes(plan: Plan, model: Model, cluster: Cluster) -> Mapping[str, float]:
    """The size of each gradient a plan's messages may name."""
    if not plan.buckets:
        return {}
    return {g.name: g.bytes for g in _problem(plan, model, cluster).gradients}


def _problem(plan: Plan, model: Model, cluster: Cluster) -> Problem:
    from foretell.search.fusion.fused_step import problem_of

    return problem_of(plan, model, cluster)


def _fused(plan: Plan, problem: Problem) -> list[tuple[str, Graph]]:
    """The step with nothing fused and DDP's buckets, and the step as the plan has it."""
    from foretell.search.fusion.fused_step import Evaluator, ddp, evaluated, scale_of
    from foretell.search.fusion.fused_step import lower as lower_fused

    scale, plain = scale_of(problem), Evaluator(problem)
    found = {
        "eager ops, DDP's buckets": (plain, ddp(plain)),
        "under the plan": evaluated(plan, problem),
    }
    return [
        (name, _priced_by(problem, lower_fused(judge, one, scale)))
        for name, (judge, one) in found.items()
    ]


def _priced_by(problem: Problem, graph: Graph) -> Graph:
    """The same step, with who priced its tasks: fused ones the network, where it knows devices."""
    from foretell.cost.fused import kind_of_device

    knows = problem.learned and kind_of_device(problem.device) == "gpu"
    with graph.edit() as edit:
        edit.set(edit.select(), source="formula")
        if knows:
            edit.set(edit.select(op="fused"), source="learned")
    return edit.graph
