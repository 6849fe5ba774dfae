"""Processes of this machine as a pool.

When one dies the others are ended too (`concurrent.futures` works so); what was done is kept, what
was not is done again by new ones.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from types import TracebackType
from typing import Any, Self

from foretell.pool.pool import TRIES, OnProgress, given_up, silent


class Processes:
    """A pool of processes; used with `with`."""

    def __init__(self, jobs: int) -> None:
        self.size, self.died = jobs, 0
        self.executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self._end()

    def map(
        self, work: Callable[[Any], Any], items: Sequence[Any], tell: OnProgress = silent,
        *, by_machine: bool = False,
    ) -> list[Any]:  # fmt: skip
        """`work` of each item, in their order; `by_machine` has them one after another here."""
        found: dict[int, Any] = {}
        tries = 0
        while len(found) < len(items):
            left = [k for k in range(len(items)) if k not in found]
            before = len(found)
            try:
                for k, answer in self._some(work, items, left[:1] if by_machine else left):
                    found[k] = answer
                    tell(len(found), len(items))
            except BrokenProcessPool:
                self.died += 1
                tries = 1 if len(found) > before else tries + 1
                self._end()
                if tries == TRIES:
                    raise given_up(items[left[0]], "a process of this machine") from None
        return [found[k] for k in range(len(items))]

    def _some(self, work: Callable[[Any], Any], items: Sequence[Any], left: list[int]) -> Any:
        """Index and answer of these items, as they are done."""
        if self.executor is None:
            # A fresh interpreter each: threads of torch do not survive a fork.
            context = get_context("spawn")
            self.executor = ProcessPoolExecutor(self.size, context, initializer=_quiet)
        pending: dict[Future[Any], int] = {self.executor.submit(work, items[k]): k for k in left}
        for future in as_completed(pending):
            yield pending[future], future.result()

    def _end(self) -> None:
        """End every process, also in the middle of something."""
        if self.executor is None:
            return
        workers = list((self.executor._processes or {}).values())
        self.executor.shutdown(wait=False, cancel_futures=True)
        for process in workers:
            process.terminate()
        for process in workers:
            process.join()
        self.executor = None


def _quiet() -> None:
    """Ignore Ctrl-C here: the parent process handles it and ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
