"""Starts the ranks that measure for `foretell tune-ddp`, and reads what they found: no torch."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foretell.errors import InputError
from foretell.pytorch.deploy import run_files
from foretell.pytorch.ranks.pin import allowed
from foretell.pytorch.ranks.wires import network, shaped_loopback

_POLL = 0.2  # seconds between looks at how far they are
_DONE = "done.json"
_LO = {"GLOO_SOCKET_IFNAME": "lo"}  # inside a namespace there is nothing else


@dataclass(frozen=True)
class Asked:
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
    asked: Asked,
    ranks: int,
    timeout: float = 600.0,
    progress: Callable[[str, float], None] = lambda words, share: None,
) -> dict[str, Any]:
    """What rank 0 measured together with the others; an error names the rank that failed.

    `progress` receives how many of its steps are over, and which share that is.
    """
    if not Path(asked.script).is_file():
        raise InputError(f"there is no script `{asked.script}`")
    with tempfile.TemporaryDirectory(prefix="foretell-tune-") as name:
        folder = Path(name)
        run_files.write(folder / "asked.json", asdict(asked) | {"launcher": os.getpid()})
        with shaped_loopback(network(asked.network), ranks) as prefix:
            _run(_start(folder, ranks, prefix), timeout, folder, progress)
        return _read(folder)


def _run(
    process: subprocess.Popen[bytes], timeout: float, folder: Path,
    progress: Callable[[str, float], None],
) -> None:  # fmt: skip
    ends = time.monotonic() + timeout
    try:
        while process.poll() is None:
            if time.monotonic() > ends:
                raise InputError(
                    f"the ranks were not done after {timeout:g} s", hint="raise --timeout-s"
                )
            done = run_files.read(folder / _DONE)
            if done:
                progress(f"step {done['steps']} of {done['of']}", done["steps"] / done["of"])
            time.sleep(_POLL)
    finally:
        _end(process)


def _start(folder: Path, ranks: int, prefix: list[str]) -> subprocess.Popen[bytes]:
    command = [*prefix, sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=localhost:0", "--nnodes=1", f"--nproc-per-node={ranks}"]
    command += ["--max-restarts=0", "--monitor-interval=1"]
    command += ["--local-addr=127.0.0.1"] if prefix else []
    command += ["-m", "foretell.pytorch.tune.worker", str(folder)]
    threads = str(max(1, allowed() // ranks))
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={"OMP_NUM_THREADS": threads, **os.environ, **(_LO if prefix else {})},
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Leave no process behind: torchrun ends its ranks on SIGTERM."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def tell_done(folder: Path, steps: int, of: int) -> None:
    """Report how many steps are over."""
    run_files.write(folder / _DONE, {"steps": steps, "of": of})


def _read(folder: Path) -> dict[str, Any]:
    errors = run_files.errors(folder)
    if errors:
        rank = min(errors, key=lambda r: errors[r]["time"])
        error = errors[rank]
        raise InputError(f"rank {rank} failed: {error['message']}", hint=error["hint"])
    found = run_files.results(folder)
    if 0 not in found:
        last = (folder / "log").read_text(errors="replace").strip().splitlines()[-3:]
        raise InputError("the ranks ended without a word: " + " / ".join(last))
    return found[0]
