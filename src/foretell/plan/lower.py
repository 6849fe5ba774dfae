"""From a plan to the task graph of its step, priced, ready to be simulated.

Ranks that do the same at the same time are one: of every stage the graph has one rank, which stands
for all its data, tensor and context-parallel ranks; collectives are priced for the whole group. A
rank has a lane for compute, one for collectives, and one for each direction it sends in.

    F of a stage   after what the stage before sent
    B of a stage   after what the stage behind sent back; on the last, after its own F
    gradients      reduced when the last backward is done, or bucket by bucket while it runs
    update         when the gradients of every stage are there: their common norm is clipped first

Ranks that do not do the same (`shares`, `sync`, `groups`) are written one by one (→ group_graph).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from foretell.cluster import Cluster
from foretell.cost import collective
from foretell.errors import unknown
from foretell.graph import Graph
from foretell.graph.columns import Kind, Phase, Source
from foretell.graph.groups import group_text
from foretell.plan.check import micro_batches, settled
from foretell.plan.estimate import (
    overlaps,
    reduce_op,
    send_parts,
    sends,
    sends_wait,
    tied_bytes,
)
from foretell.plan.group_graph import lower_groups
from foretell.plan.layer_ranges import has_per_rank_costs
from foretell.plan.order import FORWARD, Order, last_stage, order
from foretell.plan.place_graph import lower_places
from foretell.plan.plan import Plan, levels
from foretell.plan.stage_ops import (
    DETAILS,
    Ids,
    LoweringContext,
    Piece,
    Priced,
    PricedStage,
    chain,
    context_of,
    priced,
    split,
)
from foretell.whatif import Setting, applied, parse
from foretell.workload import Workload


class Spans(NamedTuple):
    """First and last task of each forward and backward: way × stage × chunk × micro-batch."""

    first: Ids
    last: Ids
    made: list[list[int]]  # of each stage: tasks of its last backward, whose gradients can go
    order: Order


class _ChainTable:
    """Every different chain once, end to end in columns, so that tasks are gathered by index."""

    def __init__(self, context: LoweringContext, detail: str) -> None:
        self.context, self.detail = context, detail
        self.number: dict[object, int] = {}
        self.chains: list[list[Piece]] = []

    def of(self, stage: int, chunk: int, way: int, final: bool) -> int:
        """The number of the chain of a stage's chunk; stages alike share theirs."""
        s, one = self.context, self.context.stages[stage]
        ends = (stage == 0, stage == len(s.stages) - 1, id(one.costs))
        key = (*ends, tuple(one.layers), chunk, way, final)
        if key not in self.number:
            where = (stage, chunk, way)
            alone = one.weight_seconds
            pieces = chain(one.costs, s.workload, one.cluster, where, self.detail, alone)
            if final and overlaps(one.plan):
                pieces = split(pieces, one.costs, s.workload, (stage, chunk), one.sent_in)
            self.number[key] = len(self.chains)
            self.chains.append(pieces)
        return self.number[key]


def write_stages(context: LoweringContext, detail: str) -> Spans:
    """Every forward and backward of every stage, in the order the schedule says."""
    count = micro_batches(context.plan)
    found = order(context.stages[0].plan, count)
    ways, chunks = range(3 if found.is_split else 2), found.chunks
    size = (len(ways), len(context.stages), chunks, count)
    spans = Spans(np.zeros(size, np.int64), np.zeros(size, np.int64), [], found)
    book = _ChainTable(context, detail)
    for stage, (way, chunk, micro) in enumerate(found.turns):
        which = {(c, w): book.of(stage, c, w, False) for c in range(chunks) for w in ways}
        number = np.array([which[c, w] for c, w in zip(chunk.tolist(), way.tolist(), strict=True)])
        number[-1] = book.of(stage, int(chunk[-1]), int(way[-1]), True)
        first, last, made = _write(context, book, stage, number, way, micro)
        spans.first[way, stage, chunk, micro] = first
        spans.last[way, stage, chunk, micro] = last
        spans.made.append(made)
    return spans


def _write(
    context: LoweringContext, book: _ChainTable, stage: int, number: Ids, way: Ids, micro: Ids
) -> tuple[Ids, Ids, list[int]]:
    """The tasks of one stage; first and last of each chain, and the compute of the final one."""
    draft, lanes = context.draft, context.lanes[stage]
    lengths = np.array([len(c) for c in book.chains])
    pieces = [piece for c in book.chains for piece in c]
    starts = np.cumsum(lengths) - lengths
    sizes = lengths[number]
    begin = np.cumsum(sizes) - sizes
    inside = np.arange(sizes.sum()) - np.repeat(begin, sizes)
    at = np.repeat(starts[number], sizes) + inside
    kernel = np.array([p.kind == "kernel" for p in pieces])
    # Exchanges of a split layer stand in the way of the next kernel, of another micro-batch too.
    blocks = kernel | np.array([p.axis == "tp" for p in pieces])
    ids = draft.tasks(
        len(at),
        rank=context.stages[stage].rank,
        lane=np.where(blocks, lanes.compute, lanes.collective)[at],
        kind=np.where(kernel, int(Kind.KERNEL), int(Kind.COLLECTIVE))[at],
        op=np.array([draft.text(p.op) for p in pieces])[at],
        layer=np.array([draft.text(p.layer) for p in pieces])[at],
        seconds=np.array([p.seconds for p in pieces])[at],
        flops=np.array([p.flops for p in pieces])[at],
        comm_bytes=np.array([p.comm_bytes for p in pieces])[at],
        phase=np.where(np.repeat(way != FORWARD, sizes), int(Phase.BACKWARD), int(Phase.FORWARD)),
        micro_batch=np.repeat(micro, sizes),
        source=int(Source.FORMULA),
    )
    for back in sorted({b for p in pieces for b in p.after}):
        has = np.array([back in p.after for p in pieces])[at] & (inside >= back)
        draft.wait(ids[has], ids[has] - back)
    lead = np.array([next(i for i, p in enumerate(c) if p.kind == "kernel") for c in book.chains])
    made = ids[begin[-1] :][kernel[at[begin[-1] :]]]
    return ids[begin] + lead[number], ids[begin + sizes - 1], made.tolist()


def write_end(context: LoweringContext, spans: Spans) -> None:
    """Reduce, update and hand back, on every stage."""
    done = [_reduce(context, one, spans.made[one.index]) for one in context.stages]
    if len(context.stages) > 1:
        done += _tie(context, done)
    for one in context.stages:
        _update(context, one, done)


def _reduce(context: LoweringContext, one: PricedStage, made: list[int]) -> int:
    """Reduce the gradients of a stage; the task after which they are all there."""
    seconds = float(one.columns.reduce_seconds[one.column])
    if not seconds:
        return made[-1]
    pieces = made if overlaps(one.plan) else made[-1:]
    parts = one.sent_in
    if len(parts) != len(pieces):  # layer by layer, or all at the end
        parts = np.full(len(pieces), 1 / len(pieces))
    size = float(one.columns.reduce_bytes[one.column])
    ids = context.draft.tasks(
        len(pieces),
        op=reduce_op(one.plan),
        name="gradients",
        seconds=seconds * parts,
        comm_bytes=size * parts,
        group=one.group,
        **(_collective_fields(context, one) | {"lane": context.lanes[one.index].between}),
    )
    context.draft.wait(ids, pieces)
    return int(ids[-1])


def _collective_fields(context: LoweringContext, one: PricedStage) -> dict[str, Any]:
    """What all collectives of a stage have in common."""
    where = {"lane": context.lanes[one.index].collective, "rank": one.rank}
    return where | {"kind": "collective", "phase": "communicate", "source": "formula"}


def _tie(context: LoweringContext, done: list[int]) -> list[int]:
    """Add up the gradients of weights that the stages of the first and the last layer share."""
    first, last = context.stages[0], context.stages[last_stage(context.stages[0].plan)]
    size = tied_bytes(first.costs, context.workload)
    if not size[0] or first is last:
        return []
    between = context.apart(first.index, last.index)
    seconds = float(collective.price("all_reduce", size, between).seconds[0])
    group = group_text((first.rank, last.rank))
    task = context.draft.tasks(
        1, op="all_reduce", name="tied weights", seconds=seconds, group=group,
        **_collective_fields(context, first),
    )  # fmt: skip
    context.draft.wait(task, (done[first.index], done[last.index]))
    return [int(task[0])]


def _update(context: LoweringContext, one: PricedStage, done: list[int]) -> None:
    """The optimizer, after all gradients are there, and the parameters it hands back."""
    update = context.draft.tasks(
        1,
        kind="kernel",
        op="optimizer",
        lane=context.lanes[one.index].compute,
        rank=one.rank,
        seconds=float(one.columns.update_seconds[one.column]),
        phase="update",
        source="formula",
    )
    context.draft.wait(update, done)
    again = float(one.columns.regather_seconds[one.column])
    if again:
        back = context.draft.tasks(
            1,
            op="all_gather",
            name="parameters",
            seconds=again,
            group=one.group,
            **_collective_fields(context, one),
        )
        context.draft.wait(back, update)


def write_buffers(context: LoweringContext, spans: Spans) -> None:
    """What each rank holds for good, and what each micro-batch keeps from forward to backward."""
    for one in context.stages:
        parts = one.memory.parts()
        for kind in ("parameter", "gradient", "optimizer", "workspace"):
            size = parts.get(f"{kind}s", parts.get(kind, 0.0))
            context.draft.buffers(1, kind, kind, bytes=size, rank=one.rank)
        first, last = (ids[one.index].reshape(-1) for ids in (spans.first[0], spans.last[-1]))
        chunks = spans.first.shape[2]
        context.draft.buffers(
            len(first),
            "activation",
            "kept for the backward",
            bytes=float(one.memory.each[0]) / chunks,
            rank=one.rank,
            born=first,
            dies=last,
        )


def lower(plan: Plan, workload: Workload, cluster: Cluster, *, detail: str = "stage") -> Graph:
    """The graph of one step; `detail` says how much of a stage one task is: `stage` or `layer`."""
    if detail not in DETAILS:
        raise unknown("detail", detail, DETAILS)
    if plan.stages:
        return lower_places(plan, workload, cluster)
    plan, cluster = settled(plan, workload, cluster)
    if has_per_rank_costs(plan):
        return lower_groups(plan, workload, cluster)
    return written(priced(plan, workload, cluster), detail)


def written(found: Priced, detail: str = "stage") -> Graph:
    """The graph of a plan whose prices are known already."""
    context = context_of(found)
    spans = write_stages(context, detail)
    _stage_sends(context, spans)
    write_end(context, spans)
    write_buffers(context, spans)
    plan = context.plan
    each = float(len(context.stages[0].ranks))
    graph = context.draft.graph(workload=context.workload.name, plan=str(plan), ranks_each=each)
    return applied([parse(text) for text in plan.whatifs], graph, Setting(context.cluster))


def _stage_sends(context: LoweringContext, spans: Spans) -> None:
    """What stages send each other, one part of the model to the next and back."""
    places = spans.order.places
    hops: dict[tuple[int, int], float] = {}
    for here, there in pairwise(places):
        ends = here[0], there[0]
        if here[0] == there[0]:
            context.draft.wait(spans.first[0, *there], spans.last[0, *here])
            context.draft.wait(spans.first[1, *here], spans.last[1, *there])
            continue
        if ends not in hops:
            hops[ends] = hop(context, *ends)
        _send(context, spans, 0, here, there, hops[ends])
        _send(context, spans, 1, there, here, hops[ends])
    end, chunk = places[-1]
    context.draft.wait(spans.first[1, end, chunk], spans.last[0, end, chunk])
    if spans.order.is_split:
        context.draft.wait(spans.first[2].reshape(-1), spans.last[1].reshape(-1))


def hop(context: Priced, here: int, there: int) -> float:
    """Seconds to hand a micro-batch from one stage to another: of the rank that has most to do.

    Where they have unlike replicas, each sends to or receives from several of the other's.
    """
    if context.is_even:
        return float(sends(context.stages[here].costs, context.workload, context.cluster)[0])
    size = np.array([max(context.stages[at].output_bytes for at in (here, there))])
    ends = [context.stages[at] for at in (here, there)]
    parts = send_parts(ends[0].plan) if ends[0].plan.tp == ends[1].plan.tp else 1
    took = float(collective.price("send", size / parts, context.apart(here, there)).seconds[0])
    if parts > 1:
        group = levels(ends[1].cluster, parts, 1)
        took += float(collective.price("all_gather", size, group).seconds[0])
    return took


def _send(
    context: LoweringContext,
    spans: Spans,
    way: int,
    here: tuple[int, int],
    there: tuple[int, int],
    seconds: float,
) -> None:
    """Every micro-batch of one way between two neighbours."""
    made = spans.last[way, *here]
    ranks = context.stages[here[0]].rank, context.stages[there[0]].rank
    ids = context.draft.tasks(
        len(made),
        kind="send",
        op="send",
        rank=ranks[0],
        lane=_sending_lane(context, way, here, there),
        seconds=seconds,
        comm_bytes=context.stages[here[0]].output_bytes,
        phase="communicate",
        micro_batch=np.arange(len(made)),
        group=group_text(ranks),
        order=made,  # messages leave in the order in which they are made
        source="formula",
    )
    context.draft.wait(ids, made)
    context.draft.wait(spans.first[way, *there], ids)


def _sending_lane(
    context: LoweringContext, way: int, here: tuple[int, int], there: tuple[int, int]
) -> int:
    """The lane a message occupies: that of compute where the sender waits for it."""
    lanes = context.lanes[here[0]]
    if sends_wait(context.plan):
        return lanes.compute
    return lanes.up if _is_up(way, here, there) else lanes.down


def _is_up(way: int, here: tuple[int, int], there: tuple[int, int]) -> bool:
    """Whether a message goes to a stage before its own; around the ends as its way goes."""
    if here[1] == there[1]:
        return there[0] < here[0]
    return way == 1
