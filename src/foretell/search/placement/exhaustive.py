"""All placements of a small instance, every parameter server by name: the exact optimum."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, product
from math import prod

import numpy as np

from foretell.search.placement.evaluate import Evaluator
from foretell.search.placement.polish import FUSES
from foretell.search.placement.problem import MICROS, Problem
from foretell.search.placement.space import MODES, Placement, with_servers

MOST = 60_000  # placements that are all tried: some seconds
_AT_ONCE = 4096


def count(problem: Problem) -> int:
    """How many placements there are."""
    return prod(len(with_servers(problem, g)) for g in problem.leaders) * len(_steps(problem))


def every(problem: Problem) -> Iterator[Placement]:
    """Each of them."""
    choices = [with_servers(problem, g) for g in problem.leaders]
    for row in product(*choices):
        chosen = dict(zip(problem.leaders, row, strict=True))
        picked = tuple(chosen[group.leader] for group in problem.groups)
        for micros, fuse, mode in _steps(problem):
            yield Placement(picked, micros, fuse, mode)


def _steps(problem: Problem) -> list[tuple[int, float, int]]:
    micros = [m for m in MICROS if m <= problem.batch]
    fuses = FUSES if len(problem.groups) > 1 else FUSES[:1]
    return list(product(micros, fuses, range(len(MODES))))


def best(on: Evaluator) -> tuple[Placement, float]:
    """The quickest of all."""
    rest = every(on.problem)
    found: list[tuple[float, int, Placement]] = []
    while some := list(islice(rest, _AT_ONCE)):
        took = on.many(some)
        i = int(np.argmin(took))
        found.append((took[i], len(found), some[i]))
    seconds, _, placement = min(found)
    return placement, seconds
