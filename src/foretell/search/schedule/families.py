"""Published schedules: fixed orders of the literature, and Tessel's search in two phases.

Fixed schedules from the literature, as orders of blocks in the same harness as the search.

    gpipe         all forwards, then all backwards                        one pipeline
    1f1b          p - s forwards, then backward and forward in turn       one pipeline
    1f1b+         1f1b with sharded blocks as extra steps (Tessel)        m, nn, mllm …
    interleaved   Megatron's order over several rounds                    loop
    chimera       both directions, p micro-batches in flight              x
    hanayo        waves, backward first                                   wave
    zb-h1, zb-h2  zero bubble at 1x and 2x the memory of 1f1b             v with split backward
    zb-v, v-half, v-min  building blocks at 1, 1/2, 1/3 of that memory    wave with split backward
    dualpipe, dualpipev  DeepSeek's eight phases                          x, wave, both split

Each says by an error why a placement is not its own. Memory is what the order needs: it is
compared with the capacity afterwards, like anyone's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations
from math import ceil, inf
from typing import Any, NamedTuple

from foretell.errors import InputError
from foretell.plan import Plan
from foretell.plan.program import BACKWARD, FAMILIES, Cell, dual_phases, order, places_of
from foretell.search.schedule.exact_search import PeriodSearch, Progress, Repetend
from foretell.search.schedule.integer_problem import (
    INTERVALS,
    Budget,
    IntegerProblem,
    in_integers,
    residences,
    solve,
    solver,
)
from foretell.search.schedule.problem import Problem
from foretell.search.schedule.replay import (
    Item,
    Starts,
    add_device_order,
    backward_first,
    end_time,
    order_by_rule,
    sequential_pattern,
    starts_of,
)

# The pipelines inside a placement: stages in order of forward, each with its backward blocks.
#
# Fixed schedules are written for stages, not for blocks. A placement has pipelines when its forward
# blocks form lines, and backward goes back over the same devices.


class StageBlocks(NamedTuple):
    """One stage: its forward block, its backward (or input gradient), its weight gradient."""

    devices: tuple[int, ...]
    forward: int
    backward: int | None = None
    weight: int | None = None

    @property
    def device(self) -> int:
        return self.devices[0]

    @property
    def is_sharded(self) -> bool:
        return len(self.devices) > 1


Pipeline = list[StageBlocks]


def pipelines(problem: Problem) -> list[Pipeline]:
    """Every pipeline of a placement; an error where its forward blocks form no lines."""
    follow = _followers(problem)
    forward = [i for i, b in enumerate(problem.blocks) if b.kind == "F"]
    behind = {w.block for w in problem.waits if problem.blocks[w.on].kind == "F"}
    firsts = [i for i in forward if i not in behind]
    found = [_pipeline_from(problem, first, follow) for first in firsts]
    covered = [s.forward for line in found for s in line]
    if len(set(covered)) < len(covered) or len(covered) < len(forward):
        raise does_not_fit(problem, "forward blocks branch or join")
    return found


def only_pipeline(
    problem: Problem, *, sharded: bool = False, split: bool | None = None
) -> Pipeline:
    """The only pipeline of a placement, if it is as a schedule needs it."""
    found = pipelines(problem)
    if len(found) > 1:
        raise does_not_fit(problem, f"there are {len(found)} pipelines")
    require_stages(problem, found[0], sharded=sharded, split=split)
    return found[0]


def require_stages(
    problem: Problem, stages: Pipeline, *, sharded: bool, split: bool | None
) -> None:
    """Raise unless the stages are as a schedule needs them."""
    for stage in stages:
        if stage.is_sharded and not sharded:
            raise does_not_fit(
                problem, f"block {problem.blocks[stage.forward].id} is on several devices"
            )
        if stage.backward is None and not (stage.is_sharded and sharded):
            raise does_not_fit(problem, f"block {problem.blocks[stage.forward].id} has no backward")
        if split is not None and not stage.is_sharded and (stage.weight is not None) != split:
            raise does_not_fit(
                problem, f"backward is {'not ' if split else ''}split into two gradients"
            )


def does_not_fit(problem: Problem, why: str) -> InputError:
    """A schedule does not apply to this placement."""
    name = f"`{problem.name}`" if problem.name else "the placement"
    return InputError(
        f"this schedule does not fit {name}: {why}",
        hint="`foretell schedule` without a method searches one for any placement",
    )


def merge_device_orders(problem: Problem, orders: Sequence[Sequence[Item]]) -> list[Item]:
    """One order out of the orders of all devices, each block after what it waits for."""
    at = [0] * len(orders)
    done: set[Item] = set()
    items: list[Item] = []
    moved = True
    while moved:
        moved = False
        for device, mine in enumerate(orders):
            while at[device] < len(mine) and _is_next(problem, mine[at[device]], orders, at, done):
                item = mine[at[device]]
                items.append(item)
                done.add(item)
                for d in problem.blocks[item[0]].devices:
                    at[d] += 1
                moved = True
    if any(a < len(o) for a, o in zip(at, orders, strict=True)):
        raise does_not_fit(problem, "its order waits on itself here")
    return items


def _is_next(
    problem: Problem,
    item: Item,
    orders: Sequence[Sequence[Item]],
    at: Sequence[int],
    done: set[Item],
) -> bool:
    block, m = item
    there = (
        at[d] < len(orders[d]) and orders[d][at[d]] == item for d in problem.blocks[block].devices
    )
    return all((w.on, m) in done for w in problem.after[block]) and all(there)


def _pipeline_from(problem: Problem, first: int, follow: list[list[int]]) -> Pipeline:
    line = [first]
    while then := [i for i in follow[line[-1]] if problem.blocks[i].kind == "F"]:
        if len(then) > 1:
            raise does_not_fit(problem, "forward blocks branch or join")
        line.append(then[0])
    back = _backwards(problem, line[-1], follow)
    stages = []
    for i in reversed(line):
        devices = problem.blocks[i].devices
        mirrored = bool(back) and problem.blocks[back[0]].devices == devices
        backward = back.pop(0) if mirrored else None
        behind = [] if backward is None else follow[backward]
        weight = next((j for j in behind if problem.blocks[j].kind == "W"), None)
        stages.append(StageBlocks(devices, i, backward, weight))
    if back:
        raise does_not_fit(problem, "backward does not go back over the devices of forward")
    return stages[::-1]


def _backwards(problem: Problem, last: int, follow: list[list[int]]) -> list[int]:
    """The backward blocks after the last forward block, in their order."""
    line, here = [], last
    while then := [i for i in follow[here] if problem.blocks[i].kind in "BI"]:
        if len(then) > 1:
            raise does_not_fit(problem, "backward blocks branch or join")
        here = then[0]
        line.append(here)
    return line


def _followers(problem: Problem) -> list[list[int]]:
    follow: list[list[int]] = [[] for _ in problem.blocks]
    for wait in problem.waits:
        follow[wait.on].append(wait.block)
    return follow


# The families, by name. Orders that a plan can name come from `foretell.plan.program`.


Baseline = Callable[[Problem, int], list[Item]]


def gpipe(problem: Problem, micro_batches: int) -> list[Item]:
    """All forwards, then all backwards."""
    stages = only_pipeline(problem, sharded=True)
    forward = [(s.forward, m) for m in range(micro_batches) for s in stages]
    back = [b for s in stages[::-1] for b in (s.backward, s.weight) if b is not None]
    return forward + [(b, m) for m in range(micro_batches) for b in back]


def one_f_one_b_plus(problem: Problem, micro_batches: int) -> list[Item]:
    """1F1B of the plain stages, and each sharded block as a step of its own for all devices.

    The shorter of two ways to place those steps: by the time at which 1F1B alone would need them,
    or as soon as all devices are free.
    """
    stages = only_pipeline(problem, sharded=True)
    plain = [s for s in stages if not s.is_sharded]
    if not plain or len(plain) == len(stages):
        raise does_not_fit(problem, "it has no stages of both kinds, plain and sharded")
    if len({s.device for s in plain}) < len(plain):
        raise does_not_fit(problem, "a device has several stages")
    orders: list[list[Item]] = [[] for _ in range(problem.num_devices)]
    rows = _stage_orders(Plan(pp=len(plain)), plain, micro_batches)
    for stage, cells in zip(plain, rows, strict=True):
        orders[stage.device] = cells
    ways = (_insert_by_time(problem, stages, orders), _insert_when_free(problem, stages, orders))
    return min(ways, key=lambda items: end_time(starts_of(problem, items), problem.seconds))


def _plan_family(name: str) -> Baseline:
    """The order that a plan's schedule of this name has, for stages as it needs them."""
    family = FAMILIES[name]

    def made(problem: Problem, micro_batches: int) -> list[Item]:
        stages = only_pipeline(problem, split=family.is_split or None)
        num = len(stages) if family.chunks == 1 else problem.num_devices
        plan = Plan(schedule=name, pp=num, chunks=max(len(stages) // num, 1))
        homes = [s.device for s in stages]
        mine = homes if family.chunks == 1 else range(num)
        is_short = family.chunks == 0 and plan.chunks < 2
        if is_short or len(set(mine)) < num or homes != [mine[s] for s, _ in places_of(plan)]:
            raise does_not_fit(problem, _PLACES[family.chunks])
        if family.chunks == 0 and micro_batches % num:
            why = f"{micro_batches} micro-batches are not a multiple of {num} devices"
            raise does_not_fit(problem, why)
        orders: list[list[Item]] = [[] for _ in range(problem.num_devices)]
        for device, cells in zip(mine, _stage_orders(plan, stages, micro_batches), strict=True):
            orders[device] = cells
        return merge_device_orders(problem, orders)

    return made


_PLACES = {
    0: "stages do not loop over the devices",
    1: "a device has several stages",
    2: "stages do not run over the devices there and back, once",
}


def _stage_orders(plan: Plan, stages: Pipeline, micro_batches: int) -> list[list[Item]]:
    """The blocks of each stage of a plan in its order."""
    found = order(plan, micro_batches)
    part = {place: stages[k] for k, place in enumerate(found.places)}
    return [
        _items(zip(*(column.tolist() for column in turns), strict=True), found.is_split, s, part)
        for s, turns in enumerate(found.turns)
    ]


def _items(
    cells: Iterable[Cell], is_split: bool, device: int, part: Mapping[tuple[int, int], StageBlocks]
) -> list[Item]:
    """Cells as blocks; where weights are not apart in the order, their block follows at once."""
    found: list[Item] = []
    for way, chunk, m in cells:
        stage = part[device, chunk]
        blocks = [(stage.forward, stage.backward, stage.weight)[way]]
        if way == BACKWARD and not is_split:
            blocks.append(stage.weight)
        found += [(b, m) for b in blocks if b is not None]
    return found


def dualpipe(problem: Problem, micro_batches: int) -> list[Item]:
    """Two pipelines in opposite directions; each device works as near end for one of them."""
    found = pipelines(problem)
    for one in found:
        require_stages(problem, one, sharded=False, split=True)
    num, half = problem.num_devices, problem.num_devices // 2
    ways = [[s.device for s in one] for one in found]
    if len(ways) != 2 or num % 2 or ways[0] != ways[1][::-1]:
        raise does_not_fit(
            problem, "it is not two pipelines in opposite directions over an even number"
        )
    if micro_batches < num:
        raise does_not_fit(problem, f"{micro_batches} micro-batches, it needs {num} or more")
    orders = []
    for device in range(num):
        sides = [next(s for s in one if s.device == device) for one in found]
        # the near end of a pipeline is the one its forward enters by
        near, far = sides if found[0].index(sides[0]) < half else sides[::-1]
        cells = dual_phases(min(device, num - 1 - device), half, micro_batches)
        orders.append(_items(cells, True, 0, {(0, 0): near, (0, 1): far}))
    return merge_device_orders(problem, orders)


def chimera(problem: Problem, micro_batches: int) -> list[Item]:
    """Two pipelines in opposite directions, p micro-batches in flight, backward first."""
    found = pipelines(problem)
    for one in found:
        require_stages(problem, one, sharded=False, split=False)
    ways = [[s.device for s in one] for one in found]
    if len(ways) != 2 or ways[0] != ways[1][::-1]:
        raise does_not_fit(problem, "it is not two pipelines in opposite directions")
    return _backward_first_order(problem, micro_batches, problem.num_devices)


def hanayo(problem: Problem, micro_batches: int) -> list[Item]:
    """Waves over the devices, p micro-batches in flight, backward first."""
    stages = only_pipeline(problem, split=False)
    num = problem.num_devices
    rounds, there = len(stages) // num, list(range(num))
    waves = [d for r in range(rounds) for d in (there, there[::-1])[r % 2]]
    if rounds < 2 or [s.device for s in stages] != waves:
        raise does_not_fit(problem, "stages do not run over the devices in waves")
    return _backward_first_order(problem, micro_batches, num)


BASELINES: dict[str, Baseline] = {
    "gpipe": gpipe,
    "1f1b": _plan_family("1f1b"),
    "1f1b+": one_f_one_b_plus,
    "interleaved": _plan_family("interleaved"),
    "chimera": chimera,
    "hanayo": hanayo,
    "dualpipe": dualpipe,
} | {name: _plan_family(name) for name in FAMILIES if FAMILIES[name].is_split}


def _without_sharded(problem: Problem) -> Problem:
    """The placement as if what passes through sharded blocks passed at once."""
    wide = {i for i, b in enumerate(problem.blocks) if len(b.devices) > 1}
    waits = set(problem.waits)
    for i in problem.order:
        if i in wide:
            before = [w for w in waits if w.block == i]
            after = [w for w in waits if w.on == i]
            waits |= {replace(a, on=b.on) for a in after for b in before}
            waits -= {*before, *after}
    return replace(problem, waits=tuple(sorted(waits, key=lambda w: (w.block, w.on))))


def _insert_by_time(problem: Problem, stages: Pipeline, orders: list[list[Item]]) -> list[Item]:
    """Sharded blocks just before the forward, just after the backward, of the stage they serve."""
    bare = _without_sharded(problem)
    items = merge_device_orders(bare, orders)
    starts = starts_of(bare, items)
    keyed = [((starts[block][m], 2, 0), (block, m)) for block, m in items]
    for step, (block, served, is_after) in enumerate(_sharded_neighbours(stages)):
        for m, start in enumerate(starts[served]):
            when = start + (problem.seconds[served] if is_after else 0.0)
            keyed.append(((when, 0 if is_after else 1, step), (block, m)))
    return [item for _, item in sorted(keyed)]


def _insert_when_free(problem: Problem, stages: Pipeline, orders: list[list[Item]]) -> list[Item]:
    """Whatever can start first; a sharded forward stays within one micro-batch of its stage."""
    num = 1 + max(m for order in orders for _, m in order)
    wide = {s.forward: 0 for s in stages if s.is_sharded}
    wide |= {s.backward: 0 for s in stages if s.is_sharded and s.backward is not None}
    served = {
        block: plain for block, plain, is_after in _sharded_neighbours(stages) if not is_after
    }
    left = [deque(order) for order in orders]
    state = _PartialSchedule(problem)
    while len(state.items) < num * len(problem.blocks):
        ready = [(state.start(*order[0]), 1, *order[0]) for order in left if order]
        ready += [
            (state.start(block, m), 0, block, m)
            for block, m in wide.items()
            if m < num and m <= state.done[served.get(block, block)]
        ]
        start, _, block, m = min(ready, default=(inf, 0, 0, 0))
        if start == inf:
            raise does_not_fit(problem, "its order waits on itself here")
        state.run(block, m)
        if block in wide:
            wide[block] += 1
        else:
            left[problem.blocks[block].devices[0]].popleft()
    return state.items


class _PartialSchedule:
    """How far a schedule has come."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.items: list[Item] = []
        self.ends: dict[Item, float] = {}
        self.free = [0.0] * problem.num_devices
        self.done = [0] * len(problem.blocks)

    def start(self, block: int, m: int) -> float:
        """When a block could start; never, as long as what it waits for has not run."""
        waits = [self.ends.get((w.on, m), inf) + w.lag for w in self.problem.after[block]]
        return max(*waits, *(self.free[d] for d in self.problem.blocks[block].devices), 0.0)

    def run(self, block: int, m: int) -> None:
        end_ = self.start(block, m) + self.problem.seconds[block]
        self.items.append((block, m))
        self.ends[block, m] = end_
        self.done[block] += 1
        for d in self.problem.blocks[block].devices:
            self.free[d] = end_


def _sharded_neighbours(stages: Pipeline) -> list[tuple[int, int, bool]]:
    """Each sharded block, the plain block it serves, and whether it comes after that one."""
    found: list[tuple[int, int, bool]] = []
    pending: Pipeline = []
    last = stages[0]
    for stage in stages:
        if stage.is_sharded:
            pending.append(stage)
            continue
        last = stage
        found += [(s.forward, stage.forward, False) for s in pending]
        # backward goes on from the input gradient: weight gradients may wait
        found += [(b, stage.backward or 0, True) for b in _backward_blocks(pending)]
        pending = []
    # a head on all devices: between the last forward and its backward
    found += [(s.forward, last.forward, True) for s in pending]
    return found + [(b, last.forward, True) for b in _backward_blocks(pending)]


def _backward_blocks(stages: Pipeline) -> list[int]:
    return [s.backward for s in stages[::-1] if s.backward is not None]


def _backward_first_order(problem: Problem, micro_batches: int, in_flight: int) -> list[Item]:
    """Backward first, with so many passes through the devices in flight."""
    holds = max(
        sum(b.memory for b in problem.blocks if d in b.devices and b.memory > 0)
        for d in range(problem.num_devices)
    )
    passes = sum(1 for i in range(len(problem.blocks)) if not problem.after[i])
    room = problem.limited(holds * in_flight / passes if holds else None)
    items = order_by_rule(in_integers(room, micro_batches), micro_batches, backward_first)
    if items is None:
        raise does_not_fit(problem, "its order waits on itself here")
    return items


# Tessel's own search (Lin et al., HPCA 2024), kept beside ours to compare with.
#
# Blocks are put in one line; every way to cut the line into `n` runs gives micro-batch `n-1` to
# the first run down to 0 to the last, and one model finds the shortest repetend for it, under the
# best so far. The winner's warm-up and cool-down are then shortened on their own, and the three
# phases follow each other with a barrier between them (`_concatenate_phases`). `n` grows until no
# device idles.
#
# Differences from the published code: CP-SAT in place of Z3, ties in a fixed order.


_SPREAD = 8  # micro-batches in flight to try where memory sets no limit


@dataclass(frozen=True)
class TwoPhase:
    """A repetend, and when everything starts, in ticks."""

    rate: PeriodSearch
    starts: Starts


def two_phase(
    ticks: IntegerProblem, bound: Fraction, micro_batches: int, budget: Budget, progress: Progress
) -> TwoPhase | None:
    """The schedule that the two phases find for so many micro-batches; None if they find none."""
    if any(r is not None and residences(ticks, d) is None for d, r in enumerate(ticks.capacity)):
        raise InputError(
            "Tessel's two phases need memory that each micro-batch takes before it gives it back",
            hint="leave the method out: the search counts any changes of memory",
        )
    sequential_pattern(ticks)  # raises where not even one micro-batch fits
    best = _best_repetend(ticks, bound, micro_batches, budget, progress)
    if best is None:
        return None
    index = tuple(max(best.laps) - lap for lap in best.laps)
    parts = [[], []]  # type: list[list[Item]]
    for block, i in enumerate(index):
        parts[0] += [(block, m) for m in range(i)]
        parts[1] += [(block, m) for m in range(i + 1, max(index) + 1)]
    ends = []
    for part in parts:
        try:
            phase = _solve_phase(ticks, part, budget)
        except KeyboardInterrupt:
            budget.interrupt()
            phase = {}
        ends.append(phase or _sequential_phase(ticks, best, part))
    return TwoPhase(
        PeriodSearch(best, bound), _concatenate_phases(ticks, best, index, ends, micro_batches)
    )


def _best_repetend(
    ticks: IntegerProblem, bound: Fraction, micro_batches: int, budget: Budget, progress: Progress
) -> Repetend | None:
    best: Repetend | None = None
    floor = ceil(bound) * ticks.fine
    for index in _candidates(ticks, min(micro_batches, _most_in_flight(ticks))):
        if budget.left <= 0 or (best is not None and best.period <= floor):
            break
        high = sum(ticks.time) if best is None else best.period - 1
        try:
            found = _solve_repetend(ticks, index, floor, high, budget)
        except KeyboardInterrupt:
            if best is None:
                raise
            budget.interrupt()
            break
        if found is not None:
            best = found
            progress("period", best.period / ticks.fine, float(bound))
    return best


def _most_in_flight(ticks: IntegerProblem) -> int:
    """As many micro-batches as the device with the least room for them can hold, and one."""
    most = [
        1 - (-room // taken)
        for room, held in zip(ticks.capacity, ticks.held, strict=True)
        if room is not None and (taken := sum(max(c, 0) for _, _, c in held))
    ]
    return max(1, min([*most, len(ticks.time)] if most else [_SPREAD, len(ticks.time)]))


def _candidates(ticks: IntegerProblem, most: int) -> Iterator[tuple[int, ...]]:
    """The micro-batch of each block, falling along the line to 0: from 0, 1, … at its first."""
    line = sorted(range(len(ticks.time)), key=lambda i: (ticks.head[i], ticks.devices[i][0], i))
    for spread in range(most):
        for cuts in combinations(range(1, len(line)), spread):
            index = [0] * len(line)
            for place, block in enumerate(line):
                index[block] = sum(cut > place for cut in cuts)
            yield tuple(index)


def _solve_repetend(
    ticks: IntegerProblem, index: tuple[int, ...], low: int, high: int, budget: Budget
) -> Repetend | None:
    """The shortest repetend in which each block runs for the micro-batch given."""
    cp = solver().CpModel()
    period = cp.new_int_var(low, high, "")
    span = sum(ticks.time)
    start = [cp.new_int_var(0, span, "") for _ in ticks.time]
    for i, waits in enumerate(ticks.after):
        for j, lag in waits:
            cp.add(start[i] + (index[j] - index[i]) * period >= start[j] + ticks.time[j] + lag)
    before = add_device_order(cp, ticks, start, period)
    for room, held in zip(ticks.capacity, ticks.held, strict=True):
        for block, rise, _ in held if room is not None else ():
            earlier = sum(c * before[i, block] for i, _, c in held if i != block and c)
            cp.add(earlier + sum(c * index[i] for i, _, c in held) + rise <= room)
    cp.minimize(period)
    status, engine = solve(cp, budget, budget.left / 4)
    if status not in ("best", "found"):
        return None
    length = engine.value(period)
    starts = [engine.value(s) - index[i] * length for i, s in enumerate(start)]
    return Repetend(length, 1, tuple(starts))


def _solve_phase(ticks: IntegerProblem, part: list[Item], budget: Budget) -> dict[Item, int]:
    """The least makespan of a warm-up or a cool-down on its own."""
    if not part:
        return {}
    cp = solver().CpModel()
    total = sum(ticks.time[block] for block, _ in part)
    total += sum(lag for waits in ticks.after for _, lag in waits) * (1 + max(m for _, m in part))
    start = {item: cp.new_int_var(0, total, "") for item in part}
    last = cp.new_int_var(0, total, "")
    for (block, m), variable in start.items():
        cp.add(last >= variable + ticks.time[block])
        for j, lag in ticks.after[block]:
            if (j, m) in start:
                cp.add(variable >= start[j, m] + ticks.time[j] + lag)
    for device, on in enumerate(ticks.by_device):
        here = [item for item in part if item[0] in on]
        cp.add_no_overlap(
            [cp.new_fixed_size_interval_var(start[i], ticks.time[i[0]], "") for i in here]
        )
        _add_phase_memory(cp, ticks, device, start, last)
    cp.minimize(last)
    status, engine = solve(cp, budget, max(budget.left / 2, 1.0), INTERVALS)
    if status in ("best", "found"):
        return {item: engine.value(s) for item, s in start.items()}
    return {}


def _sequential_phase(ticks: IntegerProblem, best: Repetend, part: list[Item]) -> dict[Item, int]:
    """A part one block at a time, in the order of the repetend: where time ran out for better."""
    now, found = 0, {}
    longest_lag = max((lag for waits in ticks.after for _, lag in waits), default=0)
    for block, m in sorted(part, key=lambda i: (best.start[i[0]] + i[1] * best.period, i)):
        found[block, m] = now
        now += ticks.time[block] + longest_lag
    return found


def _add_phase_memory(
    cp: Any, ticks: IntegerProblem, device: int, start: dict[Item, Any], last: Any
) -> None:
    """Memory within a part: taken before it, there from its start; given later, to its end."""
    room, found = ticks.capacity[device], residences(ticks, device)
    if room is None or not found:
        return
    spans, amounts = [], []
    for taken, given, amount in found:
        both = {m for block, m in start if block in (taken, given)}
        for m in sorted(both):
            begin = start.get((taken, m), 0)
            stop = start[given, m] + ticks.time[given] if (given, m) in start else last
            size = cp.new_int_var(0, 1 << 40, "")
            spans.append(cp.new_interval_var(begin, size, stop, ""))
            amounts.append(amount)
    cp.add_cumulative(spans, amounts, room)


def _concatenate_phases(
    ticks: IntegerProblem,
    best: Repetend,
    index: tuple[int, ...],
    ends: list[dict[Item, int]],
    micro_batches: int,
) -> Starts:
    """Warm-up, repetends, cool-down, each once the one before has ended on all devices."""
    warm, cool = ends
    first = [s + i * best.period for s, i in zip(best.start, index, strict=True)]
    lag = max((lag for waits in ticks.after for _, lag in waits), default=0)  # crosses a barrier
    shift = max((s + ticks.time[b] + lag for (b, _), s in warm.items()), default=0) - min(first)
    times = micro_batches - max(index)
    core_end = shift + (times - 1) * best.period
    core_end += max(s + t for s, t in zip(first, ticks.time, strict=True)) + lag
    starts: Starts = [[0.0] * micro_batches for _ in ticks.time]
    for (block, m), s in warm.items():
        starts[block][m] = s
    for block, i in enumerate(index):
        for k in range(times):
            starts[block][i + k] = shift + first[block] + k * best.period
    for (block, m), s in cool.items():
        starts[block][m + times - 1] = core_end + s
    return starts
