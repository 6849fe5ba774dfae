"""In which order each rank takes its runs of layers, there and back, micro-batch by micro-batch.

A step in which every forward takes 1 and every backward 2 is simulated; a rank that may choose
takes a backward, then the earliest micro-batch. All ranks simulate the same step, so that nothing
has to be asked; and since it is a step that could be, no rank waits for ever.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

_TAKES = {"F": 1, "B": 2}  # a backward is about twice a forward


class Action(NamedTuple):
    """The forward or backward of one run of layers for one micro-batch."""

    kind: str  # F or B
    run: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.run}{self.kind}{self.micro_batch}"


def orders(
    where: Sequence[Sequence[int]], batches: int, together: Collection[int] = ()
) -> dict[int, list[Action]]:
    """What each rank does, in order; `where` has the ranks of each run of layers.

    Ranks of runs in `together` (the split ones) begin at the same moment: they communicate inside.
    """
    played = _Played(where, batches, together)
    now = 0
    played.begin(now)
    while played.busy:
        now = played.busy[0][0]
        played.end(now)
        played.begin(now)
    return played.found


class _Played:
    """A step on its way."""

    def __init__(
        self, where: Sequence[Sequence[int]], batches: int, together: Collection[int]
    ) -> None:
        self.where, self.together = where, together
        self.found: dict[int, list[Action]] = {rank: [] for ranks in where for rank in ranks}
        self.idle, self.busy = set(self.found), list[tuple[int, int, Action]]()  # end, rank, what
        self.ready: dict[int, list[tuple[bool, int, int]]] = {rank: [] for rank in self.found}
        self.then, self.missing = (
            dict[Action, list[Action]](),
            dict[Action, int](),
        )  # ends still to come
        acts = [Action(k, q, m) for m in range(batches) for q in range(len(where)) for k in "FB"]
        for act in acts:
            needs = _before(act, len(where))
            for need in needs:
                self.then.setdefault(need, []).append(act)
            self.missing[act] = sum(len(where[need.run]) for need in needs)
            if not needs:
                self._offer(act)

    def _offer(self, act: Action) -> None:
        """Nothing is missing any more: its ranks may take it."""
        for rank in self.where[act.run]:
            self.ready[rank].append((act.kind == "F", act.micro_batch, act.run))

    def begin(self, now: int) -> None:
        """Idle ranks take what comes first."""
        for rank in sorted(self.idle):
            if rank in self.idle:
                chosen = next(filter(self._can_begin, sorted(self.ready[rank])), None)
                if chosen is not None:
                    self._take(chosen, rank, now)

    def _can_begin(self, key: tuple[bool, int, int]) -> bool:
        return key[2] not in self.together or self.idle.issuperset(self.where[key[2]])

    def _take(self, key: tuple[bool, int, int], rank: int, now: int) -> None:
        """Let a rank begin what it chose, and with it all that have to begin at once."""
        is_forward, m, q = key
        act = Action("F" if is_forward else "B", q, m)
        for one in self.where[q] if q in self.together else (rank,):
            self.ready[one].remove(key)
            self.found[one].append(act)
            self.idle.discard(one)
            heappush(self.busy, (now + _TAKES[act.kind], one, act))

    def end(self, now: int) -> None:
        """What is done at this moment frees its rank, and others that waited for it."""
        while self.busy and self.busy[0][0] == now:
            _, rank, act = heappop(self.busy)
            self.idle.add(rank)
            for follower in self.then.get(act, ()):
                self.missing[follower] -= 1
                if not self.missing[follower]:
                    self._offer(follower)


def _before(act: Action, runs: int) -> list[Action]:
    """What has to be done on all its ranks first; micro-batches of a run go in turn."""
    kind, q, m = act
    earlier = [Action(kind, q, m - 1)] if m else []
    if kind == "F":
        return earlier + ([Action("F", q - 1, m)] if q else [])
    return [*earlier, Action("F", q, m)] + ([Action("B", q + 1, m)] if q + 1 < runs else [])
