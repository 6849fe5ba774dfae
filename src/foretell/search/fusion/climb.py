"""Our search: changes that prices recommend, in bundles, then single ones on the critical path.

    1  from each start (nothing fused; as XLA; as Inductor; what is given) climb: the bundle that
       shortens compute most is done everywhere at once and kept unless the step gets longer
    2  gradients: the best messages for every state are found exactly, inside each evaluation
    3  where asked for: gradients of weights put off, so that those of the first layers leave sooner
    4  from the best, single changes at random among ops the end of the step depends on, kept
       where they help or, ever more rarely, where they hardly hurt (annealing)

It ends where the bound is met or evaluations are spent, or time where it is limited; the best so
far is always a whole plan. The same seed gives the same answer, unless time ends it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from foretell import portable
from foretell.search.fusion import moves
from foretell.search.fusion.baselines import like_inductor, like_xla
from foretell.search.fusion.bound import conditional
from foretell.search.fusion.moves import Moved
from foretell.search.fusion.options import bundles, window
from foretell.search.fusion.score import Judge, Scored, buckets_of
from foretell.search.fusion.state import Fusion, unfused

Progress = Callable[[float, float, int], None]  # best so far, bound, evaluations
_HOT = 2e-3  # share of the step that annealing lets a change cost at first
_CLOSE = 1e-4  # share of the step within which the bound counts as met
_SHIFTED = 100  # gradients of steps small enough to try every shift of one of them
_PATIENCE = 400  # single changes without gain before it ends


@dataclass
class Run:
    """A search under way: its limits, its best, and how it got there."""

    judge: Judge
    seconds: float = 0.0  # CPU seconds; 0 for no limit
    evaluations: int = 4_000
    progress: Progress = lambda step, bound, many: None
    best: Scored | None = None
    shortest: Scored | None = None  # the state whose ops take least time
    trace: list[tuple[int, float, float]] = field(
        default_factory=list
    )  # evaluations, seconds, step
    begun: float = field(default_factory=time.process_time)

    def see(self, scored: Scored) -> Scored:
        """Remember a state if it is the best so far."""
        if self.shortest is None or scored.compute < self.shortest.compute:
            self.shortest = scored
        if self.best is None or scored.step < self.best.step:
            self.best = scored
            self.trace.append((self.judge.evaluations, self.spent, scored.step))
            self.progress(scored.step, self.bound, self.judge.evaluations)
        return scored

    @property
    def spent(self) -> float:
        """CPU seconds since it began: a busy machine does not change what is found."""
        return time.process_time() - self.begun

    @property
    def bound(self) -> float:
        """What the shortest ops so far would allow."""
        return conditional(self.judge, self.shortest) if self.shortest else 0.0

    def over(self) -> bool:
        """Whether a limit is reached."""
        is_late = 0 < self.seconds < self.spent
        return is_late or self.judge.evaluations >= self.evaluations

    @property
    def is_met(self) -> bool:
        """Whether the best is as short as the bound."""
        return self.best is not None and self.best.step <= self.bound * (1 + _CLOSE)


def guided(
    run: Run, *, seed: int = 0, start: Fusion | None = None, reorder: bool = False
) -> Scored:
    """The best way to fuse that is found within the limits of a run."""
    problem = run.judge.problem
    starts = [s for s in (start, like_inductor(problem), like_xla(problem), unfused(problem)) if s]
    edges = moves.fitting_edges(problem)
    ranked = sorted((run.see(run.judge.score(s)) for s in starts), key=lambda s: s.step)
    for scored in ranked:
        climb(run, scored, edges)
    assert run.best is not None
    if reorder:
        put_off(run, run.best)
    if not run.is_met:
        anneal(run, run.best, edges, random.Random(seed))
    shift(run, run.best)
    if run.judge.by_message:
        part(run, run.best)
    return run.best


def climb(run: Run, scored: Scored, edges: list[int]) -> Scored:
    """Take bundles, greatest gain first, while they help."""
    refused: set[Any] = set()
    moved: Scored | None = scored
    while moved is not None:
        scored = moved
        moved = _stepped(run, scored, edges, refused)
    return scored


def _stepped(run: Run, scored: Scored, edges: list[int], refused: set[Any]) -> Scored | None:
    """The first bundle that helps, done; each is tried once."""
    if run.over():
        return None
    for bundle in bundles(run.judge, scored, edges, refused):
        found = bundle.done(run.judge, scored)
        refused.add(bundle.look)
        if found is not None and _is_better(found, scored):
            return run.see(found)
        if run.over():
            return None
    return None


def _is_better(new: Scored, old: Scored) -> bool:
    return new.step < old.step or (new.step == old.step and new.compute < old.compute)


def anneal(run: Run, scored: Scored, edges: list[int], dice: random.Random) -> Scored:
    """Single changes among ops the end of the step depends on."""
    heat, idle = _HOT, 0
    seen = {scored.fusion.key}
    around = _critical(run.judge, scored, edges)
    while not run.over() and idle < _PATIENCE and around:
        idle += 1
        heat *= 0.99
        moved = _drawn(scored.fusion, around, dice)
        if moved is None or moved.fusion.key in seen or _is_hopeless(run, scored, moved):
            continue
        seen.add(moved.fusion.key)
        live = [g for g in moved.touched if moved.fusion.group[g] == g]
        found = run.judge.after(scored, moved.fusion, live)
        worse = (found.step - scored.step) / scored.step
        idle = 0 if run.best is not None and found.step < run.best.step else idle
        run.see(found)
        if worse < 0 or (heat > 0 and dice.random() < portable.exp(-worse / max(heat, 1e-9)) - 0.5):
            scored, around = found, _critical(run.judge, found, edges)
    return scored


def _is_hopeless(run: Run, scored: Scored, moved: Moved) -> bool:
    """Whether a change cannot pay: compute grows by more than the wire could give back."""
    cost = run.judge.prices.groups(
        moved.fusion, [g for g in moved.touched if moved.fusion.group[g] == g]
    )
    was = {int(scored.fusion.group[g]) for g in moved.touched}
    now = scored.compute + sum(cost) - float(scored.cost[list(was)].sum())
    assert run.best is not None
    return now + run.judge.update * (not run.judge.by_message) > run.best.step * (1 + _HOT)


def _critical(judge: Judge, scored: Scored, edges: list[int]) -> list[int]:
    """Edges between ops that the end of the step depends on."""
    inside = window(judge, scored)
    target = scored.fusion.problem.target
    return [e for e in edges if inside[target[e]]]


def _drawn(fusion: Fusion, edges: list[int], dice: random.Random) -> Moved | None:
    """A random change at a random edge."""
    e, problem = dice.choice(edges), fusion.problem
    i, j = int(problem.source[e]), int(problem.target[e])
    a, b = int(fusion.group[i]), int(fusion.group[j])
    if a == b:
        return moves.take_out(fusion, dice.choice((i, j)))
    if fusion.copied[e]:
        return moves.drop(fusion, e)
    return moves.merge(fusion, a, b) if dice.random() < 0.6 else moves.copy(fusion, e)


def put_off(run: Run, scored: Scored) -> Scored:
    """Gradients of weights behind all others: as many as help most, of two orders the better."""
    best = scored
    for ops in moves.put_off(run.judge.problem):
        for count in _counts(len(ops)):
            best = _better(run, best, scored.fusion.put_off(ops[:count]))
        near = int(best.fusion.late.sum())
        for count in range(max(near - 6, 0), min(near + 7, len(ops) + 1)):
            best = _better(run, best, scored.fusion.put_off(ops[:count]))
    return best


def _better(run: Run, best: Scored, fusion: Fusion) -> Scored:
    if run.over() or fusion.held > max(fusion.problem.room, best.fusion.held):
        return best
    found = run.see(run.judge.score(fusion, None, best.cost))
    return found if found.step < best.step else best


def _counts(many: int) -> Iterable[int]:
    return sorted({round(many * k / 16) for k in range(1, 17)} - {0})


def shift(run: Run, scored: Scored) -> Scored:
    """Single gradients into the bucket before or behind theirs, as long as that helps.

    Buckets of neighbours are the best of their kind; where gradients become ready together, or a
    law bends, others may be better by a little.
    """
    tries = _shifts(scored)
    while tries and not run.over():
        found = run.judge.sent(scored, buckets_of(tries.pop()))
        if found.step < scored.step:
            scored = run.see(found)
            tries = _shifts(scored)
    return scored


def _shifts(scored: Scored) -> list[list[list[int]]]:
    """All buckets that differ by one gradient, none where there are too many to try."""
    lists, found = scored.buckets.lists(), list[list[list[int]]]()
    if sum(map(len, lists)) > _SHIFTED:
        return []
    for at, bucket in enumerate(lists):
        for g in bucket:
            for to in (at - 1, at + 1):
                if 0 <= to < len(lists):
                    moved = [[k for k in b if k != g] for b in lists]
                    moved[to].append(g)
                    found.append([b for b in moved if b])
    return found


def part(run: Run, scored: Scored) -> Scored:
    """Messages cut into parts, where the update of one part overlaps the next."""
    sizes = run.judge.problem.sizes
    held = [float(sizes[b].sum()) for b in scored.buckets.lists()]
    large = np.argsort(held)[::-1][:3].tolist()
    for bucket in dict.fromkeys([len(held) - 1, *large]):
        for parts in (2, 4, 8, 16):
            if run.over():
                return scored
            found = run.see(run.judge.sent(scored, scored.buckets.but(bucket, parts)))
            scored = found if found.step < scored.step else scored
    return scored
