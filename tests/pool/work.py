"""Pieces of work for pools: they have to be found by name in other processes."""

import os
import signal
import time
from functools import partial
from pathlib import Path

from foretell.errors import InputError


def squared(x):
    return x * x


def late_first(x):
    time.sleep(0.2 if x == 0 else 0.0)
    return x, os.getpid()


def dies_once(item):
    """Ends its own process the first time it is asked for `item`'s number."""
    number, folder = item
    mark = Path(folder) / "dead"
    if number == 5 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def dies(item):
    if item == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def fails(item):
    if item == 3:
        raise InputError("three is no good", hint="four")
    return item


def killed_halfway(item, work, folder, half):
    """Does a piece of real work; the worker that is asked for the middle one is killed, once."""
    mark = Path(folder) / "killed"
    if item[0] == half and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return work(item[1])


class Killing:
    """A pool of which a worker is killed half-way through every map."""

    def __init__(self, pool, folder):
        self.pool, self.folder, self.killed = pool, folder, 0

    @property
    def size(self):
        return self.pool.size

    def map(self, work, items, tell=lambda done, all_: None, **options):
        place = self.folder / str(self.killed)
        place.mkdir()
        self.killed += 1
        dying = partial(killed_halfway, work=work, folder=str(place), half=len(items) // 2)
        return self.pool.map(dying, list(enumerate(items)), tell, **options)
