"""Pipelines over unlike devices: each kind of device has stages of its own, split its own way.

For a micro-batch of b samples and a bottleneck of T seconds, a kind of device that is cut into n
stages, each of tp × dp ranks, takes n·min(⌊T / t⌋, c) blocks, with t the seconds of one block there
and c the blocks that fit into memory. The least T at which all kinds together take the whole model
is found by bisection; every kind uses the cut that takes most at that T, or one of fewer stages
that still suffices at a little more. Blocks and recompute of the most promising chains are then
split by a dynamic program (→ `.partition`). What comes out is predicted like any other plan
(→ `foretell.predict`), so that a poor guess costs time and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations

import numpy as np

from foretell import portable
from foretell.cluster import Cluster
from foretell.plan import Plan
from foretell.plan.check import RESOLVED
from foretell.plan.costs import Costs, costs, layer_seconds
from foretell.plan.framework import resolved
from foretell.plan.layouts import Array, layouts
from foretell.plan.memory import ROUNDING, room, stage_memory
from foretell.search.partition import Mesh, Partitioner
from foretell.workload import Workload

SLACK = (1.0, 1.05, 1.15, 1.3, 1.6)  # of the least bottleneck: fewer, longer stages fill sooner
MOST_KINDS = 4
MOST_STAGES, MOST_WIDTH = 16, 16  # of one kind of device; tensor-parallel ranks
MOST_MICRO = 12  # sizes of a micro-batch that are tried
PARTITIONED = 96  # chains of which blocks and recompute are split by the dynamic program
IN_FLIGHT = 4  # micro-batches a stage is taken to hold when options are compared


@dataclass(frozen=True)
class Option:
    """One kind of device cut into stages: seconds of the mean block and blocks that fit."""

    ranks: tuple[int, ...]
    stages: int
    tp: int
    each: int  # samples of one replica at a time
    block: float
    fitting: int

    @property
    def dp(self) -> int:
        """Replicas of a stage."""
        return len(self.ranks) // self.stages // self.tp

    def takes(self, bottleneck: float) -> int:
        """Blocks it can have at so many seconds a micro-batch."""
        return self.stages * min(int(bottleneck / self.block), self.fitting)

    def meshes(self, plain: Plan) -> list[Mesh]:
        """Its stages."""
        width = len(self.ranks) // self.stages
        own = plain.but(
            dp=self.dp, tp=self.tp, sp=self.tp > 1, zero=plain.zero if self.dp > 1 else 0,
            micro_batch=self.each,
        )  # fmt: skip
        firsts = range(0, len(self.ranks), width)
        return [Mesh(self.ranks[at : at + width], own) for at in firsts]


Options = dict[tuple[int, ...], dict[int, list[Option]]]


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


def pipelines(
    workload: Workload, cluster: Cluster, common: Plan,
    accepts: Callable[[Plan], bool] = lambda plan: True,
) -> list[tuple[float, Plan]]:  # fmt: skip
    """Plans of unlike stages, each with a rough guess of its step; the shortest guess first."""
    common, every = resolved_common(common, workload), kinds(cluster)
    chains: dict[object, tuple[float, list[Mesh], Plan]] = {}
    for zero in (1, 0):
        plain = common.but(zero=zero)
        options = {ranks: options_of(ranks, plain, workload, cluster) for ranks in every}
        for count in range(1, len(every) + 1):
            for some in combinations(every, count):
                for guess, meshes, _ in _of_kinds(some, options, plain, workload):
                    key = tuple(meshes)
                    if key not in chains or guess < chains[key][0]:
                        chains[key] = guess, meshes, plain
    order = sorted(chains, key=lambda key: chains[key][0])  # of equal guesses the first one found
    ranked = [chains[key] for key in order]
    parts = Partitioner(workload, cluster)
    parts.price([mesh for _, meshes, _ in ranked[:PARTITIONED] for mesh in meshes], common)
    found: dict[str, tuple[float, Plan]] = {}
    for _, meshes, plain in ranked[:PARTITIONED]:
        one = parts.best(meshes, plain)
        if one is not None and accepts(one[1]):
            found.setdefault(str(one[1]), one)
    return sorted(found.values(), key=lambda one: (one[0], str(one[1])))


def resolved_common(plan: Plan, workload: Workload) -> Plan:
    """What all segments share, made explicit as for a model that is split."""
    asked = resolved(plan.but(pp=2), workload.most("tp") > 1, workload.dtype)
    return plan.but(**{name: getattr(asked, name) for name in RESOLVED})


def _of_kinds(
    some: Sequence[tuple[int, ...]], options: Options, plain: Plan, workload: Workload
) -> Iterator[tuple[float, list[Mesh], Plan]]:
    """Chains over some kinds of device."""
    for b in _micro_batches(plain.global_batch):
        offered = [options[ranks].get(b, []) for ranks in some]
        if all(offered):
            yield from _cuts(offered, b, plain, workload)


def _micro_batches(batch: int) -> list[int]:
    """Samples of a micro-batch: divisors of the batch, spread over all sizes where too many."""
    found = [d for d in range(1, batch + 1) if batch % d == 0]
    if len(found) <= MOST_MICRO:
        return found
    picked = np.unique(np.linspace(0, len(found) - 1, MOST_MICRO).round().astype(int))
    return [found[i] for i in picked.tolist()]


def options_of(
    ranks: tuple[int, ...], plain: Plan, workload: Workload, cluster: Cluster
) -> dict[int, list[Option]]:
    """Every way to cut one kind of device, by the samples of a micro-batch."""
    node = int((cluster.nodes == cluster.nodes[ranks[0]]).sum())
    cuts = [
        (b, n, tp, len(ranks) // n // tp)
        for tp in _divisors(node)
        if tp <= min(MOST_WIDTH, workload.most("tp")) and len(ranks) % tp == 0
        for n in _divisors(len(ranks) // tp)
        if n <= min(MOST_STAGES, workload.num_blocks)
        for b in _micro_batches(plain.global_batch)
        if b % (len(ranks) // n // tp) == 0
    ]
    if not cuts:
        return {}
    machines = cluster.subset(ranks)
    plans = [
        plain.but(dp=dp, tp=tp, sp=tp > 1, pp=n, micro_batch=b // dp, zero=min(plain.zero, dp - 1))
        for b, n, tp, dp in cuts
    ]
    priced = costs(plans, workload, machines)
    blocks = _blocks(priced, workload)
    fitting = _fitting(priced, workload, machines)
    found: dict[int, list[Option]] = {}
    for i, (b, n, tp, dp) in enumerate(cuts):
        if fitting[i] > 0:
            one = Option(ranks, n, tp, b // dp, float(blocks[i]), int(fitting[i]))
            found.setdefault(b, []).append(one)
    return found


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _mean_block(workload: Workload) -> Array:
    """How much of each layer the mean block is."""
    many = np.array([x.times if x.is_block else 0 for x in workload.layers], float)
    out: Array = many / many.sum()
    return out


def _blocks(priced: Costs, workload: Workload) -> Array:
    """Seconds of the mean block, forward and backward."""
    took = [
        np.sum(layer_seconds(priced, at, workload), axis=0) for at in range(len(workload.layers))
    ]
    return portable.product(np.array(took).T, _mean_block(workload))


def _fitting(priced: Costs, workload: Workload, machines: Cluster) -> Array:
    """Blocks that fit on one stage when all of them are recomputed."""
    plans = [p.but(recompute="full") for p in priced.plans.plans]
    full = replace(priced, plans=layouts(plans), share=np.ones(len(plans)))
    times = np.repeat(_mean_block(workload)[:, None], len(plans), axis=1)
    last = np.array([p.pp - 1.0 for p in plans])
    held = stage_memory(full, times, workload, last)
    state = held.parameters + held.gradients + held.optimizers
    left = room(machines) / ROUNDING - held.workspace - held.buffers
    out: Array = np.floor(np.maximum(left, 0.0) / (state + IN_FLIGHT * held.each))
    return out


def _cuts(
    offered: list[list[Option]], b: int, plain: Plan, workload: Workload
) -> Iterator[tuple[float, list[Mesh], Plan]]:
    """Chains at the least bottleneck and a little more, in every order of the kinds."""
    least = _least(offered, workload.num_blocks)
    if not math.isfinite(least):
        return
    chosen = {tuple(_fewest(offered, least * s, workload.num_blocks)) for s in SLACK}
    turns = plain.global_batch // b
    for picked in sorted(chosen):
        for order in permutations(picked) if len(picked) < 4 else (picked, picked[::-1]):
            options = [offered[k][i] for k, i in order]
            stages = sum(o.stages for o in options)
            if stages <= workload.num_blocks:
                guess = _rough(options, workload.num_blocks, turns)
                yield guess, [m for o in options for m in o.meshes(plain)], plain


def _rough(options: Sequence[Option], blocks: int, turns: int) -> float:
    """Seconds of a chain whose stages are all equally busy."""
    period = blocks / sum(o.stages / o.block for o in options)
    return period * (turns - 1 + sum(o.stages for o in options))


def _least(offered: list[list[Option]], blocks: int) -> float:
    """The least bottleneck at which all kinds together take the model; inf where none suffices."""
    low, high = 0.0, blocks * max(o.block for some in offered for o in some)
    if sum(max(o.takes(high) for o in some) for some in offered) < blocks:
        return math.inf
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
