"""The ways NCCL (and gloo, its ring) can run a collective over a topology, each as a law of size.

Every way costs `start + slope·bytes + root·√bytes` seconds. With N ranks, S bytes, and for each
tier t of the topology its speed Bₜ = efficiency·bandwidth and its share of the ring's edges Eₜ/N:

    ring       launch + start + steps·Σₜ (Eₜ/N)·hopₜ + wire·S/min Bₜ + own·S/copy + √(fill·wire·S/B)
    tree       launch + start + 2·Σₜ depthₜ·hopₜ + S·maxₜ 2/Bₜ + √(fill·…)       1/B for two nodes
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from foretell.cluster.level import Level
from foretell.cost.link import Link, Mode
from foretell.errors import InputError, unknown

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
        paces.append(_tree_wire(tier) / _tree_speed(tier, mode))
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
