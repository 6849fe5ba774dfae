"""Answers for people: tables in the terminal, one HTML page, traces for viewers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from foretell.errors import InputError

if TYPE_CHECKING:
    from foretell.report.page import Content, PageTimeline
    from foretell.simulate.timeline import Timeline

__all__ = ["write"]


def write(
    timelines: Sequence[tuple[str, Timeline] | PageTimeline],
    path: Path,
    content: Content | None = None,
) -> None:
    """Write named timelines as what the file's name asks for: a page, or a trace for viewers.

    `content` is what a page tells besides them.
    """
    from foretell.report import chrome, page

    if path.suffix in (".html", ".htm"):
        return page.write(timelines, path, content)
    if path.name.endswith((".json", ".json.gz")):
        lines = page.page_timelines(timelines)
        return chrome.write([(line.name, line.timeline) for line in lines], path)
    raise InputError(
        f"`{path}` is neither a page nor a trace",
        hint="end its name in .html for a page, in .json or .json.gz for a trace",
    )
