"""The expert that a network learns from in self-play, and the file of its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.search.placement.policy import Learned
from foretell.search.placement.problem import Placement, actions
from foretell.search.placement.search import Array, Evaluator, Expansion, by_seconds, look_ahead


@dataclass
class Expert:
    """What a network learns from: simulations of each way on (and behind a choice for the whole
    step, of each choice for all groups), the way to a placement that a longer search has found,
    and what the network says itself."""

    goal: Placement
    learned: Learned | None = None

    def __call__(self, on: Evaluator, expansions: Sequence[Expansion]) -> list[Array]:
        """For each question, chances that add up to 1."""
        said = [[self._simulated(on, one) for one in expansions]]
        said.append([self._towards(one.successors) for one in expansions])
        if self.learned is not None:
            said.append(self.learned(on, expansions))
        return [np.mean(parts, axis=0) for parts in zip(*said, strict=True)]

    def _simulated(self, on: Evaluator, one: Expansion) -> Array:
        if any(way.actions != one.now.actions for way in one.successors):
            return look_ahead(on, [one])[0]
        every = range(len(on.problem.groups))
        choices = actions(on.problem, on.problem.leaders[0])
        behind = [[way, *(way.but(every, a) for a in choices)] for way in one.successors]
        return by_seconds(np.array([min(on.many(some)) for some in behind]))

    def _towards(self, successors: list[Placement]) -> Array:
        """The ways on that are nearest to the goal, alike."""
        apart = np.array([self._apart(way) for way in successors])
        nearest = apart == apart.min()
        found: Array = nearest / nearest.sum()
        return found

    def _apart(self, way: Placement) -> int:
        goal = self.goal
        groups = sum(a != b for a, b in zip(way.actions, goal.actions, strict=True))
        step = (way.micros != goal.micros, way.fuse != goal.fuse, way.mode != goal.mode)
        return groups + sum(step)


def write(path: Path, weights: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write weights in half precision."""
    half: dict[str, Any] = {n: w.astype(np.float16) for n, w in weights.items()}
    np.savez_compressed(path, **half)
