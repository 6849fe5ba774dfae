"""Gradients sent while the backward pass runs, or only behind it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretell.graph.graph import Graph, Ids, Kind, Phase
from foretell.whatif.base import DoesNotApply, Setting, WhatIf
from foretell.whatif.bucket_copies import memory_rate
from foretell.whatif.collective_cost import wires
from foretell.whatif.exchange import MIB, check_whole, exchanging_ranks, group_of, swap
from foretell.whatif.gradients import gradients


@dataclass(frozen=True)
class Overlap(WhatIf):
    """Send gradients beside the backward pass (`on=yes`) or behind it (`on=no`)."""

    name = "overlap"
    assumes = (
        "nothing but the moment changes at which gradients are sent; buckets are those of DDP",
    )
    source = "Li et al. 2020, PyTorch Distributed (VLDB), section 3.2.3"
    code = "with model.no_sync(): …   # then one all_reduce a bucket"
    on: bool = True  # whether they overlap

    def apply(self, graph: Graph, setting: Setting) -> Graph:
        check_whole(graph)
        old = exchanging_ranks(graph)
        last = [_last_backward(graph, rank) for rank in _ranks(graph)]
        is_late = bool((graph.order[old] > graph.order[last].max()).all())
        if self.on == (not is_late):
            how = "while" if self.on else "only after"
            raise DoesNotApply(f"gradients are sent {how} the backward pass runs already")
        if self.on:
            return self._early(graph, setting, old)
        with graph.edit(str(self)) as edit:
            waiting, after = _too_early(graph, old, int(graph.order[last].max()))
            edit.release(waiting, after)
            edit.reorder(old, after=np.full(len(old), max(last, key=lambda i: graph.order[i])))
            for task in last:
                edit.wait(old, task, kind="control")
            edit.fact(overlap=False)
        return edit.graph

    def _early(self, graph: Graph, setting: Setting, old: Ids) -> Graph:
        found, group = gradients(graph), group_of(graph, old)
        if found[0].source == "collectives":
            raise DoesNotApply("the step does not say when the gradients of each bucket are ready")
        cap = float(graph.facts.get("bucket_mb", 25.0)) * MIB
        links, rate = wires(graph, setting, len(group)), memory_rate(graph, setting)
        with graph.edit(str(self)) as edit:
            swap(edit, found, cap, group, links, rate, skew=float(graph.facts.get("skew", 0.0)))
            edit.fact(overlap=True)
        return edit.graph


def _too_early(graph: Graph, old: Ids, place: int) -> tuple[Ids, Ids]:
    """Waits of tasks that are issued before the gradients will be sent."""
    e = graph.edges
    mine = np.isin(e.after, old) & (graph.order[e.waiting] <= place)
    return e.waiting[mine].astype(np.int64), e.after[mine].astype(np.int64)


def _ranks(graph: Graph) -> list[int]:
    found: list[int] = np.unique(graph.rank[graph.phase == Phase.BACKWARD]).tolist()
    return found


def _last_backward(graph: Graph, rank: int) -> int:
    """The last device task of a rank's backward pass."""
    on_device = np.isin(graph.kind, (Kind.KERNEL, Kind.COPY))
    tasks = np.flatnonzero((graph.phase == Phase.BACKWARD) & (graph.rank == rank) & on_device)
    if not len(tasks):
        raise DoesNotApply(f"rank {rank} has no kernels of a backward pass")
    return int(tasks[np.argmax(graph.order[tasks])])
