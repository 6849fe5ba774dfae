"""Built-in placements: how the stages of a model are laid over devices.

    v      one stage a device, there and back (1F1B's placement)
    loop   several rounds over the devices, always 0 to n-1 (interleaved)
    wave   several rounds, turning at both ends (Hanayo; two rounds make ZB-V's V)
    x      two pipelines in opposite directions (Chimera, DualPipe); a micro-batch is one of each
    m      v after a sharded block on every device (a large embedding)
    nn     v with a second sharded block in the middle (an encoder and a decoder)
    k      two half pipelines that join in a sharded block (two modalities)

A shape is a spec: `m:devices=8,split=yes`. A stage holds 1 unit of memory from the start of its
forward to its last backward block; a sharded block holds none, except where pipelines join in it.
Backward mirrors forward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from foretell.errors import InputError
from foretell.search.schedule.problem import Block, Mode, Problem, Wait
from foretell.spec import Spec, parse


class Stage(NamedTuple):
    """One stage: where it runs, the stages before it, and what it holds for a micro-batch."""

    devices: tuple[int, ...]
    after: tuple[int, ...] = ()
    is_sharded: bool = False
    holds: float = 1.0


@dataclass(frozen=True)
class Shape(Spec):
    """A placement described by a few numbers."""

    devices: int = 4
    infer: bool = False  # forward only
    split: bool = False  # backward of a stage as input and weight gradients, half its time each
    forward: float = 1.0
    backward: float = 3.0  # recompute and twice the forward, as in Tessel's examples
    sharded: float = 1.0  # time of a block on all devices, each way
    lag: float = 0.0  # of a message between stages on different devices
    rounds: int = 2  # over the devices, where a shape makes several

    def stages(self) -> list[Stage]:
        """The stages in the order of forward."""
        raise NotImplementedError

    def problem(self) -> Problem:
        """The placement as a problem."""
        if self.devices < 1 or self.rounds < 1:
            raise InputError(f"`{self}` has no stage", hint="give one device and round or more")
        stages = self.stages()
        blocks = [_forward(self, s, i) for i, s in enumerate(stages)]
        waits = [_wait(self, blocks, i, j) for i, s in enumerate(stages) for j in s.after]
        if not self.infer:
            _mirror(self, stages, blocks, waits)
        mode: Mode = "infer" if self.infer else "train"
        return Problem(tuple(blocks), tuple(waits), self.devices, mode=mode, name=str(self))


@dataclass(frozen=True)
class V(Shape):
    """One stage a device."""

    name: ClassVar[str] = "v"

    def stages(self) -> list[Stage]:
        return _line([(d,) for d in range(self.devices)])


@dataclass(frozen=True)
class Loop(Shape):
    """Several rounds over the devices, each from the first to the last."""

    name: ClassVar[str] = "loop"

    def stages(self) -> list[Stage]:
        return _line([(d,) for _ in range(self.rounds) for d in range(self.devices)])


@dataclass(frozen=True)
class Wave(Shape):
    """Several rounds over the devices, there and back in turn."""

    name: ClassVar[str] = "wave"

    def stages(self) -> list[Stage]:
        there = [(d,) for d in range(self.devices)]
        return _line([d for r in range(self.rounds) for d in (there, there[::-1])[r % 2]])


@dataclass(frozen=True)
class X(Shape):
    """Two pipelines in opposite directions."""

    name: ClassVar[str] = "x"

    def stages(self) -> list[Stage]:
        there = [(d,) for d in range(self.devices)]
        return _line(there) + _line(there[::-1], first=self.devices)


@dataclass(frozen=True)
class M(Shape):
    """A sharded block, then one stage a device."""

    name: ClassVar[str] = "m"

    def stages(self) -> list[Stage]:
        return _line([_all(self), *((d,) for d in range(self.devices))], sharded=(0,))


@dataclass(frozen=True)
class NN(Shape):
    """A sharded block, half of the stages, a sharded block, the other half."""

    name: ClassVar[str] = "nn"

    def stages(self) -> list[Stage]:
        there = [(d,) for d in range(self.devices)]
        half = self.devices // 2
        line = [_all(self), *there[:half], _all(self), *there[half:]]
        return _line(line, sharded=(0, half + 1))


@dataclass(frozen=True)
class K(Shape):
    """Two half pipelines that end in one sharded block."""

    name: ClassVar[str] = "k"

    def stages(self) -> list[Stage]:
        half = self.devices // 2
        first = _line([(d,) for d in range(half)])
        second = _line([(d,) for d in range(half, self.devices)], first=half)
        ends = tuple(n - 1 for n in (half, self.devices) if n)
        return [*first, *second, Stage(_all(self), ends, is_sharded=True)]


SHAPES: dict[str, type[Shape]] = {s.name: s for s in (V, Loop, Wave, X, M, NN, K)}


def shape(spec: str) -> Problem:
    """The problem that a spec such as `m:devices=8` stands for."""
    found = parse(spec, SHAPES, "placement shape")
    assert isinstance(found, Shape)
    return found.problem()


def _all(shape: Shape) -> tuple[int, ...]:
    return tuple(range(shape.devices))


def _line(
    places: Sequence[tuple[int, ...]], first: int = 0, sharded: tuple[int, ...] = ()
) -> list[Stage]:
    """One stage after the other, the first of them numbered `first`."""
    return [
        Stage(p, (first + i - 1,) if i else (), i in sharded, 0.0 if i in sharded else 1.0)
        for i, p in enumerate(places)
    ]


def _forward(shape: Shape, stage: Stage, place: int) -> Block:
    time = shape.sharded if stage.is_sharded else shape.forward
    return Block(place, "F", stage.devices, time, 0.0 if shape.infer else stage.holds)


def _mirror(shape: Shape, stages: list[Stage], blocks: list[Block], waits: list[Wait]) -> None:
    """Add backward: each stage after those that follow it, the last ones after their forward."""
    back: dict[int, int] = {}
    for i in reversed(range(len(stages))):
        follow = [back[j] for j, s in enumerate(stages) if i in s.after]
        back[i] = len(blocks)
        _backward(shape, stages[i], blocks, waits)
        waits += [_wait(shape, blocks, back[i], j) for j in follow or [i]]


def _backward(shape: Shape, stage: Stage, blocks: list[Block], waits: list[Wait]) -> None:
    """Add one stage's backward: one block, or the gradients of its input and of its weights."""
    place = len(blocks)
    time = shape.sharded if stage.is_sharded else shape.backward
    if stage.is_sharded or not shape.split:
        blocks.append(Block(place, "B", stage.devices, time, -stage.holds))
        return
    blocks.append(Block(place, "I", stage.devices, time / 2, 0.0))
    blocks.append(Block(place + 1, "W", stage.devices, time / 2, -stage.holds))
    waits.append(Wait(place + 1, place))


def _wait(shape: Shape, blocks: list[Block], place: int, on: int) -> Wait:
    moved = blocks[place].devices != blocks[on].devices
    return Wait(place, on, shape.lag if moved else 0.0)
