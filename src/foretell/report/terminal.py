"""Tables for a terminal of 80 columns: plain text that needs no colour to be read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from foretell.io import shown


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "") -> str:
    """Columns of text; a heading that ends in `>` is aligned right (the mark is not shown)."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    made = Table(title=title or None, box=SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for heading in columns:
        is_number = heading.endswith(">")
        made.add_column(
            heading.rstrip(">"), justify="right" if is_number else "left", no_wrap=is_number
        )
    for row in rows:
        made.add_row(*(Text(shown(str(cell))) for cell in row))
    return f"\n{rendered(made)}"


def rendered(thing: Any) -> str:
    """What rich would print, as text; colours only where the terminal takes them."""
    from rich.console import Console

    console = Console(width=width(), highlight=False)
    with console.capture() as captured:
        console.print(thing)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    return "\n".join(lines).strip("\n")


def width() -> int:
    """The columns to fill: the terminal's, at most 100, 80 where there is none."""
    import shutil

    return min(shutil.get_terminal_size((80, 24)).columns, 100)


def wrapped(text: str) -> str:
    """A sentence in lines that fit the terminal; those after the first are set in."""
    import textwrap

    return textwrap.fill(
        text, width(), subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def fitted(text: str) -> str:
    """Lines as they are where they fit the terminal; longer ones broken, the rest set in."""
    return "\n".join(wrapped(line) if len(line) > width() else line for line in text.splitlines())
