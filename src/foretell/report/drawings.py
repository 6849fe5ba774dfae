"""Plans, schedules and machines made ready to be drawn: nodes, links, switches, ranks on them.

Ranks are numbered as `foretell.plan` lays them out: tensor slices next to each other, then context,
data-parallel copies, and stages outermost.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from msgspec.structs import asdict

from foretell.cluster import Cluster
from foretell.errors import InputError
from foretell.graph.graph import Kind, Phase, ranks_of
from foretell.plan import Plan
from foretell.plan.check import layer_groups
from foretell.report import words
from foretell.report.answers import PlanAnswer, ScheduleAnswer, of
from foretell.simulate.timeline import Timeline

MOST = 2048  # ranks drawn: more are no picture
NODE = 8  # devices a node has where no cluster is named


_ACTION = re.compile(r"([FBIW])(\d+)")
_LASTS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}  # units, for a drawing of the order alone
MOST_BLOCKS = 4000  # drawn of a pipeline
KEYS = ("blocks", "makespan", "period")


def machines(plan: Plan, cluster: Cluster | None = None) -> dict[str, Any]:
    """Nodes with the ranks of a plan on them, and the tiers of switches between those nodes."""
    ranks = _ranks(plan, cluster)
    places = np.array([r["place"] for r in ranks], np.int64)
    at = places // NODE if cluster is None else cluster.nodes[places]
    used = np.unique(at).tolist()
    nodes = [
        {**_node(node, cluster), "ranks": [r for r, n in zip(ranks, at, strict=True) if n == node]}
        for node in used
    ]
    return {"nodes": nodes, "tiers": _tiers(used, cluster)}


def _ranks(plan: Plan, cluster: Cluster | None) -> list[dict[str, Any]]:
    """One entry a device that is used, in the order of the machines."""
    shown = plan.placement or range(min(plan.ranks, MOST))
    logical = {place: k for k, place in enumerate(shown)}
    is_free = bool(plan.groups or plan.stages)
    return [
        {
            "rank": logical[place],
            "place": place,
            "device": cluster.devices[place].name if cluster else "",
            **(_placed_rank(place, cluster) if is_free else _mesh_rank(plan, logical[place])),
        }
        for place in sorted(logical)[:MOST]
    ]


def _placed_rank(place: int, cluster: Cluster | None) -> dict[str, Any]:
    """A rank whose layers a grid names; devices of one kind have one hue."""
    kinds = list(cluster.devices_by_kind()) if cluster else []
    hue = kinds.index(cluster.devices[place].name) if cluster else 0
    return {"stage": hue, "copy": 0, "short": "", "where": "what it runs is given below"}


def _mesh_rank(plan: Plan, rank: int) -> dict[str, Any]:
    """Which pipeline, data, context and tensor parallel rank of a regular layout a rank is."""
    inner = plan.ranks // (plan.dp * plan.pp)  # ranks that share one sample
    stage, copy, slice_ = rank // (plan.dp * inner), rank // inner % plan.dp, rank % inner
    cp = plan.cp if inner == plan.cp * plan.tp else 1
    tp = inner // cp
    parts = [("pp", stage, plan.pp), ("dp", copy, plan.dp), ("cp", slice_ // tp, cp),
             ("tp", slice_ % tp, tp)]  # fmt: skip
    where = [f"{word} rank {k} of {n}" for word, k, n in parts if n > 1]
    brief = [f"{word}{k}" for word, k, n in parts if n > 1]
    if copy < len(plan.shares):
        where.append(f"{plan.shares[copy]} samples")
        brief.append(f"×{plan.shares[copy]}")
    named = {"where": ", ".join(where) or "the whole model", "short": " ".join(brief)}
    return {"stage": stage, "copy": copy, **named}


def _node(node: int, cluster: Cluster | None) -> dict[str, str]:
    """A node's name, what joins the devices inside it, and its way out."""
    if cluster is None:
        return {"name": f"node {node}", "inside": "", "out": ""}
    kind, _ = cluster.groups[int(cluster.kinds[node])]
    slots = tuple(cluster.slots[cluster.nodes == node].tolist())
    inside = kind.spread(slots) if len(slots) > 1 else None
    found = {"name": f"node {node}: {kind.name}", "inside": "", "out": ""}
    if inside is not None:
        found["inside"] = f"{inside.kind} {words.rate(inside.bandwidth)}"
    if kind.nics and cluster.num_nodes > 1:
        found["out"] = f"{kind.nics[0].kind} {words.rate(kind.exit(slots).bandwidth)}"
    return found


def _tiers(used: list[int], cluster: Cluster | None) -> list[dict[str, Any]]:
    """Switches between nodes, innermost first: which of the nodes shown each of them joins."""
    if cluster is None or len(used) < 2:
        return []
    tiers = []
    for tier in cluster.fabric.groupings:
        of = tier.group[used]
        groups = [np.flatnonzero(of == g).tolist() for g in np.unique(of)]
        up = [words.rate(float(tier.out[g])) for g in np.unique(of)]
        tiers.append({"name": tier.name, "groups": groups, "up": up})
    return tiers


def drawn_plan(
    plan: Plan,
    name: str,
    cluster: Cluster | None = None,
    answer: Mapping[str, Any] | None = None,
    sizes: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """A plan as values to draw: machines, grid, schedule, buckets, fused regions.

    `answer` is its `foretell plan --json`; `sizes` are bytes of gradients by name.
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
        "baselines": [] if answer is None else _baselines(of(answer, PlanAnswer, name)),
    }


def _grid(plan: Plan) -> list[dict[str, Any]]:
    """Layers placed one by one: the ranks of each run of layers, and their samples."""
    found = []
    for run in layer_groups(plan) if plan.groups else ():
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
            if queue and (ready := _ready_time(queue[0], stage, len(queues), ends)) is not None:
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


def _ready_time(
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


def _baselines(answer: PlanAnswer) -> list[dict[str, Any]]:
    """The plan, then its baselines, the quickest first, then the bound."""
    rivals = dict(answer.baselines or {})
    if answer.baseline_s not in rivals.values():
        rivals["baseline"] = answer.baseline_s
    quickest = sorted(rivals.items(), key=lambda row: row[1] or 0.0)
    found = [("this plan", answer.predicted_s), *quickest, ("lower bound", answer.bound_s)]
    return [{"name": name, "seconds": value} for name, value in found if value and value > 0]


def is_schedule(value: Any) -> bool:
    """Whether a value looks like the answer of `foretell schedule`."""
    return isinstance(value, Mapping) and all(key in value for key in KEYS)


def drawn_schedule(answer: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A schedule as values to draw: blocks with start and end, devices, the repeating part."""
    found = of(answer, ScheduleAnswer, name)
    blocks = [asdict(b) for b in found.blocks]
    if any(b["end"] is None for b in blocks):
        _fill_ends(blocks, found.makespan)
    return {
        "name": found.name or name,
        "devices": 1 + max((d for b in found.blocks for d in b.devices), default=0),
        "micro_batches": found.micro_batches,
        "period": found.period,
        "makespan": found.makespan,
        "repetend": _repetend(blocks, found.period, found.unroll),
        "peak_memory": found.peak_memory,
        "says": _summary(found),
        "blocks": blocks,
    }


def pipeline(line: Timeline) -> dict[str, Any]:
    """The pipeline of a simulated step: what each rank computes, micro-batch by micro-batch."""
    graph = line.graph
    ranks = np.unique(graph.rank).tolist()
    kinds = {int(Phase.FORWARD): "F", int(Phase.LOSS): "F", int(Phase.BACKWARD): "B"}
    blocks: list[dict[str, Any]] = []
    for device, rank in enumerate(ranks):
        mine = np.flatnonzero((graph.rank == rank) & (graph.kind == Kind.KERNEL))
        for i in mine[np.argsort(line.start[mine], kind="stable")].tolist():
            kind, batch = kinds.get(int(graph.phase[i]), ""), int(graph.micro_batch[i])
            if not kind:
                continue
            last = blocks[-1] if blocks else None
            same = last and (last["kind"], last["micro_batch"]) == (kind, batch)
            if last and same and last["devices"] == [device]:
                last["end"] = float(line.end[i])
                continue
            blocks.append(
                {"block": device, "micro_batch": batch, "kind": kind, "devices": [device],
                 "start": float(line.start[i]), "end": float(line.end[i])}
            )  # fmt: skip
    return {
        "name": "pipeline", "devices": len(ranks), "blocks": blocks[:MOST_BLOCKS], "repetend": None,
        "period": 0.0, "makespan": line.seconds, "unit": "s",
        "micro_batches": 1 + max((b["micro_batch"] for b in blocks), default=-1),
    }  # fmt: skip


def _fill_ends(blocks: list[dict[str, Any]], makespan: float) -> None:
    """Give blocks without an end one: a block lasts at most until its device starts the next.

    The shortest stay seen of a block is taken for all its micro-batches.
    """
    longest: dict[Any, float] = {}
    by_device: dict[int, list[dict[str, Any]]] = {}
    for block in sorted(blocks, key=lambda b: b["start"]):
        for device in set(block["devices"]):
            by_device.setdefault(device, []).append(block)
    for mine in by_device.values():
        ends = [*(b["start"] for b in mine[1:]), makespan]
        for block, end in zip(mine, ends, strict=True):
            stay = end - block["start"]
            longest[block["block"]] = min(longest.get(block["block"], stay), stay)
    for block in blocks:
        block["end"] = block["start"] + longest.get(block["block"], 0.0)


def _repetend(blocks: list[dict[str, Any]], period: float, unroll: int) -> list[float] | None:
    """When the steady part begins and ends: one period from which on every block returns."""
    starts = {(b["block"], b["micro_batch"]): b["start"] for b in blocks}
    firsts: dict[Any, float] = {}
    for (block, m), start in starts.items():
        later = starts.get((block, m + unroll))
        if later is not None and abs(later - start - period) <= 1e-9 * max(period, 1.0):
            firsts[block] = min(firsts.get(block, start), start)
    if not period or len(firsts) < len({b["block"] for b in blocks}):
        return None
    begin = max(firsts.values())
    return [begin, begin + period]


def _summary(found: ScheduleAnswer) -> str:
    proven = "proven minimal" if found.proven else "not proven minimal"
    per = found.period if found.per_micro_batch is None else found.per_micro_batch
    bubble = found.bubble
    idle = f", {100 * bubble:.1f} % of the makespan a bubble" if bubble is not None else ""
    return (
        f"{per:g} a micro-batch ({proven}), makespan {found.makespan:g}{idle}; "
        "the frame holds the part that repeats"
    )
