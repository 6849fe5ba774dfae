"""Which parameters each call uses, each counted once; and how tensor parallelism splits them.

A captured step says what each call reads. Where it does not, the module a call ran in and the sizes
of parameters tell: there is a buffer for every parameter (tied ones are one), named by its path;
buffers are rounded up, so that exact sizes come from the calls. A traced step has none: there every
factor that no other call made counts as a parameter of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretell.graph import BufferKind, Graph
from foretell.operators import OPERATORS, having, places
from foretell.workload.captured.roles import is_expert, is_linear, roles_of, wide
from foretell.workload.captured.rows import PRODUCTS, Row, batch_of, mark_live, rows_of

BLOCK = 512  # bytes: sizes of buffers are rounded up to it, as PyTorch's allocator does
_ITEMS = (4, 2, 8, 1)  # bytes of a number
_NORMS = {
    name: places(text)
    for name, text in having("parameters").items()
    if OPERATORS[name]["fusion"] == "norm"
}


@dataclass
class Weight:
    """A parameter of the model."""

    path: str
    bytes: float
    elements: float = 0.0  # exact once a call is found that reads it
    users: int = 0
    assigned: float = 0.0  # elements that calls read slice by slice


def weights_of(graph: Graph) -> list[Weight]:
    """Every parameter that gets a gradient, in the order of the model."""
    held, names = graph.buffers, list(graph.names)
    kinds = held.kind.tolist()
    trained = {
        names[n] for n, k in zip(held.name.tolist(), kinds, strict=True) if k == BufferKind.GRADIENT
    }
    rows = zip(held.name.tolist(), held.bytes.tolist(), kinds, strict=True)
    return [
        Weight(names[n], size)
        for n, size, kind in rows
        if kind == BufferKind.PARAMETER and names[n] in trained
    ]


def assign(graph: Graph, rows: Sequence[Row]) -> list[Weight]:
    """Give each call its parameters; answers those that no call was found for."""
    if "reads" in graph.facts and "weights" in graph.facts:
        return _as_recorded(rows, dict(graph.facts["reads"]), dict(graph.facts["weights"]))
    known = weights_of(graph)
    if not known:
        _from_calls(rows)
        return []
    places: dict[str, list[Weight]] = {}
    for weight in known:
        places.setdefault(weight.path.rpartition(".")[0], []).append(weight)
    wide = 4 if "autocast" in graph.facts else 0  # of a parameter; as its calls read it where 0
    for row in rows:
        if _has_rule(row):
            _claim_ruled(row, places, known, wide)
    for row in rows:
        if not _has_rule(row):
            _claim_rest(row, places.get(row.path, []))
    return [weight for weight in known if not weight.users]


def _as_recorded(
    rows: Sequence[Row], reads: Mapping[str, Any], sizes: Mapping[str, float]
) -> list[Weight]:
    """Parameters as a capture saw them read: by parts where packed, tied where read again.

    A cast reads a parameter on behalf of the call that uses it. A call that is given one parameter
    twice (cuDNN wants each weight and the buffer that all are packed in) has it once.
    """
    known = {path: Weight(path, 0.0, float(size)) for path, size in sizes.items()}
    for row in rows:
        for path, size in reads.get(row.key, ()):
            row.reads.append(float(size))
            weight = known.get(path)
            if weight is None or row.op == "copy_":
                continue
            is_new = weight.assigned + size <= weight.elements
            if not is_new and any(path == own for own, _ in row.weights):
                continue
            (row.weights if is_new else row.tied).append((path, float(size)))
            weight.assigned, weight.users = weight.assigned + size * is_new, weight.users + 1
    return [weight for weight in known.values() if not weight.users]


def _claim(row: Row, size: int, weight: Weight | None) -> None:
    if weight is None:
        return
    row.reads.append(float(size))
    (row.tied if weight.users else row.weights).append((weight.path, float(size)))
    weight.elements, weight.users = float(size), weight.users + 1


def _claim_ruled(row: Row, places: dict[str, list[Weight]], known: list[Weight], wide: int) -> None:
    """The matrix of a call and what goes with it; of a part of a matrix a part of the bias."""
    own = places.get(row.path, [])
    item = wide or row.call.item(PRODUCTS.get(row.op, 0))
    is_part = row.op in PRODUCTS
    for size in _wanted(row):
        weight = _sliced(own, size, item) if is_part else None
        is_part = weight is not None
        if weight is not None:
            _claim_part(row, size, weight)
        else:
            _claim(row, size, _found(row.path, size, places, known))


def _sliced(own: list[Weight], size: int, item: int) -> Weight | None:
    """The parameter of a call's own module that it reads a part of: packed projections."""
    if any(_is_exactly(w, size, item) and not w.assigned for w in own):
        return None
    free = [w for w in own if (not w.users or w.assigned) and w.bytes / item - w.assigned >= size]
    return min(free, key=lambda w: w.bytes, default=None)


def _claim_part(row: Row, size: int, weight: Weight) -> None:
    row.reads.append(float(size))
    row.weights.append((weight.path, float(size)))
    weight.assigned, weight.users = weight.assigned + size, weight.users + 1


def _claim_rest(row: Row, here: list[Weight]) -> None:
    """Pointwise work on parameters of its own module: positions, scales; casts claim nothing."""
    given = row.call.tensors()
    if len(given) <= len(row.after):  # all of them were made by other calls
        return
    for i in given:
        size = row.call.size(i)
        fitting = [w for w in here if _is_exactly(w, size, row.call.item(i))]
        free = [w for w in fitting if not w.users]
        if free and row.op != "copy_":
            _claim(row, size, free[0])
        elif fitting:
            row.reads.append(float(size))


def _found(
    path: str, size: int, places: dict[str, list[Weight]], known: list[Weight]
) -> Weight | None:
    """A parameter of this size: of the module itself, below it, or (tied) anywhere."""
    inner = (w for at, ws in places.items() if at.startswith(f"{path}.") for w in ws)
    for some in (places.get(path, []), list(inner) if path else []):
        fitting = [w for w in some if _is_of(w, size)]
        if fitting:
            return min(fitting, key=lambda w: w.users)
    if size < BLOCK:  # too small to be distinguished by its size
        return None
    return next((w for w in known if w.users and w.elements == size), None)


def _is_of(weight: Weight, size: int) -> bool:
    """Whether it may have so many elements, in any format: autocast reads a copy in another."""
    return any(_is_exactly(weight, size, item) for item in _ITEMS)


def _is_exactly(weight: Weight, size: int, item: int) -> bool:
    return math.ceil(size * item / BLOCK) * BLOCK == weight.bytes


def _has_rule(row: Row) -> bool:
    return row.op in (*PRODUCTS, "convolution", "embedding", *_NORMS) or "_rnn" in row.op


def _wanted(row: Row) -> Iterator[int]:
    """Elements of the inputs that may be parameters, by where each call has them."""
    call = row.call
    if row.op in PRODUCTS:
        first = PRODUCTS[row.op]
        yield call.size(first + 1)
        if first and len(call.dims[0]) == 1:
            yield call.size(0)
    elif row.op == "convolution":
        yield from (call.size(i) for i in (1, 2) if call.size(i) and call.dims[i])
    elif row.op == "embedding":
        yield call.size(0)
    elif row.op in _NORMS:
        yield from (call.size(i) for i in _NORMS[row.op] if i < len(call.dims) and call.dims[i])
    elif row.op.startswith("_cudnn_rnn"):
        yield from (math.prod(dims) for group in call.lists for dims in group)


def _from_calls(rows: Sequence[Row]) -> None:
    """Parameters of a step that tells none: what linear layers, windows, norms, tables read."""
    for row in rows:
        is_product = row.op in ("mm", "addmm") and not _is_made(row, rows)
        if is_product or row.op in ("convolution", "embedding", *_NORMS):
            sizes = [float(size) for size in _wanted(row) if size]
            row.weights = [(f"{row.key}.{i}", size) for i, size in enumerate(sizes)]
            row.reads = sizes


def _is_made(row: Row, rows: Sequence[Row]) -> bool:
    """Whether the second factor was made by another call."""
    size = row.call.size(PRODUCTS[row.op] + 1)
    return len(row.after) > 1 and any(rows[i].size == size for i in row.after)


def exact(weight: Weight, rows: Sequence[Row]) -> float:
    """Elements of a parameter that no rule claimed: those of an input of its module, or its bytes.

    Where nothing tells how wide its numbers are, they are those of most calls.
    """
    if weight.elements:
        return weight.elements
    place = weight.path.rpartition(".")[0]
    for row in rows:
        if row.path == place or row.path.startswith(f"{place}."):
            for i in row.call.tensors():
                if _is_exactly(weight, row.call.size(i), row.call.item(i)):
                    return float(row.call.size(i))
    wide = sum(row.dtype in ("fp32", "tf32") for row in rows) * 2 > len(rows)
    return weight.bytes / (4 if wide else 2)


@dataclass(frozen=True)
class ParameterSplit:
    """One parameter: `column`, `row` or `words`, and the inputs and outputs of its matmul."""

    kind: str
    inputs: int = 0
    outputs: int = 0


@dataclass(frozen=True)
class StepSplits:
    """Parameters that are split, by name, and how many attentions the step has."""

    parameters: dict[str, ParameterSplit]
    attentions: int


def parameter_splits(graph: Graph) -> StepSplits:
    """The split of every parameter of a captured step that has one."""
    rows = rows_of(graph)
    assign(graph, rows)
    mark_live(graph, rows)
    roles = roles_of(rows, batch_of(graph, rows))
    found: dict[str, ParameterSplit] = {}
    for kind, some in (("column", roles.column), ("row", roles.row), ("words", roles.words)):
        for at in some:
            row = rows[at]
            sizes = wide(row) if is_linear(row) or is_expert(row) else (0, 0)
            for path, _ in (*row.weights, *row.tied):
                found.setdefault(path, ParameterSplit(kind, *sizes))
    return StepSplits(found, len({core.last for core in roles.cores.values()}))
