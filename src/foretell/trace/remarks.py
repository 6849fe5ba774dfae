"""What in a traced step a person should know before relying on an answer about it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from foretell.graph import Graph, Kind, LaneKind
from foretell.trace.words import library

_BUSY = 0.05  # share of the device's seconds from which a stream counts
_AMD = ("hip", "Cijk_", "__amd")  # how calls and kernels under ROCm begin


def remarks(graph: Graph) -> list[str]:
    """Communication kernels of custom libraries, several streams, AMD's kernels."""
    return [*_libraries(graph), *_streams(graph), *_amd(graph)]


def _texts(graph: Graph, column: str, *kinds: Kind) -> set[str]:
    words, rows = list(graph.names), getattr(graph, column)[np.isin(graph.kind, kinds)]
    return {words[k] for k in set(rows.tolist())}


def _libraries(graph: Graph) -> Iterator[str]:
    found = sorted(set(map(library, _texts(graph, "name", Kind.COLLECTIVE, Kind.SEND))) - {""})
    if found:
        yield (
            f"communication kernels of {', '.join(found)}: counted as communication as measured; "
            "changes of ranks or network price them as NCCL's"
        )


def _streams(graph: Graph) -> Iterator[str]:
    """Streams of one rank that kernels of some weight run on."""
    kernels = graph.kind == Kind.KERNEL
    spent = np.bincount(graph.lane[kernels], graph.seconds[kernels], minlength=len(graph.lanes))
    compute = graph.lanes.kind == LaneKind.COMPUTE
    for rank in sorted(set(graph.lanes.rank[compute].tolist()))[:1]:
        own = compute & (graph.lanes.rank == rank)
        many = int((spent[own] > _BUSY * max(spent[own].sum(), 1e-12)).sum())
        if many > 1:
            yield (
                f"kernels run on {many} streams at once: each keeps the seconds it was measured "
                "with beside the others"
            )


def _amd(graph: Graph) -> Iterator[str]:
    calls, kernels = _texts(graph, "op", Kind.HOST), _texts(graph, "name", Kind.KERNEL)
    if any(text.startswith(_AMD) for text in calls | kernels):
        yield (
            "kernels of an AMD GPU: their times are as measured; ratios of changed kernels were "
            "measured on NVIDIA's"
        )
