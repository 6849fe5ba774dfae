"""Figures as plain values that Plotly draws in the browser; their texts take the page's colour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foretell.report import words
from foretell.simulate.timeline import Timeline

Figure = dict[str, Any]
COLOURS = {
    "compute": "#4c8dff",
    "exposed communication": "#ec6a3d",
    "host": "#e0b02e",
    "bubble": "#a97bf0",
    "idle": "#9aa5b1",
}
OVER = {"fillmode": "overlay", "fgcolor": "rgba(255,255,255,.6)", "fgopacity": 1, "size": 7}
PATTERNS = ("", "/", "\\", "|", "-")  # so that parts can be told apart without colour


def nothing() -> Figure:
    """What is shown while there is nothing to show: no axes, no room."""
    return {"data": [], "layout": {
        "height": 1, "xaxis": {"visible": False}, "yaxis": {"visible": False},
        "margin": {"l": 0, "r": 0, "t": 0, "b": 0}, "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
    }}  # fmt: skip


def goes(lines: Sequence[tuple[str, Timeline]]) -> Figure:
    """Where the step goes, before and after."""
    from foretell.report.split import split

    rows = [split(name, line) for name, line in lines]
    data = [
        {
            "type": "bar", "orientation": "h", "name": part,
            "y": [words.cut(r["name"], 34) for r in rows],
            "x": [1e3 * r["values"].get(part, 0.0) for r in rows],
            "marker": {"color": colour, "pattern": {"shape": PATTERNS[k], **OVER}},
            "hovertemplate": part + " %{x:.3g} ms<extra></extra>",
        }
        for k, (part, colour) in enumerate(COLOURS.items())
    ]  # fmt: skip
    axes = {"xaxis": {"ticksuffix": " ms"}, "yaxis": {"autorange": "reversed"}}
    return _figure(data, 110 + 46 * len(rows), barmode="stack", **axes)


def compared(found: Sequence[tuple[str, Mapping[str, Any]]]) -> Figure:
    """Scenarios beside each other, with the range that holds four times in five."""
    if not found:
        return nothing()
    values = [1e3 * f["predicted_s"] for _, f in found]
    data = [
        {
            "type": "bar", "orientation": "h", "y": [name for name, _ in found], "x": values,
            "marker": {"color": "#4c8dff"},
            "error_x": {
                "type": "data", "symmetric": False, "color": "#808b96", "thickness": 2,
                "array": [1e3 * (f["high_s"] - f["predicted_s"]) for _, f in found],
                "arrayminus": [1e3 * (f["predicted_s"] - f["low_s"]) for _, f in found],
            },
            "hovertemplate": "%{y}: %{x:.4g} ms<extra></extra>",
        }
    ]  # fmt: skip
    axes = {"xaxis": {"ticksuffix": " ms"}, "yaxis": {"autorange": "reversed"}}
    return _figure(data, 100 + 40 * len(found), showlegend=False, **axes)


def layouts(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Step against devices where there are several numbers of them, else against memory."""
    several = len({r["gpus"] for r in rows}) > 1
    signs = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "hexagon")
    data = []
    for k, name in enumerate(dict.fromkeys(r["strategy"] for r in rows)):
        mine = [r for r in rows if r["strategy"] == name]
        data.append(
            {
                "type": "scatter", "mode": "lines+markers" if several else "markers", "name": name,
                "x": [r["gpus"] if several else r["peak_bytes"] / 2**30 for r in mine],
                "y": [1e3 * r["step_s"] for r in mine],
                "text": [r["plan"] + ("" if r["fits"] else " (does not fit)") for r in mine],
                "marker": {
                    "symbol": [signs[k % 8] + ("" if r["fits"] else "-open") for r in mine],
                    "size": 9,
                },
                "hovertemplate": "%{text}<br>%{y:.4g} ms<extra></extra>",
            }
        )  # fmt: skip
    title = "devices" if several else "GiB on the fullest rank"
    xaxis = {"title": {"text": title}, **({"type": "log", "dtick": 0.30103} if several else {})}
    yaxis = {"ticksuffix": " ms", "type": "log", "dtick": 0.30103}  # a tick each time it doubles
    return _figure(data, 420, xaxis=xaxis, yaxis=yaxis)


def _figure(data: list[dict[str, Any]], height: int, **layout: Any) -> Figure:
    plain = {
        "height": height, "margin": {"l": 10, "r": 20, "t": 10, "b": 40},
        "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)",
        "legend": {"orientation": "h", "y": -0.25}, "font": {"family": "system-ui, sans-serif"},
    }  # fmt: skip
    for axis in ("xaxis", "yaxis"):
        given = {"gridcolor": "rgba(128,140,155,.25)", "zeroline": False, "automargin": True}
        plain[axis] = given | layout.pop(axis, {})
    return {"data": data, "layout": plain | layout}
