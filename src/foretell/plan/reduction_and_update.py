"""Pipeline P2P sends, gradient reduction and optimizer step."""

from __future__ import annotations

import numpy as np

from foretell import portable
from foretell.cluster import Cluster
from foretell.cost import collective, kernel
from foretell.plan.costs import (
    Costs,
    Stage,
    alike,
    copies,
    grad_width,
    over_copies,
    over_dp,
    over_experts,
)
from foretell.plan.framework import Running, running
from foretell.plan.gradient_ready import ROUNDED, Messages, exposed, first_share
from foretell.plan.layer_cost import slow_devices
from foretell.plan.layouts import Array
from foretell.plan.order import last_stage
from foretell.plan.plan import Plan
from foretell.plan.process_groups import levels, stride
from foretell.workload import Workload

# Parameters a second that the cores of one host update: 1 billion in 0.22 s, 10 in 2.57 s (Ren et
# al., ZeRO-Offload, arXiv 2101.06840, table 4).
HOST_ADAM = 4e9
FIRST = 2**20  # bytes, of DDP's first bucket (torch/nn/parallel/distributed.py)
HALF = 2.0  # bytes of a parameter as it is passed back: half precision


def sends(c: Costs, workload: Workload, cluster: Cluster) -> Array:
    """Seconds to hand a tensor from stage to stage."""
    out = np.zeros(len(c.plans))
    rows = np.flatnonzero(c.plans.column("pp") > 1)
    block = next(i for i, layer in enumerate(workload.layers) if layer.is_block)
    handed = c.holdings[block].handed[rows]
    keys = [stride(c.plans.plans[i], "pp") for i in rows.tolist()]
    for step in sorted(set(keys)):
        mine = np.array([i for i, k in enumerate(keys) if k == step])
        group = levels(cluster, 2, step)
        out[rows[mine]] = collective.price("send", handed[mine], group).seconds
    return out


def reduction(c: Costs, s: Stage, times: Array, workload: Workload, cluster: Cluster) -> Array:
    """Seconds of gradient reduction that no backward hides; `times` of each layer of the stage."""
    whole = reducing(c, s, cluster)
    out = whole + regathering(c, s, cluster)
    rows = np.flatnonzero(np.array([overlaps(p) for p in c.plans.plans]) & (whole > 0))
    if len(rows):
        last = s.backward / c.plans.column("chunks")  # gradients are there in the last chunk's
        left = exposed(
            c.take(rows), times[:, rows], workload, whole=whole[rows], backward=last[rows],
            messages=messages(c, s, times, workload).take(rows),
        )  # fmt: skip
        out[rows] += left - whole[rows]
    return out


def reducing(c: Costs, s: Stage, cluster: Cluster) -> Array:
    """Seconds to reduce the gradients of a stage after its last backward."""
    out = np.zeros(len(c.plans))
    zero, ranks = c.plans.column("zero"), np.array([alike(p)[0] for p in c.plans.plans])
    every = np.flatnonzero((ranks > 1) & (zero < 3))
    size = (s.weights * grad_width(c))[every]
    whole = over_dp(c, "all_reduce", size, every, cluster)
    scattered = over_dp(c, "reduce_scatter", size, every, cluster)
    out[every] = np.where(zero[every] > 0, scattered, whole)
    many = c.plans.column("dp") * c.plans.column("cp")
    apart = np.flatnonzero((zero > 0) & (many > c.plans.column("sharing")))
    each = (s.weights * grad_width(c) / c.plans.column("sharing"))[apart]
    out[apart] += over_copies(c, each, apart, cluster)
    dealt = np.flatnonzero(s.experts > 0)
    out[dealt] += over_experts(c, "all_reduce", (s.experts * grad_width(c))[dealt], dealt, cluster)
    return out


def regathering(c: Costs, s: Stage, cluster: Cluster) -> Array:
    """Seconds to hand parameters back where each rank has updated a part of them (zero 1 and 2)."""
    out = np.zeros(len(c.plans))
    zero, ranks = c.plans.column("zero"), c.plans.column("sharing")
    rows = np.flatnonzero((ranks > 1) & ((zero == 1) | (zero == 2)))
    width = np.array([_handed(r) for r in c.plans.runs])
    out[rows] = over_dp(c, "all_gather", (s.weights * width)[rows], rows, cluster)
    return out


def _handed(run: Running) -> float:
    """Bytes of a parameter that goes back: the copy the model computes with."""
    return run.formats.weight


def messages(c: Costs, s: Stage, times: Array, workload: Workload) -> Messages:
    """In which messages the gradients of a stage go; `times` of each of its layers.

    Plain PyTorch's first bucket is closed at `FIRST`, so that sending begins early.
    """
    each = np.array([p.bucket_mb * 2**20 for p in c.plans.plans])
    said = np.array([len(p.buckets) for p in c.plans.plans])  # 0 where the size decides
    size = np.maximum(s.weights * grad_width(c), 1.0)
    plain = np.array([r.profile.kernels == "eager" for r in c.plans.runs])
    plain &= (said == 0) & (c.plans.column("zero") == 0)
    first = first_share(c, times, workload, np.minimum(np.minimum(FIRST, each) / size, 1.0))
    equal = np.where(said > 0, said, np.maximum(np.ceil(size / each), 1.0))
    more = 1 + np.ceil((1 - first) * size / each * (1 - ROUNDED))
    return Messages(np.where(plain, more, equal), np.where(plain, first, 1 / equal))


def tying(c: Costs, workload: Workload, cluster: Cluster) -> Array:
    """Seconds to add up the gradients of weights that the first and the last stage both have."""
    out = np.zeros(len(c.plans))
    rows = np.array([i for i, p in enumerate(c.plans.plans) if last_stage(p)], int)
    some = c.take(rows) if len(rows) else c
    size = tied_bytes(some, workload)
    apart = [stride(p, "pp") * last_stage(p) for p in some.plans.plans]
    for step in sorted(set(apart)) if len(rows) else ():
        mine = np.array([i for i, a in enumerate(apart) if a == step])
        found = collective.price("all_reduce", size[mine], levels(cluster, 2, step))
        out[rows[mine]] = np.where(size[mine] > 0, found.seconds, 0.0)
    return out


def tied_bytes(c: Costs, workload: Workload) -> Array:
    """Bytes of the gradients of weights that the first and the last stage both have."""
    kept = {name for name, _ in workload.tied}
    size = np.zeros(len(c.plans))
    for layer in workload.layers if kept else ():
        for op in layer.works():
            sizes = op.sizes(c.plans.degrees(), c.plans.column("micro_batch"))
            for weight in op.weights:
                if f"{layer.name}/{weight.name}" in kept:
                    size += weight.elements(sizes)
    return size * grad_width(c)


def overlaps(plan: Plan) -> bool:
    """Whether gradients are reduced while the backward still runs."""
    return running(plan).profile.overlaps if plan.overlap is None else plan.overlap


def updating(c: Costs, s: Stage, cluster: Cluster) -> Array:
    """Seconds of the optimizer on one rank."""
    sharing = np.where(c.plans.column("zero") > 0, c.plans.column("sharing"), 1.0)
    moved = np.array([r.update for r in c.plans.runs])
    apart = np.where(c.plans.column("zero") > 0, copies(c), 1.0)
    size = moved * (s.weights / sharing + s.experts / apart)
    n = np.maximum(size / moved, 1.0)
    each = [
        kernel.seconds(device, "optimizer", "fp32", {"n": n}, bytes=size).seconds
        for device in slow_devices(cluster)
    ]
    found = np.max(each, axis=0) * cluster.calibration.compute * cluster.calibration.update
    if all(d.timed is None for d in slow_devices(cluster)):  # else the host is the device
        found = _with_host(found, c, s, cluster.calibration.host)
    away = np.array([p.offload for p in c.plans.plans])
    return np.where(away, _on_host(n, cluster), found) if away.any() else found


def _with_host(found: Array, c: Costs, s: Stage, slower: float) -> Array:
    """The same where the host issues it tensor by tensor and may not be ahead of the device."""
    hosts = [r.updated(s.tensors[i : i + 1])[0] for i, r in enumerate(c.plans.runs)]
    waits = np.array([r.is_scaled for r in c.plans.runs])
    with np.errstate(invalid="ignore"):  # a calibration beyond all numbers: refused by its caller
        left = np.maximum(np.array(hosts) * slower - np.where(waits, 0.0, s.ahead), 0.0)
    left = np.nan_to_num(left, posinf=np.inf)
    both = portable.power(found, c.bend) + portable.power(left, c.bend)
    out: Array = np.where(left > 0, portable.power(both, 1 / c.bend), found)
    return out


def _on_host(n: Array, cluster: Cluster) -> Array:
    """Gradients to the host, Adam there, weights back; the ranks of a node share its cores."""
    bus = cluster.host_bandwidth(0)
    ranks = cluster.size / cluster.num_nodes
    out: Array = 2 * HALF * n / bus + n * ranks / HOST_ADAM
    return out
