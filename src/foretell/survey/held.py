"""The memory of a traced step for a page: what its tape holds, op by op."""

from __future__ import annotations

from typing import Any

import numpy as np

from foretell.graph.columns import NONE, BufferKind, word_of
from foretell.graph.graph import Graph
from foretell.memory.play import Held
from foretell.report.held import HOLDERS, curve
from foretell.whatif.held import held


def tape_curves(name: str, graph: Graph) -> list[dict[str, Any]]:
    """One curve where the trace told the sizes of tensors, none where it did not."""
    found = held(graph)
    if found is None or not len(found.held):
        return []
    return [
        {
            "name": name,
            "x": "operators",
            **curve(np.arange(len(found.held)), found.held),
            "peak": found.peak,
            "kinds": found.by_kind(),
            "holders": _holders(found),
        }
    ]


def _holders(found: Held) -> list[dict[str, Any]]:
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
