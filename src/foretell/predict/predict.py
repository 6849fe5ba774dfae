"""A plan's step predicted: lowered to a graph, simulated, and summarized.

Prices are worked out once for many plans; each is then lowered and simulated.

What would make a layout fit: the change that costs the least time among those that fit.

Tried in all combinations: sharding more, running more again, smaller micro-batches, sequence
parallelism, optimizer state on the host. All are priced at once in closed form.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

import numpy as np

from foretell.cluster import Cluster
from foretell.errors import ForetellError
from foretell.graph import Kind, Phase
from foretell.graph.show import span
from foretell.plan import Plan, check, estimate
from foretell.plan.check import settled
from foretell.plan.costs import Costs, costs
from foretell.plan.group_graph import holding, in_flight, lower_groups
from foretell.plan.layer_ranges import GroupCosts, has_per_rank_costs, layer_ranges
from foretell.plan.lower import written
from foretell.plan.memory import ROUNDING, USABLE
from foretell.plan.place_graph import Prices, constant, lower_places, peaks
from foretell.plan.stage_ops import Priced, priced
from foretell.plan.stage_placement import acts, places
from foretell.predict.interval import distances, host_share, host_share_alone, interval
from foretell.simulate import Timeline, simulate
from foretell.workload import Workload

_MORE = {
    "none": ("none", "selective", "full"),
    "selective": ("selective", "full"),
    "full": ("full",),
}


Rows = np.ndarray[Any, Any]


def remedy(plan: Plan, workload: Workload, cluster: Cluster) -> str:
    """The cheapest change that fits, and what it costs; or by how much the best one still fails."""
    tried = list(_candidates(plan, workload, cluster))
    found = estimate(tried, workload, cluster)
    fits = np.flatnonzero(found.missing == 0)
    if len(fits):
        best = int(fits[np.argmin(found.step[fits])])
        return (
            f"{_changes(plan, tried[best])} fits and takes {span(float(found.step[best]))} a step"
        )
    least = int(np.argmin(found.missing))
    short = found.missing[least] / 2**30
    return f"even {_changes(plan, tried[least])} is {short:.1f} GiB short; use more tp, pp or ranks"


def _candidates(plan: Plan, workload: Workload, cluster: Cluster) -> Iterator[Plan]:
    """Plans that hold less, the plan itself first."""
    shards = range(plan.zero, 4) if plan.dp > 1 else (plan.zero,)
    micros = sorted({max(plan.micro_batch >> k, 1) for k in range(8)}, reverse=True)
    splits = (False, True) if plan.tp > 1 and not plan.sp else (plan.sp,)
    hosts = (plan.offload,) if plan.offload else (False, True)
    for zero, again, micro, sp, offload in product(
        shards, _MORE[plan.recompute], micros, splits, hosts
    ):
        one = plan.but(zero=zero, recompute=again, micro_batch=micro, sp=sp, offload=offload)
        try:
            yield check(one, workload, cluster)
        except ForetellError:
            continue


def _changes(before: Plan, after: Plan) -> str:
    """The fields in which two plans differ, as a person writes them."""
    names = [f.name for f in fields(Plan)]
    differ = [n for n in names if getattr(before, n) != getattr(after, n)]
    words = {True: "yes", False: "no"}
    values = [getattr(after, n) for n in differ]
    texts = [words[v] if isinstance(v, bool) else str(v) for v in values]
    return ",".join(f"{n}={t}" for n, t in zip(differ, texts, strict=True)) or "as it is"


def simulated_groups(
    plan: Plan, workload: Workload, cluster: Cluster
) -> tuple[Timeline, GroupCosts]:
    """The step of a checked plan as it runs, and what it was priced by."""
    costs = GroupCosts.of(plan, workload, cluster)
    return simulate(lower_groups(plan, workload, cluster, costs)), costs


def samples(plan: Plan, costs: GroupCosts) -> int:
    """The most samples that a rank has in one micro-batch."""
    found, batches = layer_ranges(plan, costs)
    return -(-max(max(one.samples.values()) for one in found) // batches)


def memory_of_groups(plan: Plan, costs: GroupCosts) -> tuple[float, float, dict[str, float]]:
    """Bytes of the rank with the least room left, how many are missing there, and what they are."""
    found, _ = layer_ranges(plan, costs)
    ranks = sorted({rank for stretch in found for rank in stretch.ranks})
    flying, program = in_flight(found), {"program": costs.run.profile.runtime}
    each = [holding(found, costs, rank, flying) | program for rank in ranks]
    most = [ROUNDING * sum(parts.values()) for parts in each]
    devices = [costs.cluster.devices[rank] for rank in ranks]
    over = [m - d.memory * USABLE for m, d in zip(most, devices, strict=True)]
    worst = int(np.argmax(over))
    return most[worst], max(over[worst], 0.0), each[worst]


def simulated_places(plan: Plan, prices: Prices) -> Timeline:
    """The step as it runs."""
    return simulate(lower_places(plan, prices.workload, prices.cluster, prices))


def memory_of_places(plan: Plan, prices: Prices) -> tuple[float, float, dict[str, float]]:
    """Bytes of the rank with the least room left, how many are missing there, and what they are."""
    cluster = prices.cluster
    found = places(plan, prices.workload, cluster.size)
    rows = acts(plan, found)
    most = peaks(prices, found, rows)
    over = [m - d.memory * USABLE for m, d in zip(most, cluster.devices, strict=False)]
    worst = int(np.argmax(over))
    trains = any(act.kind != "F" for row in rows for act in row)
    weights = constant(prices, found, worst, trains=False)
    rest = constant(prices, found, worst, trains=trains) - weights
    parts = {"parameters": weights, "gradients and optimizer": rest}
    parts["activations"] = most[worst] - weights - rest
    return most[worst], max(over[worst], 0.0), parts


def spent(timeline: Timeline) -> dict[str, float]:
    """Seconds of the busiest rank by what they go into; they make the step."""
    graph, took = timeline.graph, timeline.end - timeline.start
    kernels = graph.kind == Kind.KERNEL
    ranks = _ranks(timeline)
    busy = [float(took[kernels & mine].sum()) for mine in ranks]
    mine = ranks[int(np.argmax(busy))]
    update = float(took[mine & (graph.phase == Phase.UPDATE)].sum())
    compute = max(busy) - update
    comm = float(took[mine & (graph.kind == Kind.COLLECTIVE)].sum())
    rest = max(timeline.seconds - compute - update, 0.0)  # what messages do not hide behind work
    return {
        "compute_s": compute,
        "exchange_s": 0.0,  # what a stage exchanges inside is in its compute
        "reduce_s": min(comm, rest),
        "update_s": update,
        "idle_s": rest - comm if rest - comm > 1e-12 else 0.0,  # below that it is rounding
    }


def _ranks(timeline: Timeline) -> list[np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    """Which tasks hold a lane of each rank: a sharded block counts for all of its ranks."""
    graph = timeline.graph
    lane_rank = graph.lanes.rank
    out = []
    for rank in np.unique(lane_rank).tolist():
        mine = lane_rank[graph.lane] == rank
        held_here = graph.held.task[lane_rank[graph.held.lane] == rank]
        mine[held_here] = True
        out.append(mine)
    return out


@dataclass(frozen=True)
class Prediction:
    """The predicted step of one plan; seconds and bytes."""

    plan: Plan  # with its batch filled in
    step: float
    low: float
    high: float
    peak: float  # of the fullest rank
    missing: float  # by which that is too much; 0 where it fits
    breakdown: dict[str, float]  # the step of the busiest stage by what it is spent on
    memory: dict[str, float]  # the peak by what it holds
    advice: str  # what would make it fit; empty where it does
    utilisation: float  # model flop of the step over what the devices could do
    away: dict[str, float]  # how far the question is from what was measured: widens the interval

    @property
    def fits(self) -> bool:
        """Whether every rank's memory suffices."""
        return self.missing == 0

    def as_json(self) -> dict[str, Any]:
        """The keys the command line promises."""
        return {
            "step_s": self.step,
            "low_s": self.low,
            "high_s": self.high,
            "peak_bytes": self.peak,
            "fits": self.fits,
            "missing_bytes": self.missing,
            "breakdown": self.breakdown,
            "memory": self.memory,
            "utilisation": self.utilisation,
            "plan": str(self.plan),
            "advice": self.advice,
            "distances": self.away,
        }


def predict(
    plan: Plan, workload: Workload, cluster: Cluster, *, advises: bool = True
) -> Prediction:
    """Predict one plan."""
    return predict_many([plan], workload, cluster, advises=advises)[0]


def predict_many(
    plans: Sequence[Plan], workload: Workload, cluster: Cluster, *, advises: bool = True
) -> list[Prediction]:
    """Predict several plans of one workload on one cluster.

    With `advises`, a plan that does not fit comes with what would make it fit; searches do not ask.
    """
    if any(plan.stages for plan in plans):
        return [
            predict_placed(plan, Prices(check(plan, workload, cluster), workload, cluster))
            if plan.stages
            else predict(plan, workload, cluster, advises=advises)
            for plan in plans
        ]
    plans = [check(plan, workload, cluster) if plan.segments else plan for plan in plans]
    done = [settled(plan, workload, cluster) for plan in plans]
    alike = [i for i, (plan, where) in enumerate(done) if where is cluster and _is_even(plan)]
    known = costs([done[i][0] for i in alike], workload, cluster) if alike else None
    mine = {i: known.take(np.array([k])) for k, i in enumerate(alike)} if known else {}
    found = [
        _apart(plan, workload, where)
        if has_per_rank_costs(plan)
        else _one(priced(plan, workload, where, mine.get(i)), advises)
        for i, (plan, where) in enumerate(done)
    ]
    return [
        replace(one, plan=one.plan.but(placement=plan.placement, cluster=plan.cluster))
        for one, plan in zip(found, plans, strict=True)
    ]


def _is_even(plan: Plan) -> bool:
    """Whether all ranks of a plan are split alike, so that its prices are one column of many."""
    return not has_per_rank_costs(plan) and not plan.segments


def _one(found: Priced, advises: bool) -> Prediction:
    plan, cluster = found.plan, found.cluster
    timeline = simulate(written(found))
    over = [float(one.memory.peak[0]) - one.room for one in found.stages]
    peaks = [float(one.memory.peak[0]) for one in found.stages]
    missing = max(max(over), 0.0)
    worst = found.stages[int(np.argmax(over if missing else peaks))].memory
    seconds = timeline.seconds
    away = distances(plan, found.workload, cluster, host_share(found))
    low, high = interval(seconds, away)
    return Prediction(
        plan=plan,
        step=seconds,
        low=low,
        high=high,
        away=away,
        peak=float(worst.peak[0]),
        missing=missing,
        breakdown=breakdown(timeline, found),
        memory=worst.parts(),
        advice=_advice(found) if missing and advises else "",
        utilisation=utilisation(plan, found.workload, cluster, seconds),
    )


def _advice(found: Priced) -> str:
    """Advice that would make a plan fit in memory."""
    if found.plan.segments:
        return "recompute more blocks, shard more state, or give the fullest segment fewer blocks"
    return remedy(found.plan, found.workload, found.cluster)


def _apart(plan: Plan, workload: Workload, cluster: Cluster) -> Prediction:
    """A checked plan whose ranks are priced one by one."""
    timeline, priced = simulated_groups(plan, workload, cluster)
    advice = "give the fullest rank fewer samples or layers"
    busy = utilisation(plan, workload, cluster, timeline.seconds)
    share = host_share_alone(plan, workload, cluster, samples(plan, priced))
    away = distances(plan, workload, cluster, share)
    return _prediction(plan, away, timeline, memory_of_groups(plan, priced), advice, busy)


def predict_placed(plan: Plan, prices: Prices) -> Prediction:
    """Predict a plan whose stages are placed one by one, at prices that are known."""
    workload, cluster = prices.workload, prices.cluster
    plan = check(plan, workload, cluster)
    timeline = simulated_places(plan, prices)
    advice = "let more stages recompute, or spread them wider"
    busy = utilisation(plan, workload, cluster, timeline.seconds) * _share(plan)
    share = host_share_alone(plan, workload, cluster, plan.micro_batch)
    away = distances(plan, workload, cluster, share)
    return _prediction(plan, away, timeline, memory_of_places(plan, prices), advice, busy)


def _prediction(
    plan: Plan,
    away: dict[str, float],
    timeline: Timeline,
    memory: tuple[float, float, dict[str, float]],  # peak, missing, parts
    advice: str,
    utilisation: float,
) -> Prediction:
    """The prediction from a simulated step; with advice where the plan does not fit."""
    seconds, (peak, missing, parts) = timeline.seconds, memory
    low, high = interval(seconds, away)
    return Prediction(
        plan=plan,
        step=seconds,
        low=low,
        high=high,
        away=away,
        peak=peak,
        missing=missing,
        breakdown=spent(timeline),
        memory=parts,
        advice=advice if missing else "",
        utilisation=utilisation,
    )


def _share(plan: Plan) -> float:
    """Share of a training step's work that is done: a third without a backward pass."""
    return 1.0 if any("B" in a or "I" in a for row in plan.actions for a in row) else 1 / 3


def utilisation(plan: Plan, workload: Workload, cluster: Cluster, seconds: float) -> float:
    """Model flops of a step over what its devices could do: MFU."""
    peak = sum(d.peak(plan.dtype or workload.dtype) for d in cluster.devices)
    return workload.flops() * plan.global_batch / (seconds * peak)


def breakdown(timeline: Timeline, found: Priced) -> dict[str, float]:
    """Seconds of the busiest stage: compute, exchange, reduce, update, idle; they make the step."""
    graph = timeline.graph
    took = timeline.end - timeline.start
    compute = (graph.kind == Kind.KERNEL) & (graph.phase != Phase.UPDATE)
    ranks = np.unique(graph.rank)
    busy = [float(took[compute & (graph.rank == r)].sum()) for r in ranks.tolist()]
    busiest = int(ranks[int(np.argmax(busy))])
    mine = graph.rank == busiest
    update = float(took[mine & (graph.phase == Phase.UPDATE)].sum())
    own = next(one for one in found.stages if one.rank == busiest)
    drawn = _drawn(timeline, mine & compute, mine & (graph.kind == Kind.COLLECTIVE))
    inner, comm = (max(busy), drawn) if drawn else _inside(own.costs, max(busy))
    exposed = _exposed(timeline, mine)
    idle = timeline.seconds - inner - comm - update - exposed
    return {
        "compute_s": inner,
        "exchange_s": comm,
        "reduce_s": exposed,
        "update_s": update,
        "idle_s": idle if idle > 1e-12 else 0.0,  # below that it is rounding
    }


def _drawn(timeline: Timeline, compute: Rows, collectives: Rows) -> float:
    """Seconds of collectives that stand between kernels on their lane, as tasks of their own."""
    lanes = np.unique(timeline.graph.lane[compute])
    there = collectives & np.isin(timeline.graph.lane, lanes)
    return float((timeline.end - timeline.start)[there].sum())


def _inside(priced: Costs, busy: float) -> tuple[float, float]:
    """Compute and exchanges of what one task of a stage holds, by their share in the price."""
    kernels = sum(float((x.forward.kernels + x.backward.kernels)[0]) for x in priced.layers[1:-1])
    comm = sum(
        float((x.forward.talk + x.backward.talk + x.forward.skew + x.backward.skew)[0])
        for x in priced.layers[1:-1]
    )
    host = sum(float((x.forward.host + x.backward.host)[0]) for x in priced.layers[1:-1])
    share = comm / max(comm + max(kernels, host), 1e-30)
    return busy * (1 - share), busy * share


def _exposed(timeline: Timeline, mine: Rows) -> float:
    """Seconds of collectives after the last backward of a rank has ended."""
    graph = timeline.graph
    back = mine & (graph.kind == Kind.KERNEL) & (graph.phase == Phase.BACKWARD)
    comm = mine & (graph.kind == Kind.COLLECTIVE)
    end = float(timeline.end[back].max(initial=0.0))
    late = np.maximum(timeline.end[comm] - np.maximum(timeline.start[comm], end), 0.0)
    return float(late.sum())
