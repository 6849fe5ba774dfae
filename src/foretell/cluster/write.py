"""A cluster as text: a file that reads back the same, a hash, and a short description."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from foretell.cluster import read
from foretell.cluster.cluster import Cluster, Switch, Tier
from foretell.cluster.node import Device, Link, Node


def text(cluster: Cluster) -> str:
    """A file in which every number is written out: it does not lean on presets."""
    cables = _Cables()
    devices = {d.name: d for node, _ in cluster.groups for d in node.devices}
    body = [line for node, count in cluster.groups for line in _node(node, count, cables)]
    body += [line for tier in cluster.tiers for line in _tier(tier)]
    body += [line for switch in cluster.switches for line in _switch(switch, cables)]
    head = [f"name = {_quoted(cluster.name)}"]
    if cluster.title:
        head.append(f"title = {_quoted(cluster.title)}")
    if ranks := list(_ranks(cluster)):
        head.append(f"ranks = [{', '.join(map(_quoted, ranks))}]")
    parts = [
        *head,
        *(line for d in devices.values() for line in _device(d)),
        *cables.lines(),
        *body,
        *_calibration(cluster),
    ]
    return "\n".join(parts) + "\n"


def _calibration(cluster: Cluster) -> Iterator[str]:
    factors = cluster.calibration.plain()
    if factors:
        yield "\n[calibration]"
    for name, value in factors.items():
        rows = value.items() if isinstance(value, dict) else ()
        table = "{ " + ", ".join(f"{_quoted(k)} = {v!r}" for k, v in rows) + " }"
        yield f"{name} = {table if rows else repr(value)}"


class _Cables:
    """The different links of a cluster, named in the order they are met."""

    def __init__(self) -> None:
        self.names: dict[tuple[str, float, float, float], str] = {}

    def name(self, link: Link, hop: float = 0.0) -> str:
        key = (link.kind, link.each, link.latency, hop)
        number = sum(k[0] == link.kind for k in self.names)
        known = self.names.setdefault(key, f"{link.kind}-{number}")
        return known if link.count == 1 else f"{known} x{link.count}"

    def lines(self) -> Iterator[str]:
        for (kind, each, latency, hop), name in self.names.items():
            yield f"\n[link.{name}]"
            yield f"kind = {_quoted(kind)}"
            yield f"bandwidth = {_quoted(read.write(each, 'B/s'))}"
            yield from _optional("latency", latency, "s")
            yield from _optional("switch", hop, "s")


def _device(device: Device) -> Iterator[str]:
    yield f"\n[device.{_quoted(device.name)}]"
    for key in read.DEVICE_TEXTS:
        yield f"{key} = {_quoted(getattr(device, key))}"
    yield f"units = {device.units}"
    for key, unit in read.DEVICE_UNITS.items():
        yield from _optional(key, getattr(device, key), unit)
    rates = (f"{k} = {_quoted(read.write(v, 'flop/s'))}" for k, v in device.flops.items())
    yield f"flops = {{ {', '.join(rates)} }}"
    yield from _sources(device.sources)


def _node(node: Node, count: int, cables: _Cables) -> Iterator[str]:
    yield "\n[[node]]"
    yield f"title = {_quoted(node.title)}"
    yield f"count = {count}"
    yield f"devices = [{', '.join(_quoted(d.name) for d in node.devices)}]"
    yield "sockets = 0  # every wire is drawn below"
    if node.forwards:
        yield "forwards = true"
    if node.rack:
        yield f"rack = {node.rack}"
    yield from _optional("host_memory", node.host_memory, "B")
    yield from _optional("price", node.price, "$/h")
    others = (f"{name} = {_quoted(k)}" for name, k in node.vertices.items() if k != "device")
    yield f"vertices = {{ {', '.join(others)} }}"
    yield from _rows("links", ((k.a, k.b, cables.name(k)) for k in node.links))
    yield from _rows("ports", ((k.a, cables.name(k, node.hop)) for k in node.nics))
    yield from _sources(node.sources)


def _tier(tier: Tier) -> Iterator[str]:
    yield "\n[[tier]]"
    yield f"name = {_quoted(tier.name)}"
    if tier.size:
        yield f"size = {tier.size}"
    if tier.oversubscription != 1.0:
        yield f"oversubscription = {tier.oversubscription!r}"
    yield from _optional("uplink", tier.uplink, "B/s")
    yield from _optional("latency", tier.latency, "s")


def _switch(switch: Switch, cables: _Cables) -> Iterator[str]:
    yield "\n[[switch]]"
    yield f"name = {_quoted(switch.name)}"
    yield f"nodes = {list(switch.nodes)}"
    yield from _optional("latency", switch.latency, "s")
    yield from _rows("links", ((k.b, cables.name(k)) for k in switch.links))


def _rows(key: str, rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"{key} = ["
    for row in rows:
        yield f"  [{', '.join(map(_quoted, row))}],"
    yield "]"


def _sources(sources: Mapping[str, str]) -> Iterator[str]:
    """One line for each source, with the fields it is for."""
    fields: dict[str, list[str]] = {}
    for name, source in sources.items():
        fields.setdefault(source, []).append(name)
    for source, names in fields.items():
        yield f"sources.{_quoted(' '.join(names))} = {_quoted(source)}"


def _optional(key: str, value: float, unit: str) -> Iterator[str]:
    if value:
        yield f"{key} = {_quoted(read.write(value, unit))}"


def _quoted(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)  # a JSON string is a TOML basic string


def _ranks(cluster: Cluster) -> Iterator[str]:
    """`node/first-last` for each run of slots; nothing where every device has its rank in order."""
    counts = np.array([len(n.devices) for n, count in cluster.groups for _ in range(count)])
    if len(cluster.nodes) == counts.sum() and _in_order(cluster, counts):
        return
    runs = np.flatnonzero((np.diff(cluster.nodes) != 0) | (np.diff(cluster.slots) != 1)) + 1
    for part in np.split(np.arange(cluster.size), runs):
        first, last = int(cluster.slots[part[0]]), int(cluster.slots[part[-1]])
        yield f"{cluster.nodes[part[0]]}/{first}" + (f"-{last}" if last > first else "")


def _in_order(cluster: Cluster, counts: Any) -> bool:
    nodes = np.repeat(np.arange(len(counts)), counts)
    slots = np.arange(len(nodes)) - np.repeat(np.cumsum(counts) - counts, counts)
    return bool((cluster.nodes == nodes).all() and (cluster.slots == slots).all())


def describe(cluster: Cluster) -> str:
    """Description of a cluster: devices, nodes, links, network, price."""
    by_kind = ", ".join(f"{len(r)} x {n}" for n, r in cluster.devices_by_kind().items())
    plural = "node" if cluster.num_nodes == 1 else "nodes"
    lines = [f"{cluster.name}: {by_kind} on {cluster.num_nodes} {plural}"]
    if cluster.title:
        lines.append(f"  {cluster.title}")
    lines += [f"  {line}" for node, count in cluster.groups for line in _about(node, count)]
    if len(cluster.kinds) > 1:
        lines.append(f"  network: {_network(cluster)}")
    if cluster.price:
        lines.append(f"  price: {cluster.price:.2f} $ an hour")
    return "\n".join(lines)


def _about(node: Node, count: int) -> Iterator[str]:
    yield f"{count} x {node.title}"
    for device in dict.fromkeys(d.name for d in node.devices):
        same = [d for d in node.devices if d.name == device]
        d = same[0]
        best = max(d.flops, key=lambda k: (k in ("bf16", "fp16"), d.flops[k]))
        yield (
            f"  {len(same)} x {d.title}: {read.short(d.memory, 'B')} at"
            f" {read.short(d.memory_bandwidth, 'B/s')},"
            f" {read.short(d.flops[best], 'flop/s')} {best}"
        )
    wires = Counter((k.kind, k.bandwidth) for k in node.links)
    inside = (f"{n} {kind} of {read.short(b, 'B/s')}" for (kind, b), n in wires.items())
    yield f"  inside: {', '.join(inside)}"
    ports = Counter((k.kind, k.bandwidth) for k in node.nics)
    if ports:
        out = (f"{n} {kind} of {read.short(b, 'B/s')}" for (kind, b), n in ports.items())
        yield f"  out: {', '.join(out)}"


def _network(cluster: Cluster) -> str:
    if cluster.switches:
        trunks = len(cluster.fabric.links)
        return f"{len(cluster.switches)} switches, {trunks} links between them"
    rows = []
    for tier in cluster.tiers or (Tier("switch"),):
        size = f" of {tier.size}" if tier.size else ""
        thin = f", {tier.oversubscription:g}:1 oversubscribed" if tier.oversubscription != 1 else ""
        rows.append(f"{tier.name}{size}{thin}")
    return " > ".join(rows)
