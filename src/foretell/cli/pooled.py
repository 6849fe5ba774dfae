"""`--jobs` and `--on-ray`: where a sweep or a search is done."""

from __future__ import annotations

import click

from foretell.cli.output import Command


def pool_options(command: Command) -> Command:
    """Let a command share its work out."""
    jobs = click.option(
        "--jobs", type=click.IntRange(min=1), default=1, show_default=True,
        help="Processes of this machine to share the work.",
    )  # fmt: skip
    return jobs(ray_option(command))


def ray_option(command: Command) -> Command:
    """`--on-ray`: a Ray cluster to work on."""
    text = "A Ray cluster: its address, `auto`, or `local` to start one here."
    return click.option("--on-ray", default="", metavar="ADDRESS", help=text)(command)
