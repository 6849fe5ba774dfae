"""All schedules of a placement side by side: the fixed ones that fit it, and the search."""

from collections.abc import Sequence
from typing import NamedTuple

from foretell.errors import InfeasibleError, InputError
from foretell.search.schedule.find import METHODS, schedule
from foretell.search.schedule.problem import Problem
from foretell.search.schedule.schedule import Schedule


class Row(NamedTuple):
    """One schedule's figures, or why there is none."""

    method: str
    schedule: Schedule | None
    why: str = ""

    def __str__(self) -> str:
        if self.schedule is None:
            return f"{self.method:12s} {self.why}"
        s = self.schedule
        sure = "" if s.proven else f" (bound {s.lower_bound:g})"
        return (
            f"{self.method:12s} {s.per_micro_batch:8.4g} {100 * s.bubble:6.1f} % {s.makespan:9.5g} "
            f"{max(s.peak_memory):8.4g} {s.in_flight:4d}{sure}"
        )


HEADER = (
    f"{'schedule':12s} {'a batch':>8s} {'bubble':>8s} {'makespan':>9s} {'memory':>8s} {'open':>4s}"
)


def compare(
    problem: Problem,
    micro_batches: int | None = None,
    memory: float | Sequence[float] | None = None,
    *,
    methods: Sequence[str] = METHODS,
    time_limit: float = 7.0,
) -> list[Row]:
    """One row a method; those that do not apply to the placement are left out."""
    rows = []
    for method in methods:
        try:
            found = schedule(problem, micro_batches, memory, method=method, time_limit=time_limit)
            rows.append(Row(method, found))
        except InfeasibleError as error:
            rows.append(Row(method, None, error.message))
        except InputError:
            continue
    return rows
