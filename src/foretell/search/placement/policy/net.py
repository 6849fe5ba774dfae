"""The learned prior of the tree search: its network in numpy, its weights, what simulation
tells it.

Op groups and cells start from their features. In every layer each hears along five kinds of edge:
groups from those they read and those that read them, and by attention (GATv2) groups from cells,
cells from groups and cells from cells. A way on is scored from the groups it changes, the cells
these are on and go to, and its own features: no weight knows how many there are of any.

`foretell_lab.policy.network` is the same network on PyTorch Geometric; a test holds both equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from io import BytesIO

import numpy as np
import numpy.typing as npt

from foretell import portable
from foretell.cost.learned import dense
from foretell.errors import InputError
from foretell.search.placement.evaluate import Evaluator
from foretell.search.placement.mcts import Array, Asked, Prior, even_chances
from foretell.search.placement.policy.view import (
    CELL,
    GROUP,
    LINK,
    NEXT,
    PLACE,
    WAY_ON,
    Seen,
    View,
    view,
)

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Weights = Mapping[str, Floats]
SLOPE = 0.2  # of leaky ReLU below zero


WIDTHS = {
    "group": GROUP, "cell": CELL, "place": PLACE, "link": LINK, "next": NEXT, "way_on": WAY_ON,
}  # fmt: skip
FLOOR = 0.05  # of all chances is split evenly: nothing is ruled out unseen


def scores(weights: Weights, seen: Sequence[Seen]) -> list[Floats]:
    """One score a way on, of questions about one problem: equal numbers of groups and cells."""
    group = _tanh(_dense(weights, "group", np.stack([one.group for one in seen])))
    cell = _tanh(_dense(weights, "cell", np.stack([one.cell for one in seen])))
    place = np.stack([one.place for one in seen])
    behind = np.stack([one.next for one in seen])
    link = seen[0].link[None]
    for layer in range(_layers(weights)):
        group, cell = _heard(weights, f"{layer}.", group, cell, place, behind, seen[0].ends, link)
    return [_decoded(weights, one, group[i], cell[i]) for i, one in enumerate(seen)]


def chances(values: Floats) -> npt.NDArray[np.float64]:
    """Scores as chances that add up to 1."""
    raised = portable.exp(values.astype(float) - float(values.max()))
    found: npt.NDArray[np.float64] = raised / raised.sum()
    return found


def _heard(
    weights: Weights, at: str, group: Floats, cell: Floats, place: Floats, behind: Floats,
    ends: Ints, link: Floats,
) -> tuple[Floats, Floats]:  # fmt: skip
    """One layer: what all kinds of edge bring is added up, and added to what was there."""
    to_group = _attend(weights, f"{at}serve", cell, group, place)
    to_group += _beside(weights, f"{at}before", group, behind, ends[:, 0], ends[:, 1])
    to_group += _beside(weights, f"{at}behind", group, behind, ends[:, 1], ends[:, 0])
    to_cell = _attend(weights, f"{at}place", group, cell, place.swapaxes(1, 2))
    to_cell += _attend(weights, f"{at}link", cell, cell, link.swapaxes(1, 2))
    return group + np.maximum(to_group, 0), cell + np.maximum(to_cell, 0)


def _attend(weights: Weights, name: str, source: Floats, target: Floats, edge: Floats) -> Floats:
    """Attention of every target to every source; `edge` [b, target, source, ·]."""
    left = _dense(weights, f"{name}.left", source)[:, None]
    right = _dense(weights, f"{name}.right", target)[:, :, None]
    mixed = left + right + dense(edge, weights[f"{name}.edge.weight"])
    mixed = np.maximum(mixed, SLOPE * mixed)
    heads = weights[f"{name}.attention"]
    split = (*mixed.shape[:3], *heads.shape)
    score = (mixed.reshape(split) * heads).sum(axis=-1)
    score = portable.exp(score - score.max(axis=2, keepdims=True)).astype(np.float32)
    score /= score.sum(axis=2, keepdims=True)
    values = left.reshape(left.shape[0], left.shape[2], *heads.shape)
    heard = (score[..., None] * values[:, None]).sum(axis=2)
    out: Floats = heard.reshape(*heard.shape[:2], -1) + weights[f"{name}.bias"]
    return out


def _beside(
    weights: Weights, name: str, group: Floats, edge: Floats, source: Ints, target: Ints
) -> Floats:
    """What each group hears along its edges, added up."""
    sent = _dense(weights, f"{name}.left", group)
    told = np.maximum(sent[:, source] + dense(edge, weights[f"{name}.edge.weight"]), 0)
    out = np.zeros_like(sent)
    np.add.at(out, (slice(None), target), told)
    return out


def _decoded(weights: Weights, seen: Seen, group: Floats, cell: Floats) -> Floats:
    x = np.concatenate(
        [
            dense(seen.changed, group.T),
            dense(seen.to, cell.T),
            dense(seen.come_from, cell.T),
            seen.way_on,
        ],
        axis=1,
    )
    x = np.maximum(_dense(weights, "first", x), 0)
    x = np.maximum(_dense(weights, "second", x), 0)
    plain = _dense(weights, "plain", seen.way_on)
    return (_dense(weights, "score", x) + plain)[:, 0]


def _dense(weights: Weights, name: str, x: Floats) -> Floats:
    return dense(x, weights[f"{name}.weight"], weights[f"{name}.bias"])


def _tanh(x: Floats) -> Floats:
    return portable.tanh(x).astype(np.float32)


def _layers(weights: Weights) -> int:
    return sum(name.endswith("serve.bias") for name in weights)


@dataclass
class Learned:
    """Chances by a network, which looks at the last placement's simulation and simulates none."""

    weights: Weights
    _view: View | None = field(default=None, init=False, repr=False)

    def __call__(self, on: Evaluator, asked: Sequence[Asked]) -> list[Array]:
        """For each question, chances that add up to 1."""
        if self._view is None or self._view.problem is not on.problem:
            self._view = view(on.problem)
        seen = [self._view.seen(one.now, one.ways_on) for one in asked]
        return [_floored(chances(found)) for found in scores(self.weights, seen)]


def _floored(chances: Array) -> Array:
    return (1 - FLOOR) * chances + FLOOR / len(chances)


@cache
def shipped() -> Prior:
    """The prior of the package; even chances where it has no weights."""
    path = files("foretell.search.placement.policy").joinpath("weights.npz")
    return Learned(read(path.read_bytes())) if path.is_file() else even_chances


def read(raw: bytes) -> Weights:
    """Weights from the bytes of their file."""
    with np.load(BytesIO(raw)) as arrays:
        found = {name: arrays[name].astype(np.float32) for name in arrays.files}
    if found["group.weight"].shape[1] != GROUP or found["score.weight"].shape[0] != 1:
        raise InputError(
            "these weights are for other features than this version sees",
            hint="train them again: foretell train-policy",
        )
    return found
