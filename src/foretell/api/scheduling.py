"""In which order the blocks of a pipeline run: of a placement, or of a model on a cluster.

foretell.schedule("v:devices=4", micro_batches=8)
foretell.schedule("gpt:layers=24,hidden=2048,heads=16", "dgx-a100:gpus=8")
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from foretell.api.planning import machines, workload_of
from foretell.api.result import Plot, Result, Table
from foretell.cluster import Cluster
from foretell.errors import InputError
from foretell.plan import Plan
from foretell.report import words
from foretell.report.words import width
from foretell.search.schedule import Problem, Schedule, load, shape
from foretell.search.schedule import schedule as find_schedule
from foretell.search.schedule.find import (
    WORK,
    SolvedModel,
    choose_options,
    require_limit,
    solve_models,
    time_left,
)
from foretell.search.schedule.model import Model
from foretell.search.schedule.model import model as model_of_shape
from foretell.search.schedule.model import models as models_of_shapes
from foretell.search.schedule.problem import lags_as_messages
from foretell.search.schedule.schedule import cache_folder, svg
from foretell.search.schedule.schedule import text as drawn

_EARLY = {"time": ", stopped by the time limit", "interrupted": ", interrupted: the best so far"}
Numbers = float | Sequence[float] | None  # one for all devices, or one for each
Decide = Literal["no", "yes", "auto"]
Overlap = Literal["beside", "link", "stop"]
Progress = Callable[[str, float, float], None]  # what is searched, the best value, its bound


@dataclass(frozen=True, eq=False, repr=False)
class ScheduleResult(Result):
    """A schedule of a placement's blocks: period, makespan, bounds, and every start time."""

    schedule: Schedule
    choices: tuple[str, ...] | None = None  # stages that recompute or offload

    @property
    def stopped(self) -> bool:
        """Whether Ctrl-C ended the search: the answer is the best so far."""
        return self.schedule.stopped == "interrupted"

    @property
    def verdict(self) -> str:
        found = self.schedule
        cached = (", cached" if found.is_cached else "") + _EARLY.get(found.stopped, "")
        return (
            f"period {found.per_micro_batch:g} per micro-batch ({rate_bound(found, self._unit)}), "
            f"makespan {found.makespan:g} for {found.micro_batches} micro-batches "
            f"({makespan_bound(found, self._unit)}), peak memory {max(found.peak_memory):g}, "
            f"{found.search_cpu:.2f} CPU-s{cached}"
        )

    def details(self, verbose: bool = False) -> list[str | Table]:
        taken = [f"decided: {', '.join(self.choices)}"] if self.choices else []
        return [*taken, ""]

    def text(self, verbose: bool = False) -> str:
        return f"{super().text(verbose)}\n{drawn(self.schedule, width(), self._unit)}"

    @staticmethod
    def _unit(value: float) -> str:
        """A time of the schedule as text; a placement's has no unit."""
        return f"{value:.4g}"

    def to_dict(self) -> dict[str, Any]:
        more = {} if self.choices is None else {"choices": list(self.choices)}
        return self.schedule.answer() | more

    def records(self) -> list[dict[str, Any]]:
        """One row a block and micro-batch."""
        blocks = self.schedule.problem.blocks
        return [
            {"device": device, "block": blocks[s.block].name, "kind": blocks[s.block].kind,
             "micro_batch": s.micro_batch, "start": s.start, "end": s.end}
            for s in self.schedule.spans
            for device in blocks[s.block].devices
        ]  # fmt: skip

    def plot(self) -> Plot:
        """Every device over time."""
        return Plot(self.verdict, svg(self.schedule))

    def _repr_html_(self) -> str:
        from foretell.graph.show import headed

        return headed(self.verdict, svg(self.schedule))


@dataclass(frozen=True, eq=False, repr=False)
class ModelSchedule(ScheduleResult):
    """The schedule of a model on a cluster: the plan that runs it, and its predicted step."""

    every: tuple[SolvedModel, ...] = ()  # of every pipeline shape that fits, fastest first
    _unit = staticmethod(words.seconds)

    @property
    def stopped(self) -> bool:
        """Whether Ctrl-C ended the search of any shape."""
        return any(one.schedule.stopped == "interrupted" for one in self.every)

    @property
    def plan(self) -> Plan:
        """The plan with its stages and the order of their actions."""
        return self.every[0].plan

    @property
    def predicted(self) -> float:
        """Seconds of a step."""
        return self.every[0].prediction.step

    @property
    def verdict(self) -> str:
        first, found = self.every[0], self.schedule
        return (
            f"shape {first.model.shape}: {words.seconds(self.predicted)} a step of "
            f"{first.plan.global_batch} samples, {words.percent(found.bubble)} bubble, "
            f"{words.size(first.prediction.peak)} on the fullest rank"
        )

    def details(self, verbose: bool = False) -> list[str | Table]:
        first, found = self.every[0], self.schedule
        each = (
            f"period {words.seconds(found.per_micro_batch)} per micro-batch "
            f"({rate_bound(found, self._unit)}), makespan {words.seconds(found.makespan)} "
            f"({makespan_bound(found, self._unit)}), "
            f"{found.search_cpu:.2f} CPU-s{_EARLY.get(found.stopped, '')}"
        )
        taken = [f"decided: {', '.join(first.taken)}"] if first.taken else []
        stages = [(str(s), t[0], " ".join(t[1:])) for s, t in enumerate(first.plan.stages)]
        placed = (
            [Table(("stage", "ranks", "layers"), stages)] if verbose or len(stages) <= 8 else []
        )
        shapes = [
            (s.model.shape, words.seconds(s.per_sample), f"{s.per_sample / first.per_sample:.2f} ×")
            for s in self.every
        ]
        more = [Table(("shape", "per sample>", "vs. the best>"), shapes)] if len(shapes) > 1 else []
        return [each, *taken, *placed, *more, ""]

    def to_dict(self) -> dict[str, Any]:
        first = self.every[0]
        return {
            **self.schedule.answer(),
            "shape": first.model.shape,
            "step_s": first.prediction.step,
            "peak_bytes": first.prediction.peak,
            "fits": first.prediction.fits,
            "stages": [list(texts) for texts in first.plan.stages],
            "choices": list(first.taken),
            "shapes": {s.model.shape: s.per_sample for s in self.every},
        }


def schedule(
    placement: Any,
    cluster: str | Cluster | None = None,
    *,
    micro_batches: int = 8,
    memory: Numbers = None,
    speed: Numbers = None,
    pipeline: str = "auto",
    plan: str | Plan = "",
    infer: bool = False,
    split: bool = False,
    recompute: Decide = "auto",
    offload: Decide = "no",
    frozen: Sequence[str] = (),
    overlap: Overlap = "beside",
    method: str = "search",
    work: float = WORK,
    time_limit: float | None = None,
    cache: Path | Literal["default"] | None = "default",
    progress: Progress = lambda doing, value, bound: None,
) -> ScheduleResult:
    """The order of a pipeline's blocks with the least time a micro-batch, then the least makespan.

    `placement` is a shape (`v:devices=4`), a file or a `Problem`; with a cluster it is a model, and
    the pipeline shape, stages and times are worked out (then the answer is a `ModelSchedule`).
    `work` is the budget, counted in about CPU seconds; `time_limit` is a cap of the clock besides.
    """
    require_limit(time_limit)
    ends = None if time_limit is None else time.monotonic() + time_limit
    kept = cache_folder() if cache == "default" else cache
    limits: dict[str, Any] = {"method": method, "cache": kept, "progress": progress, "work": work}
    if cluster is not None:
        found = pipelines(
            placement, cluster, micro_batches=micro_batches, shape=pipeline, plan=plan, infer=infer,
            split=split, recompute=recompute, offload=offload, frozen=frozen, overlap=overlap,
            ends=ends,
        )  # fmt: skip
        every = solve_models(found, micro_batches, time_limit=time_left(ends), **limits)
        return ModelSchedule(every[0].schedule, every[0].taken, tuple(every))
    require_model(
        {"plan": plan, "infer": infer, "split": split, "frozen": frozen, "pipeline": pipeline}
    )
    problem = problem_of(placement, memory=memory, speed=speed, overlap=overlap)

    taken = choose_options(problem, micro_batches, ends) if problem.choices else None
    chosen = problem if taken is None else problem.choosing(taken)
    one = find_schedule(chosen, micro_batches, time_limit=time_left(ends), **limits)
    return ScheduleResult(one, taken)


def problem_of(
    placement: Any, *, memory: Numbers = None, speed: Numbers = None, overlap: Overlap = "beside"
) -> Problem:
    """A placement on devices of other sizes and speeds, with messages that overlap or do not."""
    problem = placement if isinstance(placement, Problem) else _read(os.fspath(placement))
    num = problem.num_devices
    if overlap != "beside":
        problem = lags_as_messages(problem, overlap)
    links = problem.num_devices - num  # they hold nothing, and are as quick as they are
    if memory is not None:
        each = _each(memory, "memory", num)
        problem = replace(problem, capacity=(*each, *problem.capacity[num:]))
    if speed is not None:
        each = _each(speed, "speed", num)
        problem = replace(problem, speed=(*each, *(1.0,) * links))
    return problem


def pipelines(
    model: Any,
    cluster: str | Cluster,
    *,
    shape: str = "auto",
    plan: str | Plan = "",
    infer: bool = False,
    ends: float | None = None,
    **options: Any,
) -> list[Model]:
    """The scheduling problems of a model on a cluster: of one shape, or of all that fit."""
    where = workload_of(model), machines(cluster)
    options["mode"] = "infer" if infer else "train"
    options["plan"] = (Plan.parse(plan) if isinstance(plan, str) else plan) if plan else None
    if shape == "auto":
        return models_of_shapes(*where, **options, ends=ends)
    return [model_of_shape(*where, shape, **options)]


def rate_bound(found: Schedule, unit: Callable[[float], str]) -> str:
    """How far the period may be from the minimum."""
    if found.proven_unroll is None:
        return "proven minimal"
    upto = f", optimal up to {found.proven_unroll} per pattern" if found.proven_unroll else ""
    return f"bound {unit(found.lower_bound)}, gap {100 * found.gap:.1f} %{upto}"


def makespan_bound(found: Schedule, unit: Callable[[float], str]) -> str:
    """How far the makespan may be from the minimum."""
    if found.makespan_gap < 1e-9:
        return "proven minimal"
    return f"bound {unit(found.makespan_bound)}, gap {100 * found.makespan_gap:.1f} %"


def _read(text: str) -> Problem:
    path = Path(text)
    is_file = path.exists() or path.suffix == ".json" or "/" in text
    return load(path) if is_file else shape(text)


def require_model(options: dict[str, Any]) -> None:
    """Raise where an option for models is given with a bare placement."""
    given = [name for name in ("plan", "infer", "split", "frozen") if options[name]]
    given += ["shape"] if options["pipeline"] != "auto" else []
    if given:
        raise InputError(
            f"--{given[0]} is for a model, and this is a placement",
            hint="name a cluster with --on, or say it in the shape: v:devices=4,split=yes",
        )


def _each(value: float | Sequence[float], option: str, devices: int) -> tuple[float, ...]:
    """One number for all devices, or one for each."""
    found = tuple(float(v) for v in (value if isinstance(value, Sequence) else (value,)))
    if len(found) not in (1, devices):
        given = ",".join(f"{v:g}" for v in found)
        raise InputError(
            f"--{option} {given} for {devices} devices", hint="give one number, or one for each"
        )
    return found if len(found) == devices else found * devices
