"""A page for each unseen source: predicted against measured as a plot, and the rows furthest off.

foretell validate --pages      docs/accuracy/SOURCE.md and SOURCE.svg, from the project root
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from foretell.io import write_text
from foretell_lab.validate import reported
from foretell_lab.validate.intervals import answered_left_out
from foretell_lab.validate.unseen import SOURCES, Row, answered

FOLDER = Path("docs/accuracy")
WORST = 8  # rows shown of each source
SIDE, EDGE = 420, 46  # of a plot, pixels


def report(truth: Path) -> dict[str, Any]:
    """Write every page; says where."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    written = []
    for name, rows in answered_left_out(answered(truth)).items():
        write_text(FOLDER / f"{name}.svg", plot(rows))
        write_text(FOLDER / f"{name}.md", page(name, rows, (SOURCES[name].__doc__ or "").strip()))
        written.append(f"{FOLDER}/{name}.md")
    return {"pages": written, "text": "\n".join(written)}


def page(name: str, rows: list[Row], about: str) -> str:
    """One source in words: figures, plot, worst rows and what bounds each."""
    off = np.array([row.error for row in rows])
    covered = np.mean([row.covered for row in rows])
    peaks = [row.found.peak / row.peak - 1 for row in rows if row.peak]
    lines = [f"# {name}", "", about.partition("\n\n")[0].replace("\n", " "), ""]
    lines += ["Written by `foretell validate --pages`; the figures of all sources: `--unseen`.", ""]
    lines += [*_stands(name)]
    lines += [
        "| rows | median error | bias | 90 % below | inside the 80 % interval | peak memory |"
    ]
    lines += ["|--:|--:|--:|--:|--:|--:|"]
    memory = _percent(float(np.median(np.abs(peaks)))) if peaks else "not measured"
    figures = (np.median(np.abs(off)), np.median(off), np.quantile(np.abs(off), 0.9), covered)
    cells = " | ".join(_percent(float(v)) for v in figures)
    lines += [f"| {len(rows)} | {cells} | {memory} |", ""]
    lines += [f"![predicted against measured seconds of {name}]({name}.svg)", ""]
    lines += ["Rows furthest off, and what the predicted step is made of:", ""]
    lines += ["| row | measured | predicted | error | most of it |", "|---|--:|--:|--:|---|"]
    for row in sorted(rows, key=lambda r: -abs(r.error))[:WORST]:
        times = f"{row.seconds:.4g} s | {row.found.step:.4g} s | {_percent(row.error)}"
        lines.append(f"| {row.name} | {times} | {_made_of(row)} |")
    return "\n".join(lines) + "\n"


def _stands(name: str) -> list[str]:
    """Where a reported source stands, how it was asked and what came out blind."""
    said = reported.sources().get(name)
    if said is None:
        return []
    return [f"[Source]({said['url']}); {said['asked']}.", "", reported.blind(name), ""]


_WORDS = {
    "compute_s": "compute",
    "exchange_s": "TP/CP/EP communication",
    "reduce_s": "gradient all-reduce",
    "update_s": "optimizer",
    "idle_s": "pipeline bubbles",
}


def _made_of(row: Row) -> str:
    """The two largest parts of the predicted step."""
    parts = sorted(row.found.breakdown.items(), key=lambda item: -item[1])[:2]
    shares = [(_WORDS.get(k, k), v / row.found.step) for k, v in parts if v > 0.03 * row.found.step]
    return ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares)


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def plot(rows: list[Row]) -> str:
    """Predicted over measured seconds, both logarithmic, with the interval of each row."""
    values = [v for row in rows for v in (row.seconds, row.found.low, row.found.high)]
    low, high = math.log10(min(values)) - 0.05, math.log10(max(values)) + 0.05
    scale = (SIDE - 2 * EDGE) / (high - low)

    def x(seconds: float) -> float:
        return round(EDGE + (math.log10(seconds) - low) * scale, 1)

    def y(seconds: float) -> float:
        return round(SIDE - x(seconds), 1)

    marks = [_frame(x, y, low, high)]
    for row in rows:
        colour = "#2a6f97" if row.covered else "#c1121f"
        at, found = x(row.seconds), row.found
        marks.append(
            f'<path d="M{at} {y(found.low)}V{y(found.high)}" stroke="{colour}" opacity=".35"/>'
            f'<circle cx="{at}" cy="{y(found.step)}" r="3" fill="{colour}"/>'
        )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIDE} {SIDE}" width="{SIDE}"'
    head += ' font-family="sans-serif" font-size="11" role="img">'
    return "\n".join([head, *marks, "</svg>", ""])


def _frame(x: Any, y: Any, low: float, high: float) -> str:
    """Axes with a tick for each power of ten, and the line of perfect prediction."""
    ends = 10**low, 10**high
    out = [
        f'<rect width="{SIDE}" height="{SIDE}" fill="white"/>',
        f'<path d="M{x(ends[0])} {y(ends[0])}H{x(ends[1])}M{x(ends[0])} {y(ends[0])}V{y(ends[1])}"'
        ' stroke="#333" fill="none"/>',
        f'<path d="M{x(ends[0])} {y(ends[0])}L{x(ends[1])} {y(ends[1])}" stroke="#999"/>',
        f'<text x="{SIDE / 2}" y="{SIDE - 8}" text-anchor="middle">measured, s</text>',
        f'<text x="12" y="{SIDE / 2}" text-anchor="middle" transform="rotate(-90 12 {SIDE / 2})">'
        "predicted, s</text>",
    ]
    for power in range(math.ceil(low), math.floor(high) + 1):
        at, text = 10.0**power, f"{10.0**power:g}"
        out.append(f'<text x="{x(at)}" y="{SIDE - 28}" text-anchor="middle">{text}</text>')
        out.append(f'<text x="{EDGE - 6}" y="{y(at) + 4}" text-anchor="end">{text}</text>')
    return "\n".join(out)
