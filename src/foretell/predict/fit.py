"""Measured runs, read from a table, and the factors on prices under which they are predicted
best.

With runs i (measured mᵢ, predicted pᵢ) and factors k of a `Calibration`, this is made least:

    Σ (ln pᵢ/mᵢ)² / NOISE²  +  Σ ((pᵢⱼ − mᵢⱼ)/mᵢ)² / PART²  +  Σ (ln k)² / PRIOR²

One run cannot tell seven numbers: a factor stays at 1 unless a run insists, and what could be
blamed on two factors is shared between them. A run that also says how long its work, its messages
and its update took (parts j) tells them apart, also where one hides behind another; only then may
the update differ from other work.
Gauss–Newton in ln k, steps halved until they help.

Measured runs as a person writes them down: a table, a line each.

    workload,on,plan,step_s
    resnet50:image=226,abci:nodes=2,"dp=8,overlap=no,global_batch=512",0.2486

CSV with such a head, or JSON, an object a line. `workload` and `on` may be left to the command.
Instead of `step_s`: `samples_per_s`, or `epoch_s` with `samples` (of an epoch).
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import asdict
from numpy.typing import NDArray

from foretell import portable
from foretell.cluster import Calibration, Cluster
from foretell.cluster import load as load_cluster
from foretell.errors import InputError
from foretell.graph import Kind, Phase
from foretell.io import decode, read_lines, read_text
from foretell.plan import Plan, check, lower, read
from foretell.predict.predict import predict
from foretell.workload import Workload
from foretell.workload import load as load_workload

_HINT = "each row has workload, on, plan, and step_s (or samples_per_s, or epoch_s and samples)"


_TIMES = ("step_s", "samples_per_s", "epoch_s", "samples")
Array = NDArray[np.float64]
FACTORS = ("compute", "host", "update", "comm", "alpha", "beta", "inside")
NOISE = 0.03  # of ln seconds: how far two runs of the same lie apart
PART = 0.05  # of a step: how well some that were noted say what all are spent on
PARTS = ("compute_s", "talk_s", "update_s")
PRIOR = math.log(2)  # twice or half as long as priced is one standard deviation
_FIXED = 1e-6  # in place of it for a factor that no run can tell from others
_ROUNDS = 12
_DIGITS = 6  # of what a solver gives: the same on every CPU
_NUDGE = 0.02  # in ln k: beyond rounding, below what changes an algorithm


class _Row(msgspec.Struct):
    """A line of JSON: what was run, where, how, and how long it took."""

    workload: str = ""
    on: str = ""
    plan: str = ""
    step_s: float | str | None = None
    samples_per_s: float | str | None = None
    epoch_s: float | str | None = None
    samples: float | str | None = None


def table(path: Path, workload: str = "", on: str = "") -> list[Run]:
    """The runs of a table; `workload` and `on` where its rows do not say."""
    rows = _rows(path)
    if not rows:
        raise InputError(f"`{path}` has no runs", hint=_HINT)
    models: dict[str, Workload] = {}
    machines: dict[str, Cluster] = {}
    found = []
    for number, row in enumerate(rows, 1):
        where = f"run {number} of `{path}`"
        model, cluster = row.get("workload") or workload, row.get("on") or on
        if not model or not cluster or not row.get("plan"):
            raise InputError(f"{where} does not say workload, cluster or plan", hint=_HINT)
        models.setdefault(model, load_workload(model, scripts=model == workload))
        machines.setdefault(cluster, load_cluster(cluster))
        plan = check(read(row["plan"]), models[model], machines[cluster])
        seconds = _seconds(row, plan.global_batch, where)
        found.append(Run(models[model], machines[cluster], plan, seconds))
    return found


def _rows(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".csv":
        return _csv_rows(read_text(path, what="table of runs"), path)
    lines = read_lines(path, "table of runs")
    return [asdict(decode(raw, _Row, f"line {k} of `{path}`", _HINT)) for k, raw in lines]


def _csv_rows(text: str, path: Path) -> list[dict[str, Any]]:
    try:
        rows = [dict(row) for row in csv.DictReader(io.StringIO(text), restval="")]
    except csv.Error as error:
        raise InputError(f"`{path}` is no table of runs: {error}", hint=_HINT) from None
    if any(None in row for row in rows):
        raise InputError(f"`{path}` has a row with more fields than its head", hint=_HINT)
    return rows


def _seconds(row: dict[str, Any], batch: int, where: str) -> float:
    """Seconds of a step, however the row tells it."""
    given = {k: _number(row[k], k, where) for k in _TIMES if row.get(k) not in (None, "")}
    if "step_s" in given:
        return given["step_s"]
    if "samples_per_s" in given:
        return batch / given["samples_per_s"]
    if "epoch_s" in given and "samples" in given:
        return given["epoch_s"] * batch / given["samples"]
    raise InputError(f"{where} does not say how long it took", hint=_HINT)


def _number(value: Any, name: str, where: str) -> float:
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not 0 < found < math.inf:
        raise InputError(f"`{name}` is `{value}` in {where}", hint="write a number above 0")
    return found


@dataclass(frozen=True)
class Run:
    """One measured step."""

    workload: Workload
    cluster: Cluster
    plan: Plan
    seconds: float
    parts: Mapping[str, float] = field(default_factory=dict)  # of `PARTS`, hidden or not
    noise: float = 0.0  # of ln seconds, where that is more than of others
    unsure: float = 0.0  # of its parts, as a share of the step, likewise

    @property
    def name(self) -> str:
        """A label of the run: workload and plan."""
        return f"{self.workload.name} on {self.cluster.name}: {self.plan}"


@dataclass(frozen=True)
class Factor:
    """One factor: what it is, how sure, and how much of the steps hangs on it."""

    name: str
    value: float
    sigma: float  # of its logarithm
    moves: float  # mean change of the runs' steps by it, relative


@dataclass(frozen=True)
class Fitted:
    """Calibration factors fitted to runs."""

    calibration: Calibration
    factors: tuple[Factor, ...]
    runs: tuple[Run, ...]
    before: tuple[float, ...]  # seconds predicted without it
    after: tuple[float, ...]

    def accuracy(self, predicted: Sequence[float]) -> float:
        """1 − mean |predicted − measured| / measured."""
        off = [abs(t / r.seconds - 1) for t, r in zip(predicted, self.runs, strict=True)]
        return 1 - sum(off) / len(off)


def fit(
    runs: Sequence[Run],
    noise: float = NOISE,
    progress: Callable[[str, float], None] = lambda words, share: None,
) -> Fitted:
    """Learn from runs. `tree_bytes` of their clusters' own calibrations is kept.

    `progress` is called with each round; it mostly ends before the last.
    """
    _check(runs, noise)
    seen = _Seen.of(runs, noise)
    at = np.zeros(len(FACTORS))
    predicted = before = _predicted(runs, at)
    for k in range(_ROUNDS):
        progress(f"round {k + 1} of at most {_ROUNDS}", k / _ROUNDS)
        slopes = _slopes(runs, at, predicted) / seen.noise[:, None]
        weight = portable.product(slopes.T[:, None], slopes.T) + np.diag(seen.prior**-2)
        pull = -(portable.product(slopes.T, seen.off(predicted)) + at / seen.prior**2)
        step: Array = np.round(np.linalg.solve(weight, pull), _DIGITS).astype(np.float64)
        moved, found = _better(runs, seen, (at, predicted), step)
        done = np.abs(moved - at).max() < 1e-4
        at, predicted = moved, found
        if done:
            break
    slopes = _slopes(runs, at, predicted) / seen.noise[:, None]
    weight = portable.product(slopes.T[:, None], slopes.T) + np.diag(seen.prior**-2)
    sigma = np.round(np.sqrt(np.diag(np.linalg.inv(weight))), _DIGITS)
    sure = np.where(seen.prior < PRIOR, PRIOR, sigma)
    return _fitted(runs, at, sure, before, predicted)


@dataclass(frozen=True)
class _Seen:
    """Measurements of runs in the order of `_predicted`, with their uncertainty."""

    values: Array
    noise: Array
    prior: Array  # of each factor's logarithm

    @classmethod
    def of(cls, runs: Sequence[Run], noise: float) -> _Seen:
        parts = [(s / run.seconds, run.unsure) for run in runs for s in run.parts.values()]
        values = [math.log(run.seconds) for run in runs] + [share for share, _ in parts]
        sure = [max(noise, run.noise) for run in runs] + [max(PART, part) for _, part in parts]
        predicted = any(run.parts for run in runs)
        prior = [PRIOR if predicted or name != "update" else _FIXED for name in FACTORS]
        return cls(np.array(values), np.array(sure), np.array(prior))

    def off(self, predicted: Array) -> Array:
        """How far what is predicted lies from it, in standard deviations."""
        return (predicted - self.values) / self.noise


def _check(runs: Sequence[Run], noise: float) -> None:
    if not runs:
        raise InputError("there are no runs to fit to")
    if not noise > 0:
        raise InputError(f"a noise of {noise}", hint="use a share such as 0.03")
    for run in runs:
        if not 0 < run.seconds < math.inf:
            raise InputError(f"a step of {run.seconds} s measured: {run.name}")


def on(cluster: Cluster, at: Array) -> Cluster:
    """The cluster with factors given by their logarithms."""
    with np.errstate(over="ignore"):  # runs that no factor explains: refused below
        factors = dict(zip(FACTORS, np.exp(at).tolist(), strict=True))
    return cluster.calibrated(replace(cluster.calibration, **factors))


def _predicted(runs: Sequence[Run], at: Array) -> Array:
    """Predictions for runs: ln seconds of each, then their parts over the measured step."""
    steps, parts = [], []
    for run in runs:
        cluster = on(run.cluster, at)
        steps.append(math.log(predict(run.plan, run.workload, cluster).step))
        found = _parts(run, cluster) if run.parts else {}
        parts += [found[name] / run.seconds for name in run.parts]
    return np.array(steps + parts)


def _parts(run: Run, cluster: Cluster) -> dict[str, float]:
    """Seconds of work, messages and update that are predicted of one rank."""
    made = lower(run.plan, run.workload, cluster)
    update, mine = made.phase == Phase.UPDATE, made.rank == 0
    comm = made.kind == Kind.COLLECTIVE
    which = (mine & ~update & ~comm, mine & comm, mine & update)
    return {name: float(made.seconds[w].sum()) for name, w in zip(PARTS, which, strict=True)}


def _slopes(runs: Sequence[Run], at: Array, here: Array) -> Array:
    """How what is predicted follows each factor."""
    nudges = _NUDGE * np.eye(len(at))
    return np.stack([(_predicted(runs, at + nudge) - here) / _NUDGE for nudge in nudges], axis=1)


def _better(
    runs: Sequence[Run], seen: _Seen, here: tuple[Array, Array], step: Array
) -> tuple[Array, Array]:
    """The step, or as much of it as makes things better; where nothing does, none."""
    least = _loss(seen, *here)
    for share in (1.0, 0.5, 0.25, 0.1):
        at = here[0] + share * step
        predicted = _predicted(runs, at)
        if _loss(seen, at, predicted) < least:
            return at, predicted
    return here


def _loss(seen: _Seen, at: Array, predicted: Array) -> float:
    off = seen.off(predicted)
    return float(portable.product(off, off) + ((at / seen.prior) ** 2).sum())


def _fitted(runs: Sequence[Run], at: Array, sigma: Array, before: Array, after: Array) -> Fitted:
    factors = []
    steps = len(runs)
    for i, name in enumerate(FACTORS):
        without = at.copy()
        without[i] = 0.0
        change = (after - _predicted(runs, without))[:steps] if at[i] else np.zeros(steps)
        moves = float(np.mean(np.exp(change) - 1))
        factors.append(Factor(name, float(np.exp(at[i])), float(sigma[i]), moves))
    known = on(runs[0].cluster, at).calibration
    predicted = (tuple(np.exp(values[:steps]).tolist()) for values in (before, after))
    return Fitted(known, tuple(factors), tuple(runs), *predicted)
