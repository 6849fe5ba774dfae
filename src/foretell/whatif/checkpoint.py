"""Activations thrown away and computed again when the backward pass needs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from foretell.graph.columns import NONE, Array, Kind, Phase
from foretell.graph.edit import Edit
from foretell.graph.graph import Graph
from foretell.memory import change
from foretell.memory.tape import Tape
from foretell.whatif.base import DoesNotApply, Setting, WhatIf

COPIED = (
    *("kind", "op", "name", "rank", "lane", "seconds", "gap", "flops", "bytes", "layer", "dtype"),
    *("shape", "source", "sigma"),
)


@dataclass(frozen=True)
class Checkpoint(WhatIf):
    """Run the whole forward pass again before the backward pass."""

    name: ClassVar[str] = "checkpoint"
    assumes: ClassVar[tuple[str, ...]] = (
        "the forward pass costs the second time what it costs now, on the thread of the backward",
    )
    source: ClassVar[str] = "Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost"
    code: ClassVar[str] = "torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)"
    spread: ClassVar[float] = 0.05

    def apply(self, graph: Graph, setting: Setting) -> Graph:
        is_forward = graph.phase == Phase.FORWARD
        is_backward = (graph.phase == Phase.BACKWARD) & (graph.kind == Kind.HOST)
        ranks = np.intersect1d(graph.rank[is_forward], graph.rank[is_backward])
        if not len(ranks):
            raise DoesNotApply("the step has no forward and backward that could be told apart")
        with graph.edit(str(self)) as edit:
            for rank in ranks.tolist():
                mine = graph.rank == rank
                _again(edit, graph, _issued(graph, is_forward & mine), is_backward & mine)
        return edit.graph

    def hold(self, tape: Tape) -> Tape:
        return change.checkpoint(tape)


def _issued(graph: Graph, mask: Array) -> Array:
    """Tasks in the order they are issued."""
    tasks = np.flatnonzero(mask)
    found: Array = tasks[np.argsort(graph.order[tasks], kind="stable")]
    return found


def _again(edit: Edit, graph: Graph, forward: Array, backward: Array) -> None:
    """Copies of the forward tasks, issued just before the first of the backward."""
    first = int(_issued(graph, backward)[0])
    columns: dict[str, Any] = {c: graph.column(c)[forward] for c in COPIED if c in graph.columns}
    on_host = np.isin(graph.kind[forward], (Kind.HOST, Kind.SYNC))
    columns["lane"] = np.where(on_host, graph.lane[first], graph.lane[forward])
    new = edit.insert(issued_before=np.full(len(forward), first), phase="backward", **columns)
    number = np.full(graph.size, NONE)
    number[forward] = new
    e = graph.edges
    inside = (number[e.waiting] != NONE) & (number[e.after] != NONE)
    edit.wait(number[e.waiting[inside]], number[e.after[inside]], lag=e.lags[inside])
    before = graph.edges.of(first)  # what the backward waited for, its second forward waits for
    if len(before):
        edit.wait(np.full(len(before), new[0]), before)
