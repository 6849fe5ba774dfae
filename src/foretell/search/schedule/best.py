"""The best schedule of a model on a cluster: over its placements, and over what stages recompute.

Every placement gets a schedule; its plan is lowered with all messages and the update, and played.
The one whose step is shortest for a sample wins, so that answers compare with every other plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from foretell.errors import ForetellError, InfeasibleError, InputError
from foretell.plan import Plan
from foretell.predict import Prediction, predict_placed
from foretell.search.schedule.choose import decided
from foretell.search.schedule.find import schedule
from foretell.search.schedule.model import Model
from foretell.search.schedule.period import Progress
from foretell.search.schedule.problem import Problem
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
