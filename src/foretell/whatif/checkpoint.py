"""Activations thrown away and recomputed when the backward pass needs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from foretell.graph.edit import Edit
from foretell.graph.graph import NONE, Array, Graph, Kind, Phase
from foretell.memory import change
from foretell.memory.tape import Tape
from foretell.whatif.base import DoesNotApply, Setting, WhatIf
from foretell.whatif.memory_effect import tape_of

# Host seconds that a checkpoint's hooks take for each saved tensor: packed in the forward pass,
# packed again in the second one, unpacked in the backward. Measured with torch 2.13, Python 3.11 on
# chains of 300 small operators (benchmarks/hooks.py): 3.7, 3.0, and 26 to 41 us for all of it.
PACK, PACK_AGAIN, UNPACK = 3.7e-6, 3.0e-6, 30e-6
COPIED = (
    *("kind", "op", "name", "rank", "lane", "seconds", "gap", "flops", "bytes", "layer", "dtype"),
    *("shape", "source", "sigma"),
)


@dataclass(frozen=True)
class Checkpoint(WhatIf):
    """Run the whole forward pass again before the backward pass."""

    name = "checkpoint"
    assumes = (
        "the forward pass costs the second time what it costs now, on the thread of the backward",
        "hooks in Python take the host 37 us for each tensor that is saved for the backward",
    )
    source = "Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost"
    code = "torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)"

    def apply(self, graph: Graph, setting: Setting) -> Graph:
        is_forward = graph.phase == Phase.FORWARD
        is_backward = (graph.phase == Phase.BACKWARD) & (graph.kind == Kind.HOST)
        ranks = np.intersect1d(graph.rank[is_forward], graph.rank[is_backward])
        if not len(ranks):
            raise DoesNotApply("the step has no recognizable forward and backward pass")
        saved = _saved(graph)
        with graph.edit(str(self)) as edit:
            for rank in ranks.tolist():
                mine = graph.rank == rank
                forward = _host_order(graph, is_forward & mine)
                again = _recompute(edit, graph, forward, is_backward & mine)
                on_host = graph.kind[forward] == Kind.HOST
                _spread(edit, forward[on_host], PACK * saved)
                _spread(edit, again[on_host], PACK_AGAIN * saved)
                _spread(edit, np.flatnonzero(is_backward & mine), UNPACK * saved)
        return edit.graph

    def hold(self, tape: Tape) -> Tape:
        return change.checkpoint(tape)


def _host_order(graph: Graph, mask: Array) -> Array:
    """Tasks in the order they are issued."""
    tasks = np.flatnonzero(mask)
    found: Array = tasks[np.argsort(graph.order[tasks], kind="stable")]
    return found


def _saved(graph: Graph) -> int:
    """How many tensors the forward pass saves; none where the trace told no sizes."""
    tape = tape_of(graph)
    forward = (Phase.FORWARD, Phase.LOSS)
    return sum(len(o.keeps) for o in tape.ops if o.phase in forward) if tape else 0


def _spread(edit: Edit, tasks: Array, seconds: float) -> None:
    """So much more time, the same for each of some tasks."""
    if len(tasks) and seconds:
        edit.set(tasks, seconds=edit.column("seconds")[tasks] + seconds / len(tasks))


def _recompute(edit: Edit, graph: Graph, forward: Array, backward: Array) -> Array:
    """Copies of the forward tasks, issued just before the first of the backward."""
    first = int(_host_order(graph, backward)[0])
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
    return new
