"""Chakra execution traces read as a graph, from protobuf or JSON.

A node becomes a task; what it depends on becomes its edges. Chakra knows no lanes with an order, no
gaps and no lags; what foretell wrote itself (`export.py`) says these in attributes of its own.

Schema: mlcommons/chakra, schema/protobuf/et_def.proto.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np

from foretell.errors import InputError
from foretell.graph import (
    Graph,
    Kind,
    LaneKind,
    Phase,
    Source,
    WaitKind,
    edges,
)
from foretell.graph.graph import Array
from foretell.trace import wire
from foretell.trace.words import Texts, canonical, graph_of_rows

METADATA, LOAD, STORE, COMPUTE, SEND, RECEIVE, COLLECTIVE = 1, 2, 3, 4, 5, 6, 7  # NodeType
COLLECTIVES = (
    "all_reduce", "reduce", "all_gather", "gather", "scatter", "broadcast", "all_to_all",
    "reduce_scatter", "reduce_scatter", "barrier",
)  # fmt: skip


class Field(IntEnum):
    """Which field of AttributeProto holds a value of each type."""

    DOUBLE = 3
    DOUBLES = 4
    INT32 = 7
    INT64 = 9
    UINT32 = 11
    UINT64 = 13
    BOOL = 27
    STRING = 29


_INTEGERS = (Field.INT32, Field.INT64, Field.UINT32, Field.UINT64)
COMM = (Kind.COLLECTIVE, Kind.SEND)


@dataclass
class Node:
    """One node of a Chakra trace."""

    id: int = -1
    name: str = ""
    type: int = 0
    control: list[int] = field(default_factory=list)
    data: list[int] = field(default_factory=list)
    micros: float = 0.0
    attributes: dict[str, Any] = field(default_factory=dict)


def is_chakra(head: bytes) -> bool:
    """Whether bytes begin as a Chakra file does: with the length and fields of its metadata."""
    try:
        first = next(wire.messages(head[:65536]), b"")
        found = [number for number, _ in wire.fields(first)]
    except ValueError:
        return False
    return bool(found) and set(found) <= {1, 2}


def parse_nodes(data: bytes, where: str) -> list[Node]:
    """The nodes of a protobuf file, without its metadata."""
    try:
        made = [_node(m) for k, m in enumerate(wire.messages(data)) if k]
    except (ValueError, UnicodeDecodeError) as error:
        raise InputError(
            f"`{where}` is not a whole Chakra trace: {error}",
            hint="it was cut short or is another file",
        ) from None
    return [n for n in made if n.type != METADATA]


def _node(message: bytes) -> Node:
    made = Node()
    for number, value in wire.fields(message):
        if number == 1 and isinstance(value, int):
            made.id = value
        elif number == 2 and isinstance(value, bytes):
            made.name = value.decode()
        elif number == 3 and isinstance(value, int):
            made.type = value
        elif number == 4:
            made.control += wire.numbers(value)
        elif number == 5:
            made.data += wire.numbers(value)
        elif number == 7 and isinstance(value, int):
            made.micros = float(value)
        elif number == 10 and isinstance(value, bytes):
            key, attribute = _attribute(value)
            made.attributes[key] = attribute
    return made


def _attribute(message: bytes) -> tuple[str, Any]:
    name = ""
    found: Any = None
    for number, value in wire.fields(message):
        if number == 1 and isinstance(value, bytes):
            name = value.decode()
        elif number in _INTEGERS and isinstance(value, int):
            found = wire.signed(value)
        elif number == Field.BOOL:
            found = bool(value)
        elif number == Field.STRING and isinstance(value, bytes):
            found = value.decode()
        elif number == Field.DOUBLE and isinstance(value, bytes):
            found = wire.doubles(value)[0]
        elif number == Field.DOUBLES and isinstance(value, bytes):
            inner = dict(wire.fields(value)).get(1, b"")
            found = wire.doubles(inner) if isinstance(inner, bytes) else []
    return name, found


class _Json(msgspec.Struct):
    """A node of the JSON form of a Chakra trace."""

    id: int = msgspec.field(name="Id")
    name: str = msgspec.field(default="", name="Name")
    type: int = msgspec.field(default=0, name="NodeType")
    control: list[int] = msgspec.field(default_factory=list, name="ctrlDeps")
    data: list[int] = msgspec.field(default_factory=list, name="data_deps")
    runtime: float = 0.0
    is_cpu_op: bool = False
    comm_size: int | None = None
    comm_type: int | None = None


class _Document(msgspec.Struct):
    workload_graph: list[_Json]


def parse_json(data: bytes, where: str) -> list[Node]:
    """The nodes of the JSON form."""
    try:
        found = msgspec.json.decode(data, type=_Document)
    except RecursionError:
        raise InputError(f"`{where}` is nested too deep for a Chakra trace") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"`{where}` is not a Chakra trace: {error}") from None
    nodes = []
    for n in found.workload_graph:
        attributes = {"is_cpu_op": n.is_cpu_op, "comm_size": n.comm_size, "comm_type": n.comm_type}
        attributes = {k: v for k, v in attributes.items() if v is not None}
        nodes.append(Node(n.id, n.name, n.type, n.control, n.data, n.runtime, attributes))
    return nodes


def graph_of_nodes(nodes: Sequence[Node], where: str, rank: int = 0) -> Graph:
    """The graph of a trace: one task a node, in the order of the file."""
    if not nodes:
        raise InputError(f"`{where}` has no nodes")
    texts, lanes = Texts(), dict[tuple[str, LaneKind], int]()
    number = {n.id: k for k, n in enumerate(nodes)}
    rows = []
    for n in nodes:
        try:
            rows.append(_row(n, _parent(n, nodes, number), texts, lanes))
        except (ValueError, TypeError, OverflowError) as error:
            raise InputError(f"node {n.id} of `{where}` cannot be read: {error}") from None
    waits = edges(len(nodes), *_waits(nodes, number))
    return graph_of_rows(rows, waits, texts, lanes, rank=rank, where=where, ordered=False)


def _parent(n: Node, nodes: Sequence[Node], number: dict[int, int]) -> str:
    """The operator that a kernel belongs to: PyTorch's converter names it as control dependency."""
    found = [nodes[number[k]] for k in n.control if k in number]
    return next((p.name for p in found if p.attributes.get("is_cpu_op")), n.name)


def _row(
    n: Node, parent: str, texts: Texts, lanes: dict[tuple[str, LaneKind], int]
) -> dict[str, Any]:
    attributes = n.attributes
    is_host = bool(attributes.get("is_cpu_op", False))
    kind, op = _kind(n, is_host, parent)
    lane = _lane(n, kind)
    return {
        "kind": int(kind),
        "op": texts.number(str(attributes.get("op") or op)),
        "name": texts.number(n.name),
        "lane": lanes.setdefault(lane, len(lanes)),
        "seconds": float(attributes.get("seconds", n.micros * 1e-6)),
        "gap": float(attributes.get("gap", 0.0)),
        "layer": texts.number(str(attributes.get("layer", ""))),
        "phase": int(attributes.get("phase", Phase.NONE)),
        "comm_bytes": float(attributes.get("comm_size", 0)) if kind in COMM else 0.0,
        "source": int(Source.MEASURED if n.micros or "seconds" in attributes else Source.NONE),
    }


def _kind(n: Node, is_host: bool, parent: str) -> tuple[Kind, str]:
    if "kind" in n.attributes:
        return Kind(int(n.attributes["kind"])), n.name
    if is_host:
        return Kind.HOST, canonical(n.name.split("(")[0])
    if n.type == COLLECTIVE:
        known = n.attributes.get("comm_type", 0)
        return Kind.COLLECTIVE, COLLECTIVES[known] if 0 <= known < len(
            COLLECTIVES
        ) else "all_reduce"
    if n.type in (SEND, RECEIVE):
        return Kind.SEND, "send" if n.type == SEND else "recv"
    if n.type in (LOAD, STORE):
        return Kind.COPY, "load" if n.type == LOAD else "store"
    return Kind.KERNEL, canonical(parent.split("(")[0])


def _lane(n: Node, kind: Kind) -> tuple[str, LaneKind]:
    lane = str(n.attributes.get("lane") or "")
    if kind in (Kind.HOST, Kind.SYNC, Kind.LOAD):
        return lane or f"thread {n.attributes.get('tid', 0)}", LaneKind.HOST
    if kind in COMM:
        return lane or "comm", LaneKind.COMM
    return lane or f"stream {n.attributes.get('tid', 0)}", LaneKind.COMPUTE


def _waits(nodes: Sequence[Node], number: dict[int, int]) -> tuple[Array, Array, Array, Array]:
    """Edges to nodes that are in the file; what its writer left out is passed over.

    A control dependency is an order only in what foretell wrote; PyTorch's converter writes there
    which operator a node lies in, and its own feeder does not wait for it.
    """
    rows: list[tuple[int, int, float, int]] = []
    for k, n in enumerate(nodes):
        lags = n.attributes.get("lags") or [0.0] * len(n.data)
        for other, lag in zip(n.data, lags, strict=False):
            if other in number:
                rows.append((k, number[other], float(lag), WaitKind.DATA))
        if "kind" in n.attributes:
            rows += [(k, number[o], 0.0, WaitKind.CONTROL) for o in n.control if o in number]
    table = np.array([r for r in rows if r[0] != r[1]], np.float64).reshape(-1, 4)
    return (
        table[:, 0].astype(np.int64), table[:, 1].astype(np.int64), table[:, 2],
        table[:, 3].astype(np.uint8),
    )  # fmt: skip
