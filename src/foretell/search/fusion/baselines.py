"""What people get without a search, each by the rule of the program it is named after.

none            every op a kernel, every gradient a message
ops             ops fused as XLA does: from the last op back, each maker into its reader where
                all its readers are there, else a copy where it is cheap
gradients       gradients combined up to 30 MiB (XLA's all-reduce combiner)
ops, gradients  the one, then the other: a compiler's default
ddp             eager ops; buckets of 25 MiB, the first of 1 MiB (torch DDP's defaults)
inductor+ddp    ops fused as Inductor does: the pair that saves most bytes first; DDP's buckets
"""

from __future__ import annotations

from collections.abc import Callable

from foretell.search.fusion.legal import copy, edge_fits, merge
from foretell.search.fusion.problem import Problem
from foretell.search.fusion.score import Judge, Scored, own_buckets, sized_buckets
from foretell.search.fusion.state import Fusion, unfused

# torch/nn/parallel/distributed.py: 25 MiB, the first bucket 1 MiB so that sending starts early.
DDP, DDP_FIRST = 25.0 * 2**20, 1.0 * 2**20
# DisCo's paper: XLA's combiner stopped at 30 MiB then (or 256 tensors).
COMBINED = 30.0 * 2**20


def baselines(judge: Judge) -> dict[str, Scored]:
    """Every baseline, played."""
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
    return found


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
            moved = merge(state, a, b) if is_own else copy(state, edge) if same_side else None
            state = moved or state
    return state


def like_inductor(problem: Problem) -> Fusion:
    """The pair that shares most bytes first, over and over, until no pair may be fused."""
    state, by_bytes = unfused(problem), _by_bytes(problem)
    changed = True
    while changed:
        changed = False
        for edge in sorted(
            (e for e in range(len(problem.source)) if edge_fits(problem, e)), key=by_bytes
        ):
            a, b = (int(state.group[i]) for i in (problem.source[edge], problem.target[edge]))
            moved = merge(state, a, b) if a != b else None
            if moved is not None:
                state, changed = moved, True
    return state


def _by_bytes(problem: Problem) -> Callable[[int], tuple[float, int]]:
    def key(edge: int) -> tuple[float, int]:
        return -problem.ops[int(problem.source[edge])].bytes, edge

    return key
