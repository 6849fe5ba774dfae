"""What several ranks make of the memory of one: buckets, shards, and what compression keeps."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from foretell.graph.columns import BufferKind
from foretell.memory.edit import parameter_bytes
from foretell.memory.tape import Storage, Tape

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


def still_there(tape: Tape) -> Tape:
    """Gradients of earlier passes kept while later ones run."""
    return tape.changed(is_zeroed_first=False)
