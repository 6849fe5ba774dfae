"""Schedules found: of a problem, of stages, of a model on a cluster; and as planners.

The schedule of a problem: the one function behind `foretell schedule`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations
from math import inf
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from foretell.cluster import Cluster
from foretell.errors import ForetellError, InfeasibleError, InputError, UnmodelledError, unknown
from foretell.graph.show import span
from foretell.plan import Plan
from foretell.plan.check import micro_batches, settled
from foretell.plan.costs import ROUNDING
from foretell.plan.lower import Priced, hop, priced
from foretell.predict import Prediction, predict
from foretell.search.kit import Planned, Planner, silent
from foretell.search.kit import Progress as SearchProgress
from foretell.search.schedule import integer_problem
from foretell.search.schedule.exact_search import (
    PeriodSearch,
    Progress,
    least_period,
    shortest_period,
    timing_edges,
)
from foretell.search.schedule.families import BASELINES, two_phase
from foretell.search.schedule.integer_problem import MAX_UNROLL, Budget, IntegerProblem, in_integers
from foretell.search.schedule.makespan import BestOrder, offer_known_orders, shorten_makespan
from foretell.search.schedule.model import Model, models
from foretell.search.schedule.problem import UNLIMITED, Block, Choice, Problem, Wait
from foretell.search.schedule.replay import (
    NEVER,
    Item,
    arrays,
    end_time,
    list_schedules,
    order_by_start,
    order_makespan,
    peak_memory,
    replay,
    sequential_pattern,
    starts_of,
)
from foretell.search.schedule.schedule import Schedule, cache_key, load_cached, save_cached, wrong
from foretell.workload import Workload

Objective = Literal["makespan", "idle"]
METHODS = ("search", "tessel", *BASELINES)
WORK = 10.0  # seconds of work, about CPU seconds
_PERIOD = 0.5  # share of the work that may go into the period; the rest completes it
_KEPT = 0.95  # of a time limit: what is left checks and describes the answer
_DESCRIBED = 0.5  # of the time left: what that may take at most
# What checking and printing an answer takes beside one look at it: JSON of five schedules of 2 to
# 35 thousand blocks took 2.7 to 5.4 times as long as their starts and their check.
_PRINTED = 6.4
_PREDICTED = 0.8  # of a model's time: what is left predicts its step
_SAME = 1e-9  # relative difference of times that counts as none
_KNOWN = 20_000  # blocks × micro-batches up to which fixed schedules are tried: 0.5 s of orders
_ORDER = 1e-4  # seconds they take for a block on one of its devices


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
    name = cache_key(problem, num, **options)
    found = load_cached(cache, name, problem) if cache else None
    if found is None:
        budget = Budget(work, inf if time_limit is None else clock + _KEPT * time_limit)
        watch = progress or (lambda what, value, bound: None)
        if method == "search":
            found = _search(problem, num, objective, unroll, budget, watch)
        elif method == "tessel":
            found = _tessel(problem, num, budget, watch)
        else:
            found = _fixed(problem, num, method)
        fault = wrong(problem, found.starts, found.order)
        assert fault is None, f"{method} made an illegal schedule: {fault}"
        found = replace(found, method=method, search_cpu=time.process_time() - began)
        if cache and found.stopped in ("bound", "work"):
            save_cached(cache, name, found)
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
    require_limit(time_limit)


def require_limit(seconds: float | None) -> None:
    """Raise where a time limit is no time."""
    if seconds is not None and not seconds > 0:
        raise InputError(f"time limit is {seconds}", hint="give seconds, more than zero")


def _search(
    problem: Problem, micro_batches: int, objective: Objective, unroll: int, budget: Budget,
    progress: Progress,
) -> Schedule:  # fmt: skip
    """The period first, then the makespan; the best so far where time or an interrupt ends it."""
    whole = in_integers(problem, micro_batches)
    least_units = integer_problem.makespan_bound(whole, micro_batches)
    best = BestOrder(whole, micro_batches, least_units, progress, objective == "idle")
    rate = PeriodSearch(sequential_pattern(whole, budget), integer_problem.period_bound(whole))
    stopped, first = "work", budget
    try:
        offer_known_orders(best, _family_orders(problem, micro_batches, budget), budget)
        if budget.deadline < inf:
            began = budget.clock()
            wrong(problem, starts_of(problem, best.items), best.items)
            describing = _PRINTED * (budget.clock() - began)
            budget.deadline -= min(describing, _DESCRIBED * budget.seconds)
        first = budget.part(_PERIOD, _PERIOD)
        shortest_period(rate, whole, unroll, first, progress)
        shorten_makespan(best, rate, budget)
    except KeyboardInterrupt:
        if not best.items:
            raise
        stopped = "interrupted"
    found = _schedule_of(problem, whole, rate, best.items, best.bound)
    if stopped == "work" and (first.late or budget.seconds <= 0):
        stopped = "time"
    done = found.proven and best.is_least
    return replace(found, stopped="bound" if done else stopped)


def _family_orders(problem: Problem, micro_batches: int, budget: Budget) -> Iterator[list[Item]]:
    """The orders of the fixed schedules that fit the placement, where there is time for them."""
    slots = sum(len(b.devices) for b in problem.blocks) * micro_batches
    if len(problem.blocks) * micro_batches > _KNOWN or _ORDER * slots > 0.1 * budget.seconds:
        return
    for order in BASELINES.values():
        try:
            yield order(problem, micro_batches)
        except InputError:
            continue


def _tessel(problem: Problem, micro_batches: int, budget: Budget, progress: Progress) -> Schedule:
    whole = in_integers(problem, micro_batches)
    bound = integer_problem.period_bound(whole)
    plan = two_phase(whole, bound, micro_batches, budget, progress)
    if plan is None:
        raise InfeasibleError(
            "the two phases found no repetend within the budget",
            hint="give more work or time, or leave the method out",
        )
    least_units = integer_problem.makespan_bound(whole, micro_batches)
    found = _schedule_of(problem, whole, plan.rate, order_by_start(plan.starts), least_units)
    if whole.exact and whole.fine == 1:  # as the barriers leave it; else only the order is kept
        starts = tuple(tuple(s * whole.unit for s in row) for row in plan.starts)
        found = replace(found, starts=starts)
    late = budget.late or budget.seconds <= 0
    return replace(
        found, stopped="interrupted" if budget.interrupted else "time" if late else "work"
    )


def _fixed(problem: Problem, micro_batches: int, method: str) -> Schedule:
    """A schedule from the literature; its period is how much later twice as many would end."""
    order = BASELINES[method]
    items = order(problem, micro_batches)
    starts = starts_of(problem, items)
    fault = wrong(problem, starts, items)
    if fault is not None:
        raise InfeasibleError(f"{method}: {fault}", hint="give more memory, or search a schedule")
    num = 8 * problem.num_devices  # long enough for every order here to be in its steady state
    ends = [
        end_time(starts_of(problem, order(problem, n)), problem.seconds) for n in (num, 2 * num)
    ]
    whole = in_integers(problem, micro_batches)
    bound = max(float(integer_problem.period_bound(whole)) * whole.unit, max(problem.work))
    period = (ends[1] - ends[0]) / num
    return Schedule(
        problem,
        tuple(map(tuple, starts)),
        tuple(items),
        period,
        1,
        bound,
        float(integer_problem.makespan_bound(whole, micro_batches)) * whole.unit,
        None if period <= bound * (1 + _SAME) else 0,
    )


def _schedule_of(
    problem: Problem,
    whole: IntegerProblem,
    rate: PeriodSearch,
    items: Sequence[Item],
    least_units: Fraction,
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
        None if met else 0 if between else rate.closed_unroll,
    )


def _real_period(problem: Problem, whole: IntegerProblem, rate: PeriodSearch) -> float:
    """The least period in seconds for the pattern's order."""
    best = rate.best
    if whole.exact and whole.fine == 1:
        return best.period * whole.unit
    after = [[(w.on, w.lag) for w in waits] for waits in problem.after]
    floor = Fraction(max(problem.work)) * best.unroll
    return float(
        least_period(timing_edges(whole, best, problem.seconds, after), len(best.start), floor)
    )


# All schedules of a placement side by side: the fixed ones that fit it, and the search.


class MethodFigures(NamedTuple):
    """One schedule's figures, or why there is none."""

    method: str
    schedule: Schedule | None
    why: str = ""

    def cells(self) -> tuple[str, ...]:
        """The figures as words, one for each column of `HEADER`."""
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


HEADER = ("method", "each>", "bubble>", "makespan>", "memory>", "open>", "note")


def compare(
    problem: Problem,
    micro_batches: int | None = None,
    memory: float | Sequence[float] | None = None,
    *,
    methods: Sequence[str] = METHODS,
    work: float = WORK,
    time_limit: float | None = None,
    cache: Path | None = None,
) -> list[MethodFigures]:
    """One row a method; those that do not apply to the placement are left out.

    A time limit is of all methods: those that search share what fixed schedules leave of it.
    """
    require_limit(time_limit)
    ends, rows = (
        None if time_limit is None else time.monotonic() + time_limit,
        dict[str, MethodFigures](),
    )
    turns = sorted(methods, key=lambda name: name not in BASELINES)
    for at, method in enumerate(turns):
        try:
            found = schedule(
                problem, micro_batches, memory, method=method, work=work,
                time_limit=time_left(ends, len(turns) - at), cache=cache,
            )  # fmt: skip
            rows[method] = MethodFigures(method, found)
        except InfeasibleError as error:
            rows[method] = MethodFigures(method, None, error.message)
        except InputError:
            continue
        else:
            if found.stopped == "interrupted":
                break
    return [rows[method] for method in methods if method in rows]


def time_left(ends: float | None, parts: int = 1) -> float | None:
    """What one of some parts may take until a moment; very little where that has passed."""
    return None if ends is None else max((ends - time.monotonic()) / max(parts, 1), _LEAST)


# The best pipeline schedule for given stages: families of the literature, then a searched one.
#
#     stages = [StageCost(device, forward, backward_input, backward_weight, kept) …]
#     best_schedule(stages, memory, micro_batches)[0].actions     # ("0F0", "0F1", …) for each
# device
#     with_searched_order(plan, workload, cluster)                # the plan with such an order
#
# One stage a device takes GPipe, 1F1B, ZB-H1 and ZB-H2; rounds over the devices take interleaved
# 1F1B; there and back takes Hanayo, ZB-V, V-Half, V-Min and DualPipeV. Every family is replayed
# with the stages' own times, so uneven stages and slow links count, and kept only where its
# memory fits.


SPLIT = ("zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipev")  # weight gradients apart
WHOLE = ("gpipe", "1f1b", "interleaved", "hanayo")
FAMILIES = (*WHOLE, *SPLIT)
_SEARCHED = "searched"
MOST_ACTIONS = 2_000  # stages × micro-batches that a plan writes down one by one


@dataclass(frozen=True)
class StageCost:
    """What one stage, a run of layers on one device, costs for one micro-batch."""

    device: int
    forward: float  # seconds
    backward_input: float
    backward_weight: float
    kept: float = 0.0  # bytes from the start of the forward to the end of the backward
    kept_for_weight: float = 0.0  # of these, bytes that only the weight gradient gives back
    send: float = 0.0  # seconds of a message to the next stage, either way, beside the compute


@dataclass(frozen=True)
class PipelineSchedule:
    """An order of forwards and backwards on every device, and what it takes."""

    name: str  # a family, or `with_searched_order`
    makespan: float  # seconds for all micro-batches
    peak_memory: tuple[float, ...]  # bytes of activations, by device
    actions: tuple[tuple[str, ...], ...]  # by device: stage, F B I or W, micro-batch
    bound: float  # seconds that no schedule beats, where a search found it; else 0


def best_schedule(
    stages: Sequence[StageCost],
    memory: float | Sequence[float],
    micro_batches: int,
    *,
    families: Sequence[str] = FAMILIES,
    work: float = 0.0,
) -> list[PipelineSchedule]:
    """Every family that fits the stages and the memory, the quickest first; never empty.

    `work`, in about CPU seconds, is what a searched repetend may cost besides; without it only
    families are replayed, in milliseconds each. An error where nothing fits.
    """
    if not stages or micro_batches < 1:
        raise InputError(f"{len(stages)} stages, {micro_batches} micro-batches")
    found: list[PipelineSchedule] = []
    for split, names in ((False, WHOLE), (True, SPLIT)):
        mine = [name for name in names if name in families]
        if mine or work:
            problem = pipeline(stages, memory, split=split)
            found += _replay_families(problem, mine, micro_batches)
            if work:
                found += _searched_order(problem, micro_batches, work / 2)
    if not found:
        raise InfeasibleError(
            f"no schedule of {len(stages)} stages fits into the memory given",
            hint="recompute, or take more stages",
        )
    return sorted(found, key=lambda one: (one.makespan, max(one.peak_memory)))


def with_searched_order(
    plan: Plan, workload: Workload, cluster: Cluster, *, work: float
) -> Plan | None:
    """The plan with a searched order of its stages, weight gradients apart; None where it has none.

    Stages cost, hold and send what the plan's own lowering says.
    """
    zero_bubble = plan.but(schedule="zb-h1", chunks=1, actions=())
    try:
        zero_bubble, cluster = settled(zero_bubble, workload, cluster)
        found = priced(zero_bubble, workload, cluster)
        num = micro_batches(found.plan)
        if len(found.stages) * num > MOST_ACTIONS:
            return None
        stages, room = zip(*(_stage_cost(found, s) for s in range(len(found.stages))), strict=True)
        best = best_schedule(stages, room, num, families=(), work=work)[0]
    except (InfeasibleError, InputError, UnmodelledError):
        return None
    return plan.but(schedule="actions", chunks=1, actions=best.actions)


def _stage_cost(found: Priced, s: int) -> tuple[StageCost, float]:
    """What a stage of a plan costs, and the bytes its activations may take."""
    one = found.stages[s]
    cost, held = one.columns.cost, one.memory
    both = float(cost.backward[one.column])
    pairs = zip(one.layers, one.weight_seconds, strict=True)
    weights = min(sum(n * seconds for n, seconds in pairs), both)
    send = hop(found, s, s + 1) if s + 1 < len(found.stages) else 0.0
    kept = ROUNDING * float(held.each[0])
    rest = float(held.peak[0]) - ROUNDING * float(held.activations[0])
    return StageCost(
        s, float(cost.forward[one.column]), both - weights, weights, kept, kept, send
    ), one.room - rest


def pipeline(
    stages: Sequence[StageCost], memory: float | Sequence[float], *, split: bool = False
) -> Problem:
    """The stages in a line as a problem; block `4 · stage + kind` of F, B, I, W."""
    blocks: list[Block] = []
    waits: list[Wait] = []
    for s, one in enumerate(stages):
        blocks.append(Block(4 * s, "F", (one.device,), one.forward, one.kept))
        if s:
            waits.append(Wait(s, s - 1, _send_seconds(stages, s - 1, s)))
    back = len(stages) - 1  # the block before, backward
    for s in reversed(range(len(stages))):
        one, here = stages[s], len(blocks)
        lag = _send_seconds(stages, s, s + 1) if s + 1 < len(stages) else 0.0
        waits.append(Wait(here, back, lag))
        late = min(one.kept_for_weight, one.kept)
        if split:
            blocks.append(
                Block(4 * s + 2, "I", (one.device,), one.backward_input, 0.0, late - one.kept)
            )
            blocks.append(Block(4 * s + 3, "W", (one.device,), one.backward_weight, 0.0, -late))
            waits.append(Wait(here + 1, here))
        else:
            both = one.backward_input + one.backward_weight
            blocks.append(Block(4 * s + 1, "B", (one.device,), both, 0.0, -one.kept))
        back = here
    return Problem(tuple(blocks), tuple(waits), name="pipeline").limited(memory)


def _send_seconds(stages: Sequence[StageCost], first: int, then: int) -> float:
    return stages[first].send if stages[first].device != stages[then].device else 0.0


def _replay_families(
    problem: Problem, names: Sequence[str], micro_batches: int
) -> Iterator[PipelineSchedule]:
    whole = in_integers(problem, micro_batches)
    rows = arrays(whole)
    for name in names:
        try:
            items = BASELINES[name](problem, micro_batches)
        except InputError:
            continue
        order = np.array([b * micro_batches + m for b, m in items], np.int64)
        if order_makespan(rows, micro_batches, order) < NEVER:
            yield _pipeline_schedule(problem, whole, name, items)


def _searched_order(
    problem: Problem, micro_batches: int, work: float
) -> Iterator[PipelineSchedule]:
    try:
        found = schedule(problem, micro_batches, work=work)
    except InfeasibleError:
        return
    whole = in_integers(problem, micro_batches)
    bound = found.makespan_bound
    yield _pipeline_schedule(problem, whole, _SEARCHED, list(found.order), bound)


def _pipeline_schedule(
    problem: Problem, whole: IntegerProblem, name: str, items: list[Item], bound: float = 0.0
) -> PipelineSchedule:
    makespan = end_time(starts_of(problem, items), problem.seconds)
    rows: list[list[str]] = [[] for _ in range(problem.num_devices)]
    for b, m in items:
        block = problem.blocks[b]
        rows[block.devices[0]].append(f"{block.id // 4}{block.kind}{m}")
    held = tuple(p * whole.memory_unit for p in peak_memory(items, whole.held))
    return PipelineSchedule(name, makespan, held, tuple(map(tuple, rows)), bound)


# The best schedule of a model on a cluster: over its placements, and over what stages recompute.
#
# Every placement gets a schedule; its plan is lowered with messages and update, and simulated.
# The one whose step is shortest for a sample wins, so that answers compare with every other plan.


@dataclass(frozen=True)
class SolvedModel:
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


def solve_models(
    found: Sequence[Model],
    micro_batches: int,
    *,
    method: str = "search",
    work: float = WORK,
    time_limit: float | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> list[SolvedModel]:
    """Every model that has a schedule of so many micro-batches, the quickest first.

    The work is shared by all; time that one does not need is left to those behind it, and none is
    begun in less than half of what the quickest took. An interrupt ends the search with what is
    solved so far.
    """
    out: list[SolvedModel] = []
    why: list[ForetellError] = []
    ends = None if time_limit is None else time.monotonic() + time_limit
    least = inf
    for at, model in enumerate(found):
        if ends is not None and out and ends - time.monotonic() <= max(least / 2, _LEAST):
            break
        left, began = time_left(ends, len(found) - at), time.monotonic()
        try:
            out.append(
                solve_model(
                    model, micro_batches, method=method, work=work / len(found),
                    time_limit=left, cache=cache, progress=progress,
                )
            )  # fmt: skip
            least = min(least, time.monotonic() - began)
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


def solve_model(
    model: Model,
    micro_batches: int,
    *,
    method: str = "search",
    work: float = WORK,
    time_limit: float | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> SolvedModel:
    """The schedule of one model, its choices decided, and its step predicted."""
    num = _micro_batches_per_copy(model, micro_batches)
    ends = None if time_limit is None else time.monotonic() + time_limit
    taken = choose_options(model.problem, num, ends) if model.problem.choices else ()
    chosen = model.chosen(taken)
    found = schedule(
        chosen.problem, num, method=method, work=work, cache=cache, progress=progress,
        time_limit=None if ends is None else _PREDICTED * (time_left(ends) or 0.0),
    )  # fmt: skip
    plan = chosen.plan(found)
    repriced = predict(plan, model.prices.workload, model.prices.cluster)
    return SolvedModel(chosen, found, plan, repriced, taken)


def _micro_batches_per_copy(model: Model, micro_batches: int) -> int:
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


def choose_options(
    problem: Problem, micro_batches: int, ends: float | None = None
) -> tuple[str, ...]:
    """The choices to take; none where blocks as they are cannot be beaten by slower ones."""
    names = [c.name for c in problem.choices]
    known: dict[frozenset[str], float] = {}

    def look(some: Iterable[str]) -> float:
        key = frozenset(some)
        if key not in known:
            late = ends is not None and time.monotonic() > ends - (ends - began) / 2
            known[key] = (
                inf if late and known else _makespan_by_rules(problem.choosing(key), micro_batches)
            )
        return known[key]

    began = time.monotonic()
    plain = look(())
    if plain <= _makespan_without_memory(problem, micro_batches) * (1 + _CLOSE) and _only_slow(
        problem
    ):
        return ()
    if len(names) <= _EVERY:
        for many in range(len(names) + 1):
            for some in combinations(names, many):
                look(some)
    else:
        for order in (names, _by_bytes_per_second(problem)):
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
        sequential_pattern(in_integers(problem.choosing(names), micro_batches))
    except InfeasibleError as error:
        raise InfeasibleError(
            f"no combination of {', '.join(names)} fits into memory: {error.message}",
            hint="give devices more memory",
        ) from None


def _makespan_by_rules(problem: Problem, micro_batches: int) -> float:
    """The makespan of the best order found without search; inf where none fits into memory."""
    whole = in_integers(problem, micro_batches)
    lengths = [
        end_time(replay(items, whole.time, whole.devices, whole.after), whole.time)
        for items in list_schedules(whole, micro_batches)
    ]
    return min(lengths, default=inf) * whole.unit / whole.fine


def _makespan_without_memory(problem: Problem, micro_batches: int) -> float:
    """Seconds that no schedule of these blocks beats, however little they held."""
    free = in_integers(problem.choosing(()).limited(UNLIMITED), micro_batches)
    return float(integer_problem.makespan_bound(free, micro_batches)) * free.unit


def _by_bytes_per_second(problem: Problem) -> list[str]:
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


# Pipelines as plans: stages placed in every shape that fits, each with a searched schedule.


_FIXED = ("1f1b", "1f1b+", "gpipe")  # what people run without a search


@dataclass(frozen=True)
class PipelinePlanner(Planner):
    """Place stages in every shape that fits and search the order of their work."""

    name: ClassVar[str] = "schedule"
    method: ClassVar[str] = "search"
    source: ClassVar[str] = "our own: exact and annealed schedules of Tessel's placements"
    micro_batch: int = 1  # samples of one micro-batch
    work: float = WORK  # seconds of work for all shapes, about CPU seconds

    def plan(
        self, workload: Workload, cluster: Cluster, progress: SearchProgress = silent
    ) -> Planned:
        """The quickest pipeline for the workload's samples on every rank."""
        began = time.process_time()
        samples = workload.batch * cluster.size
        if samples % self.micro_batch:
            raise InputError(
                f"{samples} samples in micro-batches of {self.micro_batch}",
                hint="give a micro-batch that divides them",
            )
        num, given = samples // self.micro_batch, Plan(micro_batch=self.micro_batch)
        found = models(workload, cluster, plan=given, micro_batches=num)
        every = solve_models(
            found, num, method=self.method, work=self.work,
            progress=lambda what, value, bound: progress(f"{what} {value:.4g}", value),
        )  # fmt: skip
        fixed = self._baselines(found, num)
        steps = {name: one.prediction.step for name, one in fixed.items()}
        first = min([every[0], *fixed.values()], key=lambda one: one.prediction.step)
        kept = tuple(f"order of {name}: none found is shorter" for name in fixed
                     if fixed[name] is first)  # fmt: skip
        return Planned(
            first.plan,
            first.prediction.step,
            min(steps.values(), default=first.prediction.step),
            steps,
            None,
            len(every) + len(fixed),
            time.process_time() - began,
            kept + _notes(first, every),
            first.prediction.low,
            first.prediction.high,
            stopped=any(one.schedule.stopped == "interrupted" for one in every),
        )

    def _baselines(self, found: list[Model], num: int) -> dict[str, SolvedModel]:
        """The quickest pipeline of each fixed schedule that fits."""
        out: dict[str, SolvedModel] = {}
        for name in _FIXED:
            with suppress(ForetellError):
                out[name] = solve_models(found, num, method=name)[0]
        return out


@dataclass(frozen=True)
class Tessel(PipelinePlanner):
    """Tessel: every assignment of micro-batches to blocks, then warm-up and cool-down apart."""

    name: ClassVar[str] = "tessel"
    method: ClassVar[str] = "tessel"
    source: ClassVar[str] = "Lin et al., Tessel, HPCA 2024, on CP-SAT in place of Z3"
    work: float = 60.0  # seconds of work for all shapes

    def own(self) -> Planner:
        """Our schedules, with as many seconds of work."""
        return PipelinePlanner(self.micro_batch, self.work)


def _notes(first: SolvedModel, every: list[SolvedModel]) -> tuple[str, ...]:
    found = first.schedule
    bound = "proven minimal" if found.proven else f"bound {span(found.lower_bound)}"
    shapes = ", ".join(f"{s.model.shape} {1e3 * s.per_sample:.4g} ms" for s in every)
    return (
        f"shape {first.model.shape}, {len(first.plan.stages)} stages, "
        f"{span(found.per_micro_batch)} a micro-batch ({bound})",
        f"a sample by shape: {shapes}",
        *((f"decided: {', '.join(first.taken)}",) if first.taken else ()),
    )
