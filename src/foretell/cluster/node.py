"""One kind of machine: its devices, and the wires between them and out to the network.

A node is a small graph. Vertices are devices first (in slot order), then NVSwitches, PCIe
switches, CPU sockets and NICs. Devices do not pass on other devices' traffic unless the node says
so (`forwards`): what NVLink does not join directly goes over PCIe, as it does in the machine.
Every question is answered once per kind of node and remembered, however many nodes a cluster has.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

from foretell.cluster.device import Device
from foretell.cluster.link import DIRECT, Link
from foretell.cluster.paths import Wires, flow, spread, widest
from foretell.cluster.ring_order import chain, ring

Slots = tuple[int, ...]
Path = tuple[int, ...]  # link numbers, in order
Paths = dict[int, Path]  # by the vertex they end at


@dataclass(frozen=True)
class Spread:
    """How well some devices of one node can communicate among themselves."""

    kind: str
    bandwidth: float
    latency: float
    channels: int


@dataclass(frozen=True)
class Exit:
    """How some devices of one node reach the network together."""

    bandwidth: float
    latency: float
    channels: int


@dataclass(frozen=True)
class Node:
    """A kind of machine."""

    name: str
    title: str
    devices: tuple[Device, ...]  # by slot
    vertices: Mapping[str, str]  # name -> kind, devices first: device0, device1, …
    links: tuple[Link, ...]  # inside the node
    nics: tuple[Link, ...] = ()  # from each NIC vertex out: `b` is empty
    forwards: bool = False  # devices pass on each other's traffic
    rack: int = 0  # nodes that usually share a leaf switch, 0 where unknown
    hop: float = 0.0  # seconds a switch of its network takes
    host_memory: float = 0.0  # bytes
    price: float = 0.0  # money per hour for the whole node, 0 where unknown
    sources: Mapping[str, str] = field(default_factory=dict)
    _orders: dict[tuple[Slots, bool], Slots] = field(
        default_factory=dict, repr=False, compare=False
    )
    _ways: dict[int, Paths] = field(default_factory=dict, repr=False, compare=False)
    _nearest: dict[int, int] = field(default_factory=dict, repr=False, compare=False)
    _spreads: dict[Slots, Spread] = field(default_factory=dict, repr=False, compare=False)
    _exits: dict[Slots, Exit] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def index(self) -> dict[str, int]:
        """The number of each vertex."""
        return {name: i for i, name in enumerate(self.vertices)}

    @cached_property
    def wires(self) -> Wires:
        """The links as a graph of vertex numbers."""
        return Wires(
            len(self.vertices),
            tuple((self.index[k.a], self.index[k.b]) for k in self.links),
            tuple(k.bandwidth for k in self.links),
            tuple(k.latency for k in self.links),
        )

    @cached_property
    def closed(self) -> frozenset[int]:
        """The vertices that traffic of others may not pass."""
        return frozenset() if self.forwards else frozenset(range(len(self.devices)))

    def path(self, slot: int, vertex: int) -> Path | None:
        """The links from a device to a vertex, in order; None where there is no way."""
        if slot not in self._ways:
            self._ways[slot] = widest(self.wires, slot, self.closed)
        return self._ways[slot].get(vertex)

    def bandwidth(self, path: Path | None) -> float:
        """The narrowest link of a path; 0 where there is no path."""
        return 0.0 if path is None else min((self.links[k].bandwidth for k in path), default=inf)

    def latency(self, path: Path | None) -> float:
        """The sum of the latencies along a path."""
        return sum(self.links[k].latency for k in path or ())

    def order(self, slots: Slots, *, closed: bool) -> Slots:
        """The best ring over these devices, or the best chain."""
        if (slots, closed) not in self._orders:
            width = [[self.bandwidth(self.path(a, b)) for b in slots] for a in slots]
            delay = [[self.latency(self.path(a, b)) for b in slots] for a in slots]
            best = (ring if closed else chain)(width, delay)
            self._orders[slots, closed] = tuple(slots[i] for i in best)
        return self._orders[slots, closed]

    def nic(self, slot: int) -> int:
        """The NIC a device uses: the widest way out, then the quickest; equals are split by slot.

        -1 where it reaches none.
        """
        if slot not in self._nearest:
            ways = self._ways_out(slot)
            equals = [i for i, way in ways.items() if way == min(ways.values())]
            self._nearest[slot] = equals[slot % len(equals)] if equals else -1
        return self._nearest[slot]

    def _ways_out(self, slot: int) -> dict[int, tuple[float, float]]:
        ways = {}
        for i, out in enumerate(self.nics):
            path = self.path(slot, self.index[out.a])
            if path is not None:
                width = min(self.bandwidth(path), out.bandwidth)
                ways[i] = (-width, self.latency(path) + out.latency)
        return ways

    def spread(self, slots: Slots) -> Spread:
        """What the slowest of these devices can send to the others while it receives as much."""
        if slots not in self._spreads:
            self._spreads[slots] = self._spread(slots)
        return self._spreads[slots]

    def _spread(self, slots: Slots) -> Spread:
        absent = set(range(len(self.devices))) - set(slots)
        direct = {i for i, k in enumerate(self.links) if k.kind in DIRECT}
        bandwidth = spread(self.wires, slots, links=direct, absent=absent)
        if not bandwidth:  # NVLink or xGMI does not join them all: the host's wires must help
            bandwidth = spread(self.wires, slots, absent=absent)
        used = self._ring_paths(slots)
        slowest = min((self.links[k] for path in used for k in path), key=lambda k: k.bandwidth)
        latency = max(map(self.latency, used))
        return Spread(slowest.kind, bandwidth, latency, max(1, round(bandwidth / slowest.each)))

    def _ring_paths(self, slots: Slots) -> list[Path]:
        order = self.order(slots, closed=True)
        pairs = zip(order, order[1:] + order[:1], strict=True)
        return [self.path(a, b) or () for a, b in pairs if a != b]

    def ring_load(self, slots: Slots) -> Counter[tuple[int, int]]:
        """How often the ring over these devices uses each wire in each direction."""
        load: Counter[tuple[int, int]] = Counter()
        order = self.order(slots, closed=True)
        for here, path in zip(order, self._ring_paths(slots), strict=False):
            for k in path:
                a, b = self.wires.ends[k]
                load[k, here == b] += 1
                here = a if here == b else b
        return load

    def exit(self, slots: Slots) -> Exit:
        """What these devices can send out together, over every NIC, passing data among them."""
        if slots not in self._exits:
            self._exits[slots] = self._exit(slots)
        return self._exits[slots]

    def _exit(self, slots: Slots) -> Exit:
        outside = self.wires.size
        wires = Wires(
            outside + 1,
            self.wires.ends + tuple((self.index[k.a], outside) for k in self.nics),
            self.wires.bandwidth + tuple(k.bandwidth for k in self.nics),
            self.wires.latency + tuple(k.latency for k in self.nics),
        )
        absent = set(range(len(self.devices))) - set(slots)
        bandwidth = flow(wires, slots, [outside], absent=absent)
        each = min(k.bandwidth for k in self.nics)
        latency = max(self._ways_out(s)[self.nic(s)][1] for s in slots)
        return Exit(bandwidth, latency, max(1, round(bandwidth / each)))

    def host(self, slot: int) -> Path:
        """The links from a device to the nearest CPU socket; empty where there is none."""
        cpus = [i for i, kind in enumerate(self.vertices.values()) if kind == "cpu"]
        paths = [p for p in (self.path(slot, c) for c in cpus) if p is not None]
        return min(paths, key=lambda p: (-self.bandwidth(p), self.latency(p)), default=())
