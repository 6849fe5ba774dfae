"""The learned prior: the network of `net` with the weights of the package, or with others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from io import BytesIO

import numpy as np

from foretell.errors import InputError
from foretell.search.placement.evaluate import Evaluator
from foretell.search.placement.mcts import (
    Array,
    Asked,
    Prior,
    even_chances,
)
from foretell.search.placement.policy import net
from foretell.search.placement.policy.view import CELL, GROUP, LINK, NEXT, PLACE, WAY_ON, View, view

WIDTHS = {
    "group": GROUP, "cell": CELL, "place": PLACE, "link": LINK, "next": NEXT, "way_on": WAY_ON,
}  # fmt: skip
FLOOR = 0.05  # of all chances is split evenly: nothing is ruled out unseen


@dataclass
class Learned:
    """Chances by a network, which looks at the last placement's simulation and simulates none."""

    weights: net.Weights
    _view: View | None = field(default=None, init=False, repr=False)

    def __call__(self, on: Evaluator, asked: Sequence[Asked]) -> list[Array]:
        """For each question, chances that add up to 1."""
        if self._view is None or self._view.problem is not on.problem:
            self._view = view(on.problem)
        seen = [self._view.seen(one.now, one.ways_on) for one in asked]
        return [_floored(net.chances(found)) for found in net.scores(self.weights, seen)]


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
