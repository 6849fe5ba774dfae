"""Work for the studio in a process of its own: limited memory and time, and it can be stopped.

What reads an upload or searches may be slow, large or stuck; the server that answers everybody
else is none of that.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from foretell.errors import ForetellError, InputError

_LOOK = 0.05  # seconds between two looks at whether to stop
_PRELOAD = ("foretell.survey", "foretell.plan", "foretell.search.oracle", "foretell.trace")


@dataclass(frozen=True)
class WorkLimits:
    """Limits of one piece of work."""

    bytes: int = 4 << 30  # beyond what the interpreter and its libraries take
    seconds: float = 120.0


READING, SEARCHING = WorkLimits(), WorkLimits(8 << 30, 3600.0)


class Stopped(Exception):
    """Work that was cancelled."""


@cache
def _context() -> Any:
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(list(_PRELOAD))
    return context


def call(
    work: Callable[..., Any],
    *args: Any,
    room: WorkLimits = READING,
    tell: Callable[..., None] | None = None,
    stop: threading.Event | None = None,
) -> Any:
    """The result of a module's function, run in another process.

    With `tell` the function gets as its last argument what takes words on how far it is.
    """
    here, there = _context().Pipe()
    arguments = (there, room, work, args, tell is not None)
    process = _context().Process(target=_work, args=arguments, daemon=True)
    process.start()
    there.close()
    try:
        return _answer(here, process, time.monotonic() + room.seconds, tell, stop)
    finally:
        if process.is_alive():
            process.kill()
        process.join()
        here.close()


def _answer(pipe: Any, process: Any, ends: float, tell: Any, stop: Any) -> Any:
    while time.monotonic() < ends:
        if stop is not None and stop.is_set():
            raise Stopped
        if not pipe.poll(_LOOK):
            continue
        try:
            kind, value = pipe.recv()
        except EOFError:
            raise InputError(
                "the work ended without an answer", hint="it may have needed too much memory"
            ) from None
        if kind == "done":
            return value
        if kind == "tell":
            tell(*value)
        else:
            raise value
    raise InputError("this took too long and was stopped", hint="ask for less at once")


def _work(pipe: Any, room: WorkLimits, work: Callable[..., Any], args: Any, tells: bool) -> None:
    """The other process: limits first, then the work, then one answer."""
    _limit(room)

    def tell(words: str, best: float | None = None, found: Any = None) -> None:
        pipe.send(("tell", (str(words), best, found)))

    try:
        pipe.send(("done", work(*args, tell) if tells else work(*args)))
    except ForetellError as error:
        pipe.send(("failed", InputError(error.message, hint=error.hint)))
    except MemoryError:
        most = f"{room.bytes / 2**30:.0f} GiB"
        pipe.send(("failed", InputError(f"this needs more memory than the studio gives: {most}")))
    except RecursionError:
        pipe.send(("failed", InputError("this is nested too deep")))


def _limit(room: WorkLimits) -> None:
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's; it ends its children
    with suppress(ImportError, OSError, ValueError):
        import resource

        with open("/proc/self/statm") as file:
            taken = int(file.read().split()[0]) * resource.getpagesize()
        most = taken + room.bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        seconds = int(room.seconds) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
