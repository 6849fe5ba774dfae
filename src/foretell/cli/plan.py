"""`foretell plan`: look for the plan with the shortest step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from foretell.cli.output import answer, json_option


@click.command()
@click.argument("workload")
@click.option("--on", "cluster", required=True, help="The cluster: a spec or a file.")
@click.option("--with", "planner", default="oracle", help="The planner, with its options.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Where the plan goes.")
@json_option
def command(workload: str, cluster: str, planner: str, output: Path | None, as_json: bool) -> None:
    """Find a plan for WORKLOAD on a cluster, and say what it gains over what people do."""
    from foretell.cli.progress import working
    from foretell.cluster import load as load_cluster
    from foretell.plan.file import save
    from foretell.search.planners import parse

    chosen, machines = parse(planner), load_cluster(cluster)
    with working(f"looking for a plan with {chosen}") as tell:
        found = _found(chosen, workload, machines, tell)
    if output is not None:
        save(found.plan, output)
    answer(_plain(found, str(chosen)), as_json, _text)


def _found(chosen: Any, workload: str, machines: Any, tell: Callable[[str], None]) -> Any:
    """The plan for a workload, or for a captured step itself where the planner takes one."""
    from foretell.graph import load as load_graph
    from foretell.workload import load

    def progress(words: str, best: float) -> None:
        tell(f"{words}, best {best:.4g} s")

    if workload.endswith((".graph", ".txt")) and hasattr(chosen, "plan_graph"):
        return chosen.plan_graph(load_graph(Path(workload)), machines, progress)
    return chosen.plan(load(workload), machines, progress)


def _plain(found: Any, planner: str) -> dict[str, Any]:
    return {
        "planner": planner,
        "plan": str(found.plan),
        "predicted_s": found.predicted,
        "baseline_s": found.baseline,
        "baselines": dict(found.baselines),
        "bound_s": found.bound,
        "evaluations": found.evaluations,
        "search_cpu_s": found.cpu,
        "notes": list(found.notes),
    }


def _text(found: dict[str, Any]) -> str:
    from foretell.report import words
    from foretell.report.terminal import table, wrapped

    step, usual = found["predicted_s"], found["baseline_s"]
    head = f"{words.seconds(step)} a step, {usual / step:.2f} × as fast as the usual way"
    if found["bound_s"]:
        head += f"; no plan of this space can be below {words.seconds(found['bound_s'])}"
    rows = [
        (name, words.seconds(seconds), f"{seconds / step:.2f} ×")
        for name, seconds in sorted(found["baselines"].items(), key=lambda item: item[1])
    ]
    shown = table(("held against", "step>", "of ours>"), rows)
    looked = f"{found['evaluations']} plans looked at in {found['search_cpu_s']:.1f} CPU-seconds"
    plan = words.cut(found["plan"], 240)  # the whole of it goes to a file, or with --json
    return "\n".join([wrapped(head), plan, shown, looked, *map(wrapped, found["notes"])])
