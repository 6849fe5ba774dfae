"""A captured step as ops to be fused: its kernels with their data, its gradients by parameter.

`foretell capture` writes who reads whom, the shapes each operator was given, and when each gradient
is there; `foretell.cost` prices what has no seconds yet.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np

from foretell.cluster import Cluster
from foretell.cost.fusion_class import WORDS, kind_of, word_of
from foretell.cost.price import price
from foretell.errors import InputError
from foretell.graph import BufferKind, Dtype, Graph, Kind, Phase, WaitKind
from foretell.graph.columns import word_of as name_of_code
from foretell.plan.layer_cost import slowest
from foretell.plan.op_names import given, op_names, parameter_print
from foretell.search.fusion.from_workload import of_slowest
from foretell.search.fusion.problem import (
    BACKWARD,
    FORWARD,
    Entry,
    Gradient,
    Piece,
    Problem,
    edges_of,
)
from foretell.search.fusion.wire import wire_of

_SIZE = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "int64": 8, "int32": 4}
_STEP = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD)
_LASTING = (BufferKind.PARAMETER, BufferKind.GRADIENT, BufferKind.OPTIMIZER, BufferKind.INPUT)
_SHARDED = (BufferKind.GRADIENT, BufferKind.OPTIMIZER)  # by ZeRO-2
Dims = tuple[int, ...]


def from_graph(
    graph: Graph, cluster: Cluster, *, epilogue: bool = False, learned: bool = False, zero: int = 0
) -> Problem:
    """One data-parallel step of a captured graph on every rank of a cluster."""
    priced = price(graph, of_slowest(cluster))
    tasks = _kernels(graph)
    place = {int(t): i for i, t in enumerate(tasks)}
    gradients = _gradients(graph, place)
    rows = _reads(graph, place)
    ops = _pieces(priced, tasks, rows, gradients)
    update = (graph.kind == Kind.KERNEL) & (graph.phase == Phase.UPDATE)
    share = np.isin(graph.buffers.kind, _LASTING) * 1.0
    if zero:
        share[np.isin(graph.buffers.kind, _SHARDED)] /= cluster.size
    return Problem(
        str(graph.facts.get("captured", "a captured step")),
        parameter_print({g.name: g.bytes for g in gradients}),
        tuple(ops),
        *edges_of(rows),
        tuple(gradients),
        float(priced.seconds[update].sum()),
        wire_of(cluster),
        slowest(cluster),
        held=float((graph.buffers.bytes * share).sum()),
        room=min(float(device.memory) for device in cluster.devices),
        epilogue=epilogue,
        learned=learned,
        zero=zero,
    )


def _kernels(graph: Graph) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    mine = (graph.kind == Kind.KERNEL) & np.isin(graph.phase, _STEP)
    tasks: np.ndarray[tuple[int], np.dtype[np.int64]] = np.flatnonzero(mine)
    if not len(tasks):
        raise InputError(
            "the graph has no kernels of a forward or backward",
            hint="make one with `foretell capture train.py -o step.graph`",
        )
    return tasks


def _gradients(graph: Graph, place: dict[int, int]) -> list[Gradient]:
    """Gradients as their buffers tell, each with the kernel that first writes it."""
    held, found = graph.buffers, {}
    for row in np.flatnonzero(held.kind == BufferKind.GRADIENT).tolist():
        born = int(held.born[row])
        if born in place:
            name = graph.names[int(held.name[row])]
            found[name] = Gradient(name, float(held.bytes[row]), place[born])
    return list(found.values())


def _reads(graph: Graph, place: dict[int, int]) -> list[tuple[int, int, int]]:
    edges = graph.edges
    mine = edges.kinds == WaitKind.DATA
    rows = zip(edges.after[mine].tolist(), edges.waiting[mine].tolist(), strict=True)
    return [(place[s], place[t], 0) for s, t in rows if s in place and t in place]


def _pieces(
    graph: Graph, tasks: np.ndarray[tuple[int], np.dtype[np.int64]],
    rows: list[tuple[int, int, int]], gradients: list[Gradient],
) -> list[Piece]:  # fmt: skip
    written, names = _written(graph), op_names(graph)
    read, needed = {s for s, _, _ in rows}, {g.op for g in gradients}
    sources: dict[int, list[int]] = {}
    for s, t, _ in rows:
        sources.setdefault(t, []).append(s)
    found: list[Piece] = []
    for i, task in enumerate(tasks.tolist()):
        piece = _piece(graph, task, written.get(task, 0.0))
        kept = i in needed or i not in read
        entries = _entries(graph, task, piece, [found[s] for s in sources.get(i, [])])
        found.append(replace(piece, name=names[task], kept=kept, entries=entries))
    return found


def _written(graph: Graph) -> dict[int, float]:
    """Bytes of the largest thing each kernel makes."""
    held, found = graph.buffers, dict[int, float]()
    for born, size in zip(held.born.tolist(), held.bytes.tolist(), strict=True):
        found[born] = max(found.get(born, 0.0), size)
    return found


def _piece(graph: Graph, task: int, written: float) -> Piece:
    word = word_of(graph.names[int(graph.op[task])].rstrip("_"))
    word = word if word in WORDS else "other"
    dtype = name_of_code(Dtype, int(graph.dtype[task]))
    dtype = dtype if dtype in _SIZE else "fp32"
    dims = _inputs(graph, task)
    looped = float(max([prod(d) for d in dims] or [1]))
    kind = kind_of(word)
    made = written / _SIZE[dtype] if written else looped
    if kind in ("pointwise", "random", "norm"):
        made = looped
    largest = max(dims, key=prod, default=(1,))
    inner, across = _inner(word, kind, largest, looped, made)
    side = BACKWARD if graph.phase[task] == Phase.BACKWARD else FORWARD
    return Piece(
        "", word, dtype, made, max(looped, made), float(graph.seconds[task]),
        made * _SIZE[dtype], side, inner, across, float(largest[-1] if largest else 1),
        float(graph.flops[task]) if kind == "template" else 0.0, given=given(graph, task),
    )  # fmt: skip


def _inner(word: str, kind: str, dims: Dims, looped: float, made: float) -> tuple[float, int]:
    """Places that become one, and whether they lie apart."""
    if word.startswith("batch_norm"):
        return looped / max(dims[1] if len(dims) > 1 else 1, 1), 1
    if kind == "norm":
        return float(dims[-1] if dims else 1), 0
    if kind == "reduction":
        return max(looped / max(made, 1.0), 1.0), int(made > 1)
    return 1.0, 0


def _entries(graph: Graph, task: int, piece: Piece, makers: list[Piece]) -> tuple[Entry, ...]:
    """What an op is given that no op of the step made: inputs left over by size."""
    left = [float(prod(d)) for d in _inputs(graph, task)]
    for maker in makers:
        near = min(left, key=lambda size: abs(size - maker.elements), default=None)
        if near is not None:
            left.remove(near)
    return tuple(Entry(n, piece.dtype, 0 if n >= piece.looped else 1) for n in left)


def _inputs(graph: Graph, task: int) -> list[Dims]:
    """The dims of an operator's inputs, from `32x256+256+-`."""
    items = [item for group in given(graph, task).split("+") for item in group.split("|")]
    return [
        tuple(map(int, i.split("x"))) for i in items if i and all(c in "0123456789x" for c in i)
    ]
