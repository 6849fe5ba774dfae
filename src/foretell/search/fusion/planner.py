"""Which ops to fuse and which gradients to send together: rules, searches, and `--with fusion`.

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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from hashlib import blake2b
from itertools import product
from pathlib import Path
from random import Random
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from foretell.cluster import Cluster
from foretell.errors import InfeasibleError, InputError
from foretell.graph import Graph
from foretell.io import read_json, write_text
from foretell.plan import Plan, read
from foretell.predict import predict_many
from foretell.search.fusion.fused_step import (
    DDP,
    DDP_FIRST,
    Bounds,
    Buckets,
    Evaluator,
    Scored,
    bound_of_ops,
    bounds,
    bounds_of_kernels,
    buckets_from,
    buckets_of,
    eager_plans,
    fusion_of,
    own_buckets,
    plan_of,
    run_of,
    scale_of,
    sized_buckets,
    with_reference,
    workload_of,
)
from foretell.search.fusion.lanes import greedy, seconds
from foretell.search.fusion.problem import Memory, Problem, from_workload, problem_of_graph
from foretell.search.fusion.state import (
    CHEAP,
    MOST,
    Change,
    Fusion,
    affected_by_copy,
    affected_by_exit,
    copied_if_legal,
    copy,
    copy_kernel,
    edge_fits,
    fitting_edges,
    fused,
    groups_freed_of_reads,
    holds_no_more,
    may_copy,
    may_leave,
    merge,
    merge_obstacle,
    merged_if_legal,
    random_change,
    take_out,
    unfused,
)
from foretell.search.fusion.state import (
    deferrable_gradients as late_ops,
)
from foretell.search.kit import Planned, Planner, Progress, silent
from foretell.workload import Workload

Whole = npt.NDArray[np.int64]

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
            found = judge.after(best, moved.fusion, _existing_groups(moved.fusion, moved.touched))
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


SearchProgress = Callable[[float, float, int], None]  # best so far, bound, evaluations
_CLOSE = 1e-4  # share of the step within which the bound counts as met
_HOST_BOUND = 0.02  # of a step: launches above this are worth fusing anything for
_HOPELESS = 2e-3  # share of the step by which ops alone may be too long for a change to be tried
_SHIFTED = 100  # gradients of steps small enough to try every shift of one of them
_PATIENCE = 400  # single changes drawn without gain before it ends
_LEAST = 1e-12  # seconds: less is rounding


@dataclass
class SearchRun:
    """A search under way: its limits, its best, and how it got there."""

    judge: Evaluator
    seconds: float = 0.0  # CPU seconds; 0 for no limit
    evaluations: int = 4_000
    progress: SearchProgress = lambda step, bound, many: None
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
        return bound_of_ops(self.judge, self.shortest) if self.shortest else 0.0

    def over(self) -> bool:
        """Whether a limit is reached."""
        is_late = 0 < self.seconds < self.spent
        return is_late or self.judge.evaluations >= self.evaluations

    @property
    def is_met(self) -> bool:
        """Whether the best is as short as the bound."""
        return self.best is not None and self.best.step <= self.bound * (1 + _CLOSE)


def climb(
    run: SearchRun, *, seed: int = 0, start: Fusion | None = None, reorder: bool = False
) -> Scored:
    """The best way to fuse that is found within the limits of a run."""
    problem = run.judge.problem
    starts = [s for s in (start, like_inductor(problem), like_xla(problem)) if s]
    edges = fitting_edges(problem)
    ranked = sorted((run.see(run.judge.score(s)) for s in starts), key=lambda s: s.step)
    for scored in ranked:
        apply_bundles(run, scored, edges)
    assert run.best is not None
    if reorder:
        defer_gradients(run, run.best)
    if not run.is_met:
        single_changes(run, run.best, edges, random.Random(seed))
    shift_gradients(run, run.best)
    if run.judge.by_message:
        split_messages(run, run.best)
    return run.best


# Changes in bundles.


@dataclass
class Bundle:
    """The same change in several places: pairs of ops to merge, edges to copy, ops that leave."""

    look: tuple[Any, ...]  # what is done, and what the ops and groups around it look like
    places: list[Any] = field(default_factory=list)
    gain: float = 0.0  # seconds of compute and launches, all places together


def apply_bundles(run: SearchRun, scored: Scored, edges: list[int]) -> Scored:
    """Bundles, greatest gain first, in rounds as long as one of them helps; each is tried once."""
    refused: set[Any] = set()
    helped = True
    while helped and not run.over():
        helped = False
        for bundle in bundles(run.judge, scored, edges, refused):
            refused.add(bundle.look)
            fusion, touched = _change_everywhere(scored.fusion, bundle)
            if fusion is not scored.fusion:
                found = run.see(run.judge.after(scored, fusion, _existing_groups(fusion, touched)))
                if _is_better(found, scored):
                    scored, helped = found, True
            if run.over():
                break
    return scored


def _is_better(new: Scored, old: Scored) -> bool:
    return new.step < old.step or (new.step == old.step and new.compute < old.compute)


def _existing_groups(fusion: Fusion, touched: Iterable[int]) -> list[int]:
    """Those of some numbers that are groups still."""
    return [g for g in touched if fusion.group[g] == g]


def bundles(judge: Evaluator, scored: Scored, edges: list[int], refused: set[Any]) -> list[Bundle]:
    """All changes that shorten compute, greatest gain first.

    Each is priced at its first place that is allowed, with one question for all prices.
    """
    offered: dict[Any, Bundle] = {}
    for look, place in _possible_changes(scored.fusion, edges):
        if look not in refused:
            offered.setdefault(look, Bundle(look)).places.append(place)
    fusion, queries, kept = scored.fusion, list[tuple[Fusion, int]](), []
    for bundle in offered.values():
        tried = (_change_one(fusion, bundle.look[0], place) for place in bundle.places[:2])
        moved = next((m for m in tried if m is not None), None)  # the first layer may differ
        if moved is not None:
            live = _existing_groups(moved.fusion, moved.touched)
            kept.append((bundle, moved, live))
            queries += [(moved.fusion, g) for g in live]
    prices = iter(judge.prices.many(queries))
    for bundle, moved, live in kept:
        was = {int(fusion.group[i]) for g in live for i in moved.fusion.of(g)}
        was |= {int(fusion.group[g]) for g in moved.touched}
        now = sum(next(prices) for _ in live)
        fewer = (len(was) - len(live)) * scored.launch
        bundle.gain = (float(scored.cost[list(was)].sum()) - now + fewer) * len(bundle.places)
    return sorted((b for b, _, _ in kept if b.gain > _LEAST), key=lambda b: -b.gain)


def _possible_changes(fusion: Fusion, edges: list[int]) -> Iterator[tuple[tuple[Any, ...], Any]]:
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
        if not copied[e] and problem.kinds[i] in CHEAP:
            yield ("copy", *look), e
    for g, ops in fusion.members.items():
        for at, i in enumerate(ops):
            yield ("take out", at, shape(g)), i


def _change_one(fusion: Fusion, what: str, place: Any) -> Change | None:
    """One change in one place, if it is allowed."""
    if what == "merge":
        a, b = (int(fusion.group[i]) for i in place)
        return merge(fusion, a, b) if a != b else None
    return copy(fusion, place) if what == "copy" else take_out(fusion, place)


def _change_everywhere(fusion: Fusion, bundle: Bundle) -> tuple[Fusion, set[int]]:
    """All places at once where that makes no ring and fits into memory, else one by one."""
    what, touched = bundle.look[0], set[int]()
    draft = fusion.draft()
    for place in bundle.places:
        touched |= _change_draft(fusion, draft, what, place)
    if not touched:
        return fusion, touched
    if draft.is_ring_free and (what != "copy" or holds_no_more(fusion, draft)):
        return draft, touched
    touched = set()
    for place in bundle.places:
        moved = _change_one(fusion, what, place)
        if moved is not None:
            fusion = moved.fusion
            touched |= set(moved.touched)
    return fusion, touched


def _change_draft(fusion: Fusion, draft: Fusion, what: str, place: Any) -> set[int]:
    """One change made in place where it is allowed, rings left out; the groups it touches."""
    if what == "copy":
        if not may_copy(draft, place):
            return set()
        draft.copied[place] = True
        return set(affected_by_copy(draft, place))
    if what == "take out":
        rest = [o for o in draft.of(int(draft.group[place])) if o != place]
        if not may_leave(draft, place):
            return set()
        draft.take_out_in_place(place)
        return set(affected_by_exit(draft, place, rest))
    a, b = (int(draft.group[i]) for i in place)
    if a == b or merge_obstacle(draft, a, b):
        return set()
    draft.merge_in_place(a, b)
    own = int(draft.group[place[0]])
    return {own, *groups_freed_of_reads(fusion, draft, own)}


# Single changes.


def single_changes(run: SearchRun, scored: Scored, edges: list[int], dice: random.Random) -> Scored:
    """Single changes among ops the end of the step depends on, kept where they help."""
    idle, around = 0, _critical_edges(run.judge, scored, edges)
    while not run.over() and idle < _PATIENCE and around:
        idle += 1
        moved = random_change(scored.fusion, around, dice)
        if moved is None:
            continue
        live = _existing_groups(moved.fusion, moved.touched)
        if _is_hopeless(
            run, scored, moved, run.judge.prices.many([(moved.fusion, g) for g in live])
        ):
            continue
        found = run.judge.after(scored, moved.fusion, live)
        if _is_better(run.see(found), scored):
            scored, idle = found, 0
            around = _critical_edges(run.judge, scored, edges)
    return scored


def _is_hopeless(run: SearchRun, scored: Scored, moved: Change, cost: list[float]) -> bool:
    """Whether a change cannot pay: compute grows by more than the wire could give back."""
    was = {int(scored.fusion.group[g]) for g in moved.touched}
    more = sum(cost) - float(scored.cost[list(was)].sum())
    now = scored.compute + run.judge.problem.repeats * more
    assert run.best is not None
    return now + run.judge.update * (not run.judge.by_message) > run.best.step * (1 + _HOPELESS)


def _critical_edges(judge: Evaluator, scored: Scored, edges: list[int]) -> list[int]:
    """Edges between ops that the end of the step depends on; all where the host bounds it too."""
    if scored.launches > _HOST_BOUND * scored.step:
        return edges
    inside = critical_ops(judge, scored)
    target = scored.fusion.problem.target
    return [e for e in edges if inside[target[e]]]


def defer_gradients(run: SearchRun, scored: Scored) -> Scored:
    """Gradients of weights behind all others: as many as help most, of two orders the better."""
    best = scored
    for ops in late_ops(run.judge.problem):
        for count in _counts(len(ops)):
            best = _better(run, best, scored.fusion.put_off(ops[:count]))
        near = int(best.fusion.late.sum())
        for count in range(max(near - 6, 0), min(near + 7, len(ops) + 1)):
            best = _better(run, best, scored.fusion.put_off(ops[:count]))
    return best


def _better(run: SearchRun, best: Scored, fusion: Fusion) -> Scored:
    if run.over() or fusion.held > max(fusion.problem.room, best.fusion.held):
        return best
    found = run.see(run.judge.score(fusion, None, best.cost))
    return found if found.step < best.step else best


def _counts(many: int) -> Iterable[int]:
    return sorted({round(many * k / 16) for k in range(1, 17)} - {0})


def shift_gradients(run: SearchRun, scored: Scored) -> Scored:
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


def split_messages(run: SearchRun, scored: Scored) -> Scored:
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


def critical_ops(judge: Evaluator, scored: Scored) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Ops the end of the step depends on: all, or those before what the wire last waited for."""
    problem = scored.fusion.problem
    if scored.comm_end <= scored.compute:
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
class BacktrackState:
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

    def judge(self, found: Scored | None, alpha: float) -> None:
        """What becomes of a state: the optimum, onto the heap, or nothing; None was met before."""
        is_best = found is not None and found.step < self.optimum.step
        self.idle = 0 if is_best else self.idle + 1
        if found is not None:
            self.optimum = found if is_best else self.optimum
            if found.step <= alpha * self.optimum.step:
                self.push(found)


def begin_backtrack(
    run: SearchRun, *, seed: int = 0, start: Scored | None = None
) -> BacktrackState:
    """A search at its beginning: nothing fused, every gradient by itself, or what is given."""
    judge = run.judge
    if start is None:
        ready = judge.score(unfused(judge.problem))
        start = judge.sent(ready, own_buckets(judge.problem, ready.ready))
    state = BacktrackState(
        random.Random(seed), run.see(start), seen={_hash(start.fusion, start.buckets)}
    )
    state.push(start)
    return state


def backtrack(run: SearchRun, how: Backtrack, state: BacktrackState) -> Scored:
    """The cheapest state that the paper's search meets; the trail stands where it stopped."""
    while state.heap and state.idle < how.patience and not run.over():
        scored = heapq.heappop(state.heap)[2]
        for method in METHODS:
            found: Scored | None = scored
            fusion, buckets, touched = _random_changes(scored, method, how.beta, state.dice)
            if fusion is not scored.fusion or buckets is not scored.buckets:
                key = _hash(fusion, buckets)
                is_met, found = key in state.seen, None
                state.seen.add(key)
                if not is_met and fusion is scored.fusion:
                    found = run.see(run.judge.sent(scored, buckets))
                elif not is_met:
                    live = _existing_groups(fusion, touched)
                    found = run.see(run.judge.after(scored, fusion, live, buckets))
            state.judge(found, how.alpha)
        if len(state.heap) > how.heap:
            state.heap = heapq.nsmallest(how.heap, state.heap)
    return state.optimum


def _random_changes(
    scored: Scored, method: str, beta: int, dice: random.Random
) -> tuple[Fusion, Buckets, set[int]]:
    """A state after a method at up to `beta` random places, and the groups that cost other now."""
    times, fusion, touched = dice.randint(0, beta), scored.fusion, set[int]()
    if method == "send":
        return fusion, _merge_messages(scored, times, dice), touched
    for _ in range(times):
        moved = random_move(fusion, method, dice)
        if moved is not None:
            fusion = moved.fusion
            touched |= set(moved.touched)
    return fusion, scored.buckets, touched


def _hash(fusion: Fusion, buckets: Buckets) -> bytes:
    return blake2b(fusion.key + buckets.key, digest_size=16).digest()


def random_move(fusion: Fusion, method: str, dice: random.Random) -> Change | None:
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


def _merge_messages(scored: Scored, times: int, dice: random.Random) -> Buckets:
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


class _SavedState(msgspec.Struct):
    """One state: groups of fused ops, copied edges, messages."""

    groups: list[list[int]]
    copied: list[int]
    messages: list[list[int]]


class _SearchFile(msgspec.Struct):
    """What `save` writes."""

    options: dict[str, Any] = msgspec.field(name="asked")
    dice: tuple[int, list[int], float | None]
    idle: int
    evaluations: int
    pushed: int
    turns: list[int]
    seen: list[str]
    states: Annotated[list[_SavedState], msgspec.Meta(min_length=1)]


def save_search(state: BacktrackState, run: SearchRun, path: Path, options: dict[str, Any]) -> None:
    """Write where a search stands."""
    states = [state.optimum, *(held for _, _, held in state.heap)]
    version, numbers, gauss = state.dice.getstate()
    saved = {
        "asked": _search_options(run.judge, options),
        "dice": [version, list(numbers), gauss],
        "idle": state.idle,
        "evaluations": run.judge.evaluations,
        "pushed": state.pushed,
        "turns": [turn for _, turn, _ in state.heap],
        "seen": sorted(key.hex() for key in state.seen),
        "states": [_state_json(state) for state in states],
    }
    write_text(path, json.dumps(saved))


def load_search(run: SearchRun, path: Path, options: dict[str, Any]) -> BacktrackState:
    """The search that a file holds, of the same model and options."""
    saved = read_json(path, _SearchFile, "search to go on with")
    _require_same(saved.options, _search_options(run.judge, options), path)
    try:
        optimum, *states = [_load_state(run.judge, state) for state in saved.states]
        dice = Random()
        dice.setstate((saved.dice[0], tuple(saved.dice[1]), saved.dice[2]))
        heap = [(s.step, turn, s) for s, turn in zip(states, saved.turns, strict=True)]
        seen = {bytes.fromhex(key) for key in saved.seen}
    except (ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
        raise InputError(f"`{path}` holds no search of this model: {error}") from None
    run.see(optimum)
    run.judge.evaluations = saved.evaluations
    return BacktrackState(dice, optimum, heap, seen, saved.idle, saved.pushed)


def _search_options(judge: Evaluator, options: dict[str, Any]) -> dict[str, Any]:
    more = {"by_message": judge.by_message, "sharded": judge.sharded}
    return {"model": judge.problem.fingerprint, **options, **more}


def _require_same(known: dict[str, Any], wanted: dict[str, Any], path: Path) -> None:
    for name, value in wanted.items():
        if known.get(name) != value:
            raise InputError(
                f"the search in `{path}` ran with {name}={known.get(name)}, not {value}",
                hint="go on with the same model and options, or name another file",
            )


def _state_json(scored: Scored) -> dict[str, Any]:
    fusion = scored.fusion
    return {
        "groups": [list(ops) for ops in fusion.members.values()],
        "copied": fusion.copied.nonzero()[0].tolist(),
        "messages": scored.buckets.lists(),
    }


def _load_state(judge: Evaluator, state: _SavedState) -> Scored:
    groups = [tuple(ops) for ops in state.groups]
    fusion = fused(judge.problem, groups, state.copied)
    return judge.score(fusion, buckets_of(state.messages))


@dataclass(frozen=True, eq=False)
class FusionResult:
    """The best way to fuse, and what it was compared with."""

    best: Scored
    baselines: Mapping[str, Scored]
    bounds: Bounds
    run: SearchRun
    stopped: bool = False  # by Ctrl-C, before its limits were reached


@dataclass(frozen=True)
class FusionPlanner(Planner):
    """Fuse ops and send gradients together, decided jointly for a data-parallel step."""

    name: ClassVar[str] = "fusion"
    source: ClassVar[str] = "Yi et al., DisCo, TPDS 2022 (method=backtrack); climb is our own"
    method: Literal["climb", "backtrack"] = "climb"
    evaluations: int = 4_000  # at most
    seconds: float = 0.0  # CPU seconds, at most; 0 for no limit, and the same answer everywhere
    seed: int = 0
    batch: int = 0  # samples of one rank; the workload's where 0
    reorder: bool = False  # weight gradients may be put off behind all else
    update: Literal["together", "by-message"] = "together"  # when the optimizer may run
    sharded: bool = False  # reduce-scatter now, all-gather in the next forward (zero=2)
    epilogue: bool = False  # the compiler writes matmuls itself and adds to their end
    learned: bool = True  # prices of fused regions by the network where one ships, else formula
    start: str = ""  # a plan to go on from
    resume: str = ""  # backtrack: a file for where it stops; read where it is there
    runs: bool = False  # buckets of eager ops alone, which need no compiler to run
    alpha: float = 1.05  # backtrack: costs above alpha × best are dropped
    beta: int = 10  # backtrack: changes at once, at most
    patience: int = 1000  # backtrack: states without gain before it ends
    heap: int = 50  # backtrack: states kept

    def plan(
        self, workload: Workload | Graph, cluster: Cluster, progress: Progress = silent
    ) -> Planned:
        """The quickest way to fuse one data-parallel step of a workload, or of a captured one."""
        problem = self.problem(workload, cluster)
        began = time.process_time()
        self._require_runs()
        _require_room(problem, self.start)
        found = self.search(problem, progress)
        best, scale = found.best, scale_of(problem)
        steps = {name: scale * rival.step for name, rival in found.baselines.items()}
        return Planned(
            self._written(best),
            scale * best.step,
            min(steps.values()),
            steps,
            scale * found.bounds.proven,
            found.run.judge.evaluations,
            time.process_time() - began,
            _notes(found, self, scale),
            stopped=found.stopped,
        )

    plan_graph = plan

    def problem(self, model: Workload | Graph, cluster: Cluster) -> Problem:
        """What is to be fused: the step as it is, or the quickest way that fits into memory."""
        sized = model
        if self.batch and isinstance(model, Workload):
            sized = replace(model, batch=self.batch)
        workload, least, settled = workload_of(sized), math.inf, set[object]()
        found: Problem | None = None
        for way, make in self._ways(sized, cluster):
            if way in settled:
                continue
            made = make()
            eager = predict_many(eager_plans(made, workload), workload, cluster, advises=False)
            made = with_reference(made, eager, cluster)
            if found is None or isinstance(model, Graph):
                found = made
                if _fits(made):
                    break
            elif _fits(made):  # the quickest of ZeRO, recompute and accumulation, nothing fused
                scored = Evaluator(made, sharded=made.zero == 2).score(unfused(made))
                took = scale_of(made) * scored.step
                found, least = (made, took) if took < least else (found, least)
                settled.add(way)
            elif made.held > made.room:
                settled.add(way)  # smaller micro-batches do not help
        assert found is not None
        return found

    def _ways(
        self, model: Workload | Graph, cluster: Cluster
    ) -> list[tuple[object, Callable[[], Problem]]]:
        """The step as it is, then ways to need less memory: what they shard and recompute."""
        options: dict[str, Any] = {"epilogue": self.epilogue, "learned": self.learned}
        if isinstance(model, Graph):
            make = partial(problem_of_graph, model, cluster, **options)
            return [(zero, partial(make, zero=zero)) for zero in (0, 2)]
        make = partial(from_workload, model, cluster, **options, run=run_of(model))
        return [("plain", make)] + [
            ((zero, recompute), partial(make, memory=Memory(repeats, recompute, zero)))
            for zero, recompute in product((0, 2), (False, True))
            for repeats in range(1, model.batch + 1)
            if model.batch % repeats == 0
        ]

    def search(self, problem: Problem, progress: Progress = silent) -> FusionResult:
        """The best way found; never longer than any baseline."""
        by_message = self.update == "by-message"
        rivals = baselines(Evaluator(problem, by_message, problem.zero == 2))
        judge = Evaluator(problem, by_message, self.sharded or problem.zero == 2)
        run = SearchRun(judge, self.seconds, self.evaluations, _report_to(progress))
        if self.runs:
            rivals = {name: r for name, r in rivals.items() if not r.fusion.members}
        for rival in rivals.values():
            run.see(rival)
        judge.evaluations += len(rivals)
        start = _score_plan(judge, read(self.start)) if self.start else None
        stopped = False
        try:
            if self.runs:
                run.see(judge.score(unfused(problem)))
            elif self.method == "backtrack":
                state = self._trail(run, start)
                backtrack(run, Backtrack(self.alpha, self.beta, self.patience, self.heap), state)
                if self.resume:
                    save_search(state, run, Path(self.resume), self._saved_options)
            else:
                first = start.fusion if start is not None else None
                climb(run, seed=self.seed, start=first, reorder=self.reorder)
        except KeyboardInterrupt:
            stopped = True
        assert run.best is not None
        assert run.shortest is not None
        return FusionResult(run.best, rivals, bounds(judge, run.shortest), run, stopped)

    @property
    def _saved_options(self) -> dict[str, Any]:
        """Options that a search kept in a file has to be gone on with."""
        return {n: getattr(self, n) for n in ("seed", "start", "alpha", "beta", "heap")}

    def _trail(self, run: SearchRun, start: Scored | None) -> BacktrackState:
        """The paper's search at its beginning, or where a file says it stopped."""
        path = Path(self.resume) if self.resume else None
        if path is not None and path.is_file():
            return load_search(run, path, self._saved_options)
        return begin_backtrack(run, seed=self.seed, start=start)

    def _require_runs(self) -> None:
        if self.resume and self.method != "backtrack":
            raise InputError(
                f"`resume={self.resume}` beside method={self.method}",
                hint="only method=backtrack is kept in a file; go on from a plan with start=",
            )
        more = [n for n in ("reorder", "sharded", "start") if getattr(self, n)]
        if self.runs and (more or self.update != "together"):
            raise InputError(
                f"`runs=yes` beside {', '.join(more) or 'update=by-message'}",
                hint="it asks for buckets of eager ops, updated together",
            )

    def _written(self, best: Scored) -> Plan:
        """The plan of what was found, with the batch where it was given or had to be cut."""
        problem = best.fusion.problem
        plan = plan_of(best).but(update=self.update, global_batch=self.batch * problem.wire.ranks)
        if problem.repeats == 1:
            return plan
        ranks, micro = problem.wire.ranks, problem.samples
        return plan.but(micro_batch=micro, global_batch=micro * problem.repeats * ranks)


@dataclass(frozen=True)
class Disco(FusionPlanner):
    """DisCo's own search: random fusions on a heap, pruned by cost."""

    name: ClassVar[str] = "disco"
    source: ClassVar[str] = "Yi et al., DisCo, TPDS 2022, algorithm 1"
    method: Literal["climb", "backtrack"] = "backtrack"

    def own(self) -> Planner:
        """The climb, with as many evaluations."""
        mine = {f.name: getattr(self, f.name) for f in fields(FusionPlanner)}
        return FusionPlanner(**mine | {"method": "climb", "resume": ""})


def _fits(problem: Problem) -> bool:
    return unfused(problem).held <= problem.room


def _score_plan(judge: Evaluator, plan: Plan) -> Scored:
    """The step of a plan to go on from, with its messages where it names any."""
    fusion = fusion_of(plan, judge.problem)
    return judge.score(fusion, buckets_from(plan, judge.problem) if plan.buckets else None)


def _report_to(progress: Progress) -> Callable[[float, float, int], None]:
    def tell(step: float, bound: float, many: int) -> None:
        progress(f"{many} evaluations, bound {bound:.6g} s", step)

    return tell


def _require_room(problem: Problem, start: str) -> None:
    if start and not Path(start).is_file():
        raise InputError(f"there is no plan `{start}` to go on from")
    held = unfused(problem).held
    if held > problem.room:
        raise InfeasibleError(
            f"`{problem.model}` keeps {held / 2**30:.1f} GiB on each rank; "
            f"`{problem.device.name}` has {problem.room / 2**30:.1f}",
            hint="neither ZeRO, recompute nor accumulation makes it fit: take more ranks",
        )


def _notes(found: FusionResult, planner: FusionPlanner, scale: float) -> tuple[str, ...]:
    best = found.best
    problem, fusion = best.fusion.problem, best.fusion
    sizes = [float(problem.sizes[b].sum()) for b in best.buckets.lists()]
    overlap, bound = bounds_of_kernels(found.run.judge, best)
    ways = sorted({problem.wire.way(s) for s in sizes})
    notes = [
        f"{len(problem)} ops in {fusion.num_groups} kernels, {int(fusion.copied.sum())} recomputed",
        f"{len(problem.gradients)} gradients in {len(sizes)} messages ({', '.join(ways)})",
        f"lower bounds: {1e3 * scale * bound:.4g} ms for these kernels with any buckets, "
        f"{1e3 * scale * overlap:.4g} ms with full overlap",
    ]
    if problem.repeats > 1 or problem.recompute or problem.zero:
        notes.append(_memory_note(problem))
    if fusion.late.any():
        late = int(fusion.late.sum())
        notes.append(f"{late} weight gradients put off to the end")
    if best.gathers is not None:
        many = len(best.gathers)
        notes.append(
            f"parameters gathered in {many} messages while the forward runs (as FSDP does)"
        )
    if best.buckets.parts.max() > 1:
        notes.append(f"messages in parts: {best.buckets.parts.tolist()}")
    return tuple(notes)


def _memory_note(problem: Problem) -> str:
    """What the step does to fit into memory."""
    said = [f"{problem.repeats} micro-batches of {problem.samples}"] * (problem.repeats > 1)
    said += ["blocks recomputed"] * problem.recompute
    said += ["gradients and optimizer state sharded (ZeRO-2)"] * bool(problem.zero)
    return f"to fit into memory: {', '.join(said)}"
