"""What limits a layout, with evidence and a remedy.

The list is ParaDL's table of limitations (gradient exchange, layer-wise collectives, halo exchange,
congestion, memory redundancy, weight update, imbalance, redundant compute, input, number of
devices). Most are read from the parts of an estimate; four are found by pricing the layout again
with one thing changed:

congestion   the same messages with nothing beside them on the links
imbalance    stages that take longer than the mean of all
redundancy   kernels that splitting does not shorten: 1/n of the time on one rank is not reached
input        samples that have to come in, against what the network of a node brings
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from foretell.cluster import Cluster, Tier
from foretell.cost import collective
from foretell.plan import Plan, check
from foretell.plan.costs import alike, costs, memory, stage
from foretell.plan.layer_cost import FIRST, LAST, MIDDLE, shares
from foretell.plan.plan import levels
from foretell.plan.prices import Estimate, by_collective, estimate
from foretell.workload import Workload

CONGESTED = 1.4  # times as long as alone: from there on links are crowded
LARGE = 1e9  # bytes: a message that bandwidth decides
SPLITS = ("filter", "channel", "height", "width", "depth")


SHARE = 0.10  # of a step from which on a part is worth reporting
# Of compute that runs again: a forward in four passes; of `selective`, about a fifth of a forward,
# the scores of attention (Korthikanti et al., arXiv 2205.05198, section 5).
AGAIN = {"full": 0.25, "selective": 0.05}
FULL = 0.85  # of a device's memory
TWICE = 0.25  # of a device's memory that other ranks hold as well
# Part of an estimate -> what it is called and what to do about it.
_PARTS = {
    "reduce": ("gradient exchange", "larger batch per device, overlap, zero=1, or compression"),
    "comm": ("layer-wise collectives", "keep tensor-parallel ranks in a node, or split less"),
    "bubble": ("pipeline bubble", "more micro-batches, chunks=…, or fewer stages"),
    "send": ("pipeline sends", "fewer stages, or larger micro-batches"),
    "update": ("weight update", "zero=1 shares it among data-parallel ranks"),
    "host": ("host", "compile, CUDA graphs, or larger micro-batches"),
    "compute": ("compute", ""),
}


def crowding(plan: Plan, cluster: Cluster) -> float:
    """How many times as long as with all links to themselves gradients take to be reduced."""
    size, apart = alike(plan)
    if size < 2:
        return 1.0
    wide = replace(cluster, tiers=_unthinned(cluster.tiers), _ways={}, _levels={})
    alone = wide.levels([i * apart for i in range(size)])
    beside = levels(cluster, size, apart)
    took, ideal = (collective.price("all_reduce", LARGE, x).seconds for x in (beside, alone))
    return took / ideal


def _unthinned(tiers: tuple[Tier, ...]) -> tuple[Tier, ...]:
    return tuple(replace(tier, oversubscription=1.0, uplink=0.0) for tier in tiers)


def imbalance(plan: Plan, workload: Workload, cluster: Cluster) -> float:
    """The share of the slowest stage that others wait, on average."""
    if plan.pp == 1:
        return 0.0
    c = costs([check(plan, workload, cluster)], workload, cluster)
    assigned = shares(workload, c.plans)
    took = {
        kind: float(stage(c, assigned.times[kind], workload, cluster).both[0])
        for kind in (FIRST, MIDDLE, LAST)
    }
    middles = float(assigned.middles[0])
    mean = (took[FIRST] + middles * took[MIDDLE] + took[LAST]) / (2 + middles)
    return 1 - mean / max(took.values())


def redundancy(
    plan: Plan, found: Estimate, row: int, workload: Workload, cluster: Cluster
) -> tuple[float, int]:
    """Seconds that split kernels take beyond their share of one rank's, and the ways they split."""
    degrees = plan.degrees()
    ways = math.prod(degrees.get(axis, 1) for axis in SPLITS)
    if ways == 1:
        return 0.0, 1
    whole = plan.but(filter=1, channel=1, spatial=())
    few = cluster.subset(range(whole.ranks))
    alone = float(estimate([whole], workload, few).compute[0])
    return max(float(found.compute[row]) - alone / ways, 0.0), ways


def input_bytes(workload: Workload) -> float:
    """Bytes of one sample as it is stored: 8 bits a pixel and channel, 16 a voxel; 0 for words."""
    first = next((op for layer in workload.layers for op in layer.works()), None)
    if first is None or first.kind != "conv":
        return 0.0
    sides = [float(np.asarray(first.dims[d])) for d in ("c", "h", "w", "d") if d in first.dims]
    return (2.0 if "d" in first.dims else 1.0) * math.prod(sides)


def input_bandwidth(cluster: Cluster) -> float:
    """Bytes/s that reach one node: over its NICs, or its host's bus where it has none."""
    node = cluster.node(0)
    if node.nics:
        return sum(nic.bandwidth for nic in node.nics)
    return cluster.host_bandwidth(0)


@dataclass(frozen=True)
class Finding:
    """A bottleneck of a layout: its name, evidence and remedy."""

    name: str
    share: float  # of the step, or of memory
    evidence: str
    remedy: str
    of: str = "step"  # or memory


def findings(
    plan: Plan, found: Estimate, row: int, workload: Workload, cluster: Cluster
) -> list[Finding]:
    """What is worth reporting about one layout: of its time first, worst first."""
    step = float(found.step[row])
    parts = {n: float(getattr(found, n)[row]) / step for n in _PARTS}
    limits_found = _halo(plan, parts, step, workload, cluster)
    limits_found += [
        Finding(
            name, parts[part], f"{100 * parts[part]:.0f} % of the step", _remedy(plan, part, remedy)
        )
        for part, (name, remedy) in _PARTS.items()
        if parts[part] > SHARE and part != "compute"
    ]
    limits_found += _congested(plan, parts, cluster)
    limits_found += _imbalanced(plan, parts, workload, cluster)
    limits_found += _recompute(plan, found, row)
    limits_found += _split(plan, found, row, workload, cluster)
    limits_found += _input(plan, step, workload, cluster)
    limits_found += _memory(plan, found, row, workload, cluster)
    limits_found += _small_kernels(plan, found, row, cluster, workload)
    return sorted(limits_found, key=lambda f: (f.of != "step", -f.share, f.name))


def _remedy(plan: Plan, part: str, usual: str) -> str:
    """What to do about a part: shards that are gathered are no tensors that are split."""
    is_split = plan.tp * plan.cp * plan.ep * plan.filter * plan.channel > 1 or bool(plan.spatial)
    if part == "comm" and plan.zero == 3 and not is_split:
        return "larger micro-batches, or shard inside a node alone (shard=…)"
    return usual


def _halo(
    plan: Plan, parts: dict[str, float], step: float, workload: Workload, cluster: Cluster
) -> list[Finding]:
    """Borders of split images; what is left of `comm` is that of other exchanges."""
    if not plan.spatial or plan.pp > 1:
        return []
    sent = by_collective(plan, workload, cluster).get("send", 0.0) / step
    share = min(sent, parts["comm"])
    parts["comm"] -= share
    if share <= SHARE:
        return []
    evidence = f"{100 * share:.0f} % of the step goes to the borders of split images"
    return [Finding("halo exchange", share, evidence, "cut fewer dims, or larger images")]


def _congested(plan: Plan, parts: dict[str, float], cluster: Cluster) -> list[Finding]:
    """Gradients that share links with others of the same step, or go over thin uplinks."""
    longer = crowding(plan, cluster)
    if parts["reduce"] <= SHARE or longer < CONGESTED:
        return []
    share = parts["reduce"] * (1 - 1 / longer)
    evidence = f"gradients take {longer:.1f} times as long as with all links to themselves"
    remedy = "split inside a node less, reduce in steps, or stay in one rack"
    return [Finding("congestion", share, evidence, remedy)]


def _imbalanced(
    plan: Plan, parts: dict[str, float], workload: Workload, cluster: Cluster
) -> list[Finding]:
    """Stages that wait for the slowest of them."""
    share = imbalance(plan, workload, cluster) * (1 - parts["reduce"] - parts["update"])
    if share <= SHARE:
        return []
    evidence = f"stages wait {100 * share:.0f} % of the step for the slowest"
    return [Finding("imbalance", share, evidence, "layers=…: fewer blocks on the slowest stage")]


def _split(
    plan: Plan, found: Estimate, row: int, workload: Workload, cluster: Cluster
) -> list[Finding]:
    """Kernels of split images and channels that take more than their share."""
    seconds, ways = redundancy(plan, found, row, workload, cluster)
    share = seconds / float(found.step[row])
    if share <= SHARE:
        return []
    evidence = (
        f"split {ways} ways, kernels take {100 * share:.0f} % of the step beyond 1/{ways} of one's"
    )
    return [Finding("redundant compute", share, evidence, "split less, or data beside it")]


def _input(plan: Plan, step: float, workload: Workload, cluster: Cluster) -> list[Finding]:
    """Samples that come in more slowly than they are worked on."""
    each = input_bytes(workload) * plan.global_batch / cluster.num_nodes
    share = each / input_bandwidth(cluster) / step
    if share <= SHARE:
        return []
    rate = f"{each / step / 1e9:.2g} GB/s of samples per node"
    evidence = f"{rate}, {100 * share:.0f} % of the bandwidth of its links"
    remedy = "prefetch, smaller formats, or samples kept near the nodes"
    return [Finding("input", share, evidence, remedy)]


def _recompute(plan: Plan, found: Estimate, row: int) -> list[Finding]:
    """Work done twice: activations recomputed."""
    if plan.recompute == "none":
        return []
    share = AGAIN[plan.recompute] * float(found.compute[row] / found.step[row])
    evidence = f"recompute={plan.recompute}: about {100 * share:.0f} % of the step runs again"
    return [Finding("redundant compute", share, evidence, "recompute=none where memory allows")]


def _memory(
    plan: Plan, found: Estimate, row: int, workload: Workload, cluster: Cluster
) -> list[Finding]:
    held = memory(plan, workload, cluster)[0].parts()
    size = min(d.memory for d in cluster.devices)
    limits_found = []
    state = sum(v for k, v in held.items() if k in ("parameters", "gradients", "optimizers"))
    if plan.dp > 1 and plan.zero < 3 and state / size > TWICE:
        evidence = f"each of {plan.dp} data-parallel ranks holds {state / 2**30:.1f} GiB of state"
        remedy = f"zero={min(plan.zero + 1, 3)}"
        limits_found.append(Finding("memory redundancy", state / size, evidence, remedy, "memory"))
    kept = held["activations"]
    if plan.filter * plan.channel > 1 and kept / size > TWICE:
        many = plan.filter * plan.channel
        evidence = f"each of {many} ranks that split channels holds all {kept / 2**30:.1f} GiB kept"
        limits_found.append(
            Finding("memory redundancy", kept / size, evidence, "spatial instead", "memory")
        )
    peak = float(found.peak[row])
    if found.missing[row] or peak > FULL * size:
        evidence = f"{peak / 2**30:.1f} of {size / 2**30:.0f} GiB"
        remedy = "recompute, zero, a smaller micro-batch, or offload"
        limits_found.append(Finding("memory", peak / size, evidence, remedy, "memory"))
    return limits_found


def _small_kernels(
    plan: Plan, found: Estimate, row: int, cluster: Cluster, workload: Workload
) -> list[Finding]:
    """How much longer kernels take than at the devices' peak: split shapes run less well."""
    work = float(found.flops[row]) / plan.ranks
    peak = min(d.peak(plan.dtype or workload.dtype) for d in cluster.devices)
    busy = float(found.compute[row])
    used = work / peak / busy if busy else 1.0
    if used > 0.35:
        return []
    evidence = f"kernels run at {100 * used:.0f} % of the peak rate"
    return [Finding("small kernels", 1 - used, evidence, "split less, or larger micro-batches")]


def limits(workload: Workload, batch: int) -> dict[str, tuple[float, str]]:
    """How many devices each strategy can use at most, and what ends it."""
    found = {"data": (float(batch), f"a batch of {batch} samples")}
    blocks = workload.num_blocks
    found["pipeline"] = (float(blocks), f"{blocks} blocks")
    words = {
        "tp": ("tensor", "heads"), "filter": ("filter", "output channels of the narrowest layer"),
        "channel": ("channel", "input channels of the narrowest layer"),
        "ep": ("expert", "experts"),
    }  # fmt: skip
    for axis, (name, what) in words.items():
        most = workload.most(axis)
        if most > 1:
            found[name] = (most, f"{most:g} {what}")
    sides = [workload.most(axis) for axis in ("height", "width", "depth")]
    pixels = sides[0] * sides[1] * sides[2]
    if pixels > 1:
        found["spatial"] = (pixels, f"{'×'.join(f'{s:g}' for s in sides)} pixels of the last layer")
    return found
