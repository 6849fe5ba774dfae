"""Seconds of a fused step as every command reports them.

The lanes of the search know kernels and messages. What a framework's host, a board's power limit
and a precision add is in the price by layers (→ `foretell.predict`), and a fused step keeps the
share of it that the lanes say:

    step = predicted step of eager DDP · lanes of the fused step / lanes of eager DDP

So a plan that fuses nothing takes what `predict` says of plain data parallelism.
"""

from __future__ import annotations

import math
from dataclasses import replace

from foretell.cluster import Cluster
from foretell.graph import Graph
from foretell.plan import Plan
from foretell.plan.framework import Running, resolved, running
from foretell.plan.memory import room
from foretell.predict.predict import FOUR_IN_FIVE, predict
from foretell.search.fusion.baselines import ddp
from foretell.search.fusion.problem import Problem, Reference
from foretell.search.fusion.score import Evaluator
from foretell.search.fusion.state import unfused
from foretell.workload import Workload
from foretell.workload.captured import from_graph


def workload_of(model: Workload | Graph) -> Workload:
    """The layers of a model; those a captured step is cut into."""
    return from_graph(model) if isinstance(model, Graph) else model


def eager_plan(workload: Workload, plan: Plan | None = None) -> Plan:
    """Plain DDP in the precision a plan asks for: what a fused plan is made from."""
    plan = plan or Plan()
    asked = Plan(
        framework=plan.framework or "ddp", precision=plan.precision, dtype=plan.dtype,
        optimizer=plan.optimizer, optimizer_kernels=plan.optimizer_kernels,
        grad_dtype=plan.grad_dtype,
    )  # fmt: skip
    return resolved(asked, workload.most("tp") > 1, workload.dtype)


def run_of(workload: Workload, plan: Plan | None = None) -> Running:
    """The framework profile that a fused plan of a workload runs under."""
    return running(eager_plan(workload, plan))


def referred(
    problem: Problem, model: Workload | Graph, cluster: Cluster, plan: Plan | None = None
) -> Problem:
    """The problem with what `predict` says of its step while nothing is fused: time and memory."""
    workload = workload_of(model)
    base = eager_plan(workload, plan)
    samples = problem.samples or workload.batch
    asked = base.but(
        dp=problem.wire.ranks,
        zero=problem.zero,
        recompute="full" if problem.recompute else "none",
        micro_batch=samples,
        global_batch=samples * problem.repeats * problem.wire.ranks,
    )
    found = predict(asked.but(zero=0), workload, cluster)
    memory = predict(asked, workload, cluster).peak if problem.zero else found.peak
    run = running(base)
    sigma = math.log(found.high / found.step) / FOUR_IN_FIVE
    host = run.issued("elementwise", False) * cluster.calibration.host
    reference = Reference(found.step, host, run.profile.exponent, sigma)
    kept = unfused(problem).held - problem.held
    return replace(problem, reference=reference, held=memory - kept, room=room(cluster))


def scale_of(problem: Problem) -> float:
    """Reported seconds of a step over those of its lanes; 1 where nothing else is known."""
    if problem.reference is None:
        return 1.0
    return problem.reference.seconds / ddp(Evaluator(problem)).step
