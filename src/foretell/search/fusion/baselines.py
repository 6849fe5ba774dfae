"""What people get without a search, each by the rule of the program it is named after.

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

import math
import random
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from foretell.search.fusion.lanes import greedy
from foretell.search.fusion.problem import Problem
from foretell.search.fusion.score import Evaluator, Scored, own_buckets, sized_buckets
from foretell.search.fusion.state import (
    MOST,
    Fusion,
    copied_if_legal,
    edge_fits,
    fitting_edges,
    fused,
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
