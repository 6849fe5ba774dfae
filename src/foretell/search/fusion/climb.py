"""Our search: equal changes in bundles, then single changes, each kept where the step is shorter.

    1  from each start (as Inductor, as XLA, what is given): changes that shorten compute, most gain
       first. Layers that repeat offer the same change many times over: one place is priced, all
       places are changed together and judged by one evaluation
    2  gradients: the best messages for every state are found exactly, inside each evaluation
    3  where asked for: gradients of weights put off, so that those of the first layers leave sooner
    4  from the best, single changes at random among ops the end of the step depends on

It ends where the bound is met or evaluations are spent, or time where it is limited; the best so
far is always a whole plan. The same seed gives the same answer, unless time ends it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from foretell.search.fusion import state
from foretell.search.fusion.baselines import like_inductor, like_xla
from foretell.search.fusion.lanes import seconds
from foretell.search.fusion.score import Evaluator, Scored, buckets_of, conditional
from foretell.search.fusion.state import Fusion, Moved

Progress = Callable[[float, float, int], None]  # best so far, bound, evaluations
_CLOSE = 1e-4  # share of the step within which the bound counts as met
_HOST_BOUND = 0.02  # of a step: launches above this are worth fusing anything for
_HOPELESS = 2e-3  # share of the step by which ops alone may be too long for a change to be tried
_SHIFTED = 100  # gradients of steps small enough to try every shift of one of them
_PATIENCE = 400  # single changes drawn without gain before it ends
_LEAST = 1e-12  # seconds: less is rounding


@dataclass
class Run:
    """A search under way: its limits, its best, and how it got there."""

    judge: Evaluator
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


def climb(run: Run, *, seed: int = 0, start: Fusion | None = None, reorder: bool = False) -> Scored:
    """The best way to fuse that is found within the limits of a run."""
    problem = run.judge.problem
    starts = [s for s in (start, like_inductor(problem), like_xla(problem)) if s]
    edges = state.fitting_edges(problem)
    ranked = sorted((run.see(run.judge.score(s)) for s in starts), key=lambda s: s.step)
    for scored in ranked:
        bundled(run, scored, edges)
    assert run.best is not None
    if reorder:
        put_off(run, run.best)
    if not run.is_met:
        singly(run, run.best, edges, random.Random(seed))
    shift(run, run.best)
    if run.judge.by_message:
        part(run, run.best)
    return run.best


# Changes in bundles.


@dataclass
class Bundle:
    """The same change in several places: pairs of ops to merge, edges to copy, ops that leave."""

    look: tuple[Any, ...]  # what is done, and what the ops and groups around it look like
    places: list[Any] = field(default_factory=list)
    gain: float = 0.0  # seconds of compute and launches, all places together


def bundled(run: Run, scored: Scored, edges: list[int]) -> Scored:
    """Bundles, greatest gain first, in rounds as long as one of them helps; each is tried once."""
    refused: set[Any] = set()
    helped = True
    while helped and not run.over():
        helped = False
        for bundle in bundles(run.judge, scored, edges, refused):
            refused.add(bundle.look)
            found = done(run.judge, scored, bundle)
            if found is not None and _is_better(run.see(found), scored):
                scored, helped = found, True
            if run.over():
                break
    return scored


def _is_better(new: Scored, old: Scored) -> bool:
    return new.step < old.step or (new.step == old.step and new.compute < old.compute)


def bundles(judge: Evaluator, scored: Scored, edges: list[int], refused: set[Any]) -> list[Bundle]:
    """All changes that shorten compute, greatest gain first; one place of each is priced."""
    found: dict[Any, Bundle] = {}
    for look, place in _offers(scored.fusion, edges):
        if look not in refused:
            found.setdefault(look, Bundle(look)).places.append(place)
    priced = _gains(judge, scored, list(found.values()))
    return sorted((b for b in priced if b.gain > _LEAST), key=lambda b: -b.gain)


def _offers(fusion: Fusion, edges: list[int]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every merge, copy and exit there might be, with what it looks like."""
    problem, group = fusion.problem, fusion.group.tolist()
    alike, source, target = problem.alike, problem.source.tolist(), problem.target.tolist()
    shapes: dict[int, int] = {}
    known: dict[tuple[int, ...], int] = {}

    def shape(g: int) -> int:
        if g not in shapes:
            shapes[g] = known.setdefault(tuple(alike[i] for i in fusion.of(g)), len(known))
        return shapes[g]

    seen: set[tuple[int, int]] = set()
    copied = fusion.copied.tolist()
    twice = set(problem.source[fusion.copied].tolist())  # ops that have copies
    for e in edges:
        i, j = source[e], target[e]
        a, b = group[i], group[j]
        if a == b and j not in twice:
            continue
        look = (alike[i], alike[j], shape(a), shape(b))
        if a != b and (a, b) not in seen and problem.ops[i].side == problem.ops[j].side:
            seen.add((a, b))
            yield ("merge", *look), (i, j)
        if not copied[e] and problem.kinds[i] in state.CHEAP:
            yield ("copy", *look), e
    for g, ops in fusion.members.items():
        for at, i in enumerate(ops):
            yield ("take out", at, shape(g)), i


def _gains(judge: Evaluator, scored: Scored, found: list[Bundle]) -> list[Bundle]:
    """What each bundle saves, from its first place that is allowed; one question for all prices."""
    fusion, asked, kept = scored.fusion, list[tuple[Fusion, int]](), []
    for bundle in found:
        moved = _first_moved(fusion, bundle)
        if moved is not None:
            live = [g for g in moved.touched if moved.fusion.group[g] == g]
            kept.append((bundle, moved, live))
            asked += [(moved.fusion, g) for g in live]
    prices = iter(judge.prices.many(asked))
    for bundle, moved, live in kept:
        was = {int(fusion.group[i]) for g in live for i in moved.fusion.of(g)}
        was |= {int(fusion.group[g]) for g in moved.touched}
        now = sum(next(prices) for _ in live)
        fewer = (len(was) - len(live)) * scored.launch
        bundle.gain = (float(scored.cost[list(was)].sum()) - now + fewer) * len(bundle.places)
    return [bundle for bundle, _, _ in kept]


def _first_moved(fusion: Fusion, bundle: Bundle) -> Moved | None:
    for place in bundle.places[:2]:  # the first layer may differ from those behind it
        moved = _moved(fusion, bundle.look[0], place)
        if moved is not None:
            return moved
    return None


def _moved(fusion: Fusion, what: str, place: Any) -> Moved | None:
    """One change in one place, if it is allowed."""
    if what == "merge":
        a, b = (int(fusion.group[i]) for i in place)
        return state.merge(fusion, a, b) if a != b else None
    return state.copy(fusion, place) if what == "copy" else state.take_out(fusion, place)


def done(judge: Evaluator, scored: Scored, bundle: Bundle) -> Scored | None:
    """The state with a change everywhere it is allowed, simulated."""
    fusion, touched = _everywhere(scored.fusion, bundle)
    if fusion is scored.fusion:
        return None
    live = [g for g in touched if fusion.group[g] == g]
    return judge.after(scored, fusion, live)


def _everywhere(fusion: Fusion, bundle: Bundle) -> tuple[Fusion, set[int]]:
    """All places at once where that makes no ring and fits into memory, else one by one."""
    what, touched = bundle.look[0], set[int]()
    draft = fusion.draft()
    for place in bundle.places:
        touched |= _changed(fusion, draft, what, place)
    if not touched:
        return fusion, touched
    if draft.is_ring_free and (what != "copy" or state.holds_no_more(fusion, draft)):
        return draft, touched
    touched = set()
    for place in bundle.places:
        moved = _moved(fusion, what, place)
        if moved is not None:
            fusion = moved.fusion
            touched |= set(moved.touched)
    return fusion, touched


def _changed(fusion: Fusion, draft: Fusion, what: str, place: Any) -> set[int]:
    """One change made in place where it is allowed, rings left out; the groups it touches."""
    if what == "copy":
        if not state.may_copy(draft, place):
            return set()
        draft.copied[place] = True
        return set(state.around(draft, place))
    if what == "take out":
        rest = [o for o in draft.of(int(draft.group[place])) if o != place]
        if not state.may_leave(draft, place):
            return set()
        draft.take_out_here(place)
        return set(state.apart(draft, place, rest))
    a, b = (int(draft.group[i]) for i in place)
    if a == b or state.why_not(draft, a, b):
        return set()
    draft.merge_here(a, b)
    own = int(draft.group[place[0]])
    return {own, *state.freed(fusion, draft, own)}


# Single changes.


def singly(run: Run, scored: Scored, edges: list[int], dice: random.Random) -> Scored:
    """Single changes among ops the end of the step depends on, kept where they help."""
    idle, around = 0, _critical(run.judge, scored, edges)
    while not run.over() and idle < _PATIENCE and around:
        idle += 1
        moved = state.random_change(scored.fusion, around, dice)
        if moved is None or _is_hopeless(run, scored, moved):
            continue
        live = [g for g in moved.touched if moved.fusion.group[g] == g]
        found = run.judge.after(scored, moved.fusion, live)
        if _is_better(run.see(found), scored):
            scored, idle = found, 0
            around = _critical(run.judge, scored, edges)
    return scored


def _is_hopeless(run: Run, scored: Scored, moved: Moved) -> bool:
    """Whether a change cannot pay: compute grows by more than the wire could give back."""
    cost = run.judge.prices.groups(
        moved.fusion, [g for g in moved.touched if moved.fusion.group[g] == g]
    )
    was = {int(scored.fusion.group[g]) for g in moved.touched}
    more = sum(cost) - float(scored.cost[list(was)].sum())
    now = scored.compute + run.judge.problem.repeats * more
    assert run.best is not None
    return now + run.judge.update * (not run.judge.by_message) > run.best.step * (1 + _HOPELESS)


def _critical(judge: Evaluator, scored: Scored, edges: list[int]) -> list[int]:
    """Edges between ops that the end of the step depends on; all where the host bounds it too."""
    if scored.launches > _HOST_BOUND * scored.step:
        return edges
    inside = window(judge, scored)
    target = scored.fusion.problem.target
    return [e for e in edges if inside[target[e]]]


def put_off(run: Run, scored: Scored) -> Scored:
    """Gradients of weights behind all others: as many as help most, of two orders the better."""
    best = scored
    for ops in state.put_off(run.judge.problem):
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


def window(judge: Evaluator, scored: Scored) -> np.ndarray[Any, np.dtype[np.bool_]]:
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
