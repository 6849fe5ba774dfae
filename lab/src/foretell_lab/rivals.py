"""Planners of other systems, as strong as they can be made here: what the joint search must beat.

    alpa        Zheng et al., OSDI 2022: stages on submeshes by a dynamic program (inter-operator),
                in each the best of tensor and data parallelism (intra-operator); devices count as
                alike, blocks are recomputed where memory asks for it
    galvatron   Miao et al., VLDB 2023: stages of equal width; of each the best of data, sharded and
                tensor parallelism and the recompute of its blocks, under memory
    mist        Zhu et al., EuroSys 2025: as Galvatron, and optimizer state of no, the first or all
                stages on the host, chosen together with ZeRO, recompute and blocks
    metis       Um et al., ATC 2024, and Sailor (Strati et al., SOSP 2025): stages of one kind of
                device each, in every order of the kinds, blocks by the speed of the devices

Each keeps to its own space, proposes its plans by its own costs, and has the best of them simulated
by `foretell.predict`, as many as the joint search may simulate. A plan cannot split one stage in
two ways: what Galvatron decides for a layer is decided here for a stage, recompute apart.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from typing import ClassVar

import numpy as np

from foretell.cluster import Cluster
from foretell.errors import InfeasibleError
from foretell.plan import Plan
from foretell.plan.plan import Segment, plan_of_segments
from foretell.search.kit import Planned, Planner, Progress, silent
from foretell.search.partition import (
    MODES,
    SLACK,
    Mesh,
    Option,
    Partitioner,
    Table,
    chained,
    common_of,
    explicit,
    kinds,
    least_bottleneck,
    options_of,
    resolved_common,
    shortest,
)
from foretell.search.refine import Evaluator, Found
from foretell.workload import Workload

MOST_STAGES = 16
Offered = Iterator[tuple[float, Plan]]


@dataclass(frozen=True)
class Rival(Planner):
    """A planner that proposes plans by its own costs, the best of them simulated."""

    evaluations: int = 200
    global_batch: int = 0

    def plan(self, workload: Workload, cluster: Cluster, progress: Progress = silent) -> Planned:
        """The best of what it proposes."""
        began = time.process_time()
        batch = self.global_batch or workload.batch * cluster.size
        offered: dict[str, tuple[float, Plan]] = {}
        for guess, plan in self.offered(workload, cluster, batch):
            if str(plan) not in offered or guess < offered[str(plan)][0]:
                offered[str(plan)] = guess, plan
        ranked = sorted(offered.values(), key=lambda one: (one[0], str(one[1])))
        on = Evaluator(workload, cluster, self.evaluations)
        found = on.of([plan for _, plan in ranked])
        if not found:
            raise InfeasibleError(f"{self.name}: none of {len(ranked)} plans fits")
        best = min(found, key=Found.key)
        return Planned(
            best.prediction.plan, best.step, best.step, {}, None, on.evaluations,
            time.process_time() - began, prediction=best.prediction,
        )  # fmt: skip

    def offered(self, workload: Workload, cluster: Cluster, batch: int) -> Offered:
        """Plans with a guess of their step."""
        raise NotImplementedError


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _micros(batch: int, most: int = 8) -> list[int]:
    """Samples of a micro-batch: powers of two that divide the batch."""
    return [1 << k for k in range(most) if batch % (1 << k) == 0]


def _splits(width: int, node: int, b: int, workload: Workload) -> list[Plan]:
    """Tensor and data parallelism on so many ranks, for micro-batches of b samples."""
    found = []
    for tp in _divisors(min(width, node)):
        dp, rest = divmod(width, tp)
        if not rest and tp <= workload.most("tp") and b % dp == 0:
            found.append(Plan(dp=dp, tp=tp, sp=tp > 1, micro_batch=b // dp, zero=min(1, dp - 1)))
    return found


@dataclass(frozen=True)
class Alpa(Rival):
    """Inter-operator dynamic program over submeshes, the best intra-operator split in each."""

    name: ClassVar[str] = "alpa"
    source: ClassVar[str] = "Zheng et al., Alpa, OSDI 2022"

    def offered(self, workload: Workload, cluster: Cluster, batch: int) -> Offered:
        """The shortest chain of submeshes for every micro-batch."""
        parts = Partitioner(workload, cluster)
        node = int((cluster.nodes == cluster.nodes[0]).sum())
        common = resolved_common(Plan(global_batch=batch), workload)
        for b in _micros(batch, 12):
            yield from self._chains(parts, common, b, node)

    def _chains(self, parts: Partitioner, common: Plan, b: int, node: int) -> Offered:
        size, blocks = parts.cluster.size, parts.workload.num_blocks
        widths = [d for d in _divisors(size) if d <= node or d % node == 0]
        offers = {w: _splits(w, node, b, parts.workload) for w in widths}
        turns = common.global_batch // b
        deep = min(MOST_STAGES, blocks, size)
        meshes = [Mesh(tuple(range(w)), own) for w, some in offers.items() for own in some]
        if not meshes:
            return
        parts.price(meshes, common)
        for stages in [s for s in (1, 2, 3, 4, 6, 8, 12, 16) if s <= deep]:
            for widths_ in _tilings(size, stages, [w for w in widths if offers[w]]):
                chain = [self._best(parts, offers[w], w, common, s, stages, turns)
                         for s, w in enumerate(widths_)]  # fmt: skip
                one = _joined(chain, common, turns, parts)
                if one is not None:
                    yield one

    def _best(
        self, parts: Partitioner, splits: Sequence[Plan], width: int, common: Plan, at: int,
        stages: int, turns: int,
    ) -> tuple[Mesh, Table]:  # fmt: skip
        """The intra-operator split of a submesh that is quickest for a mean share of the blocks."""
        ends = at == 0, at == stages - 1
        found = []
        for own in splits:
            mesh = Mesh(tuple(range(width)), own)
            full = explicit(mesh, common_of(common, [mesh], parts.workload), stages)
            table = parts.table(full, min(stages - at, turns), ends)
            found.append((mesh, table))
        share = max(parts.workload.num_blocks // stages, 1)
        low = 0 if at == 0 else (parts.workload.num_blocks - share if ends[1] else 1)
        high = parts.workload.num_blocks if ends[1] else low + share
        return min(found, key=lambda one: float(one[1].seconds[low, high]))


def _tilings(size: int, stages: int, widths: Sequence[int]) -> list[tuple[int, ...]]:
    """Widths of stages that use all devices: alike, or the first or last of another width."""
    found = []
    for w in widths:
        if w * stages == size:
            found.append((w,) * stages)
        rest = size - w * (stages - 1)
        if stages > 1 and rest in widths and rest != w:
            found += [(rest, *(w,) * (stages - 1)), (*(w,) * (stages - 1), rest)]
    return found


def _joined(
    chain: Sequence[tuple[Mesh, Table]], common: Plan, turns: int, parts: Partitioner
) -> tuple[float, Plan] | None:
    """A chain with blocks by the dynamic program, its ranks in a row."""
    took = [table.seconds for _, table in chain]
    least = least_bottleneck(took)
    if not np.isfinite(least):
        return None
    guesses = []
    for slack in SLACK:
        ends = shortest(took, least * slack)
        each = [float(t[a, z]) for t, a, z in zip(took, (0, *ends[:-1]), ends, strict=True)]
        guesses.append((sum(each) + (turns - 1) * max(each), ends))
    guess, ends = min(guesses)
    meshes, at = [], 0
    for mesh, _ in chain:
        meshes.append(Mesh(tuple(range(at, at + len(mesh.ranks))), mesh.plan))
        at += len(mesh.ranks)
    whole = common_of(common, meshes, parts.workload)
    return guess, plan_of_segments(whole, chained(meshes, [table for _, table in chain], ends))


@dataclass(frozen=True)
class Galvatron(Rival):
    """Stages of equal width, each with its own split, sharding and recompute under memory."""

    name: ClassVar[str] = "galvatron"
    source: ClassVar[str] = "Miao et al., Galvatron, VLDB 2023"

    def offered(self, workload: Workload, cluster: Cluster, batch: int) -> Offered:
        """For every number of stages, micro-batch and sharding the best strategy of each stage."""
        parts = Partitioner(workload, cluster)
        node = int((cluster.nodes == cluster.nodes[0]).sum())
        common = resolved_common(Plan(global_batch=batch), workload)
        pps = [d for d in _divisors(cluster.size) if d <= min(workload.num_blocks, MOST_STAGES)]
        sharded = resolved_common(Plan(global_batch=batch, zero=3), workload).but(zero=0)
        for pp, b, zero in product(pps, _micros(batch, 12), (0, 1, 3)):
            if zero == 3 and pp > 1:
                continue
            width = cluster.size // pp
            splits = [
                own.but(zero=zero if own.dp > 1 else 0) for own in _splits(width, node, b, workload)
            ]
            for own in dict.fromkeys(splits):
                for away in self.offloads(pp):
                    stages = [own.but(offload=s < away) for s in range(pp)]
                    meshes = [
                        Mesh(tuple(range(s * width, (s + 1) * width)), one)
                        for s, one in enumerate(stages)
                    ]
                    is_own = zero == 3 and common.framework == "ddp"  # which shards no parameters
                    found = parts.best(meshes, sharded if is_own else common)
                    if found is not None:
                        yield found

    def offloads(self, pp: int) -> list[int]:
        """How many of the first stages may have their optimizer state on the host."""
        return [0]


@dataclass(frozen=True)
class Mist(Galvatron):
    """Parallelism and all that saves memory tuned together, offload among it."""

    name: ClassVar[str] = "mist"
    source: ClassVar[str] = "Zhu et al., Mist, EuroSys 2025"

    def offloads(self, pp: int) -> list[int]:
        """The first stages hold most micro-batches: none, half or all of them offload."""
        return sorted({0, pp // 2, pp})


@dataclass(frozen=True)
class Metis(Rival):
    """Stages of one kind of device, in every order of the kinds, blocks by speed."""

    name: ClassVar[str] = "metis"
    source: ClassVar[str] = "Um et al., Metis, ATC 2024; Strati et al., Sailor, SOSP 2025"

    def offered(self, workload: Workload, cluster: Cluster, batch: int) -> Offered:
        """Every cut of every kind that is quickest by its own count, in every order."""
        common = resolved_common(Plan(global_batch=batch, zero=1), workload)
        every = kinds(cluster)
        known = {ranks: options_of(ranks, common, workload, cluster) for ranks in every}
        for order in permutations(every):
            for b in sorted({b for ranks in every for b in known[ranks]}):
                rows = [known[ranks].get(b, []) for ranks in order]
                if not all(rows):
                    continue
                for cut in product(*(_fewer(some) for some in rows)):
                    one = _by_speed(cut, common, workload, batch // b)
                    if one is not None:
                        yield from ((one[0], plan) for plan in one[1])


def _fewer(some: Sequence[Option], most: int = 6) -> list[Option]:
    """The cuts of one kind that take most blocks a second."""
    return sorted(some, key=lambda o: (o.block / o.stages, o.stages))[:most]


def _by_speed(
    cut: Sequence[Option], common: Plan, workload: Workload, turns: int
) -> tuple[float, list[Plan]] | None:
    """Blocks in proportion to the speed of each stage, with and without recompute."""
    stages = [(o, mesh) for o in cut for mesh in o.meshes(common)]
    if len(stages) > workload.num_blocks:
        return None
    speed = np.array([1 / o.block for o, _ in stages])
    exact = workload.num_blocks * speed / speed.sum()
    blocks = np.maximum(np.floor(exact), 1).astype(int)
    while blocks.sum() < workload.num_blocks:
        blocks[int(np.argmax(exact - blocks))] += 1
    while blocks.sum() > workload.num_blocks:
        blocks[int(np.argmax(np.where(blocks > 1, blocks - exact, -np.inf)))] -= 1
    each = blocks / speed
    guess = float(each.sum() + (turns - 1) * each.max())
    plans = [
        plan_of_segments(common, [Segment(int(n), mesh.ranks, mesh.plan.but(recompute=mode))
                         for n, (_, mesh) in zip(blocks, stages, strict=True)])
        for mode in (MODES[0], MODES[2])
    ]  # fmt: skip
    return guess, plans


RIVALS: dict[str, type[Rival]] = {kind.name: kind for kind in (Alpa, Galvatron, Mist, Metis)}
