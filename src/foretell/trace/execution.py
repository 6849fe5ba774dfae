"""PyTorch execution traces: which operators ran on which tensors, without any time.

The operators that compute become tasks without a price: those that neither only change how memory
is looked at nor leave all work to operators inside them. A task waits for the last writer of the
storage it reads. Both forms are read: flat nodes (schema 1.0.1) and nodes with attributes (since).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from foretell.errors import InputError
from foretell.graph import Graph, Kind, LaneKind, Phase, WaitKind, edges
from foretell.graph.graph import Array, group_text
from foretell.operators import having
from foretell.trace.words import (
    RangeKind,
    Shape,
    Texts,
    canonical,
    collective,
    element_bytes,
    graph_of_rows,
    op_kind,
    range_kind,
)

_RECORD = "record_param_comms"
_SPAN = ("global_rank_start", "global_rank_stride", "pg_size")
_SAYS = 10  # inputs of a record from torch 2.3 on: the last three are its ranks
_MOST = 1 << 20  # ranks of a job
_WHOLE, _FREE = having("traced", "whole"), having("traced", "free")
_OPERATOR = re.compile(r"^\w+::\w")
_DTYPE = re.compile(r"Tensor\(([^)]*)\)")


class _Info(msgspec.Struct):
    values: list[Any] = msgspec.field(default_factory=list)
    shapes: list[Any] = msgspec.field(default_factory=list)
    types: list[Any] = msgspec.field(default_factory=list)


class _Raw(msgspec.Struct):
    """A node in either form."""

    id: int
    name: str = ""
    parent: int | None = None
    ctrl_deps: int | None = None
    seq_id: int = -1
    tid: int = 0
    fw_tid: int = 0
    inputs: list[Any] | _Info = msgspec.field(default_factory=list)
    input_shapes: list[Any] = msgspec.field(default_factory=list)
    input_types: list[Any] = msgspec.field(default_factory=list)
    outputs: list[Any] | _Info = msgspec.field(default_factory=list)
    attrs: list[dict[str, Any]] = msgspec.field(default_factory=list)


class _Document(msgspec.Struct):
    nodes: list[_Raw]
    schema: str = ""
    pid: int = 0


@dataclass(frozen=True)
class Op:
    """One node of an execution trace."""

    id: int
    name: str
    parent: int
    thread: int
    is_backward: bool
    inputs: list[Any]
    shape: Shape
    outputs: list[Any]
    attributes: dict[str, Any]


def parse_execution(data: bytes, where: str) -> list[Op]:
    """The nodes of an execution trace in the order in which they began."""
    try:
        found = msgspec.json.decode(data, type=_Document)
    except RecursionError:
        raise InputError(f"`{where}` is nested too deep for an execution trace") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"`{where}` is not an execution trace: {error}") from None
    return sorted((_op(n) for n in found.nodes), key=lambda n: n.id)


def _op(n: _Raw) -> Op:
    attributes = {str(a.get("name")): a.get("value") for a in n.attrs}
    parent = n.parent if n.parent is not None else n.ctrl_deps
    info = (
        n.inputs if isinstance(n.inputs, _Info) else _Info(n.inputs, n.input_shapes, n.input_types)
    )
    outputs = n.outputs.values if isinstance(n.outputs, _Info) else n.outputs
    types = [m[1] if (m := _DTYPE.search(str(t))) else "" for t in info.types]
    encode = msgspec.json.encode
    shape = Shape((encode(info.shapes), encode(types), b""))
    thread = attributes.get("tid", n.tid)
    return Op(
        n.id, n.name, -1 if parent is None else parent, thread if isinstance(thread, int) else 0,
        bool(attributes.get("fw_tid", n.fw_tid)), info.values, shape, outputs, attributes,
    )  # fmt: skip


def graph_of_execution(ops: Sequence[Op], where: str, rank: int = 0) -> Graph:
    """Tasks of the operators that compute, with the data that passes between them."""
    tells, computing = _range_kinds(ops), _computing(ops)
    chosen = [op for op in ops if op.id in computing]
    if not chosen:
        raise InputError(f"`{where}` has {len(ops)} nodes and none of them computes anything")
    texts, lanes = Texts(), dict[tuple[str, LaneKind], int]()
    rows = [_row(op, tells[op.id], texts, lanes) for op in chosen]
    waiting, after = _data(chosen)
    waits = edges(len(rows), waiting, after, None, np.full(len(after), WaitKind.DATA))
    return graph_of_rows(rows, waits, texts, lanes, rank=rank, where=where, ordered=True)


def _range_kinds(ops: Sequence[Op]) -> dict[int, int]:
    """Range kinds of each node and of all ranges around it."""
    found: dict[int, int] = {}
    for op in ops:  # parents begin before their children
        own = int(op_kind(op.name)) | int(range_kind(op.name))
        if op.is_backward:
            own |= RangeKind.BACKWARD
        found[op.id] = own | found.get(op.parent, 0)
    return found


def _computing(ops: Sequence[Op]) -> set[int]:
    """Operators that compute themselves: not free, and with nothing inside that computes."""
    outer: set[int] = set()  # nodes with something inside that computes
    found: set[int] = set()
    parent = {op.id: op.parent for op in ops}
    inside = _inside_whole(ops)
    for op in reversed(ops):
        if op.id in outer or op.id in inside or not _may_compute(op):
            continue
        found.add(op.id)
        above = op.parent
        while above in parent and above not in outer:
            outer.add(above)
            above = parent[above]
    return found


def _inside_whole(ops: Sequence[Op]) -> set[int]:
    """Nodes inside operators that do their own work."""
    found: set[int] = set()
    whole = {op.id for op in ops if canonical(op.name) in _WHOLE}
    for op in ops:  # parents begin before their children
        if op.parent in whole or op.parent in found:
            found.add(op.id)
    return found


def _may_compute(op: Op) -> bool:
    if op.name == _RECORD:
        return True
    if op.name.startswith(("autograd::", "c10d::", "nccl:")) or not (op.inputs or op.outputs):
        return False
    return bool(_OPERATOR.match(op.name)) and canonical(op.name) not in _FREE


def _row(
    op: Op, tells: int, texts: Texts, lanes: dict[tuple[str, LaneKind], int]
) -> dict[str, Any]:
    kind, name, size = Kind.KERNEL, canonical(op.name), 0.0
    lane = ("stream", LaneKind.COMPUTE)
    if op.name == _RECORD:
        kind, name = collective("", str(_collective_name(op)))
        elements = max(int(op.attributes.get(k) or 0) for k in ("in_msg_nelems", "out_msg_nelems"))
        size = elements * element_bytes(str(op.attributes.get("dtype"))) or op.shape.bytes
        lane = ("comm", LaneKind.COMM)
    elif not _is_on_device(op):
        kind, lane = Kind.HOST, (f"thread {op.thread}", LaneKind.HOST)
    return {
        "kind": int(kind),
        "op": texts.number(name),
        "name": texts.number(op.name),
        "lane": lanes.setdefault(lane, len(lanes)),
        "phase": int(_phase(tells, kind)),
        "dtype": int(op.shape.dtype),
        "shape": texts.number(op.shape.text() if op.shape.dims else ""),
        "comm_bytes": float(size),
        "group": texts.number(_group(op) if kind in (Kind.COLLECTIVE, Kind.SEND) else ""),
    }


def _collective_name(op: Op) -> Any:
    """The name of a communication record: an attribute, or the text among its inputs."""
    if "collective_name" in op.attributes:
        return op.attributes["collective_name"]
    return next((v for v in op.inputs if isinstance(v, str) and v and v[0] != "<"), "")


def _group(op: Op) -> str:
    """The ranks of a communication record, where it says them: first, stride and number."""
    span: list[Any] = [op.attributes.get(key) for key in _SPAN]
    if None in span:
        span = op.inputs[-3:] if len(op.inputs) >= _SAYS else []
    if len(span) != 3 or not all(isinstance(n, int) for n in span):
        return ""
    first, stride, size = span
    if first < 0 or stride < 1 or not 0 < size <= _MOST or first + size * stride > _MOST:
        return ""
    return group_text(range(first, first + size * stride, stride))


def _phase(tells: int, kind: Kind) -> Phase:
    if kind in (Kind.COLLECTIVE, Kind.SEND):
        return Phase.COMMUNICATE
    phases = {
        RangeKind.LOAD: Phase.LOAD, RangeKind.UPDATE: Phase.UPDATE,
        RangeKind.BACKWARD: Phase.BACKWARD, RangeKind.LOSS: Phase.LOSS,
    }  # fmt: skip
    for role, phase in phases.items():
        if tells & role:
            return phase
    return Phase.FORWARD


def _tensors(values: Any) -> list[list[Any]]:
    """All tensors in values: lists of id, storage, offset, elements, bytes and device."""
    found, left = [], [values]
    while left:
        value = left.pop()
        if not isinstance(value, list):
            continue
        is_tensor = len(value) == 6 and isinstance(value[5], str) and isinstance(value[0], int)
        if is_tensor and isinstance(value[1], int | str):
            found.append(value)
        else:
            left += reversed(value)
    return found


def _is_on_device(op: Op) -> bool:
    found = _tensors(op.inputs) + _tensors(op.outputs)
    return any(not str(t[5]).startswith("cpu") for t in found)


def _data(ops: Sequence[Op]) -> tuple[Array, Array]:
    """Data dependencies: by storage, each reader waits for the last writer before it."""
    writer: dict[tuple[Any, Any], int] = {}
    pairs: set[tuple[int, int]] = set()
    for k, op in enumerate(ops):
        for t in _tensors(op.inputs):
            before = writer.get((t[1], t[5]))
            if before is not None:
                pairs.add((k, before))
        for t in _tensors(op.outputs):
            writer[(t[1], t[5])] = k
    table = np.array(sorted(pairs), np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]
