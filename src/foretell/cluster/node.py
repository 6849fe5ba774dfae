"""Devices, links, and kinds of node: what their makers promise, and the wires between them.

A node is a small graph. Vertices are devices first (in slot order), then NVSwitches, PCIe
switches, CPU sockets and NICs. Devices do not pass on other devices' traffic unless the node says
so (`forwards`): what NVLink does not join directly goes over PCIe, as it does in the machine.
Every question is answered once per kind of node and remembered, however many nodes a cluster has.

One accelerator (or CPU) as data: what its maker promises, before any efficiency is applied. Units
are SI base units: flop/s, bytes, bytes/s, seconds, hertz, watts. Nothing here is measured but
`timed`; how close real kernels come to these numbers is the business of `foretell.cost`.

A link between two vertices of a cluster, and the vocabulary of both. Every link is full duplex: it
carries `bandwidth` each way at once. A bundle of parallel links (two NVLinks between the same pair)
is one `Link` with a `count`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, wraps
from math import inf
from typing import Any, Concatenate, ParamSpec, TypeVar

from foretell.cluster.levels import Wires, flow, tour, widest
from foretell.errors import InputError, unknown

FORMATS = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8", "fp4")
# What a format runs as where a device lacks it, as PyTorch does: bf16 and fp16 on hardware without
# them compute in fp32; tf32 is a way to do fp32; fp8 and fp4 are widened to fp16 first.
_INSTEAD = {"tf32": "fp32", "fp16": "fp32", "bf16": "fp32", "fp8": "fp16", "int8": "fp16"}
_INSTEAD |= {"fp4": "fp8"}


VERTICES = ("device", "nvswitch", "pcie", "cpu", "nic", "switch")
KINDS = (
    "nvlink",  # device to device, direct
    "nvswitch",  # device to NVSwitch
    "xgmi",  # AMD device to device, direct
    "pcie",
    "upi",  # socket to socket (QPI, UPI, Infinity Fabric)
    "memory",  # CPU rank to its own memory system
    "loopback",  # ranks of one host through its network stack
    "infiniband",
    "ethernet",
)
DIRECT = frozenset({"nvlink", "nvswitch", "xgmi"})  # made for links between devices
NETWORK = frozenset({"infiniband", "ethernet", "loopback"})  # what a NIC may speak
P = ParamSpec("P")
R = TypeVar("R")
Slots = tuple[int, ...]
LinkPath = tuple[int, ...]  # link numbers, in order
Paths = dict[int, LinkPath]  # by the vertex they end at


@dataclass(frozen=True)
class Device:
    """A kind of device: peak rates by number format, memory, and what bounds small kernels."""

    name: str  # preset name, lower case: `a100-80`
    title: str  # what people call it: `NVIDIA A100 80GB SXM`
    vendor: str  # nvidia, amd, cpu
    arch: str  # kepler, pascal, volta, turing, ampere, ada, hopper, blackwell, cdna2, cdna3, x86
    memory: float  # bytes
    memory_bandwidth: float  # bytes/s, peak of the data sheet
    flops: Mapping[str, float]  # dense peak by format: fp32, tf32, fp16, bf16, fp8, int8, fp64
    units: int  # streaming multiprocessors, compute units or cores
    clock: float  # hertz, boost: the clock the peak rates are quoted at
    l2: float  # bytes of last-level cache on the chip
    # Kineto traces of an H200 and a V100 show cudaLaunchKernel at 7-9 µs with the profiler on,
    # and kernels down to 0.7-1.3 µs; without the profiler a launch is about 5 µs.
    launch: float = 5e-6  # seconds the host spends to launch one kernel
    floor: float = 2e-6  # seconds the smallest kernel takes on the device
    watts: float = 0.0  # board power
    price: float = 0.0  # money per hour, 0 where unknown
    sources: Mapping[str, str] = field(default_factory=dict)  # where each number comes from
    bus: str = "pcie3"  # link preset by which it reaches its host
    node: str = "pcie3-box"  # node preset it usually stands in
    # bytes/s it reaches another at through host memory, where the driver lets it not reach it over
    # PCIe (GeForce since Turing); 0: it does
    staged: float = 0.0
    # what its ops took here (→ foretell.cost.measured); None: formulas price them
    timed: Any = field(default=None, repr=False, compare=False)

    def peak(self, dtype: str) -> float:
        """Dense peak flop/s for a number format, or for the one it runs as where it is missing."""
        if dtype not in FORMATS:
            raise unknown("number format", dtype, FORMATS)
        runs_as = dtype
        while runs_as not in self.flops and runs_as in _INSTEAD:
            runs_as = _INSTEAD[runs_as]
        if runs_as not in self.flops:
            hint = f"add `{runs_as}` to its `flops`; it has {', '.join(sorted(self.flops))}"
            raise InputError(f"device `{self.name}` has no {runs_as} rate", hint=hint)
        return self.flops[runs_as]


@dataclass(frozen=True)
class Link:
    """One bundle of equal parallel links from `a` to `b`."""

    a: str  # a vertex: `device0` inside a node, `node3/device0` or `leaf2` in a cluster
    b: str
    kind: str
    each: float  # bytes/s each way of one of them
    latency: float  # seconds, one way
    count: int = 1
    index: int = -1  # its row in `cluster.graph`, where it has one
    back: bool = False  # travelled against the order in which `cluster.graph` names its ends

    @property
    def bandwidth(self) -> float:
        """Bytes/s each way of the whole bundle."""
        return self.each * self.count


@dataclass(frozen=True)
class Spread:
    """How well some devices of one node can communicate among themselves."""

    kind: str
    bandwidth: float
    latency: float
    channels: int
    wires: float  # bytes/s their wires would carry, which other groups may share


@dataclass(frozen=True)
class Exit:
    """How some devices of one node reach the network together."""

    bandwidth: float
    latency: float
    channels: int


def _remembered(method: Callable[Concatenate[Node, P], R]) -> Callable[Concatenate[Node, P], R]:
    """A method whose answers a node keeps."""

    @wraps(method)
    def ask(self: Node, /, *args: P.args, **words: P.kwargs) -> R:
        key = (method.__name__, *args, *words.values())
        if key not in self._known:
            self._known[key] = method(self, *args, **words)
        found: R = self._known[key]
        return found

    return ask


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
    _known: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

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

    def path(self, slot: int, vertex: int) -> LinkPath | None:
        """The links from a device to a vertex, in order; None where there is no way."""
        return self._paths(slot).get(vertex)

    @_remembered
    def _paths(self, slot: int) -> Paths:
        return widest(self.wires, slot, self.closed)

    def bandwidth(self, path: LinkPath | None) -> float:
        """The narrowest link of a path; 0 where there is no path."""
        return 0.0 if path is None else min((self.links[k].bandwidth for k in path), default=inf)

    def latency(self, path: LinkPath | None) -> float:
        """The sum of the latencies along a path."""
        return sum(self.links[k].latency for k in path or ())

    @_remembered
    def order(self, slots: Slots, *, closed: bool) -> Slots:
        """The best ring over these devices, or the best chain."""
        paths = [[self._paths(a).get(b) for b in slots] for a in slots]
        width = [[self.bandwidth(path) for path in row] for row in paths]
        delay = [[self.latency(path) for path in row] for row in paths]
        best = tour(width, delay, closed=closed)
        return tuple(slots[i] for i in best)

    @_remembered
    def nic(self, slot: int) -> int:
        """The NIC a device uses: the widest way out, then the quickest; equals are split by slot.

        -1 where it reaches none.
        """
        ways = self._ways_out(slot)
        equals = [i for i, way in ways.items() if way == min(ways.values())]
        return equals[slot % len(equals)] if equals else -1

    def _ways_out(self, slot: int) -> dict[int, tuple[float, float]]:
        ways = {}
        for i, out in enumerate(self.nics):
            path = self.path(slot, self.index[out.a])
            if path is not None:
                width = min(self.bandwidth(path), out.bandwidth)
                ways[i] = (-width, self.latency(path) + out.latency)
        return ways

    @_remembered
    def spread(self, slots: Slots) -> Spread:
        """What the slowest of these devices can send to the others while it receives as much."""
        absent = set(range(len(self.devices))) - set(slots)
        direct = {i for i, k in enumerate(self.links) if k.kind in DIRECT}
        bandwidth = 0.0  # across the narrowest cut that parts them
        for links in (direct, None):  # where NVLink or xGMI does not join all, the host must help
            if not bandwidth:
                cuts = (
                    flow(self.wires, slots[:1], [v], links=links, absent=absent) for v in slots[1:]
                )
                bandwidth, wires = min(cuts, default=inf), links
        staged = min((s for i in slots if (s := self.devices[i].staged)), default=0.0)
        if wires is None and staged:
            return self._through_host(slots, staged, bandwidth)
        used = self._ring_paths(slots)
        slowest = min((self.links[k] for path in used for k in path), key=lambda k: k.bandwidth)
        latency = max(map(self.latency, used))
        channels = max(1, round(bandwidth / slowest.each))
        return Spread(slowest.kind, bandwidth, latency, channels, bandwidth)

    def _through_host(self, slots: Slots, staged: float, wires: float) -> Spread:
        """The same where every byte is written to host memory and read from it again."""
        cpus = [i for i, kind in enumerate(self.vertices.values()) if kind == "cpu"]
        shared = flow(self.wires, slots, cpus) / len(slots) if cpus else inf
        latency = max(map(self.latency, self._ring_paths(slots)))
        wires = min(wires, shared)
        return Spread("memory", min(staged, wires), latency, 1, wires)

    def _ring_paths(self, slots: Slots) -> list[LinkPath]:
        order = self.order(slots, closed=True)
        pairs = zip(order, order[1:] + order[:1], strict=True)
        return [self._paths(a).get(b, ()) for a, b in pairs if a != b]

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

    @_remembered
    def exit(self, slots: Slots) -> Exit:
        """What these devices can send out together, over every NIC, passing data among them."""
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

    def host(self, slot: int) -> LinkPath:
        """The links from a device to the nearest CPU socket; empty where there is none."""
        cpus = [i for i, kind in enumerate(self.vertices.values()) if kind == "cpu"]
        paths = [p for p in (self.path(slot, c) for c in cpus) if p is not None]
        return min(paths, key=lambda p: (-self.bandwidth(p), self.latency(p)), default=())
