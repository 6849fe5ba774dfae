"""The page of a plan: its predicted step, memory and MFU, and its step as a timeline.

The numbers are those of `foretell predict`. Plans with fused ops or gradient buckets are lowered by
the fusion planner that made them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.cluster import Cluster
from foretell.errors import InputError
from foretell.graph.graph import Graph
from foretell.plan import Plan, lower
from foretell.predict import Prediction
from foretell.report import words
from foretell.report.memory import curves
from foretell.search.kit import priced
from foretell.simulate import Timeline, simulate
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


@dataclass(frozen=True, eq=False)
class PlanPage:
    """A plan predicted, and its step on its machines."""

    prediction: Prediction
    timelines: Sequence[tuple[str, Timeline]]  # the last is the step under the plan
    cluster: Cluster
    batch: int  # samples of a step

    @property
    def figures(self) -> list[dict[str, Any]]:
        """The cards of the page: time, throughput, MFU and HFU, memory, cost."""
        found = self.prediction
        rate = {"what": "samples/s", "text": f"{self.batch / found.step:.3g}"}
        fits = "fits" if found.fits else f"out of memory by {words.size(found.missing)}"
        figures: list[dict[str, Any]] = [
            {"what": "predicted step", "seconds": found.step, "low": found.low, "high": found.high},
            rate | {"more": f"global batch {self.batch:,}"} if self.batch else {},
            {"what": "MFU", "text": words.percent(found.utilisation),
             "then": f"HFU {words.percent(found.hfu)}" if found.hfu else ""},
            {"what": "peak memory", "bytes": found.peak, "more": fits},
        ]  # fmt: skip
        if self.cluster.price:
            cost, each = f"{self.cluster.price:,.0f} $/h", found.step * self.cluster.price / 3600
            figures.append({"what": "cost", "text": cost, "more": f"{each:.3g} $ a step"})
        return [figure for figure in figures if figure]

    @property
    def memory(self) -> list[dict[str, Any]]:
        """Memory over the step; buffers of a stage begin with it, so no instant of the peak."""
        return [curve | {"explained": ""} for curve in curves(*self.timelines[-1])]


def page_of(plan: Plan, model: Model, cluster: Cluster, name: str = "") -> PlanPage:
    """Predict a plan, and simulate its step layer by layer."""
    if isinstance(model, Graph) and not (plan.buckets or plan.regions):
        raise InputError(
            f"the plan `{str(plan)[:60]}` divides a model, and a captured step is divided already",
            hint="name the workload: --of gpt:layers=24,…",
        )
    found = priced(plan, model, cluster)
    before = f"{name}: " if name else ""
    graphs = steps_of(found.plan, model, cluster)
    timelines = [(f"{before}{title}", simulate(graph)) for title, graph in graphs]
    batch = found.plan.global_batch or getattr(model, "batch", 0)
    return PlanPage(found, timelines, cluster, batch)


def steps_of(plan: Plan, model: Model, cluster: Cluster) -> list[tuple[str, Graph]]:
    """The step under a plan; of one that fuses ops with its baseline above it."""
    if plan.buckets or plan.regions:
        return _fused(plan, _problem(plan, model, cluster))
    assert not isinstance(model, Graph)
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
