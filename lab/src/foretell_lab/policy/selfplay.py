"""Games that a network learns from: the tree search on problems at random, and where it went.

A game is one tree, from data parallelism or from the best of some placements at random, guided by
an expert: what the network says, a simulation of each way on, and the answer of annealing. Every
node that was visited often enough is an example: what the network would see there, and how often
each way on was taken.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from foretell.search.placement.planner import drawn
from foretell.search.placement.policy import Learned, Seen, view
from foretell.search.placement.problem import (
    ALL_REDUCE,
    EVEN,
    Action,
    Placement,
    canonical,
    uniform,
)
from foretell.search.placement.search import Evaluator, Node, Tree, anneal
from foretell_lab.policy.expert import Expert
from foretell_lab.policy.worlds import world

OFTEN = 6  # visits from which on a node is an example
STROKES = 2500  # of the annealing whose answer the expert knows
TRUST = 8.0  # visits that the expert's own chances count for


class Example(NamedTuple):
    """A question and how the search answered it."""

    seen: Seen
    target: npt.NDArray[np.float32]
    weight: float  # how often the search stood there, to the root


@dataclass(frozen=True)
class Game:
    """The record of one game."""

    name: str
    gain: float  # times as fast as data parallelism, or as its start where that does not fit
    examples: list[Example]


def game(seed: int, learned: Learned | None, playouts: int = 96) -> Game:
    """Simulate one game; the same seed and network give the same."""
    name, on = world(seed)
    plain = uniform(on.problem, Action(0, ALL_REDUCE), mode=EVEN)
    start = plain if seed % 2 == 0 else _start(on, seed)
    base = on.seconds(plain)
    base = base if np.isfinite(base) else on.seconds(start)
    goal, _ = anneal(on, canonical(on.problem, start), STROKES, seed)
    tree = Tree(on, [start], Expert(goal, learned), base, seed, noise=0.25)
    tree.play(playouts)
    often = [n for n in (tree.root, *tree.nodes.values()) if n.visits >= OFTEN and n.children]
    look = view(on.problem)
    examples = [
        Example(_half(look.seen(n.now, [c.now for c in n.children])), _target(n), n.visits**0.5)
        for n in often
    ]
    return Game(name, base / tree.best[1] if np.isfinite(base) else 1.0, examples)


def _start(on: Evaluator, seed: int) -> Placement:
    """The best of sixteen at random."""
    some = drawn(on.problem, 16, random.Random(seed).randrange(2**31))
    took = on.many(some)
    return some[int(np.argmin(took))]


def _target(node: Node) -> npt.NDArray[np.float32]:
    """How often each way on was taken, and a little of what was thought before."""
    wanted = node.taken + TRUST * node.chances
    found: npt.NDArray[np.float32] = (wanted / wanted.sum()).astype(np.float32)
    return found


def _half(seen: Seen) -> Seen:
    """In half precision: thousands are kept."""
    half = (v if v.dtype.kind == "i" else v.astype(np.float16) for v in seen)  # ends are indices
    return Seen(*half)  # type: ignore[arg-type]
