"""The same search with smaller sets: every device alone, and equal parts of the devices of a node.

Device groups and nodes are what TAG chooses among. Here a stage of a pipeline may be one device,
or half of a node; it begins at what was found without, and at the best pipeline of such parts.
"""

from __future__ import annotations

from dataclasses import replace

from foretell.search.placement.anneal import anneal
from foretell.search.placement.baselines import staged
from foretell.search.placement.evaluate import Evaluator
from foretell.search.placement.fleet import PARTS, Fleet
from foretell.search.placement.problem import MICROS, Problem
from foretell.search.placement.space import Action, Placement

STARTS = 3  # pipelines to begin at
MOST = 16  # devices up to which each is told apart: each is one more to simulate


def finer(
    fine: Evaluator, of: Fleet, found: Placement, strokes: int, seed: int
) -> tuple[Placement, float]:
    """The best met among smaller sets, which is never slower than what was found without."""
    start = translated(found, of, fine.problem.fleet)
    begins = list(dict.fromkeys([start, *_best_of_each_length(fine)[:STARTS]]))
    ends = [(start, fine.seconds(start))]
    for i, begin in enumerate(begins):
        ends.append(anneal(fine, begin, strokes // len(begins), seed + i))
    return min(ends, key=lambda end: end[1])


def _best_of_each_length(fine: Evaluator) -> list[Placement]:
    """For each number of sets the quickest pipeline, the quickest of these first."""
    tried = pipelines(fine.problem)
    took = fine.many(tried)
    best: dict[int, int] = {}
    for i in sorted(range(len(tried)), key=lambda i: (took[i], i)):
        best.setdefault(len(set(tried[i].actions)), i)
    return [tried[i] for i in best.values()]


def translated(placement: Placement, of: Fleet, to: Fleet) -> Placement:
    """The same placement, by the numbers that its sets have in a fleet cut into more cells."""
    known = {frozenset(to.ranks(s)): s for s in range(len(to.sets))}
    there = [known[frozenset(of.ranks(s))] for s in range(len(of.sets))]
    chosen = tuple(Action(there[a.devices], a.way) for a in placement.actions)
    return replace(placement, actions=chosen)


def pipelines(problem: Problem) -> list[Placement]:
    """Pipelines whose stages are parts of nodes: of one node, and of all nodes in a row."""
    fleet = problem.fleet
    boxes = [
        tuple(i for i, c in enumerate(fleet.cells) if c.box == box)
        for box in sorted({c.box for c in fleet.cells})
    ]
    rows = []
    for size in (1, *PARTS):
        cut = [_cut(fleet, box, size) for box in boxes]
        rows += [*cut, tuple(s for row in cut for s in row)]
        rows.append(tuple(s for row in reversed(cut) for s in row))
    able = [row for row in dict.fromkeys(rows) if 1 < len(row) <= len(problem.groups)]
    return [staged(problem, row, m) for row in able for m in MICROS if m <= problem.batch]


def _cut(fleet: Fleet, box: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The sets of equal parts of a node; the node itself where it has none of that size."""
    if len(box) % size:
        return (fleet.sets.index(box),)
    return tuple(fleet.sets.index(box[i : i + size]) for i in range(0, len(box), size))
