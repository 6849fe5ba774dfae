"""The process that runs a script as Python would, watches it, and ends when enough was seen.

    python -m foretell.pytorch.intake REQUEST

It ends at once, whatever the script would still do: no `except`, `finally` or `atexit` of the
script's runs, so nothing is saved on the way out, and processes it started are gone with it.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from foretell.errors import ForetellError
from foretell.pytorch.intake.files import Journal
from foretell.pytorch.intake.request import Request, Script, job_of_one_machine, rank_and_world

# What stops a script whatever its tensors are: a missing package or file, wrong arguments.
_FINAL = (ImportError, SyntaxError, FileNotFoundError)
_USAGE = 2  # exit status of argparse and click


def main(path: Path) -> None:
    """Run what a request asks for; never returns."""
    request = Request.read(path)
    single_rank(request.script)
    os.environ.setdefault("WANDB_MODE", "disabled")
    sys.dont_write_bytecode = True
    try:
        job = job_of(request)
        with job.open():
            run(request.script, job)
        answer = {"ended": job.steps}
    except ForetellError as error:
        answer = {"error": str(error)}
    except SystemExit as left:
        code, answer = left.code, {"ended": job.steps}
        if code not in (None, 0):  # what it printed, the process that started this one knows
            text = f" with {code}" if isinstance(code, int) else f": {str(code).strip()}"
            answer = {"error": f"exited{text}", "is_exit": True, "is_final": code == _USAGE}
    except BaseException as error:
        traceback.print_exc()
        answer = {"error": _message(request.script, error), "is_final": isinstance(error, _FINAL)}
    leave(request, answer)


def job_of(request: Request, is_started: bool = False) -> Any:
    """The job of a request; `is_started`: in a process that the script started itself."""
    from foretell.pytorch.intake.profiled import Profiling

    script = request.script
    folder = Path.cwd() if script.is_module else Path(script.name).resolve().parent
    journal = Journal(Path(request.folder), request.output, Path.cwd(), folder)
    if request.goal == "profile":
        return Profiling(request, journal, lambda answer: leave(request, answer), is_started)
    from foretell.pytorch.intake.captured import Capturing

    return Capturing(request, journal, lambda answer: leave(request, answer))


def run(script: Script, job: Any) -> None:
    """Run a script as `python script args` or `python -m script args` does."""
    name = script.name
    if script.is_module:
        sys.path[0], sys.argv = os.getcwd(), [name, *script.args]
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return
    sys.path[0], sys.argv = str(Path(name).resolve().parent), [name, *script.args]
    if not job.runs_itself(Path(name)):
        runpy.run_path(name, run_name="__main__")


def leave(request: Request, answer: dict[str, Any]) -> None:
    """Write the result and end this process and all that it started, at once."""
    rank, world = rank_and_world()
    place = request.answer(rank)
    if not place.exists():  # else a rank that the script started has answered already
        part = place.with_suffix(".part")
        part.write_text(json.dumps(answer))
        part.replace(place)
    if world > 1 and "error" not in answer:
        _wait_for_others(rank, world)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    for pid in _descendants(os.getpid()):
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    os._exit(1 if "error" in answer else 0)


def _wait_for_others(rank: int, world: int) -> None:
    """Let the other ranks end their step too: they may still be reading what this one sent."""
    from datetime import timedelta

    with suppress(Exception):
        from torch import distributed

        if distributed.is_initialized():
            store = distributed.distributed_c10d._get_default_store()
            store.set(f"foretell/{rank}", b"done")
            store.wait([f"foretell/{k}" for k in range(world)], timedelta(seconds=60))


def _descendants(pid: int) -> list[int]:
    """Processes that a process started, directly or not, where /proc tells."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if entry.isdigit():
            with suppress(OSError, ValueError, IndexError):
                stat = Path("/proc", entry, "stat").read_text()
                parents.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry))
    found = list(parents.get(pid, ()))
    for child in found:
        found += parents.get(child, ())
    return found


def single_rank(script: Script) -> None:
    """A script for `torchrun` finds a job of one rank where nothing started several."""
    needs = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "init_process_group", "init_device_mesh")
    if "RANK" in os.environ or not any(word in script.source for word in needs):
        return
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", **job_of_one_machine(1)}.items():
        os.environ.setdefault(name, value)


def _message(script: Script, error: BaseException) -> str:
    """The error of a script, and the innermost line of the user's own code."""
    from foretell.pytorch.capture.values import first_line, users_line

    line, kind = first_line(error), type(error).__name__
    place = users_line(traceback.extract_tb(error.__traceback__))
    place = f" at {place}" if place else ""
    message = kind if line == kind else f"{kind}: {line}"
    hint = "does it run by itself? --show-output lets through what it prints"
    return f"`{script}` stopped{place}: {message}\n\nhint: {hint}"
