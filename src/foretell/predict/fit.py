"""Measured runs fed back: the factors on prices under which they are foretold best.

With runs i (measured mᵢ, foretold pᵢ) and factors k of a `Calibration`, this is made least:

    Σ (ln pᵢ/mᵢ)² / NOISE²  +  Σ (ln k)² / PRIOR²

One run cannot tell six numbers: a factor stays at 1 unless a run insists, and what could be blamed
on two factors is shared between them. Gauss–Newton in ln k, steps halved until they help.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from foretell.cluster import Calibration, Cluster
from foretell.errors import InputError
from foretell.plan import Plan
from foretell.predict.predict import predict
from foretell.workload import Workload

Array = NDArray[np.float64]
FACTORS = ("compute", "host", "talk", "alpha", "beta", "inside")
NOISE = 0.03  # of ln seconds: how far two runs of the same lie apart
PRIOR = math.log(2)  # twice or half as long as priced is one standard deviation
_ROUNDS = 12
_NUDGE = 0.02  # in ln k: beyond rounding, below what changes an algorithm


@dataclass(frozen=True)
class Run:
    """One measured step."""

    workload: Workload
    cluster: Cluster
    plan: Plan
    seconds: float

    @property
    def name(self) -> str:
        """What was run, for a reader."""
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
    """What runs have taught."""

    calibration: Calibration
    factors: tuple[Factor, ...]
    runs: tuple[Run, ...]
    before: tuple[float, ...]  # seconds foretold without it
    after: tuple[float, ...]

    def accuracy(self, told: Sequence[float]) -> float:
        """1 − mean |foretold − measured| / measured."""
        off = [abs(t / r.seconds - 1) for t, r in zip(told, self.runs, strict=True)]
        return 1 - sum(off) / len(off)


def fit(
    runs: Sequence[Run],
    noise: float = NOISE,
    progress: Callable[[str, float], None] = lambda words, share: None,
) -> Fitted:
    """Learn from runs. `tree_bytes` of their clusters' own calibrations is kept.

    `progress` is told of each round; it mostly ends before the last.
    """
    _check(runs, noise)
    target = np.log([run.seconds for run in runs])
    at, off = np.zeros(len(FACTORS)), _logs(runs, np.zeros(len(FACTORS))) - target
    before = np.exp(off + target)
    slopes = _slopes(runs, at, off + target)
    for k in range(_ROUNDS):
        progress(f"round {k + 1} of at most {_ROUNDS}", k / _ROUNDS)
        weight = slopes.T @ slopes / noise**2 + np.eye(len(at)) / PRIOR**2
        pull = -(slopes.T @ off / noise**2 + at / PRIOR**2)
        step: Array = np.linalg.solve(weight, pull).astype(np.float64)
        moved, found = _better(runs, target, (at, off), step, noise)
        done = np.abs(moved - at).max() < 1e-4
        at, off = moved, found
        if done:
            break
        slopes = _slopes(runs, at, off + target)
    sigma = np.sqrt(np.diag(np.linalg.inv(slopes.T @ slopes / noise**2 + np.eye(6) / PRIOR**2)))
    return _fitted(runs, at, sigma, before, off + target)


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
    factors = dict(zip(FACTORS, np.exp(at).tolist(), strict=True))
    return cluster.calibrated(replace(cluster.calibration, **factors))


def _logs(runs: Sequence[Run], at: Array) -> Array:
    return np.log([predict(run.plan, run.workload, on(run.cluster, at)).step for run in runs])


def _slopes(runs: Sequence[Run], at: Array, here: Array) -> Array:
    """How ln seconds of each run follow each factor."""
    nudges = _NUDGE * np.eye(len(at))
    return np.stack([(_logs(runs, at + nudge) - here) / _NUDGE for nudge in nudges], axis=1)


def _better(
    runs: Sequence[Run], target: Array, here: tuple[Array, Array], step: Array, noise: float
) -> tuple[Array, Array]:
    """The step, or as much of it as makes things better; where nothing does, none."""
    least = _loss(*here, noise)
    for share in (1.0, 0.5, 0.25, 0.1):
        at = here[0] + share * step
        off = _logs(runs, at) - target
        if _loss(at, off, noise) < least:
            return at, off
    return here


def _loss(at: Array, off: Array, noise: float) -> float:
    return float(off @ off / noise**2 + at @ at / PRIOR**2)


def _fitted(runs: Sequence[Run], at: Array, sigma: Array, before: Array, after: Array) -> Fitted:
    factors = []
    for i, name in enumerate(FACTORS):
        without = at.copy()
        without[i] = 0.0
        moves = float(np.mean(np.exp(after - _logs(runs, without)) - 1)) if at[i] else 0.0
        factors.append(Factor(name, float(np.exp(at[i])), float(sigma[i]), moves))
    known = on(runs[0].cluster, at).calibration
    return Fitted(
        known, tuple(factors), tuple(runs), tuple(before.tolist()), tuple(np.exp(after).tolist())
    )
