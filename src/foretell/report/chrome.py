"""Timelines as a Chrome trace, for ui.perfetto.dev and chrome://tracing.

Every rank of every timeline is a process, every lane a thread; what let a task start is a flow
arrow; memory held and link use are counters. Several timelines (predicted and measured) go into one
file, one below the other.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from foretell.graph.columns import NONE
from foretell.graph.file import write_atomically
from foretell.simulate.memory import memory
from foretell.simulate.timeline import WHY, Timeline

MICRO = 1e6  # Chrome's stamps are in microseconds
Event = dict[str, Any]


def write(timelines: Sequence[tuple[str, Timeline]], path: Path) -> None:
    """Write named timelines to one trace; compressed where the name ends in `.gz`."""
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": list(events(timelines))})
    raw = text.encode()
    write_atomically(
        path, lambda file: file.write(gzip.compress(raw, mtime=0) if path.suffix == ".gz" else raw)
    )


def events(timelines: Sequence[tuple[str, Timeline]]) -> Iterator[Event]:
    """All events of several timelines."""
    first = 0
    for name, timeline in timelines:
        yield from _named(name, timeline, first)
        yield from _spans(timeline, first)
        yield from _flows(timeline, first)
        yield from _counters(timeline, first)
        first += _ranks(timeline)


def _ranks(timeline: Timeline) -> int:
    graph = timeline.graph
    return 1 + max(int(r.max(initial=0)) for r in (graph.rank, graph.lanes.rank))


def _named(name: str, timeline: Timeline, first: int) -> Iterator[Event]:
    graph = timeline.graph
    for rank in range(_ranks(timeline)):
        args = {"name": f"{name}: rank {rank}"}
        yield {"ph": "M", "name": "process_name", "pid": first + rank, "args": args}
        order = {"sort_index": first + rank}
        yield {"ph": "M", "name": "process_sort_index", "pid": first + rank, "args": order}
    for lane in range(len(graph.lanes)):
        where = {"pid": first + int(graph.lanes.rank[lane]), "tid": lane + 1}
        args = {"name": graph.names[int(graph.lanes.name[lane])]}
        yield {"ph": "M", "name": "thread_name", **where, "args": args}
        yield {"ph": "M", "name": "thread_sort_index", **where, "args": {"sort_index": lane}}


def _spans(timeline: Timeline, first: int) -> Iterator[Event]:
    graph = timeline.graph
    for i in range(graph.size):
        span = timeline[i]
        args = {"op": span.task.op, "layer": span.task.layer, "phase": span.task.phase, "task": i}
        if span.cause != NONE:
            args["because"] = f"{span.why} {_title(timeline, span.cause)}"
        for pid, tid in _places(timeline, i, first):
            yield {
                "ph": "X",
                "name": _title(timeline, i),
                "cat": span.task.kind,
                "pid": pid,
                "tid": tid,
                "ts": span.start * MICRO,
                "dur": (span.end - span.start) * MICRO,
                "args": args,
            }


def _flows(timeline: Timeline, first: int) -> Iterator[Event]:
    """An arrow from each task to those it let start, where they are on different lanes."""
    if timeline.is_measured:
        return
    why = timeline.why
    for i in np.flatnonzero(timeline.cause != NONE).tolist():
        p = int(timeline.cause[i])
        start, end = (next(iter(_places(timeline, k, first))) for k in (p, i))
        if start == end:
            continue
        flow = {"cat": WHY[int(why[i])], "name": "starts", "id": first * timeline.graph.size + i}
        yield {"ph": "s", **flow, "pid": start[0], "tid": start[1], "ts": timeline.end[p] * MICRO}
        yield {
            "ph": "f",
            "bp": "e",
            **flow,
            "pid": end[0],
            "tid": end[1],
            "ts": timeline.start[i] * MICRO,
        }


def _counters(timeline: Timeline, first: int) -> Iterator[Event]:
    for m in memory(timeline):
        for time, held in zip(m.time.tolist(), m.held.tolist(), strict=True):
            yield {
                "ph": "C",
                "name": "memory held",
                "pid": first + m.rank,
                "ts": time * MICRO,
                "args": {"bytes": held},
            }
    yield from _link_use(timeline, first)


def _link_use(timeline: Timeline, first: int) -> Iterator[Event]:
    """How much of each link is asked for, in parts of its capacity."""
    used, links = timeline.graph.used, timeline.graph.links
    for link in range(len(links)):
        mine = used.link == link
        tasks, demand = used.task[mine], used.demand[mine] / links.capacity[link]
        time = np.concatenate([timeline.start[tasks], timeline.end[tasks]])
        change = np.concatenate([demand, -demand])
        ranked = np.lexsort((change, time))
        name = f"link {timeline.graph.names[int(links.name[link])]}"
        for t, share in zip(time[ranked].tolist(), np.cumsum(change[ranked]).tolist(), strict=True):
            args = {"demand": round(share, 6)}
            yield {"ph": "C", "name": name, "pid": first, "ts": t * MICRO, "args": args}


def _places(timeline: Timeline, i: int, first: int) -> list[tuple[int, int]]:
    """The (process, thread) of every lane a task holds; thread 0 of its rank where it has none."""
    graph = timeline.graph
    lanes = graph[i].lanes
    if not lanes:
        return [(first + int(graph.rank[i]), 0)]
    return [(first + int(graph.lanes.rank[lane]), lane + 1) for lane in lanes]


def _title(timeline: Timeline, i: int) -> str:
    task = timeline.graph[i]
    return task.name or task.op or f"task {i}"
