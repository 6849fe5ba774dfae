"""Single changes to a way of fusing, each with the groups whose price it changes.

merge     two groups become one
copy      a reader gets a copy of a cheap maker
drop      a copy is dropped again
take out  an op leaves its group
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from foretell.search.fusion import legal
from foretell.search.fusion.problem import Problem
from foretell.search.fusion.state import Fusion


class Moved(NamedTuple):
    """A state after a move, and the groups that cost something else now."""

    fusion: Fusion
    touched: tuple[int, ...]


def merge(fusion: Fusion, a: int, b: int) -> Moved | None:
    """Two groups as one."""
    found = legal.merge(fusion, a, b)
    if found is None:
        return None
    own = int(found.group[fusion.of(a)[0]])
    return Moved(found, tuple({own, *freed(fusion, found, own)}))


def freed(fusion: Fusion, found: Fusion, own: int) -> set[int]:
    """Groups whose results copies read that are not needed any more inside the merged group."""
    problem, groups = fusion.problem, set[int]()
    for i in found.of(own):
        for _, edge in problem.readers[i]:
            if fusion.copied[edge] and not found.copied[edge]:
                groups |= {int(found.group[k]) for k, _ in problem.reads[i]}
    return groups


def copy(fusion: Fusion, edge: int) -> Moved | None:
    """A copy for the reader of an edge."""
    found = legal.copy(fusion, edge)
    if found is None:
        return None
    return Moved(found, around(found, edge))


def drop(fusion: Fusion, edge: int) -> Moved | None:
    """The copy of an edge's reader dropped."""
    found = fusion.with_copy(edge, False)
    return Moved(found, around(found, edge)) if found.is_ring_free else None


def take_out(fusion: Fusion, i: int) -> Moved | None:
    """An op out of its group; what is left has to hang together."""
    g = int(fusion.group[i])
    if g not in fusion.members:
        return None
    if not may_leave(fusion, i):
        return None
    found = fusion.draft()
    found.take_out_here(i)
    if not found.is_ring_free:
        return None
    return Moved(found, apart(found, i, [o for o in fusion.of(g) if o != i]))


def may_leave(fusion: Fusion, i: int) -> bool:
    """Whether a group hangs together without an op; rings left out."""
    rest = tuple(o for o in fusion.members.get(int(fusion.group[i]), ()) if o != i)
    return bool(rest) and _hangs_together(fusion.problem, rest)


def apart(found: Fusion, i: int, rest: Sequence[int]) -> tuple[int, ...]:
    """The groups whose price changes once an op has left others."""
    problem = found.problem
    copied = [edge for o in (i, *rest) for _, edge in problem.reads[o] if found.copied[edge]]
    more = {m for edge in copied for m in around(found, edge)}
    return tuple({i, rest[0], *more})


def random_change(fusion: Fusion, edges: list[int], dice: random.Random) -> Moved | None:
    """A random change at a random edge; None where it is not allowed."""
    e, problem = dice.choice(edges), fusion.problem
    i, j = int(problem.source[e]), int(problem.target[e])
    a, b = int(fusion.group[i]), int(fusion.group[j])
    if a == b:
        return take_out(fusion, dice.choice((i, j)))
    if fusion.copied[e]:
        return drop(fusion, e)
    return merge(fusion, a, b) if dice.random() < 0.6 else copy(fusion, e)


def around(fusion: Fusion, edge: int) -> tuple[int, ...]:
    """The groups whose price a copy may change: reader, maker, and what the maker reads."""
    problem = fusion.problem
    i, j = int(problem.source[edge]), int(problem.target[edge])
    near = {int(fusion.group[k]) for k in (i, j)}
    return tuple(near | {int(fusion.group[k]) for k, _ in problem.reads[i]})


def _hangs_together(problem: Problem, ops: tuple[int, ...]) -> bool:
    inside, seen, todo = set(ops), {ops[0]}, [ops[0]]
    while todo:
        i = todo.pop()
        for j, _ in (*problem.reads[i], *problem.readers[i]):
            if j in inside and j not in seen:
                seen.add(j)
                todo.append(j)
    return seen == inside


def fitting_edges(problem: Problem) -> list[int]:
    """Edges along which anything may be fused at all."""
    return [e for e in range(len(problem.source)) if legal.edge_fits(problem, e)]


def put_off(problem: Problem) -> list[list[int]]:
    """Ops that may be put off, gradients of weights that nothing else reads, in two orders.

    The last of the step first, so that the wire is fed until then; or dearest a byte first, so that
    little is left to send behind them.
    """
    sent = np.bincount(problem.producer, problem.sizes, len(problem)).tolist()
    own = [i for i in np.unique(problem.producer).tolist() if not problem.readers[i]]

    def dear(i: int) -> tuple[float, int]:
        return -float(f"{problem.ops[i].seconds / max(sent[i], 1.0):.1e}"), -i

    return [sorted(own, reverse=True), sorted(own, key=dear)]
