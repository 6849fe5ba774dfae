"""What holds a layout back, and how far each strategy reaches, with evidence.

The list is ParaDL's table of limitations (gradient exchange, layer-wise collectives, halo exchange,
congestion, memory redundancy, weight update, imbalance, redundant compute, input, number of
devices), each told from the parts of an estimate or from pricing it again with one thing changed
(→ `evidence`), with what could be done about it.
"""

from __future__ import annotations

from dataclasses import dataclass

from foretell.cluster import Cluster
from foretell.plan import Plan
from foretell.plan.collective_breakdown import by_collective
from foretell.plan.estimate import Estimate
from foretell.plan.memory import memory
from foretell.search.oracle.evidence import (
    CROWDED,
    crowding,
    imbalance,
    input_bytes,
    intake,
    redundancy,
)
from foretell.workload import Workload

SHARE = 0.10  # of a step from which on a part is worth a word
# Of compute that runs again: a forward in four passes; of `selective`, about a fifth of a forward,
# the scores of attention (Korthikanti et al., arXiv 2205.05198, section 5).
AGAIN = {"full": 0.25, "selective": 0.05}
FULL = 0.85  # of a device's memory
TWICE = 0.25  # of a device's memory that other ranks hold as well


@dataclass(frozen=True)
class Finding:
    """Something that holds a layout back."""

    name: str
    share: float  # of the step, or of memory
    evidence: str
    remedy: str
    of: str = "step"  # or memory


def findings(
    plan: Plan, found: Estimate, row: int, workload: Workload, cluster: Cluster
) -> list[Finding]:
    """Everything worth a word about one layout of an estimate: of its time first, worst first."""
    step = float(found.step[row])
    parts = {n: float(getattr(found, n)[row]) / step for n in _PARTS}
    told = _halo(plan, parts, step, workload, cluster)
    told += [
        Finding(name, parts[part], f"{parts[part]:.0%} of the step", _remedy(plan, part, remedy))
        for part, (name, remedy) in _PARTS.items()
        if parts[part] > SHARE and part != "compute"
    ]
    told += _crowded(plan, parts, cluster)
    told += _uneven(plan, parts, workload, cluster)
    told += _again(plan, found, row)
    told += _split(plan, found, row, workload, cluster)
    told += _input(plan, step, workload, cluster)
    told += _memory(plan, found, row, workload, cluster)
    told += _lost(plan, found, row, cluster, workload)
    return sorted(told, key=lambda f: (f.of != "step", -f.share, f.name))


# Part of an estimate -> what it is called and what to do about it.
_PARTS = {
    "reduce": ("gradient exchange", "larger batch per device, overlap, zero=1, or compression"),
    "talk": ("layer-wise collectives", "keep tensor-parallel ranks in a node, or split less"),
    "bubble": ("pipeline bubble", "more micro-batches, chunks=…, or fewer stages"),
    "send": ("handing tensors between stages", "fewer stages, or larger micro-batches"),
    "update": ("weight update", "zero=1 shares it among data-parallel ranks"),
    "host": ("host", "compile, CUDA graphs, or larger micro-batches"),
    "compute": ("compute", ""),
}


def _remedy(plan: Plan, part: str, usual: str) -> str:
    """What to do about a part: shards that are gathered are no tensors that are split."""
    is_split = plan.tp * plan.cp * plan.ep * plan.filter * plan.channel > 1 or bool(plan.spatial)
    if part == "talk" and plan.zero == 3 and not is_split:
        return "larger micro-batches, or shard inside a node alone (shard=…)"
    return usual


def _halo(
    plan: Plan, parts: dict[str, float], step: float, workload: Workload, cluster: Cluster
) -> list[Finding]:
    """Borders of split images; what is left of `talk` is that of other exchanges."""
    if not plan.spatial or plan.pp > 1:
        return []
    sent = by_collective(plan, workload, cluster).get("send", 0.0) / step
    share = min(sent, parts["talk"])
    parts["talk"] -= share
    if share <= SHARE:
        return []
    evidence = f"{share:.0%} of the step goes to the borders of split images"
    return [Finding("halo exchange", share, evidence, "cut fewer dims, or larger images")]


def _crowded(plan: Plan, parts: dict[str, float], cluster: Cluster) -> list[Finding]:
    """Gradients that share links with others of the same step, or go over thin uplinks."""
    longer = crowding(plan, cluster)
    if parts["reduce"] <= SHARE or longer < CROWDED:
        return []
    share = parts["reduce"] * (1 - 1 / longer)
    evidence = f"gradients take {longer:.1f} times as long as with all links to themselves"
    remedy = "split inside a node less, reduce in steps, or stay in one rack"
    return [Finding("congestion", share, evidence, remedy)]


def _uneven(
    plan: Plan, parts: dict[str, float], workload: Workload, cluster: Cluster
) -> list[Finding]:
    """Stages that wait for the slowest of them."""
    share = imbalance(plan, workload, cluster) * (1 - parts["reduce"] - parts["update"])
    if share <= SHARE:
        return []
    evidence = f"stages wait {share:.0%} of the step for the slowest"
    return [Finding("imbalance", share, evidence, "layers=…: fewer blocks on the slowest stage")]


def _split(
    plan: Plan, found: Estimate, row: int, workload: Workload, cluster: Cluster
) -> list[Finding]:
    """Kernels of split images and channels that take more than their share."""
    seconds, ways = redundancy(plan, found, row, workload, cluster)
    share = seconds / float(found.step[row])
    if share <= SHARE:
        return []
    evidence = f"split {ways} ways, kernels take {share:.0%} of the step beyond 1/{ways} of one's"
    return [Finding("redundant compute", share, evidence, "split less, or data beside it")]


def _input(plan: Plan, step: float, workload: Workload, cluster: Cluster) -> list[Finding]:
    """Samples that come in more slowly than they are worked on."""
    each = input_bytes(workload) * plan.global_batch / cluster.num_nodes
    share = each / intake(cluster) / step
    if share <= SHARE:
        return []
    evidence = (
        f"{each / step / 1e9:.2g} GB/s of samples a node, {share:.0%} of what its links bring"
    )
    remedy = "prefetch, smaller formats, or samples kept near the nodes"
    return [Finding("input", share, evidence, remedy)]


def _again(plan: Plan, found: Estimate, row: int) -> list[Finding]:
    """Work done twice: activations recomputed."""
    if plan.recompute == "none":
        return []
    share = AGAIN[plan.recompute] * float(found.compute[row] / found.step[row])
    evidence = f"recompute={plan.recompute}: about {share:.0%} of the step runs again"
    return [Finding("redundant compute", share, evidence, "recompute=none where memory allows")]


def _memory(
    plan: Plan, found: Estimate, row: int, workload: Workload, cluster: Cluster
) -> list[Finding]:
    held = memory(plan, workload, cluster)[0].parts()
    size = min(d.memory for d in cluster.devices)
    told = []
    state = sum(v for k, v in held.items() if k in ("parameters", "gradients", "optimizers"))
    if plan.dp > 1 and plan.zero < 3 and state / size > TWICE:
        evidence = f"each of {plan.dp} data-parallel ranks holds {state / 2**30:.1f} GiB of state"
        remedy = f"zero={min(plan.zero + 1, 3)}"
        told.append(Finding("memory redundancy", state / size, evidence, remedy, "memory"))
    kept = held["activations"]
    if plan.filter * plan.channel > 1 and kept / size > TWICE:
        many = plan.filter * plan.channel
        evidence = f"each of {many} ranks that split channels holds all {kept / 2**30:.1f} GiB kept"
        told.append(
            Finding("memory redundancy", kept / size, evidence, "spatial instead", "memory")
        )
    peak = float(found.peak[row])
    if found.missing[row] or peak > FULL * size:
        evidence = f"{peak / 2**30:.1f} of {size / 2**30:.0f} GiB"
        remedy = "recompute, zero, a smaller micro-batch, or offload"
        told.append(Finding("memory", peak / size, evidence, remedy, "memory"))
    return told


def _lost(
    plan: Plan, found: Estimate, row: int, cluster: Cluster, workload: Workload
) -> list[Finding]:
    """How much longer kernels take than at the devices' peak: split shapes run less well."""
    work = float(found.flops[row]) / plan.ranks
    peak = min(d.peak(plan.dtype or workload.dtype) for d in cluster.devices)
    busy = float(found.compute[row])
    used = work / peak / busy if busy else 1.0
    if used > 0.35:
        return []
    evidence = f"kernels reach {used:.0%} MFU"
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
