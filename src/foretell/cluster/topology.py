"""Every vertex and link of a cluster in columns: nodes copied from their kind, then switches.

Vertices: those of node 0, node 1, …, then the switches. Links: those inside node 0, node 1, …,
then one for every NIC (to its switch), then those between switches. Half the latency of a switch is
counted in each link that ends there, so that the latencies along a route add up.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from foretell.cluster.link import KINDS, VERTICES, Link

if TYPE_CHECKING:
    from foretell.cluster.cluster import Cluster
if TYPE_CHECKING:
    from foretell.cluster.cluster import Cluster

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


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


def layout(cluster: "Cluster") -> Layout:
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


def expand(cluster: "Cluster") -> Topology:
    """Copy every kind of node as often as it occurs and add the switches."""
    at = cluster.layout
    inner = [_copies(cluster, k) for k in range(len(cluster.groups))]
    parts = [p for p in (*inner, _nics(cluster), _trunks(cluster)) if len(p[0])]
    ends, link_kind, bandwidth, latency, count = (
        (np.concatenate(column) for column in zip(*parts, strict=True)) if parts else _no_links()
    )
    kinds = [
        np.tile([VERTICES.index(v) for v in node.vertices.values()], n)
        for node, n in cluster.groups
    ]
    switches = np.full(len(cluster.fabric.names), VERTICES.index("switch"))
    sizes = np.diff(np.append(at.vertex, at.switch))
    return Topology(
        np.concatenate([*kinds, switches]).astype(np.uint8),
        np.concatenate([np.repeat(np.arange(len(sizes)), sizes), np.full(len(switches), -1)]),
        ends,
        link_kind,
        bandwidth,
        latency,
        count,
        at.vertex[cluster.nodes] + cluster.slots,
    )


Columns = tuple[Ints, NDArray[np.uint8], Floats, Floats, Ints]


def _copies(cluster: "Cluster", k: int) -> Columns:
    """The links inside all nodes of one kind."""
    node, times = cluster.groups[k]
    first = cluster.layout.vertex[cluster.kinds == k]
    ends = np.array(node.wires.ends, dtype=np.int64).reshape(-1, 2)
    return (
        (first[:, None, None] + ends[None]).reshape(-1, 2),
        np.tile(np.array([KINDS.index(x.kind) for x in node.links], dtype=np.uint8), times),
        np.tile(np.array([x.bandwidth for x in node.links], dtype=np.float64), times),
        np.tile(np.array([x.latency for x in node.links], dtype=np.float64), times),
        np.tile(np.array([x.count for x in node.links], dtype=np.int64), times),
    )


def _nics(cluster: "Cluster") -> Columns:
    """The links from NICs to switches."""
    fabric, at = cluster.fabric, cluster.layout
    ends, rows = [], []
    for k, (node, times) in enumerate(cluster.groups):
        first = at.vertex[cluster.kinds == k]
        local = np.array([node.index[x.a] for x in node.nics], dtype=np.int64)
        ends.append((first[:, None] + local[None]).reshape(-1))
        columns = [(KINDS.index(x.kind), x.bandwidth, x.latency, x.count) for x in node.nics]
        rows.append(np.tile(np.array(columns, dtype=np.float64).reshape(-1, 4), (times, 1)))
    row = np.concatenate(rows)
    half = fabric.latency[fabric.home] / 2
    return (
        np.stack([np.concatenate(ends), at.switch + fabric.home], axis=1),
        row[:, 0].astype(np.uint8),
        row[:, 1],
        row[:, 2] + half,
        row[:, 3].astype(np.int64),
    )


def _trunks(cluster: "Cluster") -> Columns:
    """The links between switches."""
    wires, links = cluster.fabric.wires, cluster.fabric.links
    return (
        cluster.layout.switch + np.array(wires.ends, dtype=np.int64).reshape(-1, 2),
        np.array([KINDS.index(x.kind) for x in links], dtype=np.uint8),
        np.array(wires.bandwidth, dtype=np.float64),
        np.array(wires.latency, dtype=np.float64),
        np.array([x.count for x in links], dtype=np.int64),
    )


def _no_links() -> Columns:
    empty = np.zeros(0)
    none = np.zeros((0, 2), dtype=np.int64)
    return none, empty.astype(np.uint8), empty, empty, empty.astype(np.int64)


# The way from one rank to another: inside a node, or out by a NIC, over switches, and in again.


def key(cluster: "Cluster", a: int, b: int) -> tuple[int, ...]:
    """What decides bandwidth and latency between two ranks: pairs with equal keys are alike."""
    here, there = int(cluster.nodes[a]), int(cluster.nodes[b])
    slots = (int(cluster.slots[a]), int(cluster.slots[b]))
    kinds = (int(cluster.kinds[here]), int(cluster.kinds[there]))
    if here == there:
        return kinds[0], *slots
    return *kinds, *slots, _switch(cluster, a), _switch(cluster, b)


def route(cluster: "Cluster", a: int, b: int) -> tuple[Link, ...]:
    """The links from rank `a` to rank `b`, in order; a rank reaches itself through its memory."""
    here, there = int(cluster.nodes[a]), int(cluster.nodes[b])
    if a == b:
        at = f"node{here}/device{cluster.slots[a]}"
        return (Link(at, at, "memory", cluster.devices[a].memory_bandwidth, 0.0),)
    if here == there:
        return _inside(cluster, a, int(cluster.slots[b]))
    way_in = reversed([_turned(link) for link in _out(cluster, b)])
    return (*_out(cluster, a), *_across(cluster, a, b), *way_in)


def _switch(cluster: "Cluster", rank: int) -> int:
    """The switch at which a rank's traffic enters the network."""
    nic = cluster.node(rank).nic(int(cluster.slots[rank]))
    return int(cluster.fabric.home[cluster.fabric.first[cluster.nodes[rank]] + nic])


def _inside(cluster: "Cluster", rank: int, vertex: int) -> tuple[Link, ...]:
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


def _out(cluster: "Cluster", rank: int) -> tuple[Link, ...]:
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


def _across(cluster: "Cluster", a: int, b: int) -> list[Link]:
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
    return Link(
        link.b, link.a, link.kind, link.each, link.latency, link.count, link.index, not link.back
    )
