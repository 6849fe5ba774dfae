"""The forward calls of a recorded step: what each reads, keeps, and runs in the backward.

A captured step says which task made what another uses; a traced one does not (→ `guess`). What a
trace does not tell: which call uses what another made, and calls by their own names.

A call is taken to use the last tensor of each size it reads. Sums at the end of a branch, matmuls
beside each other and tensors made in one piece are distinguished by a few rules.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from foretell import operators
from foretell.cost.aten import Call, Dims, read
from foretell.errors import InputError
from foretell.graph import BufferKind, Graph, Kind, Phase, WaitKind
from foretell.graph.graph import NONE

# Matmuls, and where the two factors begin.
PRODUCTS = {**operators.PRODUCTS, "_grouped_mm": 0}
LOOK_UPS = ("embedding", "index_select", "gather")
# Calls that make constants, whatever they are given.
_CONSTANT = ("fill_", "arange", "empty", "scalar_tensor")


@dataclass
class ForwardCall:
    """One forward call."""

    key: str
    op: str
    path: str  # of the module it ran in
    phase: Phase
    dtype: str
    call: Call
    tasks: list[int]
    after: tuple[int, ...] = ()  # rows whose results it uses
    back: list[int] = field(default_factory=list)  # tasks of its backward
    kept: float = 0.0  # bytes of what it made that is there until the backward
    live: bool = False  # depends on the batch
    learned: bool = False  # depends on the batch and on parameters: not to be had from the batch
    weights: list[tuple[str, float]] = field(default_factory=list)  # paths and elements
    tied: list[tuple[str, float]] = field(default_factory=list)  # those another call has already
    reads: list[float] = field(default_factory=list)  # elements of all parameters it reads
    sources: frozenset[int] = frozenset()  # rows that are no pointwise work, through those that are
    through: bool = False  # pointwise, or a norm of single heads

    @property
    def out(self) -> Dims:
        """The sizes of what it makes."""
        return made_by(self.call)

    @property
    def size(self) -> float:
        return float(math.prod(self.out))


def made_by(call: Call) -> Dims:
    """The sizes of what a call makes."""
    if call.op in PRODUCTS:
        a, b = call.dims[PRODUCTS[call.op]], call.dims[PRODUCTS[call.op] + 1]
        return (*a[:-1], b[-1])
    if call.op in LOOK_UPS:
        return (*call.dims[1], *call.dims[0][1:]) if len(call.dims) > 1 else call.dims[0]
    if call.op == "index":
        return _looked_up(call)
    if any(call.lists):
        return _joined(call)
    if call.op == "convolution":
        return _slid(call)
    if ("pool2d" in call.op or "pool3d" in call.op) and len(call.dims[0]) == 2 + _sides(call):
        return _pooled(call)
    if call.op in ("mean", "sum") and call.numbers(1):
        dims = call.dims[0]
        gone = {i % len(dims) for i in call.numbers(1)}
        return tuple(1 if i in gone else d for i, d in enumerate(dims))
    return spread([call.dims[i] for i in call.tensors()])


def _joined(call: Call) -> Dims:
    """Tensors one behind the other, along the side where they differ; empty ones add nothing."""
    first = [d for d in next(group for group in call.lists if group) if math.prod(d)]
    if not first:
        return (0,)
    dim = (call.numbers(1) or (-1,))[0] if call.op == "cat" else -1
    if not first[0] or any(len(d) != len(first[0]) for d in first):  # single numbers, stacked
        return (sum(map(math.prod, first)),)
    at = next((i for i in range(len(first[0])) if len({d[i] for d in first}) > 1), dim)
    at %= len(first[0])
    return (*first[0][:at], sum(d[at] for d in first), *first[0][at + 1 :])


def _looked_up(call: Call) -> Dims:
    """Shape after indexing: dims without an index stay, the others take the index's shape."""
    x = call.dims[0]
    given = call.lists[1] if len(call.lists) > 1 and call.lists[1] else call.dims[1:2]
    taken = [d for d in given if d]
    if not taken or len(given) > len(x):
        return x
    first = next(i for i, d in enumerate(given) if d)
    rest = [side for i, side in enumerate(x) if i >= len(given) or not given[i]]
    return (*rest[:first], *spread(taken), *rest[first:])


def _sides(call: Call) -> int:
    return 3 if "3d" in call.op else 2


def _slid(call: Call) -> Dims:
    """Output size of a sliding window over an image, or of its transpose."""
    x, w = call.dims[0], call.dims[1]
    stride, pad, dilation = (call.numbers(i) or (i // 4,) for i in (3, 4, 5))
    turned, more = call.values[6] in ("True", "1"), call.numbers(7) or (0,)
    sides = operators.window(x[2:], w[2:], stride, pad, dilation, more, turned=turned)
    groups = (call.numbers(8) or (1,))[-1]
    return (x[0], w[1] * groups if turned else w[0], *sides)


def _pooled(call: Call) -> Dims:
    x = call.dims[0]
    if call.op.startswith("_adaptive"):
        return (*x[:2], *each(call.numbers(1) or (1,), _sides(call)))
    kernel = each(call.numbers(1) or (1,), _sides(call))
    stride, pad = call.numbers(2) or kernel, call.numbers(3) or (0,)
    up = call.values[-1] in ("True", "1")
    return (*x[:2], *operators.window(x[2:], kernel, stride, pad, up=up))


def each(numbers: tuple[int, ...], many: int) -> tuple[int, ...]:
    return numbers if len(numbers) == many else (numbers[-1],) * many


def spread(several: Sequence[Dims]) -> Dims:
    """The sizes that tensors have when they are spread to each other; the largest where not."""
    width = max((len(d) for d in several), default=0)
    padded = [(1,) * (width - len(d)) + d for d in several]
    out = tuple(max(sizes) for sizes in zip(*padded, strict=True))
    fits = all(all(s in (1, o) for s, o in zip(d, out, strict=True)) for d in padded)
    return out if fits else max(several, key=math.prod, default=())


def outermost(call: Call, key: str) -> Call:
    """A call of a trace in the form of a capture: look-ups and windows show what is inside them.

    A look-up shows its gather, with indices spread to rows; a window the call of cuDNN (padding,
    stride, dilation, groups) or the one for single channels (window, bias, stride, padding …).
    """
    if call.op == "convolution" and len(call.types) > 3 and call.types[2] == "ScalarList":
        alone = call.types[3] == "-"
        pad, stride, dilation = (call.values[i] for i in ((5, 4, 6) if alone else (2, 3, 4)))
        groups = str(call.dims[0][1]) if alone else call.values[5]
        values = ("-", "-", "-", stride, pad, dilation, "False", "0x0", groups)
        dims = (*call.dims[:2], *[()] * 7)
        return replace(call, dims=dims, values=values, types=(*call.types[:2], *["-"] * 7))
    tables = [d for d in call.dims if len(d) == 2]
    if not key.startswith("embedding.") or call.op == "embedding" or len(tables) < 2:
        return call
    dims = (tables[0], tables[1][:1])
    return replace(call, op="embedding", dims=dims, types=(call.types[0], "long int"))


def guessed(rows: Sequence[ForwardCall]) -> Iterator[tuple[int, ...]]:
    """The last call that made a tensor of each size that is read, or of all of one size at once."""
    made: dict[int, list[int]] = {}
    found: tuple[int, ...] = ()
    for at, row in enumerate(rows):
        given = row.call.tensors()
        if row.op in PRODUCTS:
            given = [PRODUCTS[row.op]]
        if at and _is_beside(rows[at - 1], row):
            yield found
            made.setdefault(math.prod(row.out), []).append(at)
            continue
        sizes = Counter(row.call.size(i) for i in given)
        sizes += Counter(math.prod(dims) for dims in _all_lists(row.call))
        found = tuple(sorted({i for n, k in sizes.items() for i in _makers(made, n, k)}))
        if row.op.rstrip("_") == "add" and list(sizes.values()) == [2]:
            found = _summed(rows, made.get(math.prod(row.out), []))
        row.after = found
        yield found
        made.setdefault(math.prod(row.out), []).append(at)


def _all_lists(call: Call) -> list[Dims]:
    return [dims for group in call.lists for dims in group]


def _makers(made: dict[int, list[int]], size: int, many: int) -> list[int]:
    """Whatever made `many` tensors of a size: one call that made them all, or the last ones."""
    apart, whole = made.get(size, [])[-many:], made.get(size * many, [])[-1:]
    return whole if many > 1 and whole and whole > apart[-1:] else apart


def _summed(rows: Sequence[ForwardCall], made: list[int]) -> tuple[int, ...]:
    """Inputs of a residual sum: the last tensor of its size, and the last outside its branch.

    Matmuls, windows and norms are followed by something before they are added to.
    """
    if not made:
        return ()
    last = chain = made[-1]
    if not (is_followed(rows[last]) or rows[last].op in ("native_dropout", "native_batch_norm")):
        return tuple(made[-2:])  # a formula, not the end of a branch
    while rows[chain].after and rows[chain].after[-1] in made:
        chain = rows[chain].after[-1]
    before = [i for i in made if i < chain and not is_followed(rows[i])]
    return (*before[-1:], last)


def is_followed(row: ForwardCall) -> bool:
    return row.op in PRODUCTS or row.op == "convolution" or row.op == "native_layer_norm"


def _is_beside(one: ForwardCall, two: ForwardCall) -> bool:
    """Matmuls in a row over equal inputs read the same: nothing multiplies twice in between."""
    if one.op not in ("mm", "addmm") or two.op not in ("mm", "addmm"):
        return False
    return one.call.dims[PRODUCTS[one.op]] == two.call.dims[PRODUCTS[two.op]]


def rows_of(graph: Graph) -> list[ForwardCall]:
    """Every forward call in order, with its backward and what it keeps."""
    tasks = np.flatnonzero((graph.kind == Kind.KERNEL) | (graph.kind == Kind.COPY))
    names, paths = graph.texts("name"), graph.texts("layer")
    keys = names if is_captured(graph) else paths
    rows, where = _forward(graph, tasks.tolist(), keys, paths)
    if not rows:
        raise InputError(
            "the graph has no forward calls with shapes",
            hint="capture the model, or profile it with record_shapes=True",
        )
    _backward(graph, tasks.tolist(), keys, rows)
    _wire(graph, rows, where)
    _keep(graph, rows, where)
    return rows


def is_captured(graph: Graph) -> bool:
    """Whether the step was captured: its tasks are named after operators."""
    return "captured" in graph.facts


def _forward(
    graph: Graph, tasks: list[int], keys: list[str], paths: list[str]
) -> tuple[list[ForwardCall], dict[int, int]]:
    """Rows, and the row of each forward task."""
    ops, shapes, dtypes = (graph.texts(name) for name in ("op", "shape", "dtype"))
    captured = is_captured(graph)
    rows: list[ForwardCall] = []
    where: dict[int, int] = {}
    for i in tasks:
        phase = Phase(int(graph.phase[i]))
        if phase not in (Phase.FORWARD, Phase.LOSS) or not shapes[i].startswith("in="):
            continue
        call = read(ops[i], shapes[i], float(graph.bytes[i]), float(graph.flops[i]))
        if not captured:
            call = outermost(call, keys[i])
        if not call.tensors() and not any(call.lists) and ops[i] not in _CONSTANT:
            continue  # scalars
        if rows and rows[-1].key == keys[i] and rows[-1].op == call.op:
            if not _is_part(graph, i, rows[-1].tasks):
                rows[-1].tasks.append(i)
        else:
            path = paths[i] if captured else ""
            rows.append(ForwardCall(keys[i], call.op, path, phase, dtypes[i], call, [i]))
        where[i] = len(rows) - 1
    return rows, where


def _backward(graph: Graph, tasks: list[int], keys: list[str], rows: list[ForwardCall]) -> None:
    """Every backward task goes to its forward call, or to the one whose backward ran before it."""
    mine: dict[str, ForwardCall] = {}
    for row in rows:  # a trace has a window, its bias and a cast under one key
        if row.key not in mine or (is_followed(row) and not is_followed(mine[row.key])):
            mine[row.key] = row
    last: ForwardCall | None = None
    for i in tasks:
        if graph.phase[i] != Phase.BACKWARD:
            continue
        last = mine.get(keys[i].removesuffix(".backward"), last)
        if last is not None and not _is_part(graph, i, last.back):
            last.back.append(i)


def _is_part(graph: Graph, i: int, before: list[int]) -> bool:
    """Whether a task of a trace is one more kernel of the operator before it."""
    if is_captured(graph) or not before:
        return False
    return bool((graph.op[i], graph.shape[i]) == (graph.op[before[-1]], graph.shape[before[-1]]))


def _wire(graph: Graph, rows: list[ForwardCall], where: dict[int, int]) -> None:
    if is_captured(graph):
        kinds = graph.edges.kinds
        for at, row in enumerate(rows):
            found = set()
            for i in row.tasks:
                edges = range(int(graph.edges.start[i]), int(graph.edges.start[i + 1]))
                data = (int(graph.edges.after[e]) for e in edges if kinds[e] == WaitKind.DATA)
                found |= {where[j] for j in data if j in where}
            row.after = tuple(sorted(found - {at}))
        return
    for row, after in zip(rows, guessed(rows), strict=True):
        row.after = after


def _keep(graph: Graph, rows: list[ForwardCall], where: dict[int, int]) -> None:
    """Bytes of activations born in the forward that the backward still needs."""
    held = graph.buffers
    for size, born, dies, kind in zip(held.bytes, held.born, held.dies, held.kind, strict=True):
        if kind != BufferKind.ACTIVATION or int(born) not in where or dies == NONE:
            continue
        if graph.phase[int(dies)] >= Phase.BACKWARD:
            rows[where[int(born)]].kept += float(size)


def batch_of(graph: Graph, rows: Sequence[ForwardCall]) -> int:
    """Samples of the step: the first side of what the first call that reads data is given.

    Indices that a trace shows as one row tell no batch: there most tensors of three sides do.
    """
    batch = graph.facts.get("batch")
    if isinstance(batch, int | float) and batch >= 1:
        return int(batch)
    for row in rows:
        is_first = row.live and not row.after and (is_captured(graph) or row.op == "convolution")
        dims = _data(row) if is_first else ()
        if dims:
            return dims[0]
    sides = [row.out[0] for row in rows if row.live and len(row.out) == 3]
    sides = sides or [row.out[0] for row in rows if row.live and row.out]
    return Counter(sides).most_common(1)[0][0] if sides else 1


def _data(row: ForwardCall) -> Dims:
    """The sizes of what a call is given that is no parameter."""
    if row.op in PRODUCTS:
        return row.call.dims[PRODUCTS[row.op]]
    given = row.call.tensors()
    if row.op in LOOK_UPS:
        return row.call.dims[1] if len(row.call.dims) > 1 else ()
    return row.call.dims[given[0]] if given else ()


def mark_live(graph: Graph, rows: Sequence[ForwardCall]) -> None:
    """Find what depends on the batch: not constants, nor what is made of parameters alone."""
    listed = graph.facts.get("batch_ops")
    known = frozenset(listed) if isinstance(listed, list | tuple) else None
    for row in rows:
        if row.op in _CONSTANT:
            continue
        reads = row.key in known if known is not None else not row.after and _reads_data(row)
        row.live = reads or any(rows[i].live for i in row.after)
        is_fed = any(rows[i].learned for i in row.after)
        row.learned = row.live and (is_fed or bool(row.reads) or not is_captured(graph))


def _reads_data(row: ForwardCall) -> bool:
    """Whether an input is neither a parameter nor made by another call."""
    sizes = list(row.reads)
    given = row.call.tensors()
    for i in given[:1] if row.op == "index" else given:  # where to look is no data to compute with
        if float(row.call.size(i)) in sizes:
            sizes.remove(float(row.call.size(i)))
        else:
            return True
    return False
