"""Operators recorded in a step as a graph: a host task each, kernels behind it, and memory.

host     one thread issues all operators in order; its shape says what it issues, for a price
stream   one stream runs the kernels; each waits for its launch and for what it uses
buffers  from the first kernel that needs the memory to the last before it was given back
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from foretell.graph import (
    Buffers,
    Drained,
    Dtype,
    Graph,
    Kind,
    LaneKind,
    Lanes,
    Names,
    Phase,
    WaitKind,
    assemble,
    edges,
)
from foretell.graph.columns import NONE, Array
from foretell.operators import PRODUCTS
from foretell.pytorch.capture.record import Row, Stay

# Medians of H200 traces, rounded: between two queued kernels, and from a launch to its kernel.
TURNAROUND, LATENCY = 1e-6, 1e-6
_HOST, _STREAM = 0, 1  # lanes
_LANES = [LaneKind.HOST, LaneKind.COMPUTE]


@dataclass
class _Table:
    """Columns and edges while they are filled."""

    columns: dict[str, list[Any]] = field(default_factory=dict)
    waits: list[tuple[int, int, float, int]] = field(default_factory=list)
    drained: list[tuple[int, int]] = field(default_factory=list)
    texts: dict[str, int] = field(default_factory=lambda: {"": 0})
    size: int = 0

    def text(self, words: str) -> int:
        return self.texts.setdefault(words, len(self.texts))

    def add(self, **values: Any) -> int:
        for name in _COLUMNS:
            self.columns.setdefault(name, []).append(values.get(name, 0))
        self.size += 1
        return self.size - 1


_COLUMNS = (
    *("kind", "op", "name", "lane", "gap", "flops", "bytes", "layer", "phase", "dtype", "shape"),
)


def compose(
    rows: list[Row], stays: list[Stay], formats: Formats, facts: Mapping[str, Any]
) -> Graph:
    """The graph of a recorded step."""
    table, last = _Table(), np.full(len(rows), NONE, np.int64)
    for i, row in enumerate(rows):
        host = _host(table, row)
        for part in range(len(row.parts)):
            last[i] = _kernel(table, row, part, host, last, formats)
    names = [table.text(name) for name in ("thread main", "stream 0")]
    held = _buffers(table, stays, last)
    facts = {**facts, "peak_bytes": _peak(held, table.size)}
    return assemble(
        table.size,
        table.columns,
        edges(table.size, *_transposed(table.waits, 4)),
        names=Names(table.texts),
        lanes=Lanes(*map(np.array, ([0, 0], names, _LANES, [True, True]))),
        drained=Drained(*_transposed(table.drained, 2)),
        buffers=held,
        facts=facts,
    )


@dataclass(frozen=True)
class Formats:
    """Which fp32 work runs as tf32."""

    products: bool
    convolutions: bool

    def of(self, row: Row, word: str) -> Dtype:
        is_conv = row.op.startswith("convolution") and word != "bias"
        is_tf32 = (self.products and row.op in PRODUCTS) or (self.convolutions and is_conv)
        return Dtype.TF32 if is_tf32 and row.dtype == Dtype.FP32 else row.dtype


def _host(table: _Table, row: Row) -> int:
    """The call that issues an operator; one that asks for a number waits for the stream."""
    counts = {"kernels": len(row.parts), "modules": row.modules, "nodes": row.nodes}
    counts |= {"tensors": row.tensors, "update": row.phase == Phase.UPDATE}
    more = "".join(f",{key}={int(value)}" for key, value in counts.items() if value)
    task = table.add(
        kind=Kind.HOST,
        op=table.text(row.op),
        name=table.text(row.name),
        lane=_HOST,
        layer=table.text(row.layer),
        phase=row.phase,
        shape=table.text(f"direction={row.direction}{more}"),
    )
    if row.waits:
        _wait_for_stream(table, row)
    return task


def _wait_for_stream(table: _Table, row: Row) -> None:
    task = table.add(
        kind=Kind.SYNC,
        op=table.text("cudaStreamSynchronize"),
        name=table.text(row.op),
        lane=_HOST,
        layer=table.text(row.layer),
        phase=row.phase,
    )
    table.drained.append((task, _STREAM))


def _kernel(table: _Table, row: Row, part: int, host: int, last: Array, formats: Formats) -> int:
    """One kernel of an operator, behind its launch and behind what it uses."""
    word, flops, moved = row.parts[part]
    suffix = f",part={word}" if word else ""
    task = table.add(
        kind=Kind.COPY if row.is_copy else Kind.KERNEL,
        op=table.text(row.op),
        name=table.text(row.name),
        lane=_STREAM,
        gap=TURNAROUND,
        flops=flops,
        bytes=moved / 2 if row.is_copy else moved,  # over a bus bytes go once
        layer=table.text(row.layer),
        phase=row.phase,
        dtype=formats.of(row, word),
        shape=table.text(row.shape + suffix),
    )
    table.waits.append((task, host, LATENCY, WaitKind.LAUNCH))
    if word == "bias" and row.op == "convolution":
        table.waits.append((task, task - 1, 0.0, WaitKind.DATA))
    for source in row.after:
        if last[source] != NONE and last[source] < task:
            table.waits.append((task, int(last[source]), 0.0, WaitKind.DATA))
    return task


def _buffers(table: _Table, stays: list[Stay], last: Array) -> Buffers:
    """Memory by the kernels it is needed for; what no kernel sees takes none."""
    before = np.maximum.accumulate(last) if len(last) else last
    after = _next(last)
    found = []
    for stay in stays:
        born = NONE if stay.born == NONE else int(after[stay.born])
        dies = NONE if stay.dies == NONE else int(before[stay.dies])
        is_seen = stay.dies == NONE or dies != NONE
        if stay.bytes and is_seen and (dies == NONE or born <= dies) and not _is_late(stay, born):
            found.append((stay.bytes, 0, born, dies, table.text(stay.name), int(stay.kind)))
    return Buffers(*_transposed(found, 6))


def _peak(held: Buffers, size: int) -> float:
    """Most bytes at once when tasks run in the order they were issued."""
    change = np.zeros(size + 2)
    np.add.at(change, held.born + 1, held.bytes)
    gone = held.dies != NONE
    np.add.at(change, held.dies[gone] + 2, -held.bytes[gone])
    return float(np.cumsum(change).max(initial=0.0))


def _is_late(stay: Stay, born: int) -> bool:
    """Memory reserved behind the last kernel of the step."""
    return stay.born != NONE and born == NONE


def _next(last: Array) -> Array:
    """For each operator the first kernel at or behind it."""
    far = np.iinfo(np.int64).max
    filled = np.where(last == NONE, far, last)
    found = np.minimum.accumulate(filled[::-1])[::-1] if len(last) else filled
    return np.where(found == far, NONE, found)


def _transposed(rows: list[tuple[Any, ...]], width: int) -> list[Any]:
    return list(zip(*rows, strict=True)) if rows else [[] for _ in range(width)]
