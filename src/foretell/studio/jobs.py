"""Searches that run beside the page: what they say meanwhile, their answer, and a way to stop."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from foretell.errors import ForetellError, InputError
from foretell.studio.child import SEARCHING, Stopped, call

MOST_TRAIL = 2000  # points of progress that are kept
MOST = 2  # searches at once: they share the processor with the page
Work = Callable[[Callable[[str], None]], Any]  # a function of a module, bound to its arguments


@dataclass(eq=False)
class Job:
    """One search: `state` is running, done, failed or stopped."""

    what: str
    state: str = "running"
    says: str = ""
    answer: Any = None
    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    stop: threading.Event = field(default_factory=threading.Event)
    trail: list[tuple[float, float]] = field(default_factory=list)  # seconds, best so far
    partial: Any = None  # what is found so far

    @property
    def seconds(self) -> float:
        return (self.ended or time.monotonic()) - self.began

    def tell(self, words: str, best: float | None = None, found: Any = None) -> None:
        """Note the state of the search, its best value and its results so far."""
        self.says = words
        if best is not None and len(self.trail) < MOST_TRAIL:
            self.trail.append((self.seconds, best))
        self.partial = self.partial if found is None else found


class Jobs:
    """All searches by number."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def start(self, what: str, work: Work) -> str:
        """Run work in a process of its own, and follow it."""
        with self._lock:
            if sum(job.state == "running" for job in self._jobs.values()) >= MOST:
                raise InputError(f"{MOST} searches are running", hint="stop one of them first")
            key, job = str(next(self._numbers)), Job(what)
            self._jobs[key] = job
        threading.Thread(target=_run, args=(job, work), daemon=True, name=what).start()
        return key

    def __getitem__(self, key: str) -> Job:
        with self._lock:
            return self._jobs[key]

    def __contains__(self, key: object) -> bool:
        with self._lock:
            return key in self._jobs


def _run(job: Job, work: Work) -> None:
    try:
        job.answer = call(work, room=SEARCHING, tell=job.tell, stop=job.stop)
        job.state = "done"
    except Stopped:
        job.state, job.says = "stopped", "stopped"
    except ForetellError as error:
        job.state, job.says = "failed", str(error)
    finally:
        job.ended = time.monotonic()
        if job.state == "running":  # a bug: its traceback goes to the terminal, the page shows it
            job.state, job.says = "failed", "a bug in foretell: the terminal shows where"
