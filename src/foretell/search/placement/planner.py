"""Where each part of a model runs on a mix of machines: the planner behind `--with placement`.

Baselines, pipelines and one choice for all are where annealing starts, and a descent behind it
gives the answer, so that no baseline is ever quicker. Instances small enough are tried in full. A
tree search before it, with or without TAG's network, changed no answer at equal CPU time
(`benchmarks/placement.py --only ablation`): it is what `--with tag` runs, and an option here.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields, replace
from math import inf
from typing import ClassVar

import numpy as np

from foretell.cluster import Cluster
from foretell.errors import InfeasibleError, InputError, unknown
from foretell.search.kit import Planned, Planner, Progress, silent
from foretell.search.placement import baselines, factors, mix
from foretell.search.placement.anneal import Allowed, anneal, polish, simplified
from foretell.search.placement.baselines import BASELINES, pipelines
from foretell.search.placement.device_classes import MOST_CELLS
from foretell.search.placement.evaluate import Evaluator, bound, memory, settled
from foretell.search.placement.mcts import Prior, Tree, even_chances, look_ahead
from foretell.search.placement.plans import plan_of
from foretell.search.placement.policy.net import shipped
from foretell.search.placement.problem import (
    ALL_REDUCE,
    EVEN,
    PS,
    SPLIT,
    Action,
    Placement,
    Problem,
    actions,
    canonical,
    problem,
    text,
    uniform,
)
from foretell.workload import Workload

METHODS = ("search", "mcts", *BASELINES)
PRIORS = ("learned", "look-ahead", "even")
FINE = ("single", "heft", "metis", "heterog")  # baselines that place groups on single devices
DRAWN = ("flexflow", "random")  # baselines that draw
MOST_FINE = 32  # ranks up to which every device is told apart for them
STARTS = 24  # placements the tree search may start from


@dataclass(frozen=True)
class PlacementPlanner(Planner):
    """Place, replicate and synchronise every part of a model on the machines there are."""

    name: ClassVar[str] = "placement"
    source: ClassVar[str] = "Zhang et al., TAG, TPDS 2023; uneven shares as HAP, EuroSys 2024"
    method: str = "search"  # or one of the baselines: hap, horovod, flexflow …
    playouts: int = 0  # of a tree search before annealing
    prior: str = "even"  # what guides it: learned, look-ahead, even
    strokes: int = 60_000  # simulations of annealing: an eighth a start, the rest from the best
    polish: int = 6_000  # simulations of the descent behind it, at most
    proposals: int = 2_000  # of FlexFlow's chain, which it is compared with
    global_batch: int = 0  # samples of a step; the workload's on every rank where 0
    groups: int = 40  # op groups, at most
    factors: bool = True  # gradients may be sent as their factors
    recompute: bool = True  # ranks may make a factor themselves: priced, not run
    split: bool = True  # groups may be split over the ranks of a node
    runs: bool = False  # only what any model can do: one set of ranks, a way for each parameter
    idle: bool = False  # a batch may be smaller than the number of ranks
    blocks: int = MOST_CELLS  # parts of the cluster that are told apart, at most
    framework: str = "ddp"  # whose kernels, host and optimizer are priced
    seed: int = 0

    def plan(self, workload: Workload, cluster: Cluster, progress: Progress = silent) -> Planned:
        """The quickest placement that fits."""
        return self.search(workload, cluster, progress)[0]

    def search(
        self, workload: Workload, cluster: Cluster, progress: Progress = silent
    ) -> tuple[Planned, Best]:
        """The plan, and the placement it says."""
        began = time.process_time()
        self._check()
        progress("pricing", inf)
        on = Evaluator(self._problem(workload, cluster))
        rivals = self._rivals(on, progress)
        best = self._best(on, rivals, progress)
        placed = canonical(best.found.problem, best.found.placement)  # tied groups as they are
        best = replace(best, found=replace(best.found, placement=placed))
        return self._planned(on, rivals, best, began), best

    def _check(self) -> None:
        """Raise where an option cannot be."""
        if self.method not in METHODS:
            raise unknown("placement method", self.method, METHODS)
        if self.prior not in PRIORS:
            raise unknown("prior", self.prior, PRIORS)
        least = {"playouts": 0, "strokes": 0, "polish": 0, "global_batch": 0, "groups": 1}
        least["proposals"] = 0
        for name, few in least.items():
            if getattr(self, name) < few:
                raise InputError(
                    f"`{name}={getattr(self, name)}` of placement", hint=f"it is {few} or more"
                )

    def _problem(self, workload: Workload, cluster: Cluster, single: bool = False) -> Problem:
        found = problem(
            workload,
            cluster,
            self.global_batch,
            framework=self.framework,
            most=self.groups,
            single=single,
            idle=self.idle,
            blocks=self.blocks,
        )
        tables = found.tables
        if not self.factors:
            tables = tables._replace(factors=tables.factors * 0)
            found = replace(found, factored={})
        if not self.split:
            never = np.full_like(tables.split_forward, inf)
            tables = tables._replace(split_forward=never, split_backward=never.copy())
        return replace(found, tables=tables)

    def _rivals(self, on: Evaluator, progress: Progress) -> dict[str, Rival]:
        """Every baseline, on single devices where it places things there."""
        fine = on
        if on.problem.cluster.size <= MOST_FINE:
            one = on.problem
            fine = Evaluator(self._problem(one.workload, one.cluster, single=True))
        found = {}
        for name, method in BASELINES.items():
            progress(name, on.least)
            use = fine if name in FINE else on
            drawn = {"seed": self.seed} if name in DRAWN else {}
            if name == "flexflow":
                drawn["proposals"] = self.proposals
            found[name] = Rival(use.problem, *method(use, **drawn))
        if fine is not on:
            on.evaluations += fine.evaluations
        return found

    def _best(self, on: Evaluator, rivals: dict[str, Rival], progress: Progress) -> Best:
        if self.method in rivals:
            rival = rivals[self.method]
            if rival.seconds == inf:
                raise _nothing_fits(on, rival.placement, self.method)
            return Best(rival, False, [])
        if self.runs:
            return self._deployable(on)
        if baselines.count(on.problem) <= baselines.MOST:
            progress("every placement", on.least)
            found = _quickest([Rival(on.problem, *baselines.best(on)), *rivals.values()], on)
            return Best(found, True, mix.parts(on, self.polish // 2))
        if self.method == "mcts":
            return self._as_published(on, progress)
        starts = self._starts(on, rivals)
        ends: list[Rival] = []
        try:
            if self.playouts:
                progress("tree search", on.least)
                starts = [self._tree(on, starts, rivals["even-allreduce"].seconds)[0], *starts]
            self._searched(on, starts, progress, ends)
        except KeyboardInterrupt:  # the best so far
            return Best(_quickest([*reversed(ends), *rivals.values()], on), False, [], stopped=True)
        best = _quickest([*reversed(ends), *rivals.values()], on)
        if self.factors and best.problem is on.problem:
            best = _with_factors(best, self.recompute)
        progress("parts of one kind", best.seconds)
        parts = mix.parts(on, self.polish // 2)
        return Best(_unmixed(on.problem, best, parts), False, parts)

    def _as_published(self, on: Evaluator, progress: Progress) -> Best:
        """TAG: a tree from data parallelism, or from all split where that does not fit; factors."""
        start = uniform(on.problem, Action(0, ALL_REDUCE), mode=EVEN)
        if on.seconds(start) == inf:
            start = uniform(on.problem, Action(0, SPLIT), mode=EVEN)
        progress("tree search", on.least)
        base = on.seconds(start)
        tree = Tree(
            on, [start], prior_of(self.prior), base, ways=(ALL_REDUCE, PS, SPLIT), steps=False
        )
        stopped = False
        try:
            tree.play(self.playouts)
        except KeyboardInterrupt:
            stopped = True
        best = _quickest([Rival(on.problem, *tree.best)], on)
        best = _with_factors(best, self.recompute) if self.factors else best
        return Best(best, False, [], stopped=stopped)

    def _tree(
        self, on: Evaluator, starts: list[Placement], plain: float
    ) -> tuple[Placement, float]:
        """What the tree search finds."""
        reference = plain if plain < inf else on.seconds(starts[0])
        tree = Tree(on, starts, prior_of(self.prior), reference)
        tree.play(self.playouts)
        return tree.best

    def _searched(
        self, on: Evaluator, starts: list[Placement], progress: Progress, found: list[Rival]
    ) -> None:
        """Annealing from some starts, from the best two again, from the best; descent behind it."""
        each = self.strokes // 8

        def annealed(start: Placement, strokes: int) -> None:
            progress(f"annealing {len(found) + 1}", on.least)
            found.append(Rival(on.problem, *anneal(on, start, strokes, self.seed + len(found))))

        for start in _apart(starts):
            annealed(start, each)
        for again in sorted(found, key=lambda rival: rival.seconds)[:2]:
            annealed(again.placement, each)
        first = min(found, key=lambda rival: rival.seconds)
        annealed(first.placement, self.strokes - each * len(found))
        first = _quickest([found[-1], first], on)
        progress("descent", first.seconds)
        lowest, _ = polish(on, first.placement, self.polish)
        found.append(Rival(on.problem, *simplified(on, lowest)))

    def _starts(self, on: Evaluator, rivals: dict[str, Rival]) -> list[Placement]:
        """Where to start: what others do, one choice for all, pipelines; the quickest first."""
        tried = [r.placement for r in rivals.values() if r.problem is on.problem]
        tried += [uniform(on.problem, a) for a in actions(on.problem, on.problem.leaders[0])]
        tried += pipelines(on.problem)
        tried = list(dict.fromkeys(tried))
        took = on.many(tried)
        ranked = sorted(range(len(tried)), key=lambda i: (took[i], i))
        return [tried[i] for i in ranked[:STARTS]]

    def _deployable(self, on: Evaluator) -> Best:
        """The best of each set of ranks with a way for each parameter."""
        found: dict[int, tuple[Placement, float]] = {}
        for s in range(len(on.problem.fleet.sets)):
            if on.problem.tables.size[s] <= on.problem.batch:
                start = uniform(on.problem, Action(s, 0))
                found[s] = polish(on, start, self.polish, _runs_on(s))
        best = _quickest([Rival(on.problem, *one) for one in found.values()], on)
        parts = mix.parts_of(on.problem, found)
        return Best(_unmixed(on.problem, best, parts), False, parts)

    def _planned(
        self, on: Evaluator, rivals: dict[str, Rival], best: Best, began: float
    ) -> Planned:
        found = best.found
        fitting = {name: r.seconds for name, r in rivals.items() if r.seconds < inf}
        plain = fitting.get("even-allreduce", max(fitting.values(), default=found.seconds))
        return Planned(
            plan_of(found.problem, found.placement),
            found.seconds,
            plain,
            fitting,
            found.seconds if best.is_proven else min(bound(on.problem), found.seconds),
            on.evaluations,
            time.process_time() - began,
            notes(best, sorted(set(rivals) - set(fitting))),
            stopped=best.stopped,
        )


def prior_of(name: str) -> Prior:
    """What may guide the tree search, by its name."""
    if name == "learned":
        return shipped()
    return look_ahead if name == "look-ahead" else even_chances


@dataclass(frozen=True)
class Tag(PlacementPlanner):
    """TAG's own search: its network guides a tree, an exact program places factors behind it."""

    name: ClassVar[str] = "tag"
    source: ClassVar[str] = "Zhang et al., TAG, TPDS 2023"
    method: str = "mcts"
    playouts: int = 800  # of the tree search
    prior: str = "learned"
    blocks: int = 128

    def own(self) -> Planner:
        """Annealing and descent, as many placements together as the tree has playouts."""
        mine = {f.name: getattr(self, f.name) for f in fields(PlacementPlanner)}
        few = self.playouts // 8
        search = {"method": "search", "playouts": 0, "prior": "even"}
        return PlacementPlanner(**mine | search | {"strokes": self.playouts - few, "polish": few})


@dataclass(frozen=True)
class Rival:
    """A placement, the problem whose sets it names, and its seconds."""

    problem: Problem
    placement: Placement
    seconds: float


@dataclass(frozen=True)
class Best:
    """The answer, whether nothing in the space is quicker, and the parts of one kind."""

    found: Rival
    is_proven: bool
    parts: list[mix.Part]
    stopped: bool = False  # by Ctrl-C


def _runs_on(chosen: int) -> Allowed:
    """What deploys: replicas on one set of ranks."""
    return lambda action: action.devices == chosen and action.way != SPLIT


def _apart(ranked: list[Placement]) -> list[Placement]:
    """Four that differ: the best, the best without and the best with micro-batches."""
    plain = [p for p in ranked if p.micros == 1]
    staged = [p for p in ranked if p.micros > 1]
    return list(dict.fromkeys([ranked[0], *plain[:1], *staged[:3]]))[:4]


def _quickest(found: list[Rival], on: Evaluator) -> Rival:
    best = min(found, key=lambda rival: rival.seconds)
    if best.seconds == inf:
        raise _nothing_fits(on, best.placement, "any placement")
    return best


def _with_factors(rival: Rival, recompute: bool) -> Rival:
    """Place factors by the exact program; kept where the simulated step is shorter."""
    found = [rival]
    for again in dict.fromkeys((False, recompute)):
        one, placement = factors.refined(rival.problem, rival.placement, recompute=again)
        found.append(Rival(one, placement, Evaluator(one).seconds(placement)))
    return min(found, key=lambda one: one.seconds)


def _unmixed(problem: Problem, found: Rival, parts: list[mix.Part]) -> Rival:
    """The part of one kind where mixing gains nothing."""
    fit = [part for part in parts if part.seconds < inf]
    best = min(fit, key=lambda part: part.seconds, default=None)
    if best is None or found.seconds * mix.WORTH < best.seconds:
        return found
    return Rival(problem, best.placement, best.seconds)


def _nothing_fits(on: Evaluator, nearest: Placement, what: str) -> InfeasibleError:
    why = on.fault(nearest) if nearest.actions else "memory"
    room = max(on.problem.tables.room) / 2**30
    need = max(memory(on.problem, nearest).values()) / 2**30 if why == "memory" else 0.0
    if why == "samples":
        return InfeasibleError(
            f"{what}: a batch of {on.problem.batch} for {on.problem.cluster.size} ranks",
            hint="raise global_batch, or leave the method out: fewer ranks may do",
        )
    return InfeasibleError(
        f"{what} fits no memory: the fullest rank would hold {need:.1f} GiB of {room:.1f} GiB",
        hint="lower global_batch, add machines, or use a model that is split: `foretell oracle`",
    )


def notes(best: Best, missing: list[str]) -> tuple[str, ...]:
    """What a reader should know: the placement, memory, what mixing gains, what did not fit."""
    found = best.found
    held = max(memory(found.problem, found.placement).values()) / 2**30
    served = settled(found.problem, found.placement)[2].tolist()
    lines = [*text(found.problem, found.placement, served).splitlines()]
    lines.append(f"fullest rank: {held:.1f} GiB" + (", proven best" if best.is_proven else ""))
    lines += mix.verdict_lines(found.problem, (found.placement, found.seconds), best.parts)
    if missing:
        lines.append(f"do not fit: {', '.join(missing)}")
    return tuple(lines)
