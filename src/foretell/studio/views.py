"""Values the page draws: those of a report, live, and searches with their progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from foretell.advise import TRIED, Recommendations, Step, advise
from foretell.cluster import Cluster
from foretell.errors import InputError
from foretell.report import words
from foretell.report.page import Content, PageTimeline, columns, numbers, packed
from foretell.survey.survey import survey

OnProgress = Callable[
    ..., None
]  # what a search does now, its best so far, what it has found so far
MOST_SPANS = 120_000  # of one view


@lru_cache(6)
def step(of: Step, specs: tuple[str, ...], advised: Recommendations | None) -> dict[str, Any]:
    """The diagnosis of a step and what changes make of it: what a report of them shows."""
    found = survey([of], specs, advice=False, advised=advised)
    return _page(found.timelines, found.content)


def _page(lines: Sequence[PageTimeline], content: Content) -> dict[str, Any]:
    spans, drawn = 0, []
    for line in lines:
        spans += line.timeline.graph.size
        if spans <= MOST_SPANS:
            drawn.append(line)
    found = numbers(lines, content) | {"lines": columns(drawn)}
    if len(drawn) < len(lines):
        missing = ", ".join(line.name for line in lines[len(drawn) :])
        found["notes"] = [*found["notes"], f"{missing}: too many tasks to draw; export a report"]
    return found


def ranked(of: Step, tell: OnProgress) -> Recommendations:
    """Every change that applies, tried."""
    return advise(of, TRIED, lambda spec: tell(f"trying {spec}"))


def plain_answer(answer: Any) -> Any:
    """A search's answer as plain values; that of changes comes with the view."""
    if isinstance(answer, Recommendations):
        return {"changes": len(answer.ranked)}
    return answer


def write(of: Step, specs: Sequence[str], path: Path) -> None:
    """A report or a trace of what is shown."""
    from foretell.report import write as write_report

    found = survey([of], specs, advice=path.suffix == ".html")
    write_report(found.timelines, path, found.content)


def plan(workload: str, text: str, cluster: Cluster) -> str:
    """A plan predicted, drawn on its machines, with its pipeline schedule and timeline."""
    from foretell.plan import Plan
    from foretell.report.drawings import drawn_plan, pipeline
    from foretell.survey.inputs import Sections
    from foretell.survey.planned import page_of
    from foretell.workload import load

    page = page_of(Plan.parse(text or "dp=1"), load(workload, files=False), cluster)
    picture = drawn_plan(page.prediction.plan, workload, cluster)
    if page.prediction.plan.pp > 1 and not picture["schedule"]:
        picture["schedule"] = pipeline(page.timelines[-1][1])
    surveyed = survey([], drawn=Sections(plans=[picture], pages=[page]))
    return packed(_page(surveyed.timelines, surveyed.content))


def plan_outcome(workload: str, text: str, cluster: Cluster) -> dict[str, Any]:
    """A plan's prediction under the keys of a change's outcome; it has no current step."""
    from foretell.plan import Plan
    from foretell.search.kit import priced
    from foretell.workload import load

    found = priced(Plan.parse(text or "dp=1"), load(workload, files=False), cluster)
    return {
        "changes": [], "baseline_s": None, "predicted_s": found.step, "low_s": found.low,
        "high_s": found.high, "gain": None, "per": "step", "peak_bytes": found.peak,
    }  # fmt: skip


def strategies(workload: str, cluster: str, gpus: str, tell: OnProgress) -> list[dict[str, Any]]:
    """Every strategy at every scale, sent as found; and the Pareto front of each scale."""
    from foretell.search.oracle import counts, scaling
    from foretell.studio.machines import sized
    from foretell.workload import load

    model = load(workload, files=False)
    found: list[dict[str, Any]] = []
    for n in counts(gpus):
        machines = sized(cluster, n)
        batch = model.batch * n
        rows = scaling(model, lambda _, m=machines: m, [n], lambda _, b=batch: b, progress=tell)  # type: ignore[misc]
        found += [_strategy_row(row) for row in rows]
        found += _pareto_layouts(model, machines, n, batch, {r["plan"] for r in found})
        fits = [r["samples_per_s"] for r in found if r["fits"]]
        tell(f"{n} GPUs: {len(rows)} strategies", max(fits, default=None), found)
    return _with_front(found)


def _strategy_row(row: Any) -> dict[str, Any]:
    return {
        "gpus": row.gpus, "strategy": words.strategy(row.strategy), "step_s": row.step,
        "peak_bytes": row.peak, "fits": row.missing == 0, "plan": str(row.plan),
        "samples_per_s": row.samples,
        "cost": row.money / row.batch if row.money else None, "mfu": row.utilisation,
        "says": "; ".join(f.name for f in row.findings),
    }  # fmt: skip


def _pareto_layouts(
    model: Any, machines: Cluster, n: int, batch: int, known: set[str]
) -> list[dict[str, Any]]:
    """Layouts that none beats in time and memory, besides those that are known."""
    from foretell.predict import predict_many
    from foretell.search.oracle import Space, layouts, strategy, sweep
    from foretell.search.oracle.space import per_node

    plans = layouts(model, n, batch, per_node(machines), Space())
    if not plans:
        return []
    swept = sweep(plans, model, machines)
    best, least = [], float("inf")
    order = sorted(swept.fits.nonzero()[0].tolist(), key=lambda k: float(swept.found.step[k]))
    for k in order:
        if swept.found.peak[k] < 0.97 * least:
            least = float(swept.found.peak[k])
            best.append(k)
    some = [plans[k] for k in best[:24] if str(plans[k]) not in known]
    predictions = predict_many(some, model, machines, advises=False)
    return [
        {
            "gpus": n, "strategy": words.strategy(strategy(plan)), "step_s": one.step,
            "peak_bytes": one.peak, "fits": one.fits, "plan": str(plan),
            "samples_per_s": batch / one.step,
            "cost": one.step * swept.price / 3600 / batch if swept.price else None, "says": "",
            "mfu": one.utilisation,
        }
        for plan, one in zip(some, predictions, strict=True)
    ]  # fmt: skip


def planned(
    workload: str, cluster: Cluster, planner: str, tell: OnProgress
) -> list[dict[str, Any]]:
    """The plan of a planner as `predict` prices it, and its baselines."""
    from foretell.search.kit import priced, repredicted
    from foretell.workload import load

    model = load(workload, files=False)

    def on_progress(what: str, best: float) -> None:
        tell(f"{what}, best {words.seconds(best)}" if best < float("inf") else what, best)

    search = allowed(planner).plan(model, cluster, on_progress)
    found = repredicted(search, priced(search.plan, model, cluster))
    assert found.prediction is not None
    batch = found.plan.global_batch or model.batch
    known = {
        "peak_bytes": found.prediction.peak, "fits": found.prediction.fits, "plan": str(found.plan),
        "mfu": found.prediction.utilisation,
    }  # fmt: skip
    rows = [("the plan found", found.predicted, known)]
    rows += [(words.strategy(name), s, {}) for name, s in found.baselines.items() if s]
    return _with_front([_baseline_row(*row, cluster.size, batch) for row in rows])


def _baseline_row(
    name: str, seconds: float, known: dict[str, Any], gpus: int, batch: int
) -> dict[str, Any]:
    """A row of a planner's answer; of baselines only the time is known."""
    plain = {"peak_bytes": 0.0, "fits": True, "plan": "", "mfu": None, "cost": None, "says": ""}
    times = {"step_s": seconds, "samples_per_s": batch / seconds}
    return {"gpus": gpus, "strategy": name, **times, **plain, **known}


def allowed(planner: str) -> Any:
    """The planner a text names; its options that are files are refused: the page opens none."""
    from foretell import spec
    from foretell.search.kit import parse

    _, given = spec.split(planner)
    named = sorted({"resume", "start"} & set(given))
    if named:
        raise InputError(
            f"`{named[0]}` of a planner names a file, and the studio opens none",
            hint="leave it out, or use `foretell plan` on the command line",
        )
    return parse(planner)


def _with_front(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows marked where no other beats them in throughput, memory and cost at once."""
    fitting = [r for r in rows if r["fits"] and r["peak_bytes"]]
    for row in rows:
        row["front"] = row in fitting and not any(_dominates(other, row) for other in fitting)
    return rows


def _dominates(a: dict[str, Any], b: dict[str, Any]) -> bool:
    one, two = _objectives(a), _objectives(b)
    return one != two and all(x <= y for x, y in zip(one, two, strict=True))


def _objectives(row: dict[str, Any]) -> tuple[float, float, float]:
    cost = row["cost"] if row["cost"] is not None else row["gpus"] / row["samples_per_s"]
    return 1 / row["samples_per_s"], row["peak_bytes"], cost
