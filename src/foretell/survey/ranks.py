"""Several ranks of one step: collectives by bandwidth, what each rank does, and stragglers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from foretell.cluster import Cluster
from foretell.errors import ForetellError
from foretell.graph.graph import Array, Graph, Kind, ranks_of
from foretell.report import words
from foretell.simulate import Timeline
from foretell.simulate.timeline import (
    COMMUNICATION,
    DEVICE,
    breakdown,
    covered,
    overlap,
    union,
)  # fmt: skip

MOST_RANKS = 256  # listed
NOTABLE = 0.03  # of the step: a wait or a difference in work worth a sentence


@dataclass(frozen=True, eq=False)
class Waits:
    """When ranks wait in collectives for the last one to arrive, and for which rank."""

    rank: Array  # the rank that waits, one entry a wait
    start: Array
    end: Array
    late: Array  # the rank it waits for

    def of(self, rank: int, late: int | None = None) -> tuple[Array, Array]:
        """The waits of one rank, or those for another one, as intervals that do not overlap."""
        mine = self.rank == rank
        if late is not None:
            mine = mine & (self.late == late)
        return union(self.start[mine], self.end[mine])


def waits_of(line: Timeline, length: float) -> Waits:
    """Every wait in a collective that ends inside the window of a step."""
    graph = line.graph
    task, lane = _occupied(graph)
    kind = np.isin(graph.kind[task], COMMUNICATION)
    inside = kind & (line.start[task] > 0) & (line.start[task] <= length)
    arrived = np.maximum(_lane_free(line, task, lane), _data_ready(line, task, lane))
    order = np.lexsort((arrived, task))
    order = order[inside[order]]
    task, lane, arrived = task[order], lane[order], arrived[order]
    last = np.append(task[1:] != task[:-1], True)[: len(task)]  # per task the latest arrival
    late = graph.lanes.rank[lane[last]][np.cumsum(last) - last]
    waits = ~last & (line.start[task] > arrived)
    begin = arrived.clip(0, length)
    return Waits(graph.lanes.rank[lane][waits], begin[waits], line.start[task][waits], late[waits])


def _occupied(graph: Graph) -> tuple[Array, Array]:
    """(task, lane) of every lane a task occupies."""
    own = np.flatnonzero(graph.lane >= 0)
    task = np.concatenate([own, graph.held.task])
    return task, np.concatenate([graph.lane[own], graph.held.lane])


def _lane_free(line: Timeline, task: Array, lane: Array) -> Array:
    """When the task before each on its lane ended."""
    order = np.lexsort((line.start[task], lane))
    ended = line.end[task[order]]
    before = np.append(-np.inf, ended[:-1])
    before[np.append(True, lane[order][1:] != lane[order][:-1])] = -np.inf
    found = np.empty(len(task))
    found[order] = before
    return found


def _data_ready(line: Timeline, task: Array, lane: Array) -> Array:
    """When what each task waits for on the rank of its lane had ended."""
    graph = line.graph
    ranks = int(graph.rank.max(initial=0)) + 1
    waiting, before = graph.edges.waiting.astype(np.int64), graph.edges.after
    keys, whose = np.unique(waiting * ranks + graph.rank[before], return_inverse=True)
    ends = np.full(len(keys), -np.inf)
    np.maximum.at(ends, whose.reshape(-1), line.end[before])
    wanted = task.astype(np.int64) * ranks + graph.lanes.rank[lane]
    if not len(keys):
        return np.full(len(task), -np.inf)
    place = np.searchsorted(keys, wanted).clip(0, len(keys) - 1)
    return np.where(keys[place] == wanted, ends[place], -np.inf)


def ranks_table(line: Timeline, waits: Waits, facts: Any) -> list[dict[str, Any]]:
    """Time of each rank by use, and how long other ranks wait for it.

    `line` is what runs inside the step. `facts` are the trace's own: how long ranks waited while
    they were profiled.
    """
    ranks = np.unique(line.graph.rank)
    if len(ranks) < 2:
        return []
    caused, measured = _idle_caused(line, waits, ranks), _measured_waits(facts)
    quiet = _common_idle(line)
    return [
        {
            "rank": part.rank, "compute_s": part.compute, "exposed_s": part.exposed,
            "hidden_s": part.hidden, **_idle_by_cause(line, part.rank, waits.of(part.rank), quiet),
            "waited_for_s": caused.get(part.rank, 0.0),
            "measured_waited_for_s": measured.get(part.rank),
        }
        for part in breakdown(line)[:MOST_RANKS]
    ]  # fmt: skip


def _common_idle(line: Timeline) -> float:
    """Seconds in which no rank works; endless where hosts are simulated, which explain pauses."""
    kind = line.graph.kind
    if np.isin(kind, (Kind.HOST, Kind.LOAD)).any():
        return float("inf")
    works = kind != Kind.SYNC
    return max(line.seconds - covered(line.start[works], line.end[works]), 0.0)


def _idle_caused(line: Timeline, waits: Waits, ranks: Array) -> dict[int, float]:
    """Seconds for which each rank keeps the devices of the others idle, the mean over those."""
    found = dict.fromkeys(ranks.tolist(), 0.0)
    others = max(len(ranks) - 1, 1)
    pairs = np.unique(np.stack([waits.rank, waits.late]), axis=1).T.tolist()
    for rank, late in pairs:
        busy = _device_tasks(line, rank)
        spans = line.start[busy], line.end[busy]
        for_it = waits.of(rank, late)
        found[late] += (covered(*for_it) - overlap(for_it, spans)) / others
    return found


def _tasks_of_rank(graph: Graph, rank: int) -> Array:
    """Tasks that a rank takes part in."""
    held = graph.held.task[graph.lanes.rank[graph.held.lane] == rank]
    mine: Array = (graph.rank == rank) | np.isin(np.arange(graph.size), held)
    return mine


def _device_tasks(line: Timeline, rank: int) -> Array:
    """Tasks of a rank's device: kernels, copies and communication."""
    return _tasks_of_rank(line.graph, rank) & np.isin(line.graph.kind, (*DEVICE, *COMMUNICATION))


def _idle_by_cause(
    line: Timeline, rank: int, waits: tuple[Array, Array], quiet: float
) -> dict[str, float]:
    """Idle time of a rank's device by cause: other ranks, its CPU, or none.

    It waits in collectives and, beyond the `quiet` seconds in which no rank works, for stages.
    """
    busy = _device_tasks(line, rank)
    host = _tasks_of_rank(line.graph, rank) & ~busy & (line.graph.kind != Kind.SYNC)
    parts = [(line.start[busy], line.end[busy]), waits, (line.start[host], line.end[host])]
    whole = [covered(*map(np.concatenate, zip(*parts[:k], strict=True))) for k in (1, 2, 3)]
    nothing = max(line.seconds - whole[2], 0.0)
    return {
        "waits_s": whole[1] - whole[0] + max(nothing - quiet, 0.0),
        "host_s": whole[2] - whole[1],
        "idle_s": min(nothing, quiet),
    }


def _measured_waits(facts: Any) -> dict[int, float]:
    balance, names = facts.get("balance"), facts.get("ranks")
    values = balance.get("waited_for_s") if isinstance(balance, dict) else None
    if not isinstance(values, (list, tuple)) or not isinstance(names, (list, tuple)):
        return {}
    return {int(r): float(v) for r, v in zip(names, values, strict=False)}


def straggler(rows: list[dict[str, Any]], step: float, profiled: float | None) -> str:
    """The straggler, or that there is none, in a sentence."""
    if not rows or not step:
        return ""
    worst = max(rows, key=lambda r: float(r["waited_for_s"]))
    if worst["waited_for_s"] > NOTABLE * step:
        took = words.seconds(worst["waited_for_s"])
        return f"Rank {worst['rank']} is the straggler: the others wait {took} a step for it."
    mean = float(np.mean([r["compute_s"] for r in rows]))
    busiest = max(rows, key=lambda r: float(r["compute_s"]))
    if mean and busiest["compute_s"] > (1 + NOTABLE) * mean:
        more = words.percent(busiest["compute_s"] / mean - 1)
        return f"Work is uneven: rank {busiest['rank']} computes {more} more than the mean."
    return f"No straggler in steady state.{_only_profiled(rows, profiled)}"


def _only_profiled(rows: list[dict[str, Any]], profiled: float | None) -> str:
    """A rank that was late in the profiled step alone: it does not last from step to step."""
    late = max(rows, key=lambda r: float(r["measured_waited_for_s"] or 0.0))
    took = late["measured_waited_for_s"] or 0.0
    if not profiled or took <= NOTABLE * profiled:
        return ""
    return (
        f" In the one profiled step the others waited {words.seconds(took)} for rank "
        f"{late['rank']}, of {words.seconds(profiled)}."
    )


def collectives(line: Timeline, rank: int, cluster: Cluster | None) -> list[dict[str, Any]]:
    """Collectives of one rank by op and group: bandwidth reached, and what the links allow."""
    graph = line.graph
    held = graph.held.task[graph.lanes.rank[graph.held.lane] == rank]
    own = np.flatnonzero(np.isin(graph.kind, COMMUNICATION))
    tasks = own[(graph.rank[own] == rank) | np.isin(own, held)]
    if not len(tasks):
        return []
    device = np.flatnonzero(np.isin(graph.kind, DEVICE) & (graph.rank == rank))
    busy = line.start[device], line.end[device]
    keys, whose = np.unique(
        np.stack([graph.op[tasks], graph.group[tasks]]), axis=1, return_inverse=True
    )
    rows = []
    for k, (op, group) in enumerate(keys.T.tolist()):
        mine = tasks[whose.reshape(-1) == k]
        spans = line.start[mine], line.end[mine]
        rows.append(
            _collective(graph, mine, graph.names[op], graph.names[group], cluster)
            | {"exposed_s": covered(*spans) - overlap(spans, busy)}
        )
    return sorted(rows, key=lambda r: -float(r["seconds"]))


def _collective(
    graph: Graph, tasks: Array, op: str, group: str, cluster: Cluster | None
) -> dict[str, Any]:
    spent, sent = float(graph.seconds[tasks].sum()), graph.comm_bytes[tasks]
    ranks = list(ranks_of(group)) if group else np.unique(graph.rank).tolist()
    best = _possible(op, sent, ranks, cluster)
    best = min(best, spent) if best else best  # the formula is no bound for what was reached
    moved = float(sent.sum())
    return {
        "op": op, "ranks": len(ranks) if group else None, "count": len(tasks), "bytes": moved,
        "seconds": spent,
        "reached": moved / spent if spent else 0.0,
        "possible": moved / best if best else None,
        "possible_s": best,
    }  # fmt: skip


def _possible(op: str, sent: Array, ranks: list[int], cluster: Cluster | None) -> float | None:
    """Seconds these collectives take where nothing disturbs them."""
    from foretell.cost.collective import price

    if cluster is None or len(ranks) < 2 or max(ranks) >= cluster.size or not sent.sum():
        return None
    try:
        return float(np.sum(price(op, sent.astype(float), cluster.levels(ranks)).seconds))
    except (ForetellError, KeyError):
        return None


def assumed_cluster(graph: Graph, device: str) -> Cluster | None:
    """Boxes of a device as its preset has them, for the ranks of a trace that names no cluster."""
    from foretell.cluster import load

    ranks = int(graph.rank.max(initial=0)) + 1
    if not device or ranks < 2:
        return None
    try:
        return load(f"{device}:gpus={ranks}")
    except ForetellError:
        return None
