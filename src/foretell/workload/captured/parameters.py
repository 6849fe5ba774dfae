"""Which parameters of a captured step are split over tensor-parallel ranks, and how."""

from __future__ import annotations

from dataclasses import dataclass

from foretell.graph import Graph
from foretell.workload.captured.roles import is_expert, is_linear, roles_of, wide
from foretell.workload.captured.rows import batch_of, mark_live, rows_of
from foretell.workload.captured.weights import assign


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
