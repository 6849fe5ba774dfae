"""Which ring and which trees a collective takes.

Rings visit whole groups of nodes before the next (a spine's racks, a rack's leaves, a leaf's
nodes), and inside a node follow the widest links. Trees are NCCL's: a chain inside every node, and
between the heads of the chains two complementary binary trees, so that no node is an inner vertex
of both and each carries half the data (Sanders, Speck and Träff 2009).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from foretell.cluster.cluster import Cluster


@dataclass(frozen=True)
class Tree:
    """A tree over ranks: `parents[i]` is the parent of `ranks[i]`, -1 for the root."""

    ranks: tuple[int, ...]
    parents: tuple[int, ...]

    @cached_property
    def depth(self) -> int:
        """How many steps the farthest rank is from the root."""
        parent = dict(zip(self.ranks, self.parents, strict=True))
        far = {-1: -1}
        for rank in self.ranks:
            climb = []
            while rank not in far:
                climb.append(rank)
                rank = parent[rank]
            for up, child in enumerate(reversed(climb), start=far[rank] + 1):
                far[child] = up
        return max(far.values())


def ring(cluster: "Cluster", ranks: Sequence[int]) -> tuple[int, ...]:
    """The ranks in the order of a good ring, starting at the lowest."""
    chains = _chains(cluster, ranks)
    order = [rank for chain in chains for rank in chain]
    start = order.index(min(order))
    return tuple(order[start:] + order[:start])


def tree(cluster: "Cluster", ranks: Sequence[int]) -> tuple[Tree, Tree]:
    """Two trees that share the work; alike where there is only one node."""
    chains = _chains(cluster, ranks, closed=False)
    inner = {b: a for chain in chains for a, b in pairwise(chain)}
    heads = [chain[0] for chain in chains]
    trees = []
    for parents in double_tree(len(heads)):
        up = inner | {heads[i]: heads[p] if p >= 0 else -1 for i, p in enumerate(parents)}
        order = tuple(rank for chain in chains for rank in chain)
        trees.append(Tree(order, tuple(up[rank] for rank in order)))
    return trees[0], trees[1]


def _chains(cluster: "Cluster", ranks: Sequence[int], closed: bool = True) -> list[tuple[int, ...]]:
    """The ranks of each node in their best order, nodes in the order of the network."""
    group = np.unique(np.array(ranks, dtype=np.int64))
    nodes = cluster.nodes[group]
    keys = [cluster.slots[group], nodes, *(g.group[nodes] for g in cluster.fabric.groupings)]
    group = group[np.lexsort(keys)]
    nodes = cluster.nodes[group]
    parts = np.split(group, np.flatnonzero(np.diff(nodes)) + 1)
    alone = closed and len(parts) == 1
    return [_local(cluster, part.tolist(), closed=alone) for part in parts]


def _local(cluster: "Cluster", ranks: list[int], closed: bool) -> tuple[int, ...]:
    slots = cluster.slots[ranks].tolist()
    at = dict(zip(slots, ranks, strict=True))
    return tuple(at[s] for s in cluster.node(ranks[0]).order(tuple(slots), closed=closed))


def double_tree(size: int) -> tuple[list[int], list[int]]:
    """The parents in two binary trees over 0 … size-1; leaves of one are inner in the other.

    The second is the first shifted by one place, or mirrored where the size is even.
    """
    first = [_parent(i, size) for i in range(size)]
    if size % 2:
        second = [_shifted(first[(i - 1) % size], size) for i in range(size)]
    else:
        second = [_mirrored(first[size - 1 - i], size) for i in range(size)]
    return first, second


def _shifted(parent: int, size: int) -> int:
    return -1 if parent < 0 else (parent + 1) % size


def _mirrored(parent: int, size: int) -> int:
    return -1 if parent < 0 else size - 1 - parent


def _parent(i: int, size: int) -> int:
    """The in-order binary tree in which odd numbers are leaves and 0 is the root."""
    if i == 0:
        return -1
    low = i & -i
    up = (i ^ low) | (low << 1)
    return up if up < size else i ^ low
