"""The widths of intervals, fitted to sources that nothing was fitted to, each left out in turn.

    foretell validate --intervals

A row is one measured step: ln(measured / predicted) and how far its question was from what had been
measured (→ foretell.predict.interval). Reported sources are taken as they were first answered,
before any price was changed for them (tables/first_answers.csv); the others as they are answered
now. All rows of a source share its machines, software and author, so that a source counts as one
whatever its length: rows weigh 1 / rows, less where they are fewer than FULL.

Fitted is the likelihood of a Student t distribution (sources far off pull less) with `slow` and
`width` of every distance, and a price on large ones, for what few sources have is hardly known.
`left out` is the share of a source's rows inside intervals fitted without it.
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

from foretell.predict.interval import Distance, interval, shipped
from foretell.report.words import table as text_table
from foretell_lab.validate import reported, unseen

Array = npt.NDArray[np.float64]
FULL = 10  # rows that make a whole source
FREEDOM = 4  # degrees of freedom of the distribution that is fitted
PRICE = 0.04  # of large numbers, a source
START, LEAST, MOST = 0.08, 0.03, 0.8  # widths: every distance widens
SLOW = (0.0, 0.5)  # range of means: no distance makes steps faster than predicted


@dataclass(frozen=True)
class Answer:
    """One measured step beside its prediction."""

    source: str
    off: float  # ln(measured / predicted)
    away: dict[str, float]

    def is_inside(self, fitted: dict[str, Distance]) -> bool:
        """Whether the measurement lies in the interval."""
        low, high = interval(1.0, self.away, fitted)
        return low <= math.exp(self.off) <= high


def first_answers() -> list[Answer]:
    """Reported sources as they were answered before anything was changed."""
    path = files("foretell_lab.validate").joinpath("tables", "first_answers.csv")
    rows = csv.DictReader(path.read_text("utf-8").splitlines())
    return [
        Answer(r["source"], float(r["off"]), {k: float(r[k]) for k in shipped() if float(r[k])})
        for r in rows
    ]


def answers_now(truth: Path, names: Sequence[str]) -> list[Answer]:
    """Sources as they are answered today."""
    return [
        Answer(name, math.log(row.seconds / row.found.step), row.found.away)
        for name in names
        for row in unseen.SOURCES[name](truth)
    ]


def fit(rows: Sequence[Answer]) -> dict[str, Distance]:
    """Every distance's mean and width."""
    from scipy.optimize import minimize

    names = list(shipped())
    away = np.array([[row.away.get(name, 0.0) for name in names] for row in rows])
    off, weight = np.array([row.off for row in rows]), _weights(rows)
    many, sources = len(names), len({row.source for row in rows})

    def loss(x: Array) -> float:
        slow, variance = x[:many], np.exp(2 * x[many:])
        sd = np.sqrt(away**2 @ variance)
        z = (off - away @ slow) / sd
        likely = -np.log(sd) - (FREEDOM + 1) / 2 * np.log1p(z * z / (FREEDOM - 2))
        dear = 2 * sources * float((slow[1:] ** 2).sum()) + 5 * float(variance[1:].sum())
        return PRICE * dear - float(weight @ likely)

    start = np.r_[np.zeros(many), np.full(many, math.log(START))]
    ends = [SLOW] * many + [(math.log(LEAST), math.log(MOST))] * many
    found = minimize(loss, start, method="L-BFGS-B", bounds=ends).x
    pairs = zip(found[:many], np.exp(found[many:]), strict=True)
    return {n: Distance(round(float(a), 3), round(float(b), 3)) for n, (a, b) in zip(names, pairs, strict=True)}  # fmt: skip  # noqa: E501


def _weights(rows: Sequence[Answer]) -> Array:
    count: dict[str, int] = {}
    for row in rows:
        count[row.source] = count.get(row.source, 0) + 1
    return np.array([min(count[row.source], FULL) / FULL / count[row.source] for row in rows])


def report(truth: Path) -> dict[str, Any]:
    """Distances fitted anew, and coverage of each source with and without it in the fit."""
    others = [name for name in unseen.SOURCES if name not in reported.sources()]
    rows = [*answers_now(truth, others), *first_answers()]
    found, values = fit(rows), {}
    today = {name: answers_now(truth, [name]) for name in reported.sources()}
    for name in dict.fromkeys(row.source for row in rows):
        mine = [row for row in rows if row.source == name]
        apart = fit([row for row in rows if row.source != name])
        values[name] = {
            "rows": len(mine),
            "inside": _inside(mine, found),
            "left_out": _inside(mine, apart),
            "today": _inside(today.get(name, mine), shipped()),
        }
    return {"distance": {n: d._asdict() for n, d in found.items()}, "sources": values,
            "text": _text(found, values)}  # fmt: skip


def _inside(rows: Sequence[Answer], fitted: dict[str, Distance]) -> float:
    return float(np.mean([row.is_inside(fitted) for row in rows]))


def _text(found: dict[str, Distance], values: dict[str, Any]) -> str:
    heads = ("source", "rows>", "in the fit>", "left out>", "today, as shipped>")
    shares = ("inside", "left_out", "today")
    rows = [
        (name, str(v["rows"]), *(f"{100 * v[key]:.0f} %" for key in shares))
        for name, v in values.items()
    ]
    large = [v["left_out"] for v in values.values() if v["rows"] >= FULL]
    enough = sum(share >= 0.75 for share in large)
    lines = [text_table(heads, rows)]
    lines += [f"{enough} of {len(large)} sources of {FULL} rows or more: 75 % or more, left out"]
    lines += [f"{n} = {{ slow = {d.slow}, width = {d.width} }}" for n, d in found.items()]
    return "\n".join(lines)
