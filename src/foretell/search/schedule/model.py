"""A model on a cluster as problems to schedule: stages in every shape, priced as blocks.

Where the layers of a model go: placements worth a schedule, by the name of their shape.

    v     stages one after the other, each on the ranks it needs
    m     first and last layers (words, logits) on all ranks, stages between them
    nn    every layer that is no block on all ranks: those in the middle too
    k     branches side by side on their part of the ranks, what joins them on all
    y     branches side by side, what is before and behind them on a part of its own
    x     two copies of the model in opposite directions
    loop  two stages a rank, twice over the ranks in turn (interleaved)
    wave  two stages a rank, there and back (a V)
    tp    everything on all ranks

Stages are cut by `partition`. A layer on all ranks is split over them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, takewhile
from math import inf
from typing import Literal, NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from foretell.cluster import Cluster
from foretell.errors import ForetellError, InfeasibleError, InputError, unknown
from foretell.plan import Plan, check
from foretell.plan.check import branches
from foretell.plan.framework import slowdown
from foretell.plan.layer_cost import Array
from foretell.plan.stage_placement import (
    Action,
    Edge,
    PlacedStageCost,
    Prices,
    StagePlacement,
    constant,
    copies,
    edges,
    memory_change,
    message,
    placed_stage_cost,
    room,
    seconds,
    texts,
)
from foretell.portable import product
from foretell.search.schedule.problem import (
    Block,
    Choice,
    Mode,
    Overlap,
    Price,
    Problem,
    Wait,
    price_messages,
)
from foretell.search.schedule.schedule import Schedule
from foretell.workload import Layer, Workload

SHAPES = ("v", "m", "nn", "k", "y", "x", "loop", "wave", "tp")


@dataclass(frozen=True)
class PlacementRequest:
    """What stages are for."""

    prices: Prices
    micro_batches: int = 8
    trains: bool = True
    recompute: bool = False
    frozen: tuple[str, ...] = ()  # layers that are not trained

    @property
    def workload(self) -> Workload:
        return self.prices.workload

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.prices.cluster.size))


def stages_of_shape(shape: str, request: PlacementRequest) -> tuple[StagePlacement, ...]:
    """The stages of a shape."""
    if shape not in SHAPES:
        raise unknown("placement shape of a model", shape, ("auto", *SHAPES))
    for name in request.frozen:
        if name not in [layer.name for layer in request.workload.layers]:
            names = [layer.name for layer in request.workload.layers]
            raise unknown("frozen layer", name, names)
    made = _BUILDERS[shape](request)
    return tuple(_with_recompute(request, place) for place in made)


def stages_of_every_shape(
    request: PlacementRequest,
) -> Iterator[tuple[str, tuple[StagePlacement, ...]]]:
    """Every shape that fits the model and the memory, once."""
    seen = set()
    for shape in SHAPES:
        try:
            made = stages_of_shape(shape, request)
        except ForetellError:
            continue
        if made not in seen:
            seen.add(made)
            yield shape, made


def _with_recompute(request: PlacementRequest, place: StagePlacement) -> StagePlacement:
    layers = request.workload.layers
    mine = [layers[i] for i, n in enumerate(place.times) if n]
    ways = []
    if request.recompute and request.trains and any(layer.is_block for layer in mine):
        ways.append("recompute")
    if mine and all(layer.name in request.frozen for layer in mine):
        ways.append("frozen")
    return replace(place, ways=tuple(ways))


def _tp(request: PlacementRequest) -> list[StagePlacement]:
    times = tuple(layer.times for layer in request.workload.layers)
    return [StagePlacement(request.ranks, times)]


def _v(request: PlacementRequest) -> list[StagePlacement]:
    return _pipeline_stages(request, set())


def _m(request: PlacementRequest) -> list[StagePlacement]:
    return _pipeline_stages(request, _outer_layers(request))


def _nn(request: PlacementRequest) -> list[StagePlacement]:
    found = _layers_outside_blocks(request)
    if found == _outer_layers(request):
        raise InputError(
            f"`{request.workload.name}` has nothing in its middle for all ranks",
            hint="shape nn is for an encoder and a decoder; take m",
        )
    return _pipeline_stages(request, found)


def _outer_layers(request: PlacementRequest) -> set[int]:
    """The ends before the first block and behind the last."""
    found, line = _layers_outside_blocks(request), range(len(request.workload.layers))
    return {i for way in (line, line[::-1]) for i in takewhile(found.__contains__, way)}


def _layers_outside_blocks(request: PlacementRequest) -> set[int]:
    """Layers that are no block of the model: words, logits; of a captured one lone matmuls too."""
    layers = request.workload.layers
    most = max(_matmul_count(layer) for layer in layers)
    lone = {i for i, x in enumerate(layers) if x.times == 1 and _matmul_count(x) <= 1 < most}
    return lone | {i for i, layer in enumerate(layers) if not layer.is_block}


def _matmul_count(layer: Layer) -> int:
    return sum(op.kind in ("matmul", "conv", "attention") for op in layer.works())


def _pipeline_stages(request: PlacementRequest, wide: set[int]) -> list[StagePlacement]:
    """Layers in their order: those in `wide` on all ranks, the others in stages."""
    layers = request.workload.layers
    line = [i for i, layer in enumerate(layers) for _ in range(layer.times)]
    narrow = tuple(i for i in line if i not in wide)
    if not narrow:
        return _tp(request)
    reserved = _shared_layer_bytes(request, wide)
    stages = partition(_partition_request(request, narrow, request.ranks, reserved))
    where = _where(stages)
    homes, at = [], 0
    for i in line:
        homes.append(request.ranks if i in wide else where[at])
        at += i not in wide
    runs = groupby(zip(homes, line, strict=True), key=lambda pair: pair[0])
    return [p for ranks, run in runs for p in _split_frozen(request, ranks, [i for _, i in run])]


def _partition_request(
    request: PlacementRequest, line: tuple[int, ...], ranks: Sequence[int], reserved: float
) -> PartitionRequest:
    names = [layer.name for layer in request.workload.layers]
    frozen = frozenset(names.index(name) for name in request.frozen)
    return PartitionRequest(
        request.prices, line, tuple(ranks), request.micro_batches, request.trains,
        request.recompute, reserved, frozen=frozen,
    )  # fmt: skip


def _where(stages: Sequence[StageRange]) -> list[tuple[int, ...]]:
    return [s.ranks for s in stages for _ in range(s.last - s.first)]


def _shared_layer_bytes(request: PlacementRequest, wide: set[int]) -> float:
    """Bytes on every rank of the layers that all of them share: for good, and for a moment."""
    if not wide:
        return 0.0
    layers, r, mine = request.workload.layers, request.prices.rates(request.ranks), sorted(wide)
    times = tuple(layer.times if i in wide else 0 for i, layer in enumerate(layers))
    held = constant(
        request.prices, [StagePlacement(request.ranks, times)], 0, trains=request.trains
    )
    passing = product(np.array(times, float), r.kept) * request.trains + np.max(r.brief[mine])
    return held + float(passing)


def _split_frozen(
    request: PlacementRequest, ranks: tuple[int, ...], line: Sequence[int]
) -> list[StagePlacement]:
    """A run of layers as stages: what is frozen is one of its own, with less to do."""
    layers = request.workload.layers
    runs = groupby(line, key=lambda i: layers[i].name in request.frozen)
    return [_placed(request, ranks, list(run)) for _, run in runs]


def _placed(
    request: PlacementRequest, ranks: tuple[int, ...], line: Sequence[int]
) -> StagePlacement:
    return StagePlacement(ranks, tuple(line.count(i) for i in range(len(request.workload.layers))))


def _k(request: PlacementRequest) -> list[StagePlacement]:
    """Branches on their share of the ranks, what joins them on all."""
    before, ways, behind = _require_branches(request)
    if before:
        raise InputError(
            f"branches of `{request.workload.name}` begin behind other layers",
            hint="shape k is for models of several encoders; take y",
        )
    out = _branch_stages(request, ways, _shared_layer_bytes(request, set(behind)))
    last = [i for i in behind for _ in range(request.workload.layers[i].times)]
    return [*out, *_split_frozen(request, request.ranks, last)]


def _y(request: PlacementRequest) -> list[StagePlacement]:
    """Branches on their share of the ranks, what is before and behind them on shares of its own."""
    before, ways, behind = _require_branches(request)
    while len(ways) > 2 and len(ways) + bool(before) + bool(behind) > len(request.ranks):
        ways = sorted(ways, key=lambda way: -_seconds_on_one_rank(request, way))
        ways[-2:] = [sorted(ways[-2] + ways[-1])]
    return _branch_stages(request, [part for part in (before, *ways, behind) if part], 0.0)


def _require_branches(request: PlacementRequest) -> tuple[list[int], list[list[int]], list[int]]:
    """Layers before, in and behind the branches of a model."""
    before, ways, behind = branches(request.workload)
    if len(ways) < 2:
        raise InputError(
            f"`{request.workload.name}` has no branches that join",
            hint="shapes k and y are for models of several encoders; take v or m",
        )
    return before, ways, behind


def _branch_stages(
    request: PlacementRequest, ways: Sequence[Sequence[int]], reserved: float
) -> list[StagePlacement]:
    """Parts of a model in stages, each part on its share of the ranks."""
    layers, out, first = request.workload.layers, list[StagePlacement](), 0
    for way, ranks in zip(ways, _ranks_by_work(request, ways), strict=True):
        line = tuple(i for i in way for _ in range(layers[i].times))
        mine = request.ranks[first : first + ranks]
        first += ranks
        for stage in partition(_partition_request(request, line, mine, reserved)):
            out += _split_frozen(request, stage.ranks, line[stage.first : stage.last])
    return out


def _seconds_on_one_rank(request: PlacementRequest, way: Sequence[int]) -> float:
    """Seconds of some layers on one rank."""
    r, layers = request.prices.rates(request.ranks[:1]), request.workload.layers
    both = r.forward + (r.inputs + r.weights) * request.trains
    return sum(layers[i].times * float(both[i]) for i in way)


def _ranks_by_work(request: PlacementRequest, ways: Sequence[Sequence[int]]) -> list[int]:
    """Ranks for each branch, by its work; every branch gets one."""
    size = len(request.ranks)
    if size < len(ways):
        raise InfeasibleError(
            f"{len(ways)} branches on {size} ranks", hint="take as many ranks as branches, or v"
        )
    work = [_seconds_on_one_rank(request, way) for way in ways]
    shares = [max(1, round(size * w / sum(work))) for w in work]
    while sum(shares) != size:
        step = 1 if sum(shares) < size else -1
        loads = [w / s if step > 0 or s > 1 else np.inf for w, s in zip(work, shares, strict=True)]
        shares[int(np.argmax(loads) if step > 0 else np.argmin(loads))] += step
    return shares


def _bidirectional_stages(request: PlacementRequest) -> list[StagePlacement]:
    """Two copies of the model over the same sets of ranks, the second the other way round."""
    for line, ranks, width in _stage_widths_in_line(request):
        with suppress(InfeasibleError):
            stages = _partition_half_memory(request, line, ranks, width)
            homes = [s.ranks for s in stages]
            turned = dict(zip(homes, homes[::-1], strict=True))
            there = [
                p for s in stages for p in _split_frozen(request, s.ranks, line[s.first : s.last])
            ]
            return [*there, *(replace(p, ranks=turned[p.ranks]) for p in there)]
    raise InfeasibleError(
        f"two copies of `{request.workload.name}` do not fit into memory",
        hint="take more ranks, a smaller micro-batch, or another shape",
    )


def _two_stages_a_rank(request: PlacementRequest, *, turns: bool) -> list[StagePlacement]:
    """Two stages a rank: a second round over the ranks, in turn again or back."""
    for line, ranks, width in _stage_widths_in_line(request):
        groups = [ranks[i : i + width] for i in range(0, len(ranks), width)]
        order = groups + (groups[::-1] if turns else groups)
        with suppress(InfeasibleError):
            found = _partition_half_memory(
                request, line, tuple(r for g in order for r in g), width, len(order)
            )
            return [
                p for s in found for p in _split_frozen(request, s.ranks, line[s.first : s.last])
            ]
    raise InfeasibleError(
        f"two stages of `{request.workload.name}` a rank do not fit into memory, or it has too few",
        hint="take more ranks, a smaller micro-batch, or shape v",
    )


def _stage_widths_in_line(
    request: PlacementRequest,
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """The layers in a line, the ranks, and how many of them a stage may have."""
    layers, size = request.workload.layers, len(request.ranks)
    line = tuple(i for i, layer in enumerate(layers) for _ in range(layer.times))
    for width in (1 << k for k in range(size.bit_length())):
        if size % width == 0 and size // width > 1:
            yield line, request.ranks, width


def _partition_half_memory(
    request: PlacementRequest,
    line: tuple[int, ...],
    ranks: tuple[int, ...],
    width: int,
    stages: int = 0,
) -> list[StageRange]:
    """Stages of one width that leave half of the memory to others."""
    plain = _partition_request(request, line, ranks, 0.0)
    return partition(replace(plain, share=0.5, widths=(width,), stages=stages))


_BUILDERS: dict[str, Callable[[PlacementRequest], list[StagePlacement]]] = {
    "v": _v, "m": _m, "nn": _nn, "k": _k, "y": _y, "x": _bidirectional_stages, "tp": _tp,
    "loop": partial(_two_stages_a_rank, turns=False),
    "wave": partial(_two_stages_a_rank, turns=True),
}  # fmt: skip


# A model cut into stages by dynamic programming: uneven layers, mixed devices, any widths.
#
# Layers stand in a line, ranks in a row. A stage is a run of layers on the next 1, 2, 4 … ranks,
# over which it is split. With `W(i, j, k, t)` the seconds of layers i to j on the t ranks from k
# on:
#
#     best(s, d, i) = min over t, j of max( W(i, j, n − d, t), best(s − 1, d − t, j) )
#
# is the least longest stage when layers from i on make s stages on the last d of n ranks, over
# those that fit: weights, and what as many micro-batches keep as 1F1B would have in flight there.
# Of all s the one is taken that ends N micro-batches first.


@dataclass(frozen=True)
class PartitionRequest:
    """What is to be cut, and under which conditions."""

    prices: Prices
    line: tuple[int, ...]  # the layer of each piece, in order
    ranks: tuple[int, ...]  # to be used in this order
    micro_batches: int
    trains: bool = True
    recompute: bool = False
    reserved: float = 0.0  # bytes that every rank holds besides
    share: float = 1.0  # of the memory left, what one stage may use
    widths: tuple[int, ...] = ()  # ranks that a stage may have; powers of two where empty
    frozen: frozenset[int] = frozenset()  # layers that are not trained
    stages: int = 0  # how many there have to be; any number where 0


class StageRange(NamedTuple):
    """A run of pieces and the ranks it is on."""

    ranks: tuple[int, ...]
    first: int
    last: int  # the piece behind it


class _RangeCosts(NamedTuple):
    """Of every run i to j: seconds, bytes for good, bytes a micro-batch, seconds one way."""

    work: Array
    constant: Array
    kept: Array
    spare: float  # bytes that are there for a moment


_DEEP = 1 << 30  # more micro-batches than any device holds


def partition(request: PartitionRequest) -> list[StageRange]:
    """The stages; an error where no way to cut fits into memory."""
    for flight in (_DEEP, 2, 1):  # fewer in flight than 1F1B where that does not fit
        found = _best_partition(request, flight)
        if found:
            return found
    raise InfeasibleError(
        f"no cut of {len(request.line)} layers over {len(request.ranks)} ranks fits into "
        f"{room(request.prices, request.ranks[0]) / 2**30:.0f} GiB each",
        hint="take more ranks, a smaller micro-batch, recompute, or shards on all ranks",
    )


def _best_partition(request: PartitionRequest, flight: int) -> list[StageRange]:
    table = _partition_table(request, flight)
    ends: list[tuple[float, int, int]] = []
    for (s, d), (worst, _, _) in table.items():
        if s and np.isfinite(worst[0]) and request.stages in (0, s):
            ends.append(((request.micro_batches + s - 1) * float(worst[0]), s, d))
    return _stages_from_table(request, table, *min(ends)[1:]) if ends else []


class _BestRest(NamedTuple):
    """From each piece on: the least longest stage, and the first stage's ranks and end."""

    longest: Array
    ranks: NDArray[np.int64]
    end: NDArray[np.int64]


Table = dict[tuple[int, int], _BestRest]


def _partition_table(request: PartitionRequest, flight: int) -> Table:
    """By stages and ranks left: the least longest stage from each piece on, and how it begins."""
    size, num = len(request.line), len(request.ranks)
    nothing, none = np.full(size + 1, np.inf), np.zeros(size + 1, np.int64)
    nothing[size] = 0.0
    table: Table = {(0, 0): _BestRest(nothing, none, none)}
    stages = _StageTimes(request)
    widths = {d: _stage_widths(request, num - d, d) for d in range(1, num + 1)}
    for s in range(1, min(size, num) + 1):
        many = min(s, flight, request.micro_batches)
        for d, wide in widths.items():
            ways = [t for t in wide if (s - 1, d - t) in table]
            if not ways:
                continue
            options = [
                (t, stages.longest(num - d, t, many), table[s - 1, d - t].longest) for t in ways
            ]
            found = _best_width(options, size)
            if np.isfinite(found.longest).any():
                table[s, d] = found
    return table


def _stage_widths(request: PartitionRequest, start: int, left: int) -> list[int]:
    """Ranks the next stage may have, in line with those of equal width beside it."""
    widths = request.widths or tuple(1 << k for k in range(left.bit_length()))
    return [t for t in widths if t <= left and start % t == 0]


def _best_width(options: list[tuple[int, Array, Array]], size: int) -> _BestRest:
    """The best of some widths: the first stage's time from i to j, what the rest takes from j."""
    every = np.arange(size + 1)
    best, ranks = np.full(size + 1, np.inf), np.zeros(size + 1, np.int64)
    end = np.zeros(size + 1, np.int64)
    for t, first, rest in options:
        longest = np.maximum(first, rest[None, :])
        at = np.argmin(longest, axis=1)
        least = longest[every, at]
        better = least < best
        best[better], ranks[better], end[better] = least[better], t, at[better]
    return _BestRest(best, ranks, end)


class _StageTimes:
    """What a stage of every run of pieces takes, worked out once for machines that are alike."""

    def __init__(self, request: PartitionRequest) -> None:
        self.request = request
        self.kinds: dict[tuple[int, int], tuple[int, float]] = {}
        self.costs: dict[tuple[int, float], _RangeCosts] = {}
        self.many = 0
        self.known: dict[tuple[int, float], Array] = {}

    def longest(self, first: int, ranks: int, many: int) -> Array:
        """Seconds of the run from i to j with so many micro-batches held; inf where none fits."""
        if many != self.many:
            self.many, self.known = many, {}
        kind = self._kind(first, ranks)
        if kind not in self.known:
            c = self.costs[kind]
            space = (kind[1] - self.request.reserved) * self.request.share - c.spare
            fits = (c.constant + c.kept * many <= space) & (c.work > 0)
            self.known[kind] = np.where(fits, c.work, np.inf)
        return self.known[kind]

    def _kind(self, first: int, ranks: int) -> tuple[int, float]:
        """The prices and the memory of some machines."""
        if (first, ranks) not in self.kinds:
            request, mine = self.request, self.request.ranks[first : first + ranks]
            rates = request.prices.rates(mine, recompute=request.recompute)
            kind = id(rates), min(room(request.prices, r) for r in mine)  # `prices` keeps them
            self.kinds[first, ranks] = kind
            if kind not in self.costs:
                self.costs[kind] = _range_costs(request, rates)
        return self.kinds[first, ranks]


def _range_costs(request: PartitionRequest, r: PlacedStageCost) -> _RangeCosts:
    line = list(request.line)
    learns = np.array([float(i not in request.frozen) for i in range(len(r.forward))])
    back = (r.inputs + r.weights * learns)[line] * _has_backward(request)
    kept = r.kept[line] * _has_backward(request)
    constant = r.parameters + r.trained * learns * request.trains
    moment = float(np.maximum(r.moment * request.trains, r.brief)[line].max())
    runs = [_range_sums(column) for column in (r.forward[line] + back, constant[line], kept)]
    return _RangeCosts(runs[0], runs[1], runs[2], moment)


def _has_backward(request: PartitionRequest) -> Array:
    """1 for pieces that have a backward: trained ones and all behind the first of them."""
    learns = [float(request.trains and i not in request.frozen) for i in request.line]
    return np.maximum.accumulate(np.array(learns))


def _range_sums(values: Array) -> Array:
    """Sums over all runs: from i, before j; 0 where there is no such run."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    found: Array = np.maximum(sums[None, :] - sums[:, None], 0.0)
    return found


def _stages_from_table(request: PartitionRequest, table: Table, s: int, d: int) -> list[StageRange]:
    out, i = [], 0
    while s:
        k = len(request.ranks) - d
        t, j = int(table[s, d].ranks[i]), int(table[s, d].end[i])
        out.append(StageRange(request.ranks[k : k + t], i, j))
        i, s, d = j, s - 1, d - t
    return out


# Problems from models: blocks of a workload on a cluster, with real times, memory, messages.
#
#     found = model(workload, cluster, "m", micro_batches=16)
#     schedule(found.problem, 16), found.plan(that)
#
# Ranks that always work together are one device of the problem. A stage is a forward block and,
# where something before it or in it is trained, a backward block or two gradients. Recompute and
# offload of each stage are choices that `choose` decides; messages are priced by their links.


_PLACING = 0.3  # share of a time limit after which no further shape is placed


class Options(TypedDict, total=False):
    """What else is asked of a problem, and not of where its stages are."""

    split: bool  # gradients of inputs and of weights apart
    recompute: Decide
    offload: Decide
    overlap: Overlap


@dataclass(frozen=True)
class Model:
    """A problem and what its blocks and devices stand for."""

    problem: Problem
    shape: str
    prices: Prices
    places: tuple[StagePlacement, ...]
    ranks: tuple[tuple[int, ...], ...]  # of each device

    @property
    def copies(self) -> int:
        """Samples that one micro-batch of the problem stands for, in micro-batches of the plan."""
        return copies(self.places, self.prices.workload)

    def chosen(self, names: Sequence[str]) -> Model:
        """The model once some choices are taken."""
        ways = {int(n.split()[1]): n.split()[0] for n in names}
        found = tuple(
            replace(p, ways=tuple(sorted({*p.ways, ways[s]}))) if s in ways else p
            for s, p in enumerate(self.places)
        )
        return replace(self, problem=self.problem.choosing(names), places=found)

    def plan(self, found: Schedule) -> Plan:
        """The plan of a schedule of this problem: it lowers, predicts and runs like any other."""
        workload = self.prices.workload
        rows: list[tuple[str, ...]] = [()] * self.prices.cluster.size
        for device, ranks in enumerate(self.ranks):
            row = tuple(
                str(a)
                for a in (_action(found, s.block, s.micro_batch) for s in found.on(device))
                if a
            )
            for rank in ranks:
                rows[rank] = row
        batch = self.prices.plan.micro_batch * found.micro_batches * self.copies
        return self.prices.plan.but(
            stages=texts(self.places, workload), actions=tuple(rows), schedule="actions",
            global_batch=batch, recompute="none", model=workload.fingerprint(),
        )  # fmt: skip


def _action(found: Schedule, block: int, micro_batch: int) -> Action | None:
    """The action of a block; messages belong to no action."""
    one = found.problem.blocks[block]
    return None if one.kind == "C" else Action(stage_of(one), one.kind, micro_batch)


def model(
    workload: Workload,
    cluster: Cluster,
    shape: str = "v",
    *,
    plan: Plan | None = None,
    micro_batches: int = 8,
    mode: Mode = "train",
    split: bool = False,
    recompute: Decide = "auto",
    offload: Decide = "no",
    frozen: Sequence[str] = (),
    overlap: Overlap = "beside",
) -> Model:
    """The problem of a shape; `plan` says program, formats and micro-batch."""
    request = _placement_request(workload, cluster, plan, micro_batches, mode, recompute, frozen)
    try:
        found = stages_of_shape(shape, request)
    except InfeasibleError:
        if recompute != "auto" or mode == "infer":
            raise
        found = stages_of_shape(shape, replace(request, recompute=True))
    return problem_of(
        found, request, shape, split=split, recompute=recompute, offload=offload, overlap=overlap
    )


def models(
    workload: Workload,
    cluster: Cluster,
    *,
    plan: Plan | None = None,
    micro_batches: int = 8,
    mode: Mode = "train",
    split: bool = False,
    recompute: Decide = "auto",
    offload: Decide = "no",
    frozen: Sequence[str] = (),
    overlap: Overlap = "beside",
    ends: float | None = None,
) -> list[Model]:
    """The problems of all shapes that fit; of the first ones where time runs out at `ends`."""
    request = _placement_request(workload, cluster, plan, micro_batches, mode, recompute, frozen)
    tries = [request]
    if recompute == "auto" and mode == "train":
        tries.append(replace(request, recompute=True))
    options: Options = {
        "split": split, "recompute": recompute, "offload": offload, "overlap": overlap,
    }  # fmt: skip
    out: dict[str, Model] = {}
    latest = inf if ends is None else time.monotonic() + (ends - time.monotonic()) * _PLACING
    for one in tries:
        for shape, found in stages_of_every_shape(one):
            with suppress(InfeasibleError):
                out.setdefault(shape, problem_of(found, one, shape, **options))
            if out and time.monotonic() > latest:
                break
    if not out:
        raise InfeasibleError(
            f"no placement of `{workload.name}` fits into the memory of `{cluster.name}`",
            hint="take more ranks, a smaller micro-batch, or recompute",
        )
    return list(out.values())


def _placement_request(
    workload: Workload, cluster: Cluster, plan: Plan | None, micro_batches: int, mode: Mode,
    recompute: Decide, frozen: Sequence[str],
) -> PlacementRequest:  # fmt: skip
    given = plan or Plan()
    degrees = [f"{k}={v}" for k, v in given.degrees().items() if v > 1]
    if degrees or given.stages or given.actions:
        raise InputError(
            f"a schedule places stages itself, and the plan says {' '.join(degrees) or 'stages'}",
            hint="give only what the search does not decide: micro_batch, framework, precision",
        )
    micro = given.micro_batch or 1
    batch = micro * micro_batches
    # one rank stands for all: what is checked is the batch, the format and the program
    filled = check(given.but(micro_batch=micro, global_batch=batch), workload, cluster.subset([0]))
    is_train = mode == "train"
    again = recompute == "yes" or given.recompute != "none"
    prices = Prices(filled.but(recompute="none"), workload, cluster)
    return PlacementRequest(prices, micro_batches, is_train, again and is_train, tuple(frozen))


def problem_of(
    found: tuple[StagePlacement, ...],
    request: PlacementRequest,
    shape: str,
    *,
    split: bool = False,
    recompute: Decide = "no",
    offload: Decide = "no",
    overlap: Overlap = "beside",
) -> Model:
    """The problem of stages that are placed."""
    prices, links = request.prices, edges(found, request.workload)
    if offload == "yes" and request.trains:
        found = tuple(
            replace(p, ways=(*p.ways, "offload")) if has_block(prices, p) else p for p in found
        )
    ranks = ranks_by_device(found)
    device = {r: d for d, group in enumerate(ranks) for r in group}
    back = stages_with_backward(found, links) if request.trains else set()
    where = [tuple(sorted({device[r] for r in p.ranks})) for p in found]
    blocks = [
        block_of(prices, p, s, kind, where[s], s in back, split)
        for s, p in enumerate(found)
        for kind in block_kinds(p, s in back, split)
    ]
    bare = Problem(
        tuple(blocks),
        tuple(block_waits(blocks, links)),
        len(ranks),
        tuple(min(free_memory(prices, found, r, bool(back)) for r in group) for group in ranks),
        mode="train" if back else "infer",
        name=f"{shape}: {request.workload.name}",
        choices=stage_choices(prices, found, where, back, split, recompute, offload),
    )
    priced = price_messages(bare, message_price(prices, found, links), overlap=overlap)
    return Model(priced, shape, prices, found, ranks)


# The blocks of placed stages: times, memory, waits, choices and messages.
#
# A stage is a forward block and, where something before it or in it is trained, a backward block or
# two gradients. `block_id` ties a block to its stage; `ranks_by_device` groups ranks into devices.


Decide = Literal["no", "yes", "auto"]
_KINDS = "FBIW"


def stage_of(block: Block) -> int:
    """The stage that a block belongs to."""
    return block.id // len(_KINDS)


def block_id(stage: int, kind: str) -> int:
    """The id of a stage's block of that kind."""
    return len(_KINDS) * stage + _KINDS.index(kind)


def has_block(prices: Prices, place: StagePlacement) -> bool:
    """Whether a stage keeps what can be dropped or moved: blocks do, ends hardly anything."""
    return any(n and prices.workload.layers[i].is_block for i, n in enumerate(place.times))


def ranks_by_device(found: Sequence[StagePlacement]) -> tuple[tuple[int, ...], ...]:
    """Ranks that are in the same stages, together."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in sorted({r for p in found for r in p.ranks}):
        mine = tuple(s for s, p in enumerate(found) if rank in p.ranks)
        groups.setdefault(mine, []).append(rank)
    return tuple(map(tuple, groups.values()))


def stages_with_backward(found: Sequence[StagePlacement], links: Sequence[Edge]) -> set[int]:
    """Stages that have a backward: those trained, and those behind them."""
    out = {s for s, p in enumerate(found) if "frozen" not in p.ways}
    while more := {e.then for e in links if e.first in out} - out:
        out |= more
    return out


def block_kinds(place: StagePlacement, trains: bool, split: bool) -> str:
    """The blocks a stage has."""
    if not trains:
        return "F"
    return "FIW" if split and "frozen" not in place.ways else "FB"


def block_of(
    prices: Prices, place: StagePlacement, stage: int, kind: str, devices: tuple[int, ...],
    trains: bool, split: bool,
) -> Block:  # fmt: skip
    paid = placed_stage_cost(prices, place)
    by = memory_change(
        kind, paid, place.ways, trains=trains, split=split and "frozen" not in place.ways
    )
    took = seconds(prices, place, kind, paid) * slowdown(prices.plan, prices.cluster)
    name = " ".join(place.texts(prices.workload)[1:])
    return Block(block_id(stage, kind), kind, devices, took, by.start, by.end, name)


def free_memory(prices: Prices, found: Sequence[StagePlacement], rank: int, trains: bool) -> float:
    """Bytes a rank has for what micro-batches keep."""
    held = constant(prices, found, rank, trains=trains)
    if held > room(prices, rank):
        raise InfeasibleError(
            f"rank {rank} would hold {held / 2**30:.1f} GiB of weights and optimizer state, it has "
            f"{room(prices, rank) / 2**30:.1f}",
            hint="spread its layers over more ranks: shape m, or a larger cluster",
        )
    return room(prices, rank) - held


def block_waits(blocks: Sequence[Block], links: Sequence[Edge]) -> list[Wait]:
    place = {b.id: i for i, b in enumerate(blocks)}
    out = [Wait(place[block_id(e.then, "F")], place[block_id(e.first, "F")]) for e in links]
    for i, block in enumerate(blocks):
        s = stage_of(block)
        if block.kind == "W":
            out.append(Wait(i, place[block_id(s, "I")]))
        elif block.kind != "F":
            behind = [e.then for e in links if e.first == s]
            ids = [block_id(b, k) for b in behind for k in "BI" if block_id(b, k) in place]
            out += [Wait(i, place[j]) for j in ids or [block_id(s, "F")]]
    return out


def stage_choices(
    prices: Prices, found: Sequence[StagePlacement], where: Sequence[tuple[int, ...]],
    back: set[int], split: bool, recompute: Decide, offload: Decide,
) -> tuple[Choice, ...]:  # fmt: skip
    """For every stage that keeps something: the same blocks, and less kept."""
    out = []
    for way, request in (("recompute", recompute), ("offload", offload)):
        for s in sorted(back if request == "auto" else ()):
            place = found[s]
            if way in place.ways or not has_block(prices, place):
                continue
            other = replace(place, ways=(*place.ways, way))
            blocks = [
                block_of(prices, other, s, kind, where[s], True, split)
                for kind in block_kinds(place, True, split)
            ]
            out.append(Choice(f"{way} {s}", tuple(blocks)))
    return tuple(out)


def message_price(prices: Prices, found: Sequence[StagePlacement], links: Sequence[Edge]) -> Price:
    """Seconds of the message between two blocks: forward along a link, backward against it."""
    layers = {(e.first, e.then): e.layers for e in links}
    longer = slowdown(prices.plan, prices.cluster)

    def seconds_of(first: Block, then: Block) -> float:
        a, b = stage_of(first), stage_of(then)
        moved = layers.get((a, b)) or layers.get((b, a)) or ()
        return message(prices, found[a], found[b], moved) * longer if a != b else 0.0

    return seconds_of
