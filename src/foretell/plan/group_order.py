"""In which order each rank takes its runs of layers, there and back, micro-batch by micro-batch.

A step in which every forward takes 1 and every backward 2 is played; a rank that may choose takes a
backward, then the earliest micro-batch. All ranks play the same step, so that nobody has to be
asked; and since it is a step that could be, no rank waits for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

_TAKES = {"F": 1, "B": 2}  # a backward is about twice a forward


class Act(NamedTuple):
    """The forward or backward of one run of layers for one micro-batch."""

    kind: str  # F or B
    run: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.run}{self.kind}{self.micro_batch}"


def orders(where: Sequence[Sequence[int]], batches: int) -> dict[int, list[Act]]:
    """What each rank does, in order; `where` has the ranks of each run of layers."""
    acts = [Act(k, q, m) for m in range(batches) for q in range(len(where)) for k in "FB"]
    before = {act: _before(act, len(where)) for act in acts}
    then: dict[Act, list[Act]] = {act: [] for act in acts}
    for act, needs in before.items():
        for need in needs:
            then[need].append(act)
    missing = {act: sum(len(where[need.run]) for need in before[act]) for act in acts}
    found: dict[int, list[Act]] = {rank: [] for ranks in where for rank in ranks}
    waiting: dict[int, list[tuple[bool, int, int, Act]]] = {rank: [] for rank in found}
    busy: list[tuple[int, int, Act]] = []  # end, rank, what
    idle = set(found)

    def ready(act: Act) -> None:
        for rank in where[act.run]:
            heappush(waiting[rank], (act.kind == "F", act.micro_batch, act.run, act))

    def begin(now: int) -> None:
        for rank in sorted(idle):
            if waiting[rank]:
                act = heappop(waiting[rank])[-1]
                found[rank].append(act)
                idle.discard(rank)
                heappush(busy, (now + _TAKES[act.kind], rank, act))

    for act in acts:
        if not missing[act]:
            ready(act)
    begin(0)
    while busy:
        now = busy[0][0]
        while busy and busy[0][0] == now:
            _, rank, act = heappop(busy)
            idle.add(rank)
            for follower in then[act]:
                missing[follower] -= 1
                if not missing[follower]:
                    ready(follower)
        begin(now)
    return found


def _before(act: Act, runs: int) -> list[Act]:
    """What has to be done on all its ranks first; micro-batches of a run go in turn."""
    kind, q, m = act
    earlier = [Act(kind, q, m - 1)] if m else []
    if kind == "F":
        return earlier + ([Act("F", q - 1, m)] if q else [])
    return [*earlier, Act("F", q, m)] + ([Act("B", q + 1, m)] if q + 1 < runs else [])
