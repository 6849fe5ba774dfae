"""Searches over fusions: rules of compilers, our climb, and DisCo's backtracking.

What people get without a search, each by the rule of the program it is named after.

none            every op a kernel, every gradient a message
ops             ops fused as XLA does: from the last op back, each maker into its reader where
                all its readers are there, else a copy where it is cheap
gradients       gradients combined up to 30 MiB (XLA's all-reduce combiner)
ops, gradients  the one, then the other: a compiler's default
ddp             eager ops; buckets of 25 MiB, the first of 1 MiB (torch DDP's defaults)
inductor+ddp    ops fused as Inductor does: the pair that saves most bytes first; DDP's buckets
inductor, best buckets  the same ops; messages by the exact dynamic program over gradients

`hill_climb` is a rival with a budget: it is given as many evaluations as a search to compare with.
"""

from __future__ import annotations

import heapq
import json
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from foretell.errors import InputError
from foretell.io import read_json, write_text
from foretell.search.fusion import state
from foretell.search.fusion.lanes import greedy, seconds
from foretell.search.fusion.problem import Problem
from foretell.search.fusion.score import (
    Buckets,
    Evaluator,
    Scored,
    buckets_of,
    conditional,
    own_buckets,
    sized_buckets,
)
from foretell.search.fusion.state import (
    MOST,
    Fusion,
    Moved,
    copied_if_legal,
    copy_kernel,
    edge_fits,
    fitting_edges,
    fused,
    merge,
    merged_if_legal,
    random_change,
    unfused,
)

Whole = npt.NDArray[np.int64]

# torch/nn/parallel/distributed.py: 25 MiB, the first bucket 1 MiB so that sending starts early.
DDP, DDP_FIRST = 25.0 * 2**20, 1.0 * 2**20
# DisCo's paper: XLA's combiner stopped at 30 MiB then (or 256 tensors).
COMBINED = 30.0 * 2**20


def baselines(judge: Evaluator) -> dict[str, Scored]:
    """Every baseline, simulated."""
    problem = judge.problem
    plain, xla, inductor = unfused(problem), like_xla(problem), like_inductor(problem)
    found: dict[str, Scored] = {}
    for name, fusion, size, first in (
        ("none", plain, 0.0, None),
        ("ops", xla, 0.0, None),
        ("gradients", plain, COMBINED, None),
        ("ops, gradients", xla, COMBINED, None),
        ("ddp", plain, DDP, DDP_FIRST),
        ("inductor+ddp", inductor, DDP, DDP_FIRST),
    ):
        start = judge.score(fusion)
        own = not size
        buckets = (
            own_buckets(problem, start.ready)
            if own
            else sized_buckets(problem, start.ready, size, first)
        )
        found[name] = judge.sent(start, buckets)
    found["inductor, best buckets"] = judge.score(inductor)
    return found


def ddp(judge: Evaluator) -> Scored:
    """Eager ops and DDP's buckets."""
    start = judge.score(unfused(judge.problem))
    return judge.sent(start, sized_buckets(judge.problem, start.ready, DDP, DDP_FIRST))


def hill_climb(
    judge: Evaluator, evaluations: int, *, seed: int = 0, seconds: float = math.inf
) -> Scored:
    """Single random changes from Inductor's fusion, each kept where the step is shorter."""
    problem, dice, began = judge.problem, random.Random(seed), time.process_time()
    edges = fitting_edges(problem)
    best, idle = judge.score(like_inductor(problem)), 0
    patience = 10 * len(edges)
    while judge.evaluations < evaluations and idle < patience:
        if time.process_time() - began > seconds:
            break
        idle += 1
        moved = random_change(best.fusion, edges, dice)
        if moved is not None:
            live = [g for g in moved.touched if moved.fusion.group[g] == g]
            found = judge.after(best, moved.fusion, live)
            if found.step < best.step:
                best, idle = found, 0
    return best


def like_xla(problem: Problem) -> Fusion:
    """From the last op back: makers into readers, copies where others read them too."""
    state = unfused(problem)
    for i in range(len(problem) - 1, -1, -1):
        for j, edge in problem.reads[i]:
            if not edge_fits(problem, edge):
                continue
            inside = all(state.group[r] == state.group[i] for r, _ in problem.readers[j])
            is_own = inside and not problem.ops[j].kept
            a, b = int(state.group[j]), int(state.group[i])
            same_side = problem.ops[i].side == problem.ops[j].side
            moved = (
                merged_if_legal(state, a, b)
                if is_own
                else copied_if_legal(state, edge)
                if same_side and not _is_deep(state, j, i)
                else None
            )
            state = moved or state
    return state


def _is_deep(state: Fusion, maker: int, reader: int) -> bool:
    """Whether a copy would read, or be read by, another copy: sums along all layers would be."""
    problem = state.problem
    edges = (*problem.reads[maker], *problem.readers[reader])
    return any(state.copied[edge] for _, edge in edges)


def like_inductor(problem: Problem) -> Fusion:
    """The pair that shares most bytes first, over and over, until no pair may be fused."""
    fits = np.array([edge_fits(problem, e) for e in range(len(problem.source))], bool)
    ranked = sorted(np.flatnonzero(fits).tolist(), key=_by_bytes(problem))
    group = greedy(
        problem.source, problem.target, fits, np.array([op.side for op in problem.ops], np.int64),
        np.array(ranked, np.int64), *_rows(problem.reads), *_rows(problem.readers), MOST,
    )  # fmt: skip
    members: dict[int, list[int]] = {}
    for i, g in enumerate(group.tolist()):
        members.setdefault(g, []).append(i)
    return fused(problem, [tuple(ops) for ops in members.values() if len(ops) > 1])


def _rows(found: list[list[tuple[int, int]]]) -> tuple[Whole, Whole]:
    """Edges of each op in compressed rows."""
    first = np.concatenate([[0], np.cumsum([len(row) for row in found])]).astype(np.int64)
    return first, np.array([edge for row in found for _, edge in row], np.int64)


def _by_bytes(problem: Problem) -> Callable[[int], tuple[float, int]]:
    def key(edge: int) -> tuple[float, int]:
        return -problem.ops[int(problem.source[edge])].bytes, edge

    return key


# Our search: equal changes in bundles, then single changes, each kept where the step is shorter.
#
#     1  from each start (as Inductor, as XLA, what is given): changes that shorten compute, most
# gain
#        first. Layers that repeat offer the same change many times over: one place is priced, all
#        places are changed together and judged by one evaluation
#     2  gradients: the best messages for every state are found exactly, inside each evaluation
#     3  where asked for: gradients of weights put off, so that those of the first layers leave
# sooner
#     4  from the best, single changes at random among ops the end of the step depends on
#
# It ends where the bound is met or evaluations are spent, or time where it is limited; the best so
# far is always a whole plan. The same seed gives the same answer, unless time ends it.


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


# The paper's search (DisCo, algorithm 1): a heap of states, random changes, cost-based pruning.
#
#     optimum, idle = the step as it is given, 0
#     while the heap is not empty and idle < patience:
#         take the cheapest state off; for each of {copy, merge, send together}
#             do it at n random places, n drawn from 0 … beta
#             cheaper than the optimum: that is the optimum now, idle = 0; else idle += 1
#             at most alpha times the optimum: onto the heap
#
# The optimum is the search's own: rivals that others found do not prune it. n = 0 leaves a state
# as it is, so it goes back onto the heap. The paper leaves open what happens to states met before
# and to a heap that grows: a state is simulated and pushed once (met again it counts as idle),
# the heap is cut to its cheapest. Neighbours of a message are those next to it in the order
# gradients are made.


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
        fusion, touched = _drawn_move(fusion, method, times, trail.dice)
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


def _drawn_move(
    fusion: Fusion, method: str, times: int, dice: random.Random
) -> tuple[Fusion, set[int]]:
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
