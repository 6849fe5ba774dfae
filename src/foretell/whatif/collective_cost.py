"""What a collective of so many ranks would take, from the best that is known of their links.

Asked in this order:

    the cluster named with the what-if       `foretell.cost.collective`
    collectives that the step came with      seconds = START + wire·bytes/B, B fitted to them
    the device named in the trace            the node it is usually sold in, so many of them
    collectives that a what-if has put in    as those the step came with

`wire` is what a ring sends over the slowest link per byte of the tensor: 2(n−1)/n of an all-reduce,
(n−1)/n of an all-gather or reduce-scatter. A what-if that changes the network leaves that as facts
of the graph, `network_times` and `network_bandwidth`, and all later prices follow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from foretell.cluster import Cluster, Level, load
from foretell.cost.collective import price
from foretell.errors import InputError
from foretell.graph.graph import Array, Graph, Kind, Source, ranks_of
from foretell.whatif.base import Setting

# Seconds before the first byte moves: NCCL's launch and its first hops within a node; the constants
# of `cost/tables/collective.toml` for NVLink and PCIe lie between 8 and 25 µs.
START = 15e-6
SIGMA = 0.25  # of a law fitted to few collectives: the spread the shipped classes show
# A word in the device's name → the node it is usually sold in, all of eight devices.
NODES = {
    "b200": "dgx-b200",
    "h200": "dgx-h200",
    "h100": "dgx-h100",
    "a100": "dgx-a100",
    "v100": "dgx-1-v100",
    "p100": "dgx-1-p100",
}


@dataclass(frozen=True)
class Wires:
    """The links a group of ranks communicates over: a cluster, or one rate a rank."""

    cluster: Cluster | None
    bandwidth: float = 0.0  # bytes/s a rank sends while it receives as much, where no cluster is
    times: float = 1.0  # how many times as fast the outermost links are made
    named_bandwidth: float = 0.0  # bytes/s of the outermost links where the user named them, else 0

    def levels(self, ranks: tuple[int, ...]) -> tuple[Level, ...]:
        """The tiers these ranks meet on, innermost first, the outermost as fast as it is made."""
        assert self.cluster is not None
        if max(ranks) >= self.cluster.size:
            raise InputError(
                f"{max(ranks) + 1} ranks do not fit on `{self.cluster.name}`: "
                f"it has {self.cluster.size}",
                hint="name more of them, as in h200:gpus=8 or dgx-a100:nodes=2",
            )
        found = self.cluster.levels(ranks)
        if not found or (self.times == 1.0 and not self.named_bandwidth):
            return found
        outer = found[-1]
        speed = self.named_bandwidth or outer.bandwidth * self.times
        # The class of the links stays what it is; only their rate changes.
        return (*found[:-1], replace(outer, bandwidth=speed))

    def seconds(self, op: str, bytes: Array, ranks: tuple[int, ...]) -> Array:
        """What each message of a group costs from the moment the last rank is there."""
        if len(ranks) < 2:
            return np.zeros(len(bytes))
        if self.cluster is not None:
            return price(op, np.asarray(bytes, np.float64), self.levels(ranks)).seconds
        rate = self.named_bandwidth or self.bandwidth * self.times
        found: Array = START + wire(op, len(ranks)) * np.asarray(bytes, np.float64) / rate
        return found

    def sigma(self, op: str, bytes: Array, ranks: tuple[int, ...]) -> Array:
        """The relative standard error of those prices."""
        if self.cluster is None or len(ranks) < 2:
            return np.full(len(bytes), SIGMA)
        return price(op, np.asarray(bytes, np.float64), self.levels(ranks)).sigma


def wire(op: str, ranks: int) -> float:
    """Bytes on the busiest wire of a ring per byte of the tensor."""
    once = (ranks - 1) / ranks
    return {"all_reduce": 2 * once, "broadcast": 1.0, "reduce": 1.0, "send": 1.0}.get(op, once)


def wires(graph: Graph, setting: Setting, ranks: int) -> Wires:
    """The links of a step's ranks, from the best that is known."""
    times = float(graph.facts.get("network_times", 1.0))
    named_bandwidth = float(graph.facts.get("network_bandwidth", 0.0))
    if setting.cluster is not None:
        return Wires(setting.cluster, times=times, named_bandwidth=named_bandwidth)
    node, own = usual_node(graph), fitted(graph, Source.FORMULA)
    if node is not None and not own:
        return Wires(
            load(f"{node}:nodes={math.ceil(ranks / 8)}"),
            times=times,
            named_bandwidth=named_bandwidth,
        )
    rate = own or fitted(graph)
    if named_bandwidth or rate:
        return Wires(None, rate / times, times, named_bandwidth)
    raise InputError(
        "links between ranks are not named",
        hint="name the machines: --on dgx-a100, or any that `foretell show` knows",
    )


def fitted(graph: Graph, but: Source | None = None) -> float:
    """Bytes/s a rank reaches in the collectives of a step, 0 where there are none to tell.

    `but` leaves out those whose price has that source.
    """
    mine = (graph.kind == Kind.COLLECTIVE) & (graph.comm_bytes > 0)
    tasks = np.flatnonzero(mine if but is None else mine & (graph.source != but))
    moved = np.array([_on_the_wire(graph, int(i)) for i in tasks])
    took = np.maximum(graph.seconds[tasks] - START, 0.1 * graph.seconds[tasks])
    return float(moved.sum() / took.sum()) if len(tasks) and took.sum() > 0 else 0.0


def _on_the_wire(graph: Graph, task: int) -> float:
    size = len(ranks_of(graph.text_of("group", task))) or 2
    return wire(graph.text_of("op", task), max(size, 2)) * float(graph.comm_bytes[task])


def usual_node(graph: Graph) -> str | None:
    """The node that the device of a trace is usually sold in, None where it is unknown."""
    device = str(graph.facts.get("device", "")).lower()
    return next((node for word, node in NODES.items() if word in device), None)
