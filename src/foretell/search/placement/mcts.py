"""Monte Carlo tree search over placements, as TAG guides it.

The first decision is a placement to start from, the second one for the whole step (micro-batches,
messages, samples), the third one choice for all groups or none, the next one choice for each branch
of the model that runs beside others, each further one that of one op group, the heaviest first
(where it is served, also by whom); groups not yet decided keep what they have. A leaf is simulated
by the simulator, not rolled out, and r = T₀/T − 1 (its fourth root above 1, −1 where it does not
fit) is backed up:

    next = argmax  Q + c·P·√N / (1 + n),     c = √(children / 10)

Q of a way that was not tried is `UNTRIED` of its node's: with 0, as TAG has it, the first way
that gains anything is followed for ever. P comes from a `Prior`. Several leaves are gathered before
any is simulated, those on the way counted as visited and not yet worth anything (virtual loss), so
that a prior and the simulator answer for all of them at once. What is reached in two ways is one
node. It can be stopped at any time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from foretell import portable
from foretell.search.placement.anneal import whole
from foretell.search.placement.evaluate import Evaluator
from foretell.search.placement.problem import (
    PS,
    WAYS,
    Action,
    Placement,
    actions,
    canonical,
    servers,
)

Array = npt.NDArray[np.float64]
AT_ONCE = 4  # leaves gathered before they are simulated
UNTRIED = 0.7  # on 14 problems no game was on: 0, 0.5, 0.7, 1 gain 4.3, 4.9, 5.0, 5.2 × unguided,
# and guided by the network 5.33, 5.33, 5.40, 5.41 × with 0.26, 0.29, 0.16, 0.31 of the playouts
SHARP = 0.1  # share of a step by which look-ahead lets chances fall by e: 0.03 gets stuck


class Asked(NamedTuple):
    """A placement and the ways on from it."""

    now: Placement
    ways_on: list[Placement]


class Prior(Protocol):
    """Says how promising each way on is, before any is tried."""

    def __call__(self, on: Evaluator, asked: Sequence[Asked]) -> list[Array]:
        """For each question, chances that add up to 1."""


def even_chances(on: Evaluator, asked: Sequence[Asked]) -> list[Array]:
    """Nothing is known."""
    return [np.full(len(one.ways_on), 1 / len(one.ways_on)) for one in asked]


def look_ahead(on: Evaluator, asked: Sequence[Asked]) -> list[Array]:
    """By what one simulation of each says: chances fall by e for every tenth of a step."""
    on.many([way for one in asked for way in one.ways_on])
    return [by_seconds(np.array(on.many(one.ways_on))) for one in asked]


def by_seconds(took: Array) -> Array:
    """Chances by how long each takes."""
    least = took.min()
    if not np.isfinite(least):
        return np.full(len(took), 1 / len(took))
    chances = np.where(np.isfinite(took), portable.exp(-(took / least - 1) / SHARP), 0.0) + 1e-4
    out: Array = chances / chances.sum()
    return out


@dataclass(eq=False)
class Node:
    """A placement after so many decisions, and how often each way on from it was taken."""

    now: Placement
    depth: int
    visits: int = 0
    total: float = 0.0
    children: list[Node] = field(default_factory=list)
    chances: Array = field(default_factory=lambda: np.zeros(0))
    taken: Array = field(default_factory=lambda: np.zeros(0))
    is_over: bool = False  # nothing below it is left to try

    @property
    def worth(self) -> float:
        return self.total / self.visits if self.visits else 0.0

    def next(self) -> int:
        """The way on to take now."""
        untried = UNTRIED * self.worth
        worth = np.array([child.worth if child.visits else untried for child in self.children])
        reach = math.sqrt(len(self.children) / 10) * math.sqrt(max(self.visits, 1))
        over = np.array([child.is_over for child in self.children])
        value = np.where(over, -math.inf, worth + reach * self.chances / (1 + self.taken))
        return int(np.argmax(value))


@dataclass
class Tree:
    """A search that can go on for ever; `best` is the answer so far."""

    on: Evaluator
    starts: list[Placement]
    prior: Prior
    baseline: float  # T₀
    seed: int | None = None  # in which order equal ways are tried; as they come where None
    noise: float = 0.0  # share of the first chances that is drawn, for self-play
    ways: tuple[int, ...] = tuple(range(len(WAYS)))  # how replicas may agree
    steps: bool = True  # whether anything is decided for the whole step
    best: tuple[Placement, float] = field(init=False)
    root: Node = field(init=False)
    playouts: int = field(default=0, init=False)
    nodes: dict[tuple[int, Placement], Node] = field(default_factory=dict, init=False)
    curve: list[float] = field(default_factory=list, init=False)  # the best after each playout
    spent: list[int] = field(default_factory=list, init=False)  # placements simulated by then

    def __post_init__(self) -> None:
        self.root = Node(self.starts[0], -1 if len(self.starts) > 1 else 0 if self.steps else 1)
        self.best = (self.starts[0], self.on.seconds(self.starts[0]))
        problem = self.on.problem
        single = [(g,) for g in problem.leaders]
        self._runs = [tuple(range(len(problem.groups))), *problem.branches, *single]
        self._draw = random.Random(self.seed)
        self._known: set[Placement] = set()  # what was simulated

    def play(self, playouts: int) -> None:
        """Go down, open leaves, simulate them, and tell those above: so many times."""
        until = self.playouts + playouts
        while self.playouts < until and not self.root.is_over:
            paths = self._gathered(min(AT_ONCE, until - self.playouts))
            self._open([path[-1] for path in paths])
            self.on.many([path[-1].now for path in paths])
            for path in paths:
                reward = self._played(path[-1].now)
                self.curve.append(self.best[1])
                self.spent.append(self.on.evaluations)
                for node in path:
                    node.total += reward
                self._ended(path)
            self.playouts += len(paths)

    def _ended(self, path: list[Node]) -> None:
        """All is decided at its end: there, and where all ways on are over, nothing is left."""
        path[-1].is_over = path[-1].depth > len(self._runs)
        for node in reversed(path[:-1]):
            node.is_over = all(child.is_over for child in node.children)

    def _gathered(self, most: int) -> list[list[Node]]:
        """Ways down to leaves that differ, counted as visited before they are simulated."""
        paths: list[list[Node]] = []
        while len(paths) < most and not self.root.is_over:
            path, ways = self._down()
            if self._is_known(path[-1]):  # the end of the tree, nothing changed on the way
                self._ended(path)
                continue
            if any(path[-1] is other[-1] for other in paths):
                break
            for node, way in zip(path, [*ways, None], strict=True):
                node.visits += 1
                if way is not None:
                    node.taken[way] += 1
            paths.append(path)
        return paths

    def _down(self) -> tuple[list[Node], list[int]]:
        """The nodes to the leaf that looks best, and the way taken at each.

        A leaf whose placement was simulated before (nothing was changed on the way to it) has
        nothing to tell: it is opened, and the way goes on.
        """
        path, ways = [self.root], []
        while path[-1].children or self._passed(path[-1]):
            ways.append(path[-1].next())
            path.append(path[-1].children[ways[-1]])
        return path, ways

    def _passed(self, leaf: Node) -> bool:
        """Open a leaf whose placement was simulated before; whether there is a way on."""
        if self._is_known(leaf):
            self._open([leaf])
        return bool(leaf.children)

    def _is_known(self, leaf: Node) -> bool:
        return canonical(self.on.problem, leaf.now) in self._known

    def _open(self, leaves: list[Node]) -> None:
        deepest = len(self._runs)
        fresh = [n for n in dict.fromkeys(leaves) if n.depth <= deepest and not n.children]
        asked = [Asked(n.now, self._ways_on(n)) for n in fresh]
        if not asked:
            return
        for node, one, chances in zip(fresh, asked, self.prior(self.on, asked), strict=True):
            node.chances = self._noisy(chances) if node.depth <= 2 else chances
            node.children = [self._node(node.depth + 1, now) for now in one.ways_on]
            node.taken = np.zeros(len(node.children))

    def _node(self, depth: int, now: Placement) -> Node:
        return self.nodes.setdefault((depth, now), Node(now, depth))

    def _noisy(self, chances: Array) -> Array:
        if not self.noise:
            return chances
        drawn = np.array([self._draw.gammavariate(0.3, 1.0) for _ in chances]) + 1e-12
        mixed: Array = (1 - self.noise) * chances + self.noise * drawn / drawn.sum()
        return mixed

    def _ways_on(self, node: Node) -> list[Placement]:
        """What may be decided next, what there is among it."""
        if node.depth < 0:
            found = list(self.starts)
        elif node.depth == 0:
            found = list(dict.fromkeys([node.now, *whole(self.on, node.now)]))
        else:
            found = self._choices(node)
        if self.seed is not None:
            self._draw.shuffle(found)
        return found

    def _choices(self, node: Node) -> list[Placement]:
        problem, run = self.on.problem, self._runs[node.depth - 1]
        for_all = node.depth == 1
        group = next((g for g in problem.leaders if g in run), run[0])
        kept: Action = node.now.actions[group]
        others = [a for a in actions(problem, group, ways=self.ways) if a != kept or for_all]
        if kept.way == PS and len(run) == 1:
            places = servers(problem, node.now, kept.devices)
            others += [kept._replace(server=p) for p in places if p != kept.server]
        return [node.now, *(node.now.but(run, a) for a in others)]

    def _played(self, now: Placement) -> float:
        seconds = self.on.seconds(now)
        self._known.add(canonical(self.on.problem, now))
        if seconds < self.best[1]:
            self.best = (now, seconds)
        if not math.isfinite(seconds):
            return -1.0
        gain = self.baseline / seconds - 1 if math.isfinite(self.baseline) else 1.0
        return math.sqrt(math.sqrt(gain)) if gain > 1 else gain
