"""Monte Carlo tree search over placements, as TAG guides it.

The first decision is a placement to start from, the second one choice for all groups or none, each
further one that of one op group, the heaviest first; groups not yet decided keep what they have. A
leaf is played by the simulator, not
rolled out, and r = T₀/T − 1 (its fourth root above 1, −1 where it does not fit) is backed up:

    next = argmax  Q + c·P·√N / (1 + n),     c = √(children / 10)

P comes from a `Prior`. Placements reached in two ways are played once (the evaluator's table).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from foretell.search.placement.evaluate import Evaluator
from foretell.search.placement.space import Action, Placement, actions

Array = npt.NDArray[np.float64]


class Prior(Protocol):
    """Says how promising each way on is, before any is tried. A learned one goes here."""

    def __call__(self, on: Evaluator, now: Placement, ways_on: list[Placement]) -> Array:
        """Chances that add up to 1."""


def even_chances(on: Evaluator, now: Placement, ways_on: list[Placement]) -> Array:
    """Nothing is known."""
    return np.full(len(ways_on), 1 / len(ways_on))


def look_ahead(on: Evaluator, now: Placement, ways_on: list[Placement]) -> Array:
    """By what one simulation of each says: chances fall by e for every 3 % of a step."""
    took = np.array(on.many(ways_on))
    least = took.min()
    if not np.isfinite(least):
        return even_chances(on, now, ways_on)
    chances = np.where(np.isfinite(took), np.exp(-(took / least - 1) / 0.03), 0.0) + 1e-4
    out: Array = chances / chances.sum()
    return out


@dataclass
class _Node:
    """A prefix of decisions."""

    now: Placement
    depth: int
    chance: float
    visits: int = 0
    total: float = 0.0
    children: list[_Node] = field(default_factory=list)

    @property
    def worth(self) -> float:
        return self.total / self.visits if self.visits else 0.0


@dataclass
class Tree:
    """A search that can go on for ever; `best` is the answer so far."""

    on: Evaluator
    starts: list[Placement]
    prior: Prior
    baseline: float  # T₀
    best: tuple[Placement, float] = field(init=False)
    root: _Node = field(init=False)

    def __post_init__(self) -> None:
        self.root = _Node(self.starts[0], -1, 1.0)
        self.best = (self.starts[0], self.on.seconds(self.starts[0]))

    def play(self, playouts: int) -> None:
        """Go down, open a leaf, play it, and tell those above: so many times."""
        for _ in range(playouts):
            path = self._down()
            leaf = path[-1]
            if leaf.depth <= len(self.on.problem.leaders) and not leaf.children:
                self._open(leaf)
            reward = self._played(leaf.now)
            for node in path:
                node.visits += 1
                node.total += reward

    def _down(self) -> list[_Node]:
        path = [self.root]
        while path[-1].children:
            node = path[-1]
            reach = math.sqrt(len(node.children) / 10) * math.sqrt(node.visits)
            path.append(
                max(node.children, key=lambda n: n.worth + reach * n.chance / (1 + n.visits))
            )
        return path

    def _open(self, node: _Node) -> None:
        ways_on = self.starts if node is self.root else self._ways_on(node)
        chances = self.prior(self.on, node.now, ways_on)
        node.children = [
            _Node(now, node.depth + 1, float(p)) for now, p in zip(ways_on, chances, strict=True)
        ]

    def _ways_on(self, node: _Node) -> list[Placement]:
        problem = self.on.problem
        group = problem.leaders[max(node.depth - 1, 0)]
        run = range(len(problem.groups)) if node.depth == 0 else range(group, group + 1)
        kept: Action = node.now.actions[group]
        others = [a for a in actions(problem, group) if a != kept or node.depth == 0]
        return [node.now, *(node.now.but(run, a) for a in others)]

    def _played(self, now: Placement) -> float:
        seconds = self.on.seconds(now)
        if seconds < self.best[1]:
            self.best = (now, seconds)
        if not math.isfinite(seconds):
            return -1.0
        gain = self.baseline / seconds - 1 if math.isfinite(self.baseline) else 1.0
        return gain**0.25 if gain > 1 else gain
