"""The forward calls of a recorded step: what each reads, keeps, and runs in the backward.

A captured step says which task made what another uses; a traced one does not (→ `guess`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from foretell.cost.aten import Dims, read
from foretell.errors import InputError
from foretell.graph import BufferKind, Graph, Kind, Phase, WaitKind
from foretell.graph.columns import NONE
from foretell.workload.captured.guess import guessed, is_followed, outermost
from foretell.workload.captured.row import Row
from foretell.workload.captured.sizes import LOOK_UPS, PRODUCTS

# Calls that make constants, whatever they are given.
_CONSTANT = ("fill_", "arange", "empty", "scalar_tensor")


def rows_of(graph: Graph) -> list[Row]:
    """Every forward call in order, with its backward and what it keeps."""
    tasks = np.flatnonzero((graph.kind == Kind.KERNEL) | (graph.kind == Kind.COPY))
    names, paths = graph.texts("name"), graph.texts("layer")
    keys = names if is_captured(graph) else paths
    rows, where = _forward(graph, tasks.tolist(), keys, paths)
    if not rows:
        raise InputError(
            "the graph has no forward calls with shapes",
            hint="capture the model, or profile it with record_shapes=True",
        )
    _backward(graph, tasks.tolist(), keys, rows)
    _wire(graph, rows, where)
    _keep(graph, rows, where)
    return rows


def is_captured(graph: Graph) -> bool:
    """Whether the step was captured: its tasks are named after operators."""
    return "captured" in graph.facts


def _forward(
    graph: Graph, tasks: list[int], keys: list[str], paths: list[str]
) -> tuple[list[Row], dict[int, int]]:
    """Rows, and the row of each forward task."""
    ops, shapes, dtypes = (graph.texts(name) for name in ("op", "shape", "dtype"))
    captured = is_captured(graph)
    rows: list[Row] = []
    where: dict[int, int] = {}
    for i in tasks:
        phase = Phase(int(graph.phase[i]))
        if phase not in (Phase.FORWARD, Phase.LOSS) or not shapes[i].startswith("in="):
            continue
        call = read(ops[i], shapes[i], float(graph.bytes[i]), float(graph.flops[i]))
        if not captured:
            call = outermost(call, keys[i])
        if not call.tensors() and not any(call.lists) and ops[i] not in _CONSTANT:
            continue  # scalars
        if rows and rows[-1].key == keys[i] and rows[-1].op == call.op:
            if not _is_part(graph, i, rows[-1].tasks):
                rows[-1].tasks.append(i)
        else:
            path = paths[i] if captured else ""
            rows.append(Row(keys[i], call.op, path, phase, dtypes[i], call, [i]))
        where[i] = len(rows) - 1
    return rows, where


def _backward(graph: Graph, tasks: list[int], keys: list[str], rows: list[Row]) -> None:
    """Every backward task goes to its forward call, or to the one whose backward ran before it."""
    mine: dict[str, Row] = {}
    for row in rows:  # a trace has a window, its bias and a cast under one key
        if row.key not in mine or (is_followed(row) and not is_followed(mine[row.key])):
            mine[row.key] = row
    last: Row | None = None
    for i in tasks:
        if graph.phase[i] != Phase.BACKWARD:
            continue
        last = mine.get(keys[i].removesuffix(".backward"), last)
        if last is not None and not _is_part(graph, i, last.back):
            last.back.append(i)


def _is_part(graph: Graph, i: int, before: list[int]) -> bool:
    """Whether a task of a trace is one more kernel of the operator before it."""
    if is_captured(graph) or not before:
        return False
    return bool((graph.op[i], graph.shape[i]) == (graph.op[before[-1]], graph.shape[before[-1]]))


def _wire(graph: Graph, rows: list[Row], where: dict[int, int]) -> None:
    if is_captured(graph):
        kinds = graph.edges.kinds
        for at, row in enumerate(rows):
            found = set()
            for i in row.tasks:
                edges = range(int(graph.edges.start[i]), int(graph.edges.start[i + 1]))
                data = (int(graph.edges.after[e]) for e in edges if kinds[e] == WaitKind.DATA)
                found |= {where[j] for j in data if j in where}
            row.after = tuple(sorted(found - {at}))
        return
    for row, after in zip(rows, guessed(rows), strict=True):
        row.after = after


def _keep(graph: Graph, rows: list[Row], where: dict[int, int]) -> None:
    """Bytes of activations born in the forward that the backward still needs."""
    held = graph.buffers
    for size, born, dies, kind in zip(held.bytes, held.born, held.dies, held.kind, strict=True):
        if kind != BufferKind.ACTIVATION or int(born) not in where or dies == NONE:
            continue
        if graph.phase[int(dies)] >= Phase.BACKWARD:
            rows[where[int(born)]].kept += float(size)


def batch_of(graph: Graph, rows: Sequence[Row]) -> int:
    """Samples of the step: the first side of what the first call that reads data is given.

    Indices that a trace shows as one row tell no batch: there most tensors of three sides do.
    """
    said = graph.facts.get("batch")
    if isinstance(said, int | float) and said >= 1:
        return int(said)
    for row in rows:
        is_first = row.live and not row.after and (is_captured(graph) or row.op == "convolution")
        dims = _data(row) if is_first else ()
        if dims:
            return dims[0]
    sides = [row.out[0] for row in rows if row.live and len(row.out) == 3]
    sides = sides or [row.out[0] for row in rows if row.live and row.out]
    return Counter(sides).most_common(1)[0][0] if sides else 1


def _data(row: Row) -> Dims:
    """The sizes of what a call is given that is no parameter."""
    if row.op in PRODUCTS:
        return row.call.dims[PRODUCTS[row.op]]
    given = row.call.tensors()
    if row.op in LOOK_UPS:
        return row.call.dims[1] if len(row.call.dims) > 1 else ()
    return row.call.dims[given[0]] if given else ()


def mark_live(graph: Graph, rows: Sequence[Row]) -> None:
    """Find what depends on the batch: not constants, nor what is made of parameters alone."""
    said = graph.facts.get("batch_ops")
    known = frozenset(said) if isinstance(said, list | tuple) else None
    for row in rows:
        if row.op in _CONSTANT:
            continue
        reads = row.key in known if known is not None else not row.after and _reads_data(row)
        row.live = reads or any(rows[i].live for i in row.after)
        is_fed = any(rows[i].learned for i in row.after)
        row.learned = row.live and (is_fed or bool(row.reads) or not is_captured(graph))


def _reads_data(row: Row) -> bool:
    """Whether an input is neither a parameter nor made by another call."""
    sizes = list(row.reads)
    given = row.call.tensors()
    for i in given[:1] if row.op == "index" else given:  # where to look is no data to compute with
        if float(row.call.size(i)) in sizes:
            sizes.remove(float(row.call.size(i)))
        else:
            return True
    return False
