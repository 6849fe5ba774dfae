"""The same step on several devices, each with its own samples: gradients are averaged over ranks.

`foretell.whatif.gradients` finds what there is to exchange and when it is ready, `exchange` sends
it in buckets beside the backward pass, `wires` prices each all-reduce, `interference` slows what
runs at the same time, and `skew` lets all wait for the slowest. A step that is data-parallel
already is taken to another number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from foretell.errors import InputError
from foretell.graph.graph import Graph
from foretell.memory.tape import Tape
from foretell.whatif.base import Setting, WhatIf
from foretell.whatif.bucket_copies import memory_rate
from foretell.whatif.collective_cost import wires
from foretell.whatif.exchange import MIB, swap
from foretell.whatif.gradients import gradients
from foretell.whatif.memory_effect import with_buckets
from foretell.whatif.skew import SKEW


@dataclass(frozen=True)
class DataParallel(WhatIf):
    """Train on `ranks` devices, gradients averaged in buckets while the backward pass runs."""

    name = "data-parallel"
    assumes = (
        "every rank computes what this one does, on as many samples; steps of a rank spread by 2 %",
        "gradients are copied into buckets and back (gradient_as_bucket_view=False), as DDP does",
        "kernels and collectives that run at the same time slow each other by 18.9 %",
        "without --on: links as fast as the collectives in the step, else those of the DGX that "
        "the traced device is sold in",
    )
    source = "Li et al. 2020, PyTorch Distributed (VLDB); Daydream, section 5.4"
    code = "model = torch.nn.parallel.DistributedDataParallel(model)"
    ranks: int  # how many devices
    bucket_mb: float = 25.0  # MiB that close a bucket; the first is closed by one
    overlap: bool = True  # send while the backward pass runs, or only behind it
    skew: float = SKEW  # relative spread of a rank's step: all wait for the slowest

    def apply(self, graph: Graph, setting: Setting) -> Graph:
        check_ranks(self, self.ranks)
        if not 0 < self.bucket_mb < float("inf"):
            raise InputError(f"`{self}` has buckets of {self.bucket_mb} MiB", hint="use 25")
        if not 0 <= self.skew <= 1:
            raise InputError(f"`{self}` spreads by {self.skew}", hint="use 0 to 1")
        found = gradients(graph)
        links = wires(graph, setting, self.ranks)
        cap, group = self.bucket_mb * MIB, tuple(range(self.ranks))
        with graph.edit(str(self)) as edit:
            rate = memory_rate(graph, setting)
            swap(edit, found, cap, group, links, rate, overlap=self.overlap, skew=self.skew)
            edit.fact(bucket_mb=self.bucket_mb, overlap=self.overlap, skew=self.skew)
        return edit.graph

    def hold(self, tape: Tape) -> Tape:
        return with_buckets(tape)


def check_ranks(change: WhatIf, ranks: int) -> None:
    """Refuse a group of no or one rank: nothing to exchange anything with."""
    if ranks < 2 or ranks > 1 << 20:
        raise InputError(f"`{change}` has {ranks} ranks", hint="use 2 or more")
