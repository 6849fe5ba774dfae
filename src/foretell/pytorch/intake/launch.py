"""Starts the processes that run a script, one a rank, and waits for what they answer: no torch.

Of a step of an unchanged script (`capture_script`) three ways are tried until one works: weights
fake on a GPU that the script sees, weights fake while the script goes its way for CPUs, and
everything real on the CPU.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from foretell.errors import InputError
from foretell.pytorch.deploy import run_files
from foretell.pytorch.intake.files import undo
from foretell.pytorch.intake.request import (
    Request,
    Script,
    job_of_one_machine,
    no_step,
    rank_and_world,
)

Progress = Callable[[str, float], None]
_EVERY = 0.1  # seconds between looks at the processes
_GRACE = 15.0  # seconds that the other ranks get when one has failed
_TAIL = 12  # lines of a script's output in which its last words are looked for
PROGRESS = "progress"


def check(script: Script) -> None:
    """Raise where there is no such script, before anything is started for it."""
    if not script.is_module and not Path(script.name).is_file():
        raise InputError(f"there is no file `{script.name}`", hint="name a training script")


def launch(
    request: Request,
    ranks: int = 1,
    progress: Progress | None = None,
    show: bool = False,
    environment: dict[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Run a script on so many ranks; the result of each, by rank.

    With `ranks` 1 the process is one rank of whatever job this one belongs to. `environment` is
    added to the variables of the script.
    """
    path = request.write()
    log = Path(request.folder) / "output"
    try:
        with open(log, "wb") as hidden, _terminated_as_interrupted():
            processes = _started(path, ranks, None if show else hidden, environment or {})
            try:
                _waited(processes, request, progress)
            finally:
                for process in processes:  # and whatever it left running: all of its session
                    with suppress(OSError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
    finally:
        undo(Path(request.folder))
    first = rank_and_world()[0] if ranks == 1 else 0
    found = [_answer(request, first + k, p, log) for k, p in enumerate(processes)]
    return found + _more(request, first + len(found))


def _started(
    path: Path, ranks: int, output: IO[bytes] | None, environment: dict[str, str]
) -> list[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "foretell.pytorch.intake", str(path)]
    named = ranks > 1
    job = dict(environment)
    if named:
        job |= {**job_of_one_machine(ranks), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
        job["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    into: Any = sys.stderr.fileno() if output is None and _has_file(sys.stderr) else output
    return [
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=into, stderr=into, start_new_session=True,
            env={**os.environ, **job, **({"RANK": str(k), "LOCAL_RANK": str(k)} if named else {})},
        )
        for k in range(ranks)
    ]  # fmt: skip


def _has_file(stream: Any) -> bool:
    try:
        stream.fileno()
    except (OSError, ValueError, AttributeError):
        return False
    return True


def _waited(
    processes: list[subprocess.Popen[bytes]], request: Request, progress: Progress | None
) -> None:
    failed = None
    while any(p.poll() is None for p in processes):
        said = None if progress is None else run_files.read(Path(request.folder) / PROGRESS)
        if progress is not None and said:
            progress(*said)
        if failed is None and any(p.poll() for p in processes):
            failed = time.monotonic()
        if failed is not None and time.monotonic() - failed > _GRACE:
            return
        time.sleep(_EVERY)


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """A request to end takes the script's processes along, as Ctrl-C does."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not on the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _answer(
    request: Request, rank: int, process: subprocess.Popen[bytes], log: Path
) -> dict[str, Any]:
    place = request.answer(rank)
    if place.is_file():
        found: dict[str, Any] = json.loads(place.read_text())
    else:
        message = f"ended with {process.returncode} before anything was seen of it"
        found = {"error": message, "is_exit": True}
    if found.get("is_exit"):
        what = f"rank {rank} of `{request.script}`" if rank else f"`{request.script}`"
        found["error"] = f"{what} {found['error']}{_printed(log)}\n\nhint: {_HINT}"
    return found


_HINT = "its own arguments stand behind its name; in whatif, advise and plan behind `--`"


def _printed(log: Path) -> str:
    """The last output of a script, where it was kept."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    printed = [line for line in lines[-_TAIL:] if line]
    return f"; it printed last: {printed[-1]}" if printed else ""


def _more(request: Request, first: int) -> list[dict[str, Any]]:
    """Answers of ranks that the script itself started."""
    places = sorted(Path(request.folder).glob("answer*.json"))
    ranks = [int(p.stem.removeprefix("answer")) for p in places]
    more = [request.answer(rank) for rank in sorted(ranks) if rank >= first]
    return [json.loads(place.read_text()) for place in more]


_WAYS: tuple[tuple[bool, dict[str, Any]], ...] = (
    (False, {"shows_gpu": True}),
    (False, {"shows_gpu": False}),
    (True, {}),
)


def capture_script(
    script: Script,
    output: Path,
    *,
    on: str = "h200",
    share: float | None = None,
    tf32: bool | None = None,
    show: bool = False,
    progress: Callable[[str, float], None] | None = None,
) -> tuple[str, ...]:
    """Write the graph of one training step of a script; notes on how it was made."""
    check(script)
    options = {"on": on, "share": share, "tf32": tf32}
    for is_real, more in _WAYS:
        with tempfile.TemporaryDirectory(prefix="foretell-") as folder:
            request = Request(
                "capture", script, str(output.absolute()), folder,
                options={**options, **more}, is_real=is_real,
            )  # fmt: skip
            (found, *_) = launch(request, 1, progress, show)
        if "graph" in found:
            return _REAL if is_real else ()
        if found.get("ended") is not None and is_real:
            raise _too_few(script, found["ended"])
        if found.get("is_final"):
            break
    raise InputError(found["error"])


_REAL = ("it ran on real tensors on the CPU: operators are those that torch chooses there",)


def _too_few(script: Script, steps: int) -> InputError:
    if not steps:
        return no_step(script, "A function that makes the step can be named: train.py:make")
    return InputError(
        f"`{script}` ended after {steps} step{'s' * (steps > 1)}; a capture needs two whole ones",
        hint="let it run longer",
    )
