"""What a collective costs: seconds, the algorithm it is run by, and how far to trust the figure.

`price(op, bytes, levels)` takes the quickest of the ways below, as NCCL's own tuner does, and
answers from the moment the last rank arrives. What `bytes` counts, per rank:

    all_reduce, broadcast, reduce   the tensor every rank holds
    all_gather, reduce_scatter      the whole tensor, gathered from or scattered to all ranks
    all_to_all                      everything one rank sends, its own part included
    gather, scatter                 the whole tensor at the root
    send                            what goes from one rank to one other

Prices never fall as bytes grow, and a group of one rank costs nothing. `bytes` may be an array.

What one class of link does to a message: the few constants that measured runs leave free.

A level of a cluster says what its maker promises (kind, bytes/s, seconds); a `Link` says what NCCL
or gloo makes of it. The constants are data, `tables/collective.toml`, written by
`benchmarks/fit_collectives.py` with the source of each class beside it.
A level belongs to the class of its kind whose reference bandwidth is nearest (as a ratio), so that
NVLink of a new generation takes the constants of the last one it resembles, at its own speed.
PCIe and NICs behind it are rated as NCCL rates them, below the raw rate: 24 GB/s for PCIe 4 x16.

The ways NCCL (and gloo, its ring) can run a collective over a topology, each as a law of size.

Every way costs `start + slope·bytes + root·√bytes` seconds. With N ranks, S bytes, and for each
tier t of the topology its speed Bₜ = efficiency·bandwidth and its share of the ring's edges Eₜ/N:

    ring       launch + start + steps·Σₜ (Eₜ/N)·hopₜ + wire·S/min Bₜ + own·S/copy + √(fill·wire·S/B)
    tree       launch + start + 2·Σₜ depthₜ·hopₜ + S·maxₜ 2/Bₜ + √(fill·…)      pair/B for two nodes
    multicast  launch + start + S·(1+1/n)/B, or the tree between nodes if that is slower
    direct     launch + start + peers·hop + S·maxₜ leavingₜ/Bₜ + own·S/copy + √(fill·…)

    op                          steps     wire        own
    all_reduce                  2(N−1)    2(N−1)/N    1/N      → _ring
    all_gather, reduce_scatter  N−1       (N−1)/N     1/N      → _ring
    broadcast, reduce           N−1       1           0        → _ring

Trees join nodes only; within a node they are chains, as in NCCL. Protocols: ll sends a flag with
every 4 bytes (quick, half the wire), ll128 a flag with every 120, simple waits for whole chunks.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from foretell.cluster.node import Level
from foretell.errors import InputError, unknown

PROTOCOLS = ("ll", "ll128", "simple")


# Ethernet that passes a message this quickly (RoCE, Slingshot) passes it as InfiniBand does.
_RDMA = 5e-6
# Kinds no measured run covers, and the one whose constants stand in for them.
_ALIKE = {"xgmi": "nvlink", "upi": "pcie"}
NETWORKS = frozenset({"infiniband", "ethernet"})
OPS = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
)
LARGE = 1 << 20  # bytes from which a message counts as large: where simple usually takes over
TEN_TO_NINETY = 1.2815515594457831  # the 90th percentile of a normal distribution
_RECENT: dict[tuple[int, str, tuple[str, ...]], tuple[tuple[Level, ...], _Table]] = {}


@dataclass(frozen=True)
class Mode:
    """One way to move bytes: `start + steps·hop + t + √(fill·t)`, t = bytes/(efficiency·speed)."""

    start: float  # seconds before the first byte moves, beyond the launch
    hop: float  # seconds added by each step of the algorithm
    efficiency: float  # share of the level's bandwidth reached by large messages, at most 1
    copy: float = math.inf  # bytes/s at which a rank passes on its own part; not overlapped
    fill: float = 0.0  # seconds; what it takes to fill and drain a pipeline of growing chunks


@dataclass(frozen=True)
class Link:
    """The constants of one class of link."""

    name: str
    kind: str  # of the levels it is for
    bandwidth: float  # bytes/s of the levels it was fitted on
    source: str
    launch: float  # seconds from the last rank's arrival to its kernel running
    simple: Mode
    direct: Mode  # all-to-all: everyone sends to everyone at once
    send: Mode  # one rank to one other
    # Spread of ln(measured/priced) below 1 MiB and from there, for `ring`, `direct` and `send`.
    sigma: Mapping[str, tuple[float, float]]
    ll: Mode | None = None  # None where the library has no such protocol
    ll128: Mode | None = None
    quick: Mode | None = None  # direct and send of small messages
    multicast: Mode | None = None  # the switch adds and copies by itself (NVLS)
    tree: float = 1.0  # what a tree reaches of the ring's efficiency
    pair: float = 1.0  # bytes that each of two nodes sends per byte of an all-reduce by trees


def link_of(level: Level, known: Mapping[str, Link] | None = None) -> Link:
    """The class of link a level belongs to, among those that ship; as slow as it was measured."""
    found = nearest(level, known or links())
    return found if level.later == level.slower == 1 else _slowed(found, level)


def _slowed(link: Link, level: Level) -> Link:
    modes: dict[str, Any] = {
        f.name: replace(
            mode,
            start=mode.start * level.later,
            hop=mode.hop * level.later,
            copy=mode.copy / level.slower,
            fill=mode.fill * level.later,
        )
        for f in fields(link)
        if isinstance(mode := getattr(link, f.name), Mode)
    }
    return replace(link, launch=link.launch * level.later, **modes)


def nearest(level: Level, known: Mapping[str, Link]) -> Link:
    """The class of a level's kind that was fitted at the most similar bandwidth."""
    is_rdma = level.kind == "ethernet" and 0 < level.latency < _RDMA
    kind = "infiniband" if is_rdma else _ALIKE.get(level.kind, level.kind)
    same = [link for link in known.values() if link.kind == kind]
    if not same:
        raise unknown(
            "kind of link", level.kind, {link.kind for link in known.values()} | {*_ALIKE}
        )
    return min(same, key=lambda link: abs(math.log(link.bandwidth / level.bandwidth)))


@cache
def links() -> Mapping[str, Link]:
    """Every class of link that ships, by name."""
    text = (Path(__file__).parent / "tables" / "collective.toml").read_text()
    return {name: link_from(name, table) for name, table in tomllib.loads(text)["link"].items()}


def link_from(name: str, table: Mapping[str, Any]) -> Link:
    """A class of link from its table."""
    values: dict[str, Any] = {**table, "name": name}
    for key, value in table.items():
        if key == "sigma":
            values[key] = {family: (low, high) for family, (low, high) in value.items()}
        elif isinstance(value, dict):
            values[key] = Mode(**value)
    return Link(**values)


@dataclass(frozen=True)
class Way:
    """One algorithm and protocol, and what it costs: `start + slope·bytes + root·√bytes`."""

    algorithm: str  # ring, tree, multicast, direct
    protocol: str  # ll, ll128, simple
    start: float
    slope: float
    root: float = 0.0


@dataclass(frozen=True)
class Tier:
    """One level as a group uses it."""

    link: Link
    members: int  # of its largest sub-group
    ranks: int  # below one member, at most
    edges: int  # of a ring through all ranks that cross here and no higher
    bandwidth: float  # bytes/s one member can really use
    lanes: int  # of which one rank by itself gets one
    latency: float
    is_network: bool

    def hop(self, mode: Mode) -> float:
        """Seconds of one step here: never less than the wire's own latency."""
        return max(mode.hop, self.latency)


def tiers_of(levels: tuple[Level, ...], find: Callable[[Level], Link]) -> tuple[Tier, ...]:
    """The tiers where ranks really meet, innermost first; none where there is a single rank."""
    _check(levels)
    sums = [sum(level.sizes) for level in levels]
    top = max((i for i, n in enumerate(sums) if n > 1), default=-1)
    found, ranks = [], 1
    for i, level in enumerate(levels[: top + 1]):
        members, edges = max(level.sizes), sums[i] - (len(level.sizes) if i < top else 0)
        if members > 1:
            found.append(_tier(level, find(level), members, ranks, edges))
        ranks *= members
    return tuple(found)


def _tier(level: Level, link: Link, members: int, ranks: int, edges: int) -> Tier:
    is_network = level.kind in NETWORKS
    nics = max(1, level.channels) if is_network else 1
    # A rank drives one NIC: a node of 8 NICs with 2 ranks in the group sends at a quarter speed.
    speed = level.bandwidth * min(1.0, ranks / nics) / level.slower
    latency = level.latency * level.later
    return Tier(link, members, ranks, edges, speed, min(ranks, nics), latency, is_network)


def _check(levels: tuple[Level, ...]) -> None:
    for inner, outer in pairwise(levels):
        if sum(outer.sizes) != len(inner.sizes):
            raise InputError(
                f"level `{outer.kind}` joins {sum(outer.sizes)} members, "
                f"but there are {len(inner.sizes)} groups of `{inner.kind}` below it",
                hint="the sizes of a level add up to the number of groups of the level below",
            )
    if levels and len(levels[-1].sizes) != 1:
        raise InputError(
            "a collective needs levels that end in one group of all its ranks",
            hint="add the level that joins the outermost groups",
        )


def ways(op: str, tiers: tuple[Tier, ...], protocols: tuple[str, ...]) -> tuple[Way, ...]:
    """Every way the library could run `op` here; empty for one rank."""
    if op not in OPS:
        raise unknown("collective", op, OPS)
    if not tiers:
        return ()
    usable = [p for p in protocols if all(getattr(tier.link, p) for tier in tiers)]
    if op in ("all_to_all", "gather", "scatter", "send"):
        return tuple(_peers(op, tiers, protocols))
    found = [_ring(op, tiers, protocol) for protocol in usable]
    if op == "all_reduce":
        found.extend(_trees(tiers, usable))
    return tuple(found)


def _peers(op: str, tiers: tuple[Tier, ...], protocols: tuple[str, ...]) -> Iterator[Way]:
    way = _send if op == "send" else _direct
    quick = [tier.link.quick for tier in tiers]
    if "ll" in protocols and all(quick):
        yield way(op, tiers, "ll", [mode for mode in quick if mode])
    if "simple" in protocols:
        modes = [tier.link.send if op == "send" else tier.link.direct for tier in tiers]
        yield way(op, tiers, "simple", modes)


def _trees(tiers: tuple[Tier, ...], protocols: list[str]) -> Iterator[Way]:
    # Two ranks make a tree of one edge, which is their ring.
    if tiers[-1].is_network and _ranks(tiers) > 2:
        yield from (_tree(tiers, protocol) for protocol in protocols)
    switch = tiers[0].link.multicast
    if switch and "simple" in protocols and all(tier.is_network for tier in tiers[1:]):
        yield _multicast(tiers, switch)


def _ring(op: str, tiers: tuple[Tier, ...], protocol: str) -> Way:
    ranks = _ranks(tiers)
    steps, wire, own = _work(op, ranks)
    modes = _modes(tiers, protocol)
    hops = sum(t.edges / ranks * t.hop(m) for t, m in zip(tiers, modes, strict=True))
    paces = [wire / (t.bandwidth * m.efficiency) for t, m in zip(tiers, modes, strict=True)]
    start = _start(tiers, modes) + steps * hops
    return _way("ring", protocol, start, paces, modes, own)


def _work(op: str, ranks: int) -> tuple[int, float, float]:
    """Steps, and per byte of the tensor: bytes on the busiest wire, bytes passed on in place."""
    if op == "all_reduce":
        return 2 * (ranks - 1), 2 * (ranks - 1) / ranks, 1 / ranks
    if op in ("all_gather", "reduce_scatter"):
        return ranks - 1, (ranks - 1) / ranks, 1 / ranks
    return ranks - 1, 1.0, 0.0


def _tree(tiers: tuple[Tier, ...], protocol: str) -> Way:
    modes = _modes(tiers, protocol)
    start, paces = _start(tiers, modes), []
    for tier, mode in zip(tiers, modes, strict=True):
        start += 2 * _depth(tier) * tier.hop(mode)
        wire = max(_tree_wire(tier), tier.link.pair)
        paces.append(wire / _tree_speed(tier, mode))
    return _way("tree", protocol, start, paces, modes)


def _multicast(tiers: tuple[Tier, ...], switch: Mode) -> Way:
    """The switch adds within the node, a tree between nodes."""
    inside = tiers[0]
    modes = [switch, *(tier.link.simple for tier in tiers[1:])]
    paces = [(1 + 1 / inside.members) / (inside.bandwidth * switch.efficiency)]
    start = _start(tiers, modes)
    for tier, mode in zip(tiers[1:], modes[1:], strict=True):
        start += 2 * _depth(tier) * tier.hop(mode)
        paces.append(_tree_wire(tier) / _tree_speed(tier, mode))
    return _way("multicast", "simple", start, paces, modes)


def _tree_wire(tier: Tier) -> float:
    """Bytes the busiest member sends per byte of the tensor.

    In a chain: up and down. Of two half trees over nodes an inner node of one is a leaf of the
    other: ½ up and 2·½ down, and ½ up. Two nodes are each the root of one half.
    """
    return 1.0 if tier.is_network and tier.members == 2 else 2.0


def _tree_speed(tier: Tier, mode: Mode) -> float:
    return tier.bandwidth * min(1.0, mode.efficiency * tier.link.tree)


def _depth(tier: Tier) -> int:
    return math.ceil(math.log2(tier.members)) if tier.is_network else tier.members - 1


def _direct(op: str, tiers: tuple[Tier, ...], protocol: str, modes: list[Mode]) -> Way:
    ranks = _ranks(tiers)
    start, paces = _start(tiers, modes), []
    for tier, mode in zip(tiers, modes, strict=True):
        peers = tier.ranks * (tier.members - 1)
        start += peers * tier.hop(mode)
        senders = tier.ranks if op == "all_to_all" else 1
        paces.append(senders * peers / ranks / (tier.bandwidth * mode.efficiency))
    return _way("direct", protocol, start, paces, modes, 1 / ranks)


def _send(op: str, tiers: tuple[Tier, ...], protocol: str, modes: list[Mode]) -> Way:
    """Over the outermost link, of which one sender gets one lane."""
    tier, mode = tiers[-1], modes[-1]
    start = _start((tier,), [mode]) + tier.hop(mode)
    pace = tier.lanes / (tier.bandwidth * mode.efficiency)
    return _way("direct", protocol, start, [pace], [mode])


def _way(
    algorithm: str,
    protocol: str,
    start: float,
    paces: list[float],
    modes: list[Mode],
    own: float = 0.0,
) -> Way:
    """The slowest tier paces the whole pipeline."""
    pace = max(paces)
    fill = modes[paces.index(pace)].fill
    return Way(algorithm, protocol, start, pace + own / modes[0].copy, math.sqrt(fill * pace))


def _start(tiers: tuple[Tier, ...], modes: list[Mode]) -> float:
    return tiers[0].link.launch + max(mode.start for mode in modes)


def _ranks(tiers: tuple[Tier, ...]) -> int:
    return sum(tier.edges for tier in tiers)


def _modes(tiers: tuple[Tier, ...], protocol: str) -> list[Mode]:
    return [getattr(tier.link, protocol) for tier in tiers]


@dataclass(frozen=True, slots=True)
class Priced:
    """The price of one message."""

    seconds: float
    way: Way | None  # None where there is nothing to communicate with
    sigma: float  # standard deviation of ln(measured / seconds)

    def interval(self) -> tuple[float, float]:
        """The seconds between which 80 % of measurements fall."""
        factor = math.exp(TEN_TO_NINETY * self.sigma)
        return self.seconds / factor, self.seconds * factor


@dataclass(frozen=True, slots=True)
class PricedMany:
    """The prices of many messages of one group."""

    seconds: NDArray[np.float64]
    choice: NDArray[np.intp]  # into `ways`
    ways: tuple[Way, ...]
    sigma: NDArray[np.float64]


@overload
def price(
    op: str, bytes: float, levels: tuple[Level, ...], *, protocols: tuple[str, ...] = ...
) -> Priced: ...


@overload
def price(
    op: str, bytes: NDArray[Any], levels: tuple[Level, ...], *, protocols: tuple[str, ...] = ...
) -> PricedMany: ...


def price(
    op: str,
    bytes: float | NDArray[Any],
    levels: tuple[Level, ...],
    *,
    protocols: tuple[str, ...] = PROTOCOLS,
) -> Priced | PricedMany:
    """What `op` on `bytes` costs the group of ranks that `levels` describes, innermost first.

    `protocols` leaves out the protocols that `NCCL_PROTO` disables.
    """
    table = _recall(op, levels, protocols)
    if isinstance(bytes, np.ndarray):
        return _many(table, bytes)
    return _one(table, bytes)


def push(bytes: float, levels: tuple[Level, ...], workers: int) -> Priced:
    """What it costs `workers` ranks to send `bytes` each to one server at once, or to pull them."""
    return price("send", bytes * workers, levels)


@dataclass(frozen=True, slots=True)
class _Table:
    """The ways of one group, ready to be priced at any size."""

    ways: tuple[Way, ...]
    laws: tuple[tuple[float, float, float], ...]  # start, slope, root of each way
    sigma: tuple[float, float]  # below LARGE, and from there
    tree_bytes: float = math.inf  # messages above it do not go by trees

    def costs(self, size: float) -> list[float]:
        """Seconds of a message by each way; infinite where the library would not take it."""
        root = math.sqrt(size)
        return [
            start + slope * size + bend * root
            if size <= self.tree_bytes or way.algorithm != "tree"
            else math.inf
            for (start, slope, bend), way in zip(self.laws, self.ways, strict=True)
        ]


def _recall(op: str, levels: tuple[Level, ...], protocols: tuple[str, ...]) -> _Table:
    """The table of levels seen before, by identity: to hash a thousand nodes takes too long."""
    key = (id(levels), op, protocols)
    seen = _RECENT.get(key)
    if seen is not None and seen[0] is levels:
        return seen[1]
    table = _table(op, levels, protocols)
    if len(_RECENT) >= 4096:
        _RECENT.clear()
    _RECENT[key] = (levels, table)
    return table


@lru_cache(maxsize=4096)
def _table(op: str, levels: tuple[Level, ...], protocols: tuple[str, ...]) -> _Table:
    for protocol in protocols:
        if protocol not in PROTOCOLS:
            raise unknown("protocol", protocol, PROTOCOLS)
    shipped = links()
    tiers = tiers_of(levels, lambda level: link_of(level, shipped))
    found = _timed(op, levels) or ways(op, tiers, protocols)
    if tiers and not found:
        raise InputError(f"no protocol is left to run `{op}` with", hint="name ll, ll128 or simple")
    laws = tuple((way.start, way.slope, way.root) for way in found)
    most = min((level.tree_bytes for level in levels), default=math.inf)
    return _Table(found, laws, _sigma(op, tiers), most)


def _timed(op: str, levels: tuple[Level, ...]) -> tuple[Way, ...]:
    """The law that was measured for this op and number of ranks, where there is one."""
    ranks = math.prod(max(level.sizes) for level in levels)
    rows = [m for m in (levels[-1].timed if levels else ()) if (m.op, m.ranks) == (op, ranks)]
    at = levels[-1] if levels else None
    return tuple(
        Way("measured", "simple", m.start * at.later, m.slope * at.slower) for m in rows if at
    )


def _sigma(op: str, tiers: tuple[Tier, ...]) -> tuple[float, float]:
    """The spread of the least certain link on the way."""
    family = {"send": "send", "all_to_all": "direct", "gather": "direct", "scatter": "direct"}
    spreads = [tier.link.sigma[family.get(op, "ring")] for tier in tiers] or [(0.0, 0.0)]
    return max(small for small, _ in spreads), max(large for _, large in spreads)


def _one(table: _Table, size: float) -> Priced:
    if size < 0:
        raise InputError(f"a message of {size} bytes")
    if not table.ways:
        return Priced(0.0, None, 0.0)
    costs = table.costs(size)
    best = min(range(len(costs)), key=costs.__getitem__)
    return Priced(costs[best], table.ways[best], table.sigma[size >= LARGE])


def _many(table: _Table, sizes: NDArray[Any]) -> PricedMany:
    size = np.asarray(sizes, np.float64)
    if size.size and size.min() < 0:
        raise InputError(f"a message of {size.min()} bytes")
    if not table.ways:
        nothing = np.zeros(size.shape)
        return PricedMany(nothing, nothing.astype(np.intp), (), nothing)
    root = np.sqrt(size)
    costs = np.stack([start + slope * size + bend * root for start, slope, bend in table.laws])
    if table.tree_bytes < math.inf:
        trees = np.array([way.algorithm == "tree" for way in table.ways])
        costs[trees] = np.where(size > table.tree_bytes, np.inf, costs[trees])
    choice = costs.argmin(axis=0)
    seconds = np.take_along_axis(costs, choice[None], axis=0)[0]
    return PricedMany(seconds, choice, table.ways, np.asarray(table.sigma)[(size >= LARGE) * 1])
