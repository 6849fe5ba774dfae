"""From a plan in any syntax to the task graph of its step, priced, ready to be simulated.

A plan priced stage by stage, the ops of a stage for one micro-batch, and the step's program.

Ranks that do the same at the same time are one: a stage is one rank, which stands for all its data,
tensor and context-parallel ranks; collectives are priced for the whole group. A rank has a lane for
compute, one for collectives, and one for each direction it sends in.

    F of a stage   after what the stage before sent
    B of a stage   after what the stage behind sent back; on the last, after its own F
    gradients      reduced when the last backward is done, or bucket by bucket while it runs
    update         when the gradients of every stage are there: their common norm is clipped first

`stage` makes one piece of all that runs without a choice in between, which is exact and quick to
simulate; `layer` shows every layer with its exchanges. Sharded parameters (zero 3) always show
layers: each is gathered ahead of its use while others compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from foretell.cluster import Cluster, Level
from foretell.cost import collective
from foretell.errors import unknown
from foretell.graph import Graph
from foretell.graph.graph import group_text
from foretell.plan.check import check, micro_batches, settled
from foretell.plan.costs import (
    CopySeconds,
    Costs,
    layer_parts,
    shard_comm,
    width,
)
from foretell.plan.costs import costs as price_all
from foretell.plan.layer_cost import Array, layers_of
from foretell.plan.layer_ranges import GroupStep, has_per_rank_costs
from foretell.plan.plan import Plan, levels, segments, stride
from foretell.plan.prices import (
    PricedStage,
    StageLayers,
    gradient_shares,
    overlaps,
    priced_stages,
    reduce_op,
    send_parts,
    send_seconds,
    sends_wait,
    tied_bytes,
    uneven_stage,
)
from foretell.plan.program import (
    BACKWARD,
    FORWARD,
    HELD_AS,
    WEIGHT,
    Buffer,
    Message,
    Piece,
    Place,
    Program,
    ResolvedStep,
    StageTasks,
    chunks_of,
    last_stage,
    lowered,
    order,
)
from foretell.plan.stage_placement import PlacedStep, Prices, as_degrees
from foretell.workload import Workload

NAMES = ("forward", "backward", "weight gradients")


@dataclass(frozen=True)
class Priced(ResolvedStep):
    """A checked plan with the prices of every stage."""

    stages: tuple[PricedStage, ...]

    @property
    def advice(self) -> str:
        """What to do where it does not fit; empty where changes of its degrees can be tried."""
        if not self.plan.segments:
            return ""
        return "recompute more blocks, shard more state, or give the fullest segment fewer blocks"

    @property
    def is_even(self) -> bool:
        """Whether all stages see the same: split alike, on devices that are alike."""
        return self.stages[0].cluster is self.cluster

    def apart(self, a: int, b: int) -> tuple[Level, ...]:
        """What a message between two stages sees while their other ranks send too."""
        first, then = self.stages[a], self.stages[b]
        if self.is_even:
            step = stride(self.plan, "pp")
            return levels(self.cluster, 2, step * abs(b - a), step * min(a, b))
        pairs = list(zip(first.ranks, then.ranks, strict=False))
        node = int((self.cluster.nodes == self.cluster.nodes[first.rank]).sum())
        return self.cluster.levels(pairs[0], pairs[1 : min(node, len(pairs))])

    def program(self, detail: str) -> Program:
        """Stages that each stand for all their ranks."""
        out = Program()
        lanes = [_lanes(out, one) for one in self.stages]
        turns = order(self.stages[0].plan, micro_batches(self.plan))
        chains = _Chains(self, detail)
        for s, (way, chunk, micro) in enumerate(turns.turns):
            keys = list(zip(chunk.tolist(), way.tolist(), strict=True))
            which = {key: chains.of(s, *key, False) for key in dict.fromkeys(keys)}
            number = np.array([which[key] for key in keys])
            number[-1] = chains.of(s, int(chunk[-1]), int(way[-1]), True)
            held = (lanes[s].compute,)
            tasks = StageTasks(
                self.stages[s].rank, held, lanes[s].collective, number, way, chunk, micro,
                groups=self.stages[s].groups,
            )  # fmt: skip
            out.stages.append(tasks)
        out.chains = chains.chains
        out.turns.append(turns.places[-1])
        _add_messages(out, self, lanes, turns.places)
        _add_end(out, self, lanes)
        for one in self.stages:
            _add_buffers(out, one, turns.chunks)
        return out

    def memory(self) -> tuple[float, float, dict[str, float]]:
        """Bytes of the fullest rank, how many are missing there, and what they are."""
        peaks = [float(one.memory.peak[0]) for one in self.stages]
        over = [peak - one.room for peak, one in zip(peaks, self.stages, strict=True)]
        missing = max(max(over), 0.0)
        worst = self.stages[int(np.argmax(over if missing else peaks))].memory
        return float(worst.peak[0]), missing, worst.parts()

    def priced_layers(self) -> list[tuple[tuple[int, ...], Costs, Sequence[float]]]:
        """Of every stage its ranks, the prices of all layers, and how often each runs there."""
        return [(one.ranks, one.costs, one.layers) for one in self.stages]


def priced(plan: Plan, workload: Workload, cluster: Cluster, costs: Costs | None = None) -> Priced:
    """A settled plan with its prices; `costs` are those of its degrees where they are known.

    Every stage is priced on the slowest of its ranks where devices differ.
    """
    if plan.segments:
        rows = [(one.plan, one.ranks) for one in segments(plan, workload)]
    else:
        each = plan.ranks // plan.pp
        rows = [(plan, tuple(range(s * each, (s + 1) * each))) for s in range(plan.pp)]
    unpriced = [
        StageLayers(own, ranks, layers_of(own, workload, s), s)
        for s, (own, ranks) in enumerate(rows)
    ]
    if not plan.segments and len(cluster.devices_by_kind()) == 1:
        costs = costs or price_all([plan], workload, cluster)
        return Priced(
            plan, workload, cluster, tuple(priced_stages(unpriced, workload, cluster, costs))
        )
    even = [one for one in unpriced if not _is_uneven(one.plan, plan)]
    found = {one.index: one for one in priced_stages(even, workload, cluster)}
    stages = (found.get(one.number) or uneven_stage(one, workload, cluster) for one in unpriced)
    return Priced(plan, workload, cluster, tuple(stages))


def _is_uneven(own: Plan, plan: Plan) -> bool:
    """Whether replicas of a stage have samples of their own and do not wait inside its layers."""
    inside = own.ep > 1 or own.filter * own.channel > 1 or bool(own.spatial)
    return bool(own.shares) and not (inside and not plan.segments)


def chain(one: PricedStage, where: tuple[int, int, int], detail: str) -> list[Piece]:
    """The pieces of a stage's chunk, forward or backward: `where` is (stage, chunk, way)."""
    c, workload, cluster = one.costs, one.workload, one.cluster
    copied, alone = one.copied, one.weight_seconds
    stage, chunk, way = where
    plan = c.plans.plans[0]
    many = times_of(plan, workload, stage, chunk)
    named = [(at, n) for at, n in enumerate(many) if n]
    sharded = plan.zero == 3 and plan.dp * plan.cp > 1
    if detail == "stage" and plan.zero != 3:
        return [_whole(c, workload, copied, many, way, alone)]
    layers = [(at, n / max(round(n), 1)) for at, n in named for _ in range(max(round(n), 1))]
    layers = layers[::-1] if way else layers
    known = {which: _layer(c, workload, copied, which, way, alone) for which in set(layers)}
    if sharded:
        scatters = way == (WEIGHT if alone else BACKWARD)
        return _sharded(c, workload, cluster, layers, known, scatters)
    return [piece for which in layers for piece in known[which]]


def _sharded(
    c: Costs,
    workload: Workload,
    cluster: Cluster,
    layers: list[tuple[int, float]],
    known: dict[tuple[int, float], list[Piece]],
    scatters: bool,
) -> list[Piece]:
    """Layers whose parameters are gathered one layer ahead, their gradients scattered behind."""
    took = {at: shard_comm(c, at, workload, cluster) for at in dict.fromkeys(at for at, _ in known)}
    sizes = {at: float((c.layer_memories[at].weights * width(c, workload))[0]) for at in took}
    gather, scatter = (
        {
            at: Piece(
                "collective", op, float(both[k][0]), workload.layers[at].name, (),
                comm_bytes=sizes[at], axis="dp",
            )
            for at, both in took.items()
        }
        for k, op in enumerate(("all_gather", "reduce_scatter"))
    )  # fmt: skip
    if not layers:  # a chunk of more chunks than blocks: it sends its input on
        return []
    pieces = [gather[layers[0][0]]]
    gathered, done = 0, -1  # where the gather and the compute of the layer before stand
    for k, which in enumerate(layers):
        coming = len(pieces)
        if k + 1 < len(layers):
            wait = (coming - done,) if done >= 0 else ()
            pieces.append(gather[layers[k + 1][0]]._replace(after=wait))
        for piece in known[which]:
            if piece.axis == "ep":  # its lane is that of gathers: inside the kernel's seconds
                continue
            here = len(pieces)
            waits = (here - gathered, here - done) if done >= 0 else (here - gathered,)
            pieces.append(piece._replace(after=waits) if piece.kind == "kernel" else piece)
            done = here
        if scatters:
            pieces.append(scatter[which[0]]._replace(after=(1,)))
        gathered = coming
    return pieces


def times_of(plan: Plan, workload: Workload, stage: int, chunk: int) -> list[float]:
    """How often each layer runs in one chunk: whole blocks, the ends where they belong.

    Where blocks do not divide, earlier chunks have one more, as they are run: then the one with
    the head has one less, as Megatron's account_for_loss_in_pipeline_split has it.
    """
    counts = layers_of(plan, workload, stage)
    chunks = chunks_of(plan)
    first = next(i for i, layer in enumerate(workload.layers) if layer.is_block)
    blocks = sum(n for layer, n in zip(workload.layers, counts, strict=True) if layer.is_block)
    each, more = (float(n) for n in divmod(blocks, chunks))
    start, end = (each * at + min(at, more) for at in (chunk, chunk + 1))
    out, seen = [], 0.0
    for at, (layer, n) in enumerate(zip(workload.layers, counts, strict=True)):
        if layer.is_block:
            out.append(max(min(seen + n, end) - max(seen, start), 0.0))
            seen += n
        else:
            out.append(n * (chunk == (0 if at < first else chunks - 1)))
    return out


def _whole(
    c: Costs, workload: Workload, copied: CopySeconds, many: list[float], way: int,
    alone: Sequence[float],
) -> Piece:  # fmt: skip
    """All layers of a chunk as one piece: nothing in between has a choice."""
    back = min(way, BACKWARD)
    parts = [(at, layer_parts(c, at, workload)[back], n) for at, n in enumerate(many) if n]
    seconds = [n * float(part.seconds(c.overlap_exponent)[0]) for _, part, n in parts]
    pairs = zip(seconds, parts, strict=True)
    share = sum(min(n * alone[at], took) for took, (at, _, n) in pairs) if alone else 0.0
    total = sum(seconds)
    if copied:
        total += sum(n * float(copied[at][back][0]) for at, _, n in parts)
    flops = sum(n * float(part.flops[0]) for _, part, n in parts)
    if way == WEIGHT:
        return Piece("kernel", NAMES[way], share, "", flops=flops / 2)
    if way == BACKWARD and alone:
        total, flops = total - share, flops / 2
    return Piece(
        "kernel",
        NAMES[way],
        total + _microbatch_overhead(c, many, way == BACKWARD),
        "",
        flops=flops,
    )


def _microbatch_overhead(c: Costs, many: list[float], backward: bool) -> float:
    """What the host does besides, on the stage that has the loss."""
    return float(c.turn[0]) if backward and many[-1] else 0.0


def _layer(
    c: Costs, workload: Workload, copied: CopySeconds, which: tuple[int, float], way: int,
    alone: Sequence[float],
) -> list[Piece]:  # fmt: skip
    """Compute of one layer and what it exchanges, one after the other."""
    at, share = which
    layer, backward = workload.layers[at], min(way, BACKWARD)
    part = layer_parts(c, at, workload)[backward].times(share)
    comm = float((part.comm + part.straggler_wait)[0])
    seconds = float(part.seconds(c.overlap_exponent)[0]) - comm
    if copied:
        seconds += share * float(copied[at][backward][0])
    flops, apart = float(part.flops[0]), min(share * alone[at], seconds) if alone else 0.0
    if way != FORWARD and alone:
        seconds, flops = apart if way == WEIGHT else seconds - apart, flops / 2
    if at == len(workload.layers) - 1 and way == BACKWARD:
        seconds += float(c.turn[0])
    pieces = [Piece("kernel", NAMES[way], seconds, layer.name, flops=flops)]
    if (beside := float(part.beside[0])) and way != WEIGHT:
        moved = Piece("collective", "all_to_all", beside, layer.name, axis="ep")
        pieces = [moved, pieces[0]._replace(after=(2,))]
    if comm and way != WEIGHT:
        sent = 0.0 if _mixes_axes(c.plans.plans[0]) else float(part.sent[0])
        pieces.append(
            Piece("collective", "all_reduce", comm, layer.name, comm_bytes=sent, axis="tp")
        )
    return pieces


def _mixes_axes(plan: Plan) -> bool:
    """Whether the exchanges of a layer are not those of tensor parallelism alone."""
    return max(plan.cp, plan.ep, plan.filter, plan.channel) > 1 or bool(plan.spatial)


def split(
    pieces: list[Piece], c: Costs, workload: Workload, where: tuple[int, int], sizes: Array
) -> list[Piece]:
    """A last backward in parts, each of which makes the gradients of one of some messages."""
    if len(pieces) > 1 or len(sizes) < 2:
        return pieces
    many = times_of(c.plans.plans[0], workload, *where)
    parts = gradient_shares(c, np.array(many)[:, None], workload, sizes)
    whole = pieces[0]
    return [whole._replace(seconds=whole.seconds * p, flops=whole.flops * p) for p in parts]


class _Chains:
    """Chains of a program; stages alike share theirs."""

    def __init__(self, found: Priced, detail: str) -> None:
        self.found, self.detail = found, detail
        self.number: dict[object, int] = {}
        self.chains: list[list[Piece]] = []

    def of(self, stage: int, chunk: int, way: int, final: bool) -> int:
        """The number of the chain of a stage's chunk."""
        stages, one = self.found.stages, self.found.stages[stage]
        ends = (stage == 0, stage == len(stages) - 1, id(one.costs))
        key = (*ends, tuple(one.layers), chunk, way, final)
        if key not in self.number:
            where = (stage, chunk, way)
            pieces = chain(one, where, self.detail)
            if final and overlaps(one.plan):
                pieces = split(pieces, one.costs, one.workload, (stage, chunk), one.sent_in)
            self.number[key] = len(self.chains)
            self.chains.append(pieces)
        return self.number[key]


class _StageLanes(NamedTuple):
    """The lanes of one rank."""

    compute: int
    collective: int
    down: int  # to the stage behind
    up: int  # to the stage before
    between: int  # to other copies of what is sharded; the collectives' own where there are none


def _lanes(out: Program, one: PricedStage) -> _StageLanes:
    """Copies of sharded parameters are reduced beside the gathers, over links of their own."""
    compute = out.lane(one.rank, "compute", "compute")
    collective, down, up = (
        out.lane(one.rank, name, "comm") for name in ("collectives", "send on", "send back")
    )
    apart = one.plan.zero == 3 and one.plan.dp > one.plan.sharing
    between = out.lane(one.rank, "between copies", "comm") if apart else collective
    return _StageLanes(compute, collective, down, up, between)


def _add_messages(
    out: Program, found: Priced, lanes: Sequence[_StageLanes], places: Sequence[Place]
) -> None:
    """What stages send each other, one part of the model to the next and back."""
    hops: dict[tuple[int, int], float] = {}
    for ahead, behind in pairwise(places):
        for way, here, there in ((FORWARD, ahead, behind), (BACKWARD, behind, ahead)):
            if here[0] == there[0]:
                out.messages.append(Message(way, here, there))
                continue
            ends = ahead[0], behind[0]
            if ends not in hops:
                hops[ends] = hop(found, *ends)
            ranks = found.stages[here[0]].rank, found.stages[there[0]].rank
            # To a stage before its own: around the ends of the pipeline as its way goes.
            is_up = there[0] < here[0] if here[1] == there[1] else way == BACKWARD
            mine = lanes[here[0]]
            lane = mine.compute if sends_wait(found.plan) else mine.up if is_up else mine.down
            size = found.stages[here[0]].output_bytes
            group = group_text(ranks)
            out.messages.append(Message(way, here, there, hops[ends], ranks[0], lane, size, group))


def hop(found: Priced, here: int, there: int) -> float:
    """Seconds to hand a micro-batch from one stage to another: of the rank that has most to do.

    Where they have unlike replicas, each sends to or receives from several of the other's.
    """
    ends = [found.stages[at] for at in (here, there)]
    size = np.array([max(one.output_bytes for one in ends)])
    parts = send_parts(ends[0].plan) if ends[0].plan.tp == ends[1].plan.tp else 1
    took = send_seconds(size, np.array([parts]), found.apart(here, there), ends[1].cluster)
    return float(took[0])


def _add_end(out: Program, found: Priced, lanes: Sequence[_StageLanes]) -> None:
    """Reduce, update and hand back, on every stage."""
    done = [_add_reduction(out, one, lanes[one.index].between) for one in found.stages]
    behind = tuple(k for k in done if k >= 0)
    # Stages with nothing to reduce at the end, or that reduce their shards layer by layer.
    ready = tuple(s for s, k in enumerate(done) if k < 0 or found.stages[s].plan.zero == 3)
    behind += _add_tied(out, found, lanes, done)
    for one in found.stages:
        mine, columns, at = lanes[one.index], one.columns, one.column
        update = out.end(
            "kernel", "optimizer", one.rank, (mine.compute,), float(columns.update_seconds[at]),
            "update", stages=ready, behind=behind,
        )  # fmt: skip
        again = float(columns.regather_seconds[at])
        if again:
            out.end(
                "collective", "all_gather", one.rank, (mine.collective,), again, "communicate",
                name="parameters", comm_bytes=float(columns.regather_bytes[at]), group=one.group,
                behind=(update,),
            )  # fmt: skip


def _add_reduction(out: Program, one: PricedStage, lane: int) -> int:
    """The reduction of a stage's gradients, -1 where there is none."""
    seconds = float(one.columns.reduce_seconds[one.column])
    if not seconds:
        return -1
    final = out.chains[out.stages[one.index].chain[-1]]
    many = sum(piece.kind == "kernel" for piece in final) if overlaps(one.plan) else 1
    shares = one.sent_in
    if len(shares) != many:  # layer by layer, or all at the end
        shares = np.full(many, 1 / many)
    return out.end(
        "collective", reduce_op(one.plan), one.rank, (lane,), seconds * shares, "communicate",
        stages=(one.index,), parts=tuple(range(many)) if many > 1 else (-1,), name="gradients",
        comm_bytes=float(one.columns.reduce_bytes[one.column]) * shares, group=one.group,
    )  # fmt: skip


def _add_tied(
    out: Program, found: Priced, lanes: Sequence[_StageLanes], done: Sequence[int]
) -> tuple[int, ...]:
    """Add up the gradients of weights that the stages of the first and the last layer share."""
    first, last = found.stages[0], found.stages[last_stage(found.stages[0].plan)]
    size = tied_bytes(first.costs, found.workload)
    if not size[0] or first is last:
        return ()
    between = found.apart(first.index, last.index)
    seconds = float(collective.price("all_reduce", size, between).seconds[0])
    ends = (first.index, last.index)
    return (
        out.end(
            "collective", "all_reduce", first.rank, (lanes[0].collective,), seconds, "communicate",
            stages=tuple(s for s in ends if done[s] < 0),
            behind=tuple(done[s] for s in ends if done[s] >= 0),
            name="tied weights", comm_bytes=float(size[0]),
            group=group_text((first.rank, last.rank)),
        ),
    )  # fmt: skip


def _add_buffers(out: Program, one: PricedStage, chunks: int) -> None:
    """What a rank holds for good, and what each micro-batch keeps from forward to backward."""
    for name, size in one.memory.parts().items():
        if name != "activations":
            out.buffers.append(Buffer(one.rank, HELD_AS[name], name, size))
    each = float(one.memory.each[0]) / chunks
    name = "kept for the backward"
    out.buffers.append(Buffer(one.rank, "activation", name, each, one.index))


DETAILS = ("stage", "layer")


def lower(plan: Plan, workload: Workload, cluster: Cluster, *, detail: str = "stage") -> Graph:
    """The graph of one step; `detail` says how much of a stage one task is: `stage` or `layer`."""
    if detail not in DETAILS:
        raise unknown("detail", detail, DETAILS)
    plan, cluster = settled(plan, workload, cluster)
    step = resolution(plan, workload, cluster)()
    return lowered(step, step.program(detail))


def resolution(
    plan: Plan, workload: Workload, cluster: Cluster, costs: Costs | None = None
) -> Callable[[], ResolvedStep]:
    """What prices a settled plan in its syntax; `costs` are those of its degrees where known."""
    if plan.stages:
        step = PlacedStep.of(plan, Prices(plan, workload, cluster))
        same = as_degrees(plan, workload) if step.in_order() else None
        if same is None:
            return lambda: step
        cluster = cluster if same.ranks == cluster.size else cluster.part(range(same.ranks))
        plan = check(same, workload, cluster)
    if has_per_rank_costs(plan):
        return partial(GroupStep.of, plan, workload, cluster)
    return partial(priced, plan, workload, cluster, costs)


def is_even(plan: Plan) -> bool:
    """Whether all ranks of a plan are split alike, so that its prices are one column of many."""
    return not (plan.stages or plan.segments or has_per_rank_costs(plan))
