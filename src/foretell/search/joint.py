"""One search over parallel degrees, placement, schedule, memory, buckets and op fusion.

    1  every layout of the degrees is priced in closed form, the best of each strategy simulated
    2  on unlike devices, pipelines whose stages have meshes of their own (→ `.mixed`)
    3  descent from the best of them, one change at a time (→ `.refine`)
    4  where a data-parallel step could still be shorter, the methods of TAG and DisCo are asked:
       uneven shares, ways to synchronise gradients, fused ops, buckets

Every plan is priced by the one evaluator (→ `foretell.search.evaluate`), so that the answer is
never slower than that of any single planner.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from foretell.cluster import Cluster
from foretell.errors import ForetellError, InfeasibleError
from foretell.plan import Plan
from foretell.plan.cut import with_cuts
from foretell.plan.unsupported import unsupported
from foretell.search import mixed
from foretell.search.evaluate import repredicted
from foretell.search.fusion.planner import FusionPlanner
from foretell.search.oracle.scale import per_node
from foretell.search.oracle.space import Space, layouts, strategy
from foretell.search.oracle.sweep import Swept, sweep
from foretell.search.placement.planner import PlacementPlanner
from foretell.search.planner import Planned, Planner, Progress, silent
from foretell.search.refine import Evaluator, Found, descend
from foretell.search.schedule.choose import searched
from foretell.workload import Workload

ALTERNATIVES = 4  # next-best plans that an answer names
STARTS = 5  # plans that a descent begins from
FIRST = 0.4  # of the evaluations: layouts and pipelines simulated before any descent
ORDERED = 2.0  # seconds of work, about CPU seconds, for the order of a pipeline's stages
FUSED = 0.6  # of a data-parallel step's kernels: what fusing ops leaves of them, at the least


@dataclass(frozen=True)
class Joint(Planner):
    """Search parallelism, placement, schedule, memory and fusion together."""

    name: ClassVar[str] = "joint"
    source: ClassVar[str] = "our own, over the spaces of ParaDL, TAG, DisCo and Tessel"
    evaluations: int = 200  # plans simulated, at most; as many more by the fusion search
    global_batch: int = 0  # samples of a step; the workload's on each device where 0
    framework: str = ""
    precision: str = ""
    runnable: bool = False  # only plans that `foretell run` executes

    def plan(self, workload: Workload, cluster: Cluster, progress: Progress = silent) -> Planned:
        """The plan with the shortest predicted step."""
        return _Search(self, workload, cluster, progress).found()


@dataclass
class _Search:
    """One search on its way: what was found by whom, and what found nothing."""

    options: Joint
    workload: Workload
    cluster: Cluster
    progress: Progress
    best: dict[str, Planned] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    looked: int = 0

    def __post_init__(self) -> None:
        self.began = time.process_time()
        self.batch = self.options.global_batch or self.workload.batch * self.cluster.size
        self.on = Evaluator(
            self.workload, self.cluster, self.options.evaluations, self._accepts, self._filled
        )

    def _accepts(self, plan: Plan) -> bool:
        return not self.options.runnable or not unsupported(plan)

    def _filled(self, plan: Plan) -> Plan:
        """A plan as it is asked for: what runs is plain PyTorch, autocast in half precision."""
        o = self.options
        plan = plan.but(precision=o.precision) if o.precision else plan
        if not o.runnable or o.framework:
            return plan
        name = "fsdp" if plan.zero == 3 else "ddp"
        halves = {"fp16": "fp16-mixed", "bf16": "bf16-mixed"}
        dtype = self.workload.dtype
        precision = plan.precision or halves.get(dtype, dtype)
        return plan.but(framework=name, precision=precision)

    def found(self) -> Planned:
        """Everything, in turn; the shortest step of all, or of those seen before Ctrl-C."""
        swept, stopped = self._swept(), False
        try:
            self._searched(swept)
        except KeyboardInterrupt:
            stopped = True
            self._take(self.on.best())
            if not self.best:
                raise
        if not self.best:
            raise InfeasibleError(
                next(iter(self.failed.values()), "no layout fits"),
                hint="more devices, a smaller batch, or offload=yes",
            )
        found = self._told(swept)
        return replace(found, stopped=stopped or found.stopped)

    def _searched(self, swept: Swept) -> None:
        starts = [*self._layouts(swept), *self._pipelines()]
        if starts:
            self._descended(starts)
        for planner in (
            PlacementPlanner(global_batch=self.batch),
            FusionPlanner(evaluations=self.on.budget),
        ):
            self._asked(planner, swept)
            if any(one.stopped for one in self.best.values()):
                return

    def _take(self, best: Found | None) -> None:
        """Keep the best of the plans that were simulated here."""
        if best is None:
            return
        found = best.prediction
        plan = found.plan.but(model=self.workload.fingerprint())
        others = [one.prediction for one in self.on.ranked()[1 : 1 + ALTERNATIVES]]
        self.best["joint"] = Planned(
            plan, best.step, best.step, {}, None, 0, 0.0, (), found.low, found.high,
            found, tuple(others),
        )  # fmt: skip

    def _swept(self) -> Swept:
        """Every layout in closed form."""
        o = self.options
        space = Space(
            framework=o.framework, schedules=("1f1b", "gpipe"), whole_share=True, zero=(0, 1, 2, 3)
        )
        plans = layouts(self.workload, self.cluster.size, self.batch, per_node(self.cluster), space)
        if not o.framework:  # plain data parallelism is PyTorch's own DDP as well
            plans += [p.but(framework="ddp") for p in plans if p.ranks == p.dp and p.zero < 2]
        plans = list(dict.fromkeys(self._filled(plan) for plan in plans))
        plans = [p for p in with_cuts(plans, self.workload, self.cluster) if self._accepts(p)]
        self.progress(f"{len(plans)} layouts", float("nan"))
        self.looked += len(plans)
        return sweep(plans, self.workload, self.cluster)

    def _layouts(self, swept: Swept) -> list[Found]:
        """The best layouts, and the best of every strategy, simulated."""
        mine = np.flatnonzero(swept.fits)
        if not len(mine):
            least = float(swept.found.missing.min()) if len(swept.plans) else float("nan")
            self.failed["degrees"] = (
                f"none of {len(swept.plans)} layouts fits: the nearest lacks "
                f"{least / 2**30:.1f} GiB a device"
            )
            return []
        texts = np.array([str(swept.plans[i]) for i in mine.tolist()])
        order = mine[np.lexsort((texts, swept.found.step[mine]))].tolist()
        few = int(self.on.budget * FIRST)
        chosen = _apart(swept, order, few)
        return sorted(self.on.of([swept.plans[i] for i in chosen]), key=Found.key)

    def _pipelines(self) -> list[Found]:
        """Pipelines over unlike devices, simulated."""
        if len(self.cluster.devices_by_kind()) == 1 or self.workload.num_blocks < 2:
            return []
        o = self.options
        common = Plan(global_batch=self.batch, framework=o.framework, precision=o.precision)
        try:
            offered = mixed.pipelines(self.workload, self.cluster, common)
        except ForetellError as error:
            self.failed["unlike stages"] = error.message
            return []
        self.looked += len(offered)
        self.progress(f"{len(offered)} pipelines of unlike stages", self._least())
        few = int(self.on.budget * FIRST / 2)
        return self.on.of([plan for _, plan in offered[:few]])

    def _least(self) -> float:
        return min((one.predicted for one in self.best.values()), default=float("nan"))

    def _descended(self, starts: list[Found]) -> None:
        """Descent from the best starts; each strategy begins once."""
        ranked = sorted(starts, key=Found.key)
        firsts: dict[str, Found] = {}
        for one in ranked:
            firsts.setdefault(_kind(one.plan), one)
        best = ranked[0]
        for one in list(firsts.values())[:STARTS]:
            self.progress(f"descent from {_kind(one.plan)}", best.step)
            end = descend(one, self.on, lambda step: self.progress("descent", step))
            best = min(best, end, key=Found.key)
        self._take(min([best, *self._ordered(best)], key=Found.key))

    def _ordered(self, best: Found) -> list[Found]:
        """The best pipeline with a searched order of its stages, where that fits."""
        if best.plan.pp < 2 or best.plan.actions or self.on.is_spent:
            return []
        self.progress("order of the stages", best.step)
        plan = searched(best.plan, self.workload, self.cluster, work=ORDERED)
        return self.on.of([plan]) if plan else []

    def _asked(self, planner: PlacementPlanner | FusionPlanner, swept: Swept) -> None:
        """Another method, unless its kernels alone take longer than what is known."""
        if isinstance(planner, FusionPlanner):  # it shards and recomputes where that is needed
            bound = FUSED * _data_parallel(swept, 2)
        else:
            bound = _data_parallel(swept, 0)
        if self.cluster.size == 1 and isinstance(planner, PlacementPlanner):
            return  # there is nowhere else to place anything
        if len(self.cluster.devices_by_kind()) == 1 and not bound < self._least():
            self.failed[planner.name] = "no data-parallel step fits that could be shorter"
            return
        self.progress(f"asking {planner.name}", self._least())
        try:
            one = repredicted(
                planner.plan(self.workload, self.cluster), self.workload, self.cluster
            )
        except ForetellError as error:
            self.failed[planner.name] = error.message
            return
        self.looked += one.evaluations
        if self._accepts(one.plan):
            self.best[planner.name] = one

    def _told(self, swept: Swept) -> Planned:
        """The shortest step, with what all found and cost."""
        name, best = min(self.best.items(), key=lambda item: (item[1].predicted, item[0]))
        baselines = {
            f"{n}: {k}": v for n, one in self.best.items() for k, v in one.baselines.items()
        }
        baselines |= _strategies(swept)
        baselines |= {n: one.predicted for n, one in self.best.items()}
        usual = next(
            (baselines[n] for n in ("data", "fsdp", "zero") if n in baselines), best.baseline
        )
        notes = (f"found by {name}", *best.notes)
        notes += tuple(f"{other}: {why}" for other, why in self.failed.items())
        others = [one.prediction for n, one in self.best.items() if n != name and one.prediction]
        others += [prediction for one in self.best.values() for prediction in one.alternatives]
        return replace(
            best, baseline=max(usual, best.predicted), baselines=baselines, bound=None,
            evaluations=self.looked + self.on.evaluations,
            cpu=time.process_time() - self.began, notes=notes,
            alternatives=tuple(sorted(others, key=lambda p: p.step)),
        )  # fmt: skip


def _kind(plan: Plan) -> str:
    """What starts of a descent are told apart by."""
    return "unlike stages" if plan.segments else strategy(plan)


def _apart(swept: Swept, order: list[int], most: int) -> list[int]:
    """The first layouts in order, and among them the first three of every strategy."""
    seen: dict[str, int] = {}
    firsts = []
    for i in order:
        name = strategy(swept.plans[i])
        if seen.get(name, 0) < 3:
            seen[name] = seen.get(name, 0) + 1
            firsts.append(i)
    half = max(most // 2, 1)
    return list(dict.fromkeys([*order[:half], *firsts]))[:most]


def _data_parallel(swept: Swept, zero: int) -> float:
    """Seconds that kernels and update of a data-parallel step take, at the least, up to a ZeRO."""
    alone = np.array([p.ranks == p.dp and p.zero <= zero for p in swept.plans], bool)
    f = swept.found
    took = (f.compute + f.update)[alone & swept.fits]
    return float(took.min()) if len(took) else float("inf")


def _strategies(swept: Swept) -> dict[str, float]:
    """The best step of every strategy that fits, in closed form."""
    out: dict[str, float] = {}
    for i in np.flatnonzero(swept.fits).tolist():
        name = strategy(swept.plans[i])
        out[name] = min(out.get(name, float("inf")), float(swept.found.step[i]))
    return out
