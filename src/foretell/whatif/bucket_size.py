"""Gradients sent in buckets of another size.

The exchange that is there is taken out and made anew (`foretell.whatif.exchange`): fewer, larger
buckets pay less latency and start later; smaller ones the other way round.
"""

from __future__ import annotations

from dataclasses import dataclass

from foretell.errors import InputError
from foretell.graph.graph import Graph
from foretell.whatif.base import Setting, WhatIf
from foretell.whatif.bucket_copies import memory_rate
from foretell.whatif.collective_cost import wires
from foretell.whatif.exchange import MIB, check_whole, exchanging_ranks, group_of, swap
from foretell.whatif.gradients import gradients


@dataclass(frozen=True)
class BucketSize(WhatIf):
    """Send gradients in buckets of `mb` MiB."""

    name = "bucket-size"
    assumes = (
        "buckets are filled in the order gradients are ready; the first is closed by 1 MiB",
        "gradients that the trace shows only inside a bucket stay together",
    )
    source = "Li et al. 2020, PyTorch Distributed (VLDB), section 3.2"
    code = "DistributedDataParallel(model, bucket_cap_mb=…)"
    mb: float  # MiB that close a bucket

    def apply(self, graph: Graph, setting: Setting) -> Graph:
        if not 0 < self.mb < float("inf"):
            raise InputError(f"`{self}` has buckets of {self.mb} MiB", hint="use more than 0")
        check_whole(graph)
        old = exchanging_ranks(graph, op="all_reduce")
        group, found = group_of(graph, old), gradients(graph)
        links, rate = wires(graph, setting, len(group)), memory_rate(graph, setting)
        overlap = bool(graph.facts.get("overlap", True))
        with graph.edit(str(self)) as edit:
            skew = float(graph.facts.get("skew", 0.0))
            swap(edit, found, self.mb * MIB, group, links, rate, overlap=overlap, skew=skew)
            edit.fact(bucket_mb=self.mb)
        return edit.graph
