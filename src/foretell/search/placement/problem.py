"""A placement, all that a group may choose, and the tables that placements are priced by.

Seconds of a group on a kind of device come from `plan.layer_cost` at some batch sizes and are
drawn straight between them; collectives and messages follow the laws of `foretell.cost.collective`,

    seconds(bytes) = min over ways of  start + slope·bytes + root·√bytes

one row of laws for each candidate set and each pair of cells. Indices: k kind of device, g group,
b samples of one rank, s candidate set, c cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from foretell.cluster import Cluster
from foretell.compiled import B2, F1, F2, F3, F4, I1, I2
from foretell.cost import kernel
from foretell.errors import InfeasibleError, InputError
from foretell.plan import Plan
from foretell.plan.check import unit_reads
from foretell.plan.framework import Running, resolved, running
from foretell.plan.layer_ranges import UnitSeconds, held, unit_seconds
from foretell.plan.memory import ROUNDING, USABLE
from foretell.search.placement.device_classes import (
    MOST_CELLS,
    MOST_OP_GROUPS,
    Fleet,
    Group,
    fleet,
    grouped,
    law,
    laws_of,
    sends_of,
    spans,
)
from foretell.search.schedule.arrange import branches
from foretell.workload import Workload
from foretell.workload.workload import BYTES

Array = npt.NDArray[np.float64]
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
    plain = resolved(Plan(framework=framework), workload.most("tp") > 1, workload.dtype)
    sizes = _grid(batch)
    seconds = [unit_seconds(workload, cluster, d, plain, sizes) for d in machines.kinds]
    holds = held(workload, plain)
    mean = np.mean([one.forward[:, -1] + one.backward[:, -1] for one in seconds], axis=0)
    groups = grouped(workload, mean, holds["handed"], most)
    tables, factored = _tables(workload, machines, groups, batch, plain, sizes, seconds, holds)
    run = running(plain)
    return Problem(workload, cluster, machines, groups, batch, run, plain, tables, factored)


def _grid(batch: int) -> Array:
    """Batch sizes to price: all small ones, then ever further apart."""
    steps = np.unique(np.round(np.geomspace(1, batch, POINTS)))
    return np.unique(np.concatenate([np.arange(1, min(batch, 8) + 1), steps])).astype(float)


def _tables(
    workload: Workload,
    machines: Fleet,
    groups: tuple[Group, ...],
    batch: int,
    plain: Plan,
    sizes: Array,
    seconds: list[UnitSeconds],
    holds: dict[str, Array],
) -> tuple[Tables, dict[tuple[int, int], dict[str, str]]]:
    from foretell.search.placement import factors

    starts = np.cumsum([0, *(len(group.units) for group in groups)])
    reads = _reads(workload, starts)
    own = {key: _sums(values, starts) for key, values in holds.items()}
    run = running(plain)
    weight, state = run.weight_bytes + run.cast_bytes, run.state_bytes
    grad = BYTES[run.grad_dtype]
    laws, send_laws, streams = laws_of(machines), *sends_of(machines)
    ahead, back, lead = (np.stack([_drawn(p[i], sizes, batch) for p in seconds]) for i in range(3))
    ahead, back = np.maximum.accumulate(ahead, axis=2), np.maximum.accumulate(back, axis=2)
    rates = _sampled(ahead + back, starts)
    splits = _splits(workload, machines, batch, plain, starts)
    sent = factors.tabled(workload, machines, groups, batch, sizes, laws, grad)
    cells = machines.cells
    tables = Tables(
        forward=_prefix(ahead, starts),
        backward=_prefix(back, starts),
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
        sends=send_laws,
        streams=streams,
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
    return tables, sent.ops


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
    start, one = run.updated(np.array([0.0, 1.0])) * machines.cluster.calibration.host
    rows = [
        (0.0, 0.0, 1.0) if d.timed is not None else (start, one - start, run.profile.exponent)
        for d in machines.kinds
    ]
    return np.array(rows)


def _splits(
    workload: Workload, machines: Fleet, batch: int, plain: Plan, starts: npt.NDArray[Any]
) -> dict[str, Array]:
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
    parts = np.array([-(-batch // m) for m in MICROS], float)
    known: dict[tuple[int, int], int] = {}
    for s, cells in enumerate(machines.sets):
        ranks, found = machines.ranks(s), [machines.cells[c] for c in cells]
        inside = len({c.box for c in found}) == 1 and found[0].nodes == 1 and len(ranks) > 1
        if not inside or len(ranks) > workload.most(axis):
            continue
        key = (found[0].group, len(ranks))
        if key in known:
            for values in out.values():
                values[..., s, :] = values[..., known[key], :]
            continue
        known[key] = s
        part = machines.cluster.part(ranks)
        device = machines.kinds[found[0].kind]
        degrees = {axis: len(ranks)}
        took = unit_seconds(workload, part, device, plain, parts, **degrees)
        holds = held(workload, plain, **degrees)
        for i in range(len(MICROS)):
            for way, values in zip(("forward", "backward", "lead"), took, strict=True):
                out[way][i, s] = _sums(values[:, i], starts)
        out["weights"][s], out["kept"][s] = (_sums(holds[k], starts) for k in ("weights", "kept"))
    return out


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

    Only those serve who are there; of places that are alike the first is named first.
    """
    chosen = placement.actions
    is_split = {server for _, _, server in chosen} == {NO_SERVER}
    if is_split and not problem.ties and problem.lone.isdisjoint(chosen):
        return placement
    alike: dict[int, int] = {}
    out = []
    for group in problem.groups:
        devices, way, server = chosen[group.leader]
        if (devices, way, NO_SERVER) in problem.lone:
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
