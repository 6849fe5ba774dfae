"""The cluster a command names, as fast as runs have shown it to be where `--calibration` says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from foretell.cli.output import Command

if TYPE_CHECKING:
    from foretell.cluster import Cluster


def calibration_option(command: Command) -> Command:
    """`--calibration FILE`."""
    return click.option(
        "--calibration", type=click.Path(path_type=Path), help="What `foretell fit` has learned."
    )(command)


def machines(spec: str, calibration: Path | None = None) -> Cluster:
    """The cluster a spec or file stands for, calibrated."""
    from foretell.cluster import load

    return calibrated(load(spec), calibration)


def calibrated(cluster: Cluster, path: Path | None) -> Cluster:
    """A cluster with the calibration in a file, if there is one."""
    if path is None:
        return cluster
    from foretell.cluster.calibration import load

    return cluster.calibrated(load(path))
