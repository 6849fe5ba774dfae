"""Numbers as people write them, and tables for a terminal: plain text that needs no colour.

Conversion from base units happens here and nowhere else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from foretell.io import shown

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_BYTES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"))
# What people call the strategies that make up a layout's name.
_STRATEGIES = {
    "serial": "one GPU", "data": "DDP", "zero": "ZeRO-1", "fsdp": "FSDP", "tensor": "TP",
    "pipeline": "PP", "context": "CP", "expert": "EP",
}  # fmt: skip
_COUNTS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


_LONG = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
_MEASURE = re.compile(r"(?<=\d) (?=%|×|[µmn]?s\b|min\b|h\b|d\b|[KMGT]?i?B\b|CPU-s\b|[kMGT] )")
ALMOST = 0.9995  # of a unit: what three digits round to one
LONG = 120.0  # seconds from which on a duration is given in minutes, hours and days


def seconds(value: float) -> str:
    """0.01234 → `12.3 ms`; 848036 → `9 d 20 h`."""
    if value == 0:
        return "0 s"
    if not math.isfinite(value):
        return "unknown"
    if abs(value) >= LONG:
        return _duration(value)
    for unit, name in _SECONDS:
        if abs(value) >= ALMOST * unit:
            return f"{_short(value / unit)} {name}"
    return f"{value / 1e-9:.2g} ns"


def _duration(value: float) -> str:
    """Two units that matter."""
    sign, left = "-" if value < 0 else "", abs(value)
    for unit, name, smaller, rest in _LONG:
        whole, more = divmod(round(left / smaller), unit // smaller)
        if whole:
            return f"{sign}{whole:,} {name} {more} {rest}" if more else f"{sign}{whole:,} {name}"
    return f"{value:.3g} s"


def interval(low: float, high: float) -> str:
    """0.022, 0.0256 → `22 to 25.6 ms`: the unit once where it is the same."""
    first, last = seconds(low), seconds(high)
    number, _, unit = first.partition(" ")
    return f"{number if last.endswith(f' {unit}') and ' ' not in unit else first} to {last}"


def speedup(ratio: float) -> str:
    """2.03 → `2.03 × faster`; 0.5 → `2.00 × slower`."""
    if abs(ratio - 1) < 5e-3:
        return "no faster"
    return f"{ratio:.2f} × faster" if ratio > 1 else f"{1 / ratio:.2f} × slower"


def size(value: float) -> str:
    """1.5 * 2**30 → `1.50 GiB`."""
    for unit, name in _BYTES:
        if abs(value) >= ALMOST * unit:
            return f"{_short(value / unit)} {name}"
    return f"{value:.0f} B"


def rate(value: float) -> str:
    """25e9 → `25 GB/s`; empty where there is no bound."""
    return "" if value == float("inf") else f"{_short(value / 1e9)} GB/s"


def count(value: float) -> str:
    """1.2e12 → `1.20 T`."""
    for unit, name in _COUNTS:
        if abs(value) >= ALMOST * unit:
            return f"{_short(value / unit)} {name}"
    return f"{value:g}"


def tokens(value: float) -> str:
    """3e11 → `300 B`: a billion is B where tokens and parameters are counted."""
    return count(value).replace("G", "B").replace("k", "K")


def strategy(name: str) -> str:
    """`zero+tensor` → `ZeRO-1 + TP`; what is before a colon stays."""
    before, colon, last = name.rpartition(": ")
    parts = (_STRATEGIES.get(part, part) for part in last.split("+"))
    return f"{before}{colon}{' + '.join(parts)}"


def percent(share: float) -> str:
    """0.123 → `12.3 %`."""
    return f"{100 * share:.1f} %"


def bar(share: float, width: int = 20) -> str:
    """A share as a bar that can be read without colour."""
    full = round(max(0.0, min(1.0, share)) * width)
    return "█" * full + "·" * (width - full)


def cut(text: str, width: int) -> str:
    """Text no longer than `width`, its middle left out."""
    if len(text) <= width:
        return text
    left = (width - 1) // 2
    return f"{text[:left]}…{text[len(text) - (width - 1 - left) :]}"


def _short(value: float) -> str:
    """Three digits that matter."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "") -> str:
    """Columns of text; a heading that ends in `>` is aligned right (the mark is not shown)."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    cells = [[shown(str(cell)) for cell in row] for row in rows]
    wide = sum(
        3 + max(len(heading.rstrip(">")), *(len(row[k]) for row in cells if k < len(row)), 0)
        for k, heading in enumerate(columns)
    )
    made = Table(
        title=title or None, box=SIMPLE_HEAD, title_justify="left", pad_edge=False,
        collapse_padding=wide > width(),  # two spaces between columns instead of three
    )  # fmt: skip
    for heading in columns:
        is_number = heading.endswith(">")
        made.add_column(
            heading.rstrip(">"), justify="right" if is_number else "left", no_wrap=is_number
        )
    for row in cells:
        made.add_row(*map(Text, row))
    return f"\n{rendered(made)}"


def rendered(thing: Any) -> str:
    """Rich's output as text; colours only where the terminal takes them."""
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


def listed(rows: Sequence[tuple[str, str]]) -> str:
    """Names and what is known of each beside them, in lines that fit the terminal."""
    wide = max(len(name) for name, _ in rows) + 2
    return "\n".join(wrapped(f"  {name:<{wide}}{text}", " " * (wide + 2)) for name, text in rows)


def wrapped(text: str, indent: str = "  ") -> str:
    """A sentence in lines that fit the terminal; a number stays with its unit."""
    import textwrap

    whole = _MEASURE.sub("\0", text)
    lines = textwrap.wrap(
        whole, width(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines).replace("\0", " ")


def plan_text(text: str) -> str:
    """A plan in lines that fit the terminal, broken after commas: it can be copied in quotes."""
    lines = [""]
    for part in re.split("(?<=,)", text):
        if lines[-1].strip() and len(lines[-1]) + len(part) > width():
            lines.append("  ")
        lines[-1] += part
    return "\n".join(lines)


def fitted(text: str) -> str:
    """Lines as they are where they fit the terminal; longer ones broken, the rest set in."""
    return "\n".join(wrapped(line) if len(line) > width() else line for line in text.splitlines())
