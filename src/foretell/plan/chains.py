"""Forwards and backwards as tasks: each stage's chains written in one go, in schedule order."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foretell.graph.columns import Kind, Phase, Source
from foretell.plan.check import micro_batches
from foretell.plan.draft import Ids
from foretell.plan.ends import messages, overlaps
from foretell.plan.layouts import Array
from foretell.plan.order import FORWARD, Order, order
from foretell.plan.pieces import Piece, chain, few, split
from foretell.plan.sheet import PricedStage, Sheet


class Spans(NamedTuple):
    """First and last task of each forward and backward: way × stage × chunk × micro-batch."""

    first: Ids
    last: Ids
    made: list[list[int]]  # of each stage: tasks of its last backward, whose gradients can go
    order: Order


class _Book:
    """Every different chain once, end to end in columns, so that tasks are gathered by index."""

    def __init__(self, sheet: Sheet, detail: str) -> None:
        self.sheet, self.detail = sheet, detail
        self.number: dict[object, int] = {}
        self.chains: list[list[Piece]] = []

    def of(self, stage: int, chunk: int, way: int, final: bool) -> int:
        """The number of the chain of a stage's chunk; stages alike share theirs."""
        s, one = self.sheet, self.sheet.stages[stage]
        ends = (stage == 0, stage == len(s.stages) - 1, id(one.costs))
        key = (*ends, tuple(one.layers), chunk, way, final)
        if key not in self.number:
            where = (stage, chunk, way)
            alone = one.weight_seconds
            pieces = chain(one.costs, s.workload, one.cluster, where, self.detail, alone)
            if final and overlaps(one.plan):
                sizes = sent_in(one)
                pieces = split(pieces, one.costs, s.workload, (stage, chunk), sizes)
            self.number[key] = len(self.chains)
            self.chains.append(pieces)
        return self.number[key]


def sent_in(one: PricedStage) -> Array:
    """The share of a stage's gradients in each of its messages."""
    return few(messages(one.costs, one.cost, one.times, one.workload).sizes())


def write_stages(sheet: Sheet, detail: str) -> Spans:
    """Every forward and backward of every stage, in the order the schedule says."""
    count = micro_batches(sheet.plan)
    found = order(sheet.stages[0].plan, count)
    ways, chunks = range(3 if found.is_split else 2), found.chunks
    size = (len(ways), len(sheet.stages), chunks, count)
    spans = Spans(np.zeros(size, np.int64), np.zeros(size, np.int64), [], found)
    book = _Book(sheet, detail)
    for stage, (way, chunk, micro) in enumerate(found.turns):
        which = {(c, w): book.of(stage, c, w, False) for c in range(chunks) for w in ways}
        number = np.array([which[c, w] for c, w in zip(chunk.tolist(), way.tolist(), strict=True)])
        number[-1] = book.of(stage, int(chunk[-1]), int(way[-1]), True)
        first, last, made = _write(sheet, book, stage, number, way, micro)
        spans.first[way, stage, chunk, micro] = first
        spans.last[way, stage, chunk, micro] = last
        spans.made.append(made)
    return spans


def _write(
    sheet: Sheet, book: _Book, stage: int, number: Ids, way: Ids, micro: Ids
) -> tuple[Ids, Ids, list[int]]:
    """The tasks of one stage; first and last of each chain, and the compute of the final one."""
    draft, lanes = sheet.draft, sheet.lanes[stage]
    lengths = np.array([len(c) for c in book.chains])
    pieces = [piece for c in book.chains for piece in c]
    starts = np.cumsum(lengths) - lengths
    sizes = lengths[number]
    begin = np.cumsum(sizes) - sizes
    inside = np.arange(sizes.sum()) - np.repeat(begin, sizes)
    at = np.repeat(starts[number], sizes) + inside
    kernel = np.array([p.kind == "kernel" for p in pieces])
    # Exchanges of a split layer stand in the way of the next kernel, of another micro-batch too.
    blocks = kernel | np.array([p.axis == "tp" for p in pieces])
    ids = draft.tasks(
        len(at),
        rank=sheet.stages[stage].rank,
        lane=np.where(blocks, lanes.compute, lanes.collective)[at],
        kind=np.where(kernel, int(Kind.KERNEL), int(Kind.COLLECTIVE))[at],
        op=np.array([draft.text(p.op) for p in pieces])[at],
        layer=np.array([draft.text(p.layer) for p in pieces])[at],
        seconds=np.array([p.seconds for p in pieces])[at],
        flops=np.array([p.flops for p in pieces])[at],
        comm_bytes=np.array([p.comm_bytes for p in pieces])[at],
        phase=np.where(np.repeat(way != FORWARD, sizes), int(Phase.BACKWARD), int(Phase.FORWARD)),
        micro_batch=np.repeat(micro, sizes),
        source=int(Source.FORMULA),
    )
    for back in sorted({b for p in pieces for b in p.after}):
        has = np.array([back in p.after for p in pieces])[at] & (inside >= back)
        draft.wait(ids[has], ids[has] - back)
    lead = np.array([next(i for i, p in enumerate(c) if p.kind == "kernel") for c in book.chains])
    made = ids[begin[-1] :][kernel[at[begin[-1] :]]]
    return ids[begin] + lead[number], ids[begin + sizes - 1], made.tolist()
