"""One self-contained HTML page: no server, no network, opens from disk.

The page's own code lies in `web/`; here its values are gathered and put in. Nothing of them becomes
markup: they travel as one packed block, and the title as escaped text.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from foretell.io import write_atomically
from foretell.report.content import Content, Line
from foretell.report.differ import by_op
from foretell.report.lines import columns
from foretell.report.memory import curves
from foretell.report.pack import packed
from foretell.report.split import split
from foretell.report.summary import sources, timeline_summary
from foretell.simulate.timeline import Timeline

# In the order they need each other.
SCRIPTS = (
    "words", "unpack", "rows", "paint", "timeline", "charts", "drawings", "doctor", "sections",
    "main",
)  # fmt: skip
Named = Sequence[tuple[str, Timeline] | Line]


def lines_of(timelines: Named) -> list[Line]:
    """Timelines as a page draws them."""
    return [line if isinstance(line, Line) else Line(*line) for line in timelines]


def write(timelines: Named, path: Path, content: Content | None = None) -> None:
    """Write a page that shows named timelines, one above the other, and what else is given."""
    text = page(timelines, content)
    write_atomically(path, lambda file: file.write(text.encode()))


def page(timelines: Named, content: Content | None = None) -> str:
    """The page as text."""
    content = content or _bare(timelines)
    values = numbers(timelines, content) | {"lines": columns(lines_of(timelines))}
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
    lines = lines_of(timelines)
    memory = [c for line in lines for c in curves(line.name, line.timeline)]
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
    """What `foretell simulate --json` says of each timeline; measured ones have no causes."""
    return [
        {"name": line.name, "step_s": line.step_s, "tasks": line.timeline.graph.size}
        if line.timeline.is_measured
        else {"name": line.name, **timeline_summary(line.inside), "step_s": line.step_s}
        for line in lines_of(timelines)
    ]


def _bare(timelines: Named) -> Content:
    """What can be known of timelines alone."""
    lines = lines_of(timelines)
    figures = [{"what": line.name, "seconds": line.step_s} for line in lines[:4]]
    return Content(title=lines[0].name if lines else "Report", figures=figures)


def _web(name: str) -> str:
    return resources.files("foretell.report").joinpath("web", name).read_text()
