"""A placement as a plan, and a plan's seconds on the evaluator.

Where all groups run on one set of ranks the plan has `dp`, `shares`, `placement` and `sync`, which
deploy. Equal stages become `pp`. Other placements are written group by group in `groups`: first
and last layer, the way its replicas agree, and rank:samples of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from foretell.cluster import Cluster
from foretell.errors import InputError
from foretell.plan import Plan
from foretell.plan.check import agreed
from foretell.plan.layer_ranges import served_by
from foretell.search.placement.device_classes import Cell, Fleet, fleet
from foretell.search.placement.evaluate import settled, shares, with_shares
from foretell.search.placement.problem import (
    ALL_REDUCE,
    FACTORS,
    PS,
    SHARDED,
    SPLIT,
    WAYS,
    Action,
    Placement,
    Problem,
    canonical,
    problem,
)
from foretell.workload import Workload

Ints = npt.NDArray[np.int64]


def plan_of(on: Problem, placement: Placement, share: Ints | None = None) -> Plan:
    """The plan that does what a placement says."""
    placement = canonical(on, placement)
    share = shares(on, placement) if share is None else share
    base = Plan(
        global_batch=on.batch,
        bucket_mb=round(min(placement.fuse, 2.0**40) / 2**20, 3) or 0.001,
        framework=on.run.profile.name,
        model=on.workload.fingerprint(),
        cluster=on.cluster.fingerprint(),
    )
    used = {a.devices for a in placement.actions}
    if len(used) == 1 and all(a.way != SPLIT for a in placement.actions):
        return _replicas(on, placement, share, base)
    if len(used) == 1 and all(a.way == SPLIT for a in placement.actions):
        return _whole_split(on, placement, base)
    # rows say how their layers agree: what they cannot say is who serves, and what goes as factors
    sent = tuple(row for row in _sync(on, placement, tuple) if row[1] != "sharded")
    rows = tuple(_rows(on, placement, share))
    return base.but(**_batches(on, placement, on.batch), groups=rows, sync=sent)


def samples(on: Problem, chosen: int, share: Ints) -> dict[int, int]:
    """Samples of each rank of a set: as many as its cell's at most, a batch in all."""
    found = {
        r: int(share[chosen, c]) for c in on.fleet.sets[chosen] for r in on.fleet.cells[c].ranks
    }
    over = sum(found.values()) - on.batch
    for rank in sorted(found, key=lambda r: (-found[r], -r)):
        if over > 0 and found[rank] > 1:
            found[rank] -= 1
            over -= 1
    while over > 0:  # every rank gave one and there is still too much
        rank = max(found, key=lambda r: (found[r], -r))
        found[rank] -= 1
        over -= 1
    return found


def _batches(on: Problem, placement: Placement, most: int) -> dict[str, int]:
    return {"micro_batch": -(-most // placement.micros)} if placement.micros > 1 else {}


def _replicas(on: Problem, placement: Placement, share: Ints, base: Plan) -> Plan:
    """Data parallelism on some ranks, with a way for each parameter."""
    chosen = placement.actions[0].devices
    dealt = dict(sorted(samples(on, chosen, share).items()))
    uneven = len(set(dealt.values())) > 1
    everywhere = tuple(dealt) == tuple(range(on.cluster.size))
    sharded = all(a.way == SHARDED for a in placement.actions) and len(dealt) > 1
    return base.but(
        dp=len(dealt),
        shares=tuple(dealt.values()) if uneven else (),
        placement=() if everywhere else tuple(dealt),
        zero=1 if sharded else 0,
        sync=() if sharded else tuple(_sync(on, placement, sorted)),
        **_batches(on, placement, max(dealt.values())),
    )


def _sync(
    on: Problem, placement: Placement, in_order: Callable[[tuple[int, ...]], Sequence[int]]
) -> Iterator[tuple[str, str]]:
    """How each parameter agrees, where that is not an all-reduce; servers count ranks in order."""
    served, places = settled(on, placement)[2].tolist(), on.fleet.ranks(0)
    for g, action in enumerate(placement.actions):
        ranks = in_order(on.fleet.ranks(action.devices))
        if action.way in (ALL_REDUCE, SPLIT) or len(ranks) == 1:
            continue
        sent = on.factored.get((action.devices, g), {})
        word = f"ps:{ranks.index(places[served[g]])}" if action.way == PS else "sharded"
        for op, name in _parameters(on, g):
            if action.way != FACTORS:
                yield name, word
            elif op in sent:
                yield name, sent[op]


def _parameters(on: Problem, group: int) -> Iterator[tuple[str, str]]:
    """(op, parameter) of a group, both behind the name of their layer; tied ones once."""
    again = {other for _, other in on.workload.tied}
    for unit in on.groups[group].units:
        layer = on.workload.layers[unit.layer]
        for op in layer.works():
            for weight in op.weights:
                if f"{layer.name}/{weight.name}" not in again:
                    yield f"{unit.name}/{op.name}", f"{unit.name}/{weight.name}"


def _whole_split(on: Problem, placement: Placement, base: Plan) -> Plan:
    ranks = on.fleet.ranks(placement.actions[0].devices)
    axis = "tp" if on.workload.most("tp") > 1 else "filter"
    return base.but(**{axis: len(ranks)}, placement=ranks, **_batches(on, placement, on.batch))


def _rows(on: Problem, placement: Placement, share: Ints) -> Iterator[tuple[str, ...]]:
    """Runs of groups that choose the same."""
    first, chosen = 0, placement.actions
    for g in range(1, len(chosen) + 1):
        if g < len(chosen) and chosen[g][:2] == chosen[first][:2]:
            continue
        action = chosen[first]
        split = action.way == SPLIT
        dealt = (
            dict.fromkeys(on.fleet.ranks(action.devices), on.batch)
            if split
            else samples(on, action.devices, share)
        )
        ends = on.groups[first].units[0].name, on.groups[g - 1].units[-1].name
        yield (*ends, WAYS[action.way], *(f"{r}:{n}" for r, n in dealt.items()))
        first = g


def seconds_of(plan: Plan, workload: Workload, cluster: Cluster) -> float:
    """Seconds of a step under a plan that `plan_of` could have made; infinite if it does not fit.

    Samples are those the plan names, rank by rank.
    """
    _check(plan, workload, cluster)
    rows = plan.groups or (_as_row(plan, cluster),)
    dealt = [_rank_shares(row) for row in rows]
    on = problem(
        workload,
        cluster,
        plan.global_batch,
        framework=plan.framework or "ddp",
        idle=True,
        cells=_exact(cluster, dealt),
    )
    share = np.zeros((len(on.tables.size), len(on.tables.kind)), np.int64)
    chosen: list[Action] = []
    ranked: list[tuple[int, ...]] = []  # places of each group's ranks, in the order of its row
    cell_of = {cell.ranks[0]: c for c, cell in enumerate(on.fleet.cells)}
    for row, mine in zip(rows, dealt, strict=True):
        devices = on.fleet.sets.index(tuple(sorted(cell_of[r] for r in mine)))
        for rank, n in mine.items():
            share[devices, cell_of[rank]] = n
        chosen += [Action(devices, WAYS.index(row[2]))] * _length(on, row)
        ranked += [tuple(cell_of[r] for r in mine)] * (len(chosen) - len(ranked))
    chosen = _synced(on, plan, chosen, ranked)
    widest = plan.global_batch if plan.groups else max(max(mine.values()) for mine in dealt)
    micros = -(-widest // plan.micro_batch) if plan.micro_batch else 1
    placement = Placement(tuple(chosen), micros, plan.bucket_mb * 2**20)
    return with_shares(on, placement, share)


def _check(plan: Plan, workload: Workload, cluster: Cluster) -> None:
    if plan.cluster and plan.cluster != cluster.fingerprint():
        raise InputError(
            f"the plan was made for another cluster than `{cluster.name}`",
            hint="find one for this cluster: foretell plan … --with placement",
        )
    if plan.model and plan.model != workload.fingerprint():
        raise InputError(
            f"the plan was made for another model than `{workload.name}`",
            hint="find one for this model: foretell plan … --with placement",
        )


def _as_row(plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """A plan of replicas, or of one split, as one row of groups."""
    ranks = plan.placement or tuple(range(cluster.size))
    if plan.tp * plan.filter > 1:
        return ("", "", "split", *(f"{r}:{plan.global_batch}" for r in ranks))
    each = -(-plan.global_batch // plan.dp)
    counts = plan.shares or (each,) * plan.dp
    way = "sharded" if plan.zero else "all-reduce"
    return ("", "", way, *(f"{r}:{n}" for r, n in zip(ranks, counts, strict=True)))


def _rank_shares(row: tuple[str, ...]) -> dict[int, int]:
    return {int(a): int(b) for a, _, b in (item.partition(":") for item in row[3:])}


def _exact(cluster: Cluster, dealt: list[dict[int, int]]) -> Fleet:
    """Every rank a cell, and the sets of a plan as candidates."""
    whole = fleet(cluster, single=True)
    cell_of = {cell.ranks[0]: c for c, cell in enumerate(whole.cells)}
    for mine in dealt:
        for rank in mine:
            if rank not in cell_of:
                raise InputError(
                    f"the plan names rank {rank}; `{cluster.name}` has {cluster.size} ranks",
                    hint="it was made for another cluster: find one for this cluster",
                )
    sets = dict.fromkeys(tuple(sorted(cell_of[r] for r in mine)) for mine in dealt)
    cells: tuple[Cell, ...] = whole.cells
    return Fleet(cluster, whole.kinds, cells, tuple(sets))


def _length(on: Problem, row: tuple[str, ...]) -> int:
    """How many groups a row covers."""
    if not row[0]:
        return len(on.groups)
    first = [g for g, group in enumerate(on.groups) if group.units[0].name == row[0]]
    last = [g for g, group in enumerate(on.groups) if group.units[-1].name == row[1]]
    if not first or not last:
        raise InputError(
            f"the plan's layers `{row[0]}` to `{row[1]}` are not in `{on.workload.name}`",
            hint="it was made for another model: find one for this model",
        )
    return last[0] - first[0] + 1


def _synced(
    on: Problem, plan: Plan, chosen: list[Action], ranked: list[tuple[int, ...]]
) -> list[Action]:
    """The ways of single parameters, group by group; servers take turns where none is named."""
    ways, out, turn = agreed(plan), [], 0
    for g, action in enumerate(chosen):
        said = min((ways[name] for _, name in _parameters(on, g) if name in ways), default="")
        word = said.partition(":")[0] or WAYS[action.way]
        if word == "ps" and action.way != SPLIT:
            place = served_by(said, ranked[g], turn, on.groups[g].name)
            action = Action(action.devices, PS, place)
        elif said and not plan.groups:
            action = Action(action.devices, WAYS.index(word))
        out.append(action)
        turn += len(on.groups[g].units)
    return out
