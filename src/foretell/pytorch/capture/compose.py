"""Operators recorded in a step as a graph: a host task each, kernels behind it, and memory.

host     one thread issues all operators in order; its shape says what it issues, for a price
stream   one stream runs the kernels; each waits for its launch and for what it uses
buffers  from the first kernel that needs the memory to the last before it was given back
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from foretell.graph import Builder, Dtype, Graph, Kind, Phase
from foretell.graph.columns import NONE, Array
from foretell.operators import PRODUCTS
from foretell.pytorch.capture.record import Row, Stay

# Medians of H200 traces, rounded: between two queued kernels, and from a launch to its kernel.
TURNAROUND, LATENCY = 1e-6, 1e-6
_HOST, _STREAM = 0, 1  # lanes
Held = list[tuple[Stay, int, int]]  # memory, and the kernels it is born for and dies behind


def compose(
    rows: list[Row], stays: list[Stay], formats: Formats, facts: Mapping[str, Any]
) -> Graph:
    """The graph of a recorded step."""
    made, last = Builder(), np.full(len(rows), NONE, np.int64)
    for i, row in enumerate(rows):
        host = _host(made, row)
        for part in range(len(row.parts)):
            last[i] = _kernel(made, row, part, host, last, formats)
    made.lane("thread main", kind="host")
    made.lane("stream 0", kind="compute")
    held = _held(stays, last)
    for stay, born, dies in held:
        made.buffer(stay.bytes, born=born, dies=dies, name=stay.name, kind=stay.kind.name)
    return made.made({**facts, "peak_bytes": _peak(held)})


@dataclass(frozen=True)
class Formats:
    """Which fp32 work runs as tf32."""

    products: bool
    convolutions: bool

    @classmethod
    def asked(cls, tf32: bool | None) -> Formats:
        """As said, or as torch is set."""
        if tf32 is not None:
            return cls(tf32, tf32)
        return cls(torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)

    def of(self, row: Row, word: str) -> Dtype:
        is_conv = row.op.startswith("convolution") and word != "bias"
        is_tf32 = (self.products and row.op in PRODUCTS) or (self.convolutions and is_conv)
        return Dtype.TF32 if is_tf32 and row.dtype == Dtype.FP32 else row.dtype


def _host(made: Builder, row: Row) -> int:
    """The call that issues an operator; one that asks for a number waits for the stream."""
    said = {"kernels": len(row.parts), "modules": row.modules, "nodes": row.nodes}
    said |= {"tensors": row.tensors, "update": row.phase == Phase.UPDATE}
    more = "".join(f",{key}={int(value)}" for key, value in said.items() if value)
    task = made.task(
        kind=Kind.HOST, op=row.op, name=row.name, lane=_HOST, layer=row.layer, phase=row.phase,
        shape=f"direction={row.direction}{more}",
    )  # fmt: skip
    if row.waits:
        made.task(
            kind=Kind.SYNC, op="cudaStreamSynchronize", name=row.op, lane=_HOST, layer=row.layer,
            phase=row.phase, drains=(_STREAM,),
        )  # fmt: skip
    return task


def _kernel(made: Builder, row: Row, part: int, host: int, last: Array, formats: Formats) -> int:
    """One kernel of an operator, behind its launch and behind what it uses."""
    word, flops, moved = row.parts[part]
    said = f",part={word}" if word else ""
    task = made.task(
        kind=Kind.COPY if row.is_copy else Kind.KERNEL, op=row.op, name=row.name, lane=_STREAM,
        gap=TURNAROUND, flops=flops, bytes=moved / 2 if row.is_copy else moved,  # a bus: once
        layer=row.layer, phase=row.phase, dtype=formats.of(row, word), shape=row.shape + said,
    )  # fmt: skip
    made.wait(task, host, lag=LATENCY, kind="launch")
    if word == "bias" and row.op == "convolution":
        made.wait(task, task - 1)
    for source in row.after:
        if last[source] != NONE and last[source] < task:
            made.wait(task, int(last[source]))
    return task


def _held(stays: list[Stay], last: Array) -> Held:
    """Memory by the kernels it is needed for; what no kernel sees takes none."""
    before = np.maximum.accumulate(last) if len(last) else last
    after = _next(last)
    found = []
    for stay in stays:
        born = NONE if stay.born == NONE else int(after[stay.born])
        dies = NONE if stay.dies == NONE else int(before[stay.dies])
        is_seen = stay.dies == NONE or dies != NONE
        if stay.bytes and is_seen and (dies == NONE or born <= dies) and not _is_late(stay, born):
            found.append((stay, born, dies))
    return found


def _peak(held: Held) -> float:
    """Most bytes at once when tasks run in the order they were issued."""
    change = np.zeros(max((max(born, dies) for _, born, dies in held), default=0) + 3)
    for stay, born, _ in held:
        change[born + 1] += stay.bytes
    for stay, _, dies in held:
        if dies != NONE:
            change[dies + 2] -= stay.bytes
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
