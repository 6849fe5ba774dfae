"""How much a prior helps: the tree search with it and without, on problems no training has seen.

Both begin at data parallelism (even samples, all-reduce) and take the same decisions in the same
order; they differ in the chances alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretell.search.placement.problem import ALL_REDUCE, EVEN, Action, uniform
from foretell.search.placement.search import Evaluator, Prior, Tree, even_chances

LEAST = 1e-6  # relative gain that counts as one
NEAR = 1.01  # times the best of even chances that counts as the same cost: prices are no better
MOST = 200  # playouts


@dataclass(frozen=True)
class Evaluated:
    """One problem, one seed."""

    better_at: int  # the playout that was first better than data parallelism; more than all if none
    even_at: int  # the playout at which even chances were near their best
    guided_at: int  # the playout at which the prior was as near
    even_simulated: int  # placements simulated by then: a prior may simulate more than it simulates
    guided_simulated: int
    gain: float  # times as fast as data parallelism, guided
    ahead: float  # times as fast as what even chances found

    @property
    def ratio(self) -> float:
        """Playouts with the prior to playouts without."""
        return self.guided_at / self.even_at


def evaluated(on: Evaluator, prior: Prior, seed: int, most: int = MOST) -> Evaluated:
    """Simulate both."""
    plain = uniform(on.problem, Action(0, ALL_REDUCE), mode=EVEN)
    base = on.seconds(plain)
    trees = []
    for use in (prior, even_chances):
        tree = Tree(Evaluator(on.problem), [plain], use, base, seed)
        tree.play(most)
        trees.append(tree)
    guided, even = trees
    wanted = even.best[1] * NEAR
    even_at, guided_at = _first(even, wanted, most), _first(guided, wanted, most)
    return Evaluated(
        _first(guided, base * (1 - LEAST), most),
        even_at,
        guided_at,
        even.spent[even_at - 1],
        guided.spent[min(guided_at, len(guided.spent)) - 1],
        base / guided.best[1],
        even.best[1] / guided.best[1],
    )


def _first(tree: Tree, wanted: float, most: int) -> int:
    """The first playout that is as good, counted from 1; one more than all where none is."""
    found = np.flatnonzero(np.array(tree.curve) <= wanted)
    return int(found[0]) + 1 if len(found) else most + 1
