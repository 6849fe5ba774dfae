"""What is to be fused: the ops of one data-parallel step as columns, its gradients, and their
wire.

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

What it costs to sum a message of gradients over all ranks, as laws that a compiled loop reads.

    seconds(bytes) = least over the ways of  start + slope · bytes + root · √bytes

The ways are those of `foretell.cost.collective`: algorithm and protocol. The quickest is taken for
every message by itself. Where gradients are reduced to one owner each and parameters gathered
again, each half has laws of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.cluster import Cluster
from foretell.cluster.node import Device
from foretell.cost import collective
from foretell.cost.fusion_class import WORDS, kind_of
from foretell.errors import InputError
from foretell.plan.file import made_for

Array = npt.NDArray[np.float64]
ALONE = "alone"  # the name of the way where there is nothing to communicate with


Whole = npt.NDArray[np.int64]
NEAR = 8  # ops since something was written for which the cache may still hold it
_KNOWN = frozenset(WORDS)


@dataclass(frozen=True, eq=False)
class Wire:
    """The laws of one group of ranks."""

    names: tuple[str, ...]  # algorithm and protocol of each way
    laws: Array  # one row a way: start, slope, root
    ranks: int = 1
    scatter: Array | None = None  # laws of a reduce-scatter; half an all-reduce where not known
    gather: Array | None = None  # of an all-gather

    @property
    def halves(self) -> tuple[Array, Array]:
        """The laws of the two halves of an all-reduce: reduce-scatter and all-gather."""
        half = self.laws * np.array([1.0, 0.5, 0.5**0.5])  # each has a start of its own
        return (
            half if self.scatter is None else self.scatter,
            half if self.gather is None else self.gather,
        )

    def seconds(self, sizes: npt.ArrayLike) -> Array:
        """Time of messages."""
        return np.asarray(self._costs(sizes).min(axis=0))

    def way(self, size: float) -> str:
        """The quickest way for a message."""
        return self.names[int(self._costs([size]).argmin())]

    def _costs(self, sizes: npt.ArrayLike) -> Array:
        size = np.asarray(sizes, float)
        start, slope, root = (self.laws[:, k, None] for k in range(3))
        return np.asarray(start + slope * size + root * np.sqrt(size))


def wire_of(cluster: Cluster) -> Wire:
    """The wire between all ranks of a cluster."""
    levels, one = cluster.levels(range(cluster.size)), np.array([1.0])
    names, laws = _ways(collective.price("all_reduce", one, levels))
    scatter = _ways(collective.price("reduce_scatter", one, levels))[1]
    gather = _ways(collective.price("all_gather", one, levels))[1]
    return Wire(names, laws, cluster.size, scatter, gather)


def _ways(found: collective.PricedMany) -> tuple[tuple[str, ...], Array]:
    """Names and laws of the ways a collective can go."""
    if not found.ways:
        return (ALONE,), np.zeros((1, 3))
    laws = np.array([(w.start, w.slope, w.root) for w in found.ways])
    return tuple(f"{w.algorithm} {w.protocol}" for w in found.ways), laws


def measured_wire(sizes: npt.ArrayLike, seconds: npt.ArrayLike, ranks: int) -> Wire:
    """One law, start + slope · bytes: the slope of the two largest messages, the start of others.

    A fit to all would believe what lets small messages pass for free: buffers, a shaped link's
    burst. It is the large ones that gradients travel in.
    """
    order = np.argsort(np.asarray(sizes, float))
    x, y = np.asarray(sizes, float)[order], np.asarray(seconds, float)[order]
    slope = (y[-1] - y[-2]) / (x[-1] - x[-2])
    if slope <= 0:  # noise: the largest by itself
        slope = y[-1] / x[-1]
    left = (y - slope * x)[: max(len(x) // 2, 1)]
    start = max(float(np.median(left)), float(left[0]), 0.0)
    return Wire(("measured",), np.array([[start, float(slope), 0.0]]), ranks)


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
    away: dict[str, float]  # distances that its interval comes from


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


def _listed(count: int, at: Whole, other: Whole) -> list[list[tuple[int, int]]]:
    rows: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for edge, (i, j) in enumerate(zip(at.tolist(), other.tolist(), strict=True)):
        rows[i].append((j, edge))
    return rows


def _look(op: Piece) -> tuple[Any, ...]:
    sizes = (op.elements, op.looped, op.seconds, op.bytes, op.inner, op.across, op.last, op.flops)
    return (op.word, op.dtype, op.side, op.kept, op.entries, *sizes)
