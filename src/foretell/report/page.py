"""One self-contained HTML page of timelines: no server, no network, opens from disk.

The page's own code is in `page.html`; here its data are made: columns as JSON, numbers rounded to
what a screen can show.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from foretell.graph.columns import COLUMNS, Array, word_of
from foretell.graph.file import write_atomically
from foretell.report.summary import timeline_summary
from foretell.simulate.questions import critical_path
from foretell.simulate.timeline import WHY, Timeline

_DIGITS = 7  # of a time relative to the step: finer than a pixel at any zoom that helps


def write(timelines: Sequence[tuple[str, Timeline]], path: Path) -> None:
    """Write a page that shows named timelines, one above the other."""
    text = page(timelines)
    write_atomically(path, lambda file: file.write(text.encode()))


def page(timelines: Sequence[tuple[str, Timeline]]) -> str:
    """The page as text."""
    template = resources.files("foretell.report").joinpath("page.html").read_text()
    data = json.dumps([_shown(name, timeline) for name, timeline in timelines], allow_nan=False)
    # A name that holds a closing tag must not end the script it stands in.
    return template.replace("/*DATA*/[]", data.replace("</", "<\\/"))


def _shown(name: str, timeline: Timeline) -> dict[str, Any]:
    graph, summary = timeline.graph, timeline_summary(timeline)
    on_path = np.zeros(graph.size, np.uint8)
    on_path[critical_path(timeline)] = 1
    return {
        "name": name,
        "summary": summary,
        "lanes": [{"rank": lane["rank"], "name": lane["name"]} for lane in summary["lanes"]],
        "words": list(graph.names),
        "kinds": _words("kind"),
        "phases": _words("phase"),
        "why": [WHY[k] for k in sorted(WHY)],
        "start": _times(timeline.start),
        "seconds": _times(timeline.end - timeline.start),
        "lane": graph.lane.tolist(),
        "held": [graph.held.task.tolist(), graph.held.lane.tolist()],
        "kind": graph.kind.tolist(),
        "op": graph.op.tolist(),
        "title": graph.column("name").tolist(),
        "layer": graph.layer.tolist(),
        "phase": graph.phase.tolist(),
        "cause": timeline.cause.tolist(),
        "because": timeline.why.tolist(),
        "path": on_path.tolist(),
    }


def _words(column: str) -> list[str]:
    words = COLUMNS[column].words
    return [word_of(words, w) for w in words] if words else []


def _times(seconds: Array) -> list[float]:
    scale = float(seconds.max(initial=0.0)) or 1.0
    digits = max(0, _DIGITS - int(np.floor(np.log10(scale))))
    rounded: list[float] = np.round(seconds, digits).tolist()
    return rounded
