"""`foretell simulate`: a graph file simulated, priced on a cluster where one is named."""

from __future__ import annotations

from pathlib import Path

import click

from foretell.cli import arguments
from foretell.cli.arguments import StepCommand
from foretell.cli.output import FILE, answer_result, json_option, output_option, write_output


@click.command(cls=StepCommand)
@click.argument("file", type=FILE)
@arguments.cluster_option("Price the tasks on this cluster first: a spec or a file.")
@click.option("--engine", type=click.Choice(["auto", "compiled", "readable"]), default="auto")
@output_option
@json_option
def command(
    file: Path, cluster: str | None, engine: str, output: Path | None, as_json: bool
) -> None:
    """Simulate a graph or a traced step: how long it takes, where the time goes, and why."""
    from foretell.cli.arguments import load_step

    found = load_step(file, cluster).simulate(engine=engine)
    answer_result(found, as_json)
    write_output([(file.name, found.timeline)], output)
