"""A machine: its devices, the links between them, and what groups of ranks see of both.

The network between some ranks of a collective: its tiers and its ring.

The members of the first tier are devices; their bandwidth is the narrowest cut of the node's wires
that parts them (`Node.spread`). The members of the next are nodes; theirs is what their devices
can send out through all NICs together (`Node.exit`). From then on members are groups of nodes
(leaf, rack, …); theirs is the sum of what their own members send out, or the uplink if less.

Groups that communicate at the same time (`beside`) share fairly what they both use: the NICs of a
node, the uplinks of a switch, the wires inside a node.

Paths and cuts in a small undirected graph whose links carry their bandwidth each way.

    widest   the path whose narrowest link is widest; among those the quickest   → `widest`
    quickest the path of least latency; among those the fewest links             → `quickest`
    flow     how much can leave some vertices for others over all paths at once   → `flow`
    spread   the narrowest cut that parts any of the given vertices               → `spread`

By the max-flow min-cut theorem `spread` is what one member of a ring or tree over those vertices
can send while it receives as much: every ring crosses every cut in both directions.
Ties go to the lower vertex and link number, so answers never depend on memory or hash order.

Which ring a collective takes: it visits whole groups of nodes before the next (a spine's racks, a
rack's leaves, a leaf's nodes), and inside a node follows the widest links.

The best order in which to visit a few points, as a closed ring or an open chain. Best is: the
narrowest step is as wide as can be; then the steps together are as quick as can be; then the lowest
numbers come first. Exact up to `EXACT` points by dynamic programming over subsets (Held and Karp
1962), with the width as a threshold lowered until a tour exists; beyond that a greedy tour, or the
points as they are counted, improved by reversing stretches of it (2-opt).

Devices, links, and kinds of node: what their makers promise, and the wires between them.

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

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, wraps
from heapq import heappop, heappush
from itertools import combinations, pairwise
from math import inf
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from foretell.errors import InputError, unknown

if TYPE_CHECKING:
    from foretell.cluster.cluster import Cluster, Grouping


Arc = tuple[int, int]  # (neighbour, link)
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Group = tuple[int, ...]
# One node of each member of a group, and the bytes/s that member can send out of itself.
NodeRates = tuple[Ints, Floats]
Matrix = Sequence[Sequence[float]]
Order = tuple[int, ...]
EXACT = 8  # 2^7 subsets of 7 points: a few milliseconds


class Message(NamedTuple):
    """A measured collective: start + bytes · slope."""

    op: str
    ranks: int
    start: float  # seconds
    slope: float  # seconds a byte


@dataclass(frozen=True)
class Level:
    """One tier of a group of ranks.

    At the innermost tier a member is one device, at the next one whole node, then one leaf or
    rack, and so on. A sub-group of one member sends nothing: its bandwidth is infinite, and a
    tier made only of such sub-groups is left out.
    """

    kind: str  # of the links that bound it: nvswitch, nvlink, xgmi, pcie, infiniband, ethernet …
    sizes: tuple[int, ...]  # members of each sub-group
    bandwidth: float  # bytes/s one member sends while receiving as much: the slowest member's
    latency: float  # seconds, one message, one way, the slowest pair of neighbours
    channels: int  # parallel paths a member has: NVLinks inside a node, NICs between nodes
    name: str = ""  # what joins the members: node, leaf, rack, spine …
    bandwidths: tuple[float, ...] = ()  # the slowest member of each sub-group, as `sizes`
    later: float = 1.0  # times as long as priced until bytes move (→ foretell.cluster.cluster)
    slower: float = 1.0  # times as long as priced that a byte takes
    tree_bytes: float = inf  # all-reduces above this size go by rings
    timed: tuple[Message, ...] = ()  # measured collectives, used instead of formulas


@dataclass(frozen=True)
class Wires:
    """Links between vertices 0 … size-1, in columns."""

    size: int
    ends: tuple[tuple[int, int], ...]
    bandwidth: tuple[float, ...]
    latency: tuple[float, ...]

    @cached_property
    def arcs(self) -> tuple[tuple[Arc, ...], ...]:
        """The neighbours of each vertex and the link to each, lowest first."""
        out: list[list[Arc]] = [[] for _ in range(self.size)]
        for link, (a, b) in enumerate(self.ends):
            out[a].append((b, link))
            out[b].append((a, link))
        return tuple(tuple(sorted(row)) for row in out)


def widest(wires: Wires, source: int, closed: Collection[int] = ()) -> dict[int, tuple[int, ...]]:
    """The links of the widest path to every vertex that can be reached.

    Vertices in `closed` may start or end a path but not be passed through.
    """
    width = _widths(wires, source, closed)
    found: dict[int, tuple[int, ...]] = {}
    for limit in sorted(set(width.values()), reverse=True):
        paths = quickest(wires, source, closed, limit)
        found |= {v: paths[v] for v, w in width.items() if w == limit}
    return found


def _widths(wires: Wires, source: int, closed: Collection[int]) -> dict[int, float]:
    best = {source: inf}
    heap = [(-inf, source)]
    while heap:
        width, here = heappop(heap)
        if -width < best[here] or (here in closed and here != source):
            continue
        for there, link in wires.arcs[here]:
            reach = min(-width, wires.bandwidth[link])
            if reach > best.get(there, 0.0):
                best[there] = reach
                heappush(heap, (-reach, there))
    return best


def quickest(
    wires: Wires, source: int, closed: Collection[int] = (), limit: float = 0.0
) -> dict[int, tuple[int, ...]]:
    """The links of the path of least latency to every vertex, over links of at least `limit`."""
    done: dict[int, tuple[int, ...]] = {}
    heap: list[tuple[float, int, tuple[int, ...], int]] = [(0.0, 0, (), source)]
    while heap:
        seconds, hops, path, here = heappop(heap)
        if here in done:
            continue
        done[here] = path
        if here in closed and here != source:
            continue
        for there, link in wires.arcs[here]:
            if there not in done and wires.bandwidth[link] >= limit:
                heappush(heap, (seconds + wires.latency[link], hops + 1, (*path, link), there))
    return done


def flow(
    wires: Wires,
    sources: Iterable[int],
    sinks: Iterable[int],
    *,
    links: Collection[int] | None = None,
    absent: Collection[int] = (),
) -> float:
    """Bytes/s that can go from all `sources` to all `sinks` at once, avoiding `absent` vertices."""
    room = _room(wires, links, absent)
    starts, targets = sorted(set(sources)), set(sinks)
    total = 0.0
    while path := _augment(room, starts, targets):
        amount = min(room[a][b] for a, b in path)
        for a, b in path:
            room[a][b] -= amount
            room[b][a] += amount
        total += amount
    return total


def _room(
    wires: Wires, links: Collection[int] | None, absent: Collection[int]
) -> list[dict[int, float]]:
    room: list[dict[int, float]] = [{} for _ in range(wires.size)]
    for link, (a, b) in enumerate(wires.ends):
        if (links is None or link in links) and a not in absent and b not in absent:
            room[a][b] = room[a].get(b, 0.0) + wires.bandwidth[link]
            room[b][a] = room[b].get(a, 0.0) + wires.bandwidth[link]
    return room


def _augment(
    room: Sequence[dict[int, float]], starts: Sequence[int], targets: Collection[int]
) -> list[tuple[int, int]]:
    """A shortest path with room on every link, found breadth first; empty when there is none."""
    came: dict[int, int] = dict.fromkeys(starts, -1)
    queue = deque(starts)
    while queue:
        here = queue.popleft()
        if here in targets:
            path = []
            while came[here] >= 0:
                path.append((came[here], here))
                here = came[here]
            return path
        for there, left in room[here].items():
            # Flows are sums of a few bandwidths: what is left of one below a byte/s is rounding.
            if left > 1.0 and there not in came:
                came[there] = here
                queue.append(there)
    return []


@dataclass(frozen=True)
class Members:
    """A group of ranks node by node; nodes that hold the same slots of the same kind are alike."""

    nodes: Ints  # the nodes it stands on, in order
    counts: Ints  # its ranks on each
    alike: Ints  # which of `classes` each node belongs to
    classes: tuple[tuple[int, Slots], ...]  # (kind of node, slots)


def members_of(cluster: Cluster, ranks: Group) -> Members:
    """A group of ranks node by node."""
    group = np.unique(np.array(ranks, dtype=np.int64))
    nodes, at = np.unique(cluster.nodes[group], return_inverse=True)
    slots = cluster.slots[group]
    present = np.zeros((len(nodes), int(slots.max()) + 1), dtype=np.int64)
    present[at, slots] = 1
    rows = np.concatenate([cluster.kinds[nodes][:, None], present], axis=1)
    classes, alike = np.unique(rows, axis=0, return_inverse=True)
    return Members(
        nodes,
        present.sum(axis=1),
        alike.reshape(-1),
        tuple((int(row[0]), tuple(np.flatnonzero(row[1:]).tolist())) for row in classes),
    )


def inner(cluster: Cluster, members: Members, others: Sequence[Members]) -> Level:
    """The tier inside nodes."""
    for some in (members, *others):  # what spreads and shares are made of
        for kind, slots in some.classes:
            cluster.groups[kind][0].order(slots, closed=True)
    spreads = [
        cluster.groups[kind][0].spread(slots) if len(slots) > 1 else None
        for kind, slots in members.classes
    ]
    alone = np.array([s.bandwidth if s else inf for s in spreads])[members.alike]
    if others:
        wires = np.array([s.wires if s else inf for s in spreads])[members.alike]
        bandwidths = np.minimum(alone, wires * _share_inside(cluster, members, others))
    else:
        bandwidths = alone
    slowest = spreads[int(members.alike[int(np.argmin(bandwidths))])]
    assert slowest is not None  # at least one node holds two of the ranks
    return Level(
        slowest.kind,
        tuple(members.counts.tolist()),
        float(bandwidths.min()),
        max(s.latency for s in spreads if s),
        min(s.channels for s in spreads if s),
        "node",
        tuple(bandwidths.tolist()),
    )


def outer(cluster: Cluster, members: Members, others: Sequence[Members]) -> list[Level]:
    """The tiers between nodes; one that narrows nothing is counted in the next."""
    rates = _node_rates(cluster, [members, *others])
    found = []
    for grouping in cluster.fabric.groupings:
        nodes, rate = rates[0]
        group = grouping.group[nodes]
        sizes = np.bincount(np.unique(group, return_inverse=True)[1])
        above = _gathered(grouping, rates)
        if len(sizes) > 1 and above[0][1].sum() > rate.sum() * (1 - 1e-9):
            continue
        if sizes.max() > 1:
            found.append(_between(cluster, members, rates[0], grouping))
        if len(sizes) == 1:
            break
        rates = above
    return found


def _between(cluster: Cluster, members: Members, rates: NodeRates, grouping: Grouping) -> Level:
    """The tier of members that one grouping joins."""
    nodes, rate = rates
    group = grouping.group[nodes]
    kinds = [(cluster.groups[kind][0], slots) for kind, slots in members.classes]
    slowest = _slowest(group, rate)
    each = min(nic.bandwidth for node, _ in kinds for nic in node.nics)
    way_out = max(node.exit(slots).latency for node, slots in kinds)
    thinnest = min(kinds, key=lambda kind: kind[0].exit(kind[1]).bandwidth)[0]
    return Level(
        thinnest.nics[0].kind,
        tuple(np.bincount(np.unique(group, return_inverse=True)[1]).tolist()),
        float(slowest.min()),
        2 * way_out + _crossing(cluster, nodes, group),
        max(1, round(float(slowest.min()) / each)),
        grouping.name,
        tuple(slowest.tolist()),
    )


def _slowest(group: Ints, rate: Floats) -> Floats:
    """The slowest member of each group; infinite for a group of one."""
    _, at = np.unique(group, return_inverse=True)
    slowest = np.full(at.max() + 1, inf)
    np.minimum.at(slowest, at, rate)
    slowest[np.bincount(at) == 1] = inf
    return slowest


def _crossing(cluster: Cluster, nodes: Ints, group: Ints) -> float:
    """Seconds in the network from one member to its neighbour in the same group, at most."""
    fabric = cluster.fabric
    by_group = np.argsort(group, kind="stable")
    same = np.flatnonzero(np.diff(group[by_group]) == 0)
    home = fabric.home[fabric.first[nodes[by_group]]]
    pairs = np.unique(np.stack([home[same], home[same + 1]], axis=1), axis=0)
    return max(fabric.delay(a, b) for a, b in pairs.tolist())


def _node_rates(cluster: Cluster, groups: Sequence[Members]) -> list[NodeRates]:
    """The nodes of each group and what it can send out of each; NICs are shared."""
    alone = [(m.nodes, _exit_rates(cluster, m)) for m in groups]
    if len(groups) == 1:
        return alone
    held: dict[int, set[int]] = {}
    for m in groups:
        for node, c in zip(m.nodes.tolist(), m.alike.tolist(), strict=True):
            held.setdefault(node, set()).update(m.classes[c][1])
    limit = {
        node: _kind(cluster, node).exit(tuple(sorted(slots))).bandwidth
        for node, slots in held.items()
    }
    return [(nodes, rate) for (nodes, _), rate in zip(alone, _fair(alone, limit), strict=True)]


def _exit_rates(cluster: Cluster, members: Members) -> Floats:
    exits = [cluster.groups[kind][0].exit(slots).bandwidth for kind, slots in members.classes]
    return np.array(exits)[members.alike]


def _gathered(grouping: Grouping, rates: Sequence[NodeRates]) -> list[NodeRates]:
    """The same with groups of nodes as members: one node for each, and what it can send out."""
    reps, wants = [], []
    for nodes, rate in rates:
        ids, first, at = np.unique(grouping.group[nodes], return_index=True, return_inverse=True)
        total = np.minimum(np.bincount(at, weights=rate), grouping.out[ids])
        reps.append(nodes[first])
        # a group inside one of them needs no uplink
        wants.append((ids, total if len(ids) > 1 else np.zeros(1)))
    if len(rates) == 1:
        return [(reps[0], wants[0][1])]
    limit = {i: float(grouping.out[i]) for ids, _ in wants for i in ids.tolist()}
    return list(zip(reps, _fair(wants, limit), strict=True))


def _fair(wants: Sequence[NodeRates], limit: Mapping[int, float]) -> list[Floats]:
    """Max-min fair shares of common limits."""
    wanted: dict[int, list[float]] = {}
    for places, amounts in wants:
        for place, amount in zip(places.tolist(), amounts.tolist(), strict=True):
            wanted.setdefault(place, []).append(amount)
    level = {place: _filled(amounts, limit[place]) for place, amounts in wanted.items()}
    return [np.minimum(w, [level[place] for place in at.tolist()]) for at, w in wants]


def _filled(wanted: Sequence[float], limit: float) -> float:
    """The level to which a limit fills up what is wanted of it."""
    for i, amount in enumerate(sorted(wanted)):
        share = limit / (len(wanted) - i)
        if amount > share:
            return share
        limit -= amount
    return inf


def _share_inside(cluster: Cluster, members: Members, others: Sequence[Members]) -> Floats:
    """On each node, the part of the busiest wire of this group's ring that is left to it."""
    here: dict[int, list[tuple[int, ...]]] = {node: [] for node in members.nodes.tolist()}
    for m in others:
        for node, c in zip(m.nodes.tolist(), m.alike.tolist(), strict=True):
            if node in here and len(m.classes[c][1]) > 1:
                here[node].append(m.classes[c][1])
    found = []
    for number, c in zip(members.nodes.tolist(), members.alike.tolist(), strict=True):
        node = _kind(cluster, number)
        own = node.ring_load(members.classes[c][1])
        total = sum((node.ring_load(other) for other in here[number]), start=own)
        found.append(min((n / total[wire] for wire, n in own.items()), default=1.0))
    return np.array(found)


def _kind(cluster: Cluster, node: int) -> Node:
    return cluster.groups[int(cluster.kinds[node])][0]


def ring_of(cluster: Cluster, ranks: Sequence[int]) -> tuple[int, ...]:
    """The ranks in the order of a good ring, starting at the lowest."""
    chains = _chains(cluster, ranks)
    order = [rank for chain in chains for rank in chain]
    start = order.index(min(order))
    return tuple(order[start:] + order[:start])


def _chains(cluster: Cluster, ranks: Sequence[int]) -> list[tuple[int, ...]]:
    """The ranks of each node in their best order, nodes in the order of the network."""
    group = np.unique(np.array(ranks, dtype=np.int64))
    nodes = cluster.nodes[group]
    keys = [cluster.slots[group], nodes, *(g.group[nodes] for g in cluster.fabric.groupings)]
    group = group[np.lexsort(keys)]
    nodes = cluster.nodes[group]
    parts = np.split(group, np.flatnonzero(np.diff(nodes)) + 1)
    return [_local(cluster, part.tolist(), closed=len(parts) == 1) for part in parts]


def _local(cluster: Cluster, ranks: list[int], closed: bool) -> tuple[int, ...]:
    slots = cluster.slots[ranks].tolist()
    at = dict(zip(slots, ranks, strict=True))
    return tuple(at[s] for s in cluster.node(ranks[0]).order(tuple(slots), closed=closed))


def tour(width: Matrix, delay: Matrix, *, closed: bool) -> Order:
    """The best tour of points 0 … n-1: a ring from 0 where it is closed, else a chain."""
    size = len(width)
    if size <= 3 and (closed or size < 3):
        return tuple(range(size))
    steps = [[round(d * 1e12) for d in row] for row in delay]  # whole picoseconds: ties are exact
    if _all_equal(width) and _all_equal(steps):
        return tuple(range(size))
    if size > EXACT:
        starts = (_greedy(width, steps), tuple(range(size)))
        start = min(starts, key=lambda order: _cost(width, steps, order, closed))
        return _improved(width, steps, start, closed)
    for limit in sorted({w for i, row in enumerate(width) for w in row[:i]}, reverse=True):
        if found := _exact(width, steps, limit, closed):
            return found
    return tuple(range(size))


def _all_equal(matrix: Matrix) -> bool:
    return len({x for i, row in enumerate(matrix) for j, x in enumerate(row) if i != j}) <= 1


def _exact(width: Matrix, steps: Matrix, limit: float, closed: bool) -> Order:
    """The quickest tour over steps at least `limit` wide; empty when there is none."""
    size = len(width)
    # best[(visited, last)] = (delay, order)
    best: dict[tuple[int, int], tuple[float, Order]] = {
        (1 << v, v): (0, (v,)) for v in ((0,) if closed else range(size))
    }
    for _ in range(size - 1):
        best = _longer(best, width, steps, limit)
    ends = [
        (cost + (steps[last][0] if closed else 0), order)
        for (_, last), (cost, order) in best.items()
        if not closed or width[last][0] >= limit
    ]
    return min(ends)[1] if ends else ()


def _longer(
    best: dict[tuple[int, int], tuple[float, Order]], width: Matrix, steps: Matrix, limit: float
) -> dict[tuple[int, int], tuple[float, Order]]:
    """Every partial tour with one more point."""
    out: dict[tuple[int, int], tuple[float, Order]] = {}
    for (seen, last), (cost, order) in best.items():
        for v in range(len(width)):
            if seen >> v & 1 or width[last][v] < limit:
                continue
            key, new = (seen | 1 << v, v), (cost + steps[last][v], (*order, v))
            if key not in out or new < out[key]:
                out[key] = new
    return out


def _greedy(width: Matrix, steps: Matrix) -> Order:
    order = [0]
    left = set(range(1, len(width)))
    while left:
        here = order[-1]
        nearest = min(left, key=lambda v: (-width[here][v], steps[here][v], v))
        order.append(nearest)
        left.remove(nearest)
    return tuple(order)


def _improved(width: Matrix, steps: Matrix, order: Order, closed: bool) -> Order:
    cost = _cost(width, steps, order, closed)
    better = True
    while better:
        better = False
        for i, j in combinations(range(1, len(order) + 1), 2):
            other = order[:i] + order[i:j][::-1] + order[j:]
            if (new := _cost(width, steps, other, closed)) < cost:
                order, cost, better = other, new, True
    return order


def _cost(width: Matrix, steps: Matrix, order: Order, closed: bool) -> tuple[float, float]:
    pairs = list(pairwise(order))
    if closed:
        pairs.append((order[-1], order[0]))
    return -min(width[a][b] for a, b in pairs), sum(steps[a][b] for a, b in pairs)


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
    # what its ops took here (→ foretell.cost.price); None: formulas price them
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
