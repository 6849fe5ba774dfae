"""Seconds below which no plan of the joint search can be.

Of each layer ℓ and kind of device k, with w[ℓ, k] the least seconds of one rank that a sample's
kernels take there under any way to split it, any micro-batch and framework that is tried, N[k]
devices and B samples a step, weights y[k] ≥ 0 with Σ y·N = 1 give (a linear program's dual)

    step ≥ B · Σ over ℓ of min over k of y[k]·w[ℓ, k]

with y[k] by the speed of each kind. Nothing waits, nothing is sent, nothing is run again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foretell.cluster import Cluster, Device
from foretell.plan import Plan
from foretell.plan.check import check
from foretell.plan.costs import costs
from foretell.plan.layouts import Array, layouts
from foretell.workload import Workload

SLACK = 0.97  # sizes of a micro-batch between those that were priced may do a little better
MOST = 256  # ways to split a layer that are priced


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
    program = plan.framework, plan.precision, plan.dtype, plan.compile, plan.tp_overlap
    return degrees, program, plan.zero, plan.pp > 1


def _work(cells: list[Plan], workload: Workload, cluster: Cluster, device: Device) -> Array:
    """The least rank-seconds of one sample's kernels in each layer, all its repetitions."""
    priced = costs(cells, workload, cluster, device)
    inner = np.array([p.ranks / p.dp / p.pp / p.micro_batch for p in cells])
    out = [
        layer.times * float(((cost.forward.kernels + cost.backward.kernels) * inner).min())
        for layer, cost in zip(workload.layers, priced.layers, strict=True)
    ]
    return np.array(out)
