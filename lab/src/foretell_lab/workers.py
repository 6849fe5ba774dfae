"""Questions of a benchmark answered by processes side by side, each in one of its own.

A question that raises or whose process dies is answered by what was wrong, and the others go on.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

Answered = tuple[Any, Any]
_FORK = get_context("fork")


def answers(
    work: Callable[[Any], Any], items: Sequence[Any], workers: int = 1, seconds: float = 0.0
) -> Iterator[Answered]:
    """Each item and what `work` makes of it, as they end; none after so many seconds (0: all).

    A process answers one item and ends, so that CPU time and memory of an answer are its own. What
    fails is answered by `{"error": …}`.
    """
    ends, left = time.monotonic() + (seconds or math.inf), list(reversed(items))
    running: dict[Connection, tuple[Any, Any]] = {}
    try:
        while left or running:
            while left and len(running) < max(workers, 1):
                item = left.pop()
                pipe, process = _started(work, item)
                running[pipe] = item, process
            rest = ends - time.monotonic()
            ready = wait(list(running), None if math.isinf(rest) else max(rest, 0.0))
            if not ready:
                return
            for pipe in [pipe for pipe in running if pipe in ready]:
                item, process = running.pop(pipe)
                yield item, _received(pipe, process)
    finally:
        for _, process in running.values():
            process.kill()


def _started(work: Callable[[Any], Any], item: Any) -> tuple[Connection, Any]:
    mine, its = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_answer, args=(work, item, its), daemon=True)
    process.start()
    its.close()
    return mine, process


def _answer(work: Callable[[Any], Any], item: Any, pipe: Connection) -> None:
    began = time.process_time()
    try:
        found = work(item)
    except Exception as error:
        words = f"{type(error).__name__}: {error}"[:300]
        found = {"error": words, "cpu_s": time.process_time() - began}
    pipe.send(found)


def _received(pipe: Connection, process: Any) -> Any:
    """What a process sent, or how it ended without."""
    try:
        return pipe.recv()
    except EOFError:
        process.join()
        return {"error": f"its process ended with {process.exitcode}"}
    finally:
        pipe.close()
        process.join()


def peak_mb() -> float:
    """The most memory that this process held, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
