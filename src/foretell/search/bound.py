"""Seconds below which no plan can be, and why a plan is the answer: what binds it, the next
best.

Of each layer ℓ and kind of device k, with w[ℓ, k] the least seconds of one rank that a sample's
kernels take there under any way to split it, any micro-batch and framework that is tried, N[k]
devices and B samples a step, weights y[k] ≥ 0 with Σ y·N = 1 give (a linear program's dual)

    step ≥ B · Σ over ℓ of min over k of y[k]·w[ℓ, k]

with y[k] by the speed of each kind. Nothing waits, nothing is sent, nothing is run again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from foretell.cluster import Cluster, Device
from foretell.plan import Plan
from foretell.plan.check import check
from foretell.plan.costs import USABLE, costs
from foretell.plan.layer_cost import Array, layouts
from foretell.predict import Prediction
from foretell.predict.predict import EIGHTY_PERCENT
from foretell.workload import Workload

SLACK = 0.97  # sizes of a micro-batch between those that were priced may do a little better
MOST = 256  # ways to split a layer that are priced


FULL = 0.9  # of the usable memory: beyond that it decides what else could be chosen
SAME = 0.005  # of a step: plans closer than that are no alternative worth a word
_SPENT = {
    "compute_s": "compute",
    "exchange_s": "TP/CP/EP communication",
    "reduce_s": "gradient reduction",
    "update_s": "the optimizer step",
    "idle_s": "pipeline bubbles and waiting",
}


def lower_bound(plans: Sequence[Plan], workload: Workload, cluster: Cluster, batch: int) -> float:
    """Seconds that a step takes at the least, whatever plan is made of such parts."""
    if not plans:
        return 0.0
    cells = _cells(plans, workload, cluster, batch)
    devices: dict[str, Device] = {d.name: d for d in cluster.devices}
    many = np.array([sum(d.name == name for d in cluster.devices) for name in devices], float)
    work = np.stack([_work(cells, workload, cluster, d) for d in devices.values()], axis=1)
    speed = 1 / work.sum(axis=0)
    weights = speed / (many * speed).sum()
    return float(SLACK * batch * np.min(weights * work, axis=1).sum())


def _cells(plans: Sequence[Plan], workload: Workload, cluster: Cluster, batch: int) -> list[Plan]:
    """Every way that layers are split among these plans, each with all sizes of micro-batch."""
    different = {_split(plan): plan for plan in reversed(plans)}.values()
    asked = [p.but(recompute="none", recompute_layers=0) for p in reversed(different)]
    checked = [check(p, workload, cluster) for p in asked]
    firsts, _ = layouts([p.but(micro_batch=1) for p in checked]).cells()
    sizes = [1 << k for k in range(batch.bit_length()) if batch % (1 << k) == 0]
    found = [
        p.but(micro_batch=size, global_batch=size * p.dp) for p in firsts.plans for size in sizes
    ]
    step = max(1, -(-len(found) // MOST))
    largest = [p for p in found if p.micro_batch == sizes[-1]]
    return list(dict.fromkeys([*found[::step], *largest]))


def _split(plan: Plan) -> object:
    """What two plans have in common whose layers are split alike, by the same program."""
    degrees = plan.tp, plan.cp, plan.ep, plan.etp, plan.sp, plan.filter, plan.channel, plan.spatial
    program = plan.framework, plan.precision, plan.dtype, plan.compile
    hidden = plan.tp_overlap, plan.ep_overlap, plan.ep_dispatch, plan.cuda_graph
    return degrees, program, hidden, plan.zero, plan.pp > 1


def _work(cells: list[Plan], workload: Workload, cluster: Cluster, device: Device) -> Array:
    """The least rank-seconds of one sample's kernels in each layer, all its repetitions."""
    priced = costs(cells, workload, cluster, device)
    inner = np.array([p.ranks / p.dp / p.pp / p.micro_batch for p in cells])
    out = [
        layer.times * float(((cost.forward.kernels + cost.backward.kernels) * inner).min())
        for layer, cost in zip(workload.layers, priced.layers, strict=True)
    ]
    return np.array(out)


def next_best(ranked: Sequence[Prediction], most: int) -> tuple[Prediction, ...]:
    """The plans behind the first, each slower than the one before by more than can be told."""
    found: list[Prediction] = list(ranked[:1])
    for one in ranked[1:]:
        if len(found) <= most and one.step > found[-1].step * (1 + SAME):
            found.append(one)
    return tuple(found[1:])


def reasons(
    best: Prediction | None, others: Sequence[Prediction], cluster: Cluster
) -> tuple[str, ...]:
    """What a reader should know of the answer, a sentence each."""
    if best is None:
        return ()
    told = [_bottleneck(best), _binding(best, cluster)]
    apart = [p for p in others if p.step > best.step * (1 + SAME)]
    if apart:
        told.append(_next(best, apart[0]))
    return tuple(told)


def _bottleneck(best: Prediction) -> str:
    """Where the step goes."""
    parts = sorted(best.breakdown.items(), key=lambda item: -item[1])
    shares = [
        f"{_SPENT.get(name, name)} {_percent(took / best.step)}"
        for name, took in parts
        if took > 0.03 * best.step
    ]
    return f"bottleneck: {', '.join(shares)} of the step"


def _binding(best: Prediction, cluster: Cluster) -> str:
    """The constraint that decides what else could be chosen."""
    share = best.peak / (min(d.memory for d in cluster.devices) * USABLE)
    most = max(best.breakdown.items(), key=lambda item: item[1])[0]
    if share > FULL:
        return f"binding constraint: memory, {best.peak / 2**30:.1f} GiB on the fullest rank"
    if most == "compute_s":
        return "binding constraint: the devices' compute rate; memory has room left"
    return f"binding constraint: {_SPENT.get(most, most)}; memory has room left"


def _next(best: Prediction, other: Prediction) -> str:
    """What the next plan that differs costs, and how sure it is that it is slower."""
    more = other.step / best.step - 1
    odds = chance(best, other)
    changed = difference(best.plan, other.plan)
    return (
        f"next best ({changed}) takes {_percent(more)} longer; the first is faster with "
        f"probability {_percent(odds)} if their errors are independent"
    )


def chance(best: Prediction, other: Prediction) -> float:
    """Probability that one plan is faster than another, from the intervals of both."""
    sigma = math.hypot(*(math.log(p.high / p.low) / (2 * EIGHTY_PERCENT) for p in (best, other)))
    if not sigma:
        return 1.0 if best.step < other.step else 0.5
    return 0.5 * (1 + math.erf(math.log(other.step / best.step) / (sigma * math.sqrt(2))))


def difference(one: Plan, other: Plan, most: int = 4) -> str:
    """The fields in which another plan differs, as text."""
    hidden = ("model", "cluster", "placement")
    before, after = (
        {n: v for n, _, v in (part.partition("=") for part in str(p).split(",")) if n not in hidden}
        for p in (one, other)
    )
    changed = [f"{n}={v}" for n, v in after.items() if before.get(n) != v]
    changed += [f"no {n}" for n in before if n not in after]
    short = [text if len(text) <= 40 else f"other {text.partition('=')[0]}" for text in changed]
    more = [f"{len(short) - most} more"] if len(short) > most else []
    return ", ".join([*short[:most], *more]) or "the same fields"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
