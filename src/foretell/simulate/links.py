"""Running tasks that share links: compiled loops over a short list of them, ascending.

Each is called in one place of a loop and becomes part of it: to compile it apart takes longer.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foretell.compiled import compiled
from foretell.simulate.readable import SLOWEST


@compiled
def join(
    moving: Any, left: Any, speed: Any, since: Any, size: int, i: int, seconds: float, now: float
) -> None:
    """Add a task that starts to move."""
    m = size
    while m > 0 and moving[m - 1] > i:
        moving[m], left[m], speed[m], since[m] = (
            moving[m - 1],
            left[m - 1],
            speed[m - 1],
            since[m - 1],
        )
        m -= 1
    moving[m], left[m], speed[m], since[m] = i, seconds, 0.0, now


@compiled
def depart(moving: Any, left: Any, speed: Any, since: Any, size: int, m: int) -> None:
    """Take the m-th task away; `size` counts it still."""
    for k in range(m, size - 1):
        moving[k], left[k], speed[k], since[k] = (
            moving[k + 1],
            left[k + 1],
            speed[k + 1],
            since[k + 1],
        )


@compiled
def fair(
    moving: Any, size: int, use_start: Any, use_link: Any, use_demand: Any, capacity: Any, room: Any
) -> None:
    """The speed of each, into `room[0]`: the same sums in the same order as `readable.speeds`.

    `room[1:]` are two rows to work in, a place for each link. No array is made and none is sliced
    here: to compile that takes longer than all the rest.
    """
    speed, rest, demand = room
    for link in range(len(capacity)):
        rest[link] = capacity[link]
    for m in range(size):
        speed[m] = -1.0
    unsettled = size
    while unsettled > 0:
        for link in range(len(capacity)):
            demand[link] = 0.0
        for m in range(size):
            if speed[m] < 0:
                for k in range(use_start[moving[m]], use_start[moving[m] + 1]):
                    demand[use_link[k]] += use_demand[k]
        level, full = np.inf, -1
        for link in range(len(capacity)):
            if demand[link] > 0 and rest[link] / demand[link] < level:
                level, full = rest[link] / demand[link], link
        level = max(level, SLOWEST)
        for m in range(size):
            i = moving[m]
            is_held = False
            for k in range(use_start[i], use_start[i + 1]):
                is_held = is_held or use_link[k] == full
            if speed[m] < 0 and (level >= 1.0 or is_held):
                speed[m] = min(level, 1.0)
                unsettled -= 1
                for k in range(use_start[i], use_start[i + 1]):
                    rest[use_link[k]] -= use_demand[k] * speed[m]
