"""Summaries of a graph, a timeline or a cluster: as plain values, then as text."""

from __future__ import annotations

from typing import Any

import numpy as np

from foretell.cluster import Cluster
from foretell.graph.graph import (
    COLUMNS,
    NONE,
    Array,
    Graph,
    Kind,
    LaneKind,
    Source,
    group_text,
    word_of,
)
from foretell.report import words
from foretell.report.words import table
from foretell.simulate.memory import held_by_kind, memory
from foretell.simulate.timeline import (
    Timeline,
    breakdown,
    busy,
    covered,
    critical_path,
    path_seconds,
)

RUNS = 0.02  # a task runs longer or shorter where it does by this share of itself
STARTS = 0.01  # a task starts earlier or later where it does by this share of the step
LEAST = 1e-5  # of the step: less than that cannot be seen
# Facts that are long, and for programs: they are in the file, not in a summary.
_LONG = frozenset({"tape", "batch_ops", "reads", "weights"})
_RANK_COLUMNS = ("rank", "compute>", "exposed comm>", "hidden comm>", "host>", "idle>")
CHANGED = "measured, then changed"  # by a what-if, or to take the profiler out


def split(name: str, timeline: Timeline) -> dict[str, Any]:
    """The mean over ranks; a rank is in the bubble while it does nothing and another one works."""
    ranks = breakdown(timeline)
    if not ranks:
        return {"name": name, "total": 0.0, "values": {}, "hidden": 0.0, "ranks": 0}
    works = timeline.graph.kind != Kind.SYNC
    working = covered(timeline.start[works], timeline.end[works])
    quiet = timeline.seconds - working
    parts = {
        "compute": _mean([r.compute for r in ranks]),
        "exposed communication": _mean([r.exposed for r in ranks]),
        "host": _mean([r.host for r in ranks]),
        "bubble": _mean([max(r.idle - quiet, 0.0) for r in ranks]),
        "idle": _mean([min(r.idle, quiet) for r in ranks]),
    }
    hidden = _mean([r.hidden for r in ranks])
    return {
        "name": name,
        "total": timeline.seconds,
        "values": {key: value if value > 1e-12 else 0.0 for key, value in parts.items()},
        "hidden": hidden,
        "ranks": len(ranks),
    }


def _mean(values: list[float]) -> float:
    return float(np.mean(values))


SAME, SHORTER, LONGER, NEW, EARLIER, LATER, GONE = range(7)


def origins(before: Graph, after: Graph) -> Array | None:
    """For each task after, its number before or NONE; None where the graphs are not related."""
    graph, origin = after, np.arange(after.size)
    while graph is not before:
        if graph.parent is None:
            return None
        step = np.arange(graph.size) if graph.origin is None else graph.origin
        origin = np.where(origin == NONE, NONE, step[origin])
        graph = graph.parent
    return origin


def changes(before: Timeline, after: Timeline, origin: Array) -> Array:
    """How each task differs in the second timeline: one of the codes above."""
    whole = max(before.seconds, after.seconds)
    known = origin != NONE
    was = np.where(known, origin, 0)
    ran, runs = (before.end - before.start)[was], after.end - after.start
    shift = after.start - before.start[was]
    longer = np.abs(runs - ran) > np.maximum(RUNS * np.maximum(ran, runs), LEAST * whole)
    moved = np.abs(shift) > STARTS * whole
    found = np.where(moved, np.where(shift > 0, LATER, EARLIER), SAME)
    found = np.where(longer, np.where(runs > ran, LONGER, SHORTER), found)
    return np.where(known, found, NEW).astype(np.uint8)


def gone(size: int, origin: Array) -> Array:
    """Which tasks before are not there after."""
    kept = np.zeros(size, bool)
    kept[origin[origin != NONE]] = True
    return ~kept


def by_op(before: Timeline, after: Timeline, most: int = 20) -> list[dict[str, Any]]:
    """Tasks and seconds of each op in both, those that differ most first."""
    one, other = _sums(before), _sums(after)
    rows: list[dict[str, Any]] = [
        {
            "op": op or "(none)",
            "tasks_before": one.get(op, (0, 0.0))[0],
            "tasks_after": other.get(op, (0, 0.0))[0],
            "before_s": one.get(op, (0, 0.0))[1],
            "after_s": other.get(op, (0, 0.0))[1],
        }
        for op in one | other
    ]
    return sorted(rows, key=lambda r: (-abs(r["after_s"] - r["before_s"]), r["op"]))[:most]


def _sums(timeline: Timeline) -> dict[str, tuple[int, float]]:
    graph = timeline.graph
    tasks = np.bincount(graph.op, minlength=len(graph.names))
    spent = np.bincount(graph.op, weights=timeline.end - timeline.start, minlength=len(graph.names))
    return {
        graph.names[k]: (int(tasks[k]), float(spent[k])) for k in np.flatnonzero(tasks).tolist()
    }


def graph_summary(graph: Graph) -> dict[str, Any]:
    """Summary of a graph: tasks, edges, lanes, time by kind and op."""
    return {
        "tasks": graph.size,
        "edges": graph.edges.size,
        "lanes": len(graph.lanes),
        "ranks": len(np.unique(graph.rank)) if graph.size else 0,
        "seconds": float(graph.seconds.sum()),
        "flops": float(graph.flops.sum()),
        "kinds": _by_kind(graph),
        "ops": _top_ops(graph),
        "columns": [c for c in COLUMNS if c in graph.columns],
        "history": list(graph.history),
        "facts": {k: v for k, v in graph.facts.items() if k not in _LONG},
        "fingerprint": graph.fingerprint(),
    }


def graph_text(answer: dict[str, Any]) -> str:
    """A graph's summary for a terminal."""
    ranks = f"{answer['ranks']} rank{'' if answer['ranks'] == 1 else 's'}"
    head = (
        f"{answer['tasks']:,} tasks, {answer['edges']:,} edges, {answer['lanes']} lanes, "
        f"{ranks}; {words.seconds(answer['seconds'])} of work"
    )
    kinds = [(k["kind"], f"{k['tasks']:,}", words.seconds(k["seconds"])) for k in answer["kinds"]]
    ops = [
        (words.cut(o["op"] or "-", 40), f"{o['tasks']:,}", words.seconds(o["seconds"]))
        for o in answer["ops"]
    ]
    parts = [head, table(("kind", "tasks>", "time>"), kinds), table(("op", "tasks>", "time>"), ops)]
    if answer["history"]:
        parts.append("made by: " + " → ".join(answer["history"]))
    return "\n".join(parts)


def timeline_summary(timeline: Timeline) -> dict[str, Any]:
    """Summary of a timeline: step, ranks, lanes, critical path, memory."""
    return {
        "step_s": timeline.seconds,
        "tasks": timeline.graph.size,
        "ranks": [_rank(part) for part in breakdown(timeline)],
        "lanes": [_lane(timeline, b) for b in busy(timeline)],
        "critical_path": _path(timeline),
        "memory": [_memory(timeline, m) for m in memory(timeline)],
        "sources": sources(timeline.graph),
    }


def timeline_text(answer: dict[str, Any], verdict: str) -> str:
    """A timeline's summary for a terminal, below its verdict; ranks that do alike share a row."""
    total = answer["step_s"] or 1.0
    parts = [words.fitted(verdict)]
    ranks = _alike([(r["rank"], _rank_row(r)) for r in answer["ranks"]])
    parts.append(table(_RANK_COLUMNS, ranks[:12]))
    lanes = sorted(answer["lanes"], key=lambda b: (-b["share"], b["rank"]))
    used = _alike([(b["rank"], _busy_row(b)) for b in lanes])
    parts.append(table(("rank", "lane", "busy", "share>"), used[:8]))
    path = answer["critical_path"]
    spent = [
        (words.cut(op, 36), words.seconds(t), words.percent(t / total))
        for op, t in list(path["ops"].items())[:8]
    ]
    parts.append(table((f"critical path, {path['tasks']:,} tasks", "time>", "of step>"), spent))
    if answer["memory"]:
        held = _alike([(m["rank"], _memory_row(m)) for m in answer["memory"]])
        parts.append(table(("rank", "peak memory>", "held by"), held[:6]))
    return "\n".join(parts)


def _rank_row(r: dict[str, Any]) -> tuple[str, ...]:
    spans = ("compute_s", "exposed_s", "hidden_s", "host_s", "idle_s")
    return tuple(words.seconds(r[name]) for name in spans)


def _busy_row(b: dict[str, Any]) -> tuple[str, ...]:
    return words.cut(b["name"], 26), words.bar(b["share"]), words.percent(b["share"])


def _memory_row(m: dict[str, Any]) -> tuple[str, ...]:
    held = [f"{kind} {words.size(size)}" for kind, size in list(m["held"].items())[:3]]
    return words.size(m["peak_bytes"]), ", ".join(held)


def _alike(rows: list[tuple[int, tuple[str, ...]]]) -> list[tuple[str, ...]]:
    """Rows that say the same of several ranks, as one row each."""
    ranks: dict[tuple[str, ...], list[int]] = {}
    for rank, row in rows:
        ranks.setdefault(row, []).append(rank)
    return [(group_text(sorted(found)), *row) for row, found in ranks.items()]


def cluster_summary(cluster: Cluster) -> dict[str, Any]:
    """Summary of a cluster: devices, nodes, links."""
    kinds: dict[str, int] = {}
    for device in cluster.devices:
        kinds[device.name] = kinds.get(device.name, 0) + 1
    return {
        "name": cluster.name,
        "ranks": cluster.size,
        "devices": kinds,
        "memory_bytes": sum(d.memory for d in cluster.devices),
        "fingerprint": cluster.fingerprint(),
    }


def sources(graph: Graph) -> dict[str, float]:
    """Shares of all task time that were measured, learned, from a formula, guessed or given.

    Measured times that were changed since are counted apart.
    """
    total = float(graph.seconds.sum())
    if not total:
        return {}
    measured = graph.source == Source.MEASURED
    altered = measured & _altered(graph)
    sums = np.bincount(graph.source, weights=graph.seconds, minlength=len(Source))
    changed = float(graph.seconds[altered].sum())
    sums[Source.MEASURED] -= changed
    found = {"given" if k == Source.NONE else word_of(Source, k): float(sums[k]) for k in Source}
    found |= {CHANGED: changed}
    return {name: spent / total for name, spent in found.items() if spent > 1e-9 * total}


def _altered(graph: Graph) -> Array:
    """Which tasks last otherwise than in the graph this one was first made from."""
    first = graph
    while first.parent is not None:
        first = first.parent
    origin = origins(first, graph)
    if origin is None or first is graph:
        return np.zeros(graph.size, bool)
    was = np.where(origin == NONE, graph.seconds, first.seconds[origin])
    return np.asarray(~np.isclose(graph.seconds, was, rtol=1e-9, atol=0.0))


def _by_kind(graph: Graph) -> list[dict[str, Any]]:
    counts = np.bincount(graph.kind, minlength=len(Kind))
    spent = np.bincount(graph.kind, weights=graph.seconds, minlength=len(Kind))
    return [
        {"kind": word_of(Kind, k), "tasks": int(counts[k]), "seconds": float(spent[k])}
        for k in Kind
        if counts[k]
    ]


def _top_ops(graph: Graph, most: int = 12) -> list[dict[str, Any]]:
    counts = np.bincount(graph.op, minlength=len(graph.names))
    spent = np.bincount(graph.op, weights=graph.seconds, minlength=len(graph.names))
    top = [k for k in np.argsort(-spent, kind="stable")[:most].tolist() if counts[k]]
    return [
        {"op": graph.names[k], "tasks": int(counts[k]), "seconds": float(spent[k])} for k in top
    ]


def _rank(part: Any) -> dict[str, Any]:
    return {
        "rank": part.rank,
        "compute_s": part.compute,
        "exposed_s": part.exposed,
        "hidden_s": part.hidden,
        "host_s": part.host,
        "idle_s": part.idle,
    }


def _lane(timeline: Timeline, b: Any) -> dict[str, Any]:
    lanes, names = timeline.graph.lanes, timeline.graph.names
    return {
        "rank": int(lanes.rank[b.lane]),
        "name": names[int(lanes.name[b.lane])],
        "kind": word_of(LaneKind, lanes.kind[b.lane]),
        "tasks": b.tasks,
        "busy_s": b.seconds,
        "share": b.share,
    }


def _path(timeline: Timeline) -> dict[str, Any]:
    return {"tasks": len(critical_path(timeline)), "ops": path_seconds(timeline, "op")}


def _memory(timeline: Timeline, m: Any) -> dict[str, Any]:
    held = held_by_kind(timeline, m)
    return {"rank": m.rank, "peak_bytes": m.peak, "at_s": m.at, "held": held}
