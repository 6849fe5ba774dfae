"""A plan made ready to be drawn: who stands where, in which order stages run, what goes together.

Ranks are numbered as `foretell.plan` lays them out: tensor slices next to each other, then context,
data-parallel copies, and stages outermost.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from foretell.cluster import Cluster
from foretell.errors import InputError
from foretell.plan import Plan

MOST = 2048  # ranks drawn: more are no picture
NODE = 8  # devices a node has where no cluster is named
_ACTION = re.compile(r"([FBIW])(\d+)")
_LASTS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}  # units, for a drawing of the order alone


def drawn(
    plan: Plan, name: str, cluster: Cluster | None = None, answer: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What a drawing of a plan needs; `answer` is what `foretell plan --json` said of it."""
    if cluster is not None and plan.ranks > cluster.size:
        raise InputError(
            f"`{name}` needs {plan.ranks} ranks and `{cluster.name}` has {cluster.size}",
            hint="name the cluster the plan was made for",
        )
    return {
        "name": name,
        "text": str(plan),
        "ranks": _ranks(plan, cluster),
        "per_node": _per_node(cluster),
        "nodes": _nodes(plan, cluster),
        "schedule": _order(plan),
        "buckets": [list(names) for names in plan.buckets],
        "regions": [list(names) for names in plan.regions],
        "groups": [[str(part) for part in group] for group in plan.groups],
        "sync": [list(pair[:2]) for pair in plan.sync if len(pair) >= 2],
        "baselines": _baselines(answer or {}),
    }


def _ranks(plan: Plan, cluster: Cluster | None) -> list[dict[str, Any]]:
    """One entry a device that is used, in the order of the machines."""
    logical = {place: k for k, place in enumerate(plan.placement or range(plan.ranks))}
    inner = plan.ranks // (plan.dp * plan.pp)  # ranks that share one sample
    found = []
    for place in sorted(logical)[:MOST]:
        rank = logical[place]
        stage, copy, slice_ = rank // (plan.dp * inner), rank // inner % plan.dp, rank % inner
        device = cluster.devices[place].name if cluster else "its device"
        parts = [("stage", stage, plan.pp), ("copy", copy, plan.dp), ("slice", slice_, inner)]
        where = [f"{word} {k} of {n}" for word, k, n in parts if n > 1]
        brief = [f"{word[0]}{k}" for word, k, n in parts if n > 1]
        found.append(
            {"rank": rank, "stage": stage, "copy": copy, "device": device,
             "where": ", ".join(where) or "the whole model", "short": " ".join(brief)}
        )  # fmt: skip
    return found


def _per_node(cluster: Cluster | None) -> int:
    return len(cluster.node(0).devices) if cluster else NODE


def _nodes(plan: Plan, cluster: Cluster | None) -> list[str]:
    per = _per_node(cluster)
    count = -(-min(plan.ranks, MOST) // per)
    if cluster is None:
        return [f"node {k}" for k in range(count)]
    return [f"node {k}: {cluster.node(min(k * per, cluster.size - 1)).name}" for k in range(count)]


def _order(plan: Plan) -> dict[str, Any] | None:
    """The order of a plan's actions as a drawing, blocks as early as their stage and data allow."""
    if not plan.actions:
        return None
    ends: dict[tuple[str, int, int], float] = {}
    free = [0.0] * len(plan.actions)
    queues = [[m.groups() for a in row if (m := _ACTION.fullmatch(a))] for row in plan.actions]
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


def _baselines(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The plan and what it was held against, by seconds."""
    given = answer.get("baselines", {})
    found = [("this plan", answer.get("predicted_s")), ("as it was", answer.get("baseline_s"))]
    if isinstance(given, Mapping):
        found += list(given.items())
    elif isinstance(given, list):
        found += [(g.get("name", g.get("plan", "?")), g.get("step_s", g.get("predicted_s")))
                  for g in given if isinstance(g, Mapping)]  # fmt: skip
    found.append(("no plan can be below", answer.get("bound_s")))
    return [
        {"name": str(name), "seconds": float(value)}
        for name, value in found
        if isinstance(value, (int, float)) and value > 0
    ]
