"""`foretell simulate`: play a graph file, priced on a cluster where one is named."""

from __future__ import annotations

from pathlib import Path

import click

from foretell.cli import offered
from foretell.cli.output import answer, json_option, output_option, write_output


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--on",
    "cluster",
    shell_complete=offered.clusters,
    help="Price the tasks on this cluster first: a spec or a file.",
)
@click.option("--engine", type=click.Choice(["auto", "compiled", "readable"]), default="auto")
@output_option
@json_option
def command(
    file: Path, cluster: str | None, engine: str, output: Path | None, as_json: bool
) -> None:
    """Play a graph or a traced step: how long it takes, where the time goes, and why."""
    from foretell.cli.step import load_step
    from foretell.report.summary import timeline_summary, timeline_text
    from foretell.simulate import simulate

    timeline = simulate(load_step(file, cluster).graph, engine=engine)
    answer(timeline_summary(timeline), as_json, timeline_text)
    write_output([(file.name, timeline)], output)
