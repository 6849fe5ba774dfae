"""Timelines as a Chrome trace, for ui.perfetto.dev and chrome://tracing.

Every rank of every timeline is a process, every lane a thread; what let a task start is a flow
arrow (of a measured timeline, which knows no causes: what it waited for); memory held and link use
are counters. Several timelines (predicted and measured) go into one file, one below the other.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from foretell.graph.graph import NONE
from foretell.io import write_atomically
from foretell.simulate.memory import memory
from foretell.simulate.timeline import WHY, Timeline

MICRO = 1e6  # Chrome's stamps are in microseconds
INSIDE = 4e-9  # seconds before its end at which an arrow leaves a span: viewers count nanoseconds
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
    first, flow = 0, 1
    for name, timeline in timelines:
        yield from _named(name, timeline, first)
        yield from _spans(timeline, first)
        arrows = _arrows(timeline)
        yield from _flows(timeline, first, arrows, flow)
        yield from _counters(timeline, first)
        first += _ranks(timeline)
        flow += len(arrows)


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
    graph, places = timeline.graph, _places(timeline, first)
    titles, texts = _titles(timeline), {c: graph.texts(c) for c in ("op", "layer", "phase", "kind")}
    source = graph.texts("source")
    start, length = timeline.start * MICRO, (timeline.end - timeline.start) * MICRO
    cause = [NONE] * graph.size if timeline.is_measured else timeline.cause.tolist()
    for i, (begin, lasts) in enumerate(zip(start.tolist(), length.tolist(), strict=True)):
        args: Event = {"op": texts["op"][i], "layer": texts["layer"][i], "phase": texts["phase"][i]}
        args |= {"task": i, "price": source[i]}
        if cause[i] != NONE:
            args["because"] = f"{WHY[int(timeline.why[i])]} {titles[cause[i]]}"
        event: Event = {"ph": "X", "name": titles[i], "cat": texts["kind"][i]}
        event |= {"ts": begin, "dur": max(lasts, 0.0), "args": args}
        for pid, tid in places[i]:
            yield {**event, "pid": pid, "tid": tid}


def _arrows(timeline: Timeline) -> list[tuple[int, int, str]]:
    """(from, to, why) for tasks on different lanes: causes, or what a measured task waited for."""
    graph = timeline.graph
    if timeline.is_measured:
        before, after = graph.edges.after, graph.edges.waiting
        word = dict.fromkeys(range(len(after)), "waited for")
    else:
        after = np.flatnonzero(timeline.cause != NONE)
        before = timeline.cause[after]
        word = {k: WHY[int(w)] for k, w in enumerate(timeline.why[after].tolist())}
    apart = np.flatnonzero(graph.lane[before] != graph.lane[after]).tolist()
    return [(int(before[k]), int(after[k]), word[k]) for k in apart]


def _flows(
    timeline: Timeline, first: int, arrows: Sequence[tuple[int, int, str]], number: int
) -> Iterator[Event]:
    """An arrow from inside a span to the beginning of another.

    Viewers tie an arrow to the span that is open at its time, and at its end a span is closed.
    """
    places = _places(timeline, first)
    for k, (p, i, why) in enumerate(arrows, number):
        flow = {"cat": why, "name": "starts", "id": k}
        begin, end = float(timeline.start[p]), float(timeline.end[p])
        leaves = max(begin, end - INSIDE, (begin + end) / 2 if end - begin < INSIDE else begin)
        arrives = max(float(timeline.start[i]), leaves)
        yield {"ph": "s", **flow, **_at(places[p][0], leaves)}
        yield {"ph": "f", "bp": "e", **flow, **_at(places[i][0], arrives)}


def _at(place: tuple[int, int], seconds: float) -> Event:
    return {"pid": place[0], "tid": place[1], "ts": seconds * MICRO}


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
    """Demand on each link, as a share of its capacity."""
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


def _places(timeline: Timeline, first: int) -> list[list[tuple[int, int]]]:
    """The (process, thread) of every lane each task holds; thread 0 of its rank where none."""
    graph = timeline.graph
    where = [(first + int(rank), lane + 1) for lane, rank in enumerate(graph.lanes.rank.tolist())]
    found = [[where[lane]] if lane != NONE else [] for lane in graph.lane.tolist()]
    for task, lane in zip(graph.held.task.tolist(), graph.held.lane.tolist(), strict=True):
        found[task].append(where[lane])
    return [p or [(first + int(graph.rank[i]), 0)] for i, p in enumerate(found)]


def _titles(timeline: Timeline) -> list[str]:
    names, ops = timeline.graph.texts("name"), timeline.graph.texts("op")
    pairs = enumerate(zip(names, ops, strict=True))
    return [name or op or f"task {i}" for i, (name, op) in pairs]
