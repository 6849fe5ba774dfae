"""Values as HTML for notebooks: plain tables that need no script, no style sheet and no library.

Every text is escaped; what is long is cut. Other rooms make theirs of the same pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from foretell.graph.graph import Kind, word_of

if TYPE_CHECKING:
    from foretell.graph.graph import Graph, Table

ROWS = 12  # shown of a table
LONGEST = 60  # letters of a cell
_CELL = "padding:.1rem .9rem .1rem 0;border:0;text-align:"
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def html_table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Rows under headings; a heading that ends in `>` is aligned right."""
    sides = ["right" if h.endswith(">") else "left" for h in heads]
    top = "".join(
        f'<th scope="col" style="{_CELL}{side}">{escape(h.rstrip(">"))}</th>'
        for h, side in zip(heads, sides, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f'<td style="{_CELL}{side}">{escape(cut(str(cell)))}</td>'
            for cell, side in zip(row, sides, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def headed(title: str, *parts: str) -> str:
    """Parts under a line that says what they are."""
    return f"<div><p><b>{escape(title)}</b></p>{''.join(parts)}</div>"


def cut(text: str, most: int = LONGEST) -> str:
    """Text no longer than so many letters."""
    return text if len(text) <= most else text[: most - 1] + "…"


def span(seconds: float) -> str:
    """Seconds as people write them."""
    for unit, name in _UNITS:
        if abs(seconds) >= unit:
            return f"{seconds / unit:.3g} {name}"
    return "0 s" if not seconds else f"{seconds:.3g} s"


def graph_html(graph: Graph) -> str:
    """HTML of a graph: its size, its work by kind, and its history."""
    counts = np.bincount(graph.kind, minlength=len(Kind))
    spent = np.bincount(graph.kind, weights=graph.seconds, minlength=len(Kind))
    rows = [(word_of(Kind, k), f"{counts[k]:,}", span(float(spent[k]))) for k in Kind if counts[k]]
    title = f"Graph: {graph.size:,} tasks, {graph.edges.size:,} edges, {len(graph.lanes)} lanes"
    made = f"<p>made by {escape(cut(' → '.join(graph.history), 200))}</p>" if graph.history else ""
    return headed(title, html_table(("kind", "tasks>", "time>"), rows), made)


def table_html(table: Table) -> str:
    """The first rows of a table beside a graph's tasks."""
    columns = table.columns()
    rows = list(zip(*(c[:ROWS].tolist() for c in columns.values()), strict=True))
    title = f"{type(table).__name__}: {len(table):,} rows"
    more = f"<p>and {len(table) - ROWS:,} more</p>" if len(table) > ROWS else ""
    return headed(title, html_table([f"{name}>" for name in columns], rows), more)
