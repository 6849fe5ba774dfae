"""The best schedule of a model on a cluster: over its placements, and over what stages recompute.

Every placement gets a schedule; its plan is lowered with messages and update, and simulated.
The one whose step is shortest for a sample wins, so that answers compare with every other plan.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import inf
from pathlib import Path

from foretell.errors import ForetellError, InfeasibleError, InputError
from foretell.plan import Plan
from foretell.predict import Prediction, predict
from foretell.search.schedule import integer_problem
from foretell.search.schedule.exact_search import Progress
from foretell.search.schedule.find import WORK, schedule
from foretell.search.schedule.integer_problem import ticks
from foretell.search.schedule.model import Model
from foretell.search.schedule.problem import UNLIMITED, Choice, Problem
from foretell.search.schedule.replay import alone, dispatch, end, replay
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
    work: float = WORK,
    time_limit: float | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> list[Solved]:
    """Every model that has a schedule of so many micro-batches, the quickest first.

    The work is shared by all; time that one does not need is left to those behind it. An interrupt
    ends the search with what is solved so far.
    """
    out: list[Solved] = []
    why: list[ForetellError] = []
    ends = None if time_limit is None else time.monotonic() + time_limit
    for at, model in enumerate(found):
        left = None if ends is None else (ends - time.monotonic()) / (len(found) - at)
        if left is not None and left <= _LEAST and out:
            break
        try:
            out.append(
                solved(
                    model, micro_batches, method=method, work=work / len(found),
                    time_limit=None if left is None else max(left, _LEAST), cache=cache,
                    progress=progress,
                )
            )  # fmt: skip
        except (InfeasibleError, InputError) as error:
            why.append(error)
        except KeyboardInterrupt:
            if not out:
                raise
            last = replace(out[-1].schedule, stopped="interrupted")
            out[-1] = replace(out[-1], schedule=last)
        if out and out[-1].schedule.stopped == "interrupted":
            break
    if not out:
        raise why[0]
    return sorted(out, key=lambda s: s.per_sample)


def solved(
    model: Model,
    micro_batches: int,
    *,
    method: str = "search",
    work: float = WORK,
    time_limit: float | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Solved:
    """The schedule of one model, its choices decided, and its step predicted."""
    num = _each(model, micro_batches)
    ends = None if time_limit is None else time.monotonic() + time_limit
    taken = decided(model.problem, num, ends) if model.problem.choices else ()
    chosen = model.chosen(taken)
    left = None if ends is None else max(ends - time.monotonic(), _LEAST)
    found = schedule(
        chosen.problem, num, method=method, work=work, time_limit=left, cache=cache,
        progress=progress,
    )  # fmt: skip
    plan = chosen.plan(found)
    told = predict(plan, model.prices.workload, model.prices.cluster)
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
# A set of choices is judged by the best order that simple rules and the fixed schedules find with
# it. Looked at: none, all, the first so many of them in two orders (by stage; by memory saved for
# time added), and from the best of these every set that differs in one choice. With `n` choices
# that is at most `3n + 2` looks, and few choices are looked at in every combination.


Found = tuple[tuple[str, ...], float]  # names of choices, and the makespan
_EVERY = 4  # choices up to which all combinations are looked at
_LEAST = 0.05  # seconds that even the last of many placements may take
_CLOSE = 1e-3  # of the time: what no choice is worth looking for


def decided(problem: Problem, micro_batches: int, ends: float | None = None) -> tuple[str, ...]:
    """The choices to take; none where blocks as they are cannot be beaten by slower ones."""
    names = [c.name for c in problem.choices]
    known: dict[frozenset[str], float] = {}

    def look(some: Iterable[str]) -> float:
        key = frozenset(some)
        if key not in known:
            late = ends is not None and time.monotonic() > ends - (ends - began) / 2
            known[key] = inf if late and known else _quick(problem.choosing(key), micro_batches)
        return known[key]

    began = time.monotonic()
    plain = look(())
    if plain <= _floor(problem, micro_batches) * (1 + _CLOSE) and _only_slow(problem):
        return ()
    if len(names) <= _EVERY:
        for many in range(len(names) + 1):
            for some in combinations(names, many):
                look(some)
    else:
        for order in (names, _by_worth(problem)):
            for many in range(len(names) + 1):
                look(order[:many])
        first = min(known, key=lambda key: (known[key], len(key)))
        for name in names:
            look(first ^ {name})
    best = min(known, key=lambda key: (known[key], len(key), sorted(key)))
    if known[best] == inf:
        _require_any(problem, micro_batches, names)
        return tuple(names)
    return tuple(name for name in names if name in best)


def _require_any(problem: Problem, micro_batches: int, names: Sequence[str]) -> None:
    """Raise unless one micro-batch fits with all choices taken."""
    try:
        alone(ticks(problem.choosing(names), micro_batches))
    except InfeasibleError as error:
        raise InfeasibleError(
            f"no combination of {', '.join(names)} fits into memory: {error.message}",
            hint="give devices more memory",
        ) from None


def _quick(problem: Problem, micro_batches: int) -> float:
    """The makespan of the best order found without search; inf where none fits into memory."""
    whole = ticks(problem, micro_batches)
    lengths = [
        end(replay(items, whole.time, whole.devices, whole.after), whole.time)
        for items in dispatch(whole, micro_batches)
    ]
    return min(lengths, default=inf) * whole.unit / whole.fine


def _floor(problem: Problem, micro_batches: int) -> float:
    """Seconds that no schedule of these blocks beats, however little they held."""
    free = ticks(problem.choosing(()).limited(UNLIMITED), micro_batches)
    return float(integer_problem.makespan(free, micro_batches)) * free.unit


def _by_worth(problem: Problem) -> list[str]:
    """The choices by memory saved for each second added, the most worth first."""
    plain = {b.id: b for b in problem.blocks}

    def worth(choice: Choice) -> float:
        saved = sum(max(plain[b.id].rise, 0.0) - max(b.rise, 0.0) for b in choice.blocks)
        added = sum(b.time - plain[b.id].time for b in choice.blocks)
        return -saved / max(added, 1e-12)

    return [c.name for c in sorted(problem.choices, key=worth)]


def _only_slow(problem: Problem) -> bool:
    """Whether every choice makes blocks take as long or longer."""
    time_of = {b.id: b.time for b in problem.blocks}
    return all(b.time >= time_of[b.id] for c in problem.choices for b in c.blocks)
