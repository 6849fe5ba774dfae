"""A plan's step predicted: lowered to a graph, simulated, and summarized.

Prices are worked out once for many plans; each is then lowered and simulated.

What would make a layout fit: the change that costs the least time among those that fit.

Tried in all combinations: sharding more, running more again, smaller micro-batches, sequence
parallelism, optimizer state on the host. All are priced at once in closed form.

The 80 % interval of a predicted step, from sources that nothing was fitted to.

A question is some way from what was measured: another generation of chips, more GPUs, a step bound
by the host. Each such distance, 0 to 1, moves and widens ln(measured / predicted), which is taken
to be normal:

    mean = Σ slow · distance          variance = Σ (width · distance)²

Measured steps are slower than predicted more often than faster, so intervals reach further up than
down. The numbers stand in `interval.toml`; `foretell validate --intervals` fits them and says how
many steps of each source lie in intervals that were fitted without it.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from foretell import portable
from foretell.cluster import Cluster
from foretell.errors import ForetellError
from foretell.graph import Kind, Phase
from foretell.graph.show import span
from foretell.plan import Plan, check, estimate
from foretell.plan.check import settled
from foretell.plan.costs import costs, layer_parts
from foretell.plan.framework import arches, profile_distances, running
from foretell.plan.layer_cost import LayerCost
from foretell.plan.lower import is_even, resolution
from foretell.plan.program import ResolvedStep, lowered
from foretell.simulate import Timeline, simulate
from foretell.workload import Workload
from foretell.workload.workload import flops

EIGHTY_PERCENT = 1.2815515594457831  # standard deviations that hold 80 % of a normal distribution
DOUBLINGS = 3.0  # of the number of GPUs beyond what a profile was measured on: as far as it counts


class Distance(NamedTuple):
    """Bias and spread of ln(measured / predicted) by one kind of distance."""

    slow: float  # mean
    width: float  # standard deviation


@cache
def shipped_distances() -> dict[str, Distance]:
    """The fitted distances."""
    text = files("foretell.predict").joinpath("interval.toml").read_text(encoding="utf-8")
    return {name: Distance(**row) for name, row in tomllib.loads(text)["distance"].items()}


def distances(plan: Plan, workload: Workload, cluster: Cluster, host: float) -> dict[str, float]:
    """How far a question is from what was measured, by kind; `host`: share bound by host time."""
    profile = running(plan).profile
    ops = [op for layer in workload.layers for op in layer.works()]
    kinds = {op.kind for op in ops}
    doublings = portable.log2(max(cluster.size / profile.gpus, 1.0))
    found = {
        "any": 1.0,
        **profile_distances(plan, cluster),
        "amd": float(any(arch.startswith("cdna") for arch in arches(cluster))),
        "scale": min(float(doublings) / DOUBLINGS, 1.0),
        "fp8": float(plan.dtype in ("fp8", "fp4")),
        "context": float(plan.cp > 1),
        "attention": _attention_share(workload),
        "images": float("conv" in kinds),
        "experts": float("experts" in kinds),
        "frozen": float(any(w.frozen for op in ops for w in op.weights)),
        "host": host,
        "lone": float(len(profile.sources) + len(profile.judged) < 2),
    }
    return {name: share for name, share in found.items() if share}


def interval(
    seconds: float, away: Mapping[str, float], fitted: Mapping[str, Distance] | None = None
) -> tuple[float, float]:
    """The ends of the interval around a predicted step."""
    known = shipped_distances() if fitted is None else fitted
    mean = sum(known[name].slow * share for name, share in away.items())
    variance = sum((known[name].width * share) ** 2 for name, share in away.items())
    reach = EIGHTY_PERCENT * math.sqrt(variance)
    low, high = (float(portable.exp(x)) for x in (min(mean - reach, 0.0), max(mean + reach, 0.0)))
    return seconds * low, seconds * high


def _attention_share(workload: Workload) -> float:
    """Share of a step in fused attention, which runs at about half the pace of other matmuls."""
    some = whole = 0.0
    for layer in workload.layers:
        for op in layer.works():
            one = layer.times * flops(op, op.sizes({}, 1.0))
            whole += one
            some += one if op.kind == "attention" else 0.0
    return 2 * some / max(whole + some, 1.0)


def host_share(layers: Sequence[tuple[LayerCost, float]], overlap_exponent: float) -> float:
    """How much of a step moves with host time: host^p of host^p + device^p, over all layers."""
    host = device = 0.0
    for layer, times in layers:
        for part in (layer.forward, layer.backward):
            host += times * float(part.host[0])
            device += times * float(part.kernels[0] + part.comm[0])
    return float(
        host**overlap_exponent / max(host**overlap_exponent + device**overlap_exponent, 1e-300)
    )


_RECOMPUTES = {
    "none": ("none", "selective", "full"),
    "selective": ("selective", "full"),
    "full": ("full",),
}


TRIED = 8  # changes that may fit: priced in closed form, these are simulated
Rows = np.ndarray[Any, Any]


def cheapest_fix(plan: Plan, workload: Workload, cluster: Cluster) -> str:
    """The cheapest change that fits, and what it costs; or by how much the best one still fails."""
    tried = list(_candidates(plan, workload, cluster))
    found = estimate(tried, workload, cluster)
    fits = np.flatnonzero(found.missing == 0)
    for at in fits[np.argsort(found.step[fits], kind="stable")][:TRIED].tolist():
        one = predict(tried[at], workload, cluster, advises=False)
        if one.fits:
            return f"{_changes(plan, tried[at])} fits and takes {span(one.step)} a step"
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
        shards, _RECOMPUTES[plan.recompute], micros, splits, hosts
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


@dataclass(frozen=True)
class Prediction:
    """What one step of one plan will be; seconds and bytes."""

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
    hfu: float = 0.0  # as `utilisation`, recomputed flop counted too

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
            "hfu": self.hfu,
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
    """Predict several plans of one workload on one cluster, those with even ranks priced at once.

    With `advises`, a plan that does not fit comes with what would make it fit; searches do not ask.
    """
    plans = [check(plan, workload, cluster) if plan.segments else plan for plan in plans]
    done = [settled(plan, workload, cluster) for plan in plans]
    even = [i for i, (plan, where) in enumerate(done) if where is cluster and is_even(plan)]
    known = costs([done[i][0] for i in even], workload, cluster) if even else None
    mine = {i: known.take(np.array([k])) for k, i in enumerate(even)} if known else {}
    found = []
    for i, (plan, where) in enumerate(done):
        step = resolution(plan, workload, where, mine.get(i))()
        timeline = simulate(lowered(step, step.program("stage")))
        one, given = prediction_of(step, timeline, advises), plans[i]
        own = one.plan.but(placement=given.placement, cluster=given.cluster)
        found.append(replace(one, plan=own))
    return found


def predicted(step: ResolvedStep) -> Prediction:
    """Predict a step whose prices are known."""
    return prediction_of(step, simulate(lowered(step, step.program("stage"))))


def prediction_of(step: ResolvedStep, timeline: Timeline, advises: bool = True) -> Prediction:
    """What the simulation of a step says of its plan."""
    plan, workload, cluster = step.plan, step.workload, step.cluster
    peak, missing, parts = step.memory()
    seconds = timeline.seconds
    away = step.away
    if away is None:
        away = distances(plan, workload, cluster, host_share(*step.layer_prices()))
    low, high = interval(seconds, away)
    mfu = utilisation(plan, workload, cluster, seconds) * step.work
    advice = ""
    if missing and advises:
        advice = step.advice or cheapest_fix(plan, workload, cluster)
    return Prediction(
        plan=plan,
        step=seconds,
        low=low,
        high=high,
        away=away,
        peak=peak,
        missing=missing,
        breakdown=breakdown(timeline, step),
        memory=parts,
        advice=advice,
        utilisation=mfu,
        hfu=mfu * _flops_run(step),
    )


def _flops_run(step: ResolvedStep) -> float:
    """Flop that run over those of one forward and backward: recomputed ones count again."""
    run = once = 0.0
    for ranks, prices, times in step.priced_layers():
        for at, (cost, many) in enumerate(zip(prices.layers, times, strict=True)):
            forward, back = layer_parts(prices, at, step.workload)
            run += len(ranks) * many * float((forward.flops + back.flops)[0])
            once += len(ranks) * many * float((cost.forward.flops + cost.backward.flops)[0])
    return run / once if once else 1.0


def utilisation(plan: Plan, workload: Workload, cluster: Cluster, seconds: float) -> float:
    """Model flops of a step over what its devices could do: MFU."""
    peak = sum(d.peak(plan.dtype or workload.dtype) for d in cluster.devices)
    return workload.flops() * plan.global_batch / (seconds * peak)


def breakdown(timeline: Timeline, step: ResolvedStep) -> dict[str, float]:
    """Seconds of the busiest rank: compute, exchange, reduce, update, idle; they make the step."""
    graph = timeline.graph
    took = timeline.end - timeline.start
    kernels = graph.kind == Kind.KERNEL
    compute = kernels & (graph.phase != Phase.UPDATE)
    ranks = _ranks(timeline)
    busy = {rank: float(took[compute & mine].sum()) for rank, mine in ranks.items()}
    busiest = max(busy, key=lambda rank: busy[rank])
    mine = ranks[busiest]
    update = float(took[mine & kernels & (graph.phase == Phase.UPDATE)].sum())
    comm = _comm_on_compute_lanes(timeline, mine & compute, mine & (graph.kind == Kind.COLLECTIVE))
    inner = busy[busiest]
    if not comm:
        share = step.comm_share(busiest)
        inner, comm = inner * (1 - share), inner * share
    rest = max(timeline.seconds - inner - comm - update, 0.0)
    exposed = min(_exposed(timeline, mine), rest)  # updates may run beside later messages
    idle = rest - exposed
    return {
        "compute_s": inner,
        "exchange_s": comm,
        "reduce_s": exposed,
        "update_s": update,
        "idle_s": idle if idle > 1e-12 else 0.0,  # below that it is rounding
    }


def _ranks(timeline: Timeline) -> dict[int, Rows]:
    """Which tasks hold a lane of each rank: what holds lanes of several counts for all of them."""
    graph = timeline.graph
    lane_rank = graph.lanes.rank
    out = {}
    for rank in np.unique(lane_rank).tolist():
        mine = lane_rank[graph.lane] == rank
        mine[graph.held.task[lane_rank[graph.held.lane] == rank]] = True
        out[rank] = mine
    return out


def _comm_on_compute_lanes(timeline: Timeline, compute: Rows, collectives: Rows) -> float:
    """Seconds of collectives that stand between kernels on their lane, as tasks of their own."""
    lanes = np.unique(timeline.graph.lane[compute])
    there = collectives & np.isin(timeline.graph.lane, lanes)
    return float((timeline.end - timeline.start)[there].sum())


def _exposed(timeline: Timeline, mine: Rows) -> float:
    """Seconds of collectives after the last backward of a rank has ended."""
    graph = timeline.graph
    back = mine & (graph.kind == Kind.KERNEL) & (graph.phase == Phase.BACKWARD)
    comm = mine & (graph.kind == Kind.COLLECTIVE)
    end = float(timeline.end[back].max(initial=0.0))
    late = np.maximum(timeline.end[comm] - np.maximum(timeline.start[comm], end), 0.0)
    return float(late.sum())
