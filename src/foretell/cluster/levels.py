"""What a collective over some ranks sees of the cluster: its tiers, innermost first.

The members of the first tier are devices; their bandwidth is the narrowest cut of the node's wires
that parts them (`Node.spread`). The members of the next are nodes; theirs is what their devices
can push out through all NICs together (`Node.exit`). From then on members are groups of nodes
(leaf, rack, …); theirs is the sum of what their own members push out, or the uplink if less.

Groups that communicate at the same time (`beside`) share fairly what they both use: the NICs of a
node, the uplinks of a switch, the wires inside a node.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from foretell.cluster.level import Level

if TYPE_CHECKING:
    from foretell.cluster.cluster import Cluster
    from foretell.cluster.fabric import Grouping
    from foretell.cluster.node import Node, Slots

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Group = tuple[int, ...]
Stand = tuple[Ints, Floats]  # one node of each member of a group, and what that member pushes out


@dataclass(frozen=True)
class Members:
    """A group of ranks node by node; nodes that hold the same slots of the same kind are alike."""

    nodes: Ints  # the nodes it stands on, in order
    counts: Ints  # its ranks on each
    alike: Ints  # which of `classes` each node belongs to
    classes: tuple[tuple[int, "Slots"], ...]  # (kind of node, slots)


def levels(cluster: "Cluster", ranks: Group, beside: Sequence[Group]) -> tuple[Level, ...]:
    """The tiers of a group of ranks; empty for a single rank."""
    members = _members(cluster, ranks)
    others = [_members(cluster, group) for group in beside]
    found = []
    if members.counts.max() > 1:
        found.append(_inner(cluster, members, others))
    if len(members.nodes) > 1:
        found += _outer(cluster, members, [m for m in others if len(m.nodes) > 1])
    return tuple(found)


def _members(cluster: "Cluster", ranks: Group) -> Members:
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


def _inner(cluster: "Cluster", members: Members, others: Sequence[Members]) -> Level:
    """The tier inside nodes."""
    spreads = [
        cluster.groups[kind][0].spread(slots) if len(slots) > 1 else None
        for kind, slots in members.classes
    ]
    alone = np.array([s.bandwidth if s else inf for s in spreads])[members.alike]
    bandwidths = alone * _share_inside(cluster, members, others) if others else alone
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


def _outer(cluster: "Cluster", members: Members, others: Sequence[Members]) -> list[Level]:
    """The tiers between nodes; one that narrows nothing is counted in the next."""
    stands = _stands(cluster, [members, *others])
    found = []
    for grouping in cluster.fabric.groupings:
        nodes, push = stands[0]
        group = grouping.group[nodes]
        sizes = np.bincount(np.unique(group, return_inverse=True)[1])
        above = _gathered(grouping, stands)
        if len(sizes) > 1 and above[0][1].sum() > push.sum() * (1 - 1e-9):
            continue
        if sizes.max() > 1:
            found.append(_between(cluster, members, stands[0], grouping))
        if len(sizes) == 1:
            break
        stands = above
    return found


def _between(cluster: "Cluster", members: Members, stand: Stand, grouping: "Grouping") -> Level:
    """The tier of members that one grouping joins."""
    nodes, push = stand
    group = grouping.group[nodes]
    kinds = [(cluster.groups[kind][0], slots) for kind, slots in members.classes]
    slowest = _slowest(group, push)
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


def _slowest(group: Ints, push: Floats) -> Floats:
    """The slowest member of each group; infinite for a group of one."""
    _, at = np.unique(group, return_inverse=True)
    slowest = np.full(at.max() + 1, inf)
    np.minimum.at(slowest, at, push)
    slowest[np.bincount(at) == 1] = inf
    return slowest


def _crossing(cluster: "Cluster", nodes: Ints, group: Ints) -> float:
    """Seconds in the network from one member to its neighbour in the same group, at most."""
    fabric = cluster.fabric
    by_group = np.argsort(group, kind="stable")
    same = np.flatnonzero(np.diff(group[by_group]) == 0)
    home = fabric.home[fabric.first[nodes[by_group]]]
    pairs = np.unique(np.stack([home[same], home[same + 1]], axis=1), axis=0)
    return max(fabric.delay(a, b) for a, b in pairs.tolist())


def _stands(cluster: "Cluster", groups: Sequence[Members]) -> list[Stand]:
    """The nodes of each group and what it pushes out of each, NICs being shared."""
    alone = [(m.nodes, _pushes(cluster, m)) for m in groups]
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
    return [(nodes, push) for (nodes, _), push in zip(alone, _fair(alone, limit), strict=True)]


def _pushes(cluster: "Cluster", members: Members) -> Floats:
    exits = [cluster.groups[kind][0].exit(slots).bandwidth for kind, slots in members.classes]
    return np.array(exits)[members.alike]


def _gathered(grouping: "Grouping", stands: Sequence[Stand]) -> list[Stand]:
    """The same with groups of nodes as members: one node for each, and what it pushes out."""
    reps, wants = [], []
    for nodes, push in stands:
        ids, first, at = np.unique(grouping.group[nodes], return_index=True, return_inverse=True)
        total = np.minimum(np.bincount(at, weights=push), grouping.out[ids])
        reps.append(nodes[first])
        # a group that stands within one of them needs no uplink
        wants.append((ids, total if len(ids) > 1 else np.zeros(1)))
    if len(stands) == 1:
        return [(reps[0], wants[0][1])]
    limit = {i: float(grouping.out[i]) for ids, _ in wants for i in ids.tolist()}
    return list(zip(reps, _fair(wants, limit), strict=True))


def _fair(wants: Sequence[Stand], limit: Mapping[int, float]) -> list[Floats]:
    """What each gets of shared limits when none gets more than another that wants more."""
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


def _share_inside(cluster: "Cluster", members: Members, others: Sequence[Members]) -> Floats:
    """On each node, the part of the busiest wire of this group's ring that is left to it."""
    here: dict[int, list[tuple[int, ...]]] = {node: [] for node in members.nodes.tolist()}
    for m in others:
        for node, c in zip(m.nodes.tolist(), m.alike.tolist(), strict=True):
            if node in here and len(m.classes[c][1]) > 1:
                here[node].append(m.classes[c][1])
    return np.array(
        [
            _share(_kind(cluster, node), members.classes[c][1], here[node])
            for node, c in zip(members.nodes.tolist(), members.alike.tolist(), strict=True)
        ]
    )


def _share(node: "Node", slots: "Slots", others: "Sequence[Slots]") -> float:
    own = node.ring_load(slots)
    total = sum((node.ring_load(other) for other in others), start=own)
    return min((n / total[wire] for wire, n in own.items()), default=1.0)


def _kind(cluster: "Cluster", node: int) -> "Node":
    return cluster.groups[int(cluster.kinds[node])][0]
