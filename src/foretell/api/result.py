"""What every answer can do: one line as `repr`, a table when printed, HTML, JSON, pandas, a
plot.

A result says its verdict, its tables, its rows and its plot; the rest is made from these here.

Pictures of results as SVG: bars with intervals, and curves.

Drawn here rather than by matplotlib: no dependency, the same bytes everywhere (so that tests can
compare them), and text that follows the notebook's light or dark theme.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from foretell.errors import InputError
from foretell.io import finite

WIDTH, LEFT, RIGHT, ROW = 640, 200, 70, 24
TALL = 280  # pixels of a chart of curves
COLOURS = ("#4c8dff", "#ec6a3d", "#3fb56b", "#a97bf0", "#e0b02e", "#9aa5b1")


class Bar(NamedTuple):
    """One row: a value, its label, and its interval where it has one."""

    name: str
    value: float
    label: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, repr=False)
class Plot:
    """An SVG picture: a notebook shows it, `save` writes it."""

    title: str
    svg: str

    def save(self, path: str | Path) -> Path:
        """Write the picture to a `.svg` file; its path."""
        from foretell.io import write_text

        write_text(Path(path), self.svg + "\n")
        return Path(path)

    def _repr_html_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"<Plot: {self.title}>"


def bars(title: str, rows: Sequence[Bar]) -> Plot:
    """Horizontal bars from zero, each with its value and a whisker for its interval."""
    longest = max((max(row.value, row.high or 0.0) for row in rows), default=0.0) or 1.0
    scale = (WIDTH - LEFT - RIGHT) / longest
    parts = [_bar(row, ROW * (k + 1), scale) for k, row in enumerate(rows)]
    return _plot(title, ROW * (len(rows) + 1) + 6, parts)


def _bar(row: Bar, top: int, scale: float) -> str:
    end = LEFT + row.value * scale
    parts = [
        _text(LEFT - 8, top + 16, row.name[:30], "end"),
        f'<rect x="{LEFT}" y="{top + 4}" width="{end - LEFT:.1f}" height="{ROW - 8}" '
        f'fill="{COLOURS[0]}"/>',
    ]
    if row.low is not None and row.high is not None:
        low, end = LEFT + row.low * scale, max(end, LEFT + row.high * scale)
        parts.append(
            f'<path d="M{low:.1f} {top + 12}H{LEFT + row.high * scale:.1f}" '
            'stroke="currentColor" stroke-width="1.5"/>'
        )
    return "".join([*parts, _text(end + 6, top + 16, row.label, "start")])


def curves(
    title: str, series: Mapping[str, Sequence[tuple[float, float]]], axes: tuple[str, str]
) -> Plot:
    """Series of points on logarithmic axes, each in a colour of its own and named at its end."""
    points = [p for line in series.values() for p in line if min(p) > 0]
    if not points:
        return _plot(title, ROW * 2, [_text(8, 2 * ROW - 6, "nothing to draw", "start")])
    across = _LogScale([x for x, _ in points], 60, WIDTH - 150)
    up = _LogScale([y for _, y in points], TALL - 40, 34)
    parts = [_axes(points, across, up, axes)]
    for k, (name, line) in enumerate(series.items()):
        drawn = [(across(x), up(y)) for x, y in sorted(line) if x > 0 and y > 0]
        parts.append(_curve(name, drawn, COLOURS[k % len(COLOURS)]))
    return _plot(title, TALL, parts)


class _LogScale:
    """A logarithmic axis: from a value to a pixel."""

    def __init__(self, values: Sequence[float], first: float, last: float) -> None:
        low, high = math.log(min(values)), math.log(max(values))
        self._low, self._first = low, first
        self._step = (last - first) / (high - low) if high > low else 0.0

    def __call__(self, value: float) -> float:
        return self._first + (math.log(value) - self._low) * self._step


def _axes(
    points: Sequence[tuple[float, float]], across: _LogScale, up: _LogScale, names: tuple[str, str]
) -> str:
    base = TALL - 30
    xs = sorted({x for x, _ in points})
    ticks = [_text(across(x), base + 14, f"{x:g}", "middle") for x in xs]
    ends = {min(y for _, y in points), max(y for _, y in points)}
    ticks += [_text(54, up(y) + 4, f"{y:.3g}", "end") for y in sorted(ends)]
    frame = (
        f'<path d="M58 30V{base}H{WIDTH - 148}" fill="none" stroke="currentColor" opacity=".4"/>'
    )
    named = _text(WIDTH - 140, base + 14, names[0], "start") + _text(58, 26, names[1], "start")
    return frame + "".join(ticks) + named


def _curve(name: str, drawn: Sequence[tuple[float, float]], colour: str) -> str:
    if not drawn:
        return ""
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in drawn)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in drawn)
    x, y = drawn[-1]
    line = f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
    return f'{line}<g fill="{colour}">{dots}</g>{_text(x + 6, y + 4, name[:22], "start")}'


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="currentColor">'
        f"{escape(words)}</text>"
    )


def _plot(title: str, height: int, parts: Sequence[str]) -> Plot:
    head = f'<text x="8" y="16" font-weight="bold" fill="currentColor">{escape(title)}</text>'
    return Plot(
        title,
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'role="img" aria-label="{escape(title)}" font-family="sans-serif" font-size="12" '
        f'style="max-width:100%">{head}{"".join(parts)}</svg>',
    )


class Table(NamedTuple):
    """Rows under headings; a heading that ends in `>` is aligned right."""

    columns: Sequence[str]
    rows: Iterable[Sequence[Any]]


class Result:
    """An answer for people and programs."""

    @property
    def verdict(self) -> str:
        """The answer in one sentence."""
        raise NotImplementedError

    def details(self, verbose: bool = False) -> list[str | Table]:
        """Sentences and tables below the verdict; more of them if `verbose`."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Plain values under the keys of the command line's `--json`; seconds and bytes."""
        raise NotImplementedError

    def records(self) -> list[dict[str, Any]]:
        """Rows of plain values: what `to_pandas` makes a data frame of."""
        raise NotImplementedError

    def plot(self) -> Plot:
        """A picture (SVG): shown in a notebook, written by `.save(path)`."""
        raise NotImplementedError

    def text(self, verbose: bool = False) -> str:
        """Verdict, sentences and tables, at most as wide as the terminal."""
        from foretell.report.words import fitted, table

        lines, is_below = [fitted(self.verdict)], False
        for part in self.details(verbose):
            if isinstance(part, Table):
                lines.append(table(part.columns, part.rows))
            else:
                lines.append(f"\n{fitted(part)}" if is_below and part else fitted(part))
            is_below = isinstance(part, Table)
        return "\n".join(lines)

    def to_json(self) -> str:
        """One line of strict JSON: `to_dict`, with null for what is not finite."""
        return json_text(self.to_dict())

    def to_pandas(self) -> Any:
        """`records` as a `pandas.DataFrame`."""
        if find_spec("pandas") is None:
            raise InputError(
                "to_pandas() needs pandas, which is not installed",
                hint="pip install pandas, or take .records() or .to_dict()",
            )
        pandas: Any = import_module("pandas")
        return pandas.DataFrame(self.records())

    def _repr_html_(self) -> str:
        from foretell.graph.show import headed, html_table

        parts = [
            html_table(part.columns, part.rows)
            if isinstance(part, Table)
            else f"<p>{escape(part)}</p>"
            for part in self.details()
        ]
        return headed(self.verdict, *parts)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.verdict}>"


def json_text(value: Any) -> str:
    """A value as one line of strict JSON: what is not finite is null."""
    try:
        made = json.dumps(value, default=_plain, allow_nan=False)
    except ValueError:
        plain = json.loads(json.dumps(value, default=_plain))
        made = json.dumps(finite(plain), allow_nan=False)
    return made.replace("\x7f", "\\u007f")


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form")
