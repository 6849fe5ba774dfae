"""The 80 % interval of a predicted step, from sources that nothing was fitted to.

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
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from foretell import portable
from foretell.cluster import Cluster
from foretell.plan import Plan
from foretell.plan.framework import running
from foretell.plan.layer_cost import LayerCost
from foretell.workload import Workload
from foretell.workload.kernels import flops

EIGHTY_PERCENT = 1.2815515594457831  # standard deviations that hold 80 % of a normal distribution
DOUBLINGS = 3.0  # of the number of GPUs beyond what a profile was measured on: as far as it counts


class Distance(NamedTuple):
    """Bias and spread of ln(measured / predicted) by one kind of distance."""

    slow: float  # mean
    width: float  # standard deviation


@cache
def shipped() -> dict[str, Distance]:
    """The fitted distances."""
    text = files("foretell.predict").joinpath("interval.toml").read_text(encoding="utf-8")
    return {name: Distance(**row) for name, row in tomllib.loads(text)["distance"].items()}


def distances(plan: Plan, workload: Workload, cluster: Cluster, host: float) -> dict[str, float]:
    """How far a question is from what was measured, by kind; `host`: share bound by host time."""
    profile = running(plan).profile
    arches = {device.arch for device in cluster.devices}
    ops = [op for layer in workload.layers for op in layer.works()]
    kinds = {op.kind for op in ops}
    doublings = portable.log2(max(cluster.size / profile.gpus, 1.0))
    found = {
        "any": 1.0,
        "arch": float(not arches <= set(profile.arch)),
        "amd": float(any(arch.startswith("cdna") for arch in arches)),
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
    known = shipped() if fitted is None else fitted
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
            device += times * float(part.kernels[0] + part.talk[0])
    return float(
        host**overlap_exponent / max(host**overlap_exponent + device**overlap_exponent, 1e-300)
    )
