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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from foretell.errors import InputError, unknown

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
        self.order  # noqa: B018 (made here so that a cycle is found when the problem is made)

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
        blocks = [_kept(b) for b in self.blocks]
        waits = sorted((w.block, w.on, w.lag) for w in self.waits)
        choices = [[(place[b.id], *_kept(b)) for b in c.blocks] for c in self.choices]
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


def _kept(block: Block) -> tuple[object, ...]:
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


def linked(problem: Problem, price: Price, *, overlap: Overlap | bool = "beside") -> Problem:
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
        seconds = _seconds(problem, wait, price)
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


def occupying(problem: Problem, overlap: Overlap) -> Problem:
    """The problem with its lags as messages that hold a link, or both of their ends."""
    took = {(w.on, w.block): w.lag for w in problem.waits}
    place = {b.id: i for i, b in enumerate(problem.blocks)}
    bare = replace(problem, waits=tuple(_bare(problem, w) for w in problem.waits))
    return linked(bare, lambda a, b: took[place[a.id], place[b.id]], overlap=overlap)


def _bare(problem: Problem, wait: Wait) -> Wait:
    """A wait without its message; a delay on the same devices is none."""
    ends = (set(problem.blocks[i].devices) for i in (wait.block, wait.on))
    return wait if set.issubset(*ends) else replace(wait, lag=0.0)


def _lagged(problem: Problem, wait: Wait, price: Price) -> Wait:
    return replace(wait, lag=wait.lag + _seconds(problem, wait, price))


def _seconds(problem: Problem, wait: Wait, price: Price) -> float:
    first, then = problem.blocks[wait.on], problem.blocks[wait.block]
    return 0.0 if set(then.devices) <= set(first.devices) else price(first, then)
