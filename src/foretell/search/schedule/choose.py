"""The best pipeline schedule for given stages: families of the literature, then a searched one.

    stages = [StageCost(device, forward, backward_input, backward_weight, kept) …]
    best_schedule(stages, memory, micro_batches)[0].actions     # ("0F0", "0F1", …) for each device
    searched(plan, workload, cluster)                           # the plan with such an order

One stage a device takes GPipe, 1F1B, ZB-H1 and ZB-H2; rounds over the devices take interleaved
1F1B; there and back takes Hanayo, ZB-V, V-Half, V-Min and DualPipeV. Every family is replayed with
the stages' own times, so uneven stages and slow links count, and kept only where its memory fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from foretell.cluster import Cluster
from foretell.errors import InfeasibleError, InputError, UnmodelledError
from foretell.plan import Plan
from foretell.plan.check import micro_batches, settled
from foretell.plan.costs import ROUNDING
from foretell.plan.lower import Priced, hop, priced
from foretell.search.schedule.families import BASELINES
from foretell.search.schedule.find import schedule
from foretell.search.schedule.integer_problem import Ticks, ticks
from foretell.search.schedule.local_search import arrays, length
from foretell.search.schedule.problem import Block, Problem, Wait
from foretell.search.schedule.replay import Item, end, peaks, starts_of
from foretell.workload import Workload

SPLIT = ("zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipev")  # weight gradients apart
WHOLE = ("gpipe", "1f1b", "interleaved", "hanayo")
FAMILIES = (*WHOLE, *SPLIT)
_NEVER = 1 << 60  # makespan of an order that does not fit into memory
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

    name: str  # a family, or `searched`
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
            found += _families(problem, mine, micro_batches)
            if work:
                found += _searched(problem, micro_batches, work / 2)
    if not found:
        raise InfeasibleError(
            f"no schedule of {len(stages)} stages fits into the memory given",
            hint="recompute, or take more stages",
        )
    return sorted(found, key=lambda one: (one.makespan, max(one.peak_memory)))


def searched(plan: Plan, workload: Workload, cluster: Cluster, *, work: float) -> Plan | None:
    """The plan with a searched order of its stages, weight gradients apart; None where it has none.

    Stages cost, hold and send what the plan's own lowering says.
    """
    asked = plan.but(schedule="zb-h1", chunks=1, actions=())
    try:
        found = priced(*_settled(asked, workload, cluster))
        num = micro_batches(found.plan)
        if len(found.stages) * num > MOST_ACTIONS:
            return None
        stages, room = zip(*(_stage_cost(found, s) for s in range(len(found.stages))), strict=True)
        best = best_schedule(stages, room, num, families=(), work=work)[0]
    except (InfeasibleError, InputError, UnmodelledError):
        return None
    return plan.but(schedule="actions", chunks=1, actions=best.actions)


def _settled(plan: Plan, workload: Workload, cluster: Cluster) -> tuple[Plan, Workload, Cluster]:
    plan, cluster = settled(plan, workload, cluster)
    return plan, workload, cluster


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
            waits.append(Wait(s, s - 1, _sent(stages, s - 1, s)))
    back = len(stages) - 1  # the block before, backward
    for s in reversed(range(len(stages))):
        one, here = stages[s], len(blocks)
        lag = _sent(stages, s, s + 1) if s + 1 < len(stages) else 0.0
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


def _sent(stages: Sequence[StageCost], first: int, then: int) -> float:
    return stages[first].send if stages[first].device != stages[then].device else 0.0


def _families(
    problem: Problem, names: Sequence[str], micro_batches: int
) -> Iterator[PipelineSchedule]:
    whole = ticks(problem, micro_batches)
    rows = arrays(whole)
    for name in names:
        try:
            items = BASELINES[name](problem, micro_batches)
        except InputError:
            continue
        order = np.array([b * micro_batches + m for b, m in items], np.int64)
        if length(rows, micro_batches, order) < _NEVER:
            yield _described(problem, whole, name, items)


def _searched(problem: Problem, micro_batches: int, work: float) -> Iterator[PipelineSchedule]:
    try:
        found = schedule(problem, micro_batches, work=work)
    except InfeasibleError:
        return
    whole = ticks(problem, micro_batches)
    bound = found.makespan_bound
    yield _described(problem, whole, _SEARCHED, list(found.order), bound)


def _described(
    problem: Problem, whole: Ticks, name: str, items: list[Item], bound: float = 0.0
) -> PipelineSchedule:
    makespan = end(starts_of(problem, items), problem.seconds)
    rows: list[list[str]] = [[] for _ in range(problem.num_devices)]
    for b, m in items:
        block = problem.blocks[b]
        rows[block.devices[0]].append(f"{block.id // 4}{block.kind}{m}")
    held = tuple(p * whole.memory_unit for p in peaks(items, whole.held))
    return PipelineSchedule(name, makespan, held, tuple(map(tuple, rows)), bound)
