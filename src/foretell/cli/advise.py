"""`foretell advise`: every change that applies to a step, tried and ranked."""

from __future__ import annotations

from pathlib import Path

import click

from foretell.cli import arguments
from foretell.cli.arguments import StepCommand, module_option
from foretell.cli.output import (
    FILE,
    answer_result,
    json_option,
    real_option,
    verbose_option,
    working,
)


@click.command(cls=StepCommand)
@click.argument("file", type=FILE)
@click.argument("specs", shell_complete=arguments.changes, nargs=-1)
@arguments.cluster_option("The cluster the step runs on: a spec or a file.")
@module_option
@real_option
@verbose_option
@json_option
def command(
    file: Path,
    specs: tuple[str, ...],
    cluster: str | None,
    is_module: bool,
    real: float | None,
    verbose: bool,
    as_json: bool,
) -> None:
    """Try changes on the step in FILE (all that apply, or SPECS) and rank them by gain."""
    from foretell.advise import TRIED
    from foretell.cli.arguments import load_step

    step = load_step(file, cluster, real, is_module)
    with working("trying changes", steps=2 * len(specs or TRIED)) as tell:  # alone, then together
        found = step.advise(*specs, progress=tell)
    answer_result(found, as_json, verbose)
