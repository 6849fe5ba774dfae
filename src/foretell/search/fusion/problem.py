"""What is to be fused: columns of ops and gradients, from a captured graph or a workload.

What is to be fused: the ops of one data-parallel step as columns, its gradients, and their
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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.cluster import Cluster
from foretell.cluster.node import Device
from foretell.cost import collective
from foretell.cost import kernel as limits
from foretell.cost.fused_regions import WORDS, kind_of, word_of
from foretell.cost.kernel import write_shape as write
from foretell.cost.price import price, prices
from foretell.errors import InputError
from foretell.graph import BufferKind, Builder, Dtype, Graph, Kind, Phase, WaitKind
from foretell.graph.graph import word_of as name_of_code
from foretell.plan.framework import Running, running
from foretell.plan.layer_cost import MATRIX, format_of, in_format, power_kind, slowest
from foretell.plan.plan import Plan, given, made_for, op_names, parameter_print
from foretell.workload.workload import BYTES, Call, Layer, Op, Workload, calls, holds, turned

Array = npt.NDArray[np.float64]
ALONE = "alone"  # the name of the way where there is nothing to communicate with


Whole = npt.NDArray[np.int64]
NEAR = 8  # ops since something was written for which the cache may still hold it
_KNOWN = frozenset(WORDS)


def bucket_starts(sizes: Sequence[float], most: float, first: float) -> list[int]:
    """Where buckets begin that are closed when they reach a size; the first may be smaller."""
    firsts, held, limit = [0], 0.0, first
    for k, size in enumerate(sizes):
        held += size
        if held >= limit and k + 1 < len(sizes):
            firsts.append(k + 1)
            held, limit = 0.0, most
    return firsts


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
    names, laws = _algorithms(collective.price("all_reduce", one, levels))
    scatter = _algorithms(collective.price("reduce_scatter", one, levels))[1]
    gather = _algorithms(collective.price("all_gather", one, levels))[1]
    return Wire(names, laws, cluster.size, scatter, gather)


def _algorithms(found: collective.PricedMany) -> tuple[tuple[str, ...], Array]:
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
class OpNode:
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
    ops: tuple[OpNode, ...]
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
        return _edges_by_op(len(self.ops), self.target, self.source)

    @cached_property
    def readers(self) -> list[list[tuple[int, int]]]:
        """For each op the (op, edge) that reads it."""
        return _edges_by_op(len(self.ops), self.source, self.target)

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
            seen.setdefault((_price_key(op), self._given(i)), len(seen))
            for i, op in enumerate(self.ops)
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


def _edges_by_op(count: int, at: Whole, other: Whole) -> list[list[tuple[int, int]]]:
    rows: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for edge, (i, j) in enumerate(zip(at.tolist(), other.tolist(), strict=True)):
        rows[i].append((j, edge))
    return rows


def _price_key(op: OpNode) -> tuple[Any, ...]:
    sizes = (op.elements, op.looped, op.seconds, op.bytes, op.inner, op.across, op.last, op.flops)
    return (op.word, op.dtype, op.side, op.kept, op.entries, *sizes)


# A step as ops to be fused: of a captured graph, or of a workload as PyTorch would run it.
#
# A captured step as ops to be fused: its kernels with their data, its gradients by parameter.
#
# `foretell capture` writes who reads whom, the shapes each operator was given, and when each
# gradient is there; `foretell.cost` prices what has no seconds yet.
#
# The step of a workload as ops to be fused: the kernels PyTorch would run, and who reads whom.
#
# A workload lists ops in the order they run. Who reads whom follows from sizes: an op reads the
# nearest earlier result of the size it needs; a sum of residuals also what entered its layer; a
# gradient also what autograd kept of the forward. What has no such maker enters from outside.


_SIZE = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "int64": 8, "int32": 4}
_STEP = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD)
_LASTING = (BufferKind.PARAMETER, BufferKind.GRADIENT, BufferKind.OPTIMIZER, BufferKind.INPUT)
_SHARDED = (BufferKind.GRADIENT, BufferKind.OPTIMIZER)  # by ZeRO-2
Dims = tuple[int, ...]


# The word of each kernel class of a workload, forward and backward (→ `cost.fused_regions`).
_SAME = {
    "gemm": "mm",
    "copy": "clone",
    "reduce": "sum",
    "attention": "scaled_dot_product_attention",
}
FORWARD_WORDS = _SAME | {
    "conv": "convolution", "conv_dgrad": "convolution", "norm": "layer_norm",
    "rms_norm": "rms_norm",
    "softmax": "softmax", "dropout": "dropout", "elementwise": "add", "activation": "tanh",
    "gelu": "gelu", "silu": "silu", "relu": "relu", "tanh": "tanh", "sigmoid": "sigmoid",
    "embedding": "embedding", "batch_norm": "batch_norm", "pool": "max_pool2d_with_indices",
}  # fmt: skip
BACKWARD_WORDS = _SAME | {
    "conv": "convolution_backward", "conv_dgrad": "convolution_backward",
    "conv_wgrad": "convolution_backward", "norm_backward": "layer_norm_backward",
    "rms_norm_backward": "fused_rms_norm_backward", "softmax_backward": "softmax_backward_data",
    "dropout": "dropout_backward", "elementwise": "mul", "gelu": "gelu_backward",
    "silu": "silu_backward", "relu": "threshold_backward", "tanh": "tanh_backward",
    "sigmoid": "sigmoid_backward", "batch_norm_backward": "batch_norm_backward",
    "pool_backward": "max_pool2d_with_indices_backward",
    "embedding_backward": "embedding_dense_backward",
}  # fmt: skip


def problem_of_graph(
    graph: Graph, cluster: Cluster, *, epilogue: bool = False, learned: bool = False, zero: int = 0
) -> Problem:
    """One data-parallel step of a captured graph on every rank of a cluster."""
    priced = price(graph, slowest_rank(cluster))
    tasks = _kernels(graph)
    place = {int(t): i for i, t in enumerate(tasks)}
    gradients = _gradients(graph, place)
    rows = _reads(graph, place)
    ops = _pieces(priced, tasks, rows, gradients)
    update = (graph.kind == Kind.KERNEL) & (graph.phase == Phase.UPDATE)
    share = np.isin(graph.buffers.kind, _LASTING) * 1.0
    if zero:
        share[np.isin(graph.buffers.kind, _SHARDED)] /= cluster.size
    return Problem(
        str(graph.facts.get("captured", "a captured step")),
        parameter_print({g.name: g.bytes for g in gradients}),
        tuple(ops),
        *edges_of(rows),
        tuple(gradients),
        float(priced.seconds[update].sum()),
        wire_of(cluster),
        slowest(cluster),
        held=float((graph.buffers.bytes * share).sum()),
        room=min(float(device.memory) for device in cluster.devices),
        epilogue=epilogue,
        learned=learned,
        zero=zero,
    )


def _kernels(graph: Graph) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    mine = (graph.kind == Kind.KERNEL) & np.isin(graph.phase, _STEP)
    tasks: np.ndarray[tuple[int], np.dtype[np.int64]] = np.flatnonzero(mine)
    if not len(tasks):
        raise InputError(
            "the graph has no kernels of a forward or backward",
            hint="make one with `foretell capture train.py -o step.graph`",
        )
    return tasks


def _gradients(graph: Graph, place: dict[int, int]) -> list[Gradient]:
    """Gradients as their buffers tell, each with the kernel that first writes it."""
    held, found = graph.buffers, {}
    for row in np.flatnonzero(held.kind == BufferKind.GRADIENT).tolist():
        born = int(held.born[row])
        if born in place:
            name = graph.names[int(held.name[row])]
            found[name] = Gradient(name, float(held.bytes[row]), place[born])
    return list(found.values())


def _reads(graph: Graph, place: dict[int, int]) -> list[tuple[int, int, int]]:
    edges = graph.edges
    mine = edges.kinds == WaitKind.DATA
    rows = zip(edges.after[mine].tolist(), edges.waiting[mine].tolist(), strict=True)
    return [(place[s], place[t], 0) for s, t in rows if s in place and t in place]


def _pieces(
    graph: Graph, tasks: np.ndarray[tuple[int], np.dtype[np.int64]],
    rows: list[tuple[int, int, int]], gradients: list[Gradient],
) -> list[OpNode]:  # fmt: skip
    written, names = _written(graph), op_names(graph)
    read, needed = {s for s, _, _ in rows}, {g.op for g in gradients}
    sources: dict[int, list[int]] = {}
    for s, t, _ in rows:
        sources.setdefault(t, []).append(s)
    found: list[OpNode] = []
    for i, task in enumerate(tasks.tolist()):
        piece = _piece_of_task(graph, task, written.get(task, 0.0))
        kept = i in needed or i not in read
        entries = _entries(graph, task, piece, [found[s] for s in sources.get(i, [])])
        found.append(replace(piece, name=names[task], kept=kept, entries=entries))
    return found


def _written(graph: Graph) -> dict[int, float]:
    """Bytes of the largest thing each kernel makes."""
    held, found = graph.buffers, dict[int, float]()
    for born, size in zip(held.born.tolist(), held.bytes.tolist(), strict=True):
        found[born] = max(found.get(born, 0.0), size)
    return found


def _piece_of_task(graph: Graph, task: int, written: float) -> OpNode:
    word = word_of(graph.names[int(graph.op[task])].rstrip("_"))
    word = word if word in WORDS else "other"
    dtype = name_of_code(Dtype, int(graph.dtype[task]))
    dtype = dtype if dtype in _SIZE else "fp32"
    dims = _inputs(graph, task)
    looped = float(max([prod(d) for d in dims] or [1]))
    kind = kind_of(word)
    made = written / _SIZE[dtype] if written else looped
    if kind in ("pointwise", "random", "norm"):
        made = looped
    largest = max(dims, key=prod, default=(1,))
    inner, across = _inner(word, kind, largest, looped, made)
    side = BACKWARD if graph.phase[task] == Phase.BACKWARD else FORWARD
    return OpNode(
        "", word, dtype, made, max(looped, made), float(graph.seconds[task]),
        made * _SIZE[dtype], side, inner, across, float(largest[-1] if largest else 1),
        float(graph.flops[task]) if kind == "template" else 0.0, given=given(graph, task),
    )  # fmt: skip


def _inner(word: str, kind: str, dims: Dims, looped: float, made: float) -> tuple[float, int]:
    """Places that become one, and whether they lie apart."""
    if word.startswith("batch_norm"):
        return looped / max(dims[1] if len(dims) > 1 else 1, 1), 1
    if kind == "norm":
        return float(dims[-1] if dims else 1), 0
    if kind == "reduction":
        return max(looped / max(made, 1.0), 1.0), int(made > 1)
    return 1.0, 0


def _entries(graph: Graph, task: int, piece: OpNode, makers: list[OpNode]) -> tuple[Entry, ...]:
    """What an op is given that no op of the step made: inputs left over by size."""
    left = [float(prod(d)) for d in _inputs(graph, task)]
    for maker in makers:
        near = min(left, key=lambda size: abs(size - maker.elements), default=None)
        if near is not None:
            left.remove(near)
    return tuple(Entry(n, piece.dtype, 0 if n >= piece.looped else 1) for n in left)


def _inputs(graph: Graph, task: int) -> list[Dims]:
    """The dims of an operator's inputs, from `32x256+256+-`."""
    items = [item for group in given(graph, task).split("+") for item in group.split("|")]
    return [
        tuple(map(int, i.split("x"))) for i in items if i and all(c in "0123456789x" for c in i)
    ]


@dataclass
class _Kernel:
    """One kernel while the step is written: its call, its piece without a price, what it reads."""

    call: Call
    piece: OpNode
    reads: list[tuple[int, int]] = field(default_factory=list)  # op, pattern


@dataclass
class _StepBuilder:
    workload: Workload
    flags: frozenset[str]
    batch: float
    run: Running
    kernels: list[_Kernel] = field(default_factory=list)
    gradients: list[Gradient] = field(default_factory=list)
    own: dict[tuple[str, str], list[int]] = field(default_factory=dict)  # (layer, op) → forward
    fed: dict[tuple[str, str], int] = field(default_factory=dict)  # … → what it read there
    entered: dict[str, int] = field(default_factory=dict)  # layer → kernels before it
    seen: dict[tuple[int, float], list[int]] = field(default_factory=dict)  # (side, size) → makers
    first: dict[tuple[str, str], list[int]] = field(default_factory=dict)  # `own`, without repeats

    def nearest(self, side: int, elements: float, before: int | None = None) -> int:
        """The last kernel of a side that made so many elements, or -1."""
        found = self.seen.get((side, elements), [])
        return next((i for i in reversed(found) if before is None or i < before), -1)

    def add(self, kernel: _Kernel) -> int:
        self.kernels.append(kernel)
        i = len(self.kernels) - 1
        self.seen.setdefault((kernel.piece.side, kernel.piece.elements), []).append(i)
        return i


@dataclass(frozen=True)
class Memory:
    """What a data-parallel step does to fit: accumulation, recompute of blocks, ZeRO."""

    repeats: int = 1  # micro-batches a step
    recompute: bool = False
    zero: int = 0  # 0 or 2

    def held(self, parameters: float, run: Running, ranks: int) -> float:
        """Bytes that are there all the time on one rank."""
        own = run.formats.gradient + run.state_bytes
        return parameters * (run.weight_bytes + (own / ranks if self.zero else own))


def from_workload(
    workload: Workload, cluster: Cluster, *, epilogue: bool = False, learned: bool = False,
    memory: Memory | None = None, run: Running | None = None,
) -> Problem:  # fmt: skip
    """One data-parallel step of a workload on every rank of a cluster, its own batch on each."""
    memory, run = memory or Memory(), run or running(Plan(framework="ddp", dtype=workload.dtype))
    device = slowest(cluster, workload.dtype)  # ranks wait for each other at every message
    flags = frozenset({"eager", *(["flash"] if "bf16" in device.flops else [])})
    if workload.batch % memory.repeats:
        raise InputError(
            f"{workload.batch} samples of a rank in {memory.repeats} micro-batches",
            hint="give a number that divides them",
        )
    builder = _StepBuilder(workload, flags, float(workload.batch // memory.repeats), run)
    places = list(_places(workload))
    for layer, name in places:
        builder.entered[name] = len(builder.kernels)
        for op in _named_ops(layer, flags):
            _forward(builder, op, name)
    builder.first = dict(builder.own)
    brief = 0.0
    for layer, name in reversed(places):
        begun = len(builder.kernels)
        if memory.recompute and layer.is_block:
            _add_recompute(builder, layer, name)
        again = range(begun, len(builder.kernels))
        for op in reversed(_named_ops(layer, flags)):
            _backward(builder, op, layer, name)
        brief = max(brief, _recomputed_bytes(builder, again))
    calls_, graph = _as_graph(builder, device)
    took = prices(graph, np.arange(graph.size), slowest_rank(cluster, workload.dtype))[0]
    seconds = _throttled(workload.dtype, calls_, device, np.asarray(took, float))
    ops, update = _priced_ops(builder, seconds[:-1]), float(seconds[-1])
    rows = [(s, t, p) for t, k in enumerate(builder.kernels) for s, p in k.reads]
    source, target, pattern = edges_of(rows)
    return Problem(
        workload.name, workload.fingerprint(), ops, source, target, pattern,
        tuple(builder.gradients), update, wire_of(cluster), device,
        held=memory.held(_parameters(builder), run, cluster.size) + brief,
        room=min(float(d.memory) for d in cluster.devices),
        epilogue=epilogue, learned=learned, samples=int(builder.batch), repeats=memory.repeats,
        recompute=memory.recompute, zero=memory.zero,
    )  # fmt: skip


def _add_recompute(builder: _StepBuilder, layer: Layer, name: str) -> None:
    """The forward of a block once more, before its backward, from what entered the block."""
    place: dict[int, int] = {}
    for op in _named_ops(layer, builder.flags):
        mine = builder.own[name, op.name]
        for i in mine:
            old = builder.kernels[i]
            piece = replace(old.piece, name=f"{old.piece.name}.recompute", side=BACKWARD)
            place[i] = len(builder.kernels)
            builder.kernels.append(
                _Kernel(old.call, piece, [(place.get(s, s), how) for s, how in old.reads])
            )
        builder.own[name, op.name] = [place[i] for i in mine]
        fed = builder.fed.get((name, op.name), -1)
        builder.fed[name, op.name] = place.get(fed, fed)


def _recomputed_bytes(builder: _StepBuilder, again: range) -> float:
    """Bytes that a block's second forward keeps for its backward."""
    later = builder.kernels[again.stop :]
    read = {s for kernel in later for s, _ in kernel.reads}
    return sum(builder.kernels[i].piece.bytes for i in again if i in read)


def _places(workload: Workload) -> Iterator[tuple[Layer, str]]:
    for layer in workload.layers:
        for i in range(layer.times):
            ops = tuple(turned(op, i) if isinstance(op, Op) else op for op in layer.ops)
            yield (
                replace(layer, ops=ops),
                f"{layer.name}.{i}" if layer.times > 1 else layer.name,
            )


def _named_ops(layer: Layer, flags: frozenset[str]) -> list[Op]:
    """Ops that run, by names of their own: a name that comes again is numbered."""
    found: list[Op] = []
    counts: dict[str, int] = {}
    for op in layer.works():
        if holds(op.when, flags):
            counts[op.name] = counts.get(op.name, 0) + 1
            more = f".{counts[op.name]}" if counts[op.name] > 1 else ""
            found.append(replace(op, name=op.name + more) if more else op)
    return found


def _kernels_in_order(op: Op, found: list[Call]) -> list[Call]:
    """Kernels in the order they run; the steps of a recurrent layer take turns."""
    turns = [call for call in found if call.times > 1]
    if op.kind != "recurrent" or not turns:
        return [call._replace(times=1.0) for call in found for _ in range(int(call.times))]
    once = [call for call in found if call.times <= 1]
    steps = [call._replace(times=1.0) for _ in range(int(turns[0].times)) for call in turns]
    return [*once[:1], *steps, *once[1:]]


def _forward(builder: _StepBuilder, op: Op, layer: str) -> None:
    sizes = op.sizes({}, builder.batch)
    there = _kernels_in_order(op, calls(op, sizes, builder.flags)[0])
    made: list[int] = []
    for call in there:
        piece = _piece(builder, op, call, FORWARD, f"{layer}/{op.name}", len(made))
        need, entries = _forward_inputs(piece, call)
        kernel = _Kernel(call, replace(piece, entries=entries))
        source = builder.nearest(FORWARD, need) if need else -1
        if source < 0 and need and builder.kernels:
            source = len(builder.kernels) - 1
        if source >= 0:
            kernel.reads.append((source, 0))
        _more_reads(builder, op, kernel, layer)
        if not made:
            builder.fed[layer, op.name] = source
        made.append(builder.add(kernel))
    builder.own[layer, op.name] = made


def _more_reads(builder: _StepBuilder, op: Op, kernel: _Kernel, layer: str) -> None:
    """A sum of two reads what entered its layer, or something from outside."""
    extra = round(float(op.options.get("passes", 2.0))) - 2 if op.kind == "pointwise" else 0
    for _ in range(min(extra, 2)):
        n = kernel.piece.elements
        skip = builder.nearest(FORWARD, n, builder.entered[layer])
        if skip >= 0 and (skip, 0) not in kernel.reads:
            kernel.reads.append((skip, 0))
        else:
            entry = Entry(n, kernel.piece.dtype)
            kernel.piece = replace(kernel.piece, entries=(*kernel.piece.entries, entry))


def _backward(builder: _StepBuilder, op: Op, layer: Layer, name: str) -> None:
    sizes = op.sizes({}, builder.batch)
    back = _kernels_in_order(op, calls(op, sizes, builder.flags)[1])
    own, fed = builder.own.get((name, op.name), []), builder.fed.get((name, op.name), -1)
    out = builder.kernels[own[-1]].piece.elements if own else 0.0
    made: list[int] = []
    for call in back:
        piece = _piece(builder, op, call, BACKWARD, f"{name}/{op.name}.backward", len(made))
        kernel = _Kernel(call, piece)
        source = builder.nearest(BACKWARD, out)
        if made and call.op not in ("gemm", "reduce", "conv_dgrad", "conv_wgrad", "attention"):
            source = builder.nearest(BACKWARD, piece.looped)
        if source < 0:
            source = len(builder.kernels) - 1
        kernel.reads.append((source, 0))
        kernel.reads += [
            (s, 0) for s in _saved_inputs(builder, op, kernel, own, fed) if s != source
        ]
        made.append(builder.add(kernel))
    _add_gradients(builder, op, layer, name, made)


def _saved_inputs(
    builder: _StepBuilder, op: Op, kernel: _Kernel, own: list[int], fed: int
) -> list[int]:
    """What of the forward a gradient reads; a product's own gradients a weight or its input."""
    call = kernel.call
    if call.op == "reduce" or not own:
        return []
    if call.op in ("gemm", "conv_dgrad") and not call.shape.get("ta") and op.kind != "attention":
        weight = sum(float(w.elements(op.dims)) for w in op.weights[:1])
        kernel.piece = replace(kernel.piece, entries=(Entry(weight, kernel.piece.dtype),))
        return []
    if len(own) > 1:
        same = [i for i in own if builder.kernels[i].piece.elements == kernel.piece.elements]
        return same[-1:] or own[:1]
    names = [t.name for t in op.saved if holds(t.when, builder.flags)]
    if op.kind in ("matmul", "conv", "norm", "batch_norm") or "input" in names:
        return [fed] if fed >= 0 else []
    return own[-1:] if names else []


def _add_gradients(builder: _StepBuilder, op: Op, layer: Layer, name: str, made: list[int]) -> None:
    """The gradients of an op's weights, each with the kernel that completes it."""
    again = {other for _, other in builder.workload.tied}
    if not builder.kernels:
        return
    for k, weight in enumerate(op.weights):
        if f"{layer.name}/{weight.name}" in again:
            continue
        size = float(weight.elements(op.dims)) * BYTES[builder.run.grad_dtype]
        sums = [i for i in made if builder.kernels[i].call.op == "reduce"]
        rest = [i for i in made if i not in sums]
        last = made[-1] if made else len(builder.kernels) - 1
        op_at = sums[-1] if k and sums else rest[-1] if rest else last
        used = builder.first.get((name, op.name)) or [0]
        builder.gradients.append(Gradient(f"{name}/{weight.name}", size, op_at, used[0]))


def _piece(builder: _StepBuilder, op: Op, call: Call, side: int, name: str, number: int) -> OpNode:
    """A kernel's sizes; its price comes later."""
    shape = {k: float(np.asarray(v)) for k, v in call.shape.items()} or _shape_of_bytes(call)
    dtype = call.dtype or builder.workload.dtype
    word = (FORWARD_WORDS if side == FORWARD else BACKWARD_WORDS).get(call.op, "other")
    if word == "add" and ("gate" in op.name or "scale" in op.name):
        word = "mul"
    made, looped, inner, last = _sizes(call.op, shape, op)
    across = 1 if call.op.startswith(("batch_norm", "reduce")) else 0
    return OpNode(
        name if not number else f"{name}.{number}", word, dtype, made, looped, 0.0,
        made * BYTES[dtype], side, inner, across, last, float(np.asarray(call.flops)),
    )  # fmt: skip


def _shape_of_bytes(call: Call) -> dict[str, float]:
    """Elements of a recorded kernel of which only the bytes are known: each read and written."""
    width = BYTES[call.dtype] if call.dtype else 2.0  # bytes of a workload's format are of halves
    return {"n": max(1.0, float(np.asarray(call.bytes)) / (2.0 * width))}


def _sizes(kind: str, s: dict[str, float], op: Op) -> tuple[float, float, float, float]:
    """Elements made, places visited, places that become one, elements side by side."""
    if kind == "gemm":
        made = s.get("b", 1.0) * s["m"] * s["n"]
        return made, made, 1.0, s["n"]
    if kind == "attention":
        made = s["b"] * s["heads"] * s["sq"] * s["d"]
        return made, made, 1.0, s["d"]
    if kind.startswith("conv"):
        return _conv_sizes(kind, s)
    n = s.get("n") or s["rows"] * s["cols"]
    if kind == "reduce":
        return s["rows"], n, n / s["rows"], s["rows"]
    if kind == "pool":
        share = float(op.saved[0].times) if op.saved else 1.0
        return n * share, n, 4.0, 1.0
    cols = s.get("cols") or float(op.dims.get("cols", op.dims.get("w", 1.0)))
    return n, n, s["cols"] if "cols" in s and kind != "embedding" else 1.0, cols


def _conv_sizes(kind: str, s: dict[str, float]) -> tuple[float, float, float, float]:
    stride, pad = s.get("stride", 1.0), s.get("pad", 0.0)
    r, q = s.get("r", 1.0), s.get("s", 1.0)
    p_out = s.get("p", np.floor((s["h"] + 2 * pad - r) / stride) + 1)
    q_out = s.get("q", np.floor((s["w"] + 2 * pad - q) / stride) + 1)
    deep = s.get("d", 1.0)
    made = {
        "conv": s["n"] * s["k"] * float(p_out) * float(q_out) * max(deep / stride, 1.0),
        "conv_dgrad": s["n"] * s["c"] * s["h"] * s["w"] * deep,
        "conv_wgrad": s["k"] * s["c"] * r * q * s.get("t", 1.0) / s.get("groups", 1.0),
    }[kind]
    return made, made, 1.0, s["w"]


def _forward_inputs(piece: OpNode, call: Call) -> tuple[float, tuple[Entry, ...]]:
    """Elements a forward kernel reads of what was made before, and what enters besides."""
    s = {k: float(np.asarray(v)) for k, v in call.shape.items()}
    if call.op == "gemm":
        many = s.get("b", 1.0)  # a recorded product may be a single one
        return many * s["m"] * s["k"], (Entry(many * s["k"] * s["n"], piece.dtype),)
    if call.op.startswith("conv"):
        window = s["k"] * s["c"] * s.get("r", 1.0) * s.get("s", 1.0)
        side = s["n"] * s["c"] * s["h"] * s["w"] * s.get("d", 1.0)
        return side, (Entry(window, piece.dtype),)
    if call.op == "embedding":
        return 0.0, (Entry(piece.elements, piece.dtype, 2),)
    if call.op in ("norm", "rms_norm", "batch_norm"):
        return piece.looped, (Entry(piece.last, piece.dtype, 1),)
    return piece.looped, ()


def _as_graph(builder: _StepBuilder, device: Device) -> tuple[list[Call], Graph]:
    """Every kernel by itself, and the update behind them, as tasks to be priced."""
    make = Builder()
    calls_ = [in_format(kernel.call, builder.run, device) for kernel in builder.kernels]
    for call in calls_:
        make.task(
            kind="kernel", op=call.op, dtype=call.dtype or builder.workload.dtype,
            shape=write({k: float(np.asarray(v)) for k, v in call.shape.items()}),
            flops=float(np.asarray(call.flops)),
            bytes=float(np.asarray(call.moved(builder.workload.dtype))),
        )  # fmt: skip
    many = _parameters(builder)
    moved = builder.run.update * many
    make.task(kind="kernel", op="optimizer", dtype="fp32", bytes=moved, shape=f"n={many:g}")
    return calls_, make.graph(check=False)


def _parameters(builder: _StepBuilder) -> float:
    """How many numbers are trained."""
    return sum(g.bytes for g in builder.gradients) / BYTES[builder.run.grad_dtype]


def _throttled(dtype: str, calls_: list[Call], device: Device, seconds: Array) -> Array:
    """Matrix kernels take longer once the board runs at its power limit, as `predict` has it."""
    is_matrix = np.array([call.op in MATRIX for call in calls_], bool)
    energy = sum(
        float(np.asarray(call.flops))
        * limits.joules(device, format_of(call.op, call.dtype or dtype), power_kind(call))
        for call in calls_
        if call.op in MATRIX
    )
    busy = seconds[:-1]
    matrix, rest = float(busy[is_matrix].sum()), float(busy[~is_matrix].sum())
    taken, joules, streaming, idle = np.array([[matrix], [energy], [rest], [0.0]])
    slower = 1 / float(limits.clock(device, taken, joules, streaming, idle)[0])
    return np.append(np.where(is_matrix, busy * slower, busy), seconds[-1])


def slowest_rank(cluster: Cluster, dtype: str = "bf16") -> Cluster:
    """One rank of the slowest kind: what every rank of a data-parallel step waits for."""
    if len(cluster.devices_by_kind()) == 1:
        return cluster
    name = slowest(cluster, dtype).name
    return cluster.part((next(r for r, d in enumerate(cluster.devices) if d.name == name),))


def _priced_ops(builder: _StepBuilder, seconds: Any) -> tuple[OpNode, ...]:
    """Pieces with their prices; what a gradient is or nothing reads has to be written."""
    read = {s for k in builder.kernels for s, _ in k.reads}
    needed = {g.op for g in builder.gradients}
    return tuple(
        replace(k.piece, seconds=float(t), kept=i in needed or i not in read)
        for i, (k, t) in enumerate(zip(builder.kernels, seconds, strict=True))
    )
