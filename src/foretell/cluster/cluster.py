"""The machines: which devices, on which nodes, joined by which links.

A cluster is kept folded: kinds of node with a count, tiers of switches, and for each rank the node
and slot it runs on. Everything else — routes, levels, rings, the expanded graph — is worked out
when asked, once per kind of node, and remembered; thirty thousand ranks cost what one node costs.
A cluster never changes. Two are equal when everything that could change a prediction is.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from foretell.cluster import levels as tiers_of
from foretell.cluster import order, topology
from foretell.cluster.calibration import PLAIN, Calibration
from foretell.cluster.device import Device
from foretell.cluster.fabric import Fabric, Switch, Tier, drawn, tiered
from foretell.cluster.level import Level
from foretell.cluster.link import Link
from foretell.cluster.node import Node
from foretell.cluster.order import Tree
from foretell.cluster.topology import Layout, Topology, expand, layout
from foretell.errors import InputError

Ints = NDArray[np.int64]

MOST_KEPT = 4096  # groups whose levels are remembered: a search asks for the same few again


@dataclass(frozen=True, eq=False)
class Cluster:
    """Devices and links, rank by rank. Made by `foretell.cluster.load`."""

    name: str
    groups: tuple[tuple[Node, int], ...]  # kinds of node and how many of each, in node order
    nodes: Ints  # rank -> node
    slots: Ints  # rank -> slot of its device on that node
    tiers: tuple[Tier, ...] = ()  # how switches join the nodes, or else
    switches: tuple[Switch, ...] = ()  # the switches one by one
    title: str = ""
    calibration: Calibration = PLAIN  # how it really runs, where that was measured
    _ways: dict[tuple[int, ...], tuple[float, float]] = field(default_factory=dict, repr=False)
    _levels: dict[object, tuple[Level, ...]] = field(default_factory=dict, repr=False)

    @property
    def size(self) -> int:
        """How many ranks it has."""
        return len(self.nodes)

    @cached_property
    def num_nodes(self) -> int:
        """How many nodes its ranks stand on."""
        return len(np.unique(self.nodes))

    @cached_property
    def kinds(self) -> Ints:
        """Node -> which of `groups` it belongs to."""
        return np.repeat(np.arange(len(self.groups)), [count for _, count in self.groups])

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """The device of each rank."""
        rows = [node.devices for node, _ in self.groups]
        of = self.kinds[self.nodes].tolist()
        return tuple(rows[k][s] for k, s in zip(of, self.slots.tolist(), strict=True))

    @cached_property
    def fabric(self) -> Fabric:
        """The network between its nodes."""
        if self.switches:
            return drawn(self.groups, self.switches)
        return tiered(self.groups, self.tiers or (Tier("switch"),))

    @cached_property
    def layout(self) -> Layout:
        """The numbering of the vertices and links of `graph`."""
        return layout(self)

    @cached_property
    def graph(self) -> Topology:
        """Every vertex and link, expanded."""
        return expand(self)

    def node(self, rank: int) -> Node:
        """The kind of node a rank runs on."""
        return self.groups[int(self.kinds[self.nodes[rank]])][0]

    def devices_by_kind(self) -> dict[str, Ints]:
        """The ranks of each kind of device, by its name."""
        names = np.array([device.name for device in self.devices])
        return {str(name): np.flatnonzero(names == name) for name in dict.fromkeys(names.tolist())}

    def route(self, a: int, b: int) -> tuple[Link, ...]:
        """The links a message from rank `a` to rank `b` travels, in order."""
        self._check((a, b))
        return topology.route(self, a, b)

    def bandwidth(self, a: int, b: int) -> float:
        """Bytes/s of the narrowest link between two ranks, with nothing else on the way."""
        return self._way(a, b)[0]

    def latency(self, a: int, b: int) -> float:
        """Seconds an empty message takes from one rank to another."""
        return self._way(a, b)[1]

    def _way(self, a: int, b: int) -> tuple[float, float]:
        self._check((a, b))
        key = topology.key(self, a, b)
        if key not in self._ways:
            links = topology.route(self, a, b)
            self._ways[key] = (min(k.bandwidth for k in links), sum(k.latency for k in links))
        return self._ways[key]

    def host_bandwidth(self, rank: int) -> float:
        """Bytes/s between a rank's device and its host's memory, each way."""
        node, slot = self.node(rank), int(self.slots[rank])
        path = node.host(slot)
        return node.bandwidth(path) if path else node.devices[slot].memory_bandwidth

    def levels(
        self, ranks: Iterable[int], beside: Iterable[Iterable[int]] = ()
    ) -> tuple[Level, ...]:
        """What a collective over these ranks sees, innermost tier first.

        `beside` are other groups that communicate at the same time: links are then shared fairly.
        """
        group, others = self._check(ranks), tuple(self._check(g) for g in beside)
        key = (group, others)
        if len(self._levels) >= MOST_KEPT:
            self._levels.clear()
        if key not in self._levels:
            self._levels[key] = self.calibration.levels(tiers_of.levels(self, group, others))
        return self._levels[key]

    def ring(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """An order of the ranks whose narrowest step is as wide as can be."""
        return order.ring(self, self._check(ranks))

    def tree(self, ranks: Iterable[int]) -> tuple[Tree, Tree]:
        """Two trees over the ranks: binary between nodes, a chain inside each."""
        return order.tree(self, self._check(ranks))

    def _check(self, ranks: Iterable[int]) -> tuple[int, ...]:
        group = tuple(int(r) for r in ranks)
        if not group:
            raise InputError("no ranks were given", hint=f"`{self.name}` has 0 … {self.size - 1}")
        low, high = min(group), max(group)
        if low < 0 or high >= self.size:
            rank = low if low < 0 else high
            raise InputError(
                f"rank {rank} is not in `{self.name}`", hint=f"it has ranks 0 … {self.size - 1}"
            )
        return group

    def subset(self, ranks: Iterable[int]) -> "Cluster":
        """The same machines with only these ranks; rank i of the result is `ranks[i]` here."""
        group = self._check(ranks)
        if len(set(group)) < len(group):
            raise InputError(
                f"a rank is named twice in a subset of `{self.name}`", hint="name each once"
            )
        pick = np.array(group)
        return replace(self, nodes=self.nodes[pick], slots=self.slots[pick], _ways={}, _levels={})

    def calibrated(self, calibration: Calibration) -> "Cluster":
        """The same machines, as they were measured to run."""
        return replace(self, calibration=calibration, _ways={}, _levels={})

    @cached_property
    def price(self) -> float:
        """Money per hour for the nodes in use, 0 where any price is unknown."""
        used = np.bincount(self.kinds[np.unique(self.nodes)], minlength=len(self.groups))
        prices = [node.price or sum(d.price for d in node.devices) for node, _ in self.groups]
        known = all(p for p, n in zip(prices, used, strict=True) if n)
        return sum(p * int(n) for p, n in zip(prices, used, strict=True)) if known else 0.0

    def fingerprint(self) -> str:
        """A hash of all that could change a prediction: not of names, titles or sources."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        from foretell.cluster.write import fingerprint

        return fingerprint(self)

    def text(self) -> str:
        """A file that reads back as the same cluster."""
        from foretell.cluster.write import text

        return text(self)

    def describe(self) -> str:
        """What is in it, for a reader."""
        from foretell.cluster.write import describe

        return describe(self)

    def __str__(self) -> str:
        return self.describe()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cluster) and self.fingerprint() == other.fingerprint()

    def __hash__(self) -> int:
        return hash(self.fingerprint())


def of(
    name: str,
    groups: Sequence[tuple[Node, int]],
    *,
    tiers: Sequence[Tier] = (),
    switches: Sequence[Switch] = (),
    title: str = "",
) -> Cluster:
    """A cluster with a rank on every device, node by node, slot by slot."""
    counts = np.repeat([len(node.devices) for node, _ in groups], [n for _, n in groups])
    nodes = np.repeat(np.arange(len(counts)), counts)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    return Cluster(
        name,
        tuple(groups),
        nodes,
        np.arange(len(nodes)) - starts,
        tuple(tiers),
        tuple(switches),
        title,
    )
