"""The widths of intervals, fitted to sources that nothing was fitted to, each left out in turn.

    foretell validate --intervals

A row is one measured step: ln(measured / predicted) and how far its question was from what had been
measured (→ foretell.predict.predict). Reported sources count half as they were first answered,
before any price was changed for them (tables/first_answers.csv), and half as they are answered now:
a new source meets mechanisms that were mended since, but was not looked at. All rows of a source
share its machines, software and author, so that a source counts as one whatever its length: rows
weigh 1 / rows, less where they are fewer than FULL.

Fitted are the ends themselves: the pinball loss of the 10th and of the 90th percentile, least where
80 % lie between them (Koenker and Bassett 1978), with a price on large numbers, for what few
sources have is hardly known. `left out` is the share of a source's rows, as answered now and as
first answered, inside intervals fitted without it.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.predict.predict import EIGHTY_PERCENT, Distance, interval, shipped
from foretell.report.words import table as text_table
from foretell_lab.validate import reported, unseen

Array = npt.NDArray[np.float64]
FULL = 10  # rows that make a whole source
OUTSIDE = 0.1  # share of rows that either end leaves outside
BLUNT = 0.01  # of ln(measured / predicted): how far the loss is rounded where it bends
PRICE = 0.01  # of large numbers
START, MOST = 0.06, 0.8  # widths
# Every distance widens. What one source says of a framework says little of the next: medians of
# sources under one profile have a standard deviation of 0.070 (27 sources under six profiles), 0.08
# at the upper end of its 80 % limit.
LEAST, LEAST_OF = 0.02, {"lone": 0.08}
SLOW = (0.0, 0.5)  # range of means: no distance makes steps faster than predicted


@dataclass(frozen=True)
class Answer:
    """One measured step beside its prediction."""

    source: str
    off: float  # ln(measured / predicted)
    away: dict[str, float]
    share: float = 1.0  # of its source's weight

    def is_inside(self, fitted: dict[str, Distance]) -> bool:
        """Whether the measurement lies in the interval."""
        low, high = interval(1.0, self.away, fitted)
        return low <= math.exp(self.off) <= high


def first_answers() -> list[Answer]:
    """Reported sources as they were answered before anything was changed."""
    path = files("foretell_lab.validate").joinpath("tables", "first_answers.csv")
    rows = csv.DictReader(path.read_text("utf-8").splitlines())
    return [
        Answer(
            r["source"],
            float(r["off"]),
            {k: v for k in shipped() if (v := float(r.get(k, 0)))},
            0.5,
        )
        for r in rows
    ]


def answers_now(truth: Path, names: Sequence[str]) -> list[Answer]:
    """Sources as they are answered today."""
    known = reported.sources()
    return [
        Answer(
            name,
            math.log(row.seconds / row.found.step),
            row.found.away,
            0.5 if name in known else 1.0,
        )
        for name in names
        for row in unseen.SOURCES[name](truth)
    ]


def fit(rows: Sequence[Answer]) -> dict[str, Distance]:
    """Every distance's mean and width."""
    from scipy.optimize import minimize

    names = list(shipped())
    away = np.array([[row.away.get(name, 0.0) for name in names] for row in rows])
    off, weight = np.array([row.off for row in rows]), _weights(rows)
    many, squared = len(names), away**2

    def loss(x: Array) -> tuple[float, Array]:
        slow, variance = x[:many], np.exp(2 * x[many:])
        mean, sd = away @ slow, np.sqrt(squared @ variance)
        total = PRICE * float((slow**2).sum() + variance.sum())
        by_mean, by_sd = np.zeros(len(off)), np.zeros(len(off))
        for side, share in ((-EIGHTY_PERCENT, OUTSIDE), (EIGHTY_PERCENT, 1 - OUTSIDE)):
            beyond = off - mean - side * sd
            total += float(weight @ (share * beyond + BLUNT * np.logaddexp(0, -beyond / BLUNT)))
            tilt = share - np.exp(-np.logaddexp(0, beyond / BLUNT))
            by_mean -= weight * tilt
            by_sd -= weight * tilt * side
        slope = np.r_[away.T @ by_mean, squared.T @ (by_sd / sd) * variance]
        return total, slope + 2 * PRICE * np.r_[slow, variance]

    start = np.r_[np.full(many, START / 3), np.full(many, math.log(START))]
    least = [math.log(LEAST_OF.get(name, LEAST)) for name in names]
    ends = [SLOW] * many + [(low, math.log(MOST)) for low in least]
    start = np.maximum(start, [low for low, _ in ends])
    found = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=ends).x
    pairs = zip(found[:many], np.exp(found[many:]), strict=True)
    return {n: Distance(round(float(a), 3), round(float(b), 3)) for n, (a, b) in zip(names, pairs, strict=True)}  # fmt: skip  # noqa: E501


def _weights(rows: Sequence[Answer]) -> Array:
    """A source of `FULL` rows weighs one; shares are of its rows first answered or now."""
    count: dict[str, float] = {}
    for row in rows:
        count[row.source] = count.get(row.source, 0.0) + row.share
    found = np.array(
        [row.share * min(count[row.source], FULL) / FULL / count[row.source] for row in rows]
    )
    return np.asarray(found / found.sum())


def report(truth: Path) -> dict[str, Any]:
    """Distances fitted anew, and coverage of each source with and without it in the fit."""
    now = answers_now(truth, list(unseen.SOURCES))
    first = first_answers()
    found, values = fit([*now, *first]), {}
    for name in dict.fromkeys(row.source for row in now):
        apart = fit([row for row in [*now, *first] if _runs(row.source) != _runs(name)])
        mine, asked = ([row for row in rows if row.source == name] for rows in (now, first))
        values[name] = {
            "rows": len(mine),
            "inside": _inside(mine, found),
            "left_out": _inside(mine, apart),
            "today": _inside(mine, shipped()),
        } | ({"first_left_out": _inside(asked, apart)} if asked else {})
    return {"distance": {n: d._asdict() for n, d in found.items()}, "sources": values,
            "text": _text(found, values)}  # fmt: skip


def _runs(source: str) -> str:
    """The source whose runs it has: some are asked in two ways."""
    return "foundry-h100" if source == "foundry-by-default" else source


def _inside(rows: Sequence[Answer], fitted: dict[str, Distance]) -> float:
    return float(np.mean([row.is_inside(fitted) for row in rows]))


def _text(found: dict[str, Distance], values: dict[str, Any]) -> str:
    heads = (
        "source",
        "rows>",
        "in the fit>",
        "left out>",
        "left out, first answers>",
        "as shipped>",
    )
    shares = ("inside", "left_out", "first_left_out", "today")
    rows = [
        (name, str(v["rows"]), *(f"{100 * v[key]:.0f} %" if key in v else "" for key in shares))
        for name, v in values.items()
    ]
    large = [round(100 * v["left_out"]) for v in values.values() if v["rows"] >= FULL]
    within, over = sum(75 <= share <= 90 for share in large), sum(share > 90 for share in large)
    lines = [text_table(heads, rows)]
    lines += [
        f"{len(large)} sources of {FULL} rows or more, each left out:"
        f" {within} have 75 to 90 % inside, {over} more, {len(large) - within - over} less"
    ]
    lines += [f"{n} = {{ slow = {d.slow}, width = {d.width} }}" for n, d in found.items()]
    return "\n".join(lines)
