"""Descent: change what can be changed in one stroke until nothing helps.

Strokes: one group, a run of groups from here to the end of its segment or to either end of the
model, all groups; who serves them; micro-batches, message size, and how samples are split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf

import numpy as np

from foretell.search.placement.evaluate import Evaluator
from foretell.search.placement.problem import MICROS, PS
from foretell.search.placement.space import MODES, Action, Placement, actions, servers

FUSES = (0.0, 4 * 2**20, 25 * 2**20, 64 * 2**20, 256 * 2**20, inf)
LEAST = 1e-6  # relative gain that counts as one
Allowed = Callable[[Action], bool]


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
