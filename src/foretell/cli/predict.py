"""`foretell predict`: one step of a model under a plan on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from foretell.cli import arguments
from foretell.cli.arguments import StepCommand
from foretell.cli.output import (
    FILE,
    answer_result,
    as_text,
    calibration_option,
    json_option,
    say,
    verbose_option,
)
from foretell.errors import ForetellError, InputError
from foretell.io import shown

if TYPE_CHECKING:
    from foretell.api import Prediction

FIELDS = ("workload", "on", "plan")


@click.command(cls=StepCommand)
@arguments.workload_argument
@arguments.cluster_option("The cluster: a spec such as dgx-a100:nodes=8, or a file.")
@click.option("--plan", "plan", help="The layout: dp=4,tp=8,pp=2,micro_batch=1,… or a file.")
@click.option(
    "--batch",
    type=FILE,
    help="Many at once: a line of JSON each, with workload, on and plan.",
)
@calibration_option
@click.option("-o", "--output", type=FILE, help="Write the simulated graph, for `compare`.")
@verbose_option
@json_option
def command(
    workload: str | None,
    cluster: str | None,
    plan: str | None,
    batch: Path | None,
    calibration: Path | None,
    output: Path | None,
    verbose: bool,
    as_json: bool,
) -> None:
    """Predict one step of WORKLOAD under a plan: seconds, memory, and where they go."""
    from foretell.plan import read
    from foretell.plan.unsupported import unsupported

    if batch is not None:
        for row in _predict_batch(batch, calibration):
            click.echo(as_text(row) if as_json else _answer_line(row))
        return
    found = predicted(workload, cluster, plan, calibration)
    answer_result(found, as_json, verbose)
    for why in unsupported(read(plan or ""))[:1]:
        say(f"not run by `foretell run`: {why}")
    if output is not None:
        _write(output, workload, cluster, plan, calibration)


def _write(path: Path, workload: Any, cluster: Any, plan: Any, calibration: Path | None) -> None:
    """The predicted step as a graph file."""
    from foretell.api.planning import machines
    from foretell.graph import save
    from foretell.plan import read
    from foretell.search.kit import graph_of
    from foretell.workload import load

    model, on = load(workload, scripts=True), machines(cluster, calibration)
    save(graph_of(read(plan), model, on), path)
    say(f"written: {path}")


def predicted(
    workload: str | None, cluster: str | None, plan: str | None, calibration: Path | None = None
) -> Prediction:
    """The prediction of what was named, or an error that names what is missing."""
    if not workload or not cluster or not plan:
        given = {"WORKLOAD": workload, "--on": cluster, "--plan": plan}
        raise InputError(
            f"predict needs {' and '.join(name for name, value in given.items() if not value)}",
            hint="foretell predict gpt:layers=24,… --on dgx-a100:nodes=1 --plan dp=8",
        )
    from foretell.api import predict

    return predict(workload, cluster, plan, calibration=calibration)


def _predict_batch(path: Path, calibration: Path | None = None) -> list[dict[str, Any]]:
    """Answers in the order of the lines; lines of one workload and cluster are priced together."""
    from foretell.api.planning import machines
    from foretell.plan import read
    from foretell.search.kit import priced_many
    from foretell.workload import load

    def answers(requests: list[dict[str, str]]) -> list[dict[str, Any]]:
        """Answers to lines with one workload and cluster; one by one where any is refused."""
        try:
            model = load(requests[0]["workload"])
            plans = [read(line["plan"]) for line in requests]
            found = priced_many(plans, model, machines(requests[0]["on"], calibration))
            return [one.as_json() for one in found]
        except ForetellError as error:
            if len(requests) == 1:
                return [{"error": str(error)}]
        return [one for line in requests for one in answers([line])]

    lines = _requests(path)
    groups: dict[tuple[str, str], list[int]] = {}
    for i, line in enumerate(lines):
        if "error" not in line:
            groups.setdefault((line["workload"], line["on"]), []).append(i)
    out: list[dict[str, Any]] = [*lines]
    for rows in groups.values():
        for i, one in zip(rows, answers([lines[i] for i in rows]), strict=True):
            out[i] = one
    return out


def _requests(path: Path) -> list[dict[str, str]]:
    """The requests of a file; a line that is none is its error."""
    from foretell.io import decode, read_lines

    lines = read_lines(path, "file of requests")
    if not lines:
        raise InputError(f"`{path}` has no request", hint="write one a line")
    hint = 'each is {"workload": "gpt:…", "on": "dgx-a100:nodes=1", "plan": "dp=8"}'
    found: list[dict[str, str]] = []
    for number, raw in lines:
        where = f"line {number} of `{path}`"
        try:
            line = decode(raw, dict[str, Any], where, hint)
            if not all(isinstance(line.get(field), str) for field in FIELDS):
                raise InputError(f"{where} is no request", hint=hint)
            found.append({field: line[field] for field in FIELDS})
        except InputError as error:
            found.append({"error": str(error)})
    if all("error" in line for line in found):
        raise InputError(found[0]["error"].partition("\n")[0], hint=hint)
    return found


def _answer_line(found: dict[str, Any]) -> str:
    if "error" in found:
        return f"error: {shown(found['error'].splitlines()[0], 200)}"
    from foretell.report.words import seconds, size

    return f"{seconds(found['step_s'])}  {size(found['peak_bytes'])}  {found['plan']}"
