"""A repeating pattern by modulo scheduling: every block once for each micro-batch it advances.

With period `P`, block `b` of the k-th repetition starts at `o_b + P·(q_b + k)`, `0 ≤ o_b < P`: `o`
is its place in the ring of time, `q` its lap. In a block graph with copies for each micro-batch
advanced:

    a, b on one device:  o_a + t_a ≤ o_b  and  o_b + t_b ≤ o_a + P,  or the reverse  → `_exclusive`
    b waits for a:       q_b − q_a ≥ c + [o_b < o_a + r] + [o_b + P < o_a + r],
                         where t_a + lag = c·P + r,  0 ≤ r < P                       → `_wait`
    memory of device d:  Σ_c change_c · ([c before b] − q_c) + rise_b ≤ capacity_d   → `_memory`

The last sum is what the device holds as `b` starts, in every repetition: all changes of a
micro-batch cancel, so the number of the repetition falls out. For a fixed `P` everything is
linear, and what is feasible for `P` stays so for `P + 1` (same `o`, same `q`): one infeasible
period rules out all below it.
"""

from dataclasses import dataclass
from typing import Any, Literal

from foretell.search.schedule.solver import Budget, Status, solve, solver
from foretell.search.schedule.ticks import Ticks, copies

Goal = Literal["any", "latency", "residence", "early"]
_AMOUNTS = 1 << 20  # amounts of memory told apart where a goal weighs them
GOALS: tuple[Goal, ...] = ("any", "latency", "residence", "early")  # each completes differently


@dataclass(frozen=True)
class Repetend:
    """A pattern that advances `unroll` micro-batches every `period` ticks."""

    period: int
    unroll: int
    start: tuple[int, ...]  # ticks, of copy j of block i at i * unroll + j

    @property
    def laps(self) -> tuple[int, ...]:
        """How many periods each block starts late."""
        return tuple(s // self.period for s in self.start)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where in the ring each block starts."""
        return tuple(s % self.period for s in self.start)


@dataclass(frozen=True)
class _Model:
    """The solver's model and its variables."""

    cp: Any
    ticks: Ticks  # with copies
    period: int
    offset: list[Any]
    lap: list[Any]
    before: dict[tuple[int, int], Any]  # (a, b) on a common device: a starts first in the ring


def repeat(
    base: Ticks, unroll: int, period: int, goal: Goal, budget: Budget, limit: float
) -> tuple[Status, Repetend | None]:
    """A pattern of this period, the best for a goal; or the news that there is none."""
    ticks = copies(base, unroll)
    if any(t > period for t in ticks.time):
        return "none", None
    model = _encode(ticks, unroll, period)
    _aim(model, goal)
    status, engine = solve(model.cp, budget, limit)
    if status in ("none", "unknown"):
        return status, None
    value = engine.value
    start = [value(o) + period * value(q) for o, q in zip(model.offset, model.lap, strict=True)]
    return status, Repetend(period, unroll, tuple(start))


def _encode(ticks: Ticks, unroll: int, period: int) -> _Model:
    num = len(ticks.time)
    cp = solver().CpModel()
    most = 2 * num + sum(lag for waits in ticks.after for _, lag in waits) // period
    offset = [cp.new_int_var(0, period - 1, "") for _ in range(num)]
    lap = [cp.new_int_var(-most, most, "") for _ in range(num)]
    model = _Model(cp, ticks, period, offset, lap, {})
    # the ring may be turned, so one block is pinned; the last of the longest makes proofs shortest
    longest = max(range(0, num, unroll), key=lambda i: (ticks.time[i], i))
    cp.add(offset[longest] == 0)
    for root in _roots(ticks, unroll):
        cp.add(lap[root] == 0)
    _exclusive(model)
    is_path = all(len(a) <= 1 for a in ticks.after) and all(len(f) <= 1 for f in ticks.followers)
    for i, waits in enumerate(ticks.after):
        for j, lag in waits:
            _wait(model, i, j, lag, is_path)
    _in_turn(model, unroll)
    for device in range(len(ticks.capacity)):
        _memory(model, device)
    return model


def _roots(ticks: Ticks, unroll: int) -> list[int]:
    """One block of each part of the graph that may run a lap later without any change."""
    part = list(range(len(ticks.time)))
    ties = [(i, j) for i, waits in enumerate(ticks.after) for j, _ in waits]
    ties += [(i, i - i % unroll) for i in part]  # copies take turns
    for _ in part:
        for i, j in ties:
            part[i] = part[j] = min(part[i], part[j])
    free = [root for root in sorted(set(part)) if _cancels(ticks, part, root)]
    return free or [0]


def _cancels(ticks: Ticks, part: list[int], root: int) -> bool:
    """Whether the memory of one part of the graph is balanced on every device."""
    return not any(sum(c for i, _, c in held if part[i] == root) for held in ticks.held)


def _exclusive(model: _Model) -> None:
    ticks, cp, o, period = model.ticks, model.cp, model.offset, model.period
    pairs = sorted({(a, b) for on in ticks.by_device for a in on for b in on if a < b})
    for a, b in pairs:
        first = cp.new_bool_var("")
        model.before[a, b], model.before[b, a] = first, ~first
        for x, y, literal in ((a, b, first), (b, a, ~first)):
            gap = cp.add_linear_constraint(o[y] - o[x], ticks.time[x], period - ticks.time[y])
            gap.only_enforce_if(literal)


def _wait(model: _Model, block: int, on: int, lag: int, is_path: bool) -> None:
    """On a path nothing is gained by waiting longer than needed: offsets fix the laps."""
    cp, o, period = model.cp, model.offset, model.period
    laps = model.lap[block] - model.lap[on]
    whole, rest = divmod(model.ticks.time[on] + lag, period)
    if not lag and (on, block) in model.before:
        needed: Any = model.before[block, on]
        whole, rest = 0, 0
    else:
        one, two = cp.new_bool_var(""), cp.new_bool_var("")
        cp.add_implication(two, one)
        for literal, turn in ((one, 0), (two, period)):
            cp.add(o[block] - o[on] >= rest - turn).only_enforce_if(~literal)
            if is_path:
                cp.add(o[block] - o[on] < rest - turn).only_enforce_if(literal)
        needed = one + two
    cp.add(laps == whole + needed) if is_path else cp.add(laps >= whole + needed)


def _in_turn(model: _Model, unroll: int) -> None:
    """Copies of a block start in their order: any schedule can be renamed so."""
    for i in range(0, len(model.lap), unroll):
        for j in range(unroll if unroll > 1 else 0):
            a, b = i + j, i + (j + 1) % unroll
            turn = 1 if j == unroll - 1 else 0
            model.cp.add(model.lap[b] + turn - model.lap[a] >= model.before[b, a])


def _memory(model: _Model, device: int) -> None:
    room, held = model.ticks.capacity[device], model.ticks.held[device]
    if room is None:
        return
    for block, rise, _ in held:
        if rise > 0:
            others = sum(c * model.before[i, block] for i, _, c in held if i != block and c)
            laps = sum(c * model.lap[i] for i, _, c in held if c)
            model.cp.add(others - laps + rise <= room)


def _aim(model: _Model, goal: Goal) -> None:
    """What to make small among patterns of one period: each leads to another completion."""
    if goal == "any":
        return
    ticks, cp = model.ticks, model.cp
    start = [o + model.period * q for o, q in zip(model.offset, model.lap, strict=True)]
    span = model.period * (4 * len(start) + 4)
    first, last = cp.new_int_var(-span, span, ""), cp.new_int_var(-span, span, "")
    for i, s in enumerate(start):
        if not ticks.after[i]:
            cp.add(first <= s)
        if not ticks.followers[i]:
            cp.add(last >= s + ticks.time[i])
    latency = last - first
    if goal == "latency":
        cp.minimize(latency)
    elif goal == "early":
        cp.minimize(len(start) * latency + sum(start) - len(start) * first)
    else:
        most = max((abs(c) for held in ticks.held for _, _, c in held), default=0)
        unit = -(-most // _AMOUNTS) or 1  # bytes are too fine for the solver's integers
        kept = [-(c // unit) * start[i] for held in ticks.held for i, _, c in held if c // unit]
        cp.minimize(sum(kept) + latency)


def is_within(base: Ticks, repetend: Repetend) -> bool:
    """Whether the pattern's memory fits, in every repetition."""
    ticks = copies(base, repetend.unroll)
    offset, lap = repetend.offsets, repetend.laps
    for room, held in zip(ticks.capacity, ticks.held, strict=True):
        for block, rise, _ in held if room is not None else ():
            before = sum(c * ((offset[i] < offset[block]) - lap[i]) for i, _, c in held)
            if room is not None and rise > 0 and before + rise > room:
                return False
    return True
