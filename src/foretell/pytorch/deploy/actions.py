"""What each rank of a pipeline does, in order: plain data, no torch.

An action is `<stage><kind><micro-batch>`, as in torchtitan's schedule files: `3F0` runs stage 3
forward on micro-batch 0; B is its whole backward, I and W are the gradients of its input and of
its weights. A `Pipeline` adds how stages follow one another; `check` raises unless every rank's
list can run to its end, so that no launch ends in a deadlock.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from foretell.errors import InputError, unknown
from foretell.plan import Plan
from foretell.plan.program import FAMILIES
from foretell.plan.program import order as order_of
from foretell.plan.stage_placement import Action

_CELL = re.compile(r"(\d+)([FBIW])(\d+)")
Orders = tuple[tuple[Action, ...], ...]  # by rank


class Ran(NamedTuple):
    """One action as it ran: seconds of `time.monotonic`, compute alone."""

    action: str
    start: float
    end: float


@dataclass(frozen=True)
class Pipeline:
    """Stages, what each takes its input from, and the order of actions on every rank.

    A stage on several ranks is run by all of them at once (it communicates inside). Stages that no
    way connects are separate pipelines: each gets its own part of the batch.
    """

    orders: Orders
    after: tuple[tuple[int, ...], ...] = ()  # of each stage; empty: one line
    copies: tuple[tuple[int, ...], ...] = ()  # stages that hold the same parameters
    is_joint: bool = True  # ranks of a stage run it at once; else each when its own order says

    def __post_init__(self) -> None:
        num = 1 + max((a.stage for order in self.orders for a in order), default=-1)
        line = tuple((s - 1,) if s else () for s in range(num))
        object.__setattr__(self, "after", self.after or line)
        check(self)

    @property
    def num_stages(self) -> int:
        return len(self.after)

    @cached_property
    def micro_batches(self) -> int:
        """How many each stage runs."""
        return 1 + max(a.micro_batch for order in self.orders for a in order)

    @cached_property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each stage."""
        each = [{a.stage for a in order} for order in self.orders]
        return tuple(
            tuple(r for r, stages in enumerate(each) if s in stages) for s in range(self.num_stages)
        )

    @cached_property
    def followers(self) -> tuple[tuple[int, ...], ...]:
        """The stages that take their input from each stage."""
        every = range(self.num_stages)
        return tuple(tuple(t for t in every if s in self.after[t]) for s in every)

    @cached_property
    def trains(self) -> bool:
        """Whether anything runs backward."""
        return any(a.kind != "F" for order in self.orders for a in order)

    @cached_property
    def halves(self) -> bool:
        """Whether a backward is in two, I and W."""
        return any(a.kind == "W" for order in self.orders for a in order)

    @cached_property
    def frozen(self) -> frozenset[int]:
        """The stages without a backward, where others have one: nothing up to them is trained."""
        back = {a.stage for order in self.orders for a in order if a.kind != "F"}
        return frozenset(range(self.num_stages)) - back if back else frozenset()

    @property
    def forward(self) -> Pipeline:
        """The same pipeline without its backward."""
        orders = tuple(tuple(a for a in order if a.kind == "F") for order in self.orders)
        return replace(self, orders=orders)

    @cached_property
    def lines(self) -> tuple[int, ...]:
        """For each stage, which of the separate pipelines it is in."""
        found = list(range(self.num_stages))
        for s, befores in enumerate(self.after):
            for b in befores:
                old, new = max(found[s], found[b]), min(found[s], found[b])
                found = [new if f == old else f for f in found]
        names = sorted(set(found))
        return tuple(names.index(f) for f in found)

    def on(self, rank: int) -> list[int]:
        """The stages of a rank."""
        return sorted({a.stage for a in self.orders[rank]})


def parse(rows: Sequence[Sequence[str]]) -> Orders:
    """Actions from their text, a row a rank; empty cells are left out."""
    return tuple(
        tuple(_action(cell, rank) for cell in row if cell.strip()) for rank, row in enumerate(rows)
    )


def _action(cell: str, rank: int) -> Action:
    found = _CELL.fullmatch(cell.strip())
    if not found:
        raise InputError(
            f"action `{cell}` of rank {rank} is not stage, kind and micro-batch",
            hint="write `3F0`, `3B0`, or `3I0` and `3W0`",
        )
    return Action(int(found[1]), found[2], int(found[3]))


def check(pipeline: Pipeline) -> None:
    """Raise unless every stage runs every micro-batch there and back and no rank waits for ever."""
    if not any(pipeline.orders):
        raise InputError("a pipeline without actions")
    for stage, befores in enumerate(pipeline.after):
        if any(b >= stage for b in befores):
            raise InputError(
                f"stage {stage} takes its input from {list(befores)}",
                hint="number stages in the order of forward",
            )
        if stage in pipeline.frozen and not pipeline.frozen.issuperset(befores):
            raise InputError(
                f"stage {stage} has no backward, and {list(befores)} before it wait for a gradient",
                hint="give it B, or I and W; only stages with nothing trained up to them have none",
            )
    for rank, order in enumerate(pipeline.orders):
        _check_complete(pipeline, rank, order)
    if pipeline.is_joint:
        _check_runs(pipeline)


def _check_complete(pipeline: Pipeline, rank: int, order: Sequence[Action]) -> None:
    if len(set(order)) < len(order):
        twice = next(a for a in order if order.count(a) > 1)
        raise InputError(f"rank {rank} runs {twice} twice")
    there = set(order)
    for stage in {a.stage for a in order}:
        has_backward = pipeline.trains and stage not in pipeline.frozen
        for m in range(pipeline.micro_batches):
            kinds = "".join(k for k in "FBIW" if Action(stage, k, m) in there)
            if kinds not in (("FB", "FIW") if has_backward else ("F",)):
                raise InputError(
                    f"rank {rank} runs stage {stage} on micro-batch {m} as `{kinds}`",
                    hint="each micro-batch needs F and B, or F, I and W; F alone where none is",
                )


def needs(pipeline: Pipeline, action: Action) -> list[Action]:
    """What an action waits for; any one kind of backward that frees the gradient will do."""
    stage, kind, m = action
    if kind == "F":
        return [Action(b, "F", m) for b in pipeline.after[stage]]
    if kind == "W":
        return [Action(stage, "I", m)]
    return [Action(stage, "F", m), *(Action(f, "I", m) for f in pipeline.followers[stage])]


def run_order(pipeline: Pipeline) -> list[Action]:
    """One order for all ranks together: each action after what it waits for, as far as they get."""
    at = [0] * len(pipeline.orders)
    done: set[Action] = set()
    order: list[Action] = []
    moved = True
    while moved:
        moved = False
        for rank, mine in enumerate(pipeline.orders):
            while at[rank] < len(mine) and _is_next(pipeline, mine[at[rank]], at, done):
                action = mine[at[rank]]
                for r in pipeline.ranks[action.stage]:
                    at[r] += 1
                done |= {action, action._replace(kind=action.kind.replace("B", "I"))}
                order.append(action)
                moved = True
    return order


def _is_next(pipeline: Pipeline, action: Action, at: Sequence[int], done: set[Action]) -> bool:
    if not all(n in done for n in needs(pipeline, action)):
        return False
    rows = [(pipeline.orders[r], at[r]) for r in pipeline.ranks[action.stage]]
    return all(k < len(row) and row[k] == action for row, k in rows)


def _check_runs(pipeline: Pipeline) -> None:
    ran = run_order(pipeline)
    wanted = {a for order in pipeline.orders for a in order}
    if len(ran) < len(wanted):
        done = set(ran)
        left = [[a for a in order if a not in done] for order in pipeline.orders]
        stuck = [f"rank {rank} at {order[0]}" for rank, order in enumerate(left) if order]
        raise InputError(
            f"the ranks would wait for each other for ever: {', '.join(stuck)}",
            hint="on each rank, put an action after those whose results it needs",
        )


def pipeline(plan: Plan, micro_batches: int) -> Pipeline:
    """The pipeline of a plan for so many micro-batches."""
    if plan.actions:
        rows, num = plan.actions, len(plan.actions)
        return Pipeline(parse([[_cell(c, r, num) for c in row] for r, row in enumerate(rows)]))
    if plan.schedule not in FAMILIES:
        raise unknown("schedule without actions", plan.schedule, FAMILIES)
    if plan.schedule == "interleaved" and plan.chunks > 1 and micro_batches % plan.pp:
        raise InputError(
            f"{micro_batches} micro-batches are not a multiple of {plan.pp} stages, "
            "as interleaving needs",
            hint="choose micro_batch so that they are, or the schedule 1f1b",
        )
    return Pipeline(parse(order_of(plan, micro_batches).rows()))


def _cell(cell: str, rank: int, ranks: int) -> str:
    """`F0`, or `F0.1` of a chunk, are a plan's own words; `3F0` says its stage."""
    if cell[:1].isdigit():
        return cell
    action, _, chunk = cell.partition(".")
    return f"{int(chunk or 0) * ranks + rank}{action}"
