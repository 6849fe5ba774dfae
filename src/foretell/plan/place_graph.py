"""The graph of a plan whose stages are placed freely, with every message, ready to be simulated.

Ranks with the same actions are one. A stage on several ranks is one task that holds the lanes of
all of them; what it exchanges inside is in its price. Messages leave on lanes of their own, one for
each direction, in the order in which they are made, and share nothing with the compute.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from foretell.cluster import Cluster
from foretell.errors import InputError
from foretell.graph import Builder, Graph
from foretell.graph.groups import group_text
from foretell.plan.check import check
from foretell.plan.place_costs import (
    PlacedStageCost,
    Prices,
    bill,
    message,
    offloading,
    tying,
    updating,
)
from foretell.plan.place_memory import constant, tied_elements
from foretell.plan.plan import Plan
from foretell.plan.stage_placement import Action, Edge, StagePlacement, acts, copies, edges, places
from foretell.whatif import Setting, applied, parse
from foretell.workload import Workload


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
    bills = [bill(context.prices, place) for place in context.found]
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
    """Hand on what an action made, to each stage on other ranks that reads it."""
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
        elements = sum(bill(context.prices, place).elements for place in mine)
        took = updating(context.prices, rank, elements)
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
        ([k + c * each for c in range(len(found) // each)], bill(context.prices, found[k]).elements)
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
    bills = [bill(context.prices, place) for place in context.found]
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
