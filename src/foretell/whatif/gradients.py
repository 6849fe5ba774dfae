"""The gradients of a step: how large each is, in which order they are ready, and behind which task.

Found, rank by rank, from the best the graph has:

    packed       a what-if has put a copy of each gradient into a bucket already: those copies
    collectives  the step exchanges gradients already, and autograd does not account for the bytes
    autograd     one `AccumulateGrad` a parameter says when; its own `add_` kernel says how large,
                 or else the optimizer's kernels, one a parameter, say so in parameter order
    buffers      a graph that was written, not traced, lists gradients by layer
    spread       no autograd (a CUDA graph): the optimizer's parameters, last first, evenly over the
                 backward kernels

Autograd visits parameters roughly last to first. Which parameter an `AccumulateGrad` belongs to is
settled by its layer: of the parameters left, the last whose size is among the inputs of that
layer's forward kernels, or else the last of all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretell.graph.graph import Array, BufferKind, Graph, Ids, Kind, LaneKind, Phase, WaitKind
from foretell.whatif.base import DoesNotApply
from foretell.whatif.parameters import (
    PACK,
    UNPACK,
    first_shape,
    in_order,
    inputs_of,
    item_bytes,
    numbers,
    parameters,
)

CLOSE = 0.01  # how near two counts of the same bytes are


@dataclass(frozen=True, eq=False)
class Gradients:
    """The gradients of one rank, first ready first."""

    rank: int
    bytes: Array
    ready: Ids  # the task behind which each is there: a host task where the host runs backward
    shape: tuple[str, ...]  # `1000x2048`, empty where it is unknown
    layer: tuple[str, ...]
    source: str  # packed, collectives, autograd, buffers or spread

    def __len__(self) -> int:
        return len(self.bytes)


def gradients(graph: Graph) -> tuple[Gradients, ...]:
    """The gradients of every rank that has a backward pass."""
    if graph.facts.get("turned"):
        raise DoesNotApply(
            "the step begins with its backward pass, as parameter servers need it",
            hint="ask for parameter-server or p3 last",
        )
    ranks = np.unique(graph.rank[graph.phase == Phase.BACKWARD]).tolist()
    if not ranks:
        raise DoesNotApply("the step has no recognizable backward pass")
    return tuple(_of_rank(graph, rank) for rank in ranks)


def exchanged(graph: Graph) -> Ids:
    """The collectives that bring the gradients of all ranks together, as they are issued."""
    named = np.isin(graph.names.matching("gradients*"), graph.name)
    by_name = np.isin(graph.name, graph.names.matching("gradients*")[named])
    is_op = np.zeros(graph.size, bool)
    is_op[graph.select(kind="collective", op=("all_reduce", "reduce_scatter"))] = True
    e = graph.edges
    behind = np.zeros(graph.size, bool)
    behind[e.waiting[graph.phase[e.after] == Phase.BACKWARD]] = True
    is_message = np.isin(graph.kind, (Kind.COLLECTIVE, Kind.SEND)) & (graph.comm_bytes > 0)
    found = np.flatnonzero(is_message & (by_name | (is_op & behind)))
    return found[np.argsort(graph.order[found], kind="stable")]


def _of_rank(graph: Graph, rank: int) -> Gradients:
    packed = in_order(graph, graph.select(op=PACK, kind="kernel", rank=rank))
    if len(packed):
        if len(packed) != len(graph.select(op=UNPACK, kind="kernel", rank=rank)):
            raise DoesNotApply(
                "copies into buckets were changed since they were put in",
                hint="ask for the exchange of gradients behind what changes kernels",
            )
        return _packed(graph, rank, packed)
    collectives = _collectives_of(graph, rank)
    sent = float(graph.comm_bytes[collectives].sum())
    visits = _visits(graph, rank)
    if len(visits):
        found = _from_autograd(graph, rank, visits)
        if found and (not sent or abs(found.bytes.sum() / sent - 1) < CLOSE):
            return found
    if len(collectives):
        return _from_collectives(graph, rank, collectives)
    others = (_from_buffers(graph, rank), _spread(graph, rank))
    known = next((found for found in others if found), None)
    if known is None:
        raise DoesNotApply(
            "the step does not say how large its gradients are",
            hint="profile with record_shapes=True, and with the optimizer's step inside",
        )
    return known


def _collectives_of(graph: Graph, rank: int) -> Ids:
    """The gradient collectives that a rank takes part in."""
    found = exchanged(graph)
    lanes = np.flatnonzero(graph.lanes.rank == rank)
    held = graph.held.task[np.isin(graph.held.lane, lanes)]
    mine: Ids = found[np.isin(graph.lane[found], lanes) | np.isin(found, held)]
    return mine


def _packed(graph: Graph, rank: int, packed: Ids) -> Gradients:
    layers = [graph.text_of("layer", int(i)) for i in packed]
    shapes = [first_shape(graph.text_of("shape", int(i))) for i in packed]
    return Gradients(rank, graph.comm_bytes[packed], packed, tuple(shapes), tuple(layers), "packed")


def _from_collectives(graph: Graph, rank: int, collectives: Ids) -> Gradients:
    ready = [_last_wait(graph, int(i), rank) for i in collectives]
    layers = tuple(graph.text_of("layer", int(i)) for i in collectives)
    shapes = ("",) * len(collectives)
    sizes = graph.comm_bytes[collectives]
    return Gradients(rank, sizes, np.array(ready, np.int64), shapes, layers, "collectives")


def _last_wait(graph: Graph, task: int, rank: int) -> int:
    """The last device task of a rank that a task waits for, else the last host task, else it."""
    after = graph.edges.of(task)
    mine = after[graph.rank[after] == rank]
    if not len(mine):
        return task
    on_device = ~np.isin(graph.kind[mine], (Kind.HOST, Kind.SYNC))
    return int(mine[np.lexsort((graph.order[mine], on_device))[-1]])


def _visits(graph: Graph, rank: int) -> list[Ids]:
    """The host tasks of each visit of autograd to a parameter, in order."""
    tasks = in_order(graph, graph.select(name="AccumulateGrad", kind="host", rank=rank))
    if not len(tasks):
        return []
    op = graph.op[tasks]
    is_whole = np.isin(op, graph.names.matching("AccumulateGrad"))
    if is_whole.all():
        return list(tasks.reshape(-1, 1))
    # A visit that adds to an old gradient is cut by the launch of `add_` into two pieces.
    on_lane = in_order(graph, np.flatnonzero(graph.lane == graph.lane[tasks[0]]))
    place = np.full(graph.size, -1)
    place[on_lane] = np.arange(len(on_lane))
    launches = np.zeros(graph.size, bool)
    launches[graph.edges.after[graph.edges.kinds == WaitKind.LAUNCH]] = True
    visits: list[list[int]] = []
    for task in tasks.tolist():
        before = visits[-1][-1] if visits and len(visits[-1]) == 1 else task
        between = on_lane[place[before] + 1 : place[task]]
        if len(between) == 1 and launches[between[0]]:
            visits[-1].append(task)
        else:
            visits.append([task])
    return [np.array(visit) for visit in visits]


def _from_autograd(graph: Graph, rank: int, visits: list[Ids]) -> Gradients | None:
    known = parameters(graph, rank)
    if known and len(visits) % len(known) == 0:
        visits = visits[-len(known) :]  # of several passes the last one is exchanged
    ready = np.array([visit[-1] for visit in visits])
    layers = _layers_of(graph, rank, ready)
    added = [_added(graph, visit) for visit in visits]
    if all(shape for shape, _ in added):
        shapes = [shape for shape, _ in added]
        sizes = [numbers(shape) * each for shape, each in added]
    else:
        if len(known) != len(visits):
            return None
        turns = _matched(graph, rank, ready, layers, known)
        shapes = [known[k][0] for k in turns]
        sizes = [numbers(known[k][0]) * known[k][1] for k in turns]
    return Gradients(rank, np.array(sizes), ready, tuple(shapes), layers, "autograd")


def _layers_of(graph: Graph, rank: int, ready: Ids) -> tuple[str, ...]:
    """The layer of each visit: its own, or that of the backward kernel issued last before it."""
    kernels = in_order(graph, graph.select(kind="kernel", phase="backward", rank=rank))
    at = np.searchsorted(graph.order[kernels], graph.order[ready]) - 1
    own = [graph.text_of("layer", int(i)) for i in ready]
    before = [graph.text_of("layer", int(kernels[k])) if k >= 0 else "" for k in at]
    is_own = [bool(name) and not name.startswith("AccumulateGrad") for name in own]
    return tuple(o if mine else b for o, b, mine in zip(own, before, is_own, strict=True))


def _added(graph: Graph, visit: Ids) -> tuple[str, float]:
    """Shape and item size of the gradient that a visit adds to the old one; empty where none."""
    low, high = graph.order[visit[0]], graph.order[visit[-1]]
    if low == high:
        return "", 0.0
    between = (graph.order > low) & (graph.order < high) & (graph.kind == Kind.KERNEL)
    kernels = np.flatnonzero(between & (graph.rank == graph.rank[visit[0]]))
    shape = first_shape(graph.text_of("shape", int(kernels[0]))) if len(kernels) else ""
    return shape, item_bytes(graph, int(kernels[0])) if shape else 0.0


def _matched(
    graph: Graph,
    rank: int,
    ready: Ids,
    layers: tuple[str, ...],
    known: list[tuple[str, float]],
) -> list[int]:
    """The parameter of each visit, by its layer and from the last parameter to the first.

    Of a layer's sizes the one that the kernel just before the visit handled comes first, and none
    comes twice before all have come.
    """
    left = list(range(len(known)))[::-1]
    sizes = [numbers(shape) for shape, _ in known]
    inputs, hints = _layer_inputs(graph, rank), _just_before(graph, rank, ready)
    taken: dict[str, set[float]] = {}
    turns = []
    for layer, hint in zip(layers, hints, strict=True):
        wanted, used = inputs.get(layer, set()), taken.setdefault(layer, set())
        choices = ((hint & wanted) - used, wanted - used, wanted)
        places = (next((i for i, k in enumerate(left) if sizes[k] in c), -1) for c in choices)
        turns.append(left.pop(max(0, next((p for p in places if p >= 0), 0))))
        used.add(sizes[turns[-1]])
    return turns


def _just_before(graph: Graph, rank: int, ready: Ids) -> list[set[float]]:
    """Numbers in the inputs of the backward kernel issued last before each visit."""
    kernels = in_order(graph, graph.select(kind="kernel", phase="backward", rank=rank))
    at = np.searchsorted(graph.order[kernels], graph.order[ready]) - 1
    texts = [graph.text_of("shape", int(kernels[k])) if k >= 0 else "" for k in at]
    return [{numbers(part) for part in inputs_of(text)} for text in texts]


def _layer_inputs(graph: Graph, rank: int) -> dict[str, set[float]]:
    """Numbers in each input of the forward kernels of every layer."""
    found: dict[str, set[float]] = {}
    seen: set[tuple[int, int]] = set()
    for k in graph.select(kind="kernel", phase=("forward", "loss"), rank=rank).tolist():
        key = (int(graph.layer[k]), int(graph.shape[k]))
        if key not in seen:
            seen.add(key)
            parts = inputs_of(graph.names[key[1]])
            found.setdefault(graph.names[key[0]], set()).update(numbers(p) for p in parts)
    for sizes in found.values():
        sizes.discard(0.0)
    return found


def _from_buffers(graph: Graph, rank: int) -> Gradients | None:
    """Gradients that the graph lists as memory, each ready when its layer's backward ends."""
    b = graph.buffers
    mine = np.flatnonzero((b.kind == BufferKind.GRADIENT) & (b.rank == rank))
    kernels = in_order(graph, graph.select(kind="kernel", phase="backward", rank=rank))
    last = {int(graph.layer[k]): int(k) for k in kernels}
    rows = [i for i in mine.tolist() if int(b.name[i]) in last]
    if not rows or len(rows) < len(mine):
        return None
    ready = np.array([last[int(b.name[i])] for i in rows])
    ranked = np.argsort(graph.order[ready], kind="stable")
    layers = tuple(graph.names[int(b.name[rows[i]])] for i in ranked)
    sizes = b.bytes[np.array(rows)][ranked]
    return Gradients(rank, sizes, ready[ranked], ("",) * len(rows), layers, "buffers")


def _spread(graph: Graph, rank: int) -> Gradients | None:
    known = parameters(graph, rank)[::-1]
    kernels = in_order(graph, graph.select(kind="kernel", phase="backward", rank=rank))
    if not known or not len(kernels):
        return None
    share = np.arange(1, len(known) + 1) / len(known)
    ready = kernels[np.ceil(share * len(kernels)).astype(int) - 1]
    sizes = np.array([numbers(s) * each for s, each in known])
    layers = tuple(graph.text_of("layer", int(i)) for i in ready)
    return Gradients(rank, sizes, ready, tuple(s for s, _ in known), layers, "spread")


def compute_lane(graph: Graph, rank: int) -> int:
    """The lane on which a rank's backward kernels spend most of their time."""
    mine = graph.select(kind="kernel", phase="backward", rank=rank)
    lanes = graph.lanes.of_kind(LaneKind.COMPUTE)
    mine = mine[np.isin(graph.lane[mine], lanes)] if len(lanes) else mine
    if not len(mine):
        raise DoesNotApply(f"rank {rank} has no kernels of a backward pass")
    return int(np.bincount(graph.lane[mine], graph.seconds[mine] + 1e-12).argmax())
