"""Starts the ranks that measure for `foretell tune-ddp`, and reads what they found: no torch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foretell.errors import InputError
from foretell.pytorch.deploy import run_files
from foretell.pytorch.deploy.launcher import supervise, torchrun
from foretell.pytorch.ranks.wires import network, shaped_loopback


@dataclass(frozen=True)
class TuneRequest:
    """What every rank gets: profile the model, or take steps with each list of caps in turns."""

    script: str
    candidates: tuple[
        tuple[float, ...], ...
    ] = ()  # caps in MiB; empty: DDP as it is; none: profile
    steps: int = 8  # in a row
    rounds: int = 5
    warmup: int = 3
    device: str = ""
    launcher: int = 0  # process id: ranks end when it is gone
    network: str = "loopback"  # what the ranks of this machine meet on (→ foretell.pytorch.ranks)


def measure(
    request: TuneRequest,
    ranks: int,
    timeout: float = 600.0,
    progress: Callable[[str, float | None], None] = lambda words, share: None,
) -> dict[str, Any]:
    """What rank 0 measured together with the others; an error names the rank that failed.

    `progress` receives how many of its steps are over, and which share that is.
    """
    if not Path(request.script).is_file():
        raise InputError(f"there is no script `{request.script}`")
    with tempfile.TemporaryDirectory(prefix="foretell-tune-") as name:
        folder = Path(name)
        run_files.write(folder / "request.json", asdict(request) | {"launcher": os.getpid()})
        with shaped_loopback(network(request.network), ranks) as prefix:
            process = torchrun("foretell.pytorch.tune.worker", folder, ranks, prefix=prefix)
            supervise(process, folder, ranks, timeout, progress)
        return run_files.results(folder)[0]
