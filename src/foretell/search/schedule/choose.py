"""Recompute, offload and the like as decisions: which choices to take, beside the schedule itself.

Choices are taken one by one, each time the one that shortens the makespan most (ties: the one
that needs least memory), and once all together; the best of what was met is kept. With `n`
choices that is at most `n(n + 1)/2 + 2` schedules.
"""

from collections.abc import Callable

from foretell.errors import InfeasibleError
from foretell.search.schedule.problem import Problem
from foretell.search.schedule.schedule import Schedule

Found = tuple[tuple[str, ...], Schedule]


def choose(problem: Problem, find: Callable[[Problem], Schedule]) -> Found:
    """The choices to take and the schedule with them; `find` schedules what has no choices."""
    names = [c.name for c in problem.choices]
    every = _tried(problem, tuple(names), find)
    best = _better(_tried(problem, (), find), every)
    taken: tuple[str, ...] = ()
    while len(taken) < len(names):
        steps = [_tried(problem, (*taken, n), find) for n in names if n not in taken]
        step = min((s for s in steps if s is not None), key=_cost, default=None)
        if step is None or (best is not None and _cost(step) >= _cost(best)):
            break
        best, taken = step, step[0]
    if best is None:
        raise InfeasibleError(
            f"no combination of {', '.join(names)} fits into memory",
            hint="give devices more memory",
        )
    return best


def _tried(
    problem: Problem, taken: tuple[str, ...], find: Callable[[Problem], Schedule]
) -> Found | None:
    try:
        return taken, find(problem.choosing(taken))
    except InfeasibleError:
        return None


def _cost(found: Found) -> tuple[float, float, int]:
    return found[1].makespan, max(found[1].peak_memory), len(found[0])


def _better(*found: Found | None) -> Found | None:
    return min((f for f in found if f is not None), key=_cost, default=None)
