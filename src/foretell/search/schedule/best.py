"""The best schedule of a model on a cluster: over its placements, and over what stages recompute.

Every placement gets a schedule; its plan is lowered with all messages and the update, and played.
The one whose step is shortest for a sample wins, so that answers compare with every other plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from foretell.errors import ForetellError, InfeasibleError, InputError
from foretell.plan import Plan
from foretell.predict import Prediction, predict_placed
from foretell.search.schedule import integer_problem
from foretell.search.schedule.exact_search import Progress
from foretell.search.schedule.find import schedule
from foretell.search.schedule.integer_problem import ticks
from foretell.search.schedule.model import Model
from foretell.search.schedule.problem import UNLIMITED, Problem
from foretell.search.schedule.schedule import Schedule


@dataclass(frozen=True)
class Solved:
    """A model with its schedule and what that makes of a step."""

    model: Model
    schedule: Schedule
    plan: Plan
    prediction: Prediction
    taken: tuple[str, ...] = ()  # choices: recompute 0, offload 3

    @property
    def per_sample(self) -> float:
        """Seconds of the step for each sample in it."""
        return self.prediction.step / self.plan.global_batch


def best(
    found: Sequence[Model],
    micro_batches: int,
    *,
    method: str = "search",
    time_limit: float = 7.0,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> list[Solved]:
    """Every model that has a schedule of so many micro-batches, the quickest first."""
    out: list[Solved] = []
    why: list[ForetellError] = []
    for model in found:
        try:
            out.append(
                solved(
                    model, micro_batches, method=method, time_limit=time_limit, cache=cache,
                    progress=progress,
                )
            )  # fmt: skip
        except (InfeasibleError, InputError) as error:
            why.append(error)
    if not out:
        raise why[0]
    return sorted(out, key=lambda s: s.per_sample)


def solved(
    model: Model,
    micro_batches: int,
    *,
    method: str = "search",
    time_limit: float = 7.0,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Solved:
    """The schedule of one model, its choices decided, and its step foretold."""
    num = _each(model, micro_batches)

    def find(problem: Problem, limit: float = time_limit) -> Schedule:
        return schedule(
            problem, num, method=method, time_limit=limit, cache=cache, progress=progress
        )

    taken = decided(model.problem, find) if model.problem.choices else ()
    chosen = model.chosen(taken)
    found = find(chosen.problem)
    plan = chosen.plan(found)
    told = predict_placed(plan, model.prices)
    return Solved(chosen, found, plan, told, taken)


def _each(model: Model, micro_batches: int) -> int:
    """Micro-batches of the problem: copies of the model share those of the plan."""
    if micro_batches % model.copies:
        raise InputError(
            f"{micro_batches} micro-batches cannot be shared by {model.copies} copies of the model",
            hint=f"give a multiple of {model.copies}",
        )
    return micro_batches // model.copies


# Recompute, offload and the like as decisions: which choices to take, beside the schedule itself.
#
# Choices are taken one by one, each time the one that shortens the makespan most (ties: the one
# that needs least memory), and once all together; where all together are best, they are left one by
# one in the same way. The best of what was met is kept. With `n` choices that is at most
# `n(n + 1) + 2` schedules.


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
    return float(integer_problem.makespan(free, found.micro_batches)) * free.unit


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
