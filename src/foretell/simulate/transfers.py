"""What `flows` does, without a compiler: ordered lanes, and some tasks that share links.

Where nobody competes for a lane, a task that shares nothing starts and ends at times that follow
from those it waits for alone. Such tasks are placed as soon as these are, in any order; only the
others, here called transfers, are taken as time passes, since how fast they go depends on who else
is under way.

An instant has rounds: a task of no length that starts in one ends in the next. `readable` shares
links once a round, and dividing once or twice rounds differently, so rounds are kept here too.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from foretell.graph.graph import Graph
from foretell.graph.wiring import wiring
from foretell.simulate.plain import NOBODY, SEVERAL, Rows, latest, placed, rows
from foretell.simulate.readable import LANE, NOTHING, WAIT, Played, links_of, speeds

Moment = tuple[float, int]  # a time and its round
_NEVER: Moment = (np.inf, 0)


@dataclass(slots=True)
class _Transfer:
    """A running task that uses links: what is left of it, in seconds at full speed."""

    left: float
    speed: float
    since: float
    end: Moment


def flow(graph: Graph) -> Played:
    """Play a graph whose lanes are all ordered."""
    placed.tasks += graph.size
    return _Flow(graph).run()


class _Flow:
    """The state of one simulation."""

    def __init__(self, graph: Graph) -> None:
        n = graph.size
        self.waits, self.turns = rows(graph)
        self.seconds = graph.seconds.tolist()
        self.links, self.capacity = links_of(graph), graph.links.capacity.tolist()
        self.followers, self.missing = _followers(graph)
        self.start, self.end = [0.0] * n, [0.0] * n
        self.cause, self.why = [NOBODY] * n, [NOTHING] * n
        self.later: dict[int, int] = {}  # the round in which tasks end that end in another than 0
        self.due: list[tuple[Moment, int]] = []  # transfers that are to start
        self.moving: dict[int, _Transfer] = {}

    def run(self) -> Played:
        self.place([i for i, count in enumerate(self.missing) if not count])
        while self.due or self.moving:
            now = self.due[0][0] if self.due else _NEVER
            for t in self.moving.values():
                now = min(now, t.end)
            self.finish(now)
            while self.due and self.due[0][0] == now:
                i = heapq.heappop(self.due)[1]
                self.moving[i] = _Transfer(self.seconds[i], 0.0, now[0], _NEVER)
            self.share(now)
        return Played(
            np.array(self.start), np.array(self.end), np.array(self.cause, np.int32),
            np.array(self.why, np.uint8),
        )  # fmt: skip

    def place(self, ready: list[int]) -> None:
        """Place tasks all of whose waits are placed, and what follows; transfers become due."""
        followers, missing = self.followers, self.missing
        while ready:
            i = ready.pop()
            begin, seconds = self.begin(i), self.seconds[i]
            if self.links[i] and seconds:
                heapq.heappush(self.due, ((begin, self.round_of(i)), i))
                continue
            self.end[i] = begin + seconds
            if self.end[i] == begin:
                self.later[i] = self.round_of(i) + 1
            for j in followers[i]:
                missing[j] -= 1
                if not missing[j]:
                    ready.append(j)

    def begin(self, i: int) -> float:
        """When a task starts, and why: noted, and said."""
        ready, by = _last(self.waits, i, self.end)
        free, holder = _last(self.turns, i, self.end)
        if free > ready or (by < 0 <= holder):
            self.cause[i], self.why[i] = holder, LANE
        elif by >= 0:
            self.cause[i], self.why[i] = by, WAIT
        self.start[i] = begin = free if free > ready else ready
        return begin

    def round_of(self, i: int) -> int:
        """The round in which a task starts: the last in which one ends that it waited for."""
        if not self.later:
            return 0
        begin, last = self.start[i], 0
        for table in (self.waits, self.turns):
            one = [(table.other[i], table.delay[i])] if table.other[i] >= 0 else []
            for other, delay in table.several.get(i, one):
                if self.end[other] == begin == self.end[other] + delay:
                    last = max(last, self.later.get(other, 0))
        return last

    def finish(self, now: Moment) -> None:
        """End the transfers that end now, and place what follows."""
        ready = []
        for i in [i for i, t in self.moving.items() if t.end == now]:
            del self.moving[i]
            self.end[i] = now[0]
            if now[1]:
                self.later[i] = now[1]
            for j in self.followers[i]:
                self.missing[j] -= 1
                if not self.missing[j]:
                    ready.append(j)
        self.place(ready)

    def share(self, now: Moment) -> None:
        """Give every transfer its share and say anew when it ends, where its speed has changed."""
        time, turn = now
        for i, speed in speeds(sorted(self.moving), self.links, self.capacity).items():
            t = self.moving[i]
            if speed != t.speed:
                t.left = max(t.left - (time - t.since) * t.speed, 0.0)
                t.speed, t.since = speed, time
                end = time + t.left / speed
                t.end = (end, 0) if end > time else (end, turn + 1)


def _last(rows: Rows, i: int, end: list[float]) -> tuple[float, int]:
    """When the last of what a task waits for is done, and which that is."""
    other = rows.other[i]
    if other >= 0:
        return end[other] + rows.delay[i], other
    return latest(rows.several[i], end) if other == SEVERAL else (0.0, NOBODY)


def _followers(graph: Graph) -> tuple[list[list[int]], list[int]]:
    """Who waits for each task, for its end or its turn; and for how many things each task waits."""
    wires = wiring(graph)
    waiting = np.concatenate([wires.waits.waiting, wires.turns.waiting])
    after = np.concatenate([wires.waits.after, wires.turns.after])
    bounds = np.append(0, np.cumsum(np.bincount(after, minlength=graph.size))).tolist()
    ranked = waiting[np.argsort(after, kind="stable")].tolist()
    followers = [ranked[a:b] for a, b in pairwise(bounds)]
    return followers, np.bincount(waiting, minlength=graph.size).tolist()
