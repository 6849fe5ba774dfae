"""One plan predicted, and the best plan searched for.

foretell.predict("llama-3.1-8b", "dgx-h100:nodes=2", dp=2, tp=8)
best = foretell.plan("llama-3.1-8b", "dgx-h100:nodes=2")
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell import spec
from foretell.api.result import Bar, Plot, Result, Table, bars
from foretell.cluster import Cluster
from foretell.cluster import load as load_cluster
from foretell.errors import InputError
from foretell.graph import Graph
from foretell.plan import Plan, read, save
from foretell.plan.plan import FILES, predicted
from foretell.predict import Prediction as _Prediction
from foretell.predict.predict import shipped_distances
from foretell.report import words
from foretell.report.words import width
from foretell.search.fusion.fused_step import fuses
from foretell.search.kit import (
    Planned,
    Planner,
    Progress,
    in_order,
    priced,
    renamed,
    repredicted,
    searcher,
    silent,
)
from foretell.search.kit import parse as parse_planner
from foretell.workload import Workload
from foretell.workload import load as load_workload

if TYPE_CHECKING:
    from foretell.pool import Pool

SAME = 1e-9  # of a step: what rounding may change
_COPIED = 240  # letters of a plan that a person would copy
_FEW = 6  # rows of a table that is not verbose

# What a breakdown's keys mean to people.
LABELS = {
    "compute_s": "compute",
    "exchange_s": "TP/CP/EP communication",
    "reduce_s": "gradient reduction, exposed",
    "update_s": "optimizer step",
    "idle_s": "idle (bubble, waiting)",
}
# Reasons for which a measured step may differ from a predicted one (predict/interval.toml).
UNSURE = {
    "any": "software versions, settings and machines vary",
    "field": "no whole step of this framework was measured on such GPUs",
    "arch": "the framework was measured on another GPU generation",
    "amd": "AMD GPUs",
    "scale": "more GPUs than were measured",
    "fp8": "matmuls in 8 or 4 bits",
    "context": "context parallelism",
    "attention": "share of attention, whose kernel is not known",
    "images": "convolutions",
    "experts": "mixture of experts",
    "frozen": "frozen weights (LoRA)",
    "host": "CPU-bound share of the step",
    "lone": "the framework was measured by one source only",
}
HELD = {"optimizers": "optimizer state", "buffers": "communication buffers"}
HELD |= {"rounding": "allocator rounding"}


@dataclass(frozen=True, repr=False)
class Prediction(Result, _Prediction):
    """The predicted step of one plan; seconds and bytes."""

    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        step = f"{words.seconds(self.step)} a step"
        head = f"{step} (80 % interval {words.interval(self.low, self.high)})"
        return f"{head}, {self._utilisation()}; {self._memory()}"

    def _utilisation(self) -> str:
        """MFU, and HFU where something is recomputed."""
        mfu, hfu = words.percent(self.utilisation), words.percent(self.hfu)
        return f"{mfu} MFU" if mfu == hfu else f"{mfu} MFU, {hfu} HFU"

    def _memory(self) -> str:
        peak = words.size(self.peak)
        if self.fits:
            return f"it fits, with {peak} on the fullest rank"
        over = f"out of memory by {words.size(self.missing)}, with {peak} on the fullest rank"
        return f"{over}: {self.advice}" if self.advice else over

    def details(self, verbose: bool = False) -> list[str | Table]:
        total = self.step or 1.0
        spent = [
            (LABELS.get(name, name.removesuffix("_s")), words.seconds(t), words.percent(t / total))
            for name, t in self.breakdown.items()
            if t or verbose
        ]
        found: list[str | Table] = [Table(("busiest stage", "time>", "share>"), spent)]
        if verbose or not self.fits:
            held = [(HELD.get(name, name), words.size(v)) for name, v in self.memory.items()]
            found.append(Table(("memory of the fullest rank", "size>"), held))
        if verbose:
            found += [_interval_from(self.away), words.plan_text(f"plan: {self.plan}")]
        return found + list(self.notes)

    def to_dict(self) -> dict[str, Any]:
        return self.as_json() | ({"notes": list(self.notes)} if self.notes else {})

    def records(self) -> list[dict[str, Any]]:
        return [
            {"part": LABELS.get(name, name), "seconds": t, "share": t / (self.step or 1.0)}
            for name, t in self.breakdown.items()
        ]

    def plot(self) -> Plot:
        rows = [Bar("step", self.step, words.seconds(self.step), self.low, self.high)]
        rows += [
            Bar(LABELS.get(name, name), t, words.seconds(t)) for name, t in self.breakdown.items()
        ]
        return bars(words.cut(f"a step of {self.plan}", 80), rows)


def _interval_from(away: dict[str, float]) -> Table:
    """What makes an interval as wide as it is, and its share of the variance."""
    parts = {name: (shipped_distances()[name].width * share) ** 2 for name, share in away.items()}
    whole = sum(parts.values()) or 1.0
    rows = sorted(parts.items(), key=lambda part: -part[1])
    return Table(
        ("why the interval is this wide", "share of variance>"),
        [(UNSURE[name], words.percent(part / whole)) for name, part in rows],
    )


@dataclass(frozen=True, repr=False)
class PlanResult(Result, Planned):
    """The best plan found, its predicted step, and the plans it was compared with."""

    planner: str = ""
    made_for: Mapping[str, str] = field(default_factory=dict)  # model and cluster

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan, what was predicted of it, and for what: JSON or TOML by the name."""
        stored = {"step_s": self.predicted, "low_s": self.low, "high_s": self.high}
        if self.prediction is not None:
            stored["peak_bytes"] = self.prediction.peak
        save(self.plan, Path(path), stored | dict(self.made_for))

    @property
    def speedup(self) -> float:
        """The baseline over the predicted step."""
        return self.baseline / self.predicted if self.predicted else 1.0

    @property
    def gap(self) -> float | None:
        """By how much of its time a better plan could be ahead, at most; None where unknown."""
        if self.bound is None:
            return None
        return max(0.0, 1 - self.bound / self.predicted) if self.predicted else 0.0

    @property
    def verdict(self) -> str:
        head = (
            f"{words.seconds(self.predicted)} a step "
            f"(80 % interval {words.interval(self.low, self.high)}), "
            f"{words.speedup(self.speedup)} than {self._rival()} ({words.seconds(self.baseline)})"
        )
        if self.prediction is not None:
            head += f"; {words.size(self.prediction.peak)} on the fullest rank"
        gap = self.gap
        if gap is None:
            return head
        if gap < 5e-4:
            return f"{head}; optimal in its search space"
        return f"{head}; optimality gap at most {words.percent(gap)}"

    def details(self, verbose: bool = False) -> list[str | Table]:
        # to be copied; a long one goes to a file as a whole
        text = str(self.plan.but(model="", cluster=""))
        short = words.plan_text(text) if len(text) <= _COPIED else words.cut(text, width())
        found: list[str | Table] = [short]
        rows = [
            (words.strategy(name), words.seconds(t), f"{t / self.predicted:.2f} ×")
            for k, (name, t) in enumerate(self._compared())
            if verbose or k < _FEW or t == self.baseline
        ]
        found.append(Table(("baseline", "step>", "vs. the plan>"), rows))
        others = [
            (words.cut(str(p.plan), 48), words.seconds(p.step), words.size(p.peak))
            for p in self.alternatives
        ]
        if verbose and others:
            found.append(Table(("alternative plan", "step>", "memory>"), others))
        notes = [n for n in self.notes if verbose or not n.startswith("found by")]
        return [*found, *self._spent(), *notes]

    def _rival(self) -> str:
        """The name of the baseline."""
        same = (name for name, t in self._compared() if t == self.baseline)
        return words.strategy(next(same, "the baseline"))

    def _compared(self) -> list[tuple[str, float]]:
        """The baselines, fastest first, without the plan's own search."""
        others = ((n, t) for n, t in self.baselines.items() if n != self.planner.partition(":")[0])
        return sorted(others, key=lambda item: item[1])

    def _spent(self) -> list[str]:
        """Cost of the search, and of our own search of the same space."""
        spent = f"{_search_cost(self)} of CPU time"
        if self.own is None:
            return [spent]
        ahead = words.seconds(self.own.predicted)
        mine = f"our search of the same space: {ahead} a step, {_search_cost(self.own)} of CPU time"
        return [spent, mine]

    def to_dict(self) -> dict[str, Any]:
        return {
            "planner": self.planner,
            "plan": str(self.plan),
            "predicted_s": self.predicted,
            "low_s": self.low,
            "high_s": self.high,
            "baseline_s": self.baseline,
            "baselines": dict(self.baselines),
            "bound_s": self.bound,
            "gap": self.gap,
            "evaluations": self.evaluations,
            "search_cpu_s": self.cpu,
            "alternatives": [
                {"plan": str(p.plan), "step_s": p.step, "peak_bytes": p.peak}
                for p in self.alternatives
            ],
            "notes": list(self.notes),
            **({} if self.own is None else {"own": _as_answer(self.own)}),
        }

    def records(self) -> list[dict[str, Any]]:
        """The plan, then its alternatives, fastest first."""
        first = [self.prediction] if self.prediction else []
        return [
            {"plan": str(p.plan), "step_s": p.step, "low_s": p.low, "high_s": p.high,
             "peak_bytes": p.peak, "mfu": p.utilisation}
            for p in (*first, *self.alternatives)
        ]  # fmt: skip

    def plot(self) -> Plot:
        rows = [
            Bar("this plan", self.predicted, words.seconds(self.predicted), self.low, self.high)
        ]
        rows += [Bar(words.strategy(name), t, words.seconds(t)) for name, t in self._compared()]
        return bars("seconds a step, against the baselines", rows)


def _search_cost(found: Planned) -> str:
    return f"{found.evaluations} plans evaluated in {words.seconds(found.cpu)}"


def _as_answer(own: Planned) -> dict[str, Any]:
    """Our search of a published method's space, under the keys of an answer."""
    return {
        "plan": str(own.plan), "predicted_s": own.predicted, "evaluations": own.evaluations,
        "search_cpu_s": own.cpu,
    }  # fmt: skip


def predict(
    model: Any,
    cluster: str | Cluster,
    plan: str | os.PathLike[str] | Plan | None = None,
    *,
    calibration: str | os.PathLike[str] | None = None,
    **fields: Any,
) -> Prediction:
    """The predicted step of a model under one plan on a cluster: time, memory, breakdown.

    `model` is a name or spec (`llama-3.1-8b`, `gpt:layers=24,…`), a `config.json`, a script, a
    workload or a `Step`. The plan is a spec, a file, a `Plan`, or its fields: `dp=8, tp=2`.
    """
    parsed = _plan(plan, fields)
    workload = _model(model, parsed)
    on = machines(cluster, calibration)
    found = priced(parsed, workload, on)
    notes = [*getattr(workload, "notes", ()), *_difference_from_file(plan, found, workload, on)]
    return Prediction(**vars(found), notes=tuple(notes))


def plan(
    model: Any,
    cluster: str | Cluster,
    planner: str | Planner = "joint",
    *,
    seeds: int = 1,
    calibration: str | os.PathLike[str] | None = None,
    pool: Pool | None = None,
    progress: Progress = silent,
    **options: Any,
) -> PlanResult:
    """The plan with the shortest predicted step that fits: `best.plan`, `best.alternatives`.

    `planner` is a spec: `joint`, `oracle`, `placement`, `fusion:evaluations=500`; its options may
    be given by name too: `evaluations=500`. With `seeds` the search is repeated from other seeds
    and the best answer taken.
    """
    if isinstance(planner, str):
        more = ",".join(f"{name}={spec.write(value)}" for name, value in options.items())
        chosen = parse_planner(f"{planner}{',' if ':' in planner else ':'}{more}".rstrip(":,"))
    else:
        chosen = replace(planner, **options) if options else planner
    on = machines(cluster, calibration)
    workload = _model(model, None, takes_graphs=hasattr(chosen, "plan_graph"))
    search, ranks = searcher(chosen, workload, pool, seeds), in_order(on)
    found = search(workload, on if ranks == tuple(range(on.size)) else on.subset(ranks), progress)
    found = replace(found, plan=renamed(found.plan, ranks, on))
    found, own = repredicted(found, priced(found.plan, workload, on)), chosen.own()
    if own is not None and not found.stopped:  # a published method: our search of its space
        found = replace(found, own=plan(workload, on, own))
    return PlanResult(
        **vars(found),
        planner=str(chosen),
        made_for=_made_for(workload, on),
    )


def _made_for(model: Workload | Graph, cluster: Cluster) -> dict[str, str]:
    """The model, the cluster and the version that a prediction is for."""
    mark = model.fingerprint() if isinstance(model, Workload) else ""
    named = {"model": mark, "cluster": cluster.fingerprint(), "cluster_name": cluster.name}
    return named | {"foretell": version("foretell")}


def _difference_from_file(
    plan: Any, found: _Prediction, model: Workload | Graph, on: Cluster
) -> list[str]:
    """A note where the plan's file predicts something else for the same model and cluster."""
    if not isinstance(plan, str | os.PathLike) or not os.fspath(plan).endswith(FILES):
        return []
    stored, now = predicted(Path(plan)), _made_for(model, on)
    same = all(stored.get(name) == now[name] for name in ("model", "cluster"))
    before = stored.get("step_s")
    if not same or not isinstance(before, float) or abs(found.step / before - 1) <= SAME:
        return []
    by = stored.get("foretell", "another version")
    return [f"the file says {words.seconds(before)} a step, as foretell {by} predicted it"]


def _plan(plan: str | os.PathLike[str] | Plan | None, fields: dict[str, Any]) -> Plan:
    """A plan from a spec, a file or a plan, with fields changed."""
    if plan is None and not fields:
        raise InputError(
            "predict() without a plan",
            hint="name its degrees, predict(model, cluster, dp=8), or search with plan()",
        )
    changes = ",".join(f"{name}={spec.write(value)}" for name, value in fields.items())
    if plan is None:
        return Plan.parse(changes)
    made = plan if isinstance(plan, Plan) else read(os.fspath(plan))
    return made.changed(changes) if changes else made


def _model(model: Any, plan: Plan | None, *, takes_graphs: bool = False) -> Workload | Graph:
    """The workload of a model, or its captured step where plan or planner names single ops."""
    keeps_ops = takes_graphs or (plan is not None and fuses(plan))
    if isinstance(model, Workload):
        return model
    graph = model if isinstance(model, Graph) else getattr(model, "graph", None)
    if isinstance(graph, Graph):
        from foretell.workload.captured import from_graph

        return graph if keeps_ops else from_graph(graph)
    text = os.fspath(model)
    if keeps_ops and text.endswith((".graph", ".txt")):
        from foretell.graph import load

        return load(Path(text))
    return load_workload(text, scripts=True)


def workload_of(model: Any) -> Workload:
    """The workload of a name, a spec, a file, a script or a step."""
    found = _model(model, None)
    assert isinstance(found, Workload)
    return found


def machines(cluster: str | Cluster, calibration: str | os.PathLike[str] | None = None) -> Cluster:
    """The cluster of a spec or a file, with what `foretell fit` has learned of it."""
    found = load_cluster(cluster) if isinstance(cluster, str) else cluster
    if calibration is None:
        return found
    from foretell.cluster.cluster import load

    return found.calibrated(load(Path(calibration)))
