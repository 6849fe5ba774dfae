"""The learned prior: the network of `net` with the weights of the package, or with others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.errors import InputError
from foretell.search.placement.evaluate import Evaluator
from foretell.search.placement.mcts import (
    Array,
    Asked,
    Prior,
    by_seconds,
    even_chances,
    look_ahead,
)
from foretell.search.placement.policy import net
from foretell.search.placement.policy.view import CELL, GROUP, LINK, NEXT, PLACE, WAY_ON, View, view
from foretell.search.placement.space import Placement, actions

WIDTHS = {
    "group": GROUP, "cell": CELL, "place": PLACE, "link": LINK, "next": NEXT, "way_on": WAY_ON,
}  # fmt: skip
FLOOR = 0.05  # of all chances is dealt out evenly: nothing is ruled out unseen


@dataclass
class Learned:
    """Chances by a network, which looks at the last placement's simulation and plays none."""

    weights: net.Weights
    _view: View | None = field(default=None, init=False, repr=False)

    def __call__(self, on: Evaluator, asked: Sequence[Asked]) -> list[Array]:
        """For each question, chances that add up to 1."""
        if self._view is None or self._view.problem is not on.problem:
            self._view = view(on.problem)
        seen = [self._view.seen(one.now, one.ways_on) for one in asked]
        return [_floored(net.chances(found)) for found in net.scores(self.weights, seen)]


@dataclass
class Expert:
    """What a network learns from: simulations of each way on (and behind a choice for the whole
    step, of each choice for all groups), the way to a placement that a longer search has found,
    and what the network says itself."""

    goal: Placement
    learned: Learned | None = None

    def __call__(self, on: Evaluator, asked: Sequence[Asked]) -> list[Array]:
        """For each question, chances that add up to 1."""
        said = [[self._simulated(on, one) for one in asked]]
        said.append([self._towards(one.ways_on) for one in asked])
        if self.learned is not None:
            said.append(self.learned(on, asked))
        return [np.mean(parts, axis=0) for parts in zip(*said, strict=True)]

    def _simulated(self, on: Evaluator, one: Asked) -> Array:
        if any(way.actions != one.now.actions for way in one.ways_on):
            return look_ahead(on, [one])[0]
        every = range(len(on.problem.groups))
        choices = actions(on.problem, on.problem.leaders[0])
        behind = [[way, *(way.but(every, a) for a in choices)] for way in one.ways_on]
        return by_seconds(np.array([min(on.many(some)) for some in behind]))

    def _towards(self, ways_on: list[Placement]) -> Array:
        """The ways on that are nearest to the goal, alike."""
        apart = np.array([self._apart(way) for way in ways_on])
        nearest = apart == apart.min()
        found: Array = nearest / nearest.sum()
        return found

    def _apart(self, way: Placement) -> int:
        goal = self.goal
        groups = sum(a != b for a, b in zip(way.actions, goal.actions, strict=True))
        step = (way.micros != goal.micros, way.fuse != goal.fuse, way.mode != goal.mode)
        return groups + sum(step)


def _floored(chances: Array) -> Array:
    return (1 - FLOOR) * chances + FLOOR / len(chances)


@cache
def shipped() -> Prior:
    """The prior of the package; even chances where it has no weights."""
    path = files("foretell.search.placement.policy").joinpath("weights.npz")
    return Learned(read(path.read_bytes())) if path.is_file() else even_chances


def read(raw: bytes) -> net.Weights:
    """Weights from the bytes of their file."""
    with np.load(BytesIO(raw)) as arrays:
        found = {name: arrays[name].astype(np.float32) for name in arrays.files}
    if found["group.weight"].shape[1] != GROUP or found["score.weight"].shape[0] != 1:
        raise InputError(
            "these weights are for other features than this version sees",
            hint="train them again: foretell train-policy",
        )
    return found


def write(path: Path, weights: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write weights in half precision."""
    half: dict[str, Any] = {n: w.astype(np.float16) for n, w in weights.items()}
    np.savez_compressed(path, **half)
