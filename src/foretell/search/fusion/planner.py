"""Which ops to fuse and which gradients to send together: the planner behind `--with fusion`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Literal

from foretell.cluster import Cluster
from foretell.errors import InfeasibleError, InputError
from foretell.graph import Graph
from foretell.plan import Plan, read
from foretell.search.fusion.fused_step import (
    buckets_from,
    fusion_of,
    plan_of,
    referred,
    run_of,
    scale_of,
)
from foretell.search.fusion.problem import Memory, Problem, from_workload, problem_of_graph
from foretell.search.fusion.score import Bounds, Evaluator, Scored, bounds, of_kernels
from foretell.search.fusion.search import (
    Backtrack,
    Run,
    backtrack,
    baselines,
    begun,
    climb,
    load_trail,
    save_trail,
)
from foretell.search.fusion.state import unfused
from foretell.search.kit import Planned, Planner, Progress, silent
from foretell.workload import Workload


@dataclass(frozen=True, eq=False)
class Found:
    """The best way to fuse, and what it was compared with."""

    best: Scored
    baselines: Mapping[str, Scored]
    bounds: Bounds
    run: Run
    stopped: bool = False  # by Ctrl-C, before its limits were reached


@dataclass(frozen=True)
class FusionPlanner(Planner):
    """Fuse ops and send gradients together, decided jointly for a data-parallel step."""

    name: ClassVar[str] = "fusion"
    source: ClassVar[str] = "Yi et al., DisCo, TPDS 2022 (method=backtrack); climb is our own"
    method: Literal["climb", "backtrack"] = "climb"
    evaluations: int = 4_000  # at most
    seconds: float = 0.0  # CPU seconds, at most; 0 for no limit, and the same answer everywhere
    seed: int = 0
    batch: int = 0  # samples of one rank; the workload's where 0
    reorder: bool = False  # weight gradients may be put off behind all else
    update: Literal["together", "by-message"] = "together"  # when the optimizer may run
    sharded: bool = False  # reduce-scatter now, all-gather in the next forward (zero=2)
    epilogue: bool = False  # the compiler writes matmuls itself and adds to their end
    learned: bool = True  # prices of fused regions by the network where one ships, else formula
    start: str = ""  # a plan to go on from
    resume: str = ""  # backtrack: a file for where it stops; read where it is there
    runs: bool = False  # buckets of eager ops alone, which need no compiler to run
    alpha: float = 1.05  # backtrack: costs above alpha × best are dropped
    beta: int = 10  # backtrack: changes at once, at most
    patience: int = 1000  # backtrack: states without gain before it ends
    heap: int = 50  # backtrack: states kept

    def plan(self, workload: Workload, cluster: Cluster, progress: Progress = silent) -> Planned:
        """The quickest way to fuse one data-parallel step of a workload."""
        return self._planned(self.problem(workload, cluster), progress)

    def plan_graph(self, graph: Graph, cluster: Cluster, progress: Progress = silent) -> Planned:
        """The same for a captured step."""
        return self._planned(self.problem(graph, cluster), progress)

    def problem(self, model: Workload | Graph, cluster: Cluster) -> Problem:
        """What is to be fused: the step as it is, or the quickest way that fits into memory."""
        options: dict[str, Any] = {"epilogue": self.epilogue, "learned": self.learned}
        if isinstance(model, Graph):
            plain = referred(problem_of_graph(model, cluster, **options), model, cluster)
            if _fits(plain):
                return plain
            return referred(problem_of_graph(model, cluster, **options, zero=2), model, cluster)
        sized = replace(model, batch=self.batch) if self.batch else model
        options["run"] = run_of(sized)
        plain = referred(from_workload(sized, cluster, **options), sized, cluster)
        if _fits(plain):
            return plain
        return _fitting(sized, cluster, options) or plain

    def search(self, problem: Problem, progress: Progress = silent) -> Found:
        """The best way found; never longer than any baseline."""
        by_message = self.update == "by-message"
        rivals = baselines(Evaluator(problem, by_message, problem.zero == 2))
        judge = Evaluator(problem, by_message, self.sharded or problem.zero == 2)
        run = Run(judge, self.seconds, self.evaluations, _telling(progress))
        if self.runs:
            rivals = {name: r for name, r in rivals.items() if not r.fusion.members}
        for rival in rivals.values():
            run.see(rival)
        judge.evaluations += len(rivals)
        start = _started(judge, read(self.start)) if self.start else None
        stopped = False
        try:
            self._improve(run, start)
        except KeyboardInterrupt:
            stopped = True
        assert run.best is not None
        assert run.shortest is not None
        return Found(run.best, rivals, bounds(judge, run.shortest), run, stopped)

    def _improve(self, run: Run, start: Scored | None) -> None:
        """Search from the baselines on; the run keeps the best."""
        if self.runs:
            run.see(run.judge.score(unfused(run.judge.problem)))
        elif self.method == "backtrack":
            self._backtrack(run, start)
        else:
            first = start.fusion if start is not None else None
            climb(run, seed=self.seed, start=first, reorder=self.reorder)

    def _backtrack(self, run: Run, start: Scored | None) -> None:
        """The paper's search from its beginning, or from where a file says it stopped."""
        how = Backtrack(self.alpha, self.beta, self.patience, self.heap)
        asked = {"seed": self.seed, "start": self.start, "alpha": self.alpha, "beta": self.beta}
        asked |= {"heap": self.heap}
        path = Path(self.resume) if self.resume else None
        if path is not None and path.is_file():
            trail = load_trail(run, path, asked)
        else:
            trail = begun(run, seed=self.seed, start=start)
        backtrack(run, how, trail)
        if path is not None:
            save_trail(trail, run, path, asked)

    def _require_runs(self) -> None:
        if self.resume and self.method != "backtrack":
            raise InputError(
                f"`resume={self.resume}` beside method={self.method}",
                hint="only method=backtrack is kept in a file; go on from a plan with start=",
            )
        more = [n for n in ("reorder", "sharded", "start") if getattr(self, n)]
        if self.runs and (more or self.update != "together"):
            raise InputError(
                f"`runs=yes` beside {', '.join(more) or 'update=by-message'}",
                hint="it asks for buckets of eager ops, updated together",
            )

    def _planned(self, problem: Problem, progress: Progress) -> Planned:
        began = time.process_time()
        self._require_runs()
        _require_room(problem, self.start)
        found = self.search(problem, progress)
        best, scale = found.best, scale_of(problem)
        steps = {name: scale * rival.step for name, rival in found.baselines.items()}
        return Planned(
            self._written(best),
            scale * best.step,
            min(steps.values()),
            steps,
            scale * found.bounds.proven,
            found.run.judge.evaluations,
            time.process_time() - began,
            _notes(found, self, scale),
            stopped=found.stopped,
        )

    def _written(self, best: Scored) -> Plan:
        """The plan of what was found, with the batch where it was given or had to be cut."""
        problem = best.fusion.problem
        plan = plan_of(best).but(update=self.update, global_batch=self.batch * problem.wire.ranks)
        if problem.repeats == 1:
            return plan
        ranks, micro = problem.wire.ranks, problem.samples
        return plan.but(micro_batch=micro, global_batch=micro * problem.repeats * ranks)


@dataclass(frozen=True)
class Disco(FusionPlanner):
    """DisCo's own search: random fusions on a heap, pruned by cost."""

    name: ClassVar[str] = "disco"
    source: ClassVar[str] = "Yi et al., DisCo, TPDS 2022, algorithm 1"
    method: Literal["climb", "backtrack"] = "backtrack"

    def own(self) -> Planner:
        """The climb, with as many evaluations."""
        mine = {f.name: getattr(self, f.name) for f in fields(FusionPlanner)}
        return FusionPlanner(**mine | {"method": "climb", "resume": ""})


def _fits(problem: Problem) -> bool:
    return unfused(problem).held <= problem.room


def _fitting(workload: Workload, cluster: Cluster, options: dict[str, Any]) -> Problem | None:
    """The quickest of ZeRO, recompute and accumulation that fits, nothing fused; None if none."""
    found: list[tuple[float, int, Problem]] = []
    for turn, (zero, recompute) in enumerate(product((0, 2), (False, True))):
        for repeats in (k for k in range(1, workload.batch + 1) if workload.batch % k == 0):
            memory = Memory(repeats, recompute, zero)
            problem = from_workload(workload, cluster, **options, memory=memory)
            problem = referred(problem, workload, cluster)
            if _fits(problem):
                scored = Evaluator(problem, sharded=zero == 2).score(unfused(problem))
                found.append((scale_of(problem) * scored.step, turn, problem))
                break
            if problem.held > problem.room:
                break  # smaller micro-batches do not help
    return min(found, key=lambda one: one[:2])[2] if found else None


def _started(judge: Evaluator, plan: Plan) -> Scored:
    """The step of a plan to go on from, with its messages where it names any."""
    fusion = fusion_of(plan, judge.problem)
    return judge.score(fusion, buckets_from(plan, judge.problem) if plan.buckets else None)


def _telling(progress: Progress) -> Callable[[float, float, int], None]:
    def tell(step: float, bound: float, many: int) -> None:
        progress(f"{many} evaluations, bound {bound:.6g} s", step)

    return tell


def _require_room(problem: Problem, start: str) -> None:
    if start and not Path(start).is_file():
        raise InputError(f"there is no plan `{start}` to go on from")
    held = unfused(problem).held
    if held > problem.room:
        raise InfeasibleError(
            f"`{problem.model}` keeps {held / 2**30:.1f} GiB on each rank; "
            f"`{problem.device.name}` has {problem.room / 2**30:.1f}",
            hint="neither ZeRO, recompute nor accumulation makes it fit: take more ranks",
        )


def _notes(found: Found, asked: FusionPlanner, scale: float) -> tuple[str, ...]:
    best = found.best
    problem, fusion = best.fusion.problem, best.fusion
    sizes = [float(problem.sizes[b].sum()) for b in best.buckets.lists()]
    overlap, bound = of_kernels(found.run.judge, best)
    ways = sorted({problem.wire.way(s) for s in sizes})
    notes = [
        f"{len(problem)} ops in {fusion.num_groups} kernels, {int(fusion.copied.sum())} recomputed",
        f"{len(problem.gradients)} gradients in {len(sizes)} messages ({', '.join(ways)})",
        f"the same kernels with the best messages there could be: "
        f"{scale * bound:.6g} s; with nothing waiting for anything: {scale * overlap:.6g} s",
    ]
    if problem.repeats > 1 or problem.recompute or problem.zero:
        notes.append(_memory_note(problem))
    if fusion.late.any():
        late = int(fusion.late.sum())
        notes.append(f"{late} weight gradients put off to the end")
    if best.gathers is not None:
        many = len(best.gathers)
        notes.append(
            f"parameters gathered in {many} messages while the forward runs (as FSDP does)"
        )
    if best.buckets.parts.max() > 1:
        notes.append(f"messages in parts: {best.buckets.parts.tolist()}")
    return tuple(notes)


def _memory_note(problem: Problem) -> str:
    """What the step does to fit into memory."""
    said = [f"{problem.repeats} micro-batches of {problem.samples}"] * (problem.repeats > 1)
    said += ["blocks recomputed"] * problem.recompute
    said += ["gradients and optimizer state sharded (ZeRO-2)"] * bool(problem.zero)
    return f"to fit into memory: {', '.join(said)}"
