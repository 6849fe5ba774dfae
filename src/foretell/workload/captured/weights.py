"""Which parameters each call uses, each counted once; and how tensor parallelism splits them.

A captured step says what each call reads. A traced step does not: there every factor that no other
call made counts as a parameter of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretell.graph import Graph
from foretell.operators import OPERATORS, having, places
from foretell.workload.captured.roles import is_expert, is_linear, roles_of, wide
from foretell.workload.captured.rows import PRODUCTS, ForwardCall, batch_of, mark_live, rows_of

_NORMS = {
    name: places(text)
    for name, text in having("parameters").items()
    if OPERATORS[name]["fusion"] == "norm"
}


@dataclass
class Weight:
    """A parameter of the model."""

    path: str
    elements: float
    users: int = 0
    assigned: float = 0.0  # elements that calls read slice by slice


def assign(graph: Graph, rows: Sequence[ForwardCall]) -> list[Weight]:
    """Give each call its parameters; answers those that no call was found for."""
    if "reads" in graph.facts and "weights" in graph.facts:
        return _as_recorded(rows, dict(graph.facts["reads"]), dict(graph.facts["weights"]))
    _from_calls(rows)
    return []


def _as_recorded(
    rows: Sequence[ForwardCall], reads: Mapping[str, Any], sizes: Mapping[str, float]
) -> list[Weight]:
    """Parameters as a capture saw them read: by parts where packed, tied where read again.

    A cast reads a parameter on behalf of the call that uses it. A call that is given one parameter
    twice (cuDNN wants each weight and the buffer that all are packed in) has it once.
    """
    known = {path: Weight(path, float(size)) for path, size in sizes.items()}
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


def _wanted(row: ForwardCall) -> Iterator[int]:
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


def _from_calls(rows: Sequence[ForwardCall]) -> None:
    """Parameters of a step that tells none: what linear layers, windows, norms, tables read."""
    for row in rows:
        is_product = row.op in ("mm", "addmm") and not _is_made(row, rows)
        if is_product or row.op in ("convolution", "embedding", *_NORMS):
            sizes = [float(size) for size in _wanted(row) if size]
            row.weights = [(f"{row.key}.{i}", size) for i, size in enumerate(sizes)]
            row.reads = sizes


def _is_made(row: ForwardCall, rows: Sequence[ForwardCall]) -> bool:
    """Whether the second factor was made by another call."""
    size = row.call.size(PRODUCTS[row.op] + 1)
    return len(row.after) > 1 and any(rows[i].size == size for i in row.after)


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
