"""A plan made ready to be drawn: who stands where, in which order stages run, what is joined."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from foretell.cluster import Cluster
from foretell.errors import InputError
from foretell.graph.groups import ranks_of
from foretell.plan import Plan
from foretell.plan.grouped import runs
from foretell.report.answers import Planned, of
from foretell.report.machines import machines

_ACTION = re.compile(r"([FBIW])(\d+)")
_LASTS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}  # units, for a drawing of the order alone


def drawn(
    plan: Plan,
    name: str,
    cluster: Cluster | None = None,
    answer: Mapping[str, Any] | None = None,
    sizes: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """What a drawing of a plan needs.

    `answer` is what `foretell plan --json` said of it; `sizes` are bytes of gradients by name.
    """
    if cluster is not None and plan.ranks > cluster.size:
        raise InputError(
            f"`{name}` needs {plan.ranks} ranks and `{cluster.name}` has {cluster.size}",
            hint="name the cluster the plan was made for",
        )
    return {
        "name": name,
        "text": str(plan),
        "machines": machines(plan, cluster),
        "grid": _grid(plan),
        "schedule": _order(plan),
        "buckets": [_bucket(names, sizes or {}) for names in plan.buckets],
        "regions": [list(names) for names in plan.regions],
        "sync": [list(pair[:2]) for pair in plan.sync if len(pair) >= 2],
        "baselines": [] if answer is None else _baselines(of(answer, Planned, name)),
    }


def _grid(plan: Plan) -> list[dict[str, Any]]:
    """Of layers placed one by one: which ranks run each run of them, with how many samples."""
    found = []
    for run in runs(plan) if plan.groups else ():
        cells = {str(rank): samples for rank, samples in run.samples.items()}
        name = run.first if run.first == run.last else f"{run.first} … {run.last}"
        found.append({"name": name, "way": run.way, "cells": cells})
    for k, (where, *layers) in enumerate(plan.stages):
        cells = {str(rank): 0 for rank in ranks_of(where)}
        found.append({"name": f"stage {k}: {', '.join(layers)}", "way": "", "cells": cells})
    return found


def _bucket(names: tuple[str, ...], sizes: Mapping[str, float]) -> dict[str, Any]:
    """A message: its parameters, and its bytes where all of them are known."""
    known = all(name in sizes for name in names)
    return {"names": list(names), "bytes": sum(sizes[n] for n in names) if known else 0.0}


def _order(plan: Plan) -> dict[str, Any] | None:
    """The order of a plan's actions as a drawing, blocks as early as their stage and data allow."""
    if not plan.actions:
        return None
    ends: dict[tuple[str, int, int], float] = {}
    free = [0.0] * len(plan.actions)
    queues = [[m.groups() for a in row if (m := _ACTION.fullmatch(a))] for row in plan.actions]
    if not any(queues):  # of stages placed freely: only a timeline can tell
        return None
    blocks: list[dict[str, Any]] = []
    moved = True
    while moved:
        moved = False
        for stage, queue in enumerate(queues):
            if queue and (ready := _ready(queue[0], stage, len(queues), ends)) is not None:
                kind, batch = queue.pop(0)
                start = max(ready, free[stage])
                free[stage] = ends[kind, stage, int(batch)] = start + _LASTS[kind]
                blocks.append(
                    {"block": stage, "micro_batch": int(batch), "kind": kind, "devices": [stage],
                     "start": start, "end": free[stage]}
                )  # fmt: skip
                moved = True
    return {
        "name": "actions", "devices": len(plan.actions), "blocks": blocks, "repetend": None,
        "period": 0.0, "makespan": max(free),
        "micro_batches": 1 + max((b["micro_batch"] for b in blocks), default=-1),
    }  # fmt: skip


def _ready(
    action: tuple[str | Any, ...],
    stage: int,
    stages: int,
    ends: Mapping[tuple[str, int, int], float],
) -> float | None:
    """When what an action needs is there; None while it is not."""
    kind, batch = str(action[0]), int(action[1])
    if kind == "F":
        return ends.get(("F", stage - 1, batch)) if stage else 0.0
    if kind == "W":
        return ends.get(("I", stage, batch), ends.get(("B", stage, batch)))
    if stage == stages - 1:
        return ends.get(("F", stage, batch))
    return ends.get(("B", stage + 1, batch), ends.get(("I", stage + 1, batch)))


def _baselines(answer: Planned) -> list[dict[str, Any]]:
    """The plan, then its baselines, the quickest first, then the bound."""
    rivals = dict(answer.baselines or {})
    if answer.baseline_s not in rivals.values():
        rivals["the usual way"] = answer.baseline_s
    quickest = sorted(rivals.items(), key=lambda row: row[1] or 0.0)
    found = [("this plan", answer.predicted_s), *quickest, ("no plan can be below", answer.bound_s)]
    return [{"name": name, "seconds": value} for name, value in found if value and value > 0]
