"""One search over parallel degrees, placement, schedule, memory, buckets and op fusion.

    1  every layout of the degrees is priced in closed form, the best of each strategy simulated
    2  blocks and recompute of the best pipelines are split by a dynamic program over stages and
       memory; on unlike devices stages have meshes of their own (→ `.partition`)
    3  descent from the best of them, one change at a time (→ `.refine`)
    4  where a data-parallel step could still be shorter, the methods of TAG and DisCo are asked:
       uneven shares, ways to synchronise gradients, fused ops, buckets; what they find is changed
       one thing at a time again

Every plan is priced by the one evaluator (→ `foretell.search.kit`), so that the answer is
never slower than that of any single planner. The answer says what no plan can be below
(`lower_bound`), and why it is what it is (`reasons`).

What a search may choose: `--only` names the axes it is free in, `--fix` the fields that are set.

    Restriction.of(only="dp,tp,zero", fix="micro_batch=1,recompute=full")

An axis that is not named keeps what a plan says by itself. The number of replicas and the
micro-batch are always free: something has to use the devices and divide the batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from foretell import spec
from foretell.cluster import Cluster, Device
from foretell.errors import ForetellError, InfeasibleError, InputError, unknown
from foretell.graph.graph import ranks_of
from foretell.plan import Plan
from foretell.plan.check import branches, check
from foretell.plan.costs import USABLE, costs, with_cuts
from foretell.plan.framework import framework_of, resolved, slowdown
from foretell.plan.layer_cost import Array
from foretell.plan.layer_cost import layouts as columns
from foretell.plan.plan import OWN, segments
from foretell.plan.program import FAMILIES
from foretell.plan.unsupported import in_own_loop, unsupported
from foretell.pool import Pool
from foretell.predict import Prediction
from foretell.predict.predict import EIGHTY_PERCENT
from foretell.search import partition
from foretell.search.fusion.planner import FusionPlanner
from foretell.search.kit import (
    Planned,
    Planner,
    Progress,
    priced,
    repredicted,
    shared_work,
    silent,
)
from foretell.search.oracle.space import (
    Space,
    Swept,
    by_strategy,
    layouts,
    per_node,
    strategy,
    sweep,
)
from foretell.search.partition import Partitioner, divisors, meshes, rows_of
from foretell.search.placement.planner import PlacementPlanner
from foretell.search.refine import BEYOND, Evaluator, Found, Guess, descend, share_moves, unsharded
from foretell.search.schedule.find import require_limit, solve_model, with_searched_order
from foretell.search.schedule.model import model
from foretell.workload import Workload

# Axis -> fields of a plan that it changes.
AXES: dict[str, tuple[str, ...]] = {
    "dp": ("dp",),
    "tp": ("tp", "sp"),
    "pp": ("pp", "layers", "segments"),
    "cp": ("cp",),
    "ep": ("ep", "etp"),
    "spatial": ("spatial",),
    "filter": ("filter",),
    "channel": ("channel",),
    "zero": ("zero", "shard"),
    "recompute": ("recompute", "recompute_layers"),
    "offload": ("offload",),
    "batch": ("micro_batch",),
    "schedule": ("schedule", "chunks", "actions"),
    "buckets": ("bucket_mb", "buckets", "parts", "overlap", "update"),
    "fusion": ("compile", "regions", "late", "optimizer_kernels"),
    "sync": ("sync",),
    "placement": ("placement", "shares", "groups", "stages"),
}
_FREE = ("dp", "batch")
_SEARCHED = tuple(name for axis in AXES.values() for name in axis)
_SET = ("bucket_mb", "overlap", "compile", "optimizer_kernels")  # as good as numerics once fixed
_SAID = ("dp", "zero", "shard", "micro_batch", "global_batch", "chunks", "sp", "framework")
_PLAIN = Plan()


HOUR = 3600.0
FAILING = 1000  # devices: with more of them an answer says what failures cost
ALTERNATIVES = 4  # next-best plans that an answer names
WIDE = 64  # devices: with more of them, tensor-parallel ranks share a node if any layout fits
PARTITIONED = 40  # pipelines of which blocks and recompute are split by the dynamic program
APART = 5  # sizes of a micro-batch that branches on ranks of their own are tried with
ORDERED = 2.0  # seconds of work, about CPU seconds, for the order of a pipeline's stages
KEPT = 0.9  # of a time limit: what is left bounds and explains the answer
SHORT = 20  # evaluations of fusions of large steps
OPS = 5  # of a step for each evaluation: with more of them, fusions are not searched one by one
FUSED = 0.6  # of a data-parallel step's kernels: what fusing ops leaves of them, at the least
SPACE = Space(
    schedules=("1f1b", "v-half"), whole_share=True, zero=(0, 1, 2, 3), chunks=(1, 2, 4, 8)
)


@dataclass(frozen=True)
class Restriction:
    """The axes that may change, and the fields that have a value."""

    only: tuple[str, ...] = ()  # all where empty
    fixed: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, only: str, fix: str) -> Restriction:
        """What two texts ask for."""
        axes = tuple(part.strip() for part in only.split(",") if part.strip())
        for axis in axes:
            if axis not in AXES:
                raise unknown("axis of a search", axis, AXES)
        given = spec.options(fix, where=fix) if fix else {}
        plan = Plan.parse(fix) if fix else _PLAIN
        names = {f.name for f in fields(Plan)} & set(given)
        if len(names) < len(given):  # other programs' words: `fsdp=8` says dp, zero and shard
            names |= {n for n in _SAID if getattr(plan, n) != getattr(_PLAIN, n)}
        return cls(axes, {name: getattr(plan, name) for name in sorted(names)})

    @cached_property
    def fixed_values(self) -> dict[str, Any]:
        """Fields that keep a value: those of axes that are not free, and those that are fixed."""
        shut = [] if not self.only else [a for a in AXES if a not in (*self.only, *_FREE)]
        out = {name: getattr(_PLAIN, name) for axis in shut for name in AXES[axis]}
        return out | dict(self.fixed or {})

    def is_free(self, axis: str) -> bool:
        """Whether an axis may change at all."""
        return not all(name in self.fixed_values for name in AXES[axis])

    def filled(self, plan: Plan) -> Plan:
        """A plan with the fixed fields that no layout is made of: numerics, buckets, framework."""
        said = (self.fixed or {}).items()
        more = {n: v for n, v in said if n not in _SEARCHED or n in _SET}
        return plan.but(**more) if more else plan

    def allows(self, plan: Plan, workload: Workload) -> bool:
        """Whether a plan keeps to it."""
        if not self.fixed_values:
            return True
        if not plan.segments:
            return all(_same(plan, name, value) for name, value in self.fixed_values.items())
        if not self.is_free("pp") or not self._segments_allowed(plan):
            return False
        rows = segments(plan, workload)
        own = {n: v for n, v in self.fixed_values.items() if n in (*OWN, "dp")}
        if self.fixed_values.get("pp", len(rows)) != len(rows):
            return False
        return all(_same(row.plan, name, value) for row in rows for name, value in own.items())

    def _segments_allowed(self, plan: Plan) -> bool:
        rest = ("layers", "segments", "pp", "dp", "micro_batch", *OWN)
        return all(_same(plan, n, v) for n, v in self.fixed_values.items() if n not in rest)

    def require_possible(self, ranks: int) -> None:
        """Raise where fixed degrees do not divide the number of devices."""
        fixed = self.fixed or {}
        degrees = [fixed[n] for n in ("dp", "tp", "pp", "cp", "filter", "channel") if n in fixed]
        product = 1
        for degree in degrees:
            product *= degree
        if product and ranks % product:
            raise InputError(
                f"fixed degrees make {product} ranks, which do not divide {ranks} devices",
                hint="their product divides the number of devices",
            )


def _takes_its_steps(plan: Plan) -> bool:
    """Whether a plan runs the step in a loop of its own, in place of the script's."""
    return bool(in_own_loop(plan) or plan.late or plan.regions)


def _same(plan: Plan, name: str, value: Any) -> bool:
    if name == "sp" and plan.tp == 1:
        return True
    if name == "micro_batch" and not plan.micro_batch:
        return bool(plan.global_batch == value * plan.dp)
    return bool(getattr(plan, name) == value)


SLACK = 0.97  # sizes of a micro-batch between those that were priced may do a little better
MOST = 256  # ways to split a layer that are priced
FULL = 0.9  # of the usable memory: beyond that it decides what else could be chosen
SAME = 0.005  # of a step: plans closer than that are no alternative worth reporting
_SPENT = {
    "compute_s": "compute",
    "exchange_s": "TP/CP/EP communication",
    "reduce_s": "gradient reduction",
    "update_s": "the optimizer step",
    "idle_s": "pipeline bubbles and waiting",
}
HEAD = 6  # plans of every kind simulated before the best of all is looked at
LAYOUTS, CHAINS, UNLIKE, PARTS = 0.3, 0.1, 0.15, 0.1  # of the evaluations, before any descent


Offers = list[tuple[float, Plan]]  # plans with a guess of their step, the best first


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
    own_loop: bool = False  # of a script that takes its steps itself
    only: str = ""  # axes that are searched, with commas between; all where empty
    fix: str = ""  # fields that have a value: dp=8,tp=2
    objective: Literal["time", "energy", "money"] = "time"  # of the devices or nodes a plan uses
    seconds: float = 0.0  # of the clock, at most; 0 for no limit, and the same answer everywhere
    resume: str = ""  # a file of what was simulated: read where it is there, written at the end

    def plan(
        self, workload: Workload, cluster: Cluster, progress: Progress = silent,
        pool: Pool | None = None,
    ) -> Planned:  # fmt: skip
        """The plan with the shortest predicted step; `pool` shares the predictions."""
        search = _Search(self, workload, cluster, progress, pool)
        swept, stopped = search.swept(), False
        try:
            offers = [
                search.layouts(swept), search.partitioned(swept), *search.fewer_devices(),
                search.unlike(),
            ]  # fmt: skip
            starts = search.started(offers)
            starts += search.uneven(swept, starts)
            starts += search.on.of(list(search.branches_apart()))
            if starts:
                best = descend(starts, search.on, search.tell, kind=_kind, late=search.late)
                search.record(min([best, *search.ordered(best)], key=Found.key))
            for planner in search.methods(swept):
                try:
                    one = planner.plan(workload, cluster, search.watch)
                    one = repredicted(one, priced(one.plan, workload, cluster))
                except ForetellError as error:
                    search.failed[planner.name] = error.message
                    continue
                start = search.record_method(planner, one)
                if start:  # what a placement becomes with other kernels
                    end = descend(start, search.on, search.tell)
                    search.record_changed(one, start[0], end)
        except KeyboardInterrupt:
            stopped = not search.on.is_late
            search.record(search.on.best())
            if not search.best:
                raise
        finally:
            if self.resume:
                search.on.save(Path(self.resume))
        search.require_found()
        late = search.on.is_late
        bound = lower_bound(swept.plans, workload, cluster, search.batch)
        found = search.answer(swept, bound)
        if late:
            note = "the time limit ended the search: the best plan so far"
            return replace(found, stopped=stopped, notes=(note, *found.notes))
        return replace(found, stopped=stopped or found.stopped)


@dataclass
class _Search:
    """One search on its way: what was found by whom, and what found nothing."""

    options: Joint
    workload: Workload
    cluster: Cluster
    progress: Progress
    pool: Pool | None = None
    best: dict[str, Planned] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    looked: int = 0
    late: dict[Plan, Guess] = field(default_factory=dict)  # offers far beyond the best

    def __post_init__(self) -> None:
        self.began, clock = time.process_time(), time.monotonic()
        self.within = Restriction.of(self.options.only, self.options.fix)
        self.within.require_possible(self.cluster.size)
        usual = self.workload.batch * self.cluster.size
        fixed = (self.within.fixed or {}).get("global_batch", 0)
        self.batch = self.options.global_batch or fixed or usual
        self.is_mixed = len(self.cluster.devices_by_kind()) > 1
        self.compiles = all(device.vendor != "cpu" for device in self.cluster.devices)
        self.on = Evaluator(
            self.workload, self.cluster, self.options.evaluations, self._accepts, self._filled,
            self._cost(), pool=self.pool,
        )  # fmt: skip
        if self.options.seconds:
            require_limit(self.options.seconds)
            self.on.ends = clock + KEPT * self.options.seconds
        if self.options.resume:
            self.on.load(Path(self.options.resume))

    def watch(self, doing: str, best: float) -> None:
        """Progress of a method, which ends as by Ctrl-C where time is up."""
        self.progress(doing, best)
        if self.on.is_late:
            raise KeyboardInterrupt

    def _cost(self) -> Callable[[Plan, float], float]:
        """What is made least."""
        cluster, objective = self.cluster, self.options.objective
        if objective == "energy":
            _require_known("board power", "watts", {d.name: d.watts for d in cluster.devices})
            return lambda plan, step: step * power(plan, cluster)
        if objective == "money":
            known = {cluster.node(r).name: _node_price(cluster, r) for r in range(cluster.size)}
            _require_known("price", "price", known)
            return lambda plan, step: step * price(plan, cluster)
        return lambda plan, step: step

    def _accepts(self, plan: Plan) -> bool:
        o = self.options
        if o.runnable and (unsupported(plan) or (o.own_loop and _takes_its_steps(plan))):
            return False
        if self.options.framework not in ("", plan.framework):
            return False
        return self.within.allows(plan, self.workload)

    def _filled(self, plan: Plan) -> Plan:
        """A plan as it is asked for: what runs is plain PyTorch, autocast in half precision."""
        o = self.options
        plan = self.within.filled(plan.but(precision=o.precision) if o.precision else plan)
        if not o.runnable or o.framework:
            return plan
        name = plan.framework or ("fsdp" if plan.zero == 3 else "ddp")
        halves = {"fp16": "fp16-mixed", "bf16": "bf16-mixed"}
        dtype = self.workload.dtype
        precision = plan.precision or halves.get(dtype, dtype)
        return plan.but(framework=name, precision=precision)

    def tell(self, step: float) -> None:
        """Progress of a descent."""
        self.progress("descent", step)

    def require_found(self) -> None:
        """Raise where no method has a plan that fits."""
        if not self.best:
            raise InfeasibleError(
                next(iter(self.failed.values()), "no layout fits"),
                hint="more devices, a smaller batch, or offload=yes",
            )

    def methods(self, swept: Swept) -> Iterator[PlacementPlanner | FusionPlanner]:
        """The methods of TAG and DisCo, where their axes are free and none was stopped."""
        for axis, planner in (("placement", self._placing()), ("fusion", self._fusing())):
            if any(one.stopped for one in self.best.values()) or self.on.is_late:
                return
            free = self.within.is_free(axis) and self.within.is_free("sync")
            if free and self._can_gain(planner, swept):
                self.progress(f"asking {planner.name}", self._least())
                yield planner

    def _placing(self) -> PlacementPlanner:
        many = self.options.evaluations
        return PlacementPlanner(
            global_batch=self.batch, strokes=60 * many, polish=10 * many,
            recompute=not self.options.runnable,
        )  # fmt: skip

    def _fusing(self) -> FusionPlanner:
        """Inductor's fusion and the best buckets, and a search from there.

        On large steps that gains a few thousandths and would take most of the time: it is short.
        """
        many, budget = op_count(self.workload), self.options.evaluations
        usual = self.batch == self.workload.batch * self.cluster.size
        left = max(self.on.ends - time.monotonic(), 0.1) if self.on.ends < math.inf else 0.0
        return FusionPlanner(
            evaluations=budget if many <= OPS * budget else SHORT,
            seconds=left,
            batch=0 if usual else self.batch // self.cluster.size,
        )

    def record(self, best: Found | None, name: str = "joint") -> None:
        """Keep the best of the plans that were simulated here."""
        if best is None:
            return
        found = best.prediction
        plan = found.plan.but(model=self.workload.fingerprint())
        others = next_best([one.prediction for one in self.on.ranked()], ALTERNATIVES)
        self.best[name] = Planned(
            plan, best.step, best.step, {}, None, 0, 0.0, (), found.low, found.high,
            found, others,
        )  # fmt: skip

    def swept(self) -> Swept:
        """Every layout in closed form."""
        plans = self._offered(self._plain_layouts(self.cluster), self.cluster)
        self.progress(f"{len(plans)} layouts", float("nan"))
        self.looked += len(plans)
        swept = sweep(plans, self.workload, self.cluster, pool=self.pool)
        if not swept.fits.any() and self.cluster.size > WIDE:
            wide = self._plain_layouts(self.cluster, is_wide=True)
            plans = self._offered(wide, self.cluster)
            swept = sweep(plans, self.workload, self.cluster, pool=self.pool)
        if swept.fits.any() or not self.within.is_free("offload"):
            return swept
        away = [p.but(offload=True) for p in plans]
        return sweep([*plans, *away], self.workload, self.cluster, pool=self.pool)

    def _plain_layouts(self, machines: Cluster, *, is_wide: bool = False) -> list[Plan]:
        """Every layout of the degrees on some machines, the wide ones too where those are few."""
        inside = not (is_wide or machines.size <= WIDE or "tp" in (self.within.fixed or {}))
        space = replace(
            SPACE, framework=self.options.framework, tp_inside=inside, **self._fixed_choices()
        )
        found = layouts(self.workload, machines.size, self.batch, per_node(machines), space)
        if self.workload.most("tp") > 1 or "recompute" in self.within.fixed_values:
            return found
        return found + [p.but(recompute="full") for p in found]  # ParaDL's space has none

    def _fixed_choices(self) -> dict[str, Any]:
        """Choices of a space that a fixed field takes away, or adds."""
        fixed, out = self.within.fixed or {}, {}
        for name in ("micro_batch", "recompute", "zero", "chunks", "offload"):
            if name in fixed:
                out[name] = (fixed[name],)
        family = FAMILIES.get(fixed.get("schedule", ""))
        if family and family.chunks and not family.least[0]:
            out["schedules"] = (fixed["schedule"],)
        return out

    def _offered(self, plans: list[Plan], machines: Cluster) -> list[Plan]:
        """Layouts as each framework runs them, compiled and not, those that are accepted."""
        node = per_node(machines)
        plans = plans + [  # state shared by a node, or by pairs of replicas (HSDP)
            p.but(shard=many)
            for p in plans
            if p.zero == 3
            for many in sorted({2, node // (p.tp * p.cp)})
            if 1 < many < p.dp and p.dp % many == 0
        ]
        whole = [p.but(etp=1) for p in plans if p.ep > 1 and p.sp]  # experts that are not split
        if not self.options.framework:  # PyTorch's own, compiled where more than data is split
            free = self.within.is_free("fusion")
            more = [p.but(framework="ddp", compile=free and p.ranks > p.dp)
                    for p in plans if p.zero < 2]  # fmt: skip
            if not self.options.runnable:  # FSDP casts parameters once, where autocast does always
                most = [p for p in plans if p.zero == 0 and (p.ranks > 1 or self.is_mixed)]
                own = [unsharded(p, compiled=free) for p in most]
                more += own + [p.but(optimizer_kernels="fused") for p in own if free]
                more += [p.but(framework=self._framework()) for p in plans if p.zero == 3]
            plans = plans + more
        plans = plans + whole
        fixed = self.within.fixed or {}
        if "shard" in fixed:
            plans = [p.but(shard=fixed["shard"]) for p in plans if p.zero]
        plans = list(dict.fromkeys(self._filled(plan) for plan in plans))
        if self.within.is_free("fusion"):
            plans += [p.but(compile=True) for p in plans if self._is_eager(p)]
        plans = [p for p in plans if self._accepts(p)]
        return [p for p in with_cuts(plans, self.workload, machines) if self._accepts(p)]

    def _framework(self) -> str:
        """The framework that splits such a model; DeepSpeed shards parameters with its kernels."""
        split = Plan(pp=2, precision=self.options.precision)
        return resolved(split, self.workload).framework

    def _is_eager(self, plan: Plan) -> bool:
        """Whether torch.compile would fuse what the framework does not."""
        if plan.compile or not self.compiles:
            return False
        resolved_plan = resolved(plan, self.workload)
        return framework_of(resolved_plan.framework).kernels == "eager"

    def started(self, offered: list[Offers]) -> list[Found]:
        """The first plans of every kind simulated, then others that could be near the best."""
        found = self.on.of([plan for one in offered for _, plan in one[:HEAD]])
        for one in offered:
            for at in range(HEAD, len(one), HEAD):
                least = min((got.cost for got in found), default=float("inf"))
                seen = {_kind(got.plan) for got in found}
                some = {plan: self.on.cost(plan, guess) for guess, plan in one[at : at + HEAD]}
                near = [p for p in some if some[p] <= BEYOND * least or _kind(p) not in seen]
                self.late |= {p: Guess(some[p], 0.0) for p in some if p not in near}
                found += self.on.of(near)
        return sorted(found, key=Found.key)

    def layouts(self, swept: Swept) -> Offers:
        """The best layouts, and the best of every strategy."""
        order = ranked(swept)
        if not swept.plans:
            many = f"{self.batch} samples over {self.cluster.size} devices"
            self.failed["degrees"] = f"no layout of the axes that may change divides {many}"
            return []
        if not order:
            least = f"the nearest lacks {float(swept.found.missing.min()) / 2**30:.1f} GiB a device"
            self.failed["degrees"] = f"none of {len(swept.plans)} layouts fits: {least}"
            return []
        chosen = _diverse(swept, order, int(self.on.budget * LAYOUTS))
        return _offers(swept, chosen)

    def partitioned(self, swept: Swept) -> Offers:
        """Pipelines with blocks and recompute stage by stage, the most promising."""
        chosen = _without_recompute(swept)[:PARTITIONED]
        if not chosen or not (self.within.is_free("recompute") or self.within.is_free("pp")):
            return []
        parts = Partitioner(self.workload, self.cluster)
        offered: dict[str, tuple[float, Plan]] = {}
        split = [
            (meshes(rows_of(plan, self.workload)), plan.but(layers=(), placement=()))
            for plan in chosen
        ]
        for framework in dict.fromkeys(common.framework for _, common in split):
            mine = [(m, c) for m, c in split if c.framework == framework]
            parts.price([mesh for some, _ in mine for mesh in some], mine[0][1])
        for some, common in split:
            one = parts.best(some, common)
            if one is not None and self._accepts(one[1]):
                offered.setdefault(str(one[1]), one)
        self.looked += len(offered)
        ordered = sorted(offered.values(), key=lambda one: (one[0], str(one[1])))
        return ordered[: int(self.on.budget * CHAINS)]

    def unlike(self) -> Offers:
        """Pipelines over unlike devices, the most promising."""
        free = self.within.is_free("placement") and self.within.is_free("pp")
        if not (free and self.is_mixed) or self.workload.num_blocks < 2:
            return []
        o = self.options
        common = Plan(global_batch=self.batch, framework=o.framework, precision=o.precision)
        try:
            offered = partition.pipelines(
                self.workload, self.cluster, self.within.filled(common), self._accepts
            )
        except ForetellError as error:
            self.failed["unlike stages"] = error.message
            return []
        self.looked += len(offered)
        self.progress(f"{len(offered)} pipelines of unlike stages", self._least())
        return offered[: int(self.on.budget * UNLIKE)]

    def uneven(self, swept: Swept, starts: list[Found]) -> list[Found]:
        """Layouts whose replicas on unlike devices have samples by their speed, if those gain."""
        if self.on.is_late or not (self.is_mixed and self.within.is_free("placement")):
            return []
        spare = [i for i in ranked(swept) if swept.plans[i].dp > 1 and swept.plans[i].chunks == 1]
        found: dict[Plan, float] = {}
        for i in _diverse(swept, spare, PARTITIONED):
            for other in self._interleaved(swept.plans[i]):
                for one in share_moves(other, self.on.chains):
                    if self._accepts(one):
                        found[one] = self.on.rough_cost(one)
        self.looked += len(found)
        least = min((one.cost for one in starts), default=float("inf"))
        near = [p for p in found if found[p] <= least]
        return self.on.of(sorted(near, key=lambda p: (found[p], str(p)))[:HEAD])

    def branches_apart(self) -> Iterator[Plan]:
        """Branches of a model side by side on ranks of their own, as each program runs them."""
        free = all(self.within.is_free(axis) for axis in ("placement", "pp", "schedule"))
        ways = branches(self.workload)[1] if free and self.cluster.size <= WIDE else []
        if self.on.is_late or len(ways) < 2 or self.cluster.size <= len(ways):
            return
        micros = [b for b in divisors(self.batch) if 2 <= self.batch // b <= 4 * self.cluster.size]
        programs = [
            Plan(framework=name, compile=True, optimizer_kernels="fused")
            for name in ("fsdp", "ddp")
            if self.compiles and self.within.is_free("fusion")
        ]
        for given in map(self._filled, [*programs, Plan(framework=self.options.framework)]):
            for micro in micros[-APART:]:
                turns, one = self.batch // micro, given.but(micro_batch=micro)
                with suppress(ForetellError):
                    placed = model(self.workload, self.cluster, "y", plan=one, micro_batches=turns)
                    yield solve_model(placed, turns, work=ORDERED / APART).plan

    def _interleaved(self, plan: Plan) -> Iterator[Plan]:
        """A layout on the ranks in order; with every kind of device in each stage."""
        yield plan
        every = partition.kinds(self.cluster)
        inner = plan.ranks // plan.dp
        if plan.pp > 1 and all(len(ranks) % inner == 0 for ranks in every):
            each = [len(ranks) // plan.pp for ranks in every]
            pairs = list(zip(every, each, strict=True))
            assigned = [r[s * n : (s + 1) * n] for s in range(plan.pp) for r, n in pairs]
            yield plan.but(layers=(), placement=tuple(rank for some in assigned for rank in some))

    def fewer_devices(self) -> Iterator[Offers]:
        """The best layouts on the fastest kinds; for energy and money on fewer devices too."""
        if not self.within.is_free("placement"):
            return
        every = partition.kinds(self.cluster)
        parts = [
            tuple(rank for kind in every[:count] for rank in kind) for count in range(1, len(every))
        ]
        if self.options.objective != "time":
            halves = [kind[: len(kind) >> k] for kind in every for k in range(4)]
            parts += [ranks for ranks in halves if 0 < len(ranks) < self.cluster.size]
        for ranks in dict.fromkeys(parts):
            machines = self.cluster.subset(ranks)
            plans = self._offered(self._plain_layouts(machines), machines)
            swept = sweep(plans, self.workload, machines)
            self.looked += len(plans)
            few = max(int(self.on.budget * PARTS / len(parts)), 2)
            chosen = _diverse(swept, ranked(swept), few)
            yield [(took, p.but(placement=ranks)) for took, p in _offers(swept, chosen)]

    def _least(self) -> float:
        return min((one.predicted for one in self.best.values()), default=float("nan"))

    def ordered(self, best: Found) -> list[Found]:
        """The best pipeline with a searched order of its stages, where that fits."""
        if best.plan.pp < 2 or best.plan.actions or self.on.is_spent:
            return []
        self.progress("order of the stages", best.step)
        plan = with_searched_order(best.plan, self.workload, self.cluster, work=ORDERED)
        return self.on.of([plan]) if plan else []

    def _can_gain(self, planner: PlacementPlanner | FusionPlanner, swept: Swept) -> bool:
        """Whether a method's kernels alone take less than what is known."""
        fuses = isinstance(planner, FusionPlanner)
        bound = FUSED * _data_parallel(swept, 2) if fuses else _data_parallel(swept, 0)
        if self.cluster.size == 1 and not fuses:
            return False  # there is nowhere else to place anything
        if fuses and self.batch % self.cluster.size:
            self.failed[planner.name] = f"{self.batch} samples are not alike on every device"
            return False
        if (fuses or not self.is_mixed) and not bound < self._least():
            self.failed[planner.name] = "no data-parallel step could be shorter"
            return False
        return True

    def record_method(self, planner: PlacementPlanner | FusionPlanner, one: Planned) -> list[Found]:
        """Keep what a method found; a placement, simulated, to change one thing at a time."""
        self.looked += one.evaluations
        if self._accepts(one.plan) and (one.prediction is None or one.prediction.fits):
            self.best[planner.name] = one
        if isinstance(planner, FusionPlanner) or one.stopped:
            return []
        self.on.budget += min(len(list(self.on.neighbours(one.plan))), 2 * HEAD) + 4
        return self.on.of([one.plan])

    def record_changed(self, one: Planned, start: Found, end: Found) -> None:
        """Keep a placement with other kernels where it is shorter."""
        if end.cost < self._worth(one) and end.plan != start.plan:
            self.record(end, "placement, compiled")

    def answer(self, swept: Swept, bound: float) -> Planned:
        """The shortest step, with what all found and cost."""
        name, best = min(self.best.items(), key=lambda item: (self._worth(item[1]), item[0]))
        baselines = {
            f"{n}: {k}": v for n, one in self.best.items() for k, v in one.baselines.items()
        }
        baselines |= _strategies(swept, self.on.known, self.workload, self.cluster)
        baselines |= {n: one.predicted for n, one in self.best.items() if n != name}
        usual = next(
            (baselines[n] for n in ("data", "fsdp", "zero") if n in baselines), best.baseline
        )
        notes = (f"found by {name}", *best.notes)
        others = [one.prediction for n, one in self.best.items() if n != name and one.prediction]
        others += [prediction for one in self.best.values() for prediction in one.alternatives]
        apart = {str(p.plan): p for p in sorted(others, key=lambda p: (p.step, str(p.plan)))}
        apart.pop(str(best.plan), None)
        alternatives = tuple(p for p in apart.values() if self.on.worth(p) >= self._worth(best))
        is_time = self.options.objective == "time"
        if not is_time:
            notes += (self._spent(best),)
        notes += reasons(best.prediction, alternatives, self.cluster)
        notes += _long_run(best.prediction, self.cluster)
        notes += tuple(f"{other}: {why}" for other, why in self.failed.items())
        by_fusion = self.best.get(FusionPlanner.name)
        fused = float("inf") if by_fusion is None else by_fusion.bound or 0.0
        return replace(
            best, baseline=max(usual, best.predicted), baselines=baselines,
            bound=min(bound, fused, best.predicted) if is_time else None,
            evaluations=self.looked + self.on.evaluations,
            cpu=time.process_time() - self.began, notes=notes, alternatives=alternatives,
        )  # fmt: skip

    def _spent(self, best: Planned) -> str:
        """What a step costs by the objective."""
        if self.options.objective == "energy":
            joules = self._worth(best) / 1e3
            return f"{joules:.4g} kJ a step at the board power of the devices it uses"
        return f"{100 * self._worth(best):.4g} cents a step at the price of the nodes it uses"

    def _worth(self, one: Planned) -> float:
        return self.on.worth(one.prediction) if one.prediction is not None else one.predicted


def op_count(workload: Workload) -> int:
    """Ops of one forward and backward."""
    return 2 * sum(layer.times * len(list(layer.works())) for layer in workload.layers)


def _require_known(what: str, key: str, values: Mapping[str, float]) -> None:
    """Raise where a device or node lacks what an objective counts."""
    for name in sorted(name for name, value in values.items() if not value):
        raise InputError(f"the {what} of `{name}` is not known", hint=f"add `{key}` to its file")


def _used_ranks(plan: Plan) -> set[int]:
    """The devices that have work in a plan."""
    if plan.segments:
        return {rank for row in plan.segments for rank in ranks_of(row[1])}
    if plan.groups:
        return {int(item.partition(":")[0]) for row in plan.groups for item in row[3:]}
    return set(plan.placement or range(plan.ranks))


def power(plan: Plan, cluster: Cluster) -> float:
    """Board power of the devices that a plan uses, in watts."""
    return float(sum(cluster.devices[rank].watts for rank in _used_ranks(plan)))


def price(plan: Plan, cluster: Cluster) -> float:
    """Money per second of the nodes that a plan uses."""
    firsts = {int(cluster.nodes[rank]): rank for rank in _used_ranks(plan)}
    return sum(_node_price(cluster, rank) for rank in firsts.values()) / HOUR


def _node_price(cluster: Cluster, rank: int) -> float:
    """Money per hour of the node of a rank; 0 where it is not known."""
    node = cluster.node(rank)
    return node.price or sum(device.price for device in node.devices)


def _kind(plan: Plan) -> str:
    """What starts of a descent are told apart by."""
    if plan.stages:
        return "branches apart"
    return "unlike stages" if plan.segments else strategy(plan)


def ranked(swept: Swept) -> list[int]:
    """Layouts that fit, fastest first by the closed form; ties by their text."""
    mine = np.flatnonzero(swept.fits)
    texts = np.array([str(swept.plans[i]) for i in mine.tolist()], dtype=object)
    found: list[int] = mine[np.lexsort((texts, swept.found.step[mine]))].tolist()
    return found


def _without_recompute(swept: Swept) -> list[Plan]:
    """Layouts whose blocks and recompute may be split by stages, fastest first, fitting or not.

    A pipeline may gain by its cut; one stage only by recompute of some blocks, where it lacks room.
    """
    seen: dict[Plan, None] = {}
    for i in np.argsort(swept.found.step, kind="stable").tolist():
        p = swept.plans[i]
        plain = p.recompute == "none" and p.chunks == 1 and p.schedule == "1f1b" and not p.layers
        split = p.filter * p.channel > 1 or p.spatial
        gains = p.zero < 2 or p.dp == 1 if p.pp > 1 else swept.found.missing[i] > 0
        if plain and not split and gains:
            seen.setdefault(p)
    return list(seen)


def _diverse(swept: Swept, order: list[int], most: int) -> list[int]:
    """The first layouts in order, and among them the first three of every strategy.

    One that runs more again than it must, or that the closed form cannot tell from one before, is
    left out.
    """
    of_strategy: dict[str, int] = {}
    firsts, seen, fits = list[int](), set[object](), {swept.plans[i] for i in order}
    good = []
    for i in order:
        plan = swept.plans[i]
        name, again = strategy(plan), plan.recompute
        same = name, plan.micro_batch, plan.framework, round(float(swept.found.step[i]), 12)
        less = {"none": (), "selective": ("none",), "full": ("none", "selective")}[again]
        if same in seen or any(plan.but(recompute=word) in fits for word in less):
            continue
        seen.add(same)
        good.append(i)
        if of_strategy.get(name, 0) < 3:
            of_strategy[name] = of_strategy.get(name, 0) + 1
            firsts.append(i)
    half = max(most // 2, 1)
    return list(dict.fromkeys([*good[:half], *firsts]))[:most]


def _offers(swept: Swept, chosen: list[int]) -> Offers:
    """Some layouts with their closed form."""
    return [(float(swept.found.step[i]), swept.plans[i]) for i in chosen]


def _data_parallel(swept: Swept, zero: int) -> float:
    """Seconds that kernels and update of a data-parallel step take, at the least, up to a ZeRO.

    Of one that does not fit too: the methods shard, split and recompute where that is needed.
    """
    alone = np.array([p.ranks == p.dp and p.zero <= zero for p in swept.plans], bool)
    took = (swept.found.compute + swept.found.update)[alone]
    return float(took.min()) if len(took) else float("inf")


def _strategies(
    swept: Swept, known: Mapping[str, Prediction | None], workload: Workload, cluster: Cluster
) -> dict[str, float]:
    """The best layout of every strategy that fits: of those simulated, or simulated now."""
    simulated = dict[str, float]()
    predicted = {Plan.parse(text): one for text, one in known.items()}
    for i in np.flatnonzero(swept.fits).tolist():
        name, one = strategy(swept.plans[i]), predicted.get(swept.plans[i])
        if one is not None and one.fits:
            simulated[name] = min(simulated.get(name, float("inf")), one.step)
    rest = by_strategy(swept, workload, cluster, simulated)
    return simulated | {name: one.prediction.step for name, one in rest.items() if one.fits}


def lower_bound(plans: Sequence[Plan], workload: Workload, cluster: Cluster, batch: int) -> float:
    """Seconds that a step takes at the least, whatever plan is made of such parts.

    Of each layer ℓ and kind of device k, with w[ℓ, k] the least seconds of one rank that a sample's
    kernels take there under any way to split it, any micro-batch and framework that is tried, this
    is a batch whose samples pass every layer somewhere (→ `shared_work`). Nothing waits, nothing is
    sent, nothing is run again.
    """
    if not plans:
        return 0.0
    cells = _cells(plans, workload, cluster, batch)
    devices: dict[str, Device] = {d.name: d for d in cluster.devices}
    many = np.array([sum(d.name == name for d in cluster.devices) for name in devices], float)
    work = np.stack([_work(cells, workload, cluster, d) for d in devices.values()], axis=1)
    return SLACK * batch * shared_work(work, many)


def _cells(plans: Sequence[Plan], workload: Workload, cluster: Cluster, batch: int) -> list[Plan]:
    """Every way that layers are split among these plans, each with all sizes of micro-batch."""
    different = {_split(plan): plan for plan in reversed(plans)}.values()
    plain = [p.but(recompute="none", recompute_layers=0) for p in reversed(different)]
    checked = [check(p, workload, cluster) for p in plain]
    firsts, _ = columns([p.but(micro_batch=1) for p in checked]).cells()
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
    program = plan.framework, plan.precision, plan.dtype, plan.compile
    hidden = plan.tp_overlap, plan.ep_overlap, plan.ep_dispatch, plan.cuda_graph
    return degrees, program, hidden, plan.zero, plan.pp > 1


def _work(cells: list[Plan], workload: Workload, cluster: Cluster, device: Device) -> Array:
    """The least rank-seconds of one sample's kernels in each layer, all its repetitions."""
    priced = costs(cells, workload, cluster, device)
    inner = np.array([p.ranks / p.dp / p.pp / p.micro_batch for p in cells])
    inner = inner * np.array([slowdown(p, cluster) for p in cells])
    out = [
        layer.times * float(((cost.forward.kernels + cost.backward.kernels) * inner).min())
        for layer, cost in zip(workload.layers, priced.layers, strict=True)
    ]
    return np.array(out)


def next_best(ranked: Sequence[Prediction], most: int) -> tuple[Prediction, ...]:
    """The plans behind the first, each slower than the one before by more than can be told."""
    found: list[Prediction] = list(ranked[:1])
    for one in ranked[1:]:
        if len(found) <= most and one.step > found[-1].step * (1 + SAME):
            found.append(one)
    return tuple(found[1:])


def reasons(
    best: Prediction | None, others: Sequence[Prediction], cluster: Cluster
) -> tuple[str, ...]:
    """What a reader should know of the answer, a sentence each."""
    if best is None:
        return ()
    notes = [_bottleneck(best), _binding(best, cluster)]
    apart = [p for p in others if p.step > best.step * (1 + SAME)]
    if apart:
        notes.append(_next(best, apart[0]))
    return tuple(notes)


def _long_run(best: Prediction | None, cluster: Cluster) -> tuple[str, ...]:
    """On many devices: what failures and checkpoints leave of the time."""
    if best is None or cluster.size < FAILING:
        return ()
    from foretell.search.purchase import goodput

    share = goodput(best, cluster)
    return (
        f"goodput {_percent(share)} with failures and checkpoints: "
        f"{best.step / share:.4g} s a step over a long run",
    )


def _bottleneck(best: Prediction) -> str:
    """Where the step goes."""
    parts = sorted(best.breakdown.items(), key=lambda item: -item[1])
    shares = [
        f"{_SPENT.get(name, name)} {_percent(took / best.step)}"
        for name, took in parts
        if took > 0.03 * best.step
    ]
    return f"bottleneck: {', '.join(shares)} of the step"


def _binding(best: Prediction, cluster: Cluster) -> str:
    """The constraint that decides what else could be chosen."""
    share = best.peak / (min(d.memory for d in cluster.devices) * USABLE)
    most = max(best.breakdown.items(), key=lambda item: item[1])[0]
    if share > FULL:
        return f"binding constraint: memory, {best.peak / 2**30:.1f} GiB on the fullest rank"
    if most == "compute_s":
        return "binding constraint: the devices' compute rate; memory has room left"
    return f"binding constraint: {_SPENT.get(most, most)}; memory has room left"


def _next(best: Prediction, other: Prediction) -> str:
    """What the next plan that differs costs, and how sure it is that it is slower."""
    more = other.step / best.step - 1
    odds = chance(best, other)
    changed = difference(best.plan, other.plan)
    return (
        f"next best ({changed}) takes {_percent(more)} longer; the first is faster with "
        f"probability {_percent(odds)} if their errors are independent"
    )


def chance(best: Prediction, other: Prediction) -> float:
    """Probability that one plan is faster than another, from the intervals of both."""
    sigma = math.hypot(*(math.log(p.high / p.low) / (2 * EIGHTY_PERCENT) for p in (best, other)))
    if not sigma:
        return 1.0 if best.step < other.step else 0.5
    return 0.5 * (1 + math.erf(math.log(other.step / best.step) / (sigma * math.sqrt(2))))


def difference(one: Plan, other: Plan, most: int = 4) -> str:
    """The fields in which another plan differs, as text."""
    hidden = ("model", "cluster", "placement")
    before, after = (
        {n: v for n, _, v in (part.partition("=") for part in str(p).split(",")) if n not in hidden}
        for p in (one, other)
    )
    changed = [f"{n}={v}" for n, v in after.items() if before.get(n) != v]
    changed += [f"no {n}" for n in before if n not in after]
    short = [text if len(text) <= 40 else f"other {text.partition('=')[0]}" for text in changed]
    more = [f"{len(short) - most} more"] if len(short) > most else []
    return ", ".join([*short[:most], *more]) or "the same fields"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
