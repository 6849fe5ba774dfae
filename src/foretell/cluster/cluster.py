"""The machines as values: devices, links, kinds of node, clusters, and factors learned from
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
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretell.cluster import levels, topology
from foretell.cluster.levels import Level, Message
from foretell.cluster.node import Device, Link, Node
from foretell.cluster.topology import (
    Fabric,
    Layout,
    Switch,
    Tier,
    Topology,
    drawn,
    expand,
    layout,
    tiered,
)
from foretell.errors import InputError, unknown
from foretell.io import read_json

_OLD = {"talk": "comm"}  # words of older files
_RANGE = {"tree_bytes": (0.0, math.inf)}  # 0: never a tree
Ints = NDArray[np.int64]
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
        return self._by_kind

    @cached_property
    def _by_kind(self) -> dict[str, Ints]:
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
            if a != b and self.nodes[a] == self.nodes[b]:
                node = self.node(a)
                path = node.path(int(self.slots[a]), int(self.slots[b]))
                self._ways[key] = node.bandwidth(path), node.latency(path)
            else:
                links = topology.route(self, a, b)
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
        return levels.ring(self, self._check(ranks))

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
