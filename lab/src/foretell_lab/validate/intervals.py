"""What steps take in the field, and the widths of intervals, fitted to sources that set no price.

    foretell validate --intervals

Two fits, both with each source left out in turn: first by how much steps are slower than predicted
in the median (foretell/plan/field.toml), by the absolute deviation; then, of what is left, the ends
of intervals (foretell/predict/interval.toml). `answered_left_out` answers each source with numbers
fitted without it, as `validate --unseen` and its pages print it.

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

Ends that suit the sources they were fitted to hold fewer of the next: all widths grow by the one
number with which 80 % of all rows, weighed as in the fit, lie inside intervals fitted without their
source (`width_factor`; of a source that is left out, by that of the others).

Rows of a source share its bias, which is not known before the source is looked at. So that even
intervals of the true distribution hold more than 90 % of one source and less than 75 % of another:
`coverage_by_chance` draws sources whose biases and rows spread as ours do, in units of their
intervals.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from foretell.plan.framework import field_slowdowns
from foretell.predict import Prediction
from foretell.predict.predict import EIGHTY_PERCENT, Distance, interval, shipped_distances
from foretell.report.words import table as text_table
from foretell_lab.validate import reported, unseen

Array = npt.NDArray[np.float64]
FULL = 10  # rows that make a whole source
OUTSIDE = 0.1  # share of rows that either end leaves outside
BLUNT = 0.01  # of ln(measured / predicted): how far the loss is rounded where it bends
BLUNT_MIDDLE = 0.005  # the same of the absolute deviation
PRICE = 0.01  # of large numbers
START, MOST = 0.06, 0.8  # widths
# Every distance widens. What one source says of a framework says little of the next: medians of
# sources under one profile have a standard deviation of 0.070 (27 sources under six profiles), 0.08
# at the upper end of its 80 % limit.
LEAST, LEAST_OF = 0.02, {"lone": 0.08}
LEAST_INSIDE, MOST_INSIDE = 0.75, 0.9  # of a source's rows, where intervals hold
_NORMAL = 1.4826  # standard deviations of a normal distribution to a median absolute deviation
SLOW = (0.0, 0.5)  # range of means: no distance makes steps faster than predicted


class Fitted(NamedTuple):
    """By how much steps are slower at each distance, and the intervals around them."""

    slowdowns: Mapping[str, float]
    distance: Mapping[str, Distance]

    def log_shift(self, away: Mapping[str, float]) -> float:
        """ln of how many times as long a step takes at some distances."""
        return sum(each * away.get(name, 0.0) for name, each in self.slowdowns.items())

    def widen(self, times: float) -> Fitted:
        """The same with wider intervals."""
        grown = {n: Distance(d.slow, round(times * d.width, 3)) for n, d in self.distance.items()}
        return self._replace(distance=grown)


@dataclass(frozen=True)
class Answer:
    """One measured step beside its prediction."""

    source: str
    log_error: float  # ln(measured / predicted), before anything is moved
    away: dict[str, float]
    share: float = 1.0  # of its source's weight

    def is_inside(self, fitted: Fitted) -> bool:
        """Whether the measurement lies in the interval."""
        low, high = interval(1.0, self.away, fitted.distance)
        return low <= math.exp(self.log_error - fitted.log_shift(self.away)) <= high

    def position(self, fitted: Fitted) -> float:
        """How far the measurement is from the middle, the interval reaching from -1 to 1."""
        low, high = (math.log(end) for end in interval(1.0, self.away, fitted.distance))
        return (self.log_error - fitted.log_shift(self.away) - (low + high) / 2) * 2 / (high - low)


def first_answers() -> list[Answer]:
    """Reported sources as they were answered before anything was changed."""
    path = files("foretell_lab.validate").joinpath("tables", "first_answers.csv")
    rows = csv.DictReader(path.read_text("utf-8").splitlines())
    return [
        Answer(
            r["source"],
            float(r["off"]),
            {k: v for k in shipped_distances() if (v := float(r.get(k, 0)))},
            0.5,
        )
        for r in rows
    ]


def current_answers(rows: Mapping[str, Sequence[unseen.Row]]) -> list[Answer]:
    """Sources as they are answered today."""
    known, as_shipped = reported.sources(), Fitted(field_slowdowns(), shipped_distances())
    return [
        Answer(
            name,
            math.log(row.seconds / row.found.step) + as_shipped.log_shift(row.found.away),
            row.found.away,
            0.5 if name in known else 1.0,
        )
        for name, some in rows.items()
        for row in some
    ]


def fit(rows: Sequence[Answer]) -> Fitted:
    """How much slower steps are, and the ends of intervals around them."""
    found = Fitted(fit_slowdowns(rows), {})
    left = [replace(row, log_error=row.log_error - found.log_shift(row.away)) for row in rows]
    return found._replace(distance=fit_widths(left))


def fit_slowdowns(rows: Sequence[Answer]) -> dict[str, float]:
    """By how much steps are slower at each distance, in the median."""
    from scipy.optimize import minimize

    names, weight = list(field_slowdowns()), _weights(rows)
    away = np.array([[row.away.get(name, 0.0) for name in names] for row in rows])
    off = np.array([row.log_error for row in rows])

    def loss(x: Array) -> tuple[float, Array]:
        left = (off - away @ x) / BLUNT_MIDDLE
        total = BLUNT_MIDDLE * float(weight @ (np.logaddexp(0, -left) + left / 2))
        tilt = np.tanh(left / 2) / 2
        return total + PRICE * float(x @ x), 2 * PRICE * x - away.T @ (weight * tilt)

    start, bounds = np.full(len(names), START / 2), [SLOW] * len(names)
    found = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds).x
    return {name: round(float(x), 3) for name, x in zip(names, found, strict=True)}


def fit_widths(rows: Sequence[Answer]) -> dict[str, Distance]:
    """Every distance's mean and width of what is left."""
    from scipy.optimize import minimize

    names = list(shipped_distances())
    away = np.array([[row.away.get(name, 0.0) for name in names] for row in rows])
    off, weight = np.array([row.log_error for row in rows]), _weights(rows)
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
    bounds = [SLOW] * many + [(low, math.log(MOST)) for low in least]
    start = np.maximum(start, [low for low, _ in bounds])
    found = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds).x
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


def leave_one_out(rows: Sequence[Answer]) -> tuple[Fitted, dict[str, Fitted]]:
    """What is fitted to all sources, and for each of them what is fitted to the others."""
    names = {row.source: _runs_of(row.source) for row in rows}
    counted = [row for row in rows if reported.is_fitted(row.source)]
    each = {own: fit(_other_sources(counted, own)) for own in dict.fromkeys(names.values())}
    times = {own: width_factor(_other_sources(counted, own), each) for own in each}
    apart = {name: each[own].widen(times[own]) for name, own in names.items()}
    return fit(counted).widen(width_factor(counted, each)), apart


def _other_sources(rows: Sequence[Answer], source: str) -> list[Answer]:
    return [row for row in rows if _runs_of(row.source) != source]


def width_factor(rows: Sequence[Answer], apart: Mapping[str, Fitted]) -> float:
    """By how much widths grow for 80 % to lie inside intervals fitted without their source."""
    beyond = np.abs([row.position(apart[_runs_of(row.source)]) for row in rows])
    order = np.argsort(beyond)
    at = int(np.searchsorted(np.cumsum(_weights(rows)[order]), 1 - 2 * OUTSIDE))
    return max(float(beyond[order][at]), 1.0)


def answered_left_out(rows: Mapping[str, Sequence[unseen.Row]]) -> dict[str, list[unseen.Row]]:
    """Every source answered with numbers that were fitted without it."""
    as_shipped = Fitted(field_slowdowns(), shipped_distances())
    apart = leave_one_out([*current_answers(rows), *first_answers()])[1]
    return {
        name: [replace(row, found=_answered(row.found, as_shipped, apart[name])) for row in some]
        for name, some in rows.items()
    }


def _answered(found: Prediction, as_shipped: Fitted, apart: Fitted) -> Prediction:
    """A prediction by other numbers."""
    times = math.exp(apart.log_shift(found.away) - as_shipped.log_shift(found.away))
    low, high = interval(found.step * times, found.away, apart.distance)
    parts = {name: seconds * times for name, seconds in found.breakdown.items()}
    return replace(found, step=found.step * times, low=low, high=high, breakdown=parts)


def report(truth: Path) -> dict[str, Any]:
    """All numbers fitted anew, and each source with and without it in the fit."""
    now, first = current_answers(unseen.answered(truth)), first_answers()
    (found, each), as_shipped = (
        leave_one_out([*now, *first]),
        Fitted(field_slowdowns(), shipped_distances()),
    )
    values, beyond = dict[str, Any](), list[Array]()
    for name, apart in each.items():
        mine, first_rows = ([row for row in rows if row.source == name] for rows in (now, first))
        beyond += [np.array([row.position(apart) for row in mine])] if len(mine) >= FULL else []
        values[name] = {
            "rows": len(mine),
            "inside": _inside(mine, found),
            "left_out": _inside(mine, apart),
            "today": _inside(mine, as_shipped),
            "unmoved": _error(mine, apart._replace(slowdowns={})),
            "moved": _error(mine, apart),
        } | (
            {
                "first": len(first_rows),
                "first_left_out": _inside(first_rows, apart),
                "first_unmoved": _error(first_rows, apart._replace(slowdowns={})),
                "first_moved": _error(first_rows, apart),
            }
            if first_rows
            else {}
        )
    chance = coverage_by_chance(beyond)
    distance = {name: each._asdict() for name, each in found.distance.items()}
    said = {"slower": found.slowdowns, "distance": distance, "chance": chance._asdict()}
    return said | {"sources": values, "text": _text(found, values, chance)}


DRAWS = 2000


class ByChance(NamedTuple):
    """Sources that have 75 to 90 % inside intervals of the true distribution."""

    between: float  # spread of biases, of the interval's half width
    within: float  # spread of rows around the bias of their source
    mean: float
    ends: tuple[float, float]  # 5 and 95 of 100 draws have fewer


def coverage_by_chance(beyond: Sequence[Array]) -> ByChance:
    """How many sources would have 75 to 90 % inside were the distribution known exactly."""
    middles = np.array([np.median(rows) for rows in beyond])
    around = np.concatenate([rows - np.median(rows) for rows in beyond])
    between, within = (float(_NORMAL * np.median(np.abs(x))) for x in (middles, around))
    chance, found = np.random.default_rng(0), list[float]()
    reach = EIGHTY_PERCENT * math.hypot(between, within)
    for _ in range(DRAWS):
        drawn = (chance.normal(chance.normal(0, between), within, len(rows)) for rows in beyond)
        shares = [float(np.mean(np.abs(rows) < reach)) for rows in drawn]
        found.append(sum(LEAST_INSIDE <= round(x, 2) <= MOST_INSIDE for x in shares))
    low, high = np.quantile(found, (0.05, 0.95))
    return ByChance(between, within, float(np.mean(found)), (float(low), float(high)))


def _runs_of(source: str) -> str:
    """The source whose runs it has: some are asked in two ways."""
    return "foundry-h100" if source == "foundry-by-default" else source


def _inside(rows: Sequence[Answer], fitted: Fitted) -> float:
    return float(np.mean([row.is_inside(fitted) for row in rows]))


def _error(rows: Sequence[Answer], fitted: Fitted) -> float:
    """The median error of a source."""
    return float(np.median([abs(math.expm1(fitted.log_shift(r.away) - r.log_error)) for r in rows]))


COLUMNS = {
    "rows": "rows>", "unmoved": "as priced>", "moved": "moved>", "first_unmoved": "first answers>",
    "first_moved": "moved>", "inside": "in the fit>", "left_out": "left out>",
    "first_left_out": "first, left out>", "today": "as shipped>",
}  # fmt: skip


def _text(found: Fitted, values: dict[str, Any], chance: ByChance) -> str:
    rows = [(name, *(_cell(key, v.get(key)) for key in COLUMNS)) for name, v in values.items()]
    lines = [text_table(("source", *COLUMNS.values()), rows)]
    lines.append(_medians("today", values, "unmoved", "moved"))
    lines.append(_medians("first answers", values, "first_unmoved", "first_moved"))
    large = [v["left_out"] for v in values.values() if v["rows"] >= FULL]
    lines.append(
        f"{len(large)} sources of {FULL} rows or more, each left out: {_count_inside(large)}"
    )
    lines.append(
        f"were the distribution known exactly: {chance.mean:.0f} of them ({chance.ends[0]:.0f} to"
        f" {chance.ends[1]:.0f}), biases spread by {chance.between:.2f} of an interval's half,"
        f" rows around them by {chance.within:.2f}"
    )
    first_rows = [v for v in values.values() if v.get("first", 0)]
    every = sum(v["first"] for v in first_rows)
    inside = sum(v["first"] * v["first_left_out"] for v in first_rows) / every
    large = [v["first_left_out"] for v in first_rows if v["first"] >= FULL]
    lines.append(
        f"{every} first answers, left out: {100 * inside:.1f} % inside; {_count_inside(large)}"
    )
    lines += [f"{name} = {each}" for name, each in found.slowdowns.items()]
    lines += [f"{n} = {{ slow = {d.slow}, width = {d.width} }}" for n, d in found.distance.items()]
    return "\n".join(lines)


def _count_inside(shares: Sequence[float]) -> str:
    """How many sources have as many rows inside as intervals should hold."""
    over = sum(round(share, 2) > MOST_INSIDE for share in shares)
    under = sum(round(share, 2) < LEAST_INSIDE for share in shares)
    return f"{len(shares) - over - under} have 75 to 90 % inside, {over} more, {under} less"


def _medians(words: str, values: dict[str, Any], *keys: str) -> str:
    """Medians of sources before and after steps are moved."""
    some = [[v[key] for key in keys] for v in values.values() if keys[0] in v]
    each = [
        f"median {100 * np.median(one):.1f} %, mean {100 * np.mean(one):.1f} %,"
        f" {sum(error <= 0.1 for error in one)} of {len(one)} within 10 %"
        for one in zip(*some, strict=True)
    ]
    return f"medians of sources, {words}: {'; moved: '.join(each)}"


def _cell(key: str, value: float | None) -> str:
    if value is None:
        return ""
    return str(value) if key == "rows" else f"{100 * value:.{int('moved' in key)}f} %"
