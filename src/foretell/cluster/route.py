"""The way from one rank to another: inside a node, or out by a NIC, over switches, and in again."""

from typing import TYPE_CHECKING

from foretell.cluster.link import Link

if TYPE_CHECKING:
    from foretell.cluster.cluster import Cluster


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
