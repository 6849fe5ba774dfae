"""A graph written as Chakra execution traces, one file a rank.

Every turn on an ordered lane becomes a control dependency, every edge and drained lane a data
dependency. Gaps, lags and exact times are attributes of foretell's own: others pass them over, and
what was written reads back as a graph that takes as long.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from foretell.graph import Graph, Held, Kind
from foretell.graph.build import wiring
from foretell.graph.graph import NONE, Array
from foretell.io import write_atomically
from foretell.trace import wire
from foretell.trace.chakra import COLLECTIVE, COLLECTIVES, COMM, COMPUTE, RECEIVE, SEND, Field

VERSION = "0.0.4"


def write_chakra(graph: Graph, path: str | os.PathLike[str]) -> list[Path]:
    """Write one file a rank, `PATH.RANK.et`, and say which."""
    stem = str(path).removesuffix(".et")
    made = []
    for rank in _ranks(graph):
        target, lines = Path(f"{stem}.{rank}.et"), list(_file(graph, rank))
        write_atomically(target, lambda f, lines=lines: f.writelines(lines))  # type: ignore[misc]
        made.append(target)
    return made


def _ranks(graph: Graph) -> list[int]:
    found = set(graph.rank.tolist()) | set(graph.lanes.rank[graph.held.lane].tolist())
    return sorted(found)


def _file(graph: Graph, rank: int) -> Iterator[bytes]:
    yield wire.framed(wire.bytes_field(1, VERSION.encode()))
    for task in _tasks_of(graph, rank).tolist():
        yield wire.framed(_message(graph, task))


def _tasks_of(graph: Graph, rank: int) -> Array:
    """The tasks of a rank: its own, and those of others that hold one of its lanes."""
    mine = graph.rank == rank
    held: Held = graph.held
    mine[held.task[graph.lanes.rank[held.lane] == rank]] = True
    return np.flatnonzero(mine)


def _message(graph: Graph, task: int) -> bytes:
    wires = wiring(graph)
    waits = slice(int(wires.waits.start[task]), int(wires.waits.start[task + 1]))
    data, lags = wires.waits.after[waits].tolist(), wires.waits.lags[waits].tolist()
    kind, seconds = Kind(int(graph.kind[task])), float(graph.seconds[task])
    parts = [
        wire.number_field(1, task),
        wire.bytes_field(2, (graph.text_of("name", task) or graph.text_of("op", task)).encode()),
        wire.number_field(3, _node_type(graph, task, kind)),
        wire.packed_field(4, wires.turns.of(task).tolist()),
        wire.packed_field(5, data),
        wire.number_field(7, max(1, round(seconds * 1e6)) if seconds else 0),
    ]
    parts += [wire.bytes_field(10, _attribute_bytes(*a)) for a in _pairs(graph, task, kind, lags)]
    return b"".join(parts)


def _node_type(graph: Graph, task: int, kind: Kind) -> int:
    if kind == Kind.COLLECTIVE:
        return COLLECTIVE
    if kind == Kind.SEND:
        return RECEIVE if graph.text_of("op", task) == "recv" else SEND
    return COMPUTE


def _pairs(graph: Graph, task: int, kind: Kind, lags: list[float]) -> Iterator[tuple[str, Any]]:
    """Attributes of a task: those Chakra knows, then foretell's own."""
    op = graph.text_of("op", task)
    yield "is_cpu_op", kind in (Kind.HOST, Kind.SYNC, Kind.LOAD)
    if kind in COMM:
        yield "comm_size", int(graph.comm_bytes[task])
    if kind == Kind.COLLECTIVE and op in COLLECTIVES:
        yield "comm_type", COLLECTIVES.index(op)
        yield "pg_name", graph.text_of("group", task)
    yield "op", op
    yield "kind", int(kind)
    yield "seconds", float(graph.seconds[task])
    lane = int(graph.lane[task])
    if lane != NONE:
        yield "lane", graph.names[int(graph.lanes.name[lane])]
    if graph.gap[task]:
        yield "gap", float(graph.gap[task])
    if graph.layer[task]:
        yield "layer", graph.text_of("layer", task)
    if graph.phase[task]:
        yield "phase", int(graph.phase[task])
    if any(lags):
        yield "lags", lags


def _attribute_bytes(name: str, value: Any) -> bytes:
    head = wire.bytes_field(1, name.encode())
    if isinstance(value, bool):
        return head + wire.number_field(Field.BOOL, value)
    if isinstance(value, int):
        return head + wire.number_field(Field.INT64, value)
    if isinstance(value, float):
        return head + wire.double_field(Field.DOUBLE, value)
    if isinstance(value, list):
        return head + wire.bytes_field(Field.DOUBLES, wire.doubles_field(1, value))
    return head + wire.bytes_field(Field.STRING, str(value).encode())
