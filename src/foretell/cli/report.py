"""`foretell report`: one page, or one trace, of everything that was given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from foretell.cli import arguments
from foretell.cli.arguments import StepCommand
from foretell.cli.output import FILE, answer, json_option, real_option, say, working


@click.command(cls=StepCommand)
@click.argument("given", nargs=-1, required=True, metavar="FILE... [SPEC...]")
@arguments.cluster_option("The cluster steps and plans run on: a spec or a file.")
@click.option("--of", "model", help="The workload or captured step that plans are for.")
@real_option
@click.option("--no-advice", is_flag=True, help="Do not try changes.")
@click.option(
    "-o",
    "--output",
    type=FILE,
    help="A page (.html), or a trace for viewers (.json, .json.gz).",
)
@json_option
def command(
    given: tuple[str, ...],
    cluster: str | None,
    model: str | None,
    real: float | None,
    no_advice: bool,
    output: Path | None,
    as_json: bool,
) -> None:
    """Show steps, what changes make of them, layouts, plans and schedules on one page.

    FILE is a trace, a script, a graph, a plan, or what schedule, oracle, plan, predict or run print
    with --json. The first step is diagnosed: what binds it, and what to change first.
    SPECs are changes, as `whatif` takes them; without any, the best combination found is shown.
    With --on and --of, the step under each plan is simulated and shown too.
    """
    from foretell.advise import TRIED
    from foretell.report import write

    with working("gathering", steps=0 if no_advice else 2 * len(TRIED)) as tell:
        found = _survey(given, (cluster, model), real, not no_advice, tell)
    if as_json or output is None:
        answer(_numbers(found), as_json, _text)
    if output is not None:
        write(found.timelines, output, found.content)
        if found.content.diagnosis and not as_json:
            say(_verdict(found.content.diagnosis))
        say(f"written: {output}")


def _survey(
    given: tuple[str, ...],
    place: tuple[str | None, str | None],
    real: float | None,
    advice: bool,
    tell: Any,
) -> Any:
    from foretell.api.step import arguments_for_none
    from foretell.cli.arguments import load_step, script_args
    from foretell.cluster import load as load_cluster
    from foretell.errors import InputError
    from foretell.survey.inputs import Inputs, is_script, sections_of
    from foretell.survey.planned import model_of
    from foretell.survey.survey import survey

    inputs, (cluster, model) = Inputs.of(given), place
    machines = load_cluster(cluster) if cluster else None
    if model and machines is None:
        raise InputError(f"`--of {model}` without machines", hint="name them with --on")
    if inputs.specs and not inputs.steps:
        raise InputError(
            f"`{inputs.specs[0]}` is a change, but there is no step to change",
            hint="name a trace or a graph first",
        )
    if script_args() and not any(is_script(str(path)) for path in inputs.steps):
        raise arguments_for_none(given[0])
    steps = [load_step(path, cluster, real) for path in inputs.steps]
    drawn = sections_of(inputs, machines, model_of(model) if model else None)
    return survey(steps, inputs.specs, drawn, advice=advice, progress=tell)


def _numbers(found: Any) -> dict[str, Any]:
    from foretell.report.page import numbers, summaries

    return {
        **numbers(found.timelines, found.content),
        "timelines": summaries(found.timelines),
    }


def _text(found: dict[str, Any]) -> str:
    from foretell.report import words

    rows = [(f["what"], _value(f)) for f in found["figures"]]
    parts = [_verdict(found["diagnosis"])] if found["diagnosis"] else []
    parts += [words.table(("step", "value>"), rows)] if rows else []
    used = [k for k in _PARTS if any(s["values"].get(k) for s in found["split"])]
    spent = [
        (words.cut(s["name"], 32), *(words.seconds(s["values"].get(k, 0.0)) for k in used))
        for s in found["split"]
    ]
    if spent:
        parts.append(words.table(("where time goes", *(f"{_PARTS[k]}>" for k in used)), spent))
    parts.append("the whole page: -o report.html")
    return "\n".join(parts)


def _verdict(diagnosis: dict[str, Any]) -> str:
    from foretell.report.words import wrapped

    verdict = diagnosis.get("verdict", {})
    sentences = (verdict.get(key, "") for key in ("sentence", "ranks", "first", "then"))
    return "\n".join(wrapped(text) for text in sentences if text)


_PARTS = {  # of a step, and their headings
    "compute": "compute", "exposed communication": "exposed comm", "host": "CPU",
    "bubble": "bubble", "idle": "idle",
}  # fmt: skip


def _value(figure: dict[str, Any]) -> str:
    from foretell.report import words

    if "seconds" in figure:
        return words.seconds(figure["seconds"])
    return words.size(figure["bytes"]) if "bytes" in figure else str(figure.get("text", ""))
