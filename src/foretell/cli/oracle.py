"""`foretell oracle`: every parallel strategy against scale: time, memory, cost, limits."""

from __future__ import annotations

from typing import Any

import click

from foretell.cli import arguments
from foretell.cli.arguments import StepCommand
from foretell.cli.output import (
    FILE,
    answer_result,
    calibration_option,
    json_option,
    pool_options,
    verbose_option,
    working,
)


@click.command(cls=StepCommand)
@arguments.workload_argument
@arguments.cluster_option("The cluster: a preset's name or a file.", required=True)
@click.option(
    "--gpus", default="", help="GPU counts: 1..1024, or 8,12,48; by default up to the cluster's."
)
@click.option(
    "--batch", type=click.IntRange(1), help="Samples a step at every scale (strong scaling)."
)
@click.option(
    "--per-gpu", type=click.IntRange(1), help="Samples a GPU at every scale (weak scaling)."
)
@click.option("--epoch", type=click.IntRange(1), help="Samples of an epoch, for its time and cost.")
@click.option("--price", type=float, help="Price of a GPU-hour.")
@click.option("--prices", type=FILE, help="TOML file: device or node = price per hour.")
@click.option("--dtype", default="", help="Number format: fp32, tf32, bf16, fp16, fp8.")
@click.option(
    "--framework", "--stack", "framework", default="",
    help="Framework: megatron-core, fsdp, ddp, …",
)  # fmt: skip
@calibration_option
@pool_options
@verbose_option
@json_option
def command(workload: str | None, cluster: str, gpus: str, **options: Any) -> None:
    """Predict every parallel strategy of WORKLOAD on a cluster, from one device to thousands."""
    from foretell.api import oracle
    from foretell.api.scaling import default_counts
    from foretell.pool import opened
    from foretell.search.oracle import counts

    as_json, verbose = options.pop("as_json"), options.pop("verbose")
    jobs, on_ray = options.pop("jobs"), options.pop("on_ray")
    named = arguments.require_workload(workload)
    what, scales = f"pricing layouts of {named}", len(counts(gpus or default_counts(cluster)))
    with opened(jobs, on_ray) as pool, working(what, steps=scales) as tell:
        found = oracle(named, cluster, gpus, progress=tell, pool=pool, **options)
    answer_result(found, as_json, verbose)
