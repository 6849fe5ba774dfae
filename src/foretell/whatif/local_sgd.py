"""Local SGD: ranks train by themselves and average their parameters every so many steps.

The exchange of gradients goes. Behind the optimizer the parameters are averaged, in one all-reduce
that nothing overlaps; the step bears its share of it, 1/`every`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretell.errors import InputError
from foretell.graph.edit import Edit
from foretell.graph.graph import Graph, Ids, Kind, group_text
from foretell.whatif.base import DoesNotApply, Setting, WhatIf
from foretell.whatif.collective_cost import wires
from foretell.whatif.data_parallel import check_ranks
from foretell.whatif.exchange import CALL, check_alike, comm_lane, group_of, take_out
from foretell.whatif.gradients import compute_lane, exchanged, gradients


@dataclass(frozen=True)
class LocalSgd(WhatIf):
    """Average parameters every `every` steps instead of gradients every step."""

    name = "local-sgd"
    assumes = (
        "a step bears its share of an average that nothing overlaps",
        "the model still learns as well when ranks drift apart in between",
    )
    source = "Stich 2019, Local SGD (ICLR); torch PostLocalSGDOptimizer"
    code = "PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(period=…))"
    every: int = 8  # steps between two averages
    ranks: int = 0  # how many devices; 0: those that exchange gradients now

    def apply(self, graph: Graph, setting: Setting) -> Graph:
        if self.every < 1:
            raise InputError(f"`{self}` averages every {self.every} steps", hint="use 1 or more")
        group = tuple(range(self.ranks)) if self.ranks else group_of(graph, exchanged(graph))
        if not group:
            raise DoesNotApply("the step is of one rank", hint="say how many: local-sgd:ranks=8")
        check_ranks(self, len(group))
        found = gradients(graph)
        check_alike(found)
        links = wires(graph, setting, len(group))
        total = found[0].bytes.sum(keepdims=True)
        took = float(links.seconds("all_reduce", total, group)[0]) / self.every
        with graph.edit(str(self)) as edit:
            take_out(edit, copies=True)
            sent = edit.insert(
                1, kind="collective", op="all_reduce", name="parameters", phase="communicate",
                rank=found[0].rank, lane=comm_lane(edit, found[0].rank), seconds=took,
                comm_bytes=total, group=group_text(group), source="formula",
            )  # fmt: skip
            for side in found:
                self._behind(edit, side.rank, sent, side.rank != found[0].rank)
        return edit.graph

    def _behind(self, edit: Edit, rank: int, sent: Ids, further: bool) -> None:
        graph, lane = edit.before, compute_lane(edit.before, rank)
        lanes = [lane, comm_lane(edit, rank)] if further else [lane]
        edit.hold(np.full(len(lanes), sent[0]), np.array(lanes))
        on_lane = np.flatnonzero(graph.lane == lane)
        edit.wait(sent, int(on_lane[np.argmax(graph.order[on_lane])]), kind="event")
        host = np.flatnonzero((graph.rank == rank) & (graph.kind == Kind.HOST))
        if len(host):
            last = int(host[np.argmax(graph.order[host])])
            call = edit.insert(
                1, issued_after=last, kind="host", op="all_reduce", rank=rank, phase="update",
                lane=graph.lane[last], seconds=CALL / self.every,
            )  # fmt: skip
            edit.wait(sent, call, kind="launch")
