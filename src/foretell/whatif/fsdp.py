"""Parameters, gradients and optimizer state sharded over ranks: ZeRO 1, 2, 3, the last as FSDP.

    zero=1   gradients all-reduced as in data-parallel; 1/n of the update; parameters all-gathered
    zero=2   gradients reduce-scattered; the rest as zero=1
    zero=3   each unit's parameters all-gathered before its forward and again before its backward,
             `prefetch` units ahead; its gradients reduce-scattered behind its backward

A unit is a run of layers whose parameters come to `unit_mb`. In zero=3 a gathered unit is copied
into place and its gradients into one buffer, a read and a write each. The last unit keeps its
parameters from forward to backward, as FSDP does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from foretell.errors import InputError
from foretell.graph.edit import Edit
from foretell.graph.graph import NONE, BufferKind, Graph, Kind, Phase, group_text
from foretell.memory.tape import Tape
from foretell.whatif.base import Setting, WhatIf
from foretell.whatif.batch import FLOOR
from foretell.whatif.bucket_copies import first_of_update, memory_rate
from foretell.whatif.collective_cost import Wires, wires
from foretell.whatif.data_parallel import check_ranks
from foretell.whatif.exchange import MIB, check_alike, comm_lane, swap
from foretell.whatif.gradients import Gradients, compute_lane, gradients
from foretell.whatif.memory_effect import sharded_tape, with_buckets
from foretell.whatif.sharding import sharded
from foretell.whatif.skew import SKEW, straggler_delay

SHARDED = {
    1: (BufferKind.OPTIMIZER,),
    2: (BufferKind.OPTIMIZER, BufferKind.GRADIENT),
    3: (BufferKind.OPTIMIZER, BufferKind.GRADIENT, BufferKind.PARAMETER),
}

_OPS = {1: "all_reduce", 2: "reduce_scatter"}


@dataclass(frozen=True)
class Fsdp(WhatIf):
    """Shard parameters, gradients and optimizer state over `ranks` devices."""

    name = "fsdp"
    assumes = (
        "every rank computes what this one does, on as many samples; steps of a rank spread by 2 %",
        "parameters are sent as they are kept; the optimizer's kernels do 1/ranks of their work",
        "kernels and collectives that run at the same time slow each other by 18.9 %",
    )
    source = "Rajbhandari et al. 2020, ZeRO (SC); Zhao et al. 2023, FSDP (VLDB)"
    code = "fully_shard(layer); fully_shard(model)"
    ranks: int  # how many devices
    zero: int = 3  # what is sharded: 1 optimizer state, 2 and gradients, 3 and parameters
    unit_mb: float = 25.0  # MiB of parameters gathered together (zero=3), or of a bucket
    prefetch: int = 1  # units gathered ahead of the one that computes
    skew: float = SKEW  # relative spread of a rank's step: all wait for the slowest

    def apply(self, graph: Graph, setting: Setting) -> Graph:
        check_ranks(self, self.ranks)
        if self.zero not in SHARDED or self.unit_mb <= 0 or self.prefetch < 0 or self.skew < 0:
            raise InputError(f"`{self}` is no way to shard", hint="zero is 1, 2 or 3")
        found = gradients(graph)
        check_alike(found)
        links, group = wires(graph, setting, self.ranks), tuple(range(self.ranks))
        rate = memory_rate(graph, setting)
        with graph.edit(str(self)) as edit:
            if self.zero == 3:
                cap, behind = self.unit_mb * MIB, straggler_delay(graph, self.ranks, self.skew)
                sharded(edit, found, cap, self.prefetch, group, links, rate, behind)
            else:
                swap(
                    edit,
                    found,
                    self.unit_mb * MIB,
                    group,
                    links,
                    rate,
                    op=_OPS[self.zero],
                    skew=self.skew,
                )
                _gathered_behind(edit, found, group, links)
            _smaller_update(edit, [side.rank for side in found], self.ranks)
        return _lighter(edit.graph, self.zero, self.ranks)

    def hold(self, tape: Tape) -> Tape:
        gathered = (1 + self.prefetch) * self.unit_mb * MIB if self.zero == 3 else 0.0
        kept = tape if self.zero == 3 else with_buckets(tape)
        return sharded_tape(kept, SHARDED[self.zero], self.ranks, gathered)


def _gathered_behind(
    edit: Edit, found: tuple[Gradients, ...], group: tuple[int, ...], links: Wires
) -> None:
    """All parameters gathered behind the update, before anything else computes."""
    graph, total = edit.before, found[0].bytes.sum(keepdims=True)
    sent = edit.insert(
        1, kind="collective", op="all_gather", name="parameters", phase="communicate",
        rank=found[0].rank, lane=comm_lane(edit, found[0].rank), comm_bytes=total,
        seconds=links.seconds("all_gather", total, group), group=group_text(group),
        source="formula",
    )  # fmt: skip
    for side in found:
        lane = compute_lane(graph, side.rank)
        edit.hold(sent, lane)
        if side.rank != found[0].rank:
            edit.hold(sent, comm_lane(edit, side.rank))
        on_lane = np.flatnonzero(graph.lane == lane)
        edit.wait(sent, int(on_lane[np.argmax(graph.order[on_lane])]), kind="event")


def _smaller_update(edit: Edit, ranks: list[int], times: int) -> None:
    """Let the optimizer's kernels do their share of the work."""
    graph = edit.before
    for rank in ranks:
        kernel, _ = first_of_update(graph, rank)
        if kernel == NONE:
            continue
        mine = (graph.phase == Phase.UPDATE) & (graph.kind == Kind.KERNEL) & (graph.rank == rank)
        tasks = np.flatnonzero(mine & (graph.order >= graph.order[kernel]))
        floor = np.minimum(graph.seconds[tasks], FLOOR)
        edit.set(tasks, seconds=floor + (graph.seconds[tasks] - floor) / times)


def _lighter(graph: Graph, zero: int, ranks: int) -> Graph:
    """The graph with the memory of what is sharded."""
    b = graph.buffers
    if not len(b):
        return graph
    share = np.where(np.isin(b.kind, SHARDED[zero]), 1.0 / ranks, 1.0)
    return replace(graph, buffers=b.replace(bytes=b.bytes * share))
