"""Device memory of one step in issue order: storages, and the ops on them.

PyTorch's allocator takes and gives back memory when the *host* runs an operator, whatever the
device is doing by then, so what is held follows from the order of the operators alone:

    a storage is there from the op that makes it to the last op that reads it;
    what an op keeps for its backward is there until that backward has run.

A `Tape` is that list; `occupancy` finds its peak, a `Rewrite` makes one tape from another.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from foretell.errors import InputError
from foretell.graph.graph import NONE, Array, BufferKind, Phase, word_of
from foretell.io import decode as decode_json
from foretell.io import limits
from foretell.operators import BYTES, FORMATS

FACT = "tape"  # under which a graph carries it
WIDENED = "float"  # an op that asks for fp32 and gets what it gives: a copy where that is narrow
BY_BLOCK = (
    "attention is given a scale, as libraries that checkpoint block by block give it"  # a note
)
BLOCK = 512  # bytes: what the caching allocator rounds to (c10/cuda/CUDACachingAllocator.cpp)
LASTING = (BufferKind.PARAMETER, BufferKind.OPTIMIZER, BufferKind.INPUT)  # there all the time


@dataclass(frozen=True, slots=True)
class Storage:
    """One piece of memory, whatever views there are of it."""

    count: float  # numbers
    item: int = 4  # bytes of one
    kind: int = BufferKind.ACTIVATION
    is_float: bool = True
    grows: bool = False  # in step with the batch

    @property
    def bytes(self) -> float:
        """Bytes that the allocator counts for it."""
        return -(-self.count * self.item // BLOCK) * BLOCK


@dataclass(frozen=True, slots=True)
class Op:
    """One operator as the allocator sees it; numbers are those of storages."""

    name: str
    phase: int = Phase.FORWARD
    node: int = NONE  # the autograd node it belongs to: made in forward, run in backward
    reads: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()
    keeps: tuple[int, ...] = ()  # until the backward of its node has run
    workspace: float = 0.0  # bytes, while it runs
    ends: bool = False  # the last of the backward of its node: what was kept goes
    where: str = ""  # of a convolution: what decides about workspaces


@dataclass(frozen=True)
class Tape:
    """The ops of one step in the order the host runs them."""

    storages: tuple[Storage, ...] = ()
    ops: tuple[Op, ...] = ()
    fixed: float = 0.0  # bytes that libraries hold all the time: cuBLAS workspaces
    is_zeroed_first: bool = True  # gradients are given back before the forward pass
    notes: tuple[str, ...] = field(default=())

    def __repr__(self) -> str:
        return f"<Tape: ops {len(self.ops)}, storages {len(self.storages)}>"

    def changed(self, **parts: Any) -> Tape:
        """The same tape with some parts instead of its own."""
        return replace(self, **parts)


def encode(tape: Tape) -> str:
    """A tape as text, small enough to travel with a graph."""
    names: dict[str, int] = {}
    whole = {
        "storages": [[s.count, s.item, int(s.kind), int(s.is_float), int(s.grows)]
                     for s in tape.storages],
        "ops": [_row(o, names) for o in tape.ops],
        "names": list(names),
        "fixed": tape.fixed,
        "first": tape.is_zeroed_first,
        "notes": list(tape.notes),
    }  # fmt: skip
    return base64.b85encode(zlib.compress(json.dumps(whole).encode(), 6)).decode()


def _row(o: Op, names: dict[str, int]) -> list[Any]:
    name = names.setdefault(o.name, len(names))
    where = names.setdefault(o.where, len(names))
    return [name, int(o.phase), o.node, o.reads, o.makes, o.keeps, o.workspace, int(o.ends), where]


@lru_cache(16)
def decode(text: str) -> Tape:
    """The tape that a text stands for."""
    try:
        unpack = zlib.decompressobj()
        whole = decode_json(
            unpack.decompress(base64.b85decode(text), limits().document), Any, "the graph's tape"
        )
        names = whole["names"]
        return Tape(
            tuple(Storage(c, i, k, bool(f), bool(g)) for c, i, k, f, g in whole["storages"]),
            tuple(
                Op(names[n], p, d, tuple(r), tuple(m), tuple(k), w, bool(e), names[v])
                for n, p, d, r, m, k, w, e, v in whole["ops"]
            ),
            whole["fixed"], whole["first"], tuple(whole["notes"]),
        )  # fmt: skip
    except (ValueError, KeyError, IndexError, TypeError, zlib.error) as error:
        raise InputError(f"the graph's tape cannot be read: {error}") from None


Dims = tuple[int, ...]
Key = tuple[Dims, str]  # sizes and number format

ITEMS = BYTES
FLOATS = ("double", "float", "c10::BFloat16", "c10::Half", "c10::Float8_e4m3fn", "c10::Float8_e5m2")
# c10::ScalarType, as a trace writes a `dtype` argument.
CODES = {f.code: f.traced for f in reversed(FORMATS)}


@dataclass(slots=True)
class Call:
    """An operator with what it lies in; a list of tensors is a tuple of sizes."""

    name: str  # without `aten::`
    dims: tuple[Dims | tuple[Dims, ...], ...] = ()
    types: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    sequence: int = -1
    start: float = 0.0
    phase: int = 0
    inner: list[Call] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)

    def tensor(self, k: int) -> Key | None:
        """Size and format of one input, where it is a tensor."""
        if k >= len(self.dims) or k >= len(self.types) or self.types[k] not in ITEMS:
            return None
        sizes = self.dims[k]
        if sizes and isinstance(sizes[0], tuple):
            return None
        return sizes, self.types[k]  # type: ignore[return-value]

    def tensors(self) -> list[Key]:
        """All inputs that are tensors with a size; those of lists are floats."""
        found: list[Key] = []
        for k, sizes in enumerate(self.dims):
            own = self.tensor(k)
            if own is not None:
                found.append(own)
            elif sizes and isinstance(sizes[0], tuple):
                found += [(s, "") for s in sizes]
        return found

    def ints(self, k: int) -> list[int] | None:
        """A plain argument that is a number or a list of numbers."""
        return numbers(self.values[k]) if k < len(self.values) else None

    def flag(self, k: int) -> bool:
        return k < len(self.values) and self.values[k] == "True"

    def code(self, k: int) -> str | None:
        """A `dtype` argument."""
        found = self.ints(k)
        return CODES.get(found[0]) if found else None

    def walk(self) -> Iterator[Call]:
        """Itself and all that lies in it, in order."""
        yield self
        for one in self.inner:
            yield from one.walk()


@lru_cache(65536)
def numbers(text: str) -> list[int] | None:
    """`[2, 2]` → [2, 2]; none where it is something else."""
    try:
        found = json.loads(text) if text else None
    except ValueError:
        return None
    found = [found] if isinstance(found, int) and not isinstance(found, bool) else found
    return found if isinstance(found, list) and all(type(n) is int for n in found) else None


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


def substituted(numbers: Iterable[int], new: dict[int, int]) -> tuple[int, ...]:
    """Storages with some in the place of others, each once."""
    return tuple(dict.fromkeys(new.get(k, k) for k in numbers))


def resized(tape: Tape, times: float) -> Tape:
    """All that follows the batch, so many times as large."""
    storages = tuple(replace(s, count=s.count * times) if s.grows else s for s in tape.storages)
    return tape.changed(storages=storages, ops=tuple(_resized(o, times) for o in tape.ops))


def _resized(op: Op, times: float) -> Op:
    """A workspace resized: the filter's part stays; small convolutions use no FFT."""
    if not op.where:
        return op
    x, y, w, fixed, *work = conv_numbers(op)
    work = [flop * times for flop in work]
    size = (op.workspace - fixed) * times + fixed if op.workspace else 0.0
    if work and times < 1 and work[0] < SPECTRAL:
        size = 0.0
    numbers = (x * times, y * times, w, fixed, *work)
    return replace(op, workspace=size, where=":".join(f"{n:.0f}" for n in numbers))


def conv_numbers(op: Op) -> list[float]:
    """Numbers in input, output and filter of a convolution, bytes that are the filter's, flop."""
    return [float(n) for n in op.where.split(":")]


def with_workspace(tape: Tape, size: Callable[[Op, list[float]], float]) -> Tape:
    """Convolutions with workspaces of another size, from numbers in input, output and filter."""

    def changed(op: Op) -> Op:
        return replace(op, workspace=size(op, conv_numbers(op)[:3])) if op.where else op

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


@dataclass(frozen=True, eq=False)
class Occupancy:
    """Memory over a step: `held[k]` bytes while op k runs, workspaces included."""

    tape: Tape
    born: Array  # the op that makes each storage; NONE from the beginning
    dies: Array  # the last that needs it; len(ops) for good
    held: Array
    peak: float
    at: int  # the op at which the peak is first reached; NONE where nothing runs

    def by_kind(self) -> dict[str, float]:
        """Bytes at the peak by what they are for, largest first."""
        t, sums = self.tape, {"library": self.tape.fixed}
        for k in np.flatnonzero((self.born <= self.at) & (self.dies >= self.at)).tolist():
            word = word_of(BufferKind, t.storages[k].kind)
            sums[word] = sums.get(word, 0.0) + t.storages[k].bytes
        if self.at != NONE:
            sums["workspace"] = sums.get("workspace", 0.0) + t.ops[self.at].workspace
        kept = {k: v for k, v in sums.items() if v}
        return dict(sorted(kept.items(), key=lambda item: (-item[1], item[0])))


def occupancy(tape: Tape) -> Occupancy:
    """When each storage comes and goes, and what is held meanwhile."""
    born, dies = lifetimes(tape)
    size = np.array([s.bytes for s in tape.storages], float)
    steps = len(tape.ops)
    change = np.zeros(steps + 2)
    there = dies >= born
    np.add.at(change, np.maximum(born[there], 0), size[there])
    np.add.at(change, np.minimum(dies[there], steps) + 1, -size[there])
    held = np.cumsum(change)[:steps] + tape.fixed
    held = held + np.array([o.workspace for o in tape.ops], float)
    if not steps:
        return Occupancy(tape, born, dies, held, float(size.sum() + tape.fixed), NONE)
    at = int(np.argmax(held))
    return Occupancy(tape, born, dies, held, float(held[at]), at)


def lifetimes(tape: Tape) -> tuple[Array, Array]:
    """The first and the last op of each storage; those that nothing makes are there from the start.

    Gradients stay to the end of the step; where they are not set to zero before the forward pass,
    those of the step before are there from its beginning.
    """
    count, steps = len(tape.storages), len(tape.ops)
    born, dies = np.full(count, steps + 1), np.full(count, NONE)
    ends = {o.node: k for k, o in enumerate(tape.ops) if o.ends and o.node != NONE}
    for k, o in enumerate(tape.ops):
        for s in o.makes:
            born[s] = min(born[s], k)
            dies[s] = max(dies[s], k)
        for s in o.reads:
            dies[s] = max(dies[s], k)
        for s in o.keeps:
            dies[s] = max(dies[s], ends.get(o.node, k))
    for s, storage in enumerate(tape.storages):
        if storage.kind in LASTING:
            born[s], dies[s] = NONE, steps
        elif storage.kind == BufferKind.GRADIENT:
            dies[s] = steps
            if not tape.is_zeroed_first:
                born[s] = NONE
    return born, dies


def peak_bytes(tape: Tape) -> float:
    """The most a step holds at any time."""
    return occupancy(tape).peak


def phase_peaks(tape: Tape) -> dict[str, float]:
    """The most that is held in each phase."""
    found = occupancy(tape)
    peaks: dict[str, float] = {}
    for o, held in zip(tape.ops, found.held.tolist(), strict=True):
        word = word_of(Phase, o.phase)
        peaks[word] = max(peaks.get(word, 0.0), held)
    return peaks
