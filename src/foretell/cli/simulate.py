"""`foretell simulate`: play a graph file, priced on a cluster where one is named."""

from __future__ import annotations

from pathlib import Path

import click

from foretell.cli.output import answer, json_option, say


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--on", "cluster", help="Price the tasks on this cluster first: a spec or a file.")
@click.option("--engine", type=click.Choice(["auto", "compiled", "readable"]), default="auto")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write a page (.html) or trace (.json.gz).")
@json_option
def command(
    file: Path, cluster: str | None, engine: str, output: Path | None, as_json: bool
) -> None:
    """Play a graph: how long the step takes, where the time goes, and why."""
    from foretell.cli.step import load_step
    from foretell.report.summary import timeline_summary, timeline_text
    from foretell.simulate import simulate

    graph, _ = load_step(file, cluster)
    timeline = simulate(graph, engine=engine)
    answer(timeline_summary(timeline), as_json, timeline_text)
    if output:
        from foretell.report import write

        write([(file.name, timeline)], output)
        say(f"written: {output}")
