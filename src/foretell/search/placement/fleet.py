"""The machines as a search sees them: cells of devices that act alike, and sets of cells.

A device group is all devices of one kind in nodes of one kind. A cell is a part of it whose devices
always do the same with as many samples: simulating one of them stands for all. A box is the nodes
that a cell stands on, sharing NICs and buses. Candidates for an op group are sets of cells.

Everything is put in an order that the devices' own numbers give, never their place in the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np

from foretell.cluster import Cluster, Device
from foretell.errors import InputError

MOST_CELLS = 12  # beyond, nodes of one kind act in larger blocks: what a search can tell apart
MOST_GROUPS = 4  # device groups up to which every subset is a candidate, as in TAG (2ᵀ - 1)


@dataclass(frozen=True)
class Cell:
    """Devices that act alike."""

    ranks: tuple[int, ...]
    kind: int  # of `Fleet.kinds`
    group: int  # device group
    box: int
    nodes: int  # machines it stands on


@dataclass(frozen=True)
class Fleet:
    """A cluster cut into cells, and the sets of cells that may be chosen."""

    cluster: Cluster
    kinds: tuple[Device, ...]  # the fastest first
    cells: tuple[Cell, ...]
    sets: tuple[tuple[int, ...], ...]  # cells of each candidate, ascending; the first has them all

    @property
    def num_groups(self) -> int:
        """Device groups."""
        return 1 + max(cell.group for cell in self.cells)

    def ranks(self, chosen: int) -> tuple[int, ...]:
        """The ranks of a candidate set, cell by cell."""
        return tuple(r for c in self.sets[chosen] for r in self.cells[c].ranks)

    def way_out(self, cell: Cell) -> float:
        """Bytes a second of the NICs of one of its nodes."""
        return sum(nic.bandwidth for nic in self.cluster.node(cell.ranks[0]).nics)

    def title(self, chosen: int) -> str:
        """A candidate in words: `4 v100-32 + 2 p100-pcie`."""
        counts: dict[str, int] = {}
        for c in self.sets[chosen]:
            name = self.kinds[self.cells[c].kind].name
            counts[name] = counts.get(name, 0) + len(self.cells[c].ranks)
        return " + ".join(f"{n} {name}" for name, n in counts.items())

    def group_set(self, groups: tuple[int, ...]) -> int:
        """The candidate of all cells of some device groups."""
        wanted = tuple(i for i, cell in enumerate(self.cells) if cell.group in groups)
        return self.sets.index(wanted)


def fleet(cluster: Cluster, *, single: bool = False, most: int = MOST_CELLS) -> Fleet:
    """Cells and candidate sets of a cluster, at most about so many cells.

    With `single` every device is a cell of its own.
    """
    check(cluster)
    kinds = _kinds(cluster)
    cells = _cells(cluster, kinds, single, most)
    return Fleet(cluster, kinds, cells, _sets(cells, single))


def check(cluster: Cluster) -> None:
    """Raise where a device has no memory or no way to another."""
    for rank, device in enumerate(cluster.devices):
        if not device.memory > 0:
            raise InputError(
                f"rank {rank} (`{device.name}`) of `{cluster.name}` has no memory",
                hint="give its `memory`, or leave the rank out",
            )
    for rank in range(1, cluster.size):
        if not cluster.bandwidth(0, rank) > 0:
            raise InputError(
                f"no bandwidth between ranks 0 and {rank} of `{cluster.name}`",
                hint="give the link on the way a `bandwidth` above zero, or leave the rank out",
            )


def _kinds(cluster: Cluster) -> tuple[Device, ...]:
    """Different devices, the fastest first."""
    found = {d.name: d for d in cluster.devices}
    rank = lambda d: (-d.peak("fp32"), -d.memory_bandwidth, -d.memory, d.name)  # noqa: E731
    return tuple(sorted(found.values(), key=rank))


def _cells(
    cluster: Cluster, kinds: tuple[Device, ...], single: bool, most: int
) -> tuple[Cell, ...]:
    groups = _groups(cluster, kinds)
    total = sum(len(nodes) for _, nodes in groups)
    roomy = total + len(groups) <= most
    most = total if roomy else max(2, (most - len(groups)) // len(groups))
    cells: list[Cell] = []
    box = 0
    for number, (kind, nodes) in enumerate(groups):
        for block in _blocks(nodes, cluster.size if single else most):
            ranks = tuple(r for node in block for r in node)
            first = box == 0 or cells[-1].group != number
            for part in _parts(ranks, single, first and len(block) == 1):
                cells.append(Cell(part, kind, number, box, len(block)))
            box += 1
    return tuple(cells)


def _groups(cluster: Cluster, kinds: tuple[Device, ...]) -> list[tuple[int, list[tuple[int, ...]]]]:
    """Device groups: (kind of device, the ranks of each node), in an order of their own."""
    names = [d.name for d in kinds]
    by_node: dict[tuple[int, int], list[int]] = {}
    for rank, device in enumerate(cluster.devices):
        by_node.setdefault((int(cluster.nodes[rank]), names.index(device.name)), []).append(rank)
    found: dict[tuple[object, ...], list[tuple[int, ...]]] = {}
    for (_, kind), ranks in by_node.items():
        found.setdefault(_likeness(cluster, kind, ranks), []).append(tuple(ranks))
    return [(int(str(key[0])), found[key]) for key in sorted(found, key=repr)]


def _likeness(cluster: Cluster, kind: int, ranks: list[int]) -> tuple[object, ...]:
    """What makes the devices of two nodes interchangeable: kind, count, links in and out."""
    inside = cluster.bandwidth(ranks[0], ranks[1]) if len(ranks) > 1 else 0.0
    node = cluster.node(ranks[0])
    out = sum(nic.bandwidth for nic in node.nics)
    return (f"{kind:03d}", f"{len(ranks):05d}", f"{inside:020.1f}", f"{out:020.1f}")


def _blocks(nodes: list[tuple[int, ...]], most: int) -> list[list[tuple[int, ...]]]:
    """Nodes in at most so many blocks of nearly equal length, the shortest first."""
    sizes = [len(cut) for cut in np.array_split(np.arange(len(nodes)), min(most, len(nodes)))]
    starts = np.cumsum([0, *sizes[::-1]]).tolist()
    return [nodes[a:b] for a, b in pairwise(starts)]


def _parts(ranks: tuple[int, ...], single: bool, first: bool) -> list[tuple[int, ...]]:
    """The first device of a group stands apart, so that something may run on it alone."""
    if single:
        return [(r,) for r in ranks]
    return [ranks[:1], ranks[1:]] if first and len(ranks) > 1 else [ranks]


def _sets(cells: tuple[Cell, ...], single: bool) -> tuple[tuple[int, ...], ...]:
    """Unions of device groups, boxes, first devices; all devices one by one with `single`."""
    groups = sorted({cell.group for cell in cells})
    found = [tuple(range(len(cells)))]
    for chosen in _subsets(groups):
        found.append(tuple(i for i, cell in enumerate(cells) if cell.group in chosen))
    for box in sorted({cell.box for cell in cells}):
        found.append(tuple(i for i, cell in enumerate(cells) if cell.box == box))
    for number, cell in enumerate(cells):
        if single or (len(cell.ranks) == 1):
            found.append((number,))
    return tuple(dict.fromkeys(found))


def _subsets(groups: list[int]) -> list[tuple[int, ...]]:
    """Every subset of few groups; of many, those of the fastest so many, and each alone."""
    if len(groups) <= MOST_GROUPS:
        sizes = range(len(groups), 0, -1)
        return [chosen for n in sizes for chosen in combinations(groups, n)]
    fastest = [tuple(groups[:n]) for n in range(len(groups), 0, -1)]
    return [*fastest, *((g,) for g in groups)]
