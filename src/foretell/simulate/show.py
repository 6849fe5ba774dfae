"""A timeline as HTML for notebooks: its lanes drawn small, and where the step goes.

What is drawn is bounded by pixels: a lane has so many columns, each in the colour of whatever kind
of work fills most of it. The chain of causes has a row of its own.
"""

from __future__ import annotations

from html import escape

import numpy as np

from foretell.graph.graph import NONE, Array, Kind, word_of
from foretell.graph.show import headed, html_table, span
from foretell.simulate.timeline import Timeline, breakdown

COLUMNS, ROW, LEFT = 360, 16, 130  # columns of a lane; pixels of its height and of its name
LANES = 24  # drawn at most
COLOURS = ("#9aa5b1", "#4c8dff", "#e0b02e", "#ec6a3d", "#a97bf0", "#3fb56b", "#c9d1d9")  # by Kind


def timeline_html(timeline: Timeline) -> str:
    """The step's length, a small drawing, and where the time of each rank goes."""
    title = f"Timeline: {span(timeline.seconds)}, {timeline.graph.size:,} tasks"
    heads = ("rank>", "compute>", "exposed comm>", "hidden comm>", "host>", "idle>")
    rows = [
        (b.rank, *(span(v) for v in (b.compute, b.exposed, b.hidden, b.host, b.idle)))
        for b in breakdown(timeline)[:8]
    ]
    return headed(title, drawing(timeline), html_table(heads, rows))


def drawing(timeline: Timeline) -> str:
    """Lanes as SVG, with their names and a title for those who do not see it."""
    lanes = timeline.graph.lanes
    order = np.lexsort((np.arange(len(lanes)), lanes.rank))[:LANES].tolist()
    rows = [] if timeline.is_measured else [("critical path", timeline.critical_path())]
    rows += [(_name(timeline, lane), _on(timeline, lane)) for lane in order]
    width = LEFT + 2 * COLUMNS
    parts = [_row(timeline, k, name, tasks) for k, (name, tasks) in enumerate(rows)]
    used = [(word_of(Kind, k), COLOURS[k]) for k in np.unique(timeline.graph.kind).tolist()]
    key = " ".join(f'<span style="color:{c}">■</span> {escape(name)}' for name, c in used)
    label = f"timeline of {len(rows)} rows over {span(timeline.seconds)}"
    return (
        f'<svg viewBox="0 0 {width} {ROW * len(rows)}" width="{width}" role="img" '
        f'aria-label="{label}" style="max-width:100%" font-family="sans-serif" font-size="10">'
        f"{''.join(parts)}</svg><p>{key}</p>"
    )


def _row(timeline: Timeline, place: int, name: str, tasks: Array) -> str:
    top = place * ROW
    text = f'<text x="0" y="{top + 11}" fill="currentColor">{escape(name[:22])}</text>'
    return text + "".join(
        f'<rect x="{LEFT + 2 * a}" y="{top + 1}" width="{2 * (b - a)}" height="{ROW - 3}" '
        f'fill="{COLOURS[kind]}"/>'
        for a, b, kind in _runs(timeline, tasks)
    )


def _runs(timeline: Timeline, tasks: Array) -> list[tuple[int, int, int]]:
    """(from, to, kind) of columns in a row that show the same kind of work."""
    if not len(tasks) or not timeline.seconds:
        return []
    scale = COLUMNS / timeline.seconds
    first = np.floor(timeline.start[tasks] * scale).astype(int).clip(0, COLUMNS - 1)
    last = np.ceil(timeline.end[tasks] * scale).astype(int).clip(1, COLUMNS)
    shown = np.full(COLUMNS, NONE)
    longest_last = np.argsort(timeline.end[tasks] - timeline.start[tasks], kind="stable")
    for k in longest_last.tolist():
        shown[first[k] : max(last[k], first[k] + 1)] = timeline.graph.kind[tasks[k]]
    edges = np.flatnonzero(np.diff(shown, prepend=-2, append=-2))
    pairs = zip(edges.tolist(), edges[1:].tolist(), strict=False)
    return [(a, b, int(shown[a])) for a, b in pairs if shown[a] != NONE]


def _on(timeline: Timeline, lane: int) -> Array:
    held = timeline.graph.held
    return np.concatenate(
        [np.flatnonzero(timeline.graph.lane == lane), held.task[held.lane == lane]]
    )


def _name(timeline: Timeline, lane: int) -> str:
    lanes = timeline.graph.lanes
    return f"{int(lanes.rank[lane])} · {timeline.graph.names[int(lanes.name[lane])]}"
