"""What is to be scheduled: the blocks of one micro-batch, what they wait for, what devices hold.

Every micro-batch runs the same blocks. A block occupies all its devices for its time; it starts
when what it waits for has ended (and, over a link, arrived: `lag`). Memory changes on every device
of a block when it starts and when it ends; a device runs one block at a time, so what it holds
follows from the order of its blocks alone. A `Problem` is checked when made and never changes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from foretell.errors import InputError, unknown
from foretell.io import read_json
from foretell.spec import Spec, parse

KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "gradient of the input",
    "W": "gradient of the weights",
    "C": "communication that holds its devices",
}
UNLIMITED = math.inf
Mode = Literal["train", "infer"]


@dataclass(frozen=True)
class Block:
    """One piece of a micro-batch's work."""

    id: int
    kind: str
    devices: tuple[int, ...]  # all of them, for the whole time
    time: float  # seconds on a device of speed 1
    memory: float = 0.0  # change when it starts, on each of its devices
    memory_end: float = 0.0  # change when it ends
    name: str = ""

    @property
    def change(self) -> float:
        """What the block leaves behind, on each of its devices."""
        return self.memory + self.memory_end

    @property
    def rise(self) -> float:
        """The most a block adds to what its device held before it."""
        return max(self.memory, self.change)


@dataclass(frozen=True)
class Wait:
    """`block` starts at least `lag` after `on` ends; both are places in `Problem.blocks`."""

    block: int
    on: int
    lag: float = 0.0  # a transfer that occupies no device: a link beside the compute


@dataclass(frozen=True)
class Choice:
    """Blocks done differently (recompute, offload): these stand in for those of their id."""

    name: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Problem:
    """Blocks of one micro-batch, their waits and the devices they share."""

    blocks: tuple[Block, ...]
    waits: tuple[Wait, ...] = ()
    num_devices: int = 0  # 0: as many as the blocks name
    capacity: tuple[float, ...] = ()  # memory of each device; empty: unlimited
    speed: tuple[float, ...] = ()  # of each device; empty: all 1
    mode: Mode = "train"
    name: str = ""
    choices: tuple[Choice, ...] = ()

    def __post_init__(self) -> None:
        named = 1 + max((d for b in self.blocks for d in b.devices), default=0)
        num = self.num_devices or named
        object.__setattr__(self, "num_devices", num)
        object.__setattr__(self, "capacity", self.capacity or (UNLIMITED,) * num)
        object.__setattr__(self, "speed", self.speed or (1.0,) * num)
        _check_blocks(self.blocks, num)
        _check_devices(self.capacity, "capacity", num)
        _check_devices(self.speed, "speed", num)
        _check_waits(self.waits, self.blocks)
        _check_choices(self.choices, self.blocks)
        self.order  # noqa: B018

    @cached_property
    def after(self) -> tuple[tuple[Wait, ...], ...]:
        """The waits of each block."""
        found: list[list[Wait]] = [[] for _ in self.blocks]
        for wait in self.waits:
            found[wait.block].append(wait)
        return tuple(map(tuple, found))

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The blocks, each after all it waits for; ties go to the lower place."""
        left = [len(waits) for waits in self.after]
        ready = [i for i, n in enumerate(left) if not n]
        done: list[int] = []
        while ready:
            done.append(i := ready.pop(0))
            for wait in self.waits:
                if wait.on == i:
                    left[wait.block] -= 1
                    if not left[wait.block]:
                        ready.append(wait.block)
        if len(done) < len(self.blocks):
            stuck = [self.blocks[i].id for i, n in enumerate(left) if n]
            raise InputError(
                f"blocks {', '.join(map(str, stuck[:8]))} wait on each other in a cycle",
                hint="remove one of the dependencies among them",
            )
        return tuple(done)

    @cached_property
    def seconds(self) -> tuple[float, ...]:
        """The time of each block on its devices: the slowest of them sets it."""
        return tuple(b.time / min(self.speed[d] for d in b.devices) for b in self.blocks)

    @cached_property
    def work(self) -> tuple[float, ...]:
        """How long each device is busy with one micro-batch."""
        pairs = list(zip(self.blocks, self.seconds, strict=True))
        return tuple(sum(t for b, t in pairs if d in b.devices) for d in range(self.num_devices))

    @cached_property
    def fingerprint(self) -> str:
        """The same for two problems exactly when they differ in nothing but names."""
        place = {b.id: i for i, b in enumerate(self.blocks)}
        blocks = [_schedule_fields(b) for b in self.blocks]
        waits = sorted((w.block, w.on, w.lag) for w in self.waits)
        choices = [[(place[b.id], *_schedule_fields(b)) for b in c.blocks] for c in self.choices]
        limits = [self.num_devices, list(map(str, self.capacity)), self.speed, self.mode]
        text = json.dumps([blocks, waits, choices, limits], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def limited(self, memory: float | Sequence[float] | None) -> Problem:
        """The same problem on devices that hold this much: one number for all, or one each."""
        if memory is None:
            return self
        each = tuple(memory) if isinstance(memory, Sequence) else (memory,) * self.num_devices
        return replace(self, capacity=tuple(map(float, each)))

    def choosing(self, names: Iterable[str]) -> Problem:
        """The problem once these choices are taken and the others left."""
        known = {c.name: c for c in self.choices}
        swapped = {b.id: b for b in self.blocks}
        for name in names:
            if name not in known:
                raise unknown("choice", name, known)
            swapped.update((b.id, b) for b in known[name].blocks)
        return replace(self, blocks=tuple(swapped[b.id] for b in self.blocks), choices=())


def _schedule_fields(block: Block) -> tuple[object, ...]:
    """All of a block that a schedule depends on."""
    return (block.kind, block.devices, block.time, block.memory, block.memory_end)


def _check_blocks(blocks: Sequence[Block], num_devices: int) -> None:
    if not blocks:
        raise InputError("a placement without blocks", hint="give at least one block")
    seen: set[int] = set()
    for block in blocks:
        if block.id in seen:
            raise InputError(f"block {block.id} is given twice", hint="give each block its own id")
        seen.add(block.id)
        _check_block(block, num_devices)


def _check_block(block: Block, num_devices: int) -> None:
    where = f"block {block.id}"
    if block.kind not in KINDS:
        raise unknown(f"kind of {where}", block.kind, KINDS)
    if not block.devices:
        raise InputError(f"{where} is on no device", hint="name at least one device for it")
    if len(set(block.devices)) < len(block.devices):
        raise InputError(f"{where} names a device twice: {list(block.devices)}")
    for device in block.devices:
        if not 0 <= device < num_devices:
            raise InputError(
                f"{where} is on device {device}, there are {num_devices}",
                hint=f"devices are numbered 0 to {num_devices - 1}",
            )
    if not (math.isfinite(block.time) and block.time >= 0):
        raise InputError(f"{where} takes {block.time}", hint="times are zero or more, and finite")
    if not (math.isfinite(block.memory) and math.isfinite(block.memory_end)):
        raise InputError(f"{where} changes memory by {block.memory}, {block.memory_end}")


def _check_devices(values: Sequence[float], what: str, num_devices: int) -> None:
    if len(values) != num_devices:
        raise InputError(f"{len(values)} values of {what} for {num_devices} devices")
    for device, value in enumerate(values):
        if not value > 0 and not (what == "capacity" and value == 0):
            raise InputError(f"{what} of device {device} is {value}, not more than zero")


def _check_waits(waits: Sequence[Wait], blocks: Sequence[Block]) -> None:
    for wait in waits:
        for end in (wait.block, wait.on):
            if not 0 <= end < len(blocks):
                raise InputError(f"a dependency names block {end} of {len(blocks)}")
        if not (math.isfinite(wait.lag) and wait.lag >= 0):
            raise InputError(
                f"block {blocks[wait.block].id} starts {wait.lag} after {blocks[wait.on].id}",
                hint="a lag is zero or more, and finite",
            )


def _check_choices(choices: Sequence[Choice], blocks: Sequence[Block]) -> None:
    known = {b.id for b in blocks}
    for choice in choices:
        for block in choice.blocks:
            if block.id not in known:
                raise InputError(f"choice `{choice.name}` changes block {block.id}, there is none")


# Communication between blocks: a price for every message, and what it occupies meanwhile.
#
# A message goes from a block to one that waits for it on other devices.
#
#     beside   it runs beside the compute on a link nothing else uses: a lag
#   link     it runs beside the compute; messages from one device to another take turns: a block of
#              its own on a device that stands for the link
#     stop     both ends stand still: a block of its own that holds them
#
# Nothing here knows clusters: the price is a function of the two blocks.


Price = Callable[[Block, Block], float]  # seconds of the message from one block to another
Overlap = Literal["beside", "link", "stop"]
OVERLAPS = ("beside", "link", "stop")


def price_messages(
    problem: Problem, price: Price, *, overlap: Overlap | bool = "beside"
) -> Problem:
    """The problem with its messages priced; `overlap` may be said as yes (beside) or no (stop)."""
    if isinstance(overlap, bool):
        overlap = "beside" if overlap else "stop"
    if overlap not in OVERLAPS:
        raise unknown("way to overlap messages", overlap, OVERLAPS)
    if overlap == "beside":
        return replace(problem, waits=tuple(_lagged(problem, w, price) for w in problem.waits))
    blocks, waits = list(problem.blocks), []
    number = max(b.id for b in blocks) + 1
    links: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    for wait in problem.waits:
        seconds = _message_seconds(problem, wait, price)
        if not seconds:
            waits.append(wait)
            continue
        place = len(blocks)
        ends = problem.blocks[wait.on].devices, problem.blocks[wait.block].devices
        held = tuple(sorted({*ends[0], *ends[1]}))
        if overlap == "link":
            held = (links.setdefault(ends, problem.num_devices + len(links)),)
        blocks.append(Block(number + place, "C", held, seconds))
        waits += [Wait(place, wait.on), Wait(wait.block, place, wait.lag)]
    more = len(links)
    return replace(
        problem,
        blocks=tuple(blocks),
        waits=tuple(waits),
        num_devices=problem.num_devices + more,
        capacity=(*problem.capacity, *(UNLIMITED,) * more),
        speed=(*problem.speed, *(1.0,) * more),
    )


def lags_as_messages(problem: Problem, overlap: Overlap) -> Problem:
    """The problem with its lags as messages that hold a link, or both of their ends."""
    took = {(w.on, w.block): w.lag for w in problem.waits}
    place = {b.id: i for i, b in enumerate(problem.blocks)}
    bare = replace(problem, waits=tuple(_bare(problem, w) for w in problem.waits))
    return price_messages(bare, lambda a, b: took[place[a.id], place[b.id]], overlap=overlap)


def _bare(problem: Problem, wait: Wait) -> Wait:
    """A wait without its message; a delay on the same devices is none."""
    ends = (set(problem.blocks[i].devices) for i in (wait.block, wait.on))
    return wait if set.issubset(*ends) else replace(wait, lag=0.0)


def _lagged(problem: Problem, wait: Wait, price: Price) -> Wait:
    return replace(wait, lag=wait.lag + _message_seconds(problem, wait, price))


def _message_seconds(problem: Problem, wait: Wait, price: Price) -> float:
    first, then = problem.blocks[wait.on], problem.blocks[wait.block]
    return 0.0 if set(then.devices) <= set(first.devices) else price(first, then)


# Placements of a pipeline's stages: files that hold one, and built-in shapes.


# Placement files: a JSON object with the blocks of one micro-batch, read into a `Problem` and
# back.
#
#     {"name": …, "ndevs": 4, "mode": "train",
#      "blocks": [{"id": 0, "kind": "F", "devices": [0], "time": 1, "mem": 1}, …],
#      "deps": [[0, 1], [1, 2, 0.5], …]}
#
# A dependency is [first, then] or [first, then, lag]. `mem` changes memory when the block starts,
# `mem_end` when it ends. Optional beside `blocks`: `memory` and `speed` (a number, or one for each
# device, null where there is no limit) and `choices` ({name: [blocks that would stand in]}). Other
# keys are left alone.


MOST_DEVICES, MOST_BLOCKS = 1 << 14, 100_000
MOST_SHAPE = 1024  # devices of a shape: the search counts blocks one by one
_MOST = 1e15  # of a time or an amount of memory


def load(path: str | Path) -> Problem:
    """The problem in a placement file."""
    return read(read_json(path, what="placement"), where=f"placement `{path}`")


def read(found: Any, where: str = "placement") -> Problem:
    """The problem in a placement that was already parsed."""
    if not isinstance(found, Mapping) or not isinstance(found.get("blocks"), list):
        raise InputError(f"{where} has no list of `blocks`", hint="see the format in the docs")
    blocks = tuple(_block(b, where) for b in found["blocks"])
    num = _number(found.get("ndevs", 0), f"`ndevs` of {where}", whole=True)
    num_devices = int(num) or 1 + max((d for b in blocks for d in b.devices), default=0)
    if num_devices > MOST_DEVICES or len(blocks) > MOST_BLOCKS:
        raise InputError(
            f"{where} has {num_devices} devices and {len(blocks)} blocks",
            hint=f"{MOST_DEVICES} devices and {MOST_BLOCKS} blocks at most",
        )
    mode = found.get("mode", "train")
    if mode not in ("train", "infer"):
        raise InputError(f"mode of {where} is `{mode}`", hint="write `train` or `infer`")
    bare = Problem(
        blocks,
        (),
        num_devices,
        _per_device(found.get("memory"), num_devices, f"`memory` of {where}"),
        _per_device(found.get("speed"), num_devices, f"`speed` of {where}"),
        mode,
        str(found.get("name", "")),
        _choices(found.get("choices", {}), where),
    )
    return replace(bare, waits=_waits(found.get("deps", []), blocks, where))


def write(problem: Problem) -> dict[str, Any]:
    """The placement file of a problem; `read` gives an equal problem back."""
    ids = [b.id for b in problem.blocks]
    deps = [[ids[w.on], ids[w.block], *([w.lag] if w.lag else [])] for w in problem.waits]
    found: dict[str, Any] = {"name": problem.name, "ndevs": problem.num_devices}
    found |= {
        "mode": problem.mode,
        "blocks": [_block_json(b) for b in problem.blocks],
        "deps": deps,
    }
    if any(c != float("inf") for c in problem.capacity):
        found["memory"] = [None if c == float("inf") else c for c in problem.capacity]
    if any(s != 1 for s in problem.speed):
        found["speed"] = list(problem.speed)
    if problem.choices:
        found["choices"] = {c.name: [_block_json(b) for b in c.blocks] for c in problem.choices}
    return found


def _block(found: Any, where: str) -> Block:
    if not isinstance(found, Mapping) or "id" not in found:
        raise InputError(f"a block of {where} has no `id`: {str(found)[:60]}")
    here = f"block {found['id']} of {where}"
    devices = found.get("devices", [])
    if not isinstance(devices, list):
        raise InputError(f"`devices` of {here} is `{devices}`, not a list")
    if "time" not in found:
        raise InputError(f"{here} has no `time`")
    return Block(
        int(_number(found["id"], f"`id` of {here}", whole=True)),
        str(found.get("kind", "F")),
        tuple(int(_number(d, f"a device of {here}", whole=True)) for d in devices),
        _number(found["time"], f"`time` of {here}"),
        _number(found.get("mem", 0), f"`mem` of {here}"),
        _number(found.get("mem_end", 0), f"`mem_end` of {here}"),
        str(found.get("name", "")),
    )


def _block_json(block: Block) -> dict[str, Any]:
    found: dict[str, Any] = {"id": block.id, "kind": block.kind, "devices": list(block.devices)}
    found |= {"time": block.time, "mem": block.memory}
    if block.memory_end:
        found["mem_end"] = block.memory_end
    if block.name:
        found["name"] = block.name
    return found


def _waits(deps: Any, blocks: tuple[Block, ...], where: str) -> tuple[Wait, ...]:
    place = {b.id: i for i, b in enumerate(blocks)}
    if not isinstance(deps, list):
        raise InputError(f"`deps` of {where} is not a list")
    waits = []
    for dep in deps:
        if not isinstance(dep, list) or len(dep) not in (2, 3):
            raise InputError(f"dependency `{dep}` of {where} is not [first, then] or with a lag")
        for end in dep[:2]:
            if not isinstance(end, int) or end not in place:
                raise InputError(
                    f"a dependency of {where} names block {end}, there is none",
                    hint=f"blocks are {', '.join(map(str, list(place)[:12]))} …",
                )
        lag = _number(dep[2], f"lag of {dep} in {where}") if len(dep) == 3 else 0.0
        waits.append(Wait(place[dep[1]], place[dep[0]], lag))
    return tuple(waits)


def _per_device(found: Any, num_devices: int, where: str) -> tuple[float, ...]:
    if found is None:
        return ()
    if isinstance(found, list):
        return tuple(_unlimited(x, where) for x in found)
    return (_unlimited(found, where),) * num_devices


def _unlimited(value: Any, where: str) -> float:
    """A number, or no limit where there is none."""
    return float("inf") if value in (None, float("inf")) else _number(value, where)


def _choices(found: Any, where: str) -> tuple[Choice, ...]:
    if not isinstance(found, Mapping):
        raise InputError(f"`choices` of {where} is not an object")
    if not all(isinstance(blocks, list) for blocks in found.values()):
        raise InputError(f"a choice of {where} is not a list of blocks")
    return tuple(Choice(str(n), tuple(_block(b, where) for b in bs)) for n, bs in found.items())


def _number(value: Any, where: str, whole: bool = False) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= _MOST or (whole and value % 1):
        noun = f"{'whole ' if whole else ''}number"
        raise InputError(f"{where} is `{str(value)[:40]}`, not a {noun} up to {_MOST:g}")
    return float(value)


# Built-in placements: how the stages of a model are laid over devices.
#
#     v      one stage a device, there and back (1F1B's placement)
#     loop   several rounds over the devices, always 0 to n-1 (interleaved)
#     wave   several rounds, turning at both ends (Hanayo; two rounds make ZB-V's V)
#     x      two pipelines in opposite directions (Chimera, DualPipe); a micro-batch is one of each
#     m      v after a sharded block on every device (a large embedding)
#     nn     v with a second sharded block in the middle (an encoder and a decoder)
#     k      two half pipelines that join in a sharded block (two modalities)
#
# A shape is a spec: `m:devices=8,split=yes`. A stage holds 1 unit of memory from the start of its
# forward to its last backward block; a sharded block holds none, except where pipelines join in it.
# Backward mirrors forward.


class ShapeStage(NamedTuple):
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

    def stages(self) -> list[ShapeStage]:
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
            _add_backward(self, stages, blocks, waits)
        mode: Mode = "infer" if self.infer else "train"
        return Problem(tuple(blocks), tuple(waits), self.devices, mode=mode, name=str(self))


@dataclass(frozen=True)
class V(Shape):
    """One stage a device."""

    name: ClassVar[str] = "v"

    def stages(self) -> list[ShapeStage]:
        return _stages_in_line([(d,) for d in range(self.devices)])


@dataclass(frozen=True)
class Loop(Shape):
    """Several rounds over the devices, each from the first to the last."""

    name: ClassVar[str] = "loop"

    def stages(self) -> list[ShapeStage]:
        return _stages_in_line([(d,) for _ in range(self.rounds) for d in range(self.devices)])


@dataclass(frozen=True)
class Wave(Shape):
    """Several rounds over the devices, there and back in turn."""

    name: ClassVar[str] = "wave"

    def stages(self) -> list[ShapeStage]:
        there = [(d,) for d in range(self.devices)]
        return _stages_in_line([d for r in range(self.rounds) for d in (there, there[::-1])[r % 2]])


@dataclass(frozen=True)
class X(Shape):
    """Two pipelines in opposite directions."""

    name: ClassVar[str] = "x"

    def stages(self) -> list[ShapeStage]:
        there = [(d,) for d in range(self.devices)]
        return _stages_in_line(there) + _stages_in_line(there[::-1], first=self.devices)


@dataclass(frozen=True)
class M(Shape):
    """A sharded block, then one stage a device."""

    name: ClassVar[str] = "m"

    def stages(self) -> list[ShapeStage]:
        return _stages_in_line(
            [_all_devices(self), *((d,) for d in range(self.devices))], sharded=(0,)
        )


@dataclass(frozen=True)
class NN(Shape):
    """A sharded block, half of the stages, a sharded block, the other half."""

    name: ClassVar[str] = "nn"

    def stages(self) -> list[ShapeStage]:
        there = [(d,) for d in range(self.devices)]
        half = self.devices // 2
        line = [_all_devices(self), *there[:half], _all_devices(self), *there[half:]]
        return _stages_in_line(line, sharded=(0, half + 1))


@dataclass(frozen=True)
class K(Shape):
    """Two half pipelines that end in one sharded block."""

    name: ClassVar[str] = "k"

    def stages(self) -> list[ShapeStage]:
        half = self.devices // 2
        first = _stages_in_line([(d,) for d in range(half)])
        second = _stages_in_line([(d,) for d in range(half, self.devices)], first=half)
        ends = tuple(n - 1 for n in (half, self.devices) if n)
        return [*first, *second, ShapeStage(_all_devices(self), ends, is_sharded=True)]


SHAPES: dict[str, type[Shape]] = {s.name: s for s in (V, Loop, Wave, X, M, NN, K)}


def shape(spec: str) -> Problem:
    """The problem that a spec such as `m:devices=8` stands for."""
    found = parse(spec, SHAPES, "placement shape")
    assert isinstance(found, Shape)
    if found.devices > MOST_SHAPE:
        raise InputError(f"`{spec[:80]}` has {found.devices} devices", hint=f"{MOST_SHAPE} at most")
    return found.problem()


def _all_devices(shape: Shape) -> tuple[int, ...]:
    return tuple(range(shape.devices))


def _stages_in_line(
    places: Sequence[tuple[int, ...]], first: int = 0, sharded: tuple[int, ...] = ()
) -> list[ShapeStage]:
    """One stage after the other, the first of them numbered `first`."""
    return [
        ShapeStage(p, (first + i - 1,) if i else (), i in sharded, 0.0 if i in sharded else 1.0)
        for i, p in enumerate(places)
    ]


def _forward(shape: Shape, stage: ShapeStage, place: int) -> Block:
    time = shape.sharded if stage.is_sharded else shape.forward
    return Block(place, "F", stage.devices, time, 0.0 if shape.infer else stage.holds)


def _add_backward(
    shape: Shape, stages: list[ShapeStage], blocks: list[Block], waits: list[Wait]
) -> None:
    """Add backward: each stage after those that follow it, the last ones after their forward."""
    back: dict[int, int] = {}
    for i in reversed(range(len(stages))):
        follow = [back[j] for j, s in enumerate(stages) if i in s.after]
        back[i] = len(blocks)
        _add_stage_backward(shape, stages[i], blocks, waits)
        waits += [_wait(shape, blocks, back[i], j) for j in follow or [i]]


def _add_stage_backward(
    shape: Shape, stage: ShapeStage, blocks: list[Block], waits: list[Wait]
) -> None:
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
