"""`foretell plan`: look for the plan with the shortest step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from foretell.cli import offered
from foretell.cli.machines import calibration_option, machines
from foretell.cli.output import answer, json_option, require_place
from foretell.cli.pooled import pool_options

COPIED = 160  # letters of a plan that a person would copy


@click.command()
@offered.workload_argument
@click.option(
    "--on",
    "cluster",
    shell_complete=offered.clusters,
    required=True,
    help="The cluster: a spec or a file.",
)
@click.option(
    "--with",
    "planner",
    shell_complete=offered.planners,
    default="joint",
    show_default=True,
    help="The planner, with its options.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Where the plan goes.")
@click.option(
    "--seeds", type=click.IntRange(min=1), default=1, show_default=True,
    help="Searches, each from a seed of its own; the best plan is the answer.",
)  # fmt: skip
@calibration_option
@pool_options
@json_option
def command(
    workload: str | None, cluster: str, planner: str, output: Path | None, seeds: int, jobs: int,
    on_ray: str, calibration: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Find a plan for WORKLOAD on a cluster, and say what it gains over what people do."""
    from foretell.cli.progress import working
    from foretell.plan.file import save
    from foretell.pool import opened
    from foretell.search.planners import parse

    named = offered.require_workload(workload)
    if output is not None:
        require_place(output)  # not after minutes of search
    chosen, where = parse(planner), machines(cluster, calibration)
    what, most = f"looking for a plan with {chosen}", getattr(chosen, "seconds", 0.0)
    with opened(jobs, on_ray) as pool, working(what, about=most) as tell:
        found = _found(chosen, named, where, tell, pool=pool, seeds=seeds)
    if output is not None:
        save(found.plan, output)
    answer(_plain(found, str(chosen)), as_json, _text)


def _found(
    chosen: Any, workload: str, where: Any, tell: Callable[[str], None], **options: Any
) -> Any:
    """The plan for a workload, or for a captured step itself where the planner takes one."""
    from foretell.graph import load as load_graph
    from foretell.search.evaluate import repredicted
    from foretell.search.pooled import best_plan
    from foretell.workload import load

    def progress(words: str, best: float) -> None:
        tell(f"{words}, best {best:.4g} s" if best == best else words)

    is_step = workload.endswith((".graph", ".txt")) and hasattr(chosen, "plan_graph")
    model = load_graph(Path(workload)) if is_step else load(workload, scripts=True)
    return repredicted(best_plan(chosen, model, where, progress, **options), model, where)


def _plain(found: Any, planner: str) -> dict[str, Any]:
    return {
        "planner": planner,
        "plan": str(found.plan),
        "predicted_s": found.predicted,
        "low_s": found.low,
        "high_s": found.high,
        "baseline_s": found.baseline,
        "baselines": dict(found.baselines),
        "bound_s": found.bound,
        "evaluations": found.evaluations,
        "search_cpu_s": found.cpu,
        "notes": list(found.notes),
    }


def _text(found: dict[str, Any]) -> str:
    from foretell.report import words
    from foretell.report.terminal import table, width, wrapped

    step, usual = found["predicted_s"], found["baseline_s"]
    head = f"{words.seconds(step)} a step, {usual / step:.2f} × as fast as the usual way"
    if found["bound_s"]:
        head += f"; no plan of this space can be below {words.seconds(found['bound_s'])}"
    rows = [
        (name, words.seconds(seconds), f"{seconds / step:.2f} ×")
        for name, seconds in sorted(found["baselines"].items(), key=lambda item: item[1])
    ]
    shown = table(("baseline", "step>", "of ours>"), rows)
    looked = f"{found['evaluations']} plans looked at in {found['search_cpu_s']:.1f} CPU-seconds"
    plan = found["plan"]  # on one line, to be copied; of a long one the whole goes to a file
    plan = plan if len(plan) <= COPIED else words.cut(plan, width())
    return "\n".join([wrapped(head), plan, shown, looked, *map(wrapped, found["notes"])])
