"""What could be done to a state, priced all at once and sorted by what it would save.

Layers that repeat offer the same change many times over: such changes are one `Bundle`, done
together and judged by one evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from foretell.search.fusion import legal, moves
from foretell.search.fusion.lanes import seconds
from foretell.search.fusion.moves import Moved
from foretell.search.fusion.score import Judge, Scored
from foretell.search.fusion.state import Fusion

Make = Callable[[Fusion], Moved | None]
_LEAST = 1e-12  # seconds: less is rounding


@dataclass
class Bundle:
    """The same change in several places."""

    look: Any
    gain: float = 0.0  # seconds of compute, all places together
    makes: list[Make] = field(default_factory=list)

    def done(self, judge: Judge, scored: Scored) -> Scored | None:
        """The state with the change everywhere it is still allowed, played."""
        fusion, touched = scored.fusion, set[int]()
        for make in self.makes:
            moved = make(fusion)
            if moved is not None:
                fusion = moved.fusion
                touched |= set(moved.touched)
        if fusion is scored.fusion:
            return None
        live = [g for g in touched if fusion.group[g] == g]
        return judge.after(scored, fusion, live)


def bundles(judge: Judge, scored: Scored, edges: Iterable[int], refused: set[Any]) -> list[Bundle]:
    """All changes that shorten compute, greatest gain first."""
    found: dict[Any, Bundle] = {}
    for look, gain, make in (
        *_merges(judge, scored, edges),
        *_copies(judge, scored, edges),
        *_exits(judge, scored),
    ):
        if gain > _LEAST and look not in refused:
            bundle = found.setdefault(look, Bundle(look))
            bundle.gain += gain
            bundle.makes.append(make)
    return sorted(found.values(), key=lambda b: -b.gain)


Offer = tuple[Any, float, Make]


def _merges(judge: Judge, scored: Scored, edges: Iterable[int]) -> list[Offer]:
    fusion, problem = scored.fusion, judge.problem
    pairs: dict[tuple[int, int], int] = {}
    for e in edges:
        a, b = int(fusion.group[problem.source[e]]), int(fusion.group[problem.target[e]])
        if a != b and (a, b) not in pairs and not legal.why_not(fusion, a, b):
            pairs[a, b] = e
    made = [(fusion.merged(a, b), min(a, b)) for a, b in pairs]
    cost = judge.prices.many(made)
    found: list[Offer] = []
    for ((a, b), e), price in zip(pairs.items(), cost, strict=True):
        gain = float(scored.cost[a] + scored.cost[b] - price)
        i, j = int(problem.source[e]), int(problem.target[e])
        look = ("merge", problem.alike[i], problem.alike[j], _shape(fusion, a), _shape(fusion, b))
        found.append((look, gain, _merging(i, j)))
    return found


def _merging(i: int, j: int) -> Make:
    def make(fusion: Fusion) -> Moved | None:
        a, b = int(fusion.group[i]), int(fusion.group[j])
        return moves.merge(fusion, a, b) if a != b else None

    return make


def _copies(judge: Judge, scored: Scored, edges: Iterable[int]) -> list[Offer]:
    """Copies that shorten compute; what they make others write counts."""
    fusion, problem = scored.fusion, judge.problem
    wanted = [e for e in edges if _may_copy(fusion, e)]
    states = {e: fusion.with_copy(e) for e in wanted}
    near = {e: moves.around(states[e], e) for e in wanted}
    cost = iter(judge.prices.many([(states[e], g) for e in wanted for g in near[e]]))
    found: list[Offer] = []
    for e in wanted:
        gain = float(sum(scored.cost[g] - next(cost) for g in near[e]))
        i, j = int(problem.source[e]), int(problem.target[e])
        look = ("copy", problem.alike[i], problem.alike[j], round(gain * 1e9))
        found.append((look, gain, _copying(e)))
    return found


def _may_copy(fusion: Fusion, e: int) -> bool:
    problem = fusion.problem
    i, j = int(problem.source[e]), int(problem.target[e])
    is_cheap = problem.kinds[i] in ("pointwise", "constant", "view", "cat")
    return is_cheap and not fusion.copied[e] and fusion.group[i] != fusion.group[j]


def _copying(e: int) -> Make:
    return lambda fusion: moves.copy(fusion, e)


def _exits(judge: Judge, scored: Scored) -> list[Offer]:
    """Ops that are shorter outside their group."""
    fusion, problem = scored.fusion, judge.problem
    ops = [i for members in fusion.members.values() for i in members]
    moved = [(i, m) for i in ops if (m := moves.take_out(fusion, i)) is not None]
    cost = iter(judge.prices.many([(m.fusion, g) for _, m in moved for g in m.touched]))
    found: list[Offer] = []
    for i, m in moved:
        was = {int(fusion.group[g]) for g in m.touched}
        gain = float(scored.cost[list(was)].sum() - sum(next(cost) for _ in m.touched))
        look = ("take out", problem.alike[i], _shape(fusion, int(fusion.group[i])))
        found.append((look, gain, _leaving(i)))
    return found


def _leaving(i: int) -> Make:
    return lambda fusion: moves.take_out(fusion, i)


def _shape(fusion: Fusion, g: int) -> tuple[int, ...]:
    """The looks of a group's ops."""
    return tuple(fusion.problem.alike[i] for i in fusion.of(g))


def window(judge: Judge, scored: Scored) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Ops the end of the step depends on: all, or those before what the wire last waited for."""
    problem = scored.fusion.problem
    if scored.through <= scored.compute:
        return np.ones(len(problem), bool)
    waited = 0.0
    now = 0.0
    for bucket in scored.buckets.lists():
        ready = float(scored.ready[bucket].max())
        if ready >= now:
            waited = ready
        now = max(now, ready) + float(seconds(float(problem.sizes[bucket].sum()), judge.laws))
    found: np.ndarray[Any, np.dtype[np.bool_]] = scored.end[scored.fusion.group] <= waited
    return found
