"""The memory of a traced step for a page: what its tape holds, op by op."""

from __future__ import annotations

from typing import Any

import numpy as np

from foretell.graph.graph import NONE, Array, BufferKind, Graph, Phase, word_of
from foretell.memory.tape import Occupancy
from foretell.report.memory import HOLDERS, curve
from foretell.whatif.memory_effect import occupancy_of


def tape_curves(name: str, graph: Graph) -> list[dict[str, Any]]:
    """One curve where the trace has tensor sizes, none otherwise."""
    found = occupancy_of(graph)
    if found is None or not len(found.held):
        return []
    return [
        {
            "name": name,
            "x": "operators",
            **curve(np.arange(len(found.held)), found.held, _by_kind(found)),
            "peak": found.peak,
            "kinds": found.by_kind(),
            "explained": _explained(found),
            "holders": _holders(found),
        }
    ]


def _by_kind(found: Occupancy) -> dict[str, Array]:
    """Bytes held at each op, by what they are for; workspaces are the rest."""
    steps = len(found.held)
    kinds = np.array([s.kind for s in found.tape.storages], np.int64)
    size = np.array([s.bytes for s in found.tape.storages], float)
    there = found.dies >= found.born
    sums = {}
    for kind in np.unique(kinds).tolist():
        mine = there & (kinds == kind)
        change = np.zeros(steps + 2)
        np.add.at(change, np.maximum(found.born[mine], 0), size[mine])
        np.add.at(change, np.minimum(found.dies[mine], steps) + 1, -size[mine])
        sums[word_of(BufferKind, kind)] = np.cumsum(change)[:steps]
    library = np.full(steps, found.tape.fixed)
    rest = found.held - library - np.sum(list(sums.values()), axis=0)
    workspace = sums.get("workspace", np.zeros(steps)) + rest
    return {**sums, "workspace": workspace, "library": library}


def _explained(found: Occupancy) -> str:
    """When the peak is reached, in words."""
    if found.at == NONE:
        return ""
    op = found.tape.ops[found.at]
    return (
        f"reached at `{op.name}` in {word_of(Phase, op.phase)}, "
        f"operator {found.at + 1:,} of {len(found.tape.ops):,}"
    )


def _holders(found: Occupancy) -> list[dict[str, Any]]:
    """The largest storages at the peak, by the operator that made them."""
    there = np.flatnonzero((found.born <= found.at) & (found.dies >= found.at))
    storages, ops = found.tape.storages, found.tape.ops
    largest = sorted(there.tolist(), key=lambda k: -storages[k].bytes)[:HOLDERS]
    return [
        {
            "name": "there all the time"
            if (b := int(found.born[k])) == NONE
            else f"made by {ops[b].name}",
            "kind": word_of(BufferKind, storages[k].kind),
            "bytes": storages[k].bytes,
        }
        for k in largest
    ]
