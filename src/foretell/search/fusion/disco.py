"""The paper's search (DisCo, algorithm 1): a heap of states, random changes, cost-based pruning.

    optimum, idle = the step as it is given, 0
    while the heap is not empty and idle < patience:
        take the cheapest state off; for each of {copy, merge, send together}
            do it at n random places, n drawn from 0 … beta
            cheaper than the optimum: that is the optimum now, idle = 0; else idle += 1
            at most alpha times the optimum: onto the heap

The optimum is the search's own: rivals that others found do not prune it. n = 0 leaves a state as
it is, so it goes back onto the heap. The paper leaves open what happens to states met before and to
a heap that grows: a state is simulated and pushed once (met again it counts as idle), the heap is
cut to its cheapest. Neighbours of a message are those next to it in the order gradients are made.
"""

from __future__ import annotations

import heapq
import json
import random
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Annotated, Any

import msgspec
import numpy as np

from foretell.errors import InputError
from foretell.io import read_json, write_text
from foretell.search.fusion.climb import Run
from foretell.search.fusion.score import Buckets, Evaluator, Scored, buckets_of, own_buckets
from foretell.search.fusion.state import Fusion, Moved, copy_kernel, fused, merge, unfused

METHODS = ("copy", "merge", "send")


@dataclass(frozen=True)
class Backtrack:
    """The paper's numbers; the cap on the heap is that of its released code."""

    alpha: float = 1.05
    beta: int = 10
    patience: int = 1000
    heap: int = 50


@dataclass
class Trail:
    """Where a search stands: all it needs to go on as if it had never stopped."""

    dice: random.Random
    optimum: Scored
    heap: list[tuple[float, int, Scored]] = field(default_factory=list)
    seen: set[bytes] = field(default_factory=set)
    idle: int = 0
    pushed: int = 0  # states so far: of equal costs the older goes first

    def push(self, scored: Scored) -> None:
        """A state onto the heap, unless it lies there."""
        if all(held is not scored for _, _, held in self.heap):
            heapq.heappush(self.heap, (scored.step, self.pushed, scored))
            self.pushed += 1


def begun(run: Run, *, seed: int = 0, start: Scored | None = None) -> Trail:
    """A search at its beginning: nothing fused, every gradient by itself, or what is given."""
    judge = run.judge
    if start is None:
        ready = judge.score(unfused(judge.problem))
        start = judge.sent(ready, own_buckets(judge.problem, ready.ready))
    trail = Trail(random.Random(seed), run.see(start), seen={_key(start)})
    trail.push(start)
    return trail


def backtrack(run: Run, how: Backtrack, trail: Trail) -> Scored:
    """The cheapest state that the paper's search meets; the trail stands where it stopped."""
    while trail.heap and trail.idle < how.patience and not run.over():
        scored = heapq.heappop(trail.heap)[2]
        for method in METHODS:
            _tried(run, how, trail, scored, method)
        if len(trail.heap) > how.heap:
            trail.heap = heapq.nsmallest(how.heap, trail.heap)
    return trail.optimum


def _tried(run: Run, how: Backtrack, trail: Trail, scored: Scored, method: str) -> None:
    """One method at n random places of a state, judged."""
    found = _applied(run, trail, scored, method, trail.dice.randint(0, how.beta))
    if found is None:
        trail.idle += 1
        return
    if found.step < trail.optimum.step:
        trail.optimum, trail.idle = found, 0
    else:
        trail.idle += 1
    if found.step <= how.alpha * trail.optimum.step:
        trail.push(found)


def _applied(run: Run, trail: Trail, scored: Scored, method: str, times: int) -> Scored | None:
    """The state with a method done so often, simulated once; None where it was met before."""
    fusion, buckets, touched = scored.fusion, scored.buckets, set[int]()
    if method == "send":
        buckets = _sent_together(scored, times, trail.dice)
    else:
        fusion, touched = _moved(fusion, method, times, trail.dice)
    if fusion is scored.fusion and buckets is scored.buckets:
        return scored
    key = _hash(fusion, buckets)
    if key in trail.seen:
        return None
    trail.seen.add(key)
    if fusion is scored.fusion:
        return run.see(run.judge.sent(scored, buckets))
    live = [g for g in touched if fusion.group[g] == g]
    return run.see(run.judge.after(scored, fusion, live, buckets))


def _key(scored: Scored) -> bytes:
    return _hash(scored.fusion, scored.buckets)


def _hash(fusion: Fusion, buckets: Buckets) -> bytes:
    return blake2b(fusion.key + buckets.key, digest_size=16).digest()


def _moved(fusion: Fusion, method: str, times: int, dice: random.Random) -> tuple[Fusion, set[int]]:
    """A fusion after so many random changes of one sort, and the groups that cost other now."""
    touched = set[int]()
    for _ in range(times):
        moved = random_move(fusion, method, dice)
        if moved is not None:
            fusion = moved.fusion
            touched |= set(moved.touched)
    return fusion, touched


def random_move(fusion: Fusion, method: str, dice: random.Random) -> Moved | None:
    """A random op and a random one that it reads, fused; None where that is not allowed."""
    problem = fusion.problem
    i = dice.randrange(len(problem))
    if not problem.reads[i]:
        return None
    j, edge = dice.choice(problem.reads[i])
    if method == "copy":
        return copy_kernel(fusion, edge)
    a, b = int(fusion.group[i]), int(fusion.group[j])
    return merge(fusion, a, b) if a != b else None


def _sent_together(scored: Scored, times: int, dice: random.Random) -> Buckets:
    """Random messages with the one before or behind, in the order their last gradient is made."""
    lists = scored.buckets.lists()
    for _ in range(times):
        if len(lists) > 1:
            at = dice.randrange(len(lists) - 1)
            lists[at : at + 2] = [lists[at] + lists[at + 1]]
    if len(lists) == len(scored.buckets):
        return scored.buckets
    made = [float(np.max(scored.ready[b])) for b in lists]
    return buckets_of([lists[k] for k in np.argsort(made, kind="stable").tolist()])


# A stopped search as a file, to go on as if it had never stopped.
#
# JSON: the model's fingerprint, the options it ran with, the dice, what was met, and the states
# that are still open, each as its groups, copied edges and messages.


class _State(msgspec.Struct):
    """One state: groups of fused ops, copied edges, messages."""

    groups: list[list[int]]
    copied: list[int]
    messages: list[list[int]]


class _File(msgspec.Struct):
    """What `save` writes."""

    asked: dict[str, Any]
    dice: tuple[int, list[int], float | None]
    idle: int
    evaluations: int
    pushed: int
    turns: list[int]
    seen: list[str]
    states: Annotated[list[_State], msgspec.Meta(min_length=1)]


def save_trail(trail: Trail, run: Run, path: Path, asked: dict[str, Any]) -> None:
    """Write where a search stands."""
    states = [trail.optimum, *(held for _, _, held in trail.heap)]
    version, numbers, gauss = trail.dice.getstate()
    told = {
        "asked": _asked(run.judge, asked),
        "dice": [version, list(numbers), gauss],
        "idle": trail.idle,
        "evaluations": run.judge.evaluations,
        "pushed": trail.pushed,
        "turns": [turn for _, turn, _ in trail.heap],
        "seen": sorted(key.hex() for key in trail.seen),
        "states": [_plain(state) for state in states],
    }
    write_text(path, json.dumps(told))


def load_trail(run: Run, path: Path, asked: dict[str, Any]) -> Trail:
    """The search that a file holds, of the same model and options."""
    told = read_json(path, _File, "search to go on with")
    _require_same(told.asked, _asked(run.judge, asked), path)
    try:
        optimum, *states = [_scored(run.judge, state) for state in told.states]
        dice = Random()
        dice.setstate((told.dice[0], tuple(told.dice[1]), told.dice[2]))
        heap = [(s.step, turn, s) for s, turn in zip(states, told.turns, strict=True)]
        seen = {bytes.fromhex(key) for key in told.seen}
    except (ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
        raise InputError(f"`{path}` holds no search of this model: {error}") from None
    run.see(optimum)
    run.judge.evaluations = told.evaluations
    return Trail(dice, optimum, heap, seen, told.idle, told.pushed)


def _asked(judge: Evaluator, asked: dict[str, Any]) -> dict[str, Any]:
    more = {"by_message": judge.by_message, "sharded": judge.sharded}
    return {"model": judge.problem.fingerprint, **asked, **more}


def _require_same(known: dict[str, Any], wanted: dict[str, Any], path: Path) -> None:
    for name, value in wanted.items():
        if known.get(name) != value:
            raise InputError(
                f"the search in `{path}` ran with {name}={known.get(name)}, not {value}",
                hint="go on with the same model and options, or name another file",
            )


def _plain(scored: Scored) -> dict[str, Any]:
    fusion = scored.fusion
    return {
        "groups": [list(ops) for ops in fusion.members.values()],
        "copied": fusion.copied.nonzero()[0].tolist(),
        "messages": scored.buckets.lists(),
    }


def _scored(judge: Evaluator, state: _State) -> Scored:
    groups = [tuple(ops) for ops in state.groups]
    fusion = fused(judge.problem, groups, state.copied)
    return judge.score(fusion, buckets_of(state.messages))
