"""A workload on mixed devices as a table of prices, with matmuls that go as factors.

What is to be placed: cells of devices, groups of ops, choices, and tables of prices.

The machines and op groups as a search sees them: cells of like devices, sets, laws of
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

Sufficient factors: where sending what a gradient is the product of beats sending the gradient.

The weight gradient of a matmul is G = Aᵀ E with A (rows × N₁) and E (rows × N₂). Matmuls that read
one input (query, key and value) share A, which is then gathered once. Ranks that gather A and E
make the gradient of the whole batch themselves and need no all-reduce. In seconds of one rank of M,
R rows in all, the program chooses (→ `solve`)

    min  Σᵢ again_i·x_i + Σₜ gather_t·b_t − Σ_g reduce_g·x_g
    b_t ≥ x_j − x_i      tensor t is gathered where its consumer j has all rows and its maker i not

x_i: op i runs on all rows everywhere; again_i the seconds that adds, gather_t and reduce_g the
prices of the collectives on the real links. Ops are weight gradients and, in plain chains of
matmuls, the forwards and backwards upstream that make their factors: a rank that has the input of
one linear layer on all rows can run it on all rows and need not gather the input of the next.
On traffic alone factors win where
R·(N₁ + N₂) < 2·N₁·N₂ (→ `closed_form`): all-gather moves (M−1)/M·R(N₁+N₂), all-reduce twice
(M−1)/M·N₁N₂.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, groupby, pairwise
from itertools import product as every
from math import inf
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from foretell.cluster import Cluster, Device
from foretell.compiled import B2, F1, F2, F3, F4, I1, I2
from foretell.cost import collective, kernel
from foretell.errors import InfeasibleError, InputError, UnmodelledError
from foretell.plan import Plan
from foretell.plan.check import Unit, branches, unit_reads, units
from foretell.plan.costs import ROUNDING, USABLE
from foretell.plan.framework import Running, resolved, running, slowdown
from foretell.plan.layer_ranges import (
    FactorMatmul,
    UnitSeconds,
    factor_matmuls,
    gathered,
    held,
    product_seconds,
    recompute_seconds,
    sharing,
    unit_seconds,
)
from foretell.workload import Workload
from foretell.workload.workload import BYTES

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
            found = collective.price(op, np.array([1.0, 1e9]), levels).ways if levels else ()
            _write(out[s, o], found)
    return _trimmed(out)


def _trimmed(laws: Array) -> Array:
    """Without the rows that no law needs: every price looks at all of them."""
    used = np.isfinite(laws[..., 0]).reshape(-1, MOST_LAWS).any(axis=0)
    return np.ascontiguousarray(laws[..., : max(1, int(used.sum())), :])


def _write(to: Array, found: Sequence[Any]) -> None:
    """The laws of one collective; zero where there is nothing to communicate with."""
    ways = sorted(found, key=lambda way: (way.slope, way.start))[:MOST_LAWS]
    to[: len(ways) or 1] = [(way.start, way.slope, way.root) for way in ways] or 0.0


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
            levels = machines.cluster.levels((one.ranks[0], to))
            price = collective.price("send", np.array([1.0, 1e9]), levels) if levels else None
            _write(laws[a, b], price.ways if price else ())
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


# A placement, all that a group may choose, and the tables that placements are priced by.
#
# Seconds of a group on a kind of device come from `plan.layer_cost` at some batch sizes and are
# drawn straight between them; collectives and messages follow the laws of
# `foretell.cost.collective`,
#
#     seconds(bytes) = min over ways of  start + slope·bytes + root·√bytes
#
# one row of laws for each candidate set and each pair of cells. Indices: k kind of device, g group,
# b samples of one rank, s candidate set, c cell.


WAYS = ("all-reduce", "ps", "sharded", "factors", "split")  # how a group's replicas agree
ALL_REDUCE, PS, SHARDED, FACTORS, SPLIT = range(5)
NO_SERVER = -1  # is named to serve a group
MICROS = (1, 2, 4, 8, 16)  # micro-batches of a step that a search tries
POINTS = 48  # batch sizes that are priced; between them lines are drawn
MOST_SAMPLES = 2**17  # tables have an entry a sample, group and kind of device: 40 MB a kind


MODES = ("even", "proportional", "balanced")
FUSE = 25 * 2**20  # bytes of gradients in one message, at most: PyTorch DDP's default


class Tables(NamedTuple):
    """What the compiled loops read."""

    forward: F3  # [k, g + 1, b] seconds of all groups before g, forward
    backward: F3  # the same backward
    added: F2  # [k, g + 1] to add gradients of all groups before g to earlier micro-batches'
    update: F2  # [k, g] seconds of the optimizer's kernels on all weights of a group
    tensors: F1  # [g] weights that it updates
    lead: F3  # [k, g + 1, b] by which device seconds of all groups before g exceed the host's
    split_lead: F3  # [m, s, g]
    host: F2  # [k, 3] host seconds of the optimizer's step and of each tensor; their exponent
    product: F3  # [k, g, b] seconds of the weight gradients that factors would make
    recompute: F2  # [k, g] seconds of the factors that each rank recomputes for the whole batch
    split_forward: F3  # [m, s, g] a group split over all ranks of a set, one micro-batch
    split_backward: F3
    reads: I2  # [e] a group, the group that reads it, the unit that is read; by reading group
    read_bytes: F1  # [e] of one sample
    gradient: F1  # [g] bytes of its gradients
    rest: F2  # [s, g] of those, bytes that factors leave to all-reduce
    factors: F2  # [s, g] bytes of factors a sample
    held: F1  # [g] bytes of weights and gradients
    state: F1  # [g] bytes of optimizer state
    kept: F1  # [g] bytes a sample keeps for the backward
    brief: F1  # [g] bytes a sample takes for a moment
    split_held: F2  # [s, g] bytes of weights and gradients of one rank where it is split
    split_state: F2
    split_kept: F2  # [s, g] bytes of a whole batch
    laws: F4  # [s, op, way, 3]
    sends: F4  # [c, c, way, 3]
    streams: F2  # [c, c] messages side by side
    speed: F1  # [k] samples a second
    member: B2  # [s, c]
    size: I1  # [s] ranks
    boxes: I1  # [s] boxes it spans, counting nodes
    kind: I1  # [c]
    ranks: I1  # [c]
    nodes: I1  # [c]
    box: I1  # [c]
    cell_of: I1  # [p] the cell of each place: ranks counted cell by cell
    way_out: F1  # [c] bytes/s of the NICs of one of its nodes
    room: F1  # [c] bytes for tensors
    batch: int


_TIMED = (
    "forward", "backward", "added", "update", "lead", "split_lead", "product", "recompute",
    "split_forward", "split_backward", "laws", "sends",
)  # fmt: skip


def slowed(tables: Tables, times: float) -> Tables:
    """Tables of steps that take so many times as long."""
    if times == 1:
        return tables
    timed = {name: getattr(tables, name) * times for name in _TIMED}
    host = np.concatenate([tables.host[:, :2] * times, tables.host[:, 2:]], axis=1)
    return tables._replace(host=host, **timed)


@dataclass(frozen=True)
class Problem:
    """A workload on a cluster, ready to be placed."""

    workload: Workload
    cluster: Cluster
    fleet: Fleet
    groups: tuple[Group, ...]
    batch: int
    run: Running
    plain: Plan  # framework and precision alone
    tables: Tables
    factored: dict[tuple[int, int], dict[str, str]]  # (set, group): ops sent by factors, and how

    @cached_property
    def leaders(self) -> list[int]:
        """Groups that choose for themselves: the most seconds of compute and all-reduce first."""
        t = self.tables
        ahead = np.diff(t.forward[-1, :, -1]) + np.diff(t.backward[-1, :, -1])
        mine = ahead / len(self.cluster.devices) + law(t.laws[0, 0], t.gradient)
        own = [g for g, group in enumerate(self.groups) if group.leader == g]
        return sorted(own, key=lambda g: (-float(mine[g]), g))

    @cached_property
    def slowdown(self) -> float:
        """How many times as long as priced its tables have a step (→ foretell.plan.framework)."""
        return slowdown(self.plain, self.cluster)

    @cached_property
    def branches(self) -> list[tuple[int, ...]]:
        """Groups of each branch of the model that runs beside others; none where it is a chain."""
        found = []
        for way in branches(self.workload)[1]:
            inside = [{unit.layer for unit in group.units} <= {*way} for group in self.groups]
            found.append(tuple(g for g, is_inside in enumerate(inside) if is_inside))
        return [way for way in found if way]

    @cached_property
    def lone(self) -> frozenset[tuple[int, int, int]]:
        """Choices of one rank where there is nothing to agree on, under another name."""
        alone = [s for s, size in enumerate(self.tables.size.tolist()) if size == 1]
        return frozenset((s, way, NO_SERVER) for s in alone for way in (PS, SHARDED, FACTORS))

    @cached_property
    def unfactored(self) -> frozenset[tuple[int, int]]:
        """Sets and groups that have no gradients to send as factors."""
        return frozenset(
            zip(*(n.tolist() for n in np.nonzero(self.tables.factors <= 0)), strict=True)
        )

    @cached_property
    def ties(self) -> bool:
        """Whether some group follows another."""
        return len(self.leaders) < len(self.groups)


def problem(
    workload: Workload,
    cluster: Cluster,
    batch: int = 0,
    *,
    framework: str = "ddp",
    most: int = MOST_OP_GROUPS,
    single: bool = False,
    idle: bool = False,
    cells: Fleet | None = None,
    blocks: int = MOST_CELLS,
) -> Problem:
    """Price a workload on a cluster for a batch of all ranks together."""

    machines = cells or fleet(cluster, single=single, most=blocks)
    batch = batch or workload.batch * cluster.size
    if batch < cluster.size and not idle:
        raise InfeasibleError(
            f"a batch of {batch} for the {cluster.size} ranks of `{cluster.name}`",
            hint="raise global_batch, name fewer ranks, or say idle=yes: some then have no work",
        )
    if batch > MOST_SAMPLES:
        raise InputError(
            f"a batch of {batch:,} samples", hint=f"placement takes {MOST_SAMPLES:,} at most"
        )
    plain = resolved(Plan(framework=framework), workload)
    sizes = _grid(batch)
    seconds = [unit_seconds(workload, cluster, d, plain, sizes) for d in machines.kinds]
    holds = held(workload, plain)
    mean = np.mean([one.forward[:, -1] + one.backward[:, -1] for one in seconds], axis=0)
    groups = grouped(workload, mean, holds["handed"], most)
    starts = np.cumsum([0, *(len(group.units) for group in groups)])
    laws, sends = laws_of(machines), sends_of(machines)
    axis = "tp" if workload.most("tp") > 1 else "filter"
    alike, parts = (
        _split_sets(workload, machines),
        np.array([-(-batch // m) for m in MICROS], float),
    )
    split = {}
    for s in dict.fromkeys(alike.values()):
        part, ranks = machines.cluster.part(machines.ranks(s)), {axis: len(machines.ranks(s))}
        device = machines.kinds[machines.cells[machines.sets[s][0]].kind]
        split[s] = unit_seconds(workload, part, device, plain, parts, **ranks)
    splits = _splits(workload, machines, plain, starts, split, alike)
    grad = BYTES[running(plain).grad_dtype]
    sent = tabled(workload, machines, groups, batch, sizes, laws, grad)
    tables = _tables(
        workload, machines, batch, plain, sizes, seconds, holds, starts, laws, sends, splits, sent
    )  # fmt: skip
    tables, run = slowed(tables, slowdown(plain, cluster)), running(plain)
    return Problem(workload, cluster, machines, groups, batch, run, plain, tables, sent.ops)


def _grid(batch: int) -> Array:
    """Batch sizes to price: all small ones, then ever further apart."""
    steps = np.unique(np.round(np.geomspace(1, batch, POINTS)))
    return np.unique(np.concatenate([np.arange(1, min(batch, 8) + 1), steps])).astype(float)


def _tables(
    workload: Workload, machines: Fleet, batch: int, plain: Plan, sizes: Array,
    seconds: list[UnitSeconds], holds: dict[str, Array], starts: npt.NDArray[Any], laws: Array,
    sends: tuple[Array, Array], splits: dict[str, Array], sent: Sent,
) -> Tables:  # fmt: skip
    reads = _reads(workload, starts)
    own = {key: _sums(values, starts) for key, values in holds.items()}
    run = running(plain)
    weight, state = run.weight_bytes + run.cast_bytes, run.state_bytes
    grad = BYTES[run.grad_dtype]
    ahead, back, lead = (np.stack([_drawn(p[i], sizes, batch) for p in seconds]) for i in range(3))
    ahead, back = np.maximum.accumulate(ahead, axis=2), np.maximum.accumulate(back, axis=2)
    rates = _sampled(ahead + back, starts)
    cells = machines.cells
    return Tables(
        forward=_prefix(ahead, starts),
        backward=_prefix(back, starts),
        added=_prefix(np.stack([one.added[:, :1] for one in seconds]), starts)[:, :, 0].copy(),
        update=_updates(machines, own["weights"], run),
        tensors=own["tensors"],
        lead=_prefix(lead * (not run.is_scaled), starts),
        split_lead=splits["lead"] * (not run.is_scaled),
        host=_host(machines, run),
        product=sent.product,
        recompute=np.zeros(sent.product.shape[:2]),
        split_forward=splits["forward"],
        split_backward=splits["backward"],
        reads=reads,
        read_bytes=holds["handed"][reads[:, 2]],
        gradient=own["weights"] * grad,
        rest=own["weights"] * grad - sent.saved,
        factors=sent.bytes,
        held=own["weights"] * (weight + grad),
        state=own["weights"] * state,
        kept=own["kept"],
        brief=np.array([holds["brief"][a:b].max() for a, b in pairwise(starts)]),
        split_held=splits["weights"] * (weight + grad),
        split_state=splits["weights"] * state,
        split_kept=splits["kept"] * batch,
        laws=laws,
        sends=sends[0],
        streams=sends[1],
        speed=rates,
        member=np.array([[c in s for c in range(len(cells))] for s in machines.sets]),
        size=np.array([len(machines.ranks(s)) for s in range(len(machines.sets))]),
        boxes=np.array([spans(machines, s) for s in machines.sets]),
        kind=np.array([cell.kind for cell in cells]),
        ranks=np.array([len(cell.ranks) for cell in cells]),
        nodes=np.array([cell.nodes for cell in cells]),
        box=np.array([cell.box for cell in cells]),
        cell_of=np.repeat(np.arange(len(cells)), [len(cell.ranks) for cell in cells]),
        way_out=np.array([machines.way_out(cell) for cell in cells]),
        room=np.array(
            [machines.kinds[c.kind].memory * USABLE / ROUNDING - run.profile.runtime for c in cells]
        ),
        batch=batch,
    )


def _reads(workload: Workload, starts: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """[e] a group, the group that reads it, and the unit that is read."""
    group = np.repeat(np.arange(len(starts) - 1), np.diff(starts)).tolist()
    found = {
        (group[v], group[u], u)
        for v, sources in enumerate(unit_reads(workload))
        for u in sources
        if group[u] != group[v]
    }
    rows = [(source, reader, unit) for reader, source, unit in sorted(found)]
    return np.array(rows, np.int64).reshape(-1, 3)


def _sums(values: Array, starts: npt.NDArray[Any]) -> Array:
    total = np.concatenate([[0.0], np.cumsum(values)])
    return np.diff(total[starts])


def _drawn(values: Array, sizes: Array, batch: int) -> Array:
    """Values of every batch size from 0 on, straight lines between those priced."""
    every = np.arange(batch + 1)
    found = np.array([np.interp(every, sizes, row) for row in values])
    found[:, 0] = 0.0
    return found


def _prefix(values: Array, starts: npt.NDArray[Any]) -> Array:
    """Sums over all units before each group."""
    total = np.concatenate([np.zeros_like(values[:, :1]), np.cumsum(values, axis=1)], axis=1)
    return np.ascontiguousarray(total[:, starts])


def _sampled(values: Array, starts: npt.NDArray[Any]) -> Array:
    """Samples a second of each kind of device with the whole model and a middling batch."""
    middle = max(1, (values.shape[2] - 1) // 8)
    found: Array = middle / values.sum(axis=1)[:, middle]
    return found


def _updates(machines: Fleet, weights: Array, run: Running) -> Array:
    """Each group's part of one update of the whole model."""
    whole = np.maximum(weights.sum(keepdims=True), 1.0)
    learned = machines.cluster.calibration
    rows = [
        kernel.seconds(d, "optimizer", "fp32", {"n": whole}, bytes=whole * run.update).seconds
        for d in machines.kinds
    ]
    return np.stack(rows) * learned.compute * learned.update * weights / whole


def _host(machines: Fleet, run: Running) -> Array:
    """What the host takes to issue an update: at all, and for each tensor; none on a CPU."""
    start, one = run.update_seconds(np.array([0.0, 1.0])) * machines.cluster.calibration.host
    rows = [
        (0.0, 0.0, 1.0) if d.timed is not None else (start, one - start, run.profile.exponent)
        for d in machines.kinds
    ]
    return np.array(rows)


def _splits(
    workload: Workload, machines: Fleet, plain: Plan, starts: npt.NDArray[Any],
    split: dict[int, UnitSeconds], alike: dict[int, int],
) -> dict[str, Array]:  # fmt: skip
    """Groups split over the ranks of a set inside one node; infinite where that cannot be."""
    count, many = len(machines.sets), len(starts) - 1
    out = {
        "forward": np.full((len(MICROS), count, many), np.inf),
        "backward": np.full((len(MICROS), count, many), np.inf),
        "weights": np.full((count, many), np.inf),
        "kept": np.full((count, many), np.inf),
        "lead": np.zeros((len(MICROS), count, many)),
    }
    axis = "tp" if workload.most("tp") > 1 else "filter"
    for s, took in split.items():
        holds = held(workload, plain, **{axis: len(machines.ranks(s))})
        for i in range(len(MICROS)):
            for way, values in zip(("forward", "backward", "lead"), took, strict=False):
                out[way][i, s] = _sums(values[:, i], starts)
        out["weights"][s], out["kept"][s] = (_sums(holds[k], starts) for k in ("weights", "kept"))
    for s, first in alike.items():
        for values in out.values():
            values[..., s, :] = values[..., first, :]
    return out


def _split_sets(workload: Workload, machines: Fleet) -> dict[int, int]:
    """Sets inside one node that groups can be split over, each with the first that is like it."""
    most = workload.most("tp") if workload.most("tp") > 1 else workload.most("filter")
    found, known = dict[int, int](), dict[tuple[int, int], int]()
    for s, cells in enumerate(machines.sets):
        some, many = [machines.cells[c] for c in cells], len(machines.ranks(s))
        inside = len({c.box for c in some}) == 1 and some[0].nodes == 1 and many > 1
        if inside and many <= most:
            found[s] = known.setdefault((some[0].group, many), s)
    return found


EVEN, PROPORTIONAL, BALANCED = range(3)  # how samples are split


class Action(NamedTuple):
    """Where a group runs and how its replicas agree."""

    devices: int  # a candidate set of the fleet
    way: int  # of `problem.WAYS`
    server: int = NO_SERVER  # place of its parameter server; where none, split


@dataclass(frozen=True)
class Placement:
    """A choice for every group, and three for the whole step."""

    actions: tuple[Action, ...]
    micros: int = 1  # micro-batches: segments on sets of their own are pipeline stages
    fuse: float = FUSE
    mode: int = BALANCED

    def but(self, groups: tuple[int, ...] | range, action: Action) -> Placement:
        """The same with another choice for some groups."""
        chosen = list(self.actions)
        for g in groups:
            chosen[g] = action
        return replace(self, actions=tuple(chosen))


def uniform(problem: Problem, action: Action, **more: float) -> Placement:
    """One choice for all groups."""
    return Placement((action,) * len(problem.groups), **more)  # type: ignore[arg-type]


def canonical(problem: Problem, placement: Placement) -> Placement:
    """Tied groups follow their leader; on a single rank there is nothing to agree on.

    What has no factors is reduced, in one message with its neighbours. Only those serve who are
    there; of places that are alike the first is named first.
    """
    chosen = placement.actions
    is_split = {server for _, _, server in chosen} == {NO_SERVER}
    sent = [(s, g) for g, (s, way, _) in enumerate(chosen) if way == FACTORS]
    is_plain = problem.lone.isdisjoint(chosen) and problem.unfactored.isdisjoint(sent)
    if is_split and not problem.ties and is_plain:
        return placement
    alike: dict[int, int] = {}
    out = []
    for g, group in enumerate(problem.groups):
        devices, way, server = chosen[group.leader]
        has_none = way == FACTORS and (devices, g) in problem.unfactored
        if has_none or (devices, way, NO_SERVER) in problem.lone:
            out.append(Action(devices, ALL_REDUCE))
        elif way == PS and server != NO_SERVER:
            out.append(Action(devices, way, _served(problem, devices, server, alike)))
        else:
            out.append(Action(devices, way))
    return replace(placement, actions=tuple(out))


def _served(problem: Problem, devices: int, server: int, alike: dict[int, int]) -> int:
    """A server under the first free name of its cell; nothing where it is not of these devices."""
    t = problem.tables
    cell = int(t.cell_of[server])
    if not t.member[devices, cell]:
        return NO_SERVER
    if server not in alike:
        used = sum(int(t.cell_of[other]) == cell for other in alike)
        alike[server] = int(np.searchsorted(t.cell_of, cell)) + used
    return alike[server]


def actions(
    problem: Problem,
    group: int,
    *,
    ways: tuple[int, ...] = (ALL_REDUCE, PS, SHARDED, FACTORS, SPLIT),
) -> list[Action]:
    """Every choice a group has."""
    t = problem.tables
    found = []
    for s in range(len(t.size)):
        for way in ways:
            alone = t.size[s] == 1
            if way == SPLIT:
                possible = t.split_forward[0, s, group] < float("inf")
            elif way == FACTORS:
                possible = t.factors[s, group] > 0 and t.size[s] <= t.batch
            else:
                possible = t.size[s] <= t.batch and (not alone or way == ALL_REDUCE)
            if possible:
                found.append(Action(s, way))
    return found


def servers(problem: Problem, now: Placement, devices: int) -> list[int]:
    """Places of a set that may serve: those that do, and of each cell one more, which is as any."""
    named, t = {action.server for action in now.actions}, problem.tables
    found = []
    for cell in problem.fleet.sets[devices]:
        mine = np.flatnonzero(t.cell_of == cell).tolist()
        found += [place for place in mine if place in named]
        found += [place for place in mine if place not in named][:1]
    return found


def with_servers(problem: Problem, group: int) -> list[Action]:
    """Every choice a group has, each parameter server by name."""
    found = []
    for action in actions(problem, group):
        cells = problem.tables.member[action.devices][problem.tables.cell_of]
        places = np.flatnonzero(cells).tolist() if action.way == PS else [NO_SERVER]
        found += [action._replace(server=place) for place in places]
    return found


def text(problem: Problem, placement: Placement, served: Sequence[int] = ()) -> str:
    """A placement as text: one line for each run of groups that choose the same."""
    placement = canonical(problem, placement)
    lines, first = [], 0
    for g in range(1, len(placement.actions) + 1):
        if g < len(placement.actions) and placement.actions[g][:2] == placement.actions[first][:2]:
            continue
        action = placement.actions[first]
        names = problem.groups[first].units[0].name, problem.groups[g - 1].units[-1].name
        where = problem.fleet.title(action.devices)
        way = f", {WAYS[action.way]}" if problem.tables.size[action.devices] > 1 else ""
        on = _serving(problem, served[first:g])
        lines.append(f"{' … '.join(dict.fromkeys(names))}: {where}{way}{on}")
        first = g
    extra = f"{placement.micros} micro-batches, " if placement.micros > 1 else ""
    size = placement.fuse / 2**20
    sent = f"messages up to {size:g} MiB" if 0 < size < inf else "one message a group"
    sent = sent if size < inf else "one message a segment"
    lines.append(f"{extra}samples {MODES[placement.mode]}, {sent}")
    return "\n".join(lines)


def _serving(problem: Problem, served: Sequence[int]) -> str:
    """The servers of some groups as text; rank numbers would depend on the order of a file."""
    counts: dict[str, int] = {}
    for place in sorted({place for place in served if place >= 0}):
        kind = int(problem.tables.kind[problem.tables.cell_of[place]])
        name = problem.fleet.kinds[kind].name
        counts[name] = counts.get(name, 0) + 1
    return f" by {' + '.join(f'{n} {name}' for name, n in counts.items())}" if counts else ""


ALL_REDUCED, ALL_GATHER = 0, 4  # rows of `laws.OPS`
NANO = 1e9  # the program counts in whole nanoseconds
UNBOUNDED = 1 << 60  # nanoseconds


def closed_form(rows: float, n1: float, n2: float) -> bool:
    """Whether factors move fewer bytes than an all-reduce of the gradient."""
    return rows * (n1 + n2) < 2 * n1 * n2


@dataclass(frozen=True)
class Node:
    """An op that may run on all rows everywhere; `saved` where it makes a gradient."""

    name: str
    again: float  # seconds that running it on all rows adds on each rank
    saved: float = 0.0  # seconds of the all-reduce that is then not needed
    fixed: bool = False  # it runs on its rank's own rows, whatever would be cheaper


@dataclass(frozen=True)
class Wire:
    """A tensor from one node to others."""

    source: str
    targets: tuple[str, ...]
    gather: float  # seconds to gather all its rows everywhere


def value(nodes: list[Node], wires: list[Wire], chosen: frozenset[str]) -> float:
    """Seconds a choice adds to a step of one rank (less than zero where it saves)."""
    total = sum(n.again - n.saved for n in nodes if n.name in chosen)
    for wire in wires:
        if wire.source not in chosen and any(t in chosen for t in wire.targets):
            total += wire.gather
    return total


def solve(nodes: list[Node], wires: list[Wire]) -> frozenset[str]:
    """The nodes that run on all rows in the best choice; of equals, the one with the fewest.

    They are the source side of a minimum cut: cut off, a node forgoes what it saves; kept, it pays
    what it adds, and each wire into it whose source is cut off is gathered.
    """
    gains = {n.name: round((n.saved - n.again) * NANO) for n in nodes if not n.fixed}
    supply = {name: gain for name, gain in gains.items() if gain > 0}
    drain = {n.name: UNBOUNDED if n.fixed else max(-gains[n.name], 0) for n in nodes}
    arcs: dict[str, dict[str, int]] = {}

    def connect(tail: str, head: str, size: int) -> None:
        arcs.setdefault(tail, {}).setdefault(head, 0)
        arcs.setdefault(head, {}).setdefault(tail, 0)
        arcs[tail][head] += size

    for i, wire in enumerate(wires):
        connect(f"wire {i}", wire.source, round(wire.gather * NANO))
        for target in wire.targets:
            connect(target, f"wire {i}", UNBOUNDED)
    chosen: set[str] = set()
    for name in supply:
        while supply[name]:
            path, reached = _path(name, drain, arcs)
            if not path:
                chosen |= reached
                break
            hops = list(pairwise(path))
            flow = min(supply[name], drain[path[-1]], *(arcs[a][b] for a, b in hops), UNBOUNDED)
            supply[name] -= flow
            drain[path[-1]] -= flow
            for a, b in hops:
                arcs[a][b] -= flow
                arcs[b][a] += flow
    return frozenset(chosen & gains.keys())


def _path(
    start: str, drain: dict[str, int], arcs: dict[str, dict[str, int]]
) -> tuple[list[str], set[str]]:
    """The shortest way with room from a node to one that drains, and all that was reached."""
    came, queue = {start: ""}, [start]
    for node in queue:
        if drain.get(node):
            path = [node]
            while came[path[-1]]:
                path.append(came[path[-1]])
            return path[::-1], set(came)
        for head, room in arcs.get(node, {}).items():
            if room and head not in came:
                came[head] = node
                queue.append(head)
    return [], set(came)


def brute(nodes: list[Node], wires: list[Wire]) -> frozenset[str]:
    """The best choice by trying all; for small graphs."""
    free = [n.name for n in nodes if not n.fixed]
    choices = (
        frozenset(name for name, bit in zip(free, bits, strict=True) if bit)
        for bits in every((0, 1), repeat=len(free))
    )
    return min(choices, key=lambda c: (round(value(nodes, wires, c) * NANO), len(c), sorted(c)))


def weights_of(workload: Workload, groups: tuple[Group, ...]) -> list[tuple[int, FactorMatmul]]:
    """Every product whose gradient has factors, with its group; tied ones have none."""
    return [
        (g, product)
        for g, group in enumerate(groups)
        for unit in group.units
        for product in factor_matmuls(workload, unit)
    ]


class Sent(NamedTuple):
    """What factors would do to each group on each set."""

    bytes: Array  # [s, g] bytes of factors of one sample
    saved: Array  # [s, g] bytes of gradients that need no all-reduce
    product: Array  # [k, g, b] seconds of the weight gradients in question
    ops: dict[tuple[int, int], dict[str, str]]


def tabled(
    workload: Workload,
    machines: Fleet,
    groups: tuple[Group, ...],
    batch: int,
    sizes: Array,
    laws: Array,
    grad: float,
) -> Sent:
    """For every set and group the matmuls that pay as factors, one by one, on its links."""
    count = len(machines.sets)
    sent, saved = np.zeros((count, len(groups))), np.zeros((count, len(groups)))
    product = np.zeros((len(machines.kinds), len(groups), batch + 1))
    ops: dict[tuple[int, int], dict[str, str]] = {}
    weights = weights_of(workload, groups)
    group_of = {w.name: g for g, w in weights}
    for s in range(count):
        alone = len(machines.ranks(s)) < 2
        chosen = [] if alone else _paying([w for _, w in weights], laws[s], batch, grad)
        for g, some in groupby(chosen, key=lambda w: group_of[w.name]):
            mine = list(some)
            sent[s, g] = gathered(mine) * grad
            saved[s, g] = sum(w.elements for w in mine) * grad
            ops[s, g] = {w.name: "factors" for w in mine}
    ever = {name for names in ops.values() for name in names}
    for k, device in enumerate(machines.kinds):
        for g, w in weights:
            if w.name in ever:
                product[k, g] += _filled(product_seconds(device, w, sizes), sizes, batch)
    return Sent(sent, saved, product, ops)


def _paying(
    weights: list[FactorMatmul], laws: Array, batch: float, grad: float
) -> list[FactorMatmul]:
    """Weights whose factors take less than their gradients; those of one input together."""
    known: dict[object, tuple[int, ...]] = {}
    found = []
    for some in sharing(weights):
        sizes = tuple((w.n1, w.n2, w.rows, w.elements) for w in some)
        if sizes not in known:
            best = brute(*program(some, laws, batch, grad, [0.0] * len(some)))
            known[sizes] = tuple(i for i, w in enumerate(some) if w.name in best)
        found += [some[i] for i in known[sizes]]
    return found


def program(
    weights: list[FactorMatmul], laws: Array, batch: float, grad: float, again: list[float],
    upstream: dict[str, float] | None = None,
) -> tuple[list[Node], list[Wire]]:  # fmt: skip
    """Gradients as nodes on the links of one set, what they are products of as wires.

    An input that several read is one wire; output gradients are one each. `upstream` has the
    seconds of each forward (`forward of …`) and backward (`backward of …`) that ranks may run on
    all rows to make a factor: a forward reads the input of its matmul, a backward the input and the
    output gradient of its own.
    """
    more = upstream or {}
    ahead = {w.maker: w for w in weights if f"forward of {w.maker}" in more}
    back = {w.reader: w for w in weights if f"backward of {w.reader}" in more}

    def seconds(op: int, numbers: float) -> float:
        return float(law(laws[op], np.array([numbers * grad]))[0])

    def readers(some: list[FactorMatmul], *, forward: bool) -> tuple[str, ...]:
        found = [w.name for w in some]
        found += [f"forward of {w.name}" for w in some if forward and w.name in ahead]
        return (*found, *(f"backward of {w.name}" for w in some if w.name in back))

    wires = []
    for some in sharing(weights):
        made = next((f"forward of {w.maker}" for w in some if w.maker in ahead), "")
        wires.append(
            Wire(made or f"input of {some[0].name}", readers(some, forward=True),
                 seconds(ALL_GATHER, batch * some[0].rows * some[0].n1))
        )  # fmt: skip
    for w in weights:
        made = f"backward of {w.reader}" if w.reader in back else f"output gradient of {w.name}"
        gather = seconds(ALL_GATHER, batch * w.rows * w.n2)
        wires.append(Wire(made, readers([w], forward=False), gather))
    nodes = [
        Node(w.name, took, seconds(ALL_REDUCED, w.elements))
        for w, took in zip(weights, again, strict=True)
    ]
    nodes += [Node(name, took) for name, took in more.items()]
    known = {n.name for n in nodes}
    own = [Node(wire.source, 0.0, fixed=True) for wire in wires if wire.source not in known]
    return [*nodes, *own], wires


def upstream_of(device: Any, weights: list[FactorMatmul], batch: float) -> dict[str, float]:
    """Seconds of every forward and backward that ranks may run on all rows to make a factor."""
    names, rows = {w.name for w in weights}, np.array([batch])
    out: dict[str, float] = {}
    for w in weights:
        for way, name in (("input", w.maker), ("output", w.reader)):
            if name in names:
                took = recompute_seconds(device, w._replace(recomputes=(way,)), rows)
                key = f"forward of {name}" if way == "input" else f"backward of {name}"
                out[key] = float(took[0])
    return out


def recomputing(w: FactorMatmul, chosen: frozenset[str]) -> FactorMatmul:
    """A matmul with the factors that a choice has each rank recompute."""
    ways = {"input": f"forward of {w.maker}", "output": f"backward of {w.reader}"}
    return w._replace(recomputes=tuple(way for way, node in ways.items() if node in chosen))


def word(w: FactorMatmul) -> str:
    """How a plan says in what way a matmul's gradient is sent."""
    ways = {(): "", ("input", "output"): ":recompute"}
    return "factors" + ways.get(w.recomputes, f":recompute-{(*w.recomputes, '')[0]}")


def _filled(values: Array, sizes: Array, batch: int) -> Array:
    every_size = np.interp(np.arange(batch + 1), sizes, values)
    every_size[0] = 0.0
    return every_size


def refined(problem: Any, placement: Any, *, recompute: bool = True) -> tuple[Any, Any]:
    """The placement with factors where the exact program puts them, and its problem.

    Matmuls that every rank makes for the whole batch are priced on the slowest device of the set.
    With `recompute` ranks may also make a factor themselves in place of gathering it.
    """
    from dataclasses import replace

    t = problem.tables
    chosen = _chosen(problem, placement, recompute=recompute)
    bytes_, rest, product = t.factors.copy(), t.rest.copy(), t.product.copy()
    recomputed = t.recompute.copy()
    ops, actions = dict(problem.factored), list(placement.actions)
    sizes: Array = np.unique(np.round(np.geomspace(1, t.batch, 24))).astype(np.float64)
    for g, mine in chosen.items():
        s = actions[g].devices
        grad = t.gradient[g] / max(_elements(problem, g), 1.0)
        bytes_[s, g] = gathered(mine) * grad
        rest[s, g] = t.gradient[g] - sum(w.elements * grad for w in mine)
        for k, device in enumerate(problem.fleet.kinds):
            product[k, g] = recomputed[k, g] = 0.0
            for w in mine:
                again = float(recompute_seconds(device, w, sizes[-1:])[0])
                made = _filled(product_seconds(device, w, sizes), sizes, t.batch)
                recomputed[k, g] += again * problem.slowdown
                product[k, g] += made * problem.slowdown
        ops[s, g] = {w.name: word(w) for w in mine}
        actions[g] = actions[g]._replace(way=3 if mine else 0)
    tables = t._replace(factors=bytes_, rest=rest, product=product, recompute=recomputed)
    return (
        replace(problem, tables=tables, factored=ops),
        replace(placement, actions=tuple(actions)),
    )


def _elements(problem: Any, g: int) -> float:
    from foretell.workload.workload import BYTES

    return float(problem.tables.gradient[g]) / BYTES[problem.run.grad_dtype]


def _chosen(
    problem: Any, placement: Any, *, recompute: bool
) -> dict[int, list[FactorMatmul]]:  # fmt: skip
    """For each group that reduces its gradients, the matmuls the program sends as factors."""
    t = problem.tables
    nodes: list[Node] = []
    wires: list[Wire] = []
    of: dict[int, list[FactorMatmul]] = {}
    weights = weights_of(problem.workload, problem.groups)
    for g, action in enumerate(placement.actions):
        mine = [w for where, w in weights if where == g]
        if not mine or action.way not in (0, 3) or t.size[action.devices] < 2:
            continue
        grad = t.gradient[g] / max(_elements(problem, g), 1.0)
        slow = problem.fleet.kinds[max(t.kind[c] for c in problem.fleet.sets[action.devices])]
        own = np.array([t.batch / t.size[action.devices], float(t.batch)])
        took = [product_seconds(slow, w, own) for w in mine]
        again = [float(seconds[1] - seconds[0]) for seconds in took]
        more = upstream_of(slow, mine, t.batch) if recompute else {}
        added = program(mine, t.laws[action.devices], t.batch, grad, again, more)
        nodes, wires, of[g] = nodes + added[0], wires + added[1], mine
    sent = solve(nodes, wires) if nodes else frozenset()
    return {g: [recomputing(w, sent) for w in mine if w.name in sent] for g, mine in of.items()}
