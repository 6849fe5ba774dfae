"""What a changed step holds in memory: the tape of its trace, changed as its history says.

A graph carries the tape of the step that was traced. What-ifs leave it alone while they are made;
`held` then asks each spec of the graph's history what it makes of the tape (`WhatIf.hold`). Several
ranks add buckets, shards and what compression keeps; activations may be released between forward
and backward, or packed: those are whole again while a backward that reads them runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np

from foretell.cost.aten import read
from foretell.cost.kernel import is_call
from foretell.graph.graph import NONE, Array, BufferKind, Graph, Phase
from foretell.memory.tape import (
    FACT,
    Occupancy,
    Op,
    Storage,
    Tape,
    decode,
    occupancy,
    parameter_bytes,
)

_MEASURED = "peak_bytes"  # a fact: the peak of the step as it was, without the profiler


def tape_of(graph: Graph) -> Tape | None:
    """What the step holds after all that was done to it; none where its trace did not tell."""
    text = graph.facts.get(FACT)
    return _changed_tape(text, _applied_whatifs(graph)) if isinstance(text, str) else None


def _applied_whatifs(graph: Graph) -> tuple[str, ...]:
    """The what-ifs among what was done to a graph."""
    from foretell.whatif import WHATIFS

    return tuple(spec for spec in graph.history if spec.partition(":")[0] in WHATIFS)


@lru_cache(8)  # changes made together share what they begin with
def _changed_tape(text: str, made: tuple[str, ...]) -> Tape:
    """A tape as text after what-ifs, the last of them on top of the others."""
    from foretell.whatif import parse

    return parse(made[-1]).hold(_changed_tape(text, made[:-1])) if made else decode(text)


def occupancy_of(graph: Graph) -> Occupancy | None:
    """The memory of a step, op by op."""
    text = graph.facts.get(FACT)
    return _occupied(text, _applied_whatifs(graph)) if isinstance(text, str) else None


@lru_cache(4)
def _occupied(text: str, made: tuple[str, ...]) -> Occupancy:
    return occupancy(_changed_tape(text, made))


def peak_bytes(graph: Graph, real: float | None = None) -> float | None:
    """The most a step holds; none where its trace did not tell the sizes of tensors.

    `real` is the peak that was measured of the step as it was: what it holds besides its own
    tensors (workspaces of libraries, other models) is then held by the changed step too.
    """
    now = occupancy_of(graph)
    if now is None:
        return None
    known = graph.facts.get(_MEASURED) if real is None else real
    if not isinstance(known, (int, float)):
        return now.peak
    return max(now.peak + known - _occupied(graph.facts[FACT], ()).peak, 0.0)


BUCKETS = "gradients are kept in buckets too"  # a note, so that buckets count once


def with_buckets(tape: Tape) -> Tape:
    """All gradients once more, in buckets that stay from step to step."""
    if BUCKETS in tape.notes:
        return tape
    return with_gradients(tape, 1.0).changed(notes=(*tape.notes, BUCKETS))


def with_gradients(tape: Tape, times: float) -> Tape:
    """So many further copies of all gradients, there all the time."""
    return tape.changed(fixed=tape.fixed + times * parameter_bytes(tape))


def sharded_tape(tape: Tape, kinds: Collection[int], ranks: int, gathered: float) -> Tape:
    """Storages of some kinds cut over ranks; `gathered` bytes are whole at a time."""

    def cut(s: Storage) -> Storage:
        return replace(s, count=s.count / ranks) if s.kind in kinds else s

    storages = tuple(cut(s) for s in tape.storages)
    return tape.changed(storages=storages, fixed=tape.fixed + min(gathered, parameter_bytes(tape)))


def without_state(tape: Tape) -> Tape:
    """The optimizer's state kept elsewhere."""
    return sharded_tape(tape, (BufferKind.OPTIMIZER,), 1 << 40, 0.0)


def with_lasting_gradients(tape: Tape) -> Tape:
    """Gradients of earlier passes kept while later ones run."""
    return tape.changed(is_zeroed_first=False)


def released(tape: Tape, share: Mapping[int, float], *, whole: bool = True) -> Tape:
    """The tape with that share of some storages kept; `whole`: all of each comes back for use."""
    storages, packed, wanted = list(tape.storages), dict[int, int](), dict[int, set[int]]()
    ops = []
    for op in tape.ops:
        lost = [k for k in op.keeps if k in share]
        if lost:
            wanted.setdefault(op.node, set()).update(lost)
            op = _compressed(op, lost, share, storages, packed)
        elif whole and op.phase == Phase.BACKWARD and op.node in wanted:
            back = sum(tape.storages[k].bytes for k in wanted[op.node])
            op = replace(op, workspace=op.workspace + back)
        ops.append(op)
    return tape.changed(storages=tuple(storages), ops=tuple(ops))


def _compressed(
    op: Op,
    lost: list[int],
    share: Mapping[int, float],
    storages: list[Storage],
    packed: dict[int, int],
) -> Op:
    """An op that keeps packed storages instead of those that are lost."""
    keeps, makes = [k for k in op.keeps if k not in share], list(op.makes)
    for k in lost:
        if not share[k]:
            continue
        if k not in packed:
            packed[k] = len(storages)
            makes.append(packed[k])
            storages.append(replace(storages[k], count=storages[k].count * share[k]))
        keeps.append(packed[k])
    return replace(op, keeps=tuple(keeps), makes=tuple(makes))


def is_activation(tape: Tape, storage: int) -> bool:
    """Whether a storage is one that a forward pass makes."""
    return tape.storages[storage].kind == BufferKind.ACTIVATION


_MADE = (BufferKind.ACTIVATION, BufferKind.WORKSPACE)


def lists_memory(graph: Graph) -> bool:
    """Whether memory is given by the graph's buffers, not by the tape of a trace."""
    return FACT not in graph.facts and len(graph.buffers.bytes) > 0


def narrowed(graph: Graph, kernels: Array, cast: Iterable[tuple[int, float]]) -> Graph:
    """The graph with what it lists as held, where these kernels write half precision.

    `cast`: kernels and the numbers of what is cast to half before them. A copy that a product keeps
    for its backward is held in place of what it was made from. A graph of a trace has a tape.
    """
    if not lists_memory(graph):
        return graph
    b = graph.buffers
    own = np.isin(b.kind, _MADE) & (b.born != NONE)
    half = own & np.isin(b.born, kernels) & ~_is_mask(graph, own)
    late = np.isin(graph.phase[np.maximum(b.dies, 0)], (Phase.BACKWARD,)) & (b.dies != NONE)
    for task, count in cast:
        like = np.flatnonzero(own & late & ~half & (b.bytes == 4 * count) & (b.born < task))
        half[like[-1:]] = True
    return replace(graph, buffers=b.replace(bytes=np.where(half, b.bytes / 2, b.bytes)))


def _is_mask(graph: Graph, rows: Array) -> Array:
    """Buffers of one byte for each number that the operator behind them reads."""
    b, found = graph.buffers, np.zeros(len(graph.buffers.bytes), bool)
    shapes = graph.texts("shape")
    for i in np.flatnonzero(rows).tolist():
        text = shapes[int(b.born[i])]
        if is_call(text):
            call = read("", text)
            found[i] = b.bytes[i] in {float(call.size(k)) for k in call.tensors()}
    return found
