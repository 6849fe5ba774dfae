"""Where pieces of work are done, and the promise that it makes no difference.

    with opened(jobs=4) as pool:                  # or opened(on_ray="local")
        answers = pool.map(work, items, tell)

Answers come in the order of the items, whichever worker did them and whenever, so what is made of
them is the same on every pool, bit for bit, as long as `work` is. A piece whose worker died is done
again; one whose workers die `TRIES` times, while nothing else is done, ends the map. What `work`
raises is raised here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from foretell.errors import ForetellError, InputError

TRIES = 3
LOCAL = "local"
OnProgress = Callable[[int, int], None]  # pieces done, of how many


def silent(done: int, all_: int) -> None:
    """No-op progress callback."""


class Pool(Protocol):
    """Does pieces of work."""

    died: int  # workers that did, so far

    @property
    def size(self) -> int:
        """Pieces at once."""
        ...

    def map(
        self, work: Callable[[Any], Any], items: Sequence[Any], tell: OnProgress = silent,
        *, by_machine: bool = False,
    ) -> list[Any]:  # fmt: skip
        """`work` of each item, in their order; `by_machine` does one at a time on each machine."""
        ...


class Alone:
    """This process: no pool at all."""

    size, died = 1, 0

    def map(
        self, work: Callable[[Any], Any], items: Sequence[Any], tell: OnProgress = silent,
        *, by_machine: bool = False,
    ) -> list[Any]:  # fmt: skip
        """`work` of each item, one after another."""
        found = []
        for done, item in enumerate(items, start=1):
            found.append(work(item))
            tell(done, len(items))
        return found


@contextmanager
def opened(jobs: int = 1, on_ray: str = "") -> Iterator[Pool]:
    """A pool that is gone, with all its workers, when the block is left."""
    if on_ray and jobs > 1:
        raise InputError(
            f"{jobs} jobs beside a Ray cluster", hint="the cluster says how many: leave --jobs out"
        )
    if on_ray:
        from foretell.pool.on_ray import connected

        with connected(on_ray) as pool:
            yield pool
    elif jobs > 1:
        from foretell.pool.processes import Processes

        with Processes(jobs) as pool:
            yield pool
    else:
        yield Alone()


def given_up(item: Any, why: str) -> ForetellError:
    """The error for a piece that no worker survives."""
    text = repr(item)
    short = text if len(text) <= 120 else f"{text[:117]}..."
    return ForetellError(
        f"{TRIES} workers died over the same piece of work ({why}): {short}",
        hint="too little memory for so many at once? try fewer jobs",
    )
