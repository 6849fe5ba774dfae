"""Pipelines over unlike devices: each kind of device has stages of its own, split its own way.

For a micro-batch of b samples and a bottleneck of T seconds, a kind of device that is cut into n
stages, each of tp × dp ranks, takes n·⌊T / t⌋ blocks, with t the seconds of one block there. The
least T at which all kinds together take the whole model is found by bisection; every kind uses the
cut that takes most at that T, or one of fewer stages that still suffices at a little more. What
comes out is predicted like any other plan (→ `foretell.predict`), so that a poor guess costs time
and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, permutations

import numpy as np

from foretell.cluster import Cluster
from foretell.plan import Plan
from foretell.plan.check import RESOLVED
from foretell.plan.costs import costs, layer_seconds
from foretell.plan.framework import resolved
from foretell.plan.segments import Segment, written
from foretell.workload import Workload

WIDTHS = (1, 2, 4, 8, 16)  # tensor-parallel ranks, and stages of one kind of device
SLACK = (1.0, 1.05, 1.15, 1.3, 1.6)  # of the least bottleneck: fewer, longer stages fill sooner
MICRO = (1, 2, 4, 8, 16)  # samples of a micro-batch, in multiples of what all kinds can share
MOST_KINDS = 4


@dataclass(frozen=True)
class Option:
    """One kind of device cut into stages; seconds of a layer's forward and backward there."""

    ranks: tuple[int, ...]
    stages: int
    tp: int
    each: int  # samples of one replica at a time
    seconds: tuple[float, ...]  # of every layer of the workload, once
    block: float  # the mean of its blocks

    @property
    def dp(self) -> int:
        """Replicas of a stage."""
        return len(self.ranks) // self.stages // self.tp

    def takes(self, bottleneck: float) -> int:
        """Blocks it can have at so many seconds a micro-batch."""
        return self.stages * int(bottleneck / self.block)


def kinds(cluster: Cluster) -> list[tuple[int, ...]]:
    """Ranks of each kind of device, the fastest kind first, whatever their order in the file."""
    found: dict[tuple[str, int], list[int]] = {}
    for rank, device in enumerate(cluster.devices):
        size = int((cluster.nodes == cluster.nodes[rank]).sum())
        found.setdefault((device.name, size), []).append(rank)
    order = sorted(
        found, key=lambda k: (-cluster.devices[found[k][0]].peak("bf16"), -len(found[k]), k)
    )
    return [tuple(found[k]) for k in order[:MOST_KINDS]]


def pipelines(workload: Workload, cluster: Cluster, common: Plan) -> list[tuple[float, Plan]]:
    """Plans of unlike stages, each with a rough guess of its step; the shortest guess first."""
    on = _On(workload, cluster, _common(common, workload))
    found: dict[str, tuple[float, Plan]] = {}
    every = kinds(cluster)
    for count in range(1, len(every) + 1):
        for some in combinations(range(len(every)), count):
            for guess, plan in _of_kinds([every[k] for k in some], on):
                known = found.get(str(plan))
                if known is None or guess < known[0]:
                    found[str(plan)] = guess, plan
    return sorted(found.values(), key=lambda one: (one[0], str(one[1])))


def _common(plan: Plan, workload: Workload) -> Plan:
    """What all segments share, made explicit as for a model that is split."""
    asked = resolved(plan.but(pp=2), workload.most("tp") > 1, workload.dtype)
    return plan.but(**{name: getattr(asked, name) for name in RESOLVED})


@dataclass
class _On:
    """One question, and the options that are known already."""

    workload: Workload
    cluster: Cluster
    common: Plan
    known: dict[object, list[Option]] = field(default_factory=dict)

    def options(self, ranks: tuple[int, ...], b: int, plain: Plan) -> list[Option]:
        """Every way to cut one kind of device; ZeRO changes what is held, not what layers take."""
        key = ranks, b, plain.recompute
        if key not in self.known:
            self.known[key] = _options(ranks, b, plain, self.workload, self.cluster)
        return self.known[key]


def _of_kinds(some: Sequence[tuple[int, ...]], on: _On) -> Iterator[tuple[float, Plan]]:
    """Pipelines over some kinds of device, with every amount of recompute and sharding."""
    for recompute, zero in (("none", 1), ("none", 0), ("selective", 1), ("full", 1)):
        plain = on.common.but(recompute=recompute, zero=zero)
        for b in _micro_batches(some, on.common.global_batch):
            offered = [on.options(ranks, b, plain) for ranks in some]
            if all(offered):
                yield from _cuts(offered, b, plain, on.workload)


def _micro_batches(some: Sequence[tuple[int, ...]], batch: int) -> list[int]:
    """Samples of a micro-batch: divisors of the batch that a power of two of replicas share."""
    most = max(len(ranks) for ranks in some)
    shared = {math.gcd(batch, 1 << k) for k in range(most.bit_length() + 1)}
    found = {s * m for s in shared for m in MICRO if batch % (s * m) == 0}
    return sorted(found)[-10:]


def _options(
    ranks: tuple[int, ...], b: int, plain: Plan, workload: Workload, cluster: Cluster
) -> list[Option]:
    """Every way to cut one kind of device for micro-batches of b samples."""
    node = int((cluster.nodes == cluster.nodes[ranks[0]]).sum())
    cuts = []
    for tp in (w for w in WIDTHS if w <= min(node, workload.most("tp"))):
        for n in WIDTHS:
            dp, rest = divmod(len(ranks), n * tp)
            if dp and not rest and n <= workload.num_blocks and b % dp == 0:
                cuts.append((n, tp, dp))
    if not cuts:
        return []
    machines = cluster.subset(ranks)
    plans = [
        plain.but(dp=dp, tp=tp, sp=tp > 1, pp=n, micro_batch=b // dp, zero=min(plain.zero, dp - 1))
        for n, tp, dp in cuts
    ]
    priced = costs(plans, workload, machines)
    took = np.array(
        [np.sum(layer_seconds(priced, at, workload), axis=0) for at in range(len(workload.layers))]
    )
    many = np.array([x.times if x.is_block else 0 for x in workload.layers], float)
    mean = many @ took / many.sum()
    return [
        Option(ranks, n, tp, b // dp, tuple(took[:, i].tolist()), float(mean[i]))
        for i, (n, tp, dp) in enumerate(cuts)
    ]


def _cuts(
    offered: list[list[Option]], b: int, plain: Plan, workload: Workload
) -> Iterator[tuple[float, Plan]]:
    """Plans at the least bottleneck and a little more, in every order of the kinds."""
    least = _least(offered, workload.num_blocks)
    chosen = {tuple(_fewest(offered, least * s, workload.num_blocks)) for s in SLACK}
    for picked in sorted(chosen):
        for order in permutations(picked) if len(picked) < 4 else (picked, picked[::-1]):
            options = [offered[k][i] for k, i in order]
            blocks = _dealt(options, workload)
            if blocks:
                yield _guess(options, blocks, b, plain, workload), _plan(options, blocks, plain)


def _least(offered: list[list[Option]], blocks: int) -> float:
    """The least bottleneck at which all kinds together take the model."""
    low, high = 0.0, blocks * max(o.block for some in offered for o in some)
    for _ in range(40):
        middle = (low + high) / 2
        enough = sum(max(o.takes(middle) for o in some) for some in offered) >= blocks
        low, high = (low, middle) if enough else (middle, high)
    return high


def _fewest(
    offered: list[list[Option]], bottleneck: float, blocks: int
) -> Iterator[tuple[int, int]]:
    """For each kind the option of fewest stages that leaves enough to the others."""
    most = [max(o.takes(bottleneck) for o in some) for some in offered]
    spare = sum(most) - blocks
    for k, some in enumerate(offered):
        good = [i for i, o in enumerate(some) if o.takes(bottleneck) >= most[k] - max(spare, 0)]
        good = [i for i in good if some[i].takes(bottleneck) >= some[i].stages] or good
        best = min(good, key=lambda i: (some[i].stages, -some[i].takes(bottleneck), some[i].tp))
        spare -= most[k] - some[best].takes(bottleneck)
        yield k, best


def _dealt(options: Sequence[Option], workload: Workload) -> list[int]:
    """Blocks of every stage, one each at least: the next goes where the stage ends soonest."""
    each = [o for o in options for _ in range(o.stages)]
    if len(each) > workload.num_blocks:
        return []
    first = next(i for i, x in enumerate(workload.layers) if x.is_block)
    ends = [0.0] * len(each)
    for i, layer in enumerate(workload.layers):
        if not layer.is_block:
            at = 0 if i < first else -1
            ends[at] += layer.times * each[at].seconds[i]
    blocks = [1] * len(each)
    ends = [end + o.block for end, o in zip(ends, each, strict=True)]
    for _ in range(workload.num_blocks - len(each)):
        s = min(range(len(each)), key=lambda k: (ends[k] + each[k].block, k))
        blocks[s] += 1
        ends[s] += each[s].block
    return blocks


def _guess(
    options: Sequence[Option], blocks: list[int], b: int, plain: Plan, workload: Workload
) -> float:
    """Seconds of the pipeline: every stage once, and the slowest for all other micro-batches."""
    each = [o for o in options for _ in range(o.stages)]
    took = [n * o.block for n, o in zip(blocks, each, strict=True)]
    return sum(took) + (plain.global_batch // b - 1) * max(took)


def _plan(options: Sequence[Option], blocks: list[int], plain: Plan) -> Plan:
    """The plan in segments, kind after kind."""
    found, at = [], 0
    for o in options:
        width = len(o.ranks) // o.stages
        zero = min(plain.zero, o.dp - 1)
        own = plain.but(dp=o.dp, tp=o.tp, sp=o.tp > 1, zero=zero, micro_batch=o.each)
        for s in range(o.stages):
            ranks = o.ranks[s * width : (s + 1) * width]
            found.append(Segment(blocks[at], ranks, own))
            at += 1
    return written(plain, found)
