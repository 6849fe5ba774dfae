"""One price for any plan: the step that every command and planner reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from foretell.cluster import Cluster
from foretell.errors import InputError
from foretell.graph import Graph
from foretell.plan import Plan
from foretell.predict import Prediction, predict, predict_many
from foretell.search.fusion.fused_step import fuses, predict_fused
from foretell.search.planner import Planned
from foretell.workload import Workload


def priced(plan: Plan, model: Workload | Graph, cluster: Cluster) -> Prediction:
    """The predicted step of a plan: of fused ops where it names them, of layers otherwise."""
    if fuses(plan):
        return predict_fused(plan, model, cluster)
    if isinstance(model, Graph):
        raise InputError(
            "a captured step has no layers to split", hint="capture it with `foretell capture`"
        )
    return predict(plan, model, cluster)


def priced_many(
    plans: Sequence[Plan], model: Workload | Graph, cluster: Cluster
) -> list[Prediction]:
    """The same of several plans; those that name no single ops are priced together."""
    rest = [plan for plan in plans if not fuses(plan)]
    if len(rest) < 2 or isinstance(model, Graph):
        return [priced(plan, model, cluster) for plan in plans]
    found = iter(predict_many(rest, model, cluster))
    return [priced(plan, model, cluster) if fuses(plan) else next(found) for plan in plans]


def repredicted(found: Planned, model: Workload | Graph, cluster: Cluster) -> Planned:
    """What a planner found, with the step that `predict` gives its plan: one plan, one number."""
    again = priced(found.plan, model, cluster)
    bound = None if found.bound is None else min(found.bound, again.step)
    return replace(
        found, predicted=again.step, low=again.low, high=again.high, bound=bound, prediction=again
    )
