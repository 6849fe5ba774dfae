"""The machines and op groups as a search sees them: cells of like devices, sets, laws of
messages.

A device group is all devices of one kind in nodes of one kind. A cell is a part of it whose devices
always do the same with as many samples: simulating one of them stands for all. A box is the nodes
that a cell stands on, sharing NICs and buses. Candidates for an op group are sets of cells.

Everything is put in an order that the devices' own numbers give, never their place in the file.

Op groups: layers that nothing but splittable tensors joins, put together by METIS.

A unit is one layer of a workload, once: inside it all ops are split or none is, and what it hands
on has a row for each sample. Where there are more units than a search can decide about, METIS
(through pymetis) makes `most` groups of them, vertices weighing the root of their time and edges
(units and what they read, branches and all) their bytes, as TAG does; a group is then cut where
its units do not follow one another.
Tied weights belong to the first group that has them; the others follow its choice.

Prices of collectives on candidate sets and of messages between cells, as laws.

    seconds(bytes) = min over ways of  start + slope·bytes + root·√bytes

from `foretell.cost.collective`, which is asked once for each set and pair of cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.cluster import Cluster, Device
from foretell.cost import collective
from foretell.errors import InputError, UnmodelledError
from foretell.plan.check import Unit, unit_reads, units
from foretell.workload import Workload

Array = npt.NDArray[np.float64]
MOST_OP_GROUPS = 40  # op groups at most: TAG's number
OPS = ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather")
MOST_LAWS = 12  # ways kept of one collective
MOST_CELLS = 12  # beyond, nodes of one kind act in larger blocks: what a search can tell apart
MOST_GROUPS = 4  # device groups up to which every subset is a candidate, as in TAG (2ᵀ - 1)


@dataclass(frozen=True)
class Group:
    """Units that are placed together, in a row."""

    units: tuple[Unit, ...]
    leader: int  # the group whose choice it follows: its own number unless weights are tied

    @property
    def name(self) -> str:
        """Its first and last unit."""
        first, last = self.units[0].name, self.units[-1].name
        return first if first == last else f"{first}…{last}"


def grouped(
    workload: Workload, seconds: Array, handed: Array, most: int = MOST_OP_GROUPS
) -> tuple[Group, ...]:
    """Groups of units, given the seconds of each and the bytes of what each makes."""
    found = units(workload)
    parts = list(range(len(found)))
    if len(found) > most:
        reads = [(u, v) for v, sources in enumerate(unit_reads(workload)) for u in sources]
        parts = metis_parts(seconds, reads, handed[[u for u, _ in reads]], most)
    runs: list[list[Unit]] = []
    for i, unit in enumerate(found):
        if i == 0 or parts[i] != parts[i - 1]:
            runs.append([])
        runs[-1].append(unit)
    return tuple(Group(tuple(run), _leader(workload, runs, g)) for g, run in enumerate(runs))


def metis_parts(
    seconds: Array, reads: Sequence[tuple[int, int]], size: Array, most: int
) -> list[int]:
    """The part of each of some vertices, given what reads what and how many bytes of it."""
    try:
        import pymetis
    except ImportError:
        raise UnmodelledError(
            "grouping ops needs pymetis, which is not installed",
            hint=f"pip install 'foretell[solve]', or a model of at most {most} layers",
        ) from None
    n = len(seconds)
    heavy = _capped(1 + np.sqrt(seconds / max(seconds.max(), 1e-12)) * 1000, most)
    wide = np.maximum(1, size / max(size.max(initial=0.0), 1.0) * 10_000).astype(int).tolist()
    joined: list[dict[int, int]] = [{} for _ in range(n)]
    for (u, v), bytes_ in zip(reads, wide, strict=True):
        for i, j in ((u, v), (v, u)):
            joined[i][j] = joined[i].get(j, 0) + bytes_
    around = [sorted(row) for row in joined]
    weights = [joined[i][j] for i in range(n) for j in around[i]]
    options = pymetis.Options(seed=1)
    _, parts = pymetis.part_graph(
        most,
        around,
        vweights=heavy.astype(int).tolist(),
        eweights=weights,
        options=options,
        recursive=False,
    )
    return list(parts)


def _capped(weights: Array, parts: int) -> Array:
    """Weights of which none is heavier than a part: METIS prints and goes wrong otherwise."""
    for _ in range(16):
        weights = np.minimum(weights, np.ceil(weights.sum() / parts))
    return weights


def _leader(workload: Workload, runs: list[list[Unit]], number: int) -> int:
    """The first group that holds a weight which this one holds too."""
    for kept, again in workload.tied:
        names = (kept.partition("/")[0], again.partition("/")[0])
        where = [_holder(workload, runs, name) for name in names]
        if number in where:
            return min(where)
    return number


def _holder(workload: Workload, runs: list[list[Unit]], layer: str) -> int:
    at = next(i for i, found in enumerate(workload.layers) if found.name == layer)
    return next(g for g, run in enumerate(runs) if any(unit.layer == at for unit in run))


def laws_of(machines: Fleet) -> Array:
    out = np.zeros((len(machines.sets), len(OPS), MOST_LAWS, 3))
    out[:, :, :, 0] = np.inf
    for s in range(len(machines.sets)):
        ranks = machines.ranks(s)
        levels = machines.cluster.levels(ranks) if len(ranks) > 1 else ()
        for o, op in enumerate(OPS):
            _write(out[s, o], op, levels)
    return _trimmed(out)


def _trimmed(laws: Array) -> Array:
    """Without the rows that no law needs: every price looks at all of them."""
    used = np.isfinite(laws[..., 0]).reshape(-1, MOST_LAWS).any(axis=0)
    return np.ascontiguousarray(laws[..., : max(1, int(used.sum())), :])


def _write(to: Array, op: str, levels: Any) -> None:
    """The laws of one collective; zero where there is nothing to communicate with."""
    if not levels:
        to[0] = 0.0
        return
    found = collective.price(op, np.array([1.0, 1e9]), levels).ways
    ways = sorted(found, key=lambda way: (way.slope, way.start))[:MOST_LAWS]
    for i, way in enumerate(ways):
        to[i] = (way.start, way.slope, way.root)


def sends_of(machines: Fleet) -> tuple[Array, Array]:
    """Laws of a message between two cells, and how many go side by side."""
    n = len(machines.cells)
    laws, streams = np.zeros((n, n, MOST_LAWS, 3)), np.ones((n, n))
    laws[:, :, :, 0] = np.inf
    for a, one in enumerate(machines.cells):
        for b, other in enumerate(machines.cells):
            to = other.ranks[-1]
            if to == one.ranks[0]:
                laws[a, b, 0] = 0.0
                continue
            _write(laws[a, b], "send", machines.cluster.levels((one.ranks[0], to)))
            if one.box != other.box or one.nodes > 1:
                streams[a, b] = min(one.nodes, other.nodes)
    return _trimmed(laws), streams


def spans(machines: Fleet, chosen: tuple[int, ...]) -> int:
    """Machines a set stands on."""
    return sum({machines.cells[c].box: machines.cells[c].nodes for c in chosen}.values())


def law(rows: Array, size: Array) -> Array:
    """The least of some laws at each of some sizes."""
    every = rows[:, :1] + rows[:, 1:2] * size + rows[:, 2:] * np.sqrt(size)
    found: Array = every.min(axis=0)
    return found


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
