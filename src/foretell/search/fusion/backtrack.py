"""The paper's search (DisCo, algorithm 1): a heap of states, random changes, cost-based pruning.

    while the heap is not empty and the best is less than `patience` states old:
        take the cheapest state; for each of {copy, merge, send together}
            do it at n random places, n drawn from 0 … beta
            keep the result where it costs at most alpha times the best

The paper leaves open what happens to states seen before and to a heap that grows: states are hashed
and met once, the heap is cut to its cheapest. Neighbours of a bucket are those next to it in the
order their gradients are made.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass
from itertools import count

import numpy as np

from foretell.search.fusion import moves
from foretell.search.fusion.guided import Run
from foretell.search.fusion.moves import Moved
from foretell.search.fusion.score import Buckets, Scored, buckets_of, own_buckets
from foretell.search.fusion.state import Fusion, unfused


@dataclass(frozen=True)
class Backtrack:
    """The paper's numbers; the cap on the heap is that of its released code."""

    alpha: float = 1.05
    beta: int = 10
    patience: int = 1000
    heap: int = 50


def backtrack(run: Run, how: Backtrack, *, seed: int = 0, start: Fusion | None = None) -> Scored:
    """The cheapest state that the paper's search meets."""
    dice, ties, judge = random.Random(seed), count(), run.judge
    state = start or unfused(judge.problem)
    ready = judge.score(state)
    first = run.see(judge.sent(ready, own_buckets(judge.problem, ready.ready)))
    heap, seen, idle = [(first.step, next(ties), first)], {_key(first)}, 0
    assert run.best is not None
    while heap and idle < how.patience and not run.over():
        scored = heapq.heappop(heap)[2]
        for method in ("copy", "merge", "send"):
            found = _applied(run, scored, method, dice.randint(0, how.beta), dice)
            if found is None or _key(found) in seen:
                idle += 1
                again = (scored.step, next(ties), scored)  # n = 0 puts a state back as it was
                heap = heap if again[2] in (h[2] for h in heap) else [*heap, again]
                heapq.heapify(heap)
                continue
            seen.add(_key(found))
            idle = 0 if found.step < run.best.step else idle + 1
            run.see(found)
            if found.step <= how.alpha * run.best.step:
                heapq.heappush(heap, (found.step, next(ties), found))
        if len(heap) > how.heap:
            heap = heapq.nsmallest(how.heap, heap)
    return run.best


def _key(scored: Scored) -> bytes:
    return scored.fusion.key + scored.buckets.key


def _applied(
    run: Run, scored: Scored, method: str, times: int, dice: random.Random
) -> Scored | None:
    """A method at some random places, played once; None where nothing came of it."""
    if method == "send":
        lists = scored.buckets.lists()
        for _ in range(times):
            _send_together(lists, dice)
        return run.judge.sent(scored, _in_order(scored, lists)) if times else None
    fusion, touched = scored.fusion, set[int]()
    for _ in range(times):
        moved = _random_move(fusion, method, dice)
        if moved is not None:
            fusion = moved.fusion
            touched |= set(moved.touched)
    if fusion is scored.fusion:
        return None
    live = [g for g in touched if fusion.group[g] == g]
    return run.judge.after(scored, fusion, live, scored.buckets)


def _random_move(fusion: Fusion, method: str, dice: random.Random) -> Moved | None:
    """A random op and a random one that it reads, fused."""
    problem = fusion.problem
    i = dice.randrange(len(problem))
    if not problem.reads[i]:
        return None
    j, edge = dice.choice(problem.reads[i])
    if method == "copy":
        return moves.copy(fusion, edge)
    a, b = int(fusion.group[i]), int(fusion.group[j])
    return moves.merge(fusion, a, b) if a != b else None


def _send_together(lists: list[list[int]], dice: random.Random) -> None:
    """A random bucket with the one before or behind it, in place."""
    if len(lists) < 2:
        return
    at = dice.randrange(len(lists) - 1)
    lists[at : at + 2] = [lists[at] + lists[at + 1]]


def _in_order(scored: Scored, lists: list[list[int]]) -> Buckets:
    """Buckets in the order their last gradient is made."""
    made = [float(np.max(scored.ready[b])) for b in lists]
    return buckets_of([lists[k] for k in np.argsort(made, kind="stable").tolist()])
