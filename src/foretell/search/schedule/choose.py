"""Recompute, offload and the like as decisions: which choices to take, beside the schedule itself.

Choices are taken one by one, each time the one that shortens the makespan most (ties: the one
that needs least memory), and once all together; where all together are best, they are left one by
one in the same way. The best of what was met is kept. With `n` choices that is at most
`n(n + 1) + 2` schedules.
"""

from collections.abc import Callable

from foretell.errors import InfeasibleError
from foretell.search.schedule import bounds
from foretell.search.schedule.problem import UNLIMITED, Problem
from foretell.search.schedule.schedule import Schedule
from foretell.search.schedule.ticks import ticks

Found = tuple[tuple[str, ...], Schedule]
_LOOK = 0.5  # seconds of the solver's work for a schedule that only serves to decide
_CLOSE = 1e-3  # of the time: what no choice is worth looking for


def decided(problem: Problem, find: Callable[..., Schedule]) -> tuple[str, ...]:
    """The choices to take; none where blocks as they are cannot be beaten by slower ones."""
    slower = _only_slow(problem)
    try:
        plain = find(problem.choosing(()), _LOOK)
        if slower and plain.makespan <= _floor(plain) * (1 + _CLOSE):
            return ()
    except InfeasibleError:
        pass
    return choose(problem, lambda p: find(p, _LOOK))[0]


def _floor(found: Schedule) -> float:
    """Seconds that no schedule of these blocks beats, however little they held."""
    free = ticks(found.problem.limited(UNLIMITED), found.micro_batches)
    return float(bounds.makespan(free, found.micro_batches)) * free.unit


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
    if best is not None and best is every:
        best = _fewer(problem, best, find)
    if best is None:
        raise InfeasibleError(
            f"no combination of {', '.join(names)} fits into memory",
            hint="give devices more memory",
        )
    return best


def _fewer(problem: Problem, best: Found, find: Callable[[Problem], Schedule]) -> Found:
    """The choices without those that are better left."""
    while best[0]:
        fewer = [tuple(n for n in best[0] if n != name) for name in best[0]]
        step = _better(*(_tried(problem, names, find) for names in fewer))
        if step is None or _cost(step) >= _cost(best):
            break
        best = step
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


def _only_slow(problem: Problem) -> bool:
    """Whether every choice makes blocks take as long or longer."""
    time = {b.id: b.time for b in problem.blocks}
    return all(b.time >= time[b.id] for c in problem.choices for b in c.blocks)
