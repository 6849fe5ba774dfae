"""A cluster: machines, and the network between them.

The network between nodes, and every vertex and link of a cluster in columns.

Vertices: those of node 0, node 1, …, then the switches. Links: those inside node 0, node 1, …,
then one for every NIC (to its switch), then those between switches. Half the latency of a switch is
counted in each link that ends there, so that the latencies along a route add up.

The network between nodes: switches, the links that join them, and what hangs on each. A person
describes it in one of two ways: as tiers of equal switches (`Tier`: leaf, rack, spine; each may be
oversubscribed) or switch by switch (`Switch`, any graph). Both become a `Fabric`: a graph of
switches in which all parallel uplinks of a switch are one fat link, and groupings of nodes,
innermost first, each with what a group can send to the rest.

The machines as values: devices, links, kinds of node, clusters, and factors learned from
runs.

A cluster is kept folded: kinds of node with a count, tiers of switches, and for each rank the node
and slot it runs on. Everything else — routes, levels, rings, the expanded graph — is worked out
when asked, once per kind of node, and remembered; thirty thousand ranks cost what one node costs.
A cluster never changes. Two are equal when everything that could change a prediction is.

How a cluster really runs: factors on what is priced, learned from runs (`foretell fit`).

    kernels    compute              host work          host
    optimizer  compute · update     on a CPU many passes over memory, where one is priced
    messages   `comm` · alpha       before the first byte and at each hop
               `comm` · inside      a byte inside a node
               `comm` · beta        a byte between nodes
    families   of op (gemm, conv, norm …), each a factor beside `compute`
    messages   collectives as they were measured, in place of their price: start + bytes · slope

A factor says how many times as long as priced something takes; 1 where that was not measured. A
cluster carries its calibration: whatever prices work on it gets the factors with it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import combinations
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretell.cluster import node as levels
from foretell.cluster.node import (
    KINDS,
    VERTICES,
    Device,
    Level,
    Link,
    Message,
    Node,
    Wires,
    quickest,
)
from foretell.errors import InputError, unknown
from foretell.io import read_json

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


_MOST_WIRES = 1 << 20  # side by side, where an uplink is many times as fast as a NIC


@dataclass(frozen=True)
class Tier:
    """Equal switches that each join `size` of what is below them: nodes, or the last tier's."""

    name: str
    size: int = 0  # 0: one switch joins them all
    oversubscription: float = 1.0  # bandwidth coming up from below, over bandwidth going on up
    uplink: float = 0.0  # bytes/s going on up, instead of a ratio
    latency: float = 0.0  # seconds to pass a switch


@dataclass(frozen=True)
class Switch:
    """One switch of a network drawn by hand."""

    name: str
    nodes: tuple[int, ...] = ()  # whose NICs it serves; a node on several switches deals them out
    links: tuple[Link, ...] = ()  # to other switches: `a` is this one
    latency: float = 0.0


@dataclass(frozen=True)
class Grouping:
    """Which nodes stand together, and what each group can send to the rest."""

    name: str
    group: Ints  # node -> group
    out: Floats  # group -> bytes/s


@dataclass(frozen=True)
class Fabric:
    """Switches as a graph, and where every NIC is plugged in."""

    names: tuple[str, ...]
    latency: Floats  # of passing each switch
    links: tuple[Link, ...]  # between switches, by name; passing the switches not included
    home: Ints  # NIC, counted through all nodes -> switch
    first: Ints  # node -> its first NIC
    groupings: tuple[Grouping, ...]  # innermost first; the last has one group
    tree: bool = False  # link k is the only one that leads up from switch k
    _paths: dict[int, dict[int, tuple[int, ...]]] = field(default_factory=dict, repr=False)

    @cached_property
    def wires(self) -> Wires:
        """The links with half the latency of the switch at either end: passing one counts once."""
        at = {name: i for i, name in enumerate(self.names)}
        ends = tuple((at[k.a], at[k.b]) for k in self.links)
        half = self.latency / 2
        latency = tuple(
            k.latency + float(half[a] + half[b]) for k, (a, b) in zip(self.links, ends, strict=True)
        )
        return Wires(len(self.names), ends, tuple(k.bandwidth for k in self.links), latency)

    def path(self, a: int, b: int) -> tuple[int, ...] | None:
        """The links between two switches by the quickest way; None where there is none."""
        if self.tree:
            return self._climb(a, b)
        if a not in self._paths:
            self._paths[a] = quickest(self.wires, a)
        return self._paths[a].get(b)

    def _climb(self, a: int, b: int) -> tuple[int, ...] | None:
        """Up from both until they meet: the lower tiers have the lower numbers."""
        up: list[int] = []
        down: list[int] = []
        while a != b:
            low, side = (a, up) if a < b else (b, down)
            if low >= len(self.links):
                return None  # two switches at the top
            side.append(low)
            a, b = (self.wires.ends[low][1], b) if a < b else (a, self.wires.ends[low][1])
        return (*up, *reversed(down))

    def delay(self, a: int, b: int) -> float:
        """Seconds from the port where a NIC enters switch `a` to the port where one leaves `b`."""
        ends = float(self.latency[a] + self.latency[b]) / 2
        return ends + sum(self.wires.latency[k] for k in self.path(a, b) or ())


def tiered(groups: Sequence[tuple[Node, int]], tiers: Sequence[Tier]) -> Fabric:
    """The fabric of equal switches in tiers; nodes fill them in order."""
    up, first = _fabric_nics(groups)
    below = np.arange(len(up))
    kind, each = _speech(groups)
    names: list[str] = []
    links: list[Link] = []
    latency: list[float] = []
    groupings: list[Grouping] = []
    for tier in tiers:
        parent = np.arange(len(up)) // (tier.size or len(up))
        total = np.bincount(parent, weights=up)
        if groupings:
            links += _uplinks(groupings[-1].name, tier.name, parent, up, kind, each)
        count = len(total)
        names += [f"{tier.name}{i}" for i in range(count)]
        latency += [tier.latency] * count
        up = np.full(count, tier.uplink) if tier.uplink else total / tier.oversubscription
        below = parent[below]
        groupings.append(Grouping(tier.name, below, np.full(1, inf) if count == 1 else up))
        if count == 1:
            break
    home = np.repeat(groupings[0].group, np.diff(np.append(first, _num_nics(groups))))
    return Fabric(
        tuple(names), np.array(latency), tuple(links), home, first, tuple(groupings), tree=True
    )


def _uplinks(
    lower: str, upper: str, parent: Ints, up: Floats, kind: str, each: float
) -> Iterable[Link]:
    for i, (p, bandwidth) in enumerate(zip(parent.tolist(), up.tolist(), strict=True)):
        count = max(1, round(min(bandwidth / each, _MOST_WIRES)))
        yield Link(f"{lower}{i}", f"{upper}{p}", kind, bandwidth / count, 0.0, count)


def drawn(groups: Sequence[tuple[Node, int]], switches: Sequence[Switch]) -> Fabric:
    """The fabric of switches drawn one by one."""
    _, first = _fabric_nics(groups)
    ends = np.append(first, _num_nics(groups))
    homes: dict[int, list[int]] = {}
    for s, switch in enumerate(switches):
        for node in switch.nodes:
            homes.setdefault(node, []).append(s)
    home = np.zeros(int(ends[-1]), dtype=np.int64)
    for node, at in homes.items():
        nics = range(int(ends[node]), int(ends[node + 1]))
        home[nics.start : nics.stop] = [at[i % len(at)] for i in range(len(nics))]
    links = tuple(link for switch in switches for link in switch.links)
    latency = np.array([switch.latency for switch in switches])
    bare = Fabric(tuple(s.name for s in switches), latency, links, home, first, ())
    node_homes = [tuple(homes.get(n, ())) for n in range(len(first))]
    groupings = tuple(_groupings(bare.wires, node_homes))
    return Fabric(bare.names, latency, links, home, first, groupings)


def _groupings(wires: Wires, homes: Sequence[tuple[int, ...]]) -> Iterable[Grouping]:
    """Nodes on the same switches first, then those ever more switches apart.

    What a group can send out is the sum of the links that leave its switches and those between.
    """
    places = sorted(set(homes))
    apart = [_hops(wires, place) for place in places]
    cluster = list(range(len(places)))
    distances = sorted({min(row[s] for s in p) for row in apart for p in places})
    for distance in distances:
        merged = _merged(places, apart, distance)
        if distance and merged == cluster:
            continue
        cluster = merged
        group = np.array([cluster[places.index(home)] for home in homes])
        single = max(cluster) == 0
        out = [inf] if single else _cuts(wires, places, apart, cluster, distance)
        yield Grouping(
            "switch" if not distance else f"switches within {distance}", group, np.array(out)
        )
        if single:
            return


def _hops(wires: Wires, place: Iterable[int]) -> list[int]:
    """How many links every switch is from a set of them."""
    far = [wires.size] * wires.size
    layer = set(place)
    distance = 0
    while layer:
        for v in layer:
            far[v] = distance
        distance += 1
        near = {w for v in layer for w, _ in wires.arcs[v]}
        layer = {w for w in near if far[w] == wires.size}
    return far


def _merged(places: Sequence[tuple[int, ...]], apart: Sequence[list[int]], limit: int) -> list[int]:
    """The number of the group of each place when those within `limit` links are joined."""
    group = list(range(len(places)))
    for i, row in enumerate(apart):
        for j, place in enumerate(places[:i]):
            if min(row[s] for s in place) <= limit and group[i] != group[j]:
                old, new = max(group[i], group[j]), min(group[i], group[j])
                group = [new if g == old else g for g in group]
    order = sorted(set(group))
    return [order.index(g) for g in group]


def _cuts(
    wires: Wires,
    places: Sequence[tuple[int, ...]],
    apart: Sequence[list[int]],
    cluster: Sequence[int],
    limit: int,
) -> list[float]:
    out = []
    for g in range(max(cluster) + 1):
        members = [i for i, c in enumerate(cluster) if c == g]
        inside = {s for i in members for s in places[i]} | {
            s
            for i, j in combinations(members, 2)
            for s in range(wires.size)
            if apart[i][s] + apart[j][s] <= limit
        }
        crossing = (k for k, (a, b) in enumerate(wires.ends) if (a in inside) != (b in inside))
        out.append(sum(wires.bandwidth[k] for k in crossing))
    return out


def _fabric_nics(groups: Sequence[tuple[Node, int]]) -> tuple[Floats, Ints]:
    """Total NIC bandwidth of each node, and the number of its first NIC."""
    counts = [n for _, n in groups]
    up = np.repeat([sum(k.bandwidth for k in node.nics) for node, _ in groups], counts)
    nics = np.repeat([len(node.nics) for node, _ in groups], counts)
    return up.astype(np.float64), np.concatenate([[0], np.cumsum(nics)[:-1]]).astype(np.int64)


def _num_nics(groups: Sequence[tuple[Node, int]]) -> int:
    return sum(len(node.nics) * count for node, count in groups)


def _speech(groups: Sequence[tuple[Node, int]]) -> tuple[str, float]:
    """The kind and bandwidth of the first NIC: what uplinks are made of."""
    for node, _ in groups:
        for nic in node.nics:
            return nic.kind, nic.bandwidth
    return "ethernet", inf


@dataclass(frozen=True)
class Layout:
    """Where each part of a cluster begins in the numbering of its vertices and links."""

    vertex: Ints  # node -> its first vertex
    link: Ints  # node -> its first link
    switch: int  # the first switch
    nic: int  # the link of the first NIC
    trunk: int  # the first link between switches


@dataclass(frozen=True)
class Topology:
    """A cluster as a graph, expanded."""

    kind: NDArray[np.uint8]  # of a vertex, in `link.VERTICES`
    node: Ints  # of a vertex; -1 for a switch
    ends: Ints  # links × 2
    link_kind: NDArray[np.uint8]  # in `link.KINDS`
    bandwidth: Floats  # bytes/s each way
    latency: Floats
    count: Ints
    device: Ints  # rank -> vertex

    @cached_property
    def csr(self) -> tuple[Ints, Ints, Ints]:
        """(start, neighbour, link): vertex v has neighbours `neighbour[start[v]:start[v + 1]]`."""
        links = np.arange(len(self.ends))
        source = np.concatenate([self.ends[:, 0], self.ends[:, 1]])
        target = np.concatenate([self.ends[:, 1], self.ends[:, 0]])
        by_source = np.lexsort((target, source))
        counts = np.bincount(source, minlength=len(self.kind))
        start = np.concatenate([[0], np.cumsum(counts)])
        return start, target[by_source], np.concatenate([links, links])[by_source]


def layout_of(cluster: Cluster) -> Layout:
    """The numbering of a cluster's vertices and links."""
    counts = [count for _, count in cluster.groups]
    vertices = np.repeat([len(node.vertices) for node, _ in cluster.groups], counts)
    links = np.repeat([len(node.links) for node, _ in cluster.groups], counts)
    nic = int(links.sum())
    return Layout(
        np.cumsum(vertices) - vertices,
        np.cumsum(links) - links,
        int(vertices.sum()),
        nic,
        nic + len(cluster.fabric.home),
    )


def expand(cluster: Cluster) -> Topology:
    """Copy every kind of node as often as it occurs and add the switches."""
    at, fabric = cluster.layout, cluster.fabric
    parts = [_inner(cluster, k) for k in range(len(cluster.groups))]
    ports = [_ports(cluster, k) for k in range(len(cluster.groups))]
    out = np.concatenate([rows for _, rows in ports])
    out[:, 2] += fabric.latency[fabric.home] / 2
    sources = np.concatenate([vertices for vertices, _ in ports])
    trunks = _rows(fabric.links)
    trunks[:, 2] = fabric.wires.latency
    parts.append((np.stack([sources, at.switch + fabric.home], axis=1), out))
    parts.append((at.switch + np.array(fabric.wires.ends, np.int64).reshape(-1, 2), trunks))
    kind, bandwidth, latency, count = np.concatenate([rows for _, rows in parts]).T.copy()
    vertices = [
        np.tile([VERTICES.index(v) for v in node.vertices.values()], n)
        for node, n in cluster.groups
    ]
    switches = np.full(len(fabric.names), VERTICES.index("switch"))
    sizes = np.diff(np.append(at.vertex, at.switch))
    return Topology(
        np.concatenate([*vertices, switches]).astype(np.uint8),
        np.concatenate([np.repeat(np.arange(len(sizes)), sizes), np.full(len(switches), -1)]),
        np.concatenate([ends for ends, _ in parts]),
        kind.astype(np.uint8),
        bandwidth,
        latency,
        count.astype(np.int64),
        at.vertex[cluster.nodes] + cluster.slots,
    )


def _rows(links: Sequence[Link], times: int = 1) -> Floats:
    """Kind, bandwidth, latency and count of links, so many times over."""
    rows = [(KINDS.index(x.kind), x.bandwidth, x.latency, x.count) for x in links]
    return np.tile(np.array(rows, dtype=np.float64).reshape(-1, 4), (times, 1))


def _inner(cluster: Cluster, k: int) -> tuple[Ints, Floats]:
    """The links inside all nodes of one kind."""
    node, times = cluster.groups[k]
    first = cluster.layout.vertex[cluster.kinds == k]
    ends = np.array(node.wires.ends, dtype=np.int64).reshape(-1, 2)
    return (first[:, None, None] + ends[None]).reshape(-1, 2), _rows(node.links, times)


def _ports(cluster: Cluster, k: int) -> tuple[Ints, Floats]:
    """The NICs of all nodes of one kind, and their links to switches."""
    node, times = cluster.groups[k]
    first = cluster.layout.vertex[cluster.kinds == k]
    local = np.array([node.index[x.a] for x in node.nics], dtype=np.int64)
    return (first[:, None] + local[None]).reshape(-1), _rows(node.nics, times)


def pair_key(cluster: Cluster, a: int, b: int) -> tuple[int, ...]:
    """Key of a pair of ranks: equal keys have equal bandwidth and latency."""
    here, there = int(cluster.nodes[a]), int(cluster.nodes[b])
    slots = (int(cluster.slots[a]), int(cluster.slots[b]))
    kinds = (int(cluster.kinds[here]), int(cluster.kinds[there]))
    if here == there:
        return kinds[0], *slots
    return *kinds, *slots, _switch(cluster, a), _switch(cluster, b)


def route_of(cluster: Cluster, a: int, b: int) -> tuple[Link, ...]:
    """The links from rank `a` to rank `b`, in order; a rank reaches itself through its memory."""
    here, there = int(cluster.nodes[a]), int(cluster.nodes[b])
    if a == b:
        at = f"node{here}/device{cluster.slots[a]}"
        return (Link(at, at, "memory", cluster.devices[a].memory_bandwidth, 0.0),)
    if here == there:
        return _inside(cluster, a, int(cluster.slots[b]))
    way_in = reversed([_turned(link) for link in _out(cluster, b)])
    return (*_out(cluster, a), *_across(cluster, a, b), *way_in)


def _switch(cluster: Cluster, rank: int) -> int:
    """The switch at which a rank's traffic enters the network."""
    nic = cluster.node(rank).nic(int(cluster.slots[rank]))
    return int(cluster.fabric.home[cluster.fabric.first[cluster.nodes[rank]] + nic])


def _inside(cluster: Cluster, rank: int, vertex: int) -> tuple[Link, ...]:
    """The links from a rank's device to a vertex of its own node."""
    node, at = cluster.node(rank), int(cluster.nodes[rank])
    names, first = list(node.vertices), int(cluster.layout.link[at])
    position, links = int(cluster.slots[rank]), []
    for k in node.path(position, vertex) or ():
        link, (a, b) = node.links[k], node.wires.ends[k]
        back = position == b
        start, position = (b, a) if back else (a, b)
        ends = f"node{at}/{names[start]}", f"node{at}/{names[position]}"
        links.append(Link(*ends, link.kind, link.each, link.latency, link.count, first + k, back))
    return tuple(links)


def _out(cluster: Cluster, rank: int) -> tuple[Link, ...]:
    """The links from a rank's device to the switch its NIC is plugged into."""
    node, at = cluster.node(rank), int(cluster.nodes[rank])
    nic = node.nic(int(cluster.slots[rank]))
    out, switch = node.nics[nic], _switch(cluster, rank)
    port = Link(
        f"node{at}/{out.a}",
        cluster.fabric.names[switch],
        out.kind,
        out.each,
        out.latency + float(cluster.fabric.latency[switch]) / 2,
        out.count,
        cluster.layout.nic + int(cluster.fabric.first[at]) + nic,
    )
    return (*_inside(cluster, rank, node.index[out.a]), port)


def _across(cluster: Cluster, a: int, b: int) -> list[Link]:
    """The links between the switches of two ranks."""
    fabric, links = cluster.fabric, []
    position = _switch(cluster, a)
    for k in fabric.path(position, _switch(cluster, b)) or ():
        link, (x, y) = fabric.links[k], fabric.wires.ends[k]
        back = position == y
        position = x if back else y
        ends = (link.b, link.a) if back else (link.a, link.b)
        latency, index = fabric.wires.latency[k], cluster.layout.trunk + k
        links.append(Link(*ends, link.kind, link.each, latency, link.count, index, back))
    return links


def _turned(link: Link) -> Link:
    return replace(link, a=link.b, b=link.a, back=not link.back)


_OLD = {"talk": "comm"}  # words of older files
_RANGE = {"tree_bytes": (0.0, math.inf)}  # 0: never a tree
MOST_KEPT = 4096  # groups whose levels are remembered: a search asks for the same few again


@dataclass(frozen=True)
class Calibration:
    """Factors on prices, and how far all-reduces go by trees."""

    compute: float = 1.0
    host: float = 1.0
    update: float = 1.0
    comm: float = 1.0  # all of a message: what the transport does to starts and bytes alike
    alpha: float = 1.0
    beta: float = 1.0
    inside: float = 1.0
    tree_bytes: float = math.inf  # NCCL_TREE_THRESHOLD: all-reduces above it are rings
    families: tuple[tuple[str, float], ...] = ()  # of ops, over `compute`
    messages: tuple[Message, ...] = ()

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str) -> Calibration:
        """Factors by name; all above zero."""
        values = {_OLD.get(name, name): value for name, value in values.items()}
        known = [f.name for f in fields(cls) if f.name != "messages"]
        for name in values:
            if name not in known:
                raise unknown("factor of a calibration", name, known)
        rows = values.get("families", {})
        if not isinstance(rows, Mapping):
            raise InputError(f"`families` is no table in {where}", hint="families = { gemm = 1.2 }")
        found: dict[str, Any] = {
            name: _factor(name, v, where) for name, v in values.items() if name != "families"
        }
        of = tuple((str(name), _factor(str(name), v, where)) for name, v in sorted(rows.items()))
        return cls(**found, families=of)

    def plain(self) -> dict[str, Any]:
        """The factors that are not 1; measured messages are left out."""
        usual = asdict(type(self)())
        found = {n: v for n, v in asdict(self).items() if v != usual[n] and n != "messages"}
        return found | ({"families": dict(self.families)} if self.families else {})

    def family(self, op: str) -> float:
        """How many times as long as priced ops of a kind take, beside `compute`."""
        return dict(self.families).get(op, 1.0) if self.families else 1.0

    def levels(self, found: tuple[Level, ...]) -> tuple[Level, ...]:
        """The tiers of links, with measured slowdowns."""
        if self == PLAIN:
            return found
        return tuple(
            replace(
                level,
                later=self.comm * self.alpha,
                slower=self.comm * (self.inside if level.name == "node" else self.beta),
                tree_bytes=self.tree_bytes,
                timed=self.messages,
            )
            for level in found
        )


def _factor(name: str, value: Any, where: str) -> float:
    least, most = _RANGE.get(name, (1e-6, 1e6))
    if type(value) not in (int, float) or not least <= value <= most:
        raise InputError(
            f"`{name}` is `{str(value)[:40]}` in {where}",
            hint=f"it is a number from {least:g} to {most:g}",
        )
    return float(value)


PLAIN = Calibration()


def load(path: str | Path) -> Calibration:
    """The calibration in a file that `foretell fit` has written."""
    hint = "make one with `foretell fit RUNS -o FILE`"
    found = read_json(path, what="calibration", hint=hint)
    values = found.get("calibration") if isinstance(found, dict) else None
    if not isinstance(values, dict):
        raise InputError(f"`{path}` is no calibration", hint=hint)
    return Calibration.of(values, f"`{path}`")


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
    is_fitted: bool = False  # whether that was so, whatever came out
    boards: int = 0  # of the whole step, where these ranks are a part of it
    _ways: dict[tuple[int, ...], tuple[float, float]] = field(default_factory=dict, repr=False)
    _levels: dict[object, tuple[Level, ...]] = field(default_factory=dict, repr=False)

    @property
    def size(self) -> int:
        """How many ranks it has."""
        return len(self.nodes)

    @property
    def waits_for(self) -> int:
        """How many devices a step runs on: the slowest of them is waited for."""
        return self.boards or self.size

    @cached_property
    def is_measured(self) -> bool:
        """Whether its user has measured how it runs: by runs, benchmarks or ops timed on it."""
        known = self.is_fitted or self.calibration != PLAIN
        return known or any(device.timed is not None for device in self.devices)

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
        return layout_of(self)

    @cached_property
    def graph(self) -> Topology:
        """Every vertex and link, expanded."""
        return expand(self)

    def node(self, rank: int) -> Node:
        """The kind of node a rank runs on."""
        return self.groups[int(self.kinds[self.nodes[rank]])][0]

    def devices_by_kind(self) -> dict[str, Ints]:
        """The ranks of each kind of device, by its name."""
        return self._by_kind

    @cached_property
    def _by_kind(self) -> dict[str, Ints]:
        names = np.array([device.name for device in self.devices])
        return {str(name): np.flatnonzero(names == name) for name in dict.fromkeys(names.tolist())}

    def route(self, a: int, b: int) -> tuple[Link, ...]:
        """The links a message from rank `a` to rank `b` travels, in order."""
        self._check((a, b))
        return route_of(self, a, b)

    def bandwidth(self, a: int, b: int) -> float:
        """Bytes/s of the narrowest link between two ranks, with nothing else on the way."""
        return self._way(a, b)[0]

    def latency(self, a: int, b: int) -> float:
        """Seconds an empty message takes from one rank to another."""
        return self._way(a, b)[1]

    def _way(self, a: int, b: int) -> tuple[float, float]:
        self._check((a, b))
        key = pair_key(self, a, b)
        if key not in self._ways:
            if a != b and self.nodes[a] == self.nodes[b]:
                node = self.node(a)
                path = node.path(int(self.slots[a]), int(self.slots[b]))
                self._ways[key] = node.bandwidth(path), node.latency(path)
            else:
                links = route_of(self, a, b)
                self._ways[key] = min(k.bandwidth for k in links), sum(k.latency for k in links)
        return self._ways[key]

    def host_bandwidth(self, rank: int) -> float:
        """Bytes/s between a rank's device and its host's memory, each way."""
        node, slot = self.node(rank), int(self.slots[rank])
        path = node.host(slot)
        return node.bandwidth(path) if path else node.devices[slot].memory_bandwidth

    def levels(
        self, ranks: Iterable[int], beside: Iterable[Iterable[int]] = ()
    ) -> tuple[Level, ...]:
        """The tiers of links between these ranks, innermost first.

        `beside` are other groups that communicate at the same time: links are then shared fairly.
        """
        group, others = self._check(ranks), tuple(self._check(g) for g in beside)
        key = (group, others)
        if len(self._levels) >= MOST_KEPT:
            self._levels.clear()
        if key not in self._levels:
            mine = levels.members_of(self, group)
            rest = [levels.members_of(self, other) for other in others]
            found = [levels.inner(self, mine, rest)] if mine.counts.max() > 1 else []
            if len(mine.nodes) > 1:
                found += levels.outer(self, mine, [m for m in rest if len(m.nodes) > 1])
            self._levels[key] = self.calibration.levels(tuple(found))
        return self._levels[key]

    def ring(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """An order of the ranks whose narrowest step is as wide as can be."""
        return levels.ring_of(self, self._check(ranks))

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

    def subset(self, ranks: Iterable[int]) -> Cluster:
        """The same machines with only these ranks; rank i of the result is `ranks[i]` here."""
        group = self._check(ranks)
        if len(set(group)) < len(group):
            raise InputError(
                f"a rank is named twice in a subset of `{self.name}`", hint="name each once"
            )
        pick = np.array(group)
        return replace(self, nodes=self.nodes[pick], slots=self.slots[pick], _ways={}, _levels={})

    def part(self, ranks: Iterable[int]) -> Cluster:
        """The ranks that do one part of a step of all of them, such as a pipeline stage."""
        return replace(self.subset(ranks), boards=self.waits_for)

    def calibrated(self, calibration: Calibration) -> Cluster:
        """The same machines with measured calibration."""
        return replace(self, calibration=calibration, is_fitted=True, _ways={}, _levels={})

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
        return _fingerprint(self)

    def text(self) -> str:
        """A file that reads back as the same cluster."""
        from foretell.cluster.write import text

        return text(self)

    def describe(self) -> str:
        """A description as text."""
        from foretell.cluster.write import describe

        return describe(self)

    def __str__(self) -> str:
        return self.describe()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cluster) and self.fingerprint() == other.fingerprint()

    def __hash__(self) -> int:
        return hash(self._fingerprint)


def _fingerprint(cluster: Cluster) -> str:
    """A hash of every number, kind and place; not of titles, sources and names of machines.

    Device names count: measured tables and learned prices are kept by them.
    """
    whole: dict[str, Any] = {
        "nodes": [(_bare_node(node), count) for node, count in cluster.groups],
        "tiers": [asdict(tier) | {"name": ""} for tier in cluster.tiers],
        "switches": [asdict(switch) for switch in cluster.switches],
    }
    if factors := cluster.calibration.plain():
        whole["calibration"] = factors
    digest = hashlib.sha256(json.dumps(whole, sort_keys=True).encode())
    digest.update(np.ascontiguousarray(cluster.nodes, dtype="<i8").tobytes())
    digest.update(np.ascontiguousarray(cluster.slots, dtype="<i8").tobytes())
    return digest.hexdigest()[:32]


_LEFT_OUT = ("title", "sources", "flops", "bus", "node", "timed")  # of a device


def _bare_node(node: Node) -> dict[str, Any]:
    return {
        "devices": [
            {k: v for k, v in vars(d).items() if k not in _LEFT_OUT} | {"flops": dict(d.flops)}
            for d in node.devices
        ],
        "vertices": list(node.vertices.items()),
        "links": [asdict(k) for k in node.links],
        "nics": [asdict(k) for k in node.nics],
        "forwards": node.forwards,
        "host_memory": node.host_memory,
        "price": node.price,
    }


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
