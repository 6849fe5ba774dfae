"""The graph of a plan whose stages are placed freely: its prices, its memory, and every message.

Ranks with the same actions are one. A stage on several ranks is one task that holds the lanes of
all of them; what it exchanges inside is in its price. Messages leave on lanes of their own, one for
each direction, in the order in which they are made, and share nothing with the compute.

What a freely placed stage costs and holds, and what its messages take.

Layers are priced for the very ranks of a stage: as many ways split as it has ranks, over the links
between them, at the pace of the slowest of their devices. Backward is told apart: the gradient of
the input (with what is run again) and that of the weights, whose matmuls can wait.

Bytes a rank holds where stages are placed freely: for good, and as its actions go by.

    forward    what backward will need is taken at its start; what only forward needs goes after it
    backward   what was dropped is made again for its time; what forward kept goes at its end

Where backward is split, what is kept goes with the weight gradient, its last reader. A stage
without backward keeps nothing. Offloaded, it is there only while forward or backward runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from foretell.cluster import Cluster
from foretell.cost import collective
from foretell.errors import InputError
from foretell.graph import Builder, Graph
from foretell.graph.groups import group_text
from foretell.plan.check import check
from foretell.plan.costs import Costs, costs, layer_parts, trained_tensors, weight_gradients
from foretell.plan.estimate import rank_update
from foretell.plan.framework import running
from foretell.plan.layer_cost import slower
from foretell.plan.layouts import Array
from foretell.plan.memory import ROUNDING, USABLE, Memory, stage_memory
from foretell.plan.plan import Plan
from foretell.plan.stage_placement import Action, Edge, StagePlacement, acts, copies, edges, places
from foretell.portable import product
from foretell.whatif import Setting, applied, parse
from foretell.workload import Workload
from foretell.workload.workload import BYTES

_CHUNK = 2.0**21  # bytes of a block of PyTorch's allocator


@dataclass(frozen=True)
class Rates:
    """Every layer once, for one micro-batch, on one set of ranks; seconds, and bytes of a rank."""

    forward: Array
    inputs: Array  # gradient of the input
    weights: Array  # gradient of the weights
    kept: Array  # from forward to backward
    output_bytes: Array  # to the next layer: all that is kept where forward runs again
    brief: Array  # only while it runs
    elements: Array  # of weights
    parameters: Array  # bytes of them
    trained: Array  # bytes of gradients and optimizer state besides
    tensors: Array  # weights that are trained
    lead: Array  # seconds by which the device has more to do than the host to issue
    is_block: Array  # 1 or 0


class PlacedStageCost(NamedTuple):
    """One stage and one micro-batch: seconds, and bytes of each of its ranks."""

    forward: float
    inputs: float
    weights: float
    kept: float  # from forward to backward
    brief: float  # while forward runs
    moment: float  # while backward runs: what was dropped and is made again
    parameters: float
    trained: float
    elements: float  # of weights that are trained
    tensors: float  # how many of them there are
    lead: float  # seconds by which the device has more to do than the host to issue

    @property
    def backward(self) -> float:
        """Both gradients."""
        return self.inputs + self.weights


@dataclass(frozen=True)
class Prices:
    """One model on one cluster; prices of a set of ranks are worked out once a kind of set."""

    plan: Plan  # checked: micro-batch, program and formats are its own
    workload: Workload
    cluster: Cluster
    _known: dict[object, Rates] = field(default_factory=dict, repr=False)

    def rates(self, ranks: Sequence[int]) -> Rates:
        """Every layer on these ranks."""
        group = tuple(ranks)
        alike = (self.cluster.levels(group), tuple(self.cluster.devices[r].name for r in group))
        if alike not in self._known:
            self._known[alike] = _rates(self, group)
        return self._known[alike]


def _rates(prices: Prices, ranks: tuple[int, ...]) -> Rates:
    workload = prices.workload
    c = _costs(prices, workload, ranks)
    held = [_alone(c, workload, at) for at in range(len(workload.layers))]
    parts = [layer_parts(c, at, workload) for at in range(len(workload.layers))]
    both = _column([back.seconds(c.bend) for _, back in parts])
    both[-1] += float(c.turn[0])  # what the host does beside the loss
    alone = _costs(prices, weight_gradients(workload), ranks)
    weights = np.minimum(_column([cost.backward.kernels for cost in alone.layers]), both)
    return Rates(
        forward=_column([ahead.seconds(c.bend) for ahead, _ in parts]),
        inputs=both - weights,
        weights=weights,
        kept=_column([h.kept for h in c.holdings]),
        output_bytes=_column([h.output_bytes for h in c.holdings]),
        brief=_column([h.brief for h in c.holdings]),
        elements=_column([h.weights + h.experts for h in c.holdings]),
        parameters=_column([m.parameters for m in held]),
        trained=_column([m.gradients + m.optimizers for m in held]),
        tensors=np.array([float(n) for n in trained_tensors(workload)]),
        lead=_column([a.lead(c.bend) + b.lead(c.bend) for a, b in parts]),
        is_block=np.array([float(layer.is_block) for layer in workload.layers]),
    )


def _costs(prices: Prices, workload: Workload, ranks: tuple[int, ...]) -> Costs:
    plain = {"pp": 1, "dp": 1, "stages": (), "actions": (), "recompute": "none", "schedule": "1f1b"}
    plan = prices.plan.but(tp=len(ranks), **plain)
    device = slower([prices.cluster.devices[r] for r in ranks], plan.dtype or "bf16")
    return costs([plan], workload, prices.cluster.part(ranks), device)


def _alone(c: Costs, workload: Workload, at: int) -> Memory:
    """What one layer makes its rank hold for good."""
    times = np.zeros((len(workload.layers), 1))
    times[at] = 1.0
    return stage_memory(c, times, workload, np.zeros(1))


def _column(values: Sequence[Array]) -> Array:
    return np.array([float(np.ravel(v)[0]) for v in values])


def placed_stage_cost(prices: Prices, place: StagePlacement) -> PlacedStageCost:
    """What a stage costs and holds."""
    r, times = prices.rates(place.ranks), np.array(place.times, float)
    blocks, again = times * r.is_block, float("recompute" in place.ways)
    trains = float("frozen" not in place.ways)
    kept = float(product(times - again * blocks, r.kept) + product(again * blocks, r.output_bytes))
    dropped = float(np.max((r.kept + r.brief) * (blocks > 0))) * again
    return PlacedStageCost(
        forward=float(product(times, r.forward)),
        inputs=float(product(times, r.inputs) + product(again * blocks, r.forward)),
        weights=float(product(times, r.weights)) * trains,
        kept=_rounded(kept),
        brief=_rounded(float(np.max(r.brief * (times > 0)))),
        moment=_rounded(dropped),
        parameters=ROUNDING * float(product(times, r.parameters)),
        trained=ROUNDING * float(product(times, r.trained)) * trains,
        elements=float(product(times, r.elements)) * trains,
        tensors=float(product(times, r.tensors)) * trains,
        lead=float(product(times, r.lead)),
    )


def _rounded(size: float) -> float:
    """Bytes as the allocator gives them out: whole blocks."""
    return float(np.ceil(ROUNDING * size / _CHUNK)) * _CHUNK


def room(prices: Prices, rank: int) -> float:
    """Bytes a device has for tensors."""
    return float(prices.cluster.devices[rank].memory) * USABLE


def message(
    prices: Prices, first: StagePlacement, then: StagePlacement, layers: Sequence[int]
) -> float:
    """Seconds until the ranks of one stage have what another hands them."""
    missing = [r for r in then.ranks if r not in first.ranks]
    if not missing:
        return 0.0
    size = float(sum(prices.rates(first.ranks).output_bytes[i] for i in layers))
    if len(missing) > len(first.ranks):
        group = prices.cluster.levels((first.ranks[0], *missing))
        return float(collective.price("broadcast", size, group).seconds)
    pairs = list(zip(first.ranks, missing, strict=False))
    groups = [
        prices.cluster.levels(pair, pairs[:at] + pairs[at + 1 :]) for at, pair in enumerate(pairs)
    ]
    return max(float(collective.price("send", size, group).seconds) for group in groups)


def offloading(prices: Prices, rank: int, size: float) -> float:
    """Seconds to move bytes between a device and its host."""
    return size / prices.cluster.host_bandwidth(rank)


def updating(prices: Prices, rank: int, paid: Sequence[PlacedStageCost]) -> float:
    """Seconds of the optimizer on one rank, for all its stages together."""
    elements, tensors, lead = (
        sum(getattr(one, name) for one in paid) for name in ("elements", "tensors", "lead")
    )
    device, learned = prices.cluster.devices[rank], prices.cluster.calibration
    return rank_update(device, learned, running(prices.plan), elements, tensors, lead)


def tying(prices: Prices, ranks: Sequence[int], elements: float) -> float:
    """Seconds to add up the gradients of weights that several ranks have."""
    plan = prices.plan
    width = BYTES[plan.grad_dtype or running(plan).grad_dtype]
    group = prices.cluster.levels(tuple(ranks))
    return float(collective.price("all_reduce", elements * width, group).seconds)


class Change(NamedTuple):
    """Bytes that a block adds on its ranks when it starts, and when it ends."""

    start: float
    end: float


def change(
    kind: str, paid: PlacedStageCost, ways: Sequence[str], *, trains: bool, split: bool
) -> Change:
    """What one block of a stage does to the memory of its ranks."""
    away = "offload" in ways and trains
    kept = paid.kept if trains else 0.0
    if kind == "F":
        return Change(kept + paid.brief, -paid.brief - (kept if away else 0.0))
    back = paid.moment + (kept if away else 0.0)
    if kind == "W":
        return Change(0.0, -kept)
    if kind == "I" and split:
        return Change(back, -paid.moment)
    return Change(back, -kept - paid.moment)


def constant(prices: Prices, found: Sequence[StagePlacement], rank: int, *, trains: bool) -> float:
    """Bytes of weights, and of what training keeps beside them, on one rank."""
    mine = [place for place in found if rank in place.ranks]
    total = 0.0
    for place in mine:
        paid = placed_stage_cost(prices, place)
        total += paid.parameters + (paid.trained if trains else 0.0)
    return total - _twice(prices, mine, trains)


def _twice(prices: Prices, mine: Sequence[StagePlacement], trains: bool) -> float:
    """What counts twice where tied weights meet on a rank, split alike."""
    workload, total = prices.workload, 0.0
    for kept, other in workload.tied:
        first, last = (_layer(workload, name) for name in (kept, other))
        for a in mine:
            for b in mine:
                if a.times[first] and b.times[last] and a.ranks == b.ranks:
                    r = prices.rates(b.ranks)
                    held = r.parameters[last] + (r.trained[last] if trains else 0.0)
                    share = tied_elements(workload, other) / len(b.ranks) / r.elements[last]
                    total += float(held * min(share, 1.0))
    return total


def tied_elements(workload: Workload, name: str) -> float:
    """How many numbers a tied weight has."""
    return workload.weights.get(name, 0.0)


def _layer(workload: Workload, weight: str) -> int:
    names = [layer.name for layer in workload.layers]
    return names.index(weight.split("/")[0])


def peaks(
    prices: Prices, found: Sequence[StagePlacement], rows: Sequence[Sequence[Action]]
) -> list[float]:
    """The most bytes each rank holds, in the order of its actions."""
    trains = any(act.kind != "F" for row in rows for act in row)
    back = {act.stage for row in rows for act in row if act.kind != "F"}
    split = {act.stage for row in rows for act in row if act.kind == "W"}
    bills = [placed_stage_cost(prices, place) for place in found]
    out = []
    for rank, row in enumerate(rows):
        now = most = constant(prices, found, rank, trains=trains) if row else 0.0
        for act in row:
            s = act.stage
            by = change(act.kind, bills[s], found[s].ways, trains=s in back, split=s in split)
            most = max(most, now + by.start, now + by.start + by.end)
            now += by.start + by.end
        out.append(most)
    return out


@dataclass
class _Context:
    """A graph on its way."""

    prices: Prices
    found: tuple[StagePlacement, ...]
    rows: list[list[Action]]
    links: list[Edge]
    build: Builder = field(default_factory=Builder)
    lanes: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # compute, on, back
    task: dict[Action, int] = field(default_factory=dict)  # the task that does it
    sent: dict[tuple[Action, int], int] = field(default_factory=dict)  # to a stage: who brings it
    last: dict[int, int] = field(default_factory=dict)  # of each leading rank: its latest task

    @cached_property
    def kinds(self) -> set[tuple[int, str]]:
        """What is done of each stage."""
        return {(act.stage, act.kind) for row in self.rows for act in row}

    @cached_property
    def leaders(self) -> dict[int, int]:
        """The rank that stands for each: the first with the same actions."""
        first: dict[tuple[Action, ...], int] = {}
        return {r: first.setdefault(tuple(row), r) for r, row in enumerate(self.rows) if row}


def lower_places(
    plan: Plan, workload: Workload, cluster: Cluster, prices: Prices | None = None
) -> Graph:
    """The graph of one step, at the prices given or at those of the workload."""
    plan = check(plan, workload, cluster)
    prices = prices or Prices(plan, workload, cluster)
    found = places(plan, workload, cluster.size)
    rows = acts(plan, found)
    context = _Context(prices, found, rows, edges(found, workload))
    leaders = context.leaders
    for rank in dict.fromkeys(leaders.values()):
        names = (("compute", "compute"), ("send on", "comm"), ("send back", "comm"))
        lanes = tuple(context.build.lane(name, rank=rank, kind=kind) for name, kind in names)
        context.lanes[rank] = (lanes[0], lanes[1], lanes[2])
    _write_acts(context, leaders)
    if any(act.kind != "F" for act in context.task):
        _write_end(context, leaders)
    _write_buffers(context)
    graph = context.build.made({"workload": workload.name, "plan": str(plan)})
    return applied([parse(text) for text in plan.whatifs], graph, Setting(cluster))


def _write_acts(context: _Context, leaders: dict[int, int]) -> None:
    """Every action once what it needs is written, rank by rank."""
    bills = [placed_stage_cost(context.prices, place) for place in context.found]
    groups = [sorted({leaders[r] for r in place.ranks}) for place in context.found]
    at = dict.fromkeys(context.lanes, 0)
    moved = True
    while moved:
        moved = False
        for rank in at:
            while at[rank] < len(context.rows[rank]):
                act = context.rows[rank][at[rank]]
                group = groups[act.stage]
                if not all(_next(context, r, at) == act for r in group) or not _ready(context, act):
                    break
                _write(context, act, bills[act.stage], group)
                at |= {r: at[r] + 1 for r in group}
                moved = True
    for rank, done in at.items():
        if done < len(context.rows[rank]):
            raise InputError(
                f"rank {rank} waits for ever before `{context.rows[rank][done]}`",
                hint="an action comes after what it needs, in one order on all ranks of its stage",
            )


def _next(context: _Context, rank: int, at: dict[int, int]) -> Action | None:
    row = context.rows[rank]
    return row[at[rank]] if at[rank] < len(row) else None


def _needs(context: _Context, act: Action) -> list[tuple[Action, int]]:
    """What an action reads: (who made it, for which stage)."""
    s, m = act.stage, act.micro_batch
    if act.kind == "F":
        return [(Action(e.first, "F", m), s) for e in context.links if e.then == s]
    if act.kind == "W":
        return [(Action(s, "I", m), s)]
    behind = [e.then for e in context.links if e.first == s]
    back = [(Action(b, k, m), s) for b in behind for k in "BI" if (b, k) in context.kinds]
    return back or [(Action(s, "F", m), s)]


def _ready(context: _Context, act: Action) -> bool:
    own = act.kind == "F" or Action(act.stage, "F", act.micro_batch) in context.task
    return own and all(made in context.task for made, _ in _needs(context, act))


def _write(context: _Context, act: Action, paid: PlacedStageCost, group: list[int]) -> None:
    ways = context.found[act.stage].ways
    task = context.build.task(
        lanes=[context.lanes[r][0] for r in group],
        after=[context.sent.get((made, s), context.task[made]) for made, s in _needs(context, act)],
        kind="kernel",
        op={"F": "forward", "B": "backward", "I": "backward", "W": "weight gradient"}[act.kind],
        name=str(act),
        rank=group[0],
        seconds=seconds(context.prices, context.found[act.stage], act.kind, paid),
        phase="forward" if act.kind == "F" else "backward",
        micro_batch=act.micro_batch,
        layer=" ".join(ways),
        source="formula",
    )
    context.task[act] = task
    context.last |= dict.fromkeys(group, task)
    if act.kind != "W":
        _send(context, act, group[0])


def seconds(prices: Prices, place: StagePlacement, kind: str, paid: PlacedStageCost) -> float:
    """How long one block of a stage takes; offloading hides behind it as far as it can."""
    took = {"F": paid.forward, "B": paid.backward, "I": paid.inputs, "W": paid.weights}[kind]
    if "offload" in place.ways and kind != "W":
        return max(took, offloading(prices, place.ranks[0], paid.kept))
    return took


def _send(context: _Context, act: Action, rank: int) -> None:
    """Hand on what an action made, to each stage on other ranks that reads it.

    Beside compute: placed stages run under PyTorch's pipelining, which waits for what it receives.
    """
    ahead = act.kind == "F"
    for link in context.links:
        here, there = (link.first, link.then) if ahead else (link.then, link.first)
        reads = ahead or {(there, "B"), (there, "I")} & context.kinds
        if here != act.stage or not reads:
            continue
        first, then = context.found[here], context.found[there]
        took = message(context.prices, first, then, link.layers)
        if took:
            context.sent[act, there] = context.build.task(
                lane=context.lanes[rank][1 if ahead else 2],
                after=[context.task[act]],
                kind="send",
                op="send",
                rank=rank,
                seconds=took,
                phase="communicate",
                micro_batch=act.micro_batch,
                group=group_text((first.ranks[0], then.ranks[0])),
                source="formula",
            )


def _write_end(context: _Context, leaders: dict[int, int]) -> None:
    """Gradients of what several stages hold are added up; then every rank updates its weights."""
    done = [*context.last.values(), *_reduced(context, leaders)]
    for rank in context.lanes:
        mine = [place for place in context.found if rank in place.ranks]
        took = updating(
            context.prices, rank, [placed_stage_cost(context.prices, place) for place in mine]
        )
        if took:
            context.build.task(
                lane=context.lanes[rank][0], after=done, kind="kernel", op="optimizer", rank=rank,
                seconds=took, phase="update", source="formula",
            )  # fmt: skip


def _reduced(context: _Context, leaders: dict[int, int]) -> list[int]:
    """Reductions between stages that hold the same weights."""
    out = []
    for stages, elements in _shared(context):
        ranks = [context.found[s].ranks[0] for s in stages]
        if len(set(ranks)) < 2 or not elements:
            continue
        took = tying(context.prices, ranks, elements)
        lanes = [context.lanes[leaders[r]][1] for r in ranks]
        after = [context.last[leaders[r]] for r in ranks]
        out.append(
            context.build.task(
                lanes=lanes,
                after=after,
                kind="collective",
                op="all_reduce",
                rank=leaders[ranks[0]],
                seconds=took,
                phase="communicate",
                group=group_text(ranks),
                source="formula",
            )
        )
    return out


def _shared(context: _Context) -> list[tuple[list[int], float]]:
    """Stages with the same weights, and how many a rank: copies of the model, and tied ones."""
    workload, found = context.prices.workload, context.found
    each = len(found) // copies(found, workload)
    out = [
        (
            [k + c * each for c in range(len(found) // each)],
            placed_stage_cost(context.prices, found[k]).elements,
        )
        for k in range(each if len(found) > each else 0)
    ]
    names = [layer.name for layer in workload.layers]
    for kept, other in workload.tied:
        pair = [names.index(n.split("/")[0]) for n in (kept, other)]
        ends = [next(s for s, p in enumerate(found) if p.times[at]) for at in pair]
        if found[ends[0]].ranks != found[ends[1]].ranks:
            size = tied_elements(workload, other) / min(len(found[e].ranks) for e in ends)
            out.append((ends, size))
    return out


def _write_buffers(context: _Context) -> None:
    """What each rank holds for good, and what each micro-batch keeps from forward to backward."""
    trains = any(kind != "F" for _, kind in context.kinds)
    for rank in context.lanes:
        size = constant(context.prices, context.found, rank, trains=trains)
        context.build.buffer(size, rank=rank, name="weights and their state", kind="parameter")
    bills = [placed_stage_cost(context.prices, place) for place in context.found]
    for act, task in context.task.items():
        s, m = act.stage, act.micro_batch
        last = next((k for k in "WBI" if (s, k) in context.kinds), "")
        if act.kind != "F" or not last or "offload" in context.found[s].ways:
            continue
        for rank in {context.leaders[r] for r in context.found[s].ranks}:
            dies = context.task[Action(s, last, m)]
            name = "kept for the backward"
            context.build.buffer(
                bills[s].kept, rank=rank, born=task, dies=dies, name=name, kind="activation"
            )
