"""The schedule of a problem: the one function behind `foretell schedule`."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from math import inf
from pathlib import Path
from typing import Any, Literal, NamedTuple

from foretell.errors import InfeasibleError, InputError, unknown
from foretell.search.schedule import cache as keep
from foretell.search.schedule import integer_problem
from foretell.search.schedule.exact_search import Progress, Rate, shortest
from foretell.search.schedule.families import BASELINES
from foretell.search.schedule.integer_problem import MAX_UNROLL, Budget, Ticks, ticks
from foretell.search.schedule.makespan import Finish, begin, complete
from foretell.search.schedule.problem import Problem
from foretell.search.schedule.repetend import edges, least
from foretell.search.schedule.replay import Item, alone, end, starts_of
from foretell.search.schedule.schedule import Schedule, wrong
from foretell.search.schedule.two_phase import two_phase

Objective = Literal["makespan", "idle"]
METHODS = ("search", "tessel", *BASELINES)
WORK = 7.0  # seconds of work, about CPU seconds
_PERIOD = 0.65  # share of the work that may go into the period; the rest completes it
_KEPT = 0.95  # of a time limit: what is left checks and describes the answer
_SAME = 1e-9  # relative difference of times that counts as none
_KNOWN = 20_000  # blocks × micro-batches up to which fixed schedules are tried: 0.5 s of orders


def schedule(
    problem: Problem,
    micro_batches: int | None = None,
    memory: float | Sequence[float] | None = None,
    *,
    method: str = "search",
    objective: Objective = "makespan",
    unroll: int = MAX_UNROLL,
    work: float = WORK,
    time_limit: float | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Schedule:
    """The schedule with the least time a micro-batch, completed to the least makespan found.

    With `objective="idle"` the completion keeps devices from waiting between their first and last
    block instead. `work` is the budget: solver steps and replayed orders, counted in about CPU
    seconds, so that the same budget gives the same schedule on any machine. `time_limit` is a cap
    in seconds of the clock besides; where it, or an interrupt, ended the search early, `stopped`
    says so and the best so far is the answer. `method` may name Tessel's search or a fixed schedule
    instead. `cache` is a folder of schedules found before (see `folder`).
    """
    began, clock = time.process_time(), time.monotonic()
    problem = problem.limited(memory)
    num = max(8, 2 * problem.num_devices) if micro_batches is None else micro_batches
    _check(num, method, unroll, work, time_limit)
    options = {"method": method, "objective": objective, "unroll": unroll, "work": work}
    name = keep.key(problem, num, **options)
    found = keep.fetch(cache, name, problem) if cache else None
    if found is None:
        budget = Budget(work, inf if time_limit is None else clock + _KEPT * time_limit)
        found = _found(problem, num, method, objective, unroll, budget, progress or _quiet)
        found = replace(found, method=method, search_cpu=time.process_time() - began)
        if cache and found.stopped in ("bound", "work"):
            keep.store(cache, name, found)
    return found


def _found(
    problem: Problem,
    num: int,
    method: str,
    objective: Objective,
    unroll: int,
    budget: Budget,
    watch: Progress,
) -> Schedule:
    """The schedule by one of the methods, checked."""
    if method == "search":
        found = _search(problem, num, objective, unroll, budget, watch)
    elif method == "tessel":
        found = _tessel(problem, num, budget, watch)
    else:
        found = _fixed(problem, num, method)
    fault = wrong(problem, found.starts, found.order)
    assert fault is None, f"{method} made an illegal schedule: {fault}"
    return found


def _check(
    micro_batches: int, method: str, unroll: int, work: float, time_limit: float | None
) -> None:
    if micro_batches < 1:
        raise InputError(f"{micro_batches} micro-batches", hint="give one or more")
    if method not in METHODS:
        raise unknown("schedule method", method, METHODS)
    if not 1 <= unroll <= MAX_UNROLL:
        raise InputError(f"unroll is {unroll}", hint=f"a pattern advances 1 to {MAX_UNROLL}")
    if not work > 0:
        raise InputError(f"work is {work}", hint="give seconds of work, more than zero")
    if time_limit is not None and not time_limit > 0:
        raise InputError(f"time limit is {time_limit}", hint="give seconds, more than zero")


def _quiet(what: str, value: float, bound: float) -> None:
    """No-op progress callback."""


def _search(
    problem: Problem, micro_batches: int, objective: Objective, unroll: int, budget: Budget,
    progress: Progress,
) -> Schedule:  # fmt: skip
    """The period first, then the makespan; the best so far where time or an interrupt ends it."""
    whole = ticks(problem, micro_batches)
    least_units = integer_problem.makespan(whole, micro_batches)
    best = Finish(whole, micro_batches, least_units, progress, objective == "idle")
    rate = Rate(alone(whole), integer_problem.period(whole))
    stopped, first = "work", budget
    try:
        begin(best, _known(problem, micro_batches), budget)
        first = budget.part(_PERIOD)
        given, first.deadline = first.left, _between(budget.deadline, _PERIOD)
        shortest(rate, whole, unroll, first, progress)
        budget.spend((given - max(first.left, 0.0)) if not first.late else 0.0)
        complete(best, rate, budget)
    except KeyboardInterrupt:
        if not best.items:
            raise
        stopped = "interrupted"
    found = _described(problem, whole, rate, best.items, best.bound)
    if stopped == "work" and (first.late or time.monotonic() >= budget.deadline):
        stopped = "time"
    done = found.proven and best.is_least
    return replace(found, stopped="bound" if done else stopped)


def _between(deadline: float, share: float) -> float:
    """The moment when a share of the time until a deadline has passed."""
    now = time.monotonic()
    return now + share * (deadline - now)


def _known(problem: Problem, micro_batches: int) -> Iterator[list[Item]]:
    """The orders of the fixed schedules that fit the placement."""
    if len(problem.blocks) * micro_batches > _KNOWN:
        return
    for order in BASELINES.values():
        try:
            yield order(problem, micro_batches)
        except InputError:
            continue


def _tessel(problem: Problem, micro_batches: int, budget: Budget, progress: Progress) -> Schedule:
    whole = ticks(problem, micro_batches)
    bound = integer_problem.period(whole)
    plan = two_phase(whole, bound, micro_batches, budget, progress)
    if plan is None:
        raise InfeasibleError(
            "the two phases found no repetend within the budget",
            hint="give more work or time, or leave the method out",
        )
    rows = enumerate(plan.starts)
    placed = sorted((s, b, m) for b, row in rows for m, s in enumerate(row))
    items = [(b, m) for _, b, m in placed]
    least_units = integer_problem.makespan(whole, micro_batches)
    found = _described(problem, whole, plan.rate, items, least_units)
    if whole.exact and whole.fine == 1:  # as the barriers leave it; else only the order is kept
        starts = tuple(tuple(s * whole.unit for s in row) for row in plan.starts)
        found = replace(found, starts=starts)
    return found


def _fixed(problem: Problem, micro_batches: int, method: str) -> Schedule:
    """A schedule from the literature; its period is how much later twice as many would end."""
    order = BASELINES[method]
    items = order(problem, micro_batches)
    starts = starts_of(problem, items)
    fault = wrong(problem, starts, items)
    if fault is not None:
        raise InfeasibleError(f"{method}: {fault}", hint="give more memory, or search a schedule")
    num = 8 * problem.num_devices  # long enough for every order here to be in its steady state
    ends = [end(starts_of(problem, order(problem, n)), problem.seconds) for n in (num, 2 * num)]
    whole = ticks(problem, micro_batches)
    bound = max(float(integer_problem.period(whole)) * whole.unit, max(problem.work))
    period = (ends[1] - ends[0]) / num
    return Schedule(
        problem,
        tuple(map(tuple, starts)),
        tuple(items),
        period,
        1,
        bound,
        float(integer_problem.makespan(whole, micro_batches)) * whole.unit,
        None if period <= bound * (1 + _SAME) else 0,
    )


def _described(
    problem: Problem, whole: Ticks, rate: Rate, items: Sequence[Item], least_units: Fraction
) -> Schedule:
    """The schedule with its period and bounds in real seconds."""
    period = _real_period(problem, whole, rate)
    bound = max(float(rate.bound) * whole.unit, max(problem.work))
    per = period / rate.best.unroll
    met = per <= bound * (1 + _SAME)
    # with blocks that take no time, a pattern may lie between two whole units: then nothing is sure
    between = whole.fine > 1 and period > rate.best.period // whole.fine * whole.unit * (1 + _SAME)
    return Schedule(
        problem,
        tuple(map(tuple, starts_of(problem, items))),
        tuple(items),
        period,
        rate.best.unroll,
        per if met else bound,
        float(least_units) * whole.unit,
        None if met else 0 if between else rate.closed,
    )


def _real_period(problem: Problem, whole: Ticks, rate: Rate) -> float:
    """The least period in seconds for the pattern's order."""
    best = rate.best
    if whole.exact and whole.fine == 1:
        return best.period * whole.unit
    after = [[(w.on, w.lag) for w in waits] for waits in problem.after]
    floor = Fraction(max(problem.work)) * best.unroll
    return float(least(edges(whole, best, problem.seconds, after), len(best.start), floor))


# All schedules of a placement side by side: the fixed ones that fit it, and the search.


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
    work: float = WORK,
    time_limit: float | None = None,
    cache: Path | None = None,
) -> list[Row]:
    """One row a method; those that do not apply to the placement are left out."""
    rows = []
    for method in methods:
        try:
            found = schedule(
                problem, micro_batches, memory, method=method, work=work, time_limit=time_limit,
                cache=cache,
            )  # fmt: skip
            rows.append(Row(method, found))
        except InfeasibleError as error:
            rows.append(Row(method, None, error.message))
        except InputError:
            continue
    return rows
