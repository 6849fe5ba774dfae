"""Whether a plan can be: its factors against ranks, batch, layers and the limits of the model."""

from __future__ import annotations

import math

from foretell.cluster import Cluster
from foretell.errors import InfeasibleError, InputError, unknown
from foretell.plan import grouped
from foretell.plan.framework import resolved
from foretell.plan.grouped import layers_of, runs, units
from foretell.plan.order import (
    FAMILIES,
    ONE_CHUNK,
    SCHEDULES,
    chunks_of,
    require_micro_batches,
)
from foretell.plan.plan import Plan
from foretell.plan.process_groups import expert_ranks
from foretell.plan.segments import as_degrees, blocks_of, segments
from foretell.workload import Workload

MOST_MICRO_BATCHES = 1 << 16  # each is simulated
RESOLVED = ("framework", "precision", "dtype", "optimizer")  # what is filled in for a plan


def check(plan: Plan, workload: Workload, cluster: Cluster) -> Plan:
    """The plan with its batch filled in, or an error that names the factors."""
    if plan.groups:
        return _check_groups(plan, workload, cluster)
    if plan.segments:
        return _check_segments(plan, workload, cluster)
    plan = resolved(plan, workload.most("tp") > 1, workload.dtype)
    _check_made_for(plan, cluster)
    if len(plan.shares) == plan.dp and len(set(plan.shares)) == 1:
        plan = plan.but(shares=(), global_batch=sum(plan.shares))
    if plan.stages:
        _check_placed(plan)
    else:
        _check_ranks(plan, cluster)
        _check_splits(plan, workload)
        _check_schedule(plan)
        plan = plan.but(chunks=chunks_of(plan))
        _check_stages(plan, workload)
        if plan.layers == blocks_of(plan.but(layers=()), workload):
            plan = plan.but(layers=())
    return _filled(plan, workload)


def settled(plan: Plan, workload: Workload, cluster: Cluster) -> tuple[Plan, Cluster]:
    """A plan checked, in degrees wherever it can be, and the machines its ranks are, in order."""
    if plan.segments:
        plan = check(plan, workload, cluster)
    if plan.stages:
        return check(plan, workload, cluster), cluster
    plan, cluster = placed(plan, cluster)
    return check(plan, workload, cluster), cluster


def placed(plan: Plan, cluster: Cluster) -> tuple[Plan, Cluster]:
    """A plan and the machines it is placed on, its ranks in order: rank i is `placement[i]`."""
    if not plan.placement:
        return plan, cluster
    if len(plan.placement) != plan.ranks:
        factors = _product({k: v for k, v in plan.degrees().items() if v > 1}) or "dp=1"
        raise InputError(
            f"a placement of {len(plan.placement)} ranks; {factors} makes {plan.ranks}",
            hint="give the cluster's rank of each logical rank, tp innermost, pp outermost",
        )
    _check_made_for(plan, cluster)
    return plan.but(placement=(), cluster=""), cluster.subset(plan.placement)


def require_made_for(plan: Plan, cluster: Cluster) -> None:
    """A plan found for some machines fits no others."""
    if plan.cluster and plan.cluster != cluster.fingerprint():
        raise InputError(
            f"the plan was made for another cluster than `{cluster.name}`",
            hint="find one for this cluster with `foretell plan`",
        )
    if plan.ranks > cluster.size:
        raise InputError(
            f"the plan needs {plan.ranks} ranks; `{cluster.name}` has {cluster.size}",
            hint="find one for this cluster with `foretell plan`",
        )


def _check_made_for(plan: Plan, cluster: Cluster) -> None:
    """A plan found for some machines fits no others, and the prices here no single ops."""
    if plan.cluster:
        require_made_for(plan, cluster)
    if plan.regions or plan.late:
        raise InputError(
            "a plan that fuses or orders single ops (`regions`, `late`)",
            hint="`foretell predict` and `foretell.search.fusion.fused_step` price it",
        )


def _check_groups(plan: Plan, workload: Workload, cluster: Cluster) -> Plan:
    """Layers on ranks of their own: rows against the model's layers and the cluster's ranks."""
    _check_made_for(plan, cluster)
    if plan.model and plan.model != workload.fingerprint():
        raise InputError(
            f"the plan was made for another model than `{workload.name}`",
            hint="find one for this model with `foretell plan`",
        )
    beside = {k: n for k, n in plan.degrees().items() if n > 1}
    if beside:
        raise InputError(
            f"{_product(beside)} beside layers on ranks of their own (`groups`)",
            hint="rows name ranks one by one: leave the degrees out",
        )
    found = runs(plan)
    if plan.ranks > cluster.size:
        raise InputError(
            f"the plan names rank {plan.ranks - 1}; `{cluster.name}` has {cluster.size} ranks",
            hint="it was made for another cluster: find one for this cluster",
        )
    layers_of(found, [unit.name for unit in units(workload)], workload.name)
    batch = plan.global_batch or found[0].batch
    name = plan.framework or "ddp"  # what runs them (→ foretell.pytorch.deploy) is plain PyTorch
    plan = resolved(plan.but(framework=name), workload.most("tp") > 1, workload.dtype)
    axis = "tp" if workload.most("tp") > 1 else "filter"
    same = grouped.as_degrees(plan, found, axis, cluster.size)
    if same is not None and same.degrees()[axis] <= workload.most(axis):
        return check(same, workload, cluster)
    micro = plan.micro_batch or batch
    return plan.but(global_batch=batch, micro_batch=micro)


def _check_segments(plan: Plan, workload: Workload, cluster: Cluster) -> Plan:
    """Segments against the model and the ranks; in degrees where they are all alike."""
    _check_made_for(plan, cluster)
    beside = [name for name in ("dp", "pp", "chunks") if getattr(plan, name) > 1]
    beside += [name for name in ("layers", "shares", "placement", "actions") if getattr(plan, name)]
    if beside or plan.groups or plan.stages or plan.schedule not in ONE_CHUNK:
        raise InputError(
            f"`{(beside or ['schedule', plan.schedule])[0]}` beside segments",
            hint=f"rows say which ranks have which blocks; schedules are {', '.join(ONE_CHUNK)}",
        )
    if plan.ranks > cluster.size:
        raise InputError(
            f"the plan names rank {plan.ranks - 1}; `{cluster.name}` has {cluster.size} ranks",
            hint="it was made for another cluster: find one for this cluster",
        )
    found = segments(plan, workload)
    same = as_degrees(plan, found, cluster)
    if same is not None:
        inner, machines = placed(same, cluster)
        return check(inner, workload, machines).but(placement=same.placement)
    first = found[0].plan.but(zero=max(one.plan.zero for one in found))
    first = resolved(first, workload.most("tp") > 1, workload.dtype)
    for one in found:
        _check_splits(one.plan, workload)
        _filled(one.plan, workload)
    shared = {name: getattr(first, name) for name in RESOLVED}
    whole = first.micro_batch * first.dp
    return plan.but(global_batch=first.global_batch, micro_batch=whole, **shared)


def _check_placed(plan: Plan) -> None:
    """Stages say themselves how they are split: what is left to the degrees is nothing."""
    for name, degree in plan.degrees().items():
        if degree > 1:
            raise InputError(
                f"{name}={degree} beside stages that are placed one by one",
                hint="a stage is split over the ranks it names: leave the degree out",
            )
    if not plan.actions:
        raise InputError("stages without actions", hint="give every rank a row: 0F0 0B0 …")


def _check_ranks(plan: Plan, cluster: Cluster) -> None:
    if plan.ranks == cluster.size:
        return
    factors = _product({k: v for k, v in plan.degrees().items() if v > 1}) or "dp=1"
    raise InputError(
        f"{factors} makes {plan.ranks} ranks; `{cluster.name}` has {cluster.size}",
        hint=f"the degrees have to multiply to {cluster.size}{_nearest(plan, cluster.size)}",
    )


def _nearest(plan: Plan, size: int) -> str:
    """What dp would have to be, where that is a whole number."""
    rest = plan.ranks // plan.dp
    return f": dp={size // rest} with the others as they are" if size % rest == 0 else ""


def _product(degrees: dict[str, int]) -> str:
    return " × ".join(f"{name}={degree}" for name, degree in degrees.items())


def _check_splits(plan: Plan, workload: Workload) -> None:
    for axis, degree in (plan.degrees() | {"ep": plan.ep}).items():
        if axis in ("dp", "pp") or degree == 1:
            continue
        most = workload.most(axis)
        if degree > most:
            raise InfeasibleError(
                f"{axis}={degree}, but `{workload.name}` can be split {most:g} ways there",
                hint=f"{axis} is at most {most:g}",
            )
    ranks = plan.dp * plan.cp * expert_ranks(plan)
    if ranks % plan.ep:
        raise InputError(
            f"ep={plan.ep} does not divide dp={plan.dp} × cp={plan.cp} × tp/etp = {ranks}",
            hint="experts are split over data-parallel ranks, and with etp=1 over those of tp too",
        )
    if expert_ranks(plan) > 1 and not plan.sp:
        raise InputError(
            f"etp={plan.etp} below tp={plan.tp} without sequence parallelism", hint="add sp=yes"
        )
    if plan.dp % plan.sharing:
        raise InputError(f"shard={plan.shard} does not divide dp={plan.dp}")


def _check_schedule(plan: Plan) -> None:
    if plan.schedule not in SCHEDULES:
        raise unknown("schedule", plan.schedule, SCHEDULES)
    if plan.schedule == "actions" and not plan.actions:
        raise InputError("schedule=actions without actions", hint="list them by stage: F0 B0 …")
    if plan.chunks not in (1, chunks_of(plan)):
        raise InputError(
            f"chunks={plan.chunks} with schedule={plan.schedule}",
            hint="chunks are given for schedule=interleaved; others have as many as they need",
        )


def _check_stages(plan: Plan, workload: Workload) -> None:
    blocks, parts = workload.num_blocks, plan.pp * plan.chunks
    most = blocks + 2 if plan.chunks > 1 and plan.pp <= blocks else blocks  # embedding, head
    if parts > most:
        raise InfeasibleError(
            f"pp={plan.pp} × chunks={plan.chunks} = {parts} pieces of {blocks} blocks",
            hint=f"their product is at most {most}",
        )
    if plan.layers and (len(plan.layers) != plan.pp or sum(plan.layers) != blocks):
        raise InputError(
            f"layers={'+'.join(map(str, plan.layers))} for pp={plan.pp} and {blocks} blocks",
            hint=f"give {plan.pp} numbers that add up to {blocks}",
        )


def _filled(plan: Plan, workload: Workload) -> Plan:
    whole = plan.global_batch or workload.batch * plan.dp
    if plan.shares and (len(plan.shares) != plan.dp or sum(plan.shares) != whole):
        raise InputError(
            f"shares of {sum(plan.shares)} samples on {len(plan.shares)} ranks",
            hint=f"give {plan.dp} numbers that add up to global_batch={whole}",
        )
    micro = plan.micro_batch or math.ceil(max(plan.shares, default=whole / plan.dp))
    if whole < plan.dp:
        raise InfeasibleError(
            f"global_batch={whole} for dp={plan.dp} ranks",
            hint="each data-parallel rank needs a sample: lower dp or raise global_batch",
        )
    if not plan.shares and whole % (plan.dp * micro):
        raise InputError(
            f"global_batch={whole} is no multiple of dp={plan.dp} × micro_batch={micro} "
            f"= {plan.dp * micro}",
            hint=f"for example global_batch={math.ceil(whole / plan.dp / micro) * plan.dp * micro}",
        )
    plan = plan.but(global_batch=whole, micro_batch=micro)
    if micro_batches(plan) > MOST_MICRO_BATCHES:
        raise InputError(
            f"{micro_batches(plan)} micro-batches of one rank in a step",
            hint=f"{MOST_MICRO_BATCHES} at most: raise micro_batch or lower global_batch",
        )
    _check_turns(plan)
    return plan


def _check_turns(plan: Plan) -> None:
    """Micro-batches enough for the schedule; interleaved takes groups of pp (as Megatron does)."""
    if plan.actions or plan.schedule not in FAMILIES:
        return
    require_micro_batches(plan.schedule, plan.pp, micro_batches(plan))
    if plan.chunks == 1 or plan.pp == 1 or plan.schedule != "interleaved":
        return
    if micro_batches(plan) % plan.pp == 0:
        return
    raise InputError(
        f"{micro_batches(plan)} micro-batches (global_batch={plan.global_batch} ÷ dp={plan.dp} ÷ "
        f"micro_batch={plan.micro_batch}) are no multiple of pp={plan.pp}",
        hint="schedule=interleaved needs one; change the batch, or use schedule=1f1b",
    )


def micro_batches(plan: Plan) -> int:
    """How many micro-batches the busiest data-parallel rank has."""
    if plan.segments:
        return plan.global_batch // plan.micro_batch
    most = max(plan.shares) if plan.shares else plan.global_batch // plan.dp
    return math.ceil(most / plan.micro_batch)
