"""`foretell whatif`: what changes would do to a step."""

from __future__ import annotations

from pathlib import Path

import click

from foretell.cli import arguments
from foretell.cli.arguments import StepCommand, module_option
from foretell.cli.output import (
    FILE,
    answer_result,
    json_option,
    output_option,
    real_option,
    verbose_option,
    write_output,
)


@click.command(cls=StepCommand)
@click.argument("file", type=FILE)
@click.argument("specs", shell_complete=arguments.changes, nargs=-1, required=True)
@arguments.cluster_option("The cluster the step runs on: a spec or a file.")
@module_option
@real_option
@click.option(
    "--real-mib", type=float, help="Measured peak memory of the step, in MiB (of a trace)."
)
@output_option
@verbose_option
@json_option
def command(
    file: Path,
    specs: tuple[str, ...],
    cluster: str | None,
    is_module: bool,
    real: float | None,
    real_mib: float | None,
    output: Path | None,
    verbose: bool,
    as_json: bool,
) -> None:
    """Predict what SPECS, made together, would do to the step in FILE: script, graph or trace.

    \b
        foretell whatif train.py amp compile -- --lr 0.1
        foretell whatif step.json.gz amp
        foretell whatif step.graph amp --on h100

    A training script is run unchanged, with the arguments after `--`: profiled on this machine's
    GPU, or, without one or with --on, captured without a GPU and priced.

    A spec is a name with options, such as faster:op=gemm,times=2 or remove:select=op=dropout*.
    """
    from foretell.cli.arguments import load_step
    from foretell.whatif import parse

    changes = [parse(spec) for spec in specs]  # a wrong spec is refused before a trace is read
    step = load_step(file, cluster, real, is_module)
    peak = None if real_mib is None else real_mib * 2**20
    found = step.whatif(*changes, measured_peak=peak)
    answer_result(found, as_json, verbose)
    write_output([("before", found.before), (" ".join(found.changes), found.after)], output)
