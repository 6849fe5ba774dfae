"""Which processors a rank keeps to, so that no two ranks share a core and its hyperthreads.

Two ranks on the two hyperthreads of one core take each up to twice as long, and where the kernel
puts them changes from run to run: on a quiet machine that is most of what steps differ by.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SYSTEM = Path("/sys/devices/system/cpu")


def allowed() -> int:
    """How many processors this process may use; all of them where the system does not tell."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def cores(system: Path = _SYSTEM) -> list[frozenset[int]]:
    """The processors that this process may use, those of one core together."""
    mine = os.sched_getaffinity(0)
    return sorted({_siblings(cpu, system) & mine for cpu in mine}, key=min)


def cores_of_ranks(ranks: int, system: Path = _SYSTEM) -> list[frozenset[int]]:
    """As many whole cores for each rank as there are; none where ranks would have to share."""
    found = cores(system)
    each = len(found) // ranks
    return [
        frozenset().union(*found[r * each : (r + 1) * each]) for r in range(ranks if each else 0)
    ]


@contextmanager
def kept_to(processors: frozenset[int] | None) -> Iterator[None]:
    """Processes started inside keep to these; this one is as before when they are started."""
    before = os.sched_getaffinity(0)
    try:
        if processors:
            os.sched_setaffinity(0, processors)
        yield
    finally:
        os.sched_setaffinity(0, before)


def _siblings(cpu: int, system: Path) -> frozenset[int]:
    """The processors of a core; a system that does not tell has one a core."""
    try:
        text = (system / f"cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return frozenset({cpu})
    ends = [part.partition("-")[::2] for part in text.strip().split(",")]
    return frozenset(n for a, b in ends for n in range(int(a), int(b or a) + 1))
