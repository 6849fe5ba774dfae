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
from foretell.report.content import Content
from foretell.report.differ import by_op
from foretell.report.held import curves
from foretell.report.lines import columns
from foretell.report.pack import packed
from foretell.report.split import split
from foretell.report.summary import sources, timeline_summary
from foretell.simulate.timeline import Timeline

# In the order they need each other.
SCRIPTS = (
    "words", "unpack", "rows", "paint", "timeline", "charts", "drawings", "sections", "main",
)  # fmt: skip
Named = Sequence[tuple[str, Timeline]]


def write(timelines: Named, path: Path, content: Content | None = None) -> None:
    """Write a page that shows named timelines, one above the other, and what else is told."""
    text = page(timelines, content)
    write_atomically(path, lambda file: file.write(text.encode()))


def page(timelines: Named, content: Content | None = None) -> str:
    """The page as text."""
    content = content or _bare(timelines)
    values = numbers(timelines, content) | {"lines": columns(timelines)}
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
    memory = [c for name, line in timelines for c in curves(name, line)]
    pairs = itertools.pairwise(timelines)
    return {
        "title": content.title,
        "figures": list(content.figures),
        "notes": list(content.notes),
        "advice": content.advice,
        "split": [split(name, line) for name, line in timelines],
        "changes": [{"before": a[0], "after": b[0], "rows": by_op(a[1], b[1])} for a, b in pairs],
        "memory": [*content.memory, *memory],
        "sources": [
            {"name": name, "shares": shares}
            for name, line in timelines
            if (shares := sources(line.graph))
        ],
        "oracle": list(content.oracle),
        "plans": list(content.plans),
        "schedules": list(content.schedules),
    }


def summaries(timelines: Named) -> list[dict[str, Any]]:
    """What `foretell simulate --json` says of each timeline; measured ones have no causes."""
    return [
        {"name": name, "step_s": line.seconds, "tasks": line.graph.size}
        if line.is_measured
        else {"name": name, **timeline_summary(line)}
        for name, line in timelines
    ]


def _bare(timelines: Named) -> Content:
    """What can be told of timelines alone."""
    figures = [{"what": name, "seconds": line.seconds} for name, line in timelines[:4]]
    return Content(title=timelines[0][0] if timelines else "Report", figures=figures)


def _web(name: str) -> str:
    return resources.files("foretell.report").joinpath("web", name).read_text()
