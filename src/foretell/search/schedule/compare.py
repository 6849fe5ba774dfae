"""All schedules of a placement side by side: the fixed ones that fit it, and the search."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

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

    def cells(self) -> tuple[str, ...]:
        """The figures as words: time a micro-batch, bubble, makespan, memory, in flight, a note."""
        if self.schedule is None:
            return (self.method, *("–",) * 5, self.why)
        s = self.schedule
        figures = (f"{s.per_micro_batch:.4g}", f"{100 * s.bubble:.1f} %", f"{s.makespan:.5g}")
        note = "least" if s.proven_unroll is None else f"bound {s.lower_bound:.4g}"
        return (self.method, *figures, f"{max(s.peak_memory):.4g}", str(s.in_flight), note)

    def answer(self) -> dict[str, Any]:
        """The figures under the names that `--json` has for one schedule."""
        if self.schedule is None:
            return {"method": self.method, "why": self.why}
        keys = ("period", "per_micro_batch", "bubble", "makespan", "peak_memory", "in_flight")
        found = self.schedule.answer()
        return {"method": self.method} | {k: found[k] for k in (*keys, "lower_bound", "proven")}


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
    cache: Path | None = None,
) -> list[Row]:
    """One row a method; those that do not apply to the placement are left out."""
    rows = []
    for method in methods:
        try:
            found = schedule(
                problem, micro_batches, memory, method=method, time_limit=time_limit, cache=cache
            )
            rows.append(Row(method, found))
        except InfeasibleError as error:
            rows.append(Row(method, None, error.message))
        except InputError:
            continue
    return rows
