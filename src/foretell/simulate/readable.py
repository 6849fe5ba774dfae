"""The rule of the simulator, written to be read. This engine defines what is right.

A task starts when everything it waits for is done and every lane it needs is free. Lanes with an
issue order keep it; free lanes take the highest priority, then the earliest ready, then the lowest
number. A task may hold several lanes at once, and holds them for its gap after it has ended.
Tasks that use links share them: no task is slowed more than another on the same full link, and none
less than it must be. All that happens at one instant is known before anything starts at it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from foretell.graph.build import wiring
from foretell.graph.graph import NONE, Array, Graph

END, FREE, ARRIVE = 0, 1, 2  # what can happen: a task ends, its lanes are free, a wait is over
NOTHING, WAIT, LANE = 0, 1, 2  # what let a task start
SLOWEST = 1e-9  # a transfer never stands still, whatever rounding leaves of a link


class TaskTimes(NamedTuple):
    """When every task starts and ends, and which task let it start."""

    start: Array
    end: Array
    cause: Array  # a task, or NONE
    why: Array  # NOTHING, WAIT or LANE


@dataclass
class _Transfer:
    """A running task that uses links: what is left of it, in seconds at full speed."""

    left: float
    speed: float
    since: float


def simulate_readable(graph: Graph) -> TaskTimes:
    """Simulate a graph from its beginning to its end."""
    return _Simulation(graph).run()


class _Simulation:
    """The state of one simulation."""

    def __init__(self, graph: Graph) -> None:
        n, waits = graph.size, wiring(graph).waits
        self.seconds, self.gap = graph.seconds.tolist(), graph.gap.tolist()
        self.priority = graph.priority.tolist()
        self.lanes = _lanes_of(graph)
        self.links = links_of(graph)
        self.capacity = graph.links.capacity.tolist()
        self.waiting = np.diff(waits.start).tolist()
        self.followers: list[list[tuple[int, float]]] = [[] for _ in range(n)]
        rows = (waits.waiting.tolist(), waits.after.tolist(), waits.lags.tolist())
        for i, p, lag in zip(*rows, strict=True):
            self.followers[p].append((i, lag))
        # What is still to be started on each ordered lane.
        self.issued = _issue_order(graph, self.lanes)
        self.holder: list[int | None] = [None] * len(graph.lanes)  # who holds a lane now
        self.freed = [(0.0, NONE)] * len(graph.lanes)  # when a lane was last freed, and by whom
        self.ready = [(0.0, NONE)] * n  # when the last wait was over, and whose end that was
        self.start, self.end = [0.0] * n, [0.0] * n
        self.cause, self.why = [NONE] * n, [NOTHING] * n
        self.events: list[tuple[float, int, int]] = []
        self.candidates = {i for i in range(n) if self.waiting[i] == 0}
        self.moving: dict[int, _Transfer] = {}

    def run(self) -> TaskTimes:
        now = 0.0
        while True:
            changed = self.start_all(now)
            if changed or self.moved:
                self.share_links(now)
            if not self.events:
                break
            now = self.events[0][0]
            self.moved = False
            while self.events and self.events[0][0] == now:
                self.happen(*heapq.heappop(self.events))
        assert not self.candidates, "a verified graph never gets stuck"
        return TaskTimes(
            np.array(self.start), np.array(self.end), np.array(self.cause, np.int32),
            np.array(self.why, np.uint8),
        )  # fmt: skip

    moved = False  # whether a transfer ended at this instant

    # What happens

    def happen(self, now: float, what: int, i: int) -> None:
        if what == END:
            self.finish(i, now)
        elif what == FREE:
            self.leave(i, now)
        else:
            self.arrive(i)

    def finish(self, i: int, now: float) -> None:
        if i in self.moving:
            if self.end[i] != now:
                return  # its speed has changed since; it ends at another time
            del self.moving[i]
            self.moved = True
        elif self.links[i] and self.seconds[i]:
            return  # it ended already at this very time
        for follower, lag in self.followers[i]:
            at, by = self.ready[follower]
            if now + lag > at or (now + lag == at and (by == NONE or i < by)):
                self.ready[follower] = (now + lag, i)
            if lag:
                heapq.heappush(self.events, (now + lag, ARRIVE, follower))
            else:
                self.arrive(follower)
        if self.gap[i]:
            heapq.heappush(self.events, (now + self.gap[i], FREE, i))
        else:
            self.leave(i, now)

    def arrive(self, i: int) -> None:
        self.waiting[i] -= 1
        if self.waiting[i] == 0:
            self.candidates.add(i)

    def leave(self, i: int, now: float) -> None:
        for lane in self.lanes[i]:
            self.holder[lane] = None
            self.freed[lane] = (now, i)

    # What starts

    def start_all(self, now: float) -> bool:
        """Start all that can, most urgent first; whether any of them uses links."""
        urgent = sorted(self.candidates, key=lambda i: (-self.priority[i], self.ready[i][0], i))
        changed = False
        for i in urgent:
            if self.can_start(i):
                self.begin(i, now)
                changed = changed or i in self.moving
        return changed

    def can_start(self, i: int) -> bool:
        return all(
            self.holder[lane] is None and (lane not in self.issued or self.issued[lane][-1] == i)
            for lane in self.lanes[i]
        )

    def begin(self, i: int, now: float) -> None:
        self.candidates.remove(i)
        self.start[i], (ready, by) = now, self.ready[i]
        free, holder = max(
            (self.freed[lane] for lane in self.lanes[i]),
            key=lambda f: (f[0], f[1] != NONE, -f[1]),
            default=(0.0, NONE),
        )
        if free > ready:
            self.cause[i], self.why[i] = holder, LANE
        elif by != NONE:
            self.cause[i], self.why[i] = by, WAIT
        elif holder != NONE:
            self.cause[i], self.why[i] = holder, LANE
        for lane in self.lanes[i]:
            self.holder[lane] = i
            if lane in self.issued:
                self.issued[lane].pop()
        self.end[i] = now + self.seconds[i]
        if self.links[i] and self.seconds[i]:
            self.moving[i] = _Transfer(self.seconds[i], 0.0, now)
        else:
            heapq.heappush(self.events, (self.end[i], END, i))

    # What is shared

    def share_links(self, now: float) -> None:
        """Give every transfer its share and say anew when it ends, where its speed has changed."""
        for i, speed in speeds(sorted(self.moving), self.links, self.capacity).items():
            t = self.moving[i]
            if speed != t.speed:
                t.left = max(t.left - (now - t.since) * t.speed, 0.0)
                t.speed, t.since = speed, now
                self.end[i] = now + t.left / speed
                heapq.heappush(self.events, (self.end[i], END, i))


def speeds(
    moving: list[int], links: list[list[tuple[int, float]]], capacity: list[float]
) -> dict[int, float]:
    """All speeds rise together; those on a link stop when it is full, the others go on to 1."""
    unsettled, room = list(moving), list(capacity)
    speed: dict[int, float] = {}
    while unsettled:
        demand = [0.0] * len(room)
        for i in unsettled:
            for link, d in links[i]:
                demand[link] += d
        shares = [(room[k] / demand[k], k) for k in range(len(room)) if demand[k]]
        level, full = min(shares)
        level = max(level, SLOWEST)
        if level >= 1.0:
            return speed | dict.fromkeys(unsettled, 1.0)
        for i in [i for i in unsettled if any(k == full for k, _ in links[i])]:
            speed[i] = level
            unsettled.remove(i)
            for link, d in links[i]:
                room[link] -= d * level
    return speed


def links_of(graph: Graph) -> list[list[tuple[int, float]]]:
    """The links that each task uses, and its demand of each."""
    links: list[list[tuple[int, float]]] = [[] for _ in range(graph.size)]
    for task, link, demand in zip(
        graph.used.task.tolist(), graph.used.link.tolist(), graph.used.demand.tolist(), strict=True
    ):
        links[task].append((link, demand))
    return links


def _lanes_of(graph: Graph) -> list[tuple[int, ...]]:
    """Every lane that each task holds, its own first."""
    lanes: list[tuple[int, ...]] = [(k,) if k != NONE else () for k in graph.lane.tolist()]
    for task, lane in zip(graph.held.task.tolist(), graph.held.lane.tolist(), strict=True):
        lanes[task] = (*lanes[task], lane)
    return lanes


def _issue_order(graph: Graph, lanes: list[tuple[int, ...]]) -> dict[int, list[int]]:
    """The tasks of every ordered lane, last issued first."""
    order = graph.order.tolist()
    issued: dict[int, list[int]] = {int(k): [] for k in np.flatnonzero(graph.lanes.ordered)}
    for task, held in enumerate(lanes):
        for lane in held:
            if lane in issued:
                issued[lane].append(task)
    for tasks in issued.values():
        tasks.sort(key=lambda i: (order[i], i), reverse=True)
    return issued
