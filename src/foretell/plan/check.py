"""Whether a plan can be: its factors against ranks, batch, layers and the limits of the model.

Layers on ranks of their own: what the rows of a plan's `groups` say, read and checked.

A row is a run of layers in the order of forward: its first and last layer, how its replicas agree,
and `rank:samples` of each, in the order in which ranks hold stretches of the batch:

    conv1 conv5 all-reduce 0:12 1:12 2:8 / fc1 fc3 factors 0:16 1:16

`micro_batch` counts samples of all ranks of a run together. A rank has its samples spread over the
micro-batches as evenly as whole samples allow (→ `rank_samples`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from foretell.cluster import Cluster
from foretell.errors import InfeasibleError, InputError, unknown
from foretell.plan.framework import resolved
from foretell.plan.plan import Plan, as_degrees, blocks_of, expert_ranks, micro_samples, segments
from foretell.plan.program import FAMILIES, ONE_CHUNK, SCHEDULES, chunks_of, require_micro_batches
from foretell.workload import Workload

SYNC_METHODS = ("all-reduce", "ps", "sharded", "factors")
GROUP_METHODS = (*SYNC_METHODS, "split")


MOST_MICRO_BATCHES = 1 << 16  # each is simulated
RESOLVED = ("framework", "precision", "dtype", "optimizer")  # what is filled in for a plan


@dataclass(frozen=True)
class LayerGroup:
    """Layers in a row on some ranks."""

    first: str
    last: str
    way: str  # of `WAYS`
    samples: Mapping[int, int]  # of each rank

    @property
    def ranks(self) -> tuple[int, ...]:
        """Its ranks, in the order of their samples."""
        return tuple(self.samples)

    @property
    def batch(self) -> int:
        """Samples of all ranks; where it is split each has all of them."""
        each = [*self.samples.values()]
        return each[0] if self.way == "split" and len(set(each)) == 1 else sum(each)


def layer_groups(plan: Plan) -> tuple[LayerGroup, ...]:
    """The rows of a plan's `groups`; raises where they cannot be."""
    found = tuple(_layer_group(row) for row in plan.groups)
    batch = plan.global_batch or found[0].batch
    for run in found:
        each = set(run.samples.values()) if run.way == "split" else {run.batch}
        if each != {batch}:
            has = " and ".join(map(str, sorted(each)))
            raise InputError(
                f"`{run.first}` to `{run.last}` has {has} samples; the batch has {batch}",
                hint="the samples of a row add up to global_batch; `split` names it for each rank",
            )
    return found


def _layer_group(row: tuple[str, ...]) -> LayerGroup:
    where = f"the row `{'+'.join(row)}` of groups"
    if len(row) < 4:
        raise InputError(
            f"{where} has {len(row)} parts", hint="write FIRST+LAST+WAY+RANK:SAMPLES+…"
        )
    if row[2] not in GROUP_METHODS:
        raise unknown(f"way in {where}", row[2], GROUP_METHODS)
    pairs = [item.partition(":") for item in row[3:]]
    good = [(int(a), int(b)) for a, _, b in pairs if a.isdecimal() and b.isdecimal() and int(b)]
    if len(good) < len(pairs) or len(dict(good)) < len(pairs):
        raise InputError(
            f"{where} does not deal samples out",
            hint="name each rank once, with one sample or more: 0:12+1:4",
        )
    return LayerGroup(row[0], row[1], row[2], dict(good))


def groups_as_degrees(plan: Plan, found: Sequence[LayerGroup], axis: str, size: int) -> Plan | None:
    """The same plan in degrees where all ranks of a cluster run all layers alike, else None.

    `axis` is the degree that layers split over several ranks have.
    """
    first, ranks = found[0], len(found[0].samples)
    alike = all(run.samples == first.samples and run.way == first.way for run in found)
    even = len(set(first.samples.values())) == 1 and first.ranks == tuple(range(size))
    if not (alike and even) or plan.sync or first.way not in ("all-reduce", "sharded", "split"):
        return None
    micro = plan.micro_batch or first.batch
    bare = plan.but(groups=(), global_batch=first.batch)
    if first.way == "split":
        return bare.but(**{axis: ranks}, micro_batch=micro) if first.batch % micro == 0 else None
    if micro % ranks or first.batch % micro:
        return None
    zero = 1 if first.way == "sharded" else 0
    return bare.but(dp=ranks, zero=zero, micro_batch=micro // ranks)


def sync_methods(plan: Plan) -> dict[str, str]:
    """How single parameters agree, by the names the plan has for them."""
    for row in plan.sync:
        if len(row) != 2 or row[1].partition(":")[0] not in SYNC_METHODS:
            raise InputError(
                f"`{'+'.join(row)}` in the plan's sync is not a parameter and a way",
                hint="write NAME+WAY, of all-reduce, ps:RANK, sharded, factors, factors:recompute; "
                "`/` is %2F in NAME",
            )
    return {row[0]: row[1] for row in plan.sync}


def layers_of(found: Sequence[LayerGroup], names: Sequence[str], model: str) -> list[range]:
    """Places in `names` that each run covers; together they are all of them, once, in order."""
    at = {name: i for i, name in enumerate(names)}
    out, behind = [], 0
    for run in found:
        if run.first not in at or run.last not in at:
            raise InputError(
                f"the plan's layers `{run.first}` to `{run.last}` are not in `{model}`",
                hint="it was made for another model: find one for this model",
            )
        if at[run.first] != behind or at[run.last] < behind:
            raise InputError(
                f"the plan's layers go on with `{run.first}` to `{run.last}`; "
                f"`{model}` goes on with `{names[min(behind, len(names) - 1)]}`",
                hint="rows name every layer once, in the order of forward",
            )
        behind = at[run.last] + 1
        out.append(range(at[run.first], behind))
    if behind < len(names):
        raise InputError(
            f"the plan has no ranks for `{names[behind]}` of `{model}`",
            hint="rows name every layer once, in the order of forward",
        )
    return out


def micro_batches_of_groups(plan: Plan) -> int:
    """How many micro-batches a step has."""
    batch = plan.global_batch or layer_groups(plan)[0].batch
    return -(-batch // plan.micro_batch) if plan.micro_batch else 1


def group_samples(run: LayerGroup, batches: int) -> list[dict[int, int]]:
    """Samples of each rank of a run in each micro-batch; all of them where it is split."""
    if run.way != "split":
        return rank_samples(run.samples, batches)
    bounds = [m * run.batch // batches for m in range(batches + 1)]
    return [dict.fromkeys(run.samples, b - a) for a, b in pairwise(bounds)]


def rank_samples(samples: Mapping[int, int], batches: int) -> list[dict[int, int]]:
    """Samples of each rank in each micro-batch: those of a rank are as far apart as they can be.

    Of micro-batch m all ranks together have samples m·B/M to (m+1)·B/M, whichever rank has them.
    """
    whole = sum(samples.values())
    moments = sorted(
        ((2 * j + 1) / (2 * n), place, rank)
        for place, (rank, n) in enumerate(samples.items())
        for j in range(n)
    )
    bounds = [m * whole // batches for m in range(batches + 1)]
    out = []
    for m in range(batches):
        mine = [rank for _, _, rank in moments[bounds[m] : bounds[m + 1]]]
        out.append({rank: mine.count(rank) for rank in samples})
    return out


@dataclass(frozen=True)
class Unit:
    """One layer, once: which of the workload's layers, and which time."""

    layer: int
    time: int
    name: str


def units(workload: Workload) -> list[Unit]:
    """Every layer of a step in forward order, under the names that rows use."""
    return [
        Unit(at, i, f"{layer.name}.{i}" if layer.times > 1 else layer.name)
        for at, layer in enumerate(workload.layers)
        for i in range(layer.times)
    ]


def layer_reads(workload: Workload) -> list[list[int]]:
    """The layers that each layer reads; the model's input is none."""
    at = {layer.name: i for i, layer in enumerate(workload.layers)}
    return [
        [at[name] for name in layer.after if name] if layer.after else [*range(i)][-1:]
        for i, layer in enumerate(workload.layers)
    ]


BESIDE = 0.02  # of a model: branches that do less beside the longest are not told apart
INTENSITY = 100.0  # flops for a byte: of accelerators, from V100 (125 TFLOP/s, 0.9 TB/s) upwards


def branches(workload: Workload) -> tuple[list[int], list[list[int]], list[int]]:
    """Layers before, in each branch of, and behind the join whose shorter branches do most.

    A branch is what one input of the join needs and no other does; a way around is none, and so are
    branches whose shorter ones do next to nothing.
    """
    reads = layer_reads(workload)
    needs: list[set[int]] = []
    for inputs in reads:
        needs.append(set(inputs).union(*(needs[i] for i in inputs)))
    work = [  # about what layers take: flops, and as many for each byte as a device does meanwhile
        layer.times * once
        + INTENSITY * (layer.times * float(layer.output_bytes({}, 1.0, workload.dtype)))
        for layer, once in zip(workload.layers, workload.layer_flops, strict=True)
    ]
    found, most = list[list[int]](), BESIDE * sum(work)
    for inputs in reads:
        every = [needs[i] | {i} for i in inputs]
        ways = [one - set().union(*(o for o in every if o is not one)) for one in every]
        some = [sorted(way) for way in ways if way]
        beside = _shorter_branches(some, work)
        if beside > most:
            found, most = some, beside
    inside = {i for way in found for i in way}
    before = set().union(*(needs[i] for i in inside)) - inside
    rest = [i for i in range(len(reads)) if i not in before | inside]
    return sorted(before), found, rest


def _shorter_branches(ways: Sequence[Sequence[int]], work: Sequence[float]) -> float:
    """What all branches but the longest take."""
    each = [sum(work[i] for i in way) for way in ways]
    return sum(each) - max(each, default=0.0)


def unit_reads(workload: Workload) -> list[list[int]]:
    """The units that each unit reads: the turn before it, or the last turn of what it follows."""
    ends = [*accumulate(layer.times for layer in workload.layers)]
    return [
        [ends[i] - 1 for i in reads] if turn == 0 else [first + turn - 1]
        for layer, reads, first in zip(
            workload.layers, layer_reads(workload), [0, *ends], strict=False
        )
        for turn in range(layer.times)
    ]


def torch_names(name: str) -> tuple[str, ...]:
    """What a workload's weight may be called in PyTorch: `2/addmm.weight` is `2.weight` there.

    A norm that a layer took in is called by its own path: `2/3.batch_norm.weight` is `3.weight`.
    """
    dotted, inside = name.replace("/", "."), name.rpartition("/")[2]
    bare = [".".join([*parts[:-2], parts[-1]]) for parts in (dotted.split("."), inside.split("."))]
    return (name, dotted, *bare)


def check(plan: Plan, workload: Workload, cluster: Cluster) -> Plan:
    """The plan with its batch filled in, or an error that names the factors."""
    if plan.groups:
        return _check_groups(plan, workload, cluster)
    if plan.segments:
        return _check_segments(plan, workload, cluster)
    plan = resolved(plan, workload)
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
    plan = _with_batch(plan, workload)
    _check_overlap(plan)
    return plan


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
        factors = _product_text({k: v for k, v in plan.degrees().items() if v > 1}) or "dp=1"
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


def beside_groups(plan: Plan) -> list[str]:
    """What layers on ranks of their own cannot be beside: neither priced nor run."""
    beside = [f"{axis}={n}" for axis, n in plan.degrees().items() if n > 1]
    beside += [f"zero={plan.zero}"] if plan.zero else []
    beside += [f for f in ("shares", "buckets", "stages", "actions") if getattr(plan, f)]
    return [f"groups beside {word}" for word in beside]


def _check_groups(plan: Plan, workload: Workload, cluster: Cluster) -> Plan:
    """Layers on ranks of their own: rows against the model's layers and the cluster's ranks."""
    _check_made_for(plan, cluster)
    if plan.model and plan.model != workload.fingerprint():
        raise InputError(
            f"the plan was made for another model than `{workload.name}`",
            hint="find one for this model with `foretell plan`",
        )
    beside = beside_groups(plan)
    if beside:
        raise InputError(
            beside[0], hint="rows name ranks, samples and ways one by one: leave it out"
        )
    found = layer_groups(plan)
    if plan.ranks > cluster.size:
        raise InputError(
            f"the plan names rank {plan.ranks - 1}; `{cluster.name}` has {cluster.size} ranks",
            hint="it was made for another cluster: find one for this cluster",
        )
    layers_of(found, [unit.name for unit in units(workload)], workload.name)
    batch = plan.global_batch or found[0].batch
    name = plan.framework or "ddp"  # what runs them (→ foretell.pytorch.deploy) is plain PyTorch
    plan = resolved(plan.but(framework=name), workload)
    axis = "tp" if workload.most("tp") > 1 else "filter"
    same = groups_as_degrees(plan, found, axis, cluster.size)
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
    first = resolved(first, workload)
    for one in found:
        _check_splits(one.plan, workload)
        _with_batch(one.plan, workload)
    shared = {name: getattr(first, name) for name in RESOLVED}
    whole = micro_samples(first)
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
    factors = _product_text({k: v for k, v in plan.degrees().items() if v > 1}) or "dp=1"
    raise InputError(
        f"{factors} makes {plan.ranks} ranks; `{cluster.name}` has {cluster.size}",
        hint=f"the degrees have to multiply to {cluster.size}{_nearest(plan, cluster.size)}",
    )


def _nearest(plan: Plan, size: int) -> str:
    """What dp would have to be, where that is a whole number."""
    rest = plan.ranks // plan.dp
    return f": dp={size // rest} with the others as they are" if size % rest == 0 else ""


def _product_text(degrees: dict[str, int]) -> str:
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
    _check_has_experts(plan, workload)
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


def _check_has_experts(plan: Plan, workload: Workload) -> None:
    """What says how experts are run needs experts."""
    given = {"etp": expert_ranks(plan) > 1, "ep_overlap": plan.ep_overlap is True}
    given["ep_dispatch"] = bool(plan.ep_dispatch)
    for name, is_given in given.items():
        if is_given and workload.most("ep") <= 1:
            value = "yes" if name == "ep_overlap" else getattr(plan, name)
            raise InputError(
                f"{name}={value}, but `{workload.name}` has no experts", hint=f"leave {name} out"
            )


def _check_overlap(plan: Plan) -> None:
    """Expert exchanges beside compute need another micro-batch whose compute there is."""
    if not plan.ep_overlap or plan.ep == 1:
        return
    if micro_batches(plan) == 1 or (plan.pp > 1 and plan.chunks == 1):
        raise InputError(
            f"ep_overlap=yes with {micro_batches(plan)} micro-batches, pp={plan.pp} and "
            f"chunks={plan.chunks}",
            hint="it takes two micro-batches or more, and chunks where there are stages",
        )


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


def _with_batch(plan: Plan, workload: Workload) -> Plan:
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
