"""What is to be fused: the ops of one data-parallel step as columns, and the gradients they leave.

    compute lane   ops in issue order: forward, loss, backward; an op reads what earlier ones made
    wire           gradients, summed over the ranks, in messages of one or more of them
    update         the optimizer, behind the last gradient

    step = max(last op, last message) + update

Sharded, each gradient is reduced to one rank (half the message), updated there (1/ranks of the
work), and its parameter gathered while the next forward runs, before the first op that reads it.

With several micro-batches a step (gradient accumulation) ops are those of one of them; all but the
last run before anything is sent. With recompute the ops of a block's forward come again before its
backward, named `….recompute`.

Ops carry what the price of a fused region asks for (→ `foretell.cost.fused_regions`). What an op
makes either stays inside its region or is written to memory for those outside that read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.cluster.device import Device
from foretell.cost.fusion_class import WORDS, kind_of
from foretell.errors import InputError
from foretell.plan.op_names import made_for
from foretell.search.fusion.wire import Wire

Array = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]
NEAR = 8  # ops since something was written for which the cache may still hold it
FORWARD, BACKWARD = 0, 1  # sides of a step: nothing is fused across them


@dataclass(frozen=True, slots=True)
class Entry:
    """Something an op reads that no op of the step makes: a weight, the batch."""

    elements: float
    dtype: str
    pattern: int = 0  # 0 in order, 1 broadcast, 2 other memory order


@dataclass(frozen=True, slots=True)
class Piece:
    """One op; sizes as in `foretell.cost.fused_regions`."""

    name: str  # layer/op, or what a capture calls it
    word: str
    dtype: str
    elements: float  # it makes
    looped: float  # places it visits
    seconds: float  # by itself
    bytes: float  # of what it makes
    side: int = FORWARD
    inner: float = 1.0
    across: int = 0
    last: float = 1.0
    flops: float = 0.0
    kept: bool = False  # read from outside the step: a loss, a buffer
    entries: tuple[Entry, ...] = ()
    given: str = ""  # sizes of its inputs as a capture writes them; empty where not captured


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient of a parameter, and the op that completes it."""

    name: str
    bytes: float
    op: int
    used: int = 0  # the first op that reads the parameter


@dataclass(frozen=True, slots=True)
class Reference:
    """The step with nothing fused and DDP's buckets, as `foretell.predict` has it."""

    seconds: float
    host: float  # seconds to launch one kernel
    exponent: float  # host and device take turns as what bounds the step
    sigma: float  # of ln(measured / predicted)


@dataclass(frozen=True, eq=False)
class Problem:
    """A step to be fused, and where it runs."""

    model: str  # what it was made from
    fingerprint: str
    ops: tuple[Piece, ...]
    source: Whole  # edges: who made it,
    target: Whole  # who reads it,
    pattern: Whole  # and how
    gradients: tuple[Gradient, ...]
    update: float  # seconds of the optimizer
    wire: Wire
    device: Device
    held: float = 0.0  # bytes that are there all the time: weights, gradients, state
    room: float = float("inf")  # bytes of one device
    epilogue: bool = False  # whether the compiler writes matmuls itself
    learned: bool = False  # prices of regions from the network instead of the formula
    samples: int = 0  # of one micro-batch on one rank, where known
    repeats: int = 1  # micro-batches whose gradients are summed before they are sent
    recompute: bool = False  # blocks keep their input and run their forward again
    zero: int = 0  # 2: gradients and optimizer state sharded over the ranks
    reference: Reference | None = None  # where more is known of the step than its lanes

    def __post_init__(self) -> None:
        checked(self)

    def __len__(self) -> int:
        return len(self.ops)

    @cached_property
    def kinds(self) -> list[str]:
        """What sort each op is."""
        return [kind_of(op.word) for op in self.ops]

    @cached_property
    def reads(self) -> list[list[tuple[int, int]]]:
        """For each op the (op, edge) it reads."""
        return _listed(len(self.ops), self.target, self.source)

    @cached_property
    def readers(self) -> list[list[tuple[int, int]]]:
        """For each op the (op, edge) that reads it."""
        return _listed(len(self.ops), self.source, self.target)

    @cached_property
    def rows(self) -> tuple[Whole, Whole]:
        """What each op reads in compressed rows: edges are sorted by reader."""
        counts = np.bincount(self.target, minlength=len(self.ops))
        return np.concatenate([[0], np.cumsum(counts)]), self.source

    @cached_property
    def alike(self) -> list[int]:
        """A number for each op: the same for ops that cost the same and read the same."""
        seen: dict[Any, int] = {}
        return [
            seen.setdefault((_look(op), self._given(i)), len(seen)) for i, op in enumerate(self.ops)
        ]

    def _given(self, i: int) -> tuple[Any, ...]:
        """What an op reads of others, as its price sees it."""
        rows = ((self.ops[j], i - j <= NEAR, int(self.pattern[edge])) for j, edge in self.reads[i])
        return tuple((op.elements, op.dtype, op.last, near, how) for op, near, how in rows)

    @cached_property
    def producer(self) -> Whole:
        """The op of each gradient."""
        return np.array([g.op for g in self.gradients], np.int64)

    @cached_property
    def used(self) -> Whole:
        """The op that first reads each parameter."""
        return np.array([g.used for g in self.gradients], np.int64)

    @cached_property
    def sizes(self) -> Array:
        """Bytes of each gradient."""
        return np.array([g.bytes for g in self.gradients])

    def made_for(self, names: Sequence[str]) -> str:
        """What a plan that speaks of these ops keeps, to be compared with the model it meets."""
        sizes = {op.name: op.given for op in self.ops}
        if not any(sizes.values()):
            return self.fingerprint
        return made_for(self.fingerprint, [(name, sizes.get(name, "")) for name in names])

    @property
    def compute(self) -> float:
        """Seconds of all ops by themselves."""
        return sum(op.seconds for op in self.ops)


def edges_of(rows: Sequence[tuple[int, int, int]]) -> tuple[Whole, Whole, Whole]:
    """(source, target, pattern) as columns, each pair once."""
    once = {(s, t): p for s, t, p in reversed(rows)}
    table = np.array(sorted((t, s, p) for (s, t), p in once.items()), np.int64).reshape(-1, 3)
    return table[:, 1].copy(), table[:, 0].copy(), table[:, 2].copy()


def checked(problem: Problem) -> Problem:
    """The same problem, after a look at what cannot be fused at all."""
    if not problem.gradients:
        raise InputError(
            f"`{problem.model}` has no gradients: nothing is sent in its step",
            hint="give a training step: forward, backward and at least one trained parameter",
        )
    if len(problem.ops) < 2:
        raise InputError(
            f"`{problem.model}` has {len(problem.ops)} op, and nothing to fuse it with",
            hint="capture the whole step: forward, loss and backward",
        )
    if len(problem.source) and np.any(problem.source >= problem.target):
        at = int(np.flatnonzero(problem.source >= problem.target)[0])
        names = [problem.ops[i].name for i in (problem.target[at], problem.source[at])]
        raise InputError(f"op `{names[0]}` reads `{names[1]}`, which is not before it")
    for op in problem.ops:
        if op.word not in _KNOWN:
            raise InputError(f"op `{op.name}` is a `{op.word}`, which has no class")
    return problem


_KNOWN = frozenset(WORDS)


def _listed(count: int, at: Whole, other: Whole) -> list[list[tuple[int, int]]]:
    rows: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for edge, (i, j) in enumerate(zip(at.tolist(), other.tolist(), strict=True)):
        rows[i].append((j, edge))
    return rows


def _look(op: Piece) -> tuple[Any, ...]:
    sizes = (op.elements, op.looped, op.seconds, op.bytes, op.inner, op.across, op.last, op.flops)
    return (op.word, op.dtype, op.side, op.kept, op.entries, *sizes)
