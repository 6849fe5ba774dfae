"""What a kernel of several ops costs, asked in batches and remembered.

    seconds(region) = Σ own seconds of its ops · model(region) / Σ model(op by itself)

The model (→ `foretell.cost.fused`) tells how much shorter ops are together than apart; their own
prices, which may be measured, tell how long they are apart. So a region of one op costs what the op
costs, and an error the model makes alike on both sides of the fraction drops out.

Layers that repeat ask for the same regions: each different one is priced once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import nan
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.cost.fused import fused_price
from foretell.cost.fused_regions import Regions, assembled
from foretell.search.fusion.problem import NEAR, Piece, Problem
from foretell.search.fusion.state import Fusion

Array = npt.NDArray[np.float64]
Node = tuple[Any, ...]


class Prices:
    """Prices of regions of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.known: dict[Any, float] = {}
        self.apart: dict[int, float] = {}  # model's seconds of single ops, by their look
        self.asked = 0

    def groups(self, state: Fusion, groups: Sequence[int]) -> list[float]:
        """Seconds of some groups of a state."""
        return self.many([(state, g) for g in groups])

    def many(self, asked: Sequence[tuple[Fusion, int]]) -> list[float]:
        """Seconds of groups, each of a state of its own: one question to the model for all."""
        found = [self._short(state, g) for state, g in asked]
        todo: dict[Any, tuple[tuple[int, ...], Any]] = {}
        keys: list[Any] = [None] * len(asked)
        for k, (state, g) in enumerate(asked):
            if found[k] is None:
                ops, key, row = region(state, g)
                keys[k] = key
                if key not in self.known:
                    todo[key] = (ops, row)
        self._ask(todo)
        return [self.known[key] if s is None else s for s, key in zip(found, keys, strict=True)]

    def all(self, state: Fusion) -> Array:
        """Seconds of every group, by its number."""
        cost = np.zeros(len(self.problem))
        reps = np.unique(state.group).tolist()
        cost[reps] = self.groups(state, reps)
        return cost

    def _short(self, state: Fusion, g: int) -> float | None:
        """The price where no model need be asked."""
        if all(state.is_dead(i) for i in state.of(g)):
            return 0.0
        if g in state.members:
            return None
        edges = [edge for _, edge in self.problem.reads[g]]
        return None if state.copied[edges].any() else self.problem.ops[g].seconds

    def _ask(self, todo: dict[Any, tuple[tuple[int, ...], Any]]) -> None:
        if not todo:
            return
        self.asked += len(todo)
        self._ask_apart({i for ops, _ in todo.values() for i in ops})
        together = self._model([row for _, row in todo.values()])
        for (key, (ops, _)), seconds in zip(todo.items(), together.tolist(), strict=True):
            own = sum(self.problem.ops[i].seconds for i in ops)
            apart = sum(self.apart[self.problem.alike[i]] for i in ops)
            self.known[key] = own * seconds / apart if apart > 0 else own

    def _ask_apart(self, ops: Iterable[int]) -> None:
        todo = {self.problem.alike[i]: i for i in ops if self.problem.alike[i] not in self.apart}
        if todo:
            rows = [alone(self.problem, i) for i in todo.values()]
            self.apart |= dict(zip(todo, self._model(rows).tolist(), strict=True))

    def _model(self, rows: list[Any]) -> Array:
        return model_seconds(assembled(rows), self.problem)


def model_seconds(regions: Regions, problem: Problem) -> Array:
    """What the model of fused regions says: the network where asked for, else the formula."""
    return fused_price(regions, problem.device, learned=problem.learned).seconds


def region(state: Fusion, g: int) -> tuple[tuple[int, ...], Any, Any]:
    """The ops of a group with its copies, a key of its look, and its nodes and edges."""
    problem = state.problem
    own = [i for i in state.of(g) if not state.is_dead(i)]
    ops = sorted({*own, *_copies(state, own)})
    return (tuple(ops), *_drawn(problem, ops, {i: state.leaves(i) for i in own}))


def _copies(state: Fusion, own: list[int]) -> set[int]:
    """Ops of other groups that this one recomputes."""
    problem = state.problem
    rows = ((i, edge) for k in own for i, edge in problem.reads[k])
    return {i for i, edge in rows if state.copied[edge] and state.is_copied(edge)}


def alone(problem: Problem, i: int) -> Any:
    """Nodes and edges of one op that writes what it makes."""
    return _drawn(problem, [i], {i: True})[1]


def _drawn(problem: Problem, ops: list[int], leaves: dict[int, bool]) -> tuple[Any, Any]:
    """Key and row of a region: entering tensors where they are first read, then ops in order."""
    nodes: list[Node] = []
    edges: list[tuple[int, int, int]] = []
    look: list[Any] = []
    place: dict[int, int] = {}
    for i in ops:
        op, sources = problem.ops[i], []
        for j, edge in problem.reads[i]:
            if j not in place:
                made, is_near = problem.ops[j], ops[0] - j <= NEAR
                place[j] = len(nodes)
                nodes.append(_entering(made.elements, made.dtype, made.last, is_near))
                look.append((made.elements, made.dtype, made.last, is_near))
            sources.append((place[j], int(problem.pattern[edge])))
        for entry in op.entries:
            sources.append((len(nodes), entry.pattern))
            nodes.append(_entering(entry.elements, entry.dtype, op.last, False))
        place[i] = len(nodes)
        nodes.append(_node(op, op.bytes if leaves.get(i) else 0.0))
        edges += [(s, place[i], p) for s, p in sources]
        look.append((problem.alike[i], leaves.get(i, False), tuple(sources)))
    return tuple(look), (nodes, edges)


def _entering(elements: float, dtype: str, last: float, is_near: bool) -> Node:
    word = "fresh" if is_near else "input"
    return (word, dtype, elements, elements, 1.0, 0, last, 0.0, 0.0, nan)


def _node(op: Piece, writes: float) -> Node:
    return (
        op.word, op.dtype, op.elements, op.looped, op.inner, op.across, op.last, writes, op.flops,
        op.seconds,
    )  # fmt: skip
