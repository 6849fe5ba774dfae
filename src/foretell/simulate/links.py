"""Running tasks that share links: compiled loops over a short list of them, ascending."""

from typing import Any

import numpy as np
from numba import njit

from foretell.simulate.readable import SLOWEST


@njit(cache=True)
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


@njit(cache=True)
def depart(moving: Any, left: Any, speed: Any, since: Any, size: int, m: int) -> None:
    """Take the m-th task away; `size` counts it still."""
    for k in range(m, size - 1):
        moving[k], left[k], speed[k], since[k] = (
            moving[k + 1],
            left[k + 1],
            speed[k + 1],
            since[k + 1],
        )


@njit(cache=True)
def fair(moving: Any, use_start: Any, use_link: Any, use_demand: Any, capacity: Any) -> Any:
    """The speed of each: the same sums in the same order as `readable.speeds`."""
    room = capacity.copy()
    demand = np.empty(len(room))
    speed = np.full(len(moving), -1.0)
    unsettled = len(moving)
    while unsettled > 0:
        demand[:] = 0.0
        for m in range(len(moving)):
            if speed[m] < 0:
                for k in range(use_start[moving[m]], use_start[moving[m] + 1]):
                    demand[use_link[k]] += use_demand[k]
        level, full = np.inf, -1
        for link in range(len(room)):
            if demand[link] > 0 and room[link] / demand[link] < level:
                level, full = room[link] / demand[link], link
        level = max(level, SLOWEST)
        for m in range(len(moving)):
            i = moving[m]
            if speed[m] < 0 and (level >= 1.0 or uses(use_start, use_link, i, full)):
                speed[m] = min(level, 1.0)
                unsettled -= 1
                for k in range(use_start[i], use_start[i + 1]):
                    room[use_link[k]] -= use_demand[k] * speed[m]
    return speed


@njit(cache=True)
def uses(use_start: Any, use_link: Any, i: int, link: int) -> bool:
    for k in range(use_start[i], use_start[i + 1]):
        if use_link[k] == link:
            return True
    return False
