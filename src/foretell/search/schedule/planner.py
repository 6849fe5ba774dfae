"""Pipelines as plans: stages placed in every shape that fits, each with a searched schedule."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from foretell.cluster import Cluster
from foretell.errors import ForetellError, InputError
from foretell.graph.show import span
from foretell.plan import Plan
from foretell.search.kit import Planned, Planner, Progress, silent
from foretell.search.schedule.best import Solved, best
from foretell.search.schedule.find import WORK
from foretell.search.schedule.model import Model, models
from foretell.workload import Workload

_FIXED = ("1f1b", "1f1b+", "gpipe")  # what people run without a search


@dataclass(frozen=True)
class PipelinePlanner(Planner):
    """Place stages in every shape that fits and search the order of their work."""

    name: ClassVar[str] = "schedule"
    method: ClassVar[str] = "search"
    source: ClassVar[str] = "our own: exact and annealed schedules of Tessel's placements"
    micro_batch: int = 1  # samples of one micro-batch
    work: float = WORK  # seconds of work for all shapes, about CPU seconds

    def plan(self, workload: Workload, cluster: Cluster, progress: Progress = silent) -> Planned:
        """The quickest pipeline for the workload's samples on every rank."""
        began = time.process_time()
        samples = workload.batch * cluster.size
        if samples % self.micro_batch:
            raise InputError(
                f"{samples} samples in micro-batches of {self.micro_batch}",
                hint="give a micro-batch that divides them",
            )
        num, given = samples // self.micro_batch, Plan(micro_batch=self.micro_batch)
        found = models(workload, cluster, plan=given, micro_batches=num)
        every = best(
            found, num, method=self.method, work=self.work,
            progress=lambda what, value, bound: progress(f"{what} {value:.4g}", value),
        )  # fmt: skip
        fixed = self._baselines(found, num)
        steps = {name: one.prediction.step for name, one in fixed.items()}
        first = min([every[0], *fixed.values()], key=lambda one: one.prediction.step)
        kept = tuple(f"order of {name}: none found is shorter" for name in fixed
                     if fixed[name] is first)  # fmt: skip
        return Planned(
            first.plan,
            first.prediction.step,
            min(steps.values(), default=first.prediction.step),
            steps,
            None,
            len(every) + len(fixed),
            time.process_time() - began,
            kept + _notes(first, every),
            first.prediction.low,
            first.prediction.high,
            stopped=any(one.schedule.stopped == "interrupted" for one in every),
        )

    def _baselines(self, found: list[Model], num: int) -> dict[str, Solved]:
        """The quickest pipeline of each fixed schedule that fits."""
        out: dict[str, Solved] = {}
        for name in _FIXED:
            with suppress(ForetellError):
                out[name] = best(found, num, method=name)[0]
        return out


@dataclass(frozen=True)
class Tessel(PipelinePlanner):
    """Tessel: every assignment of micro-batches to blocks, then warm-up and cool-down apart."""

    name: ClassVar[str] = "tessel"
    method: ClassVar[str] = "tessel"
    source: ClassVar[str] = "Lin et al., Tessel, HPCA 2024, on CP-SAT in place of Z3"
    work: float = 60.0  # seconds of work for all shapes

    def own(self) -> Planner:
        """Our schedules, with as many seconds of work."""
        return PipelinePlanner(self.micro_batch, self.work)


def _notes(first: Solved, every: list[Solved]) -> tuple[str, ...]:
    found = first.schedule
    bound = "proven minimal" if found.proven else f"bound {span(found.lower_bound)}"
    shapes = ", ".join(f"{s.model.shape} {1e3 * s.per_sample:.4g} ms" for s in every)
    return (
        f"shape {first.model.shape}, {len(first.plan.stages)} stages, "
        f"{span(found.per_micro_batch)} a micro-batch ({bound})",
        f"a sample by shape: {shapes}",
        *((f"decided: {', '.join(first.taken)}",) if first.taken else ()),
    )
