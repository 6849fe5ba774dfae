"""Simulated annealing over placements, compiled: ten thousand placements a second and more.

A stroke gives one choice to a run of groups, moves the border between two segments, exchanges two
choices, or changes micro-batches, message size or the dealing-out of samples. Slower placements
pass with exp(−Δ/(T·t)), t falling from `HOT` to `COLD` of a step. The same seed gives the same
answer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from foretell.search.placement import loops, tasks
from foretell.search.placement.evaluate import Evaluator, columns
from foretell.search.placement.polish import FUSES
from foretell.search.placement.problem import MICROS, WAYS, Tables
from foretell.search.placement.space import MODES, Action, Placement, actions, canonical

HOT, COLD = 0.04, 0.001  # shares of a step that a stroke may lose, at the start and at the end


def anneal(on: Evaluator, start: Placement, strokes: int, seed: int) -> tuple[Placement, float]:
    """The best placement met on the way."""
    problem = on.problem
    start = canonical(problem, start)
    sets, ways = (row[0].copy() for row in columns([start]))
    step = np.array([MICROS.index(start.micros), _nearest(start.fuse), start.mode])
    leaders = np.array([group.leader for group in problem.groups])
    limits = np.array([sum(m <= problem.batch for m in MICROS), len(FUSES), len(MODES)])
    seconds = loops_anneal(
        problem.tables, sets, ways, step, leaders, _allowed(on), limits, strokes, seed
    )
    on.evaluations += strokes
    pairs = zip(sets.tolist(), ways.tolist(), strict=True)
    found = Placement(
        tuple(Action(s, w) for s, w in pairs), MICROS[step[0]], FUSES[step[1]], int(step[2])
    )
    return found, float(seconds)


def _nearest(fuse: float) -> int:
    return min(range(len(FUSES)), key=lambda i: abs(min(FUSES[i], 1e12) - min(fuse, 1e12)))


def _allowed(on: Evaluator) -> Any:
    """[g, s, w] what each group may choose."""
    t, count = on.problem.tables, len(on.problem.groups)
    out = np.zeros((count, len(t.size), len(WAYS)), np.bool_)
    for g in range(count):
        for action in actions(on.problem, g):
            out[g, action.devices, action.way] = True
    return out


_FUSES = np.array(FUSES)
_MICROS = np.array(MICROS)


@njit(cache=True)
def loops_anneal(
    t: Tables,
    sets: Any,
    ways: Any,
    step: Any,
    leaders: Any,
    allowed: Any,
    limits: Any,
    strokes: int,
    seed: int,
) -> float:
    """Anneal in place; the best seconds, whose placement is left in `sets`, `ways` and `step`."""
    np.random.seed(seed)  # noqa: NPY002  numba has no other generator that it can seed
    p = tasks.page(len(sets), len(t.kind), MICROS[-1])
    now = loops.score(t, sets, ways, _MICROS[step[0]], _FUSES[step[1]], step[2], p)
    now = now if now > 0 else np.inf
    best, best_sets, best_ways, best_step = now, sets.copy(), ways.copy(), step.copy()
    new_sets, new_ways, new_step = sets.copy(), ways.copy(), step.copy()
    for i in range(strokes):
        if i % 4000 == 3999:  # go on from the best
            sets[:], ways[:], step[:], now = best_sets, best_ways, best_step, best
        new_sets[:], new_ways[:], new_step[:] = sets, ways, step
        stroke(new_sets, new_ways, new_step, leaders, allowed, limits)
        took = loops.score(
            t, new_sets, new_ways, _MICROS[new_step[0]], _FUSES[new_step[1]], new_step[2], p
        )
        if took <= 0:
            continue
        heat = HOT * (COLD / HOT) ** (i / strokes)
        if took <= now or np.random.random() < np.exp((now - took) / (heat * best)):  # noqa: NPY002
            sets[:], ways[:], step[:], now = new_sets, new_ways, new_step, took
            if took < best:
                best = took
                best_sets[:], best_ways[:], best_step[:] = sets, ways, step
    sets[:], ways[:], step[:] = best_sets, best_ways, best_step
    return best


@njit(cache=True)
def stroke(sets: Any, ways: Any, step: Any, leaders: Any, allowed: Any, limits: Any) -> None:
    """One change at random, in place."""
    n = len(sets)
    kind = np.random.random()  # noqa: NPY002
    g = np.random.randint(0, n)  # noqa: NPY002
    if kind < 0.08:
        which = np.random.randint(0, 3)  # noqa: NPY002
        step[which] = np.random.randint(0, limits[which])  # noqa: NPY002
        return
    length = 1 + int(np.random.exponential(n / 8.0))  # noqa: NPY002
    first, last = g, min(n, g + length)
    if kind < 0.45:  # a border moves: the run takes the choice of the group before or behind it
        other = g - 1 if np.random.random() < 0.5 else last  # noqa: NPY002
        if other < 0 or other >= n:
            return
        s, w = sets[other], ways[other]
    elif kind < 0.55:  # two groups exchange their choices, with all that choose as they do
        h = np.random.randint(0, n)  # noqa: NPY002
        exchange(sets, ways, allowed, sets[g], sets[h])
        follow(sets, ways, leaders)
        return
    elif kind < 0.75:  # another way for the same set
        s, w = sets[g], np.random.randint(0, allowed.shape[2])  # noqa: NPY002
        while last > first + 1 and sets[last - 1] != s:
            last -= 1
    else:
        s = np.random.randint(0, allowed.shape[1])  # noqa: NPY002
        w = 0 if np.random.random() < 0.6 else np.random.randint(0, allowed.shape[2])  # noqa: NPY002
    for j in range(first, last):
        if allowed[j, s, w]:
            sets[j], ways[j] = s, w
        elif allowed[j, s, 0]:
            sets[j], ways[j] = s, 0
    follow(sets, ways, leaders)


@njit(cache=True)
def exchange(sets: Any, ways: Any, allowed: Any, a: int, b: int) -> None:
    """Groups on one set go to another, and those there come here."""
    for j in range(len(sets)):
        if sets[j] == a or sets[j] == b:
            s = b if sets[j] == a else a
            if allowed[j, s, ways[j]]:
                sets[j] = s
            elif allowed[j, s, 0]:
                sets[j], ways[j] = s, 0


@njit(cache=True)
def follow(sets: Any, ways: Any, leaders: Any) -> None:
    """Tied groups choose as their leader does."""
    for j in range(len(sets)):
        sets[j], ways[j] = sets[leaders[j]], ways[leaders[j]]
