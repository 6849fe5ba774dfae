"""Faster or slower links between ranks.

Each collective keeps what it takes now, measured or priced, times what the price of its message
becomes over what it is; the start of a message does not change. The outermost links its ranks meet
on change: the network where they stand on several nodes, else those inside the node.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from foretell.errors import InputError
from foretell.graph.graph import Array, Graph, Ids, Kind, ranks_of
from foretell.whatif.base import DoesNotApply, Setting, WhatIf
from foretell.whatif.collective_cost import START, Wires, wires


@dataclass(frozen=True)
class Network(WhatIf):
    """Make the links between ranks `times` as fast, or give them `bandwidth` GB/s."""

    name = "network"
    source = "Daydream (Zhu et al., ATC 2020); links by rate (docs/decisions/0004)"
    assumes = ("only the rate of the outermost links changes; a message starts as late as before",)
    times: float = 2.0  # how many times as fast
    bandwidth: float = 0.0  # GB/s one rank sends while it receives as much; instead of `times`

    def apply(self, graph: Graph, setting: Setting) -> Graph:
        if not 0 < self.times < float("inf") or not 0 <= self.bandwidth < float("inf"):
            raise InputError(f"`{self}` has links of no speed", hint="use more than 0")
        is_message = np.isin(graph.kind, (Kind.COLLECTIVE, Kind.SEND)) & (graph.comm_bytes > 0)
        tasks = np.flatnonzero(is_message)
        if not len(tasks):
            raise DoesNotApply(
                "nothing is communicated in this step", hint="put data-parallel:ranks=8 before it"
            )
        now = wires(graph, setting, _largest(graph, tasks))
        then = self._changed(now)
        with graph.edit(str(self)) as edit:
            edit.scale(tasks, np.array([_ratio(graph, int(i), now, then) for i in tasks]))
            edit.fact(network_times=then.times, network_bandwidth=then.named_bandwidth)
        return edit.graph

    def _changed(self, now: Wires) -> Wires:
        if self.bandwidth:
            return replace(now, named_bandwidth=self.bandwidth * 1e9, times=1.0)
        if now.named_bandwidth:
            return replace(now, named_bandwidth=now.named_bandwidth * self.times)
        return replace(now, times=now.times * self.times)


def _largest(graph: Graph, tasks: Ids) -> int:
    return max(len(ranks_of(graph.text_of("group", int(i)))) for i in tasks)


def _ratio(graph: Graph, task: int, now: Wires, then: Wires) -> float:
    """What becomes of the time of one message."""
    group = ranks_of(graph.text_of("group", task))
    if len(group) < 2:
        group = (0, 1)
    if graph.kind[task] == Kind.SEND:
        seconds, start = float(graph.seconds[task]), min(START, float(graph.seconds[task]))
        faster = _rate(then, group) / _rate(now, group)
        return (start + (seconds - start) / faster) / seconds if seconds else 1.0
    size: Array = graph.comm_bytes[[task]]
    op = graph.text_of("op", task)
    return float(then.seconds(op, size, group)[0] / now.seconds(op, size, group)[0])


def _rate(links: Wires, group: tuple[int, ...]) -> float:
    if links.cluster is not None:
        return links.levels(group)[-1].bandwidth
    return links.named_bandwidth or links.bandwidth * links.times
