"""A timeline as columns for the page: whole numbers of ticks, indices of words, what differs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from foretell.graph.columns import COLUMNS, NONE, Array, LaneKind, word_of
from foretell.report.content import Line
from foretell.report.differ import GONE, changes, gone, origins
from foretell.simulate.timeline import WHY, Timeline, path_seconds

TICKS = 2**31  # of a step: far finer than a pixel at any zoom that helps
LONGEST = 240  # letters of a name: templates of kernels run to thousands
_TEXTS = ("op", "name", "layer")


def columns(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Every timeline, each beside the one above it where they have tasks in common."""
    found = [_columns(line) for line in lines]
    for k in range(1, len(lines)):
        before, after = lines[k - 1].timeline, lines[k].timeline
        origin = origins(before.graph, after.graph)
        if origin is None:
            continue
        found[k] |= {
            "against": k - 1,
            "origin": origin,
            "change": changes(before, after, origin),
        }
        missing = gone(before.graph.size, origin)
        above = found[k - 1]
        above["change"] = np.where(missing, GONE, above["change"]).astype(np.uint8)
    return found


def _columns(line: Line) -> dict[str, Any]:
    timeline, graph = line.timeline, line.timeline.graph
    tick = (timeline.seconds or 1.0) / TICKS
    texts, words = _words(timeline)
    first = np.round(timeline.start / tick).astype(np.int64).clip(0)
    last = np.round(timeline.end / tick).astype(np.int64).clip(0)
    is_simulated = not timeline.is_measured
    return {
        "name": line.name,
        "step_s": line.step_s,
        "end_s": timeline.seconds,
        "zero": line.zero,
        "tick": tick,
        "lanes": _lanes(timeline),
        "words": words,
        "kinds": _codes("kind"),
        "phases": _codes("phase"),
        "sources": _codes("source"),
        "why": [WHY[k] for k in sorted(WHY)],
        "start": first,
        "length": last - first,
        "lane": graph.lane.astype(np.int32),
        "held": [graph.held.task, graph.held.lane],
        "kind": graph.kind,
        "phase": graph.phase,
        "source": graph.source,
        "op": texts["op"],
        "title": texts["name"],
        "layer": texts["layer"],
        "cause": timeline.cause.astype(np.int32) if is_simulated else np.zeros(0, np.int32),
        "because": timeline.why,
        "path": timeline.critical_path() if is_simulated else np.zeros(0, np.int32),
        "path_ops": _path_ops(line) if is_simulated else [],
        "change": np.zeros(graph.size, np.uint8),
        "origin": np.zeros(0, np.int32),
        "against": NONE,
    }


def _path_ops(line: Line) -> list[tuple[str, float]]:
    """What the critical path of the step is spent on; what came before it does not count."""
    return list(path_seconds(line.inside, "op").items())[:15]


def _words(timeline: Timeline) -> tuple[dict[str, Array], list[str]]:
    """The text columns numbered anew, with only the words they use; 0 stays the empty one."""
    graph = timeline.graph
    used = np.unique(np.concatenate([[0], *(graph.column(c) for c in _TEXTS)])).astype(np.int64)
    number = np.zeros(len(graph.names), np.int64)
    number[used] = np.arange(len(used))
    words = [graph.names[k][:LONGEST] for k in used.tolist()]
    return {c: number[graph.column(c)] for c in _TEXTS}, words


def _lanes(timeline: Timeline) -> list[dict[str, Any]]:
    lanes, names = timeline.graph.lanes, timeline.graph.names
    return [
        {
            "rank": int(lanes.rank[k]),
            "name": names[int(lanes.name[k])],
            "kind": word_of(LaneKind, lanes.kind[k]),
        }
        for k in range(len(lanes))
    ]


def _codes(column: str) -> list[str]:
    words = COLUMNS[column].words
    return [word_of(words, w) for w in words] if words else []
