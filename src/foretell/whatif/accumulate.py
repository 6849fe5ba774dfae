"""Gradient accumulation: several forward and backward passes, then one exchange and one update.

The passes are copied ahead of the ones that are there; those keep the exchange of gradients, as
with DDP's `no_sync`. Every pass but the first adds its gradients to what is there: one kernel a
parameter that reads two tensors and writes one, where the step does not do that already. The answer
is for the longer step, of `steps` times as many samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from foretell.errors import InputError
from foretell.graph.edit import Edit
from foretell.graph.graph import NONE, Array, Graph, Ids, Kind, Phase
from foretell.memory.tape import Tape
from foretell.whatif.base import DoesNotApply, Setting, WhatIf
from foretell.whatif.bucket_copies import KERNEL, first_of_update, host_op, memory_rate
from foretell.whatif.checkpoint import COPIED
from foretell.whatif.gradients import Gradients, compute_lane, exchanged, gradients
from foretell.whatif.memory_effect import with_lasting_gradients
from foretell.whatif.parameters import PACK, backward_ends

MORE = ("phase", "comm_bytes", "group", "priority")  # columns of a copy besides
PASSES = (Phase.LOAD, Phase.FORWARD, Phase.LOSS, Phase.BACKWARD)


@dataclass(frozen=True)
class Accumulate(WhatIf):
    """Run forward and backward `steps` times for one update and one exchange of gradients."""

    name = "accumulate"
    source = "PyTorch documentation, DistributedDataParallel.no_sync"
    assumes = (
        "every pass takes what this one takes, with as many samples; the step is of all of them",
        "gradients are exchanged in the last pass only (no_sync)",
    )
    code = "with model.no_sync(): loss.backward()   # steps - 1 times"
    steps: int = 4  # passes an update

    def apply(self, graph: Graph, setting: Setting) -> Graph:
        if not 1 < self.steps <= 4096:
            raise InputError(f"`{self}` has {self.steps} passes", hint="use 2 or more")
        if graph.facts.get("turned"):
            raise DoesNotApply("the step begins with its backward pass", hint="accumulate first")
        is_pass = np.isin(graph.phase, PASSES) | (graph.kind == Kind.COLLECTIVE)
        is_pass |= _among_backward(graph)
        is_pass &= ~np.isin(np.arange(graph.size), _of_exchange(graph))
        ranks = np.intersect1d(
            graph.rank[is_pass & (graph.phase == Phase.FORWARD)],
            graph.rank[is_pass & (graph.phase == Phase.BACKWARD)],
        ).tolist()
        if not ranks:
            raise DoesNotApply("the step has no recognizable forward and backward pass")
        with graph.edit(str(self)) as edit:
            _repeat(edit, np.flatnonzero(is_pass), ranks, self.steps)
            for rank in ranks:
                _add_up(edit, rank, self.steps - 1, memory_rate(graph, setting))
        return edit.graph

    def hold(self, tape: Tape) -> Tape:
        return with_lasting_gradients(tape)


def _among_backward(graph: Graph) -> Array:
    """Tasks issued while a rank's backward pass runs, whatever phase they were given."""
    found = np.zeros(graph.size, bool)
    for rank in np.unique(graph.rank).tolist():
        mine = graph.rank == rank
        begins = graph.order[mine & (graph.phase == Phase.BACKWARD)].min(initial=graph.size)
        found |= mine & (graph.order >= begins) & (graph.order <= backward_ends(graph, rank))
    return found


def _of_exchange(graph: Graph) -> Ids:
    calls = graph.select(kind="host", name="gradients")
    return np.concatenate([graph.select(op=PACK), calls, exchanged(graph)])


def _repeat(edit: Edit, passes: Ids, ranks: list[int], steps: int) -> None:
    """Copies of all tasks of a pass, ahead of it, each pass behind the one before."""
    graph = edit.before
    passes = passes[np.argsort(graph.order[passes], kind="stable")]
    columns: dict[str, Any] = {
        c: graph.column(c)[passes] for c in (*COPIED, *MORE) if c in graph.columns
    }
    ends, number = _handed_over(graph, passes), np.full(graph.size, NONE)
    firsts = [passes[(graph.kind[passes] == Kind.HOST) & (graph.rank[passes] == r)] for r in ranks]
    for turn in range(steps):
        before = number
        if turn < steps - 1:
            new = edit.insert(issued_before=np.full(len(passes), passes[0]), **columns)
            number = np.full(graph.size, NONE)
            number[passes] = new
            _inside(edit, number)
        else:  # the last pass is the one that is there
            number = np.arange(graph.size)
        for rank, first in zip(ranks, firsts, strict=True):
            mine = ends[graph.rank[ends] == rank]
            if turn and len(first) and len(mine):
                edit.wait(np.full(len(mine), number[first[0]]), before[mine], kind="thread")


def _handed_over(graph: Graph, passes: Ids) -> Ids:
    """Host tasks of a pass that the optimizer's thread waits for: the end of the backward pass."""
    mine = np.zeros(graph.size, bool)
    mine[passes] = True
    e = graph.edges
    out = mine[e.after] & ~mine[e.waiting] & (graph.kind[e.after] == Kind.HOST)
    out &= graph.kind[e.waiting] == Kind.HOST
    return np.unique(e.after[out])


def _inside(edit: Edit, number: Array) -> None:
    """Waits, drained lanes, held lanes and shared links of the copies, as the originals have."""
    graph, e = edit.before, edit.before.edges
    both = (number[e.waiting] != NONE) & (number[e.after] != NONE)
    edit.wait(number[e.waiting[both]], number[e.after[both]], lag=e.lags[both])
    for table, verb in ((graph.drained, edit.drain), (graph.held, edit.hold)):
        rows = number[table.task] != NONE
        if rows.any():
            verb(number[table.task[rows]], table.lane[rows])
    rows = number[graph.used.task] != NONE
    if rows.any():
        edit.use(number[graph.used.task[rows]], graph.used.link[rows], graph.used.demand[rows])


def _add_up(edit: Edit, rank: int, times: int, rate: float) -> None:
    """Adding gradients to those of the passes before, ahead of the update."""
    found = _gradients_of(edit.before, rank)
    if found is None or _adds_already(edit.before, found):
        return
    seconds = len(found) * KERNEL + 3 * float(found.bytes.sum()) / rate
    kernel, call = first_of_update(edit.before, rank)
    lane = compute_lane(edit.before, rank)
    ahead: dict[str, Any] = {"issued_before": np.full(times, kernel)} if kernel != NONE else {}
    new = edit.insert(
        times, kind="kernel", op="add_", name="gradients of all passes", rank=rank, lane=lane,
        seconds=seconds, phase="backward", source="formula", **ahead,
    )  # fmt: skip
    if call != NONE:
        host = edit.insert(
            issued_before=np.full(times, call), kind="host", op="add_", rank=rank,
            lane=edit.before.lane[call], phase="backward",
            seconds=len(found) * host_op(edit.before, rank),
        )  # fmt: skip
        edit.wait(new, host, kind="launch")


def _gradients_of(graph: Graph, rank: int) -> Gradients | None:
    try:
        return next((g for g in gradients(graph) if g.rank == rank), None)
    except DoesNotApply:
        return None  # nothing is known of them: then nothing is added for them


def _adds_already(graph: Graph, found: Gradients) -> bool:
    """Whether autograd adds to gradients now: its visits launch `add_` then."""
    added = np.isin(graph.op, graph.names.matching("add_"))
    visited = np.isin(graph.name, graph.names.matching("AccumulateGrad"))
    return bool((added & visited & (graph.rank == found.rank)).any())
