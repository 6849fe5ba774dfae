"""One self-contained HTML page: timelines as columns, packed; no server, no network.

The page's own code lies in `web/`; here its values are gathered and put in. Nothing of them becomes
markup: they travel as one packed block, and the title as escaped text.

Values and columns in one block of text: a JSON head, the arrays behind it, deflated, base64.

A page of a hundred thousand tasks stays small and opens quickly: columns are as narrow as their
values allow and a browser reads them without parsing numbers.
"""

from __future__ import annotations

import base64
import itertools
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from foretell.graph.graph import COLUMNS, NONE, Array, LaneKind, word_of
from foretell.io import write_atomically
from foretell.report.memory import curves
from foretell.report.summary import (
    GONE,
    by_op,
    changes,
    gone,
    origins,
    sources,
    split,
    timeline_summary,
)
from foretell.simulate.timeline import WHY, Timeline, path_seconds

Values = Mapping[str, Any]


TICKS = 2**31  # of a step: far finer than a pixel at any zoom that helps
LONGEST = 240  # letters of a name: templates of kernels run to thousands
_TEXTS = ("op", "name", "layer")
_WHOLE = (np.uint8, np.uint16, np.uint32, np.int32)
_LEVEL = 6  # of deflate: 9 takes four times as long for one per cent
# In the order they need each other.
SCRIPTS = (
    "words", "unpack", "rows", "paint", "timeline", "charts", "drawings", "doctor", "sections",
    "main",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class PageTimeline:
    """A timeline of a page; its step is `seconds` long and begins at `zero` of its clock."""

    name: str
    timeline: Timeline
    zero: float = 0.0
    seconds: float | None = None  # the timeline's own where it is not given
    parts: Values | None = None  # where the step goes (→ foretell.report.summary)
    has_memory: bool = True  # whether its buffers say what the step holds

    @property
    def inside(self) -> Timeline:
        """The timeline from the step's begin on: what was done ahead of it is cut off."""
        if not self.zero:
            return self.timeline
        whole = self.timeline
        start, end = ((column - self.zero).clip(0.0) for column in (whole.start, whole.end))
        return Timeline(whole.graph, start, end, whole.cause, whole.why)

    @property
    def step_s(self) -> float:
        """The step time that is reported."""
        return self.timeline.seconds if self.seconds is None else self.seconds


@dataclass(frozen=True)
class Content:
    """The sections of a page; what is empty is not shown."""

    title: str = "Report"
    figures: Sequence[Values] = ()  # what, and seconds, bytes or text; low, high, gain, more
    notes: Sequence[str] = ()
    diagnosis: Values | None = None  # (→ foretell.survey.diagnosis)
    advice: Values | None = None  # as `foretell advise --json` prints it
    memory: Sequence[Values] = ()  # curves (→ foretell.report.memory)
    oracle: Sequence[Values] = ()  # layouts (→ foretell.report.layouts)
    plans: Sequence[Values] = ()  # (→ foretell.report.drawings)
    schedules: Sequence[Values] = ()  # (→ foretell.report.drawings)


def columns(lines: Sequence[PageTimeline]) -> list[dict[str, Any]]:
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


def _columns(line: PageTimeline) -> dict[str, Any]:
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


def _path_ops(line: PageTimeline) -> list[tuple[str, float]]:
    """Time on the critical path by op, from the start of the step."""
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


def packed(values: Any) -> str:
    """Plain values, in which numpy arrays may stand anywhere, as text for a page."""
    parts: list[bytes] = []
    head = json.dumps(
        _with_pointers(values, parts), allow_nan=False, separators=(",", ":")
    ).encode()
    start = 4 + len(head)
    block = len(head).to_bytes(4, "little") + head + bytes(-start % 8) + b"".join(parts)
    return base64.b64encode(zlib.compress(block, _LEVEL)).decode()


def _with_pointers(value: Any, parts: list[bytes]) -> Any:
    """The value with every array put into `parts` and a pointer in its place."""
    if isinstance(value, np.ndarray):
        return _column(narrow(value), parts)
    if isinstance(value, dict):
        return {str(key): _with_pointers(item, parts) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_pointers(item, parts) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _column(array: Array, parts: list[bytes]) -> dict[str, list[Any]]:
    offset = sum(map(len, parts))
    raw = array.astype(array.dtype.newbyteorder("<")).tobytes()
    parts.append(raw + bytes(-len(raw) % 8))
    return {"column": [f"{array.dtype.kind}{array.dtype.itemsize}", offset, len(array)]}


def narrow(array: Array) -> Array:
    """The same numbers in the narrowest type a browser has for them."""
    if array.dtype.kind == "f":
        return array.astype(np.float64)
    low, high = (int(array.min()), int(array.max())) if len(array) else (0, 0)
    for kind in _WHOLE:
        if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max:
            return array.astype(kind)
    return array.astype(np.float64)


Named = Sequence[tuple[str, Timeline] | PageTimeline]


def page_timelines(timelines: Named) -> list[PageTimeline]:
    """Timelines as a page draws them."""
    return [line if isinstance(line, PageTimeline) else PageTimeline(*line) for line in timelines]


def write(timelines: Named, path: Path, content: Content | None = None) -> None:
    """Write a page that shows named timelines, one above the other, and what else is given."""
    text = page(timelines, content)
    write_atomically(path, lambda file: file.write(text.encode()))


def page(timelines: Named, content: Content | None = None) -> str:
    """The page as text."""
    content = content or _bare(timelines)
    values = numbers(timelines, content) | {"lines": columns(page_timelines(timelines))}
    parts = {
        "TITLE": escape(content.title),
        "STYLE": _web("style.css"),
        "SCRIPT": "\n".join(_web(f"{name}.js") for name in SCRIPTS),
        "DATA": packed(values),
    }
    # In one go: a title that reads like a mark is not filled in again.
    return re.sub(r"@([A-Z]+)@", lambda mark: parts[mark[1]], _web("page.html"))


def numbers(timelines: Named, content: Content) -> dict[str, Any]:
    """Every number of the page but the spans: those are in a trace."""
    lines = page_timelines(timelines)
    memory = [c for line in lines if line.has_memory for c in curves(line.name, line.timeline)]
    pairs = itertools.pairwise(lines)
    return {
        "title": content.title,
        "figures": list(content.figures),
        "notes": list(content.notes),
        "diagnosis": content.diagnosis,
        "advice": content.advice,
        "split": [line.parts or split(line.name, line.timeline) for line in lines],
        "changes": [
            {"before": a.name, "after": b.name, "rows": by_op(a.timeline, b.timeline)}
            for a, b in pairs
        ],
        "memory": [*content.memory, *memory],
        "sources": [
            {"name": line.name, "shares": shares}
            for line in lines
            if (shares := sources(line.timeline.graph))
        ],
        "oracle": list(content.oracle),
        "plans": list(content.plans),
        "schedules": list(content.schedules),
    }


def summaries(timelines: Named) -> list[dict[str, Any]]:
    """`foretell simulate --json` of each timeline; measured ones have no causes."""
    return [
        {"name": line.name, "step_s": line.step_s, "tasks": line.timeline.graph.size}
        if line.timeline.is_measured
        else {"name": line.name, **timeline_summary(line.inside), "step_s": line.step_s}
        for line in page_timelines(timelines)
    ]


def _bare(timelines: Named) -> Content:
    """The content of a page that has timelines alone."""
    lines = page_timelines(timelines)
    figures = [{"what": line.name, "seconds": line.step_s} for line in lines[:4]]
    return Content(title=lines[0].name if lines else "Report", figures=figures)


def _web(name: str) -> str:
    return resources.files("foretell.report").joinpath("web", name).read_text()
