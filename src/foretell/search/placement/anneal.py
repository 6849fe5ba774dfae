"""Simulated annealing over placements, compiled, and the descent that follows it.

A stroke gives one choice to a run of groups, moves the border between two segments, exchanges two
choices, names a parameter server, or changes micro-batches, message size or the split of
samples. Slower placements pass with exp(−Δ/(T·t)), t falling from `HOT` to `COLD` of a step. The
same seed gives the same answer.

Descent: change what can be changed in one stroke until nothing helps.

Strokes: one group, a run of groups from here to the end of its segment or to either end of the
model, all groups; who serves them; micro-batches, message size, and how samples are split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np

from foretell.compiled import B3, I1, I2, compiled
from foretell.search.placement import evaluate, moves
from foretell.search.placement.evaluate import Evaluator, columns
from foretell.search.placement.problem import (
    MICROS,
    MODES,
    NO_SERVER,
    PS,
    WAYS,
    Action,
    Placement,
    Tables,
    actions,
    canonical,
    servers,
)

FUSES = (0.0, 4 * 2**20, 25 * 2**20, 64 * 2**20, 256 * 2**20, inf)
LEAST = 1e-6  # relative gain that counts as one
Allowed = Callable[[Action], bool]


_FUSES = np.array(FUSES)
_MICROS = np.array(MICROS)


def polish(
    on: Evaluator, start: Placement, most: int = 20_000, allowed: Allowed | None = None
) -> tuple[Placement, float]:
    """The best that single strokes lead to, within about so many simulations."""
    best, seconds = start, on.seconds(start)
    limit = on.evaluations + most
    improved = True
    while improved and on.evaluations < limit:
        improved = False
        for g in (-1, *on.problem.leaders):
            tried = list(whole(on, best) if g < 0 else _strokes(on, best, g, allowed))
            took = on.many(tried)
            i = int(np.argmin(took))
            if took[i] < seconds * (1 - LEAST):
                best, seconds, improved = tried[i], took[i], True
            if on.evaluations >= limit:
                break
    return best, seconds


def whole(on: Evaluator, now: Placement) -> Iterator[Placement]:
    """Changes of the whole step."""
    for micros in MICROS:
        if micros <= on.problem.batch:
            yield replace(now, micros=micros)
    for fuse in FUSES:
        yield replace(now, fuse=fuse)
    for mode in range(len(MODES)):
        yield replace(now, mode=mode)


def _strokes(on: Evaluator, now: Placement, g: int, allowed: Allowed | None) -> Iterator[Placement]:
    """All changes that begin at one group, and none."""
    yield now
    n = len(now.actions)
    runs = dict.fromkeys((range(g, g + 1), range(g, n), range(g + 1), *_segment(now, g)))
    for action in (*actions(on.problem, g), *_served(on, now, g)):
        if allowed is None or allowed(action):
            for run in runs:
                yield now.but(run, action)


def _served(on: Evaluator, now: Placement, g: int) -> Iterator[Action]:
    """The choice of a group with each server by name; nothing where nothing serves it."""
    mine = now.actions[g]
    for place in servers(on.problem, now, mine.devices) if mine.way == PS else ():
        yield mine._replace(server=place)


def _segment(now: Placement, g: int) -> tuple[range, range]:
    """From a group to either end of those that choose as it does."""
    first, last = g, g + 1
    mine = now.actions[g][:2]
    while first > 0 and now.actions[first - 1][:2] == mine:
        first -= 1
    while last < len(now.actions) and now.actions[last][:2] == mine:
        last += 1
    return range(first, g + 1), range(g, last)


def simplified(on: Evaluator, start: Placement) -> tuple[Placement, float]:
    """The same seconds in fewer words: choices like the neighbour's, or plain all-reduce."""
    best, seconds = start, on.seconds(start)
    for g in range(len(start.actions)):
        mine = best.actions[g]
        plain = Action(mine.devices, 0)
        around = [best.actions[g - 1]] if g else []
        for action in (*around, plain):
            other = best.but((g,), action)
            if action != mine and on.seconds(other) <= seconds:
                best, seconds = other, on.seconds(other)
                break
    return best, seconds


HOT, COLD = 0.04, 0.001  # shares of a step that a stroke may lose, at the start and at the end


def anneal(on: Evaluator, start: Placement, strokes: int, seed: int) -> tuple[Placement, float]:
    """The best placement met on the way."""
    problem = on.problem
    start = canonical(problem, start)
    chosen = np.stack([row[0] for row in columns([start])])
    step = np.array([MICROS.index(start.micros), _nearest(start.fuse), start.mode])
    leaders = np.array([group.leader for group in problem.groups])
    limits = np.array([sum(m <= problem.batch for m in MICROS), len(FUSES), len(MODES)])
    seconds = loops_anneal(
        problem.tables, chosen, step, leaders, _allowed(on), limits, strokes, seed
    )
    on.evaluations += strokes
    rows = tuple(Action(*row) for row in chosen.T.tolist())
    found = Placement(rows, MICROS[step[0]], FUSES[step[1]], int(step[2]))
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


@compiled
def loops_anneal(
    t: Tables, chosen: I2, step: I1, leaders: I1, allowed: B3, limits: I1, strokes: int, seed: int
) -> float:
    """Anneal in place; the best seconds, whose placement is left in `chosen` and `step`.

    `chosen` has a row each for sets, ways and servers.
    """
    np.random.seed(seed)  # noqa: NPY002
    p = moves.page(t, MICROS[-1])
    now = scored(t, chosen, step, p)
    now = now if now > 0 else np.inf
    best, best_chosen, best_step = now, chosen.copy(), step.copy()
    new, new_step = chosen.copy(), step.copy()
    for i in range(strokes):
        if i % 4000 == 3999:  # go on from the best
            chosen[:], step[:], now = best_chosen, best_step, best
        new[:], new_step[:] = chosen, step
        stroke(t, new, new_step, leaders, allowed, limits)
        took = scored(t, new, new_step, p)
        if took <= 0:
            continue
        heat = HOT * (COLD / HOT) ** (i / strokes)
        if took <= now or np.random.random() < np.exp((now - took) / (heat * best)):  # noqa: NPY002
            chosen[:], step[:], now = new, new_step, took
            if took < best:
                best = took
                best_chosen[:], best_step[:] = chosen, step
    chosen[:], step[:] = best_chosen, best_step
    return best


@compiled
def scored(t: Tables, chosen: Any, step: Any, p: Any) -> Any:
    """Seconds of what stands in some rows."""
    micros, fuse = _MICROS[step[0]], _FUSES[step[1]]
    return evaluate.score(t, chosen[0], chosen[1], chosen[2], micros, fuse, step[2], p)


@compiled
def stroke(t: Tables, chosen: Any, step: Any, leaders: Any, allowed: Any, limits: Any) -> None:
    """One change at random, in place."""
    sets, ways, servers = chosen
    n = len(sets)
    kind = np.random.random()  # noqa: NPY002
    g = np.random.randint(0, n)  # noqa: NPY002
    if kind < 0.08:
        which = np.random.randint(0, 3)  # noqa: NPY002
        step[which] = np.random.randint(0, limits[which])  # noqa: NPY002
        return
    length = 1 + int(np.random.exponential(n / 8.0))  # noqa: NPY002
    first, last = g, min(n, g + length)
    server = NO_SERVER
    s: int
    w: int
    if kind < 0.45:  # a border moves: the run takes the choice of the group before or behind it
        other = g - 1 if np.random.random() < 0.5 else last  # noqa: NPY002
        if other < 0 or other >= n:
            return
        s, w, server = sets[other], ways[other], servers[other]
    elif kind < 0.55:  # two groups exchange their choices, with all that choose as they do
        h = np.random.randint(0, n)  # noqa: NPY002
        exchange(sets, ways, allowed, sets[g], sets[h])
        follow(chosen, leaders)
        return
    elif kind < 0.75:  # another way for the same set
        s, w = sets[g], np.random.randint(0, allowed.shape[2])  # noqa: NPY002
        while last > first + 1 and sets[last - 1] != s:
            last -= 1
    else:
        s = np.random.randint(0, allowed.shape[1])  # noqa: NPY002
        w = 0 if np.random.random() < 0.6 else np.random.randint(0, allowed.shape[2])  # noqa: NPY002
    if w == PS and np.random.random() < 0.5:  # noqa: NPY002  one server by name; else split
        server = np.random.randint(0, len(t.cell_of))  # noqa: NPY002
    for j in range(first, last):
        if allowed[j, s, w]:
            sets[j], ways[j], servers[j] = s, w, server
        elif allowed[j, s, 0]:
            sets[j], ways[j] = s, 0
    follow(chosen, leaders)


@compiled
def exchange(sets: Any, ways: Any, allowed: Any, a: int, b: int) -> None:
    """Groups on one set go to another, and those there come here."""
    for j in range(len(sets)):
        if sets[j] == a or sets[j] == b:
            s = b if sets[j] == a else a
            if allowed[j, s, ways[j]]:
                sets[j] = s
            elif allowed[j, s, 0]:
                sets[j], ways[j] = s, 0


@compiled
def follow(chosen: Any, leaders: Any) -> None:
    """Tied groups choose as their leader does."""
    for j in range(chosen.shape[1]):
        chosen[:, j] = chosen[:, leaders[j]]
