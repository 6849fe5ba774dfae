"""Activations that are not kept from the forward to the backward pass, or only a part of them.

What is packed or has been away is whole again while a backward that wants it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from foretell.graph.columns import BufferKind, Phase
from foretell.memory.tape import Op, Storage, Tape


def released(tape: Tape, share: Mapping[int, float], *, whole: bool = True) -> Tape:
    """The tape with that share of some storages kept; `whole`: all of each comes back for use."""
    storages, packed, wanted = list(tape.storages), dict[int, int](), dict[int, set[int]]()
    ops = []
    for op in tape.ops:
        lost = [k for k in op.keeps if k in share]
        if lost:
            wanted.setdefault(op.node, set()).update(lost)
            op = _less(op, lost, share, storages, packed)
        elif whole and op.phase == Phase.BACKWARD and op.node in wanted:
            back = sum(tape.storages[k].bytes for k in wanted[op.node])
            op = replace(op, workspace=op.workspace + back)
        ops.append(op)
    return tape.changed(storages=tuple(storages), ops=tuple(ops))


def _less(
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
