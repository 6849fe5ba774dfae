"""Making one tape from another: a list of storages that grows, and ops written anew."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from foretell.graph.columns import NONE, BufferKind, Phase
from foretell.memory.tape import Op, Tape

FORWARD = (Phase.FORWARD, Phase.LOSS)
# Flop from which on cuDNN 9.19 makes spectra of a forward convolution (H200): it does at 30 Gflop,
# and at half the batch, from 19 Gflop down, it does not (ResNet-18 and a detector).
SPECTRAL = 24e9


class Rewrite:
    """A tape on its way to another."""

    def __init__(self, tape: Tape) -> None:
        self.before = tape
        self.storages = list(tape.storages)
        self.ops: list[Op] = []

    def new(self, like: int, **parts: object) -> int:
        """A further storage, like another but for some parts."""
        self.storages.append(replace(self.storages[like], **parts))  # type: ignore[arg-type]
        return len(self.storages) - 1

    def tape(self) -> Tape:
        return self.before.changed(storages=tuple(self.storages), ops=tuple(self.ops))


def swapped(numbers: Iterable[int], new: dict[int, int]) -> tuple[int, ...]:
    """Storages with some in the place of others, each once."""
    return tuple(dict.fromkeys(new.get(k, k) for k in numbers))


def resized(tape: Tape, times: float) -> Tape:
    """All that follows the batch, so many times as large."""
    storages = tuple(replace(s, count=s.count * times) if s.grows else s for s in tape.storages)
    return tape.changed(storages=storages, ops=tuple(_resized(o, times) for o in tape.ops))


def _resized(op: Op, times: float) -> Op:
    """Of a workspace the part that is the filter's stays; small convolutions use no spectra."""
    if not op.where:
        return op
    x, y, w, fixed, *work = sides(op)
    work = [flop * times for flop in work]
    size = (op.workspace - fixed) * times + fixed if op.workspace else 0.0
    if work and times < 1 and work[0] < SPECTRAL:
        size = 0.0
    numbers = (x * times, y * times, w, fixed, *work)
    return replace(op, workspace=size, where=":".join(f"{n:.0f}" for n in numbers))


def sides(op: Op) -> list[float]:
    """Numbers in input, output and filter of a convolution, bytes that are the filter's, flop."""
    return [float(n) for n in op.where.split(":")]


def with_workspace(tape: Tape, size: Callable[[Op, list[float]], float]) -> Tape:
    """Convolutions with workspaces of another size, from numbers in input, output and filter."""

    def changed(op: Op) -> Op:
        return replace(op, workspace=size(op, sides(op)[:3])) if op.where else op

    return tape.changed(ops=tuple(map(changed, tape.ops)))


def without_update(tape: Tape, temporaries: float = 0.0) -> Tape:
    """The optimizer's loop taken out, and in its place one op that needs so many bytes."""
    ops = [o for o in tape.ops if o.phase != Phase.UPDATE]
    ops.append(Op("update", int(Phase.UPDATE), NONE, workspace=temporaries))
    return tape.changed(ops=tuple(ops))


def parameter_bytes(tape: Tape) -> float:
    """Bytes of all parameters."""
    return sum(s.bytes for s in tape.storages if s.kind == BufferKind.PARAMETER)


def states(tape: Tape) -> int:
    """Numbers that the optimizer keeps for each of a parameter."""
    kinds = [s.kind for s in tape.storages]
    parameters = sum(k == BufferKind.GRADIENT for k in kinds)
    return round(sum(k == BufferKind.OPTIMIZER for k in kinds) / max(parameters, 1))
