"""Questions of a benchmark answered by processes side by side, each in one of its own."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import TimeoutError as NoneYet
from multiprocessing import get_context
from typing import Any

Answered = tuple[Any, Any]


def answers(
    work: Callable[[Any], Any], items: Sequence[Any], workers: int = 1, seconds: float = 0.0
) -> Iterator[Answered]:
    """Each item and what `work` makes of it, as they end; none after so many seconds (0: all).

    A process answers one item and ends, so that CPU time and memory of an answer are its own.
    """
    if workers <= 1:
        yield from ((item, work(item)) for item in items)
        return
    ends = time.monotonic() + (seconds or float("inf"))
    with get_context("fork").Pool(workers, maxtasksperchild=1) as pool:
        asked = pool.imap_unordered(_Answer(work), items, chunksize=1)
        while True:
            try:
                yield asked.next(None if not seconds else max(ends - time.monotonic(), 0.0))
            except (StopIteration, NoneYet):
                return


class _Answer:
    """Work that names the item it answers."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self.work = work

    def __call__(self, item: Any) -> Answered:
        return item, self.work(item)


def peak_mb() -> float:
    """The most memory that this process held, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
