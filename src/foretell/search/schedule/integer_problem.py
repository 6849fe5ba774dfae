"""A problem in whole numbers, as the solver wants it.

Times become multiples of one `unit`: exactly where they are commensurable (1 and 3, or 0.25 and
0.1), else rounded down to a fine grid, so that whatever cannot be done in whole units cannot be
done in real time either. A block that takes no unit is given one tick, and `fine` ticks make a
unit, enough of them that all those ticks together stay below one unit: every order keeps strictly
rising times.

    units = ⌊seconds / unit⌋,  ticks = fine · units, or 1 where units = 0            → `in_integers`

Memory becomes whole too, and is balanced: what a micro-batch leaves on a device for good is taken
off its capacity once for each micro-batch, and what it gives back beyond what it took is not
counted. That is strict (`is_faithful` is false then): schedules stay legal, proofs do not hold.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from math import gcd, inf, isinf, lcm
from threading import Thread
from typing import Any, Literal, NamedTuple

from foretell.errors import UnmodelledError
from foretell.search.schedule.problem import Problem

MAX_UNROLL = 4  # micro-batches that one repetend may advance; more never paid in our benchmark
_EXACT = 1 << 22  # all times of a micro-batch together, in units, when they are kept exact
_GRID = 1 << 15  # units in the busiest device's work when they are rounded
_COARSE = 256  # ticks in that work from which interval models become slow
_MEMORY = 1 << 40  # largest whole amount of memory kept exact
_SLACK = Fraction(1, 10**6)  # of a unit of memory: what rounding of the capacity may add


@dataclass(frozen=True)
class IntegerProblem:
    """Whole-number times, waits and memory of one micro-batch."""

    time: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]
    after: tuple[tuple[tuple[int, int], ...], ...]  # of each block: (block, lag) it waits for
    held: tuple[tuple[tuple[int, int, int], ...], ...]  # by device: (block, rise, change)
    capacity: tuple[int | None, ...]
    unit: float  # seconds
    fine: int = 1
    exact: bool = True  # no time was rounded
    memory_unit: float = 1.0  # what one of the whole amounts in `held` stands for
    left: tuple[int, ...] = ()  # by device: memory that stays once all micro-batches ran
    limits: tuple[float, ...] = ()  # the capacities as they were given

    @property
    def is_faithful(self) -> bool:
        """Whether memory is as in the problem, not made stricter to balance it."""
        pairs = zip(self.left, self.capacity, strict=True)
        return all(not left or room is None for left, room in pairs)

    @cached_property
    def units(self) -> tuple[int, ...]:
        """Times in whole units: a lower bound of the real ones."""
        return tuple(t // self.fine for t in self.time)

    @cached_property
    def by_device(self) -> tuple[tuple[int, ...], ...]:
        """The blocks of each device."""
        num = len(self.capacity)
        return tuple(tuple(i for i, ds in enumerate(self.devices) if d in ds) for d in range(num))

    @cached_property
    def followers(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Of each block: (block, lag) that wait for it."""
        found: list[list[tuple[int, int]]] = [[] for _ in self.time]
        for i, waits in enumerate(self.after):
            for j, lag in waits:
                found[j].append((i, lag))
        return tuple(map(tuple, found))

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The blocks by the earliest they can start, each after all it waits for."""
        return tuple(sorted(range(len(self.time)), key=lambda i: (self.head[i], i)))

    @cached_property
    def reach(self) -> tuple[frozenset[int], ...]:
        """The blocks that wait for each block, directly or not."""
        reach: list[set[int]] = [set() for _ in self.time]
        for i in reversed(self.order):
            for j, _ in self.followers[i]:
                reach[i] |= {j} | reach[j]
        return tuple(map(frozenset, reach))

    @cached_property
    def head(self) -> tuple[int, ...]:
        """The earliest start of each block: the longest way to it."""
        return tuple(longest_paths(self.time, self.after, with_lags=True))

    @cached_property
    def tail(self) -> tuple[int, ...]:
        """The least time after the end of each block: the longest way from it."""
        return tuple(longest_paths(self.time, self.followers, with_lags=True))

    def ticks(self, units: int) -> int:
        """The most ticks that `units` whole units can take."""
        return units if self.fine == 1 else (units + 1) * self.fine - 1


def longest_paths(
    time: Sequence[int], after: Sequence[Sequence[tuple[int, int]]], with_lags: bool
) -> list[int]:
    """The longest way over `after` to the start of each block."""
    found: dict[int, int] = {}
    for root in range(len(time)):
        stack = [root]
        while stack:
            waits = after[stack[-1]]
            missing = [j for j, _ in waits if j not in found]
            if not missing:
                ways = [found[j] + time[j] + lag * with_lags for j, lag in waits]
                found[stack.pop()] = max(ways, default=0)
            stack += missing
    return [found[i] for i in range(len(time))]


def in_integers(problem: Problem, micro_batches: int) -> IntegerProblem:
    """The problem in whole numbers, its memory balanced for so many micro-batches."""
    lags = [w.lag for w in problem.waits]
    units, unit, exact = _time_units([*problem.seconds, *lags], max(problem.work))
    times = units[: len(problem.blocks)]
    # every repetend and every micro-batch in flight may pass each block without time once
    zeros = times.count(0)
    fine = 1 + 2 * zeros * MAX_UNROLL if zeros else 1
    lag_of = dict(zip(problem.waits, units[len(problem.blocks) :], strict=True))
    after = tuple(tuple((w.on, lag_of[w] * fine) for w in ws) for ws in problem.after)
    held, capacity, memory_unit, left = _integer_memory(problem, micro_batches)
    return IntegerProblem(
        tuple(t * fine or 1 for t in times), tuple(b.devices for b in problem.blocks), after,
        held, capacity, unit, fine, exact, memory_unit, left, problem.capacity,
    )  # fmt: skip


def with_copies(base: IntegerProblem, unroll: int) -> IntegerProblem:
    """Several micro-batches as one: copy `j` of block `i` is block `i * unroll + j`."""
    if unroll == 1:
        return base
    each = range(unroll)

    def spread(waits: Sequence[tuple[int, int]], j: int) -> tuple[tuple[int, int], ...]:
        return tuple((i * unroll + j, lag) for i, lag in waits)

    return replace(
        base,
        time=tuple(t for t in base.time for _ in each),
        devices=tuple(d for d in base.devices for _ in each),
        after=tuple(spread(waits, j) for waits in base.after for j in each),
        held=tuple(tuple((i * unroll + j, r, c) for i, r, c in h for j in each) for h in base.held),
    )


def with_fewer_ticks(base: IntegerProblem) -> IntegerProblem:
    """The same with fewer ticks, where there are many: for orders found fast, not for proofs."""
    work = max(sum(base.time[i] for i in on) for on in base.by_device)
    if work <= _COARSE:
        return base

    def fewer(value: int) -> int:
        return max(round(value * _COARSE / work), 1)

    after = tuple(tuple((j, fewer(lag) if lag else 0) for j, lag in ws) for ws in base.after)
    return replace(base, time=tuple(map(fewer, base.time)), after=after, fine=1, exact=False)


def _time_units(values: Sequence[float], work: float) -> tuple[list[int], float, bool]:
    """Values as whole multiples of a unit, the unit, and whether nothing was lost."""
    exact = [Fraction(repr(float(v))) for v in values]
    scale = lcm(*(f.denominator for f in exact))
    whole = [int(f * scale) for f in exact]
    common = gcd(*whole) or 1
    if sum(whole) // common <= _EXACT:
        return [w // common for w in whole], common / scale, True
    unit = work / _GRID
    return [int(v / unit) for v in values], unit, False


MemoryChanges = tuple[tuple[int, int, int], ...]


def _integer_memory(
    problem: Problem, micro_batches: int
) -> tuple[tuple[MemoryChanges, ...], tuple[int | None, ...], float, tuple[int, ...]]:
    """By device the memory of its blocks, balanced, what it can hold, the unit, what stays."""
    scale = _memory_scale(problem)
    held: list[MemoryChanges] = []
    capacity: list[int | None] = []
    stays: list[int] = []
    for device, room in enumerate(problem.capacity):
        rows = [
            [
                i,
                _integer_amount(problem.blocks[i].rise, scale),
                _integer_amount(problem.blocks[i].change, scale),
            ]
            for i in problem.order
            if device in problem.blocks[i].devices
        ]
        left = _cancel_changes(rows) * micro_batches
        held.append(tuple((i, max(r, 0), c) for i, r, c in rows if r > 0 or c))
        whole = None if isinf(room) else int(Fraction(room) * scale + _SLACK) - max(left, 0)
        capacity.append(whole)
        stays.append(left)
    return tuple(held), tuple(capacity), float(1 / scale), tuple(stays)


def _memory_scale(problem: Problem) -> Fraction:
    """What to multiply memory by to make it whole, or fine-grained."""
    amounts = [abs(x) for b in problem.blocks for x in (b.memory, b.memory_end)]
    exact = [Fraction(repr(float(a))) for a in amounts]
    scale = lcm(*(f.denominator for f in exact))
    common = gcd(*(int(f * scale) for f in exact)) or 1
    largest = max(amounts, default=0.0) * scale / common
    if largest <= _MEMORY:
        return Fraction(scale, common)
    return Fraction(_MEMORY) / Fraction(max(amounts))


def _integer_amount(amount: float, scale: Fraction) -> int:
    return round(Fraction(repr(float(amount))) * scale)


def _cancel_changes(rows: list[list[int]]) -> int:
    """Make the changes of a device cancel; what each micro-batch left there, or took too much."""
    left = over = sum(change for _, _, change in rows)
    for row in reversed(rows):
        if over > 0 and row[2] > 0:
            cut = min(over, row[2])
            row[1], row[2], over = row[1] - cut, row[2] - cut, over - cut
        elif over < 0 and row[2] < 0:
            cut = max(over, row[2])
            row[2], over = row[2] - cut, over - cut
    return left


# What no schedule can beat, in whole units; every bound holds for repetends of any length.
#
# Let `t_b` be the time of a block, `w_d` the sum of those of device `d`, `c_d` its capacity.
#
#     P ≥ w_d                                                    a device is busy   → `period_bound`
#     P ≥ S + (w_d without S)                                                       → `period_bound`
#     P ≥ S + Σ_r m_r · |r| / c_d                                memory              → `_residence`
#     T ≥ S·N + head(X) + N · Σ_{b∈X} t_b + tail(X)            any X on device → `makespan_bound`
#
# `S` is the time of blocks that hold every device: while one runs nothing else does, so those spans
# can be cut out of any schedule, and what is left is a schedule in which these blocks take no time.
# A residence `r` is memory `m_r` held from the start of the block that takes it to the end of the
# one that gives it back (while that one runs, nothing else can take it); `|r|` is the longest way
# between.


class Residence(NamedTuple):
    """Memory that one block takes and another gives back."""

    taken: int
    given: int
    amount: int


class _ReducedTimes(NamedTuple):
    """A problem with or without the time of its blocks on every device."""

    cut: int  # time of those blocks, when it was taken out
    time: Sequence[int]
    head: Sequence[int]
    tail: Sequence[int]


def period_bound(ticks: IntegerProblem) -> Fraction:
    """The least units a micro-batch can take in the long run."""
    found = Fraction(max(sum(ticks.units[i] for i in on) for on in ticks.by_device))
    for view in _reduced_times(ticks):
        for device in range(len(ticks.capacity)):
            if room := _memory_limit(ticks, device):
                found = max(found, view.cut + Fraction(_memory_time(ticks, view, device), room))
    return found


def makespan_bound(ticks: IntegerProblem, micro_batches: int) -> Fraction:
    """The least units in which so many micro-batches can be done."""
    found = Fraction(0)
    for view in _reduced_times(ticks):
        base = view.cut * micro_batches
        ways = [h + t + g for h, t, g in zip(view.head, view.time, view.tail, strict=True)]
        found = max(found, Fraction(base + max(ways)))
        for device, on in enumerate(ticks.by_device):
            found = max(found, Fraction(base + _busy_span(view, on, micro_batches)))
            found = max(found, base + _memory_span(ticks, view, device, micro_batches))
    return found


def residences(ticks: IntegerProblem, device: int) -> list[Residence] | None:
    """Pairs of blocks that take and release memory; None where a release comes first."""
    reach = ticks.reach
    open_: list[list[int]] = []
    found: list[Residence] = []
    for block, rise, change in ticks.held[device]:
        if rise > max(change, 0):
            found.append(Residence(block, block, rise - max(change, 0)))
        if change > 0:
            open_.append([block, change])
        owed = max(-change, 0)
        for entry in reversed(open_):
            if owed and block in reach[entry[0]]:
                amount = min(owed, entry[1])
                found.append(Residence(entry[0], block, amount))
                entry[1], owed = entry[1] - amount, owed - amount
        if owed:
            return None
        open_ = [entry for entry in open_ if entry[1]]
    return None if open_ else found


def _reduced_times(ticks: IntegerProblem) -> Iterator[_ReducedTimes]:
    num = len(ticks.capacity)
    wide = [len(devices) == num for devices in ticks.devices]
    lag_unit = ticks.fine
    for cut in (False, True):
        time = [0 if cut and w else t for w, t in zip(wide, ticks.units, strict=True)]
        taken = sum(ticks.units) - sum(time)
        # a lag may pass while a wide block runs: with those cut out it counts for nothing
        after, followers = (
            [[(j, lag // lag_unit) for j, lag in waits] for waits in side]
            for side in (ticks.after, ticks.followers)
        )
        yield _ReducedTimes(
            taken, time,
            longest_paths(time, after, with_lags=not cut),
            longest_paths(time, followers, with_lags=not cut),
        )  # fmt: skip


def _busy_span(view: _ReducedTimes, on: Sequence[int], micro_batches: int) -> int:
    """The least span of some blocks of a device, over all ways to choose those blocks."""
    best = 0
    busy = [i for i in on if view.time[i]]
    for head in {view.head[i] for i in busy}:
        for tail in {view.tail[i] for i in busy}:
            chosen = [i for i in busy if view.head[i] >= head and view.tail[i] >= tail]
            if chosen:
                best = max(best, head + micro_batches * sum(view.time[i] for i in chosen) + tail)
    return best


def _memory_span(
    ticks: IntegerProblem, view: _ReducedTimes, device: int, micro_batches: int
) -> Fraction:
    """The least span in which a device's memory can serve so many micro-batches."""
    found, room = residences(ticks, device), _memory_limit(ticks, device)
    if not found or not room:
        return Fraction(0)
    head = min(view.head[r.taken] for r in found)
    tail = min(view.tail[r.given] for r in found)
    return head + Fraction(micro_batches * _memory_time(ticks, view, device), room) + tail


def _memory_limit(ticks: IntegerProblem, device: int) -> int:
    """The memory a device has, before anything stays there; 0 where that bounds nothing."""
    room, left = ticks.capacity[device], ticks.left[device]
    return 0 if room is None or left < 0 else room + left


def _memory_time(ticks: IntegerProblem, view: _ReducedTimes, device: int) -> int:
    """The least memory × time that one micro-batch needs on a device."""
    found = residences(ticks, device) or []
    lags = view.cut == 0
    return sum(r.amount * _path_length(ticks, view.time, r.taken, r.given, lags) for r in found)


def _path_length(
    ticks: IntegerProblem, time: Sequence[int], first: int, last: int, lags: bool
) -> int:
    """From the start of one block to the end of another that waits for it."""
    best = {first: 0}
    for i in ticks.order:
        ways = [
            best[j] + time[j] + lag // ticks.fine * lags for j, lag in ticks.after[i] if j in best
        ]
        if ways and i != first:
            best[i] = max(ways)
    return best[last] + time[last]


# The one door to OR-tools CP-SAT: imported when first used, one worker, the same answer every time.
#
# Budgets are counted in work, not by the clock: the solver's deterministic time and replays of
# orders, in CPU seconds of the machine where their pace was measured. A slower or busier machine
# takes longer and finds the same schedule. A deadline is a cap besides: where it ends a search the
# answer says so.


Status = Literal["found", "best", "none", "unknown"]  # a solution, the best, proven none, no answer

# CPU seconds for one unit of deterministic time (models of order literals, models of intervals):
# medians over our models on an AMD EPYC vCPU. One constraint (building and presolve) takes 2e-6,
# where presolve refuses the model as it does most, to 1.3e-4.
ORDERS, INTERVALS = 3.5, 1.0
_BUILD = 2e-5
_SHORTEST = 0.02  # seconds before a deadline from which the solver is not started any more


@dataclass
class Budget:
    """Seconds of work still to be spent, and a deadline of the clock."""

    left: float
    deadline: float = inf
    late: bool = False  # the deadline has cut something short
    interrupted: bool = False  # Ctrl-C has: nothing is left
    clock: Callable[[], float] = time.monotonic
    whole: "Budget | None" = None  # what it is a part of

    @property
    def is_over(self) -> bool:
        """Whether work or time has run out."""
        if self.left > 0 and self.seconds <= 0:
            self.late = True
            self.left = 0.0
        return self.left <= 0

    @property
    def seconds(self) -> float:
        """What the clock still allows."""
        return self.deadline - self.clock()

    def part(self, share: float, time_share: float = 1.0) -> "Budget":
        """A part of what is left, of the time too; what it spends the whole has spent."""
        work = 0.0 if self.is_over else self.left * share
        ends = self.deadline - (1 - time_share) * self.seconds if time_share < 1 else self.deadline
        return Budget(work, ends, clock=self.clock, whole=self)

    def interrupt(self) -> None:
        """End the search at what was found so far."""
        self.left, self.interrupted = 0.0, True

    def spend(self, work: float) -> None:
        """Count some work."""
        self.left -= work
        if self.whole is not None:
            self.whole.spend(work)


def solver() -> Any:
    """OR-tools' `cp_model`, or an error that says how to get it."""
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise UnmodelledError(
            "the schedule search needs OR-tools, which is not installed",
            hint="pip install 'foretell[solve]', or name a fixed schedule such as `1f1b`",
        ) from None
    return cp_model


def solve(model: Any, budget: Budget, limit: float, pace: float = ORDERS) -> tuple[Status, Any]:
    """Solve a model within a limit and the budget; the second value holds the solution's values."""
    cp = solver()
    engine = cp.CpSolver()
    limit = min(limit, 0.0 if budget.is_over else budget.left)
    seconds = budget.seconds
    if limit <= 0 or seconds < _SHORTEST:
        return "unknown", engine
    parameters = engine.parameters
    parameters.num_workers = 1
    parameters.random_seed = 1
    parameters.max_deterministic_time = limit / pace
    if seconds < inf:
        parameters.max_time_in_seconds = seconds
    parameters.catch_sigint_signal = False
    parameters.cp_model_probing_level = 0  # probing costs more than it saves on these models
    code = _solve_interruptibly(engine, model)
    budget.spend(pace * engine.response_proto.deterministic_time)
    budget.spend(_BUILD * len(model.proto.constraints))
    if code == cp.OPTIMAL:
        return "best", engine
    if code == cp.FEASIBLE:
        return "found", engine
    if code == cp.INFEASIBLE:
        return "none", engine
    if code == cp.MODEL_INVALID:
        raise AssertionError(f"the solver refused our model: {model.validate()}")
    return "unknown", engine


def _solve_interruptibly(engine: Any, model: Any) -> Any:
    """Solve beside the calling thread, so that an interrupt stops the solver at once."""
    found: list[Any] = []
    beside = Thread(target=lambda: found.append(engine.solve(model)), daemon=True)
    beside.start()
    try:
        beside.join()
    except KeyboardInterrupt:
        engine.stop_search()
        beside.join()
        raise
    return found[0]
