"""`foretell check`: a budget for a step, for CI: exit code 3 where it is not kept."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from foretell.cli import arguments
from foretell.cli.output import FILE, answer, json_option, real_option

EXIT_OVER_BUDGET = 3  # exit code of a budget that is not kept
LIMITS = ("step", "memory", "exposed", "idle")


@click.command()
@click.argument("what")
@click.argument("specs", shell_complete=arguments.changes, nargs=-1)
@click.option("--step-under", help="Limit of the step: 120ms.")
@click.option("--memory-under", help="Limit of peak memory: 70GiB.")
@click.option("--exposed-under", help="Limit of exposed communication: 15%.")
@click.option("--idle-under", help="Limit of idle time: 10%.")
@click.option(
    "--surely", is_flag=True, help="Compare the upper end of the 80 % interval with --step-under."
)
@arguments.cluster_option("The cluster: a spec or a file.")
@click.option("--plan", help="Of a workload: the layout, dp=4,tp=2,… or a file.")
@real_option
@click.option("--junit", type=FILE, help="Write JUnit's XML here.")
@click.option(
    "--summary",
    type=FILE,
    envvar="GITHUB_STEP_SUMMARY",
    help="Append Markdown here; in a GitHub action, to its summary.",
)
@json_option
def command(what: str, specs: tuple[str, ...], **options: Any) -> None:
    """Hold the step in WHAT (trace, graph, workload), with SPECS made, against a budget.

    Exits with 0 where every limit is kept, with 3 where one is not.
    """
    from foretell.errors import InputError
    from foretell.survey.budget import limit, verdicts

    given = {name: options[f"{name}_under"] for name in LIMITS}
    limits = {name: limit(text, name) for name, text in given.items() if text is not None}
    if not limits:
        raise InputError("no limit is given", hint="such as --step-under 120ms")
    found = _predict(what, specs, options)
    outcomes = verdicts(found, limits, options["surely"])
    _write(outcomes, what, options)
    answer(_plain(outcomes, found), options["as_json"], lambda _: "\n".join(map(str, outcomes)))
    if not all(v.passed for v in outcomes):
        sys.exit(EXIT_OVER_BUDGET)


def _predict(what: str, specs: tuple[str, ...], options: dict[str, Any]) -> dict[str, Any]:
    """The prediction for a workload under a plan, or for a step in a file."""
    from foretell.cluster import load as load_cluster
    from foretell.errors import InputError

    machines = load_cluster(options["cluster"]) if options["cluster"] else None
    if options["plan"] is None:
        return _predict_file(Path(what), specs, machines, options["real"])
    if machines is None or specs:
        raise InputError(
            "a workload under a plan needs a cluster and takes no changes",
            hint="foretell check gpt:… --on dgx-a100:nodes=1 --plan dp=8 --step-under 1s",
        )
    from foretell.plan import read
    from foretell.predict import predict
    from foretell.workload import load

    found = predict(read(options["plan"]), load(what, scripts=True), machines)
    parts = {key.removesuffix("_s"): value / found.step for key, value in found.breakdown.items()}
    comm = parts.get("exchange", 0.0) + parts.get("reduce", 0.0)
    shares = {"exposed communication": comm, "idle": parts.get("idle", 0.0)}
    return {"predicted_s": found.step, "low_s": found.low, "high_s": found.high,
            "peak_bytes": found.peak, "shares": shares}  # fmt: skip


def _predict_file(
    path: Path, specs: tuple[str, ...], machines: Any, real: float | None
) -> dict[str, Any]:
    from foretell.advise import Step
    from foretell.report.summary import split
    from foretell.simulate import simulate
    from foretell.survey.survey import outcome
    from foretell.whatif import applied, parse

    step = Step.from_file(path, machines, real)
    found = outcome(step, specs)
    timeline = simulate(applied([parse(s) for s in specs], step.graph, step.setting))
    parts = split("", timeline)
    total = parts["total"] or 1.0  # a step of no length is idle in no part of it
    shares = {key: value / total for key, value in parts["values"].items()}
    return found | {"shares": shares}


def _write(outcomes: Any, what: str, options: dict[str, Any]) -> None:
    from foretell.io import append_text, write_text
    from foretell.survey.budget import junit, markdown

    rows = [(f"{v.name} under its limit", v.passed, str(v)) for v in outcomes]
    name = Path(what).name
    if options["junit"] is not None:
        write_text(options["junit"], junit(rows, name))
    if options["summary"] is not None:
        append_text(options["summary"], markdown(rows, name))


def _plain(outcomes: Any, found: dict[str, Any]) -> dict[str, Any]:
    kept = ("predicted_s", "low_s", "high_s", "peak_bytes", "shares")
    return {
        "passed": all(v.passed for v in outcomes),
        "verdicts": [
            {"name": v.name, "limit": v.limit, "value": v.value, "passed": v.passed}
            for v in outcomes
        ],
        **{key: found[key] for key in kept},
    }
