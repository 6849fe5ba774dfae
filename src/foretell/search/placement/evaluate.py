"""Seconds of placements: asked one by one or many at once, each worked out once.

`graph` writes a placement down as a `Graph` of the same tasks, for timelines and to hold the
compiled loops against the readable engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.graph import Builder, Graph
from foretell.search.placement import deal, loops, servers, tasks, write
from foretell.search.placement.problem import Problem
from foretell.search.placement.space import Placement, canonical

Ints = npt.NDArray[np.int64]
FAULTS = {-1.0: "memory", -2.0: "samples", -3.0: "split"}
_WHAT = ("forward", "backward", "send", "sync", "product", "update", "share")


@dataclass
class Evaluator:
    """Remembers what every placement took; infinite where it does not fit."""

    problem: Problem
    seen: dict[Placement, float] = field(default_factory=dict)
    evaluations: int = 0

    @property
    def least(self) -> float:
        """The best seconds so far."""
        return min(self.seen.values(), default=inf)

    def seconds(self, placement: Placement) -> float:
        """Seconds of one step."""
        return self.many([placement])[0]

    def many(self, placements: Sequence[Placement]) -> list[float]:
        """Seconds of several, those that are new simulated together."""
        keys = [canonical(self.problem, p) for p in placements]
        new = [k for k in dict.fromkeys(keys) if k not in self.seen]
        if new:
            self.evaluations += len(new)
            found = scores(self.problem, new)
            self.seen.update(zip(new, np.where(found < 0, inf, found).tolist(), strict=True))
        return [self.seen[k] for k in keys]

    def fault(self, placement: Placement) -> str:
        """Why a placement has no seconds: memory, samples or split; empty where it has."""
        found = float(scores(self.problem, [canonical(self.problem, placement)])[0])
        return FAULTS.get(found, "")


def scores(problem: Problem, placements: Sequence[Placement]) -> npt.NDArray[np.float64]:
    """What the compiled loops say of some canonical placements."""
    found: npt.NDArray[np.float64] = loops.scores(
        problem.tables,
        *columns(placements),
        np.array([p.micros for p in placements]),
        np.array([float(p.fuse) for p in placements]),
        np.array([p.mode for p in placements]),
    )
    return found


def columns(placements: Sequence[Placement]) -> tuple[Ints, Ints, Ints]:
    """Sets, ways and servers of placements, a row each."""
    table = np.array([p.actions for p in placements], np.int64)
    sets, ways, named = (np.ascontiguousarray(table[:, :, i]) for i in range(3))
    return sets, ways, named


def settled(problem: Problem, placement: Placement) -> tuple[Ints, Ints, Ints]:
    """Sets, ways and servers of a placement, with those that it leaves to be split."""
    sets, ways, named = (row[0] for row in columns([canonical(problem, placement)]))
    return sets, ways, servers.places(problem.tables, sets, ways, named, float(placement.fuse))


def shares(problem: Problem, placement: Placement) -> Ints:
    """[s, c] samples of a rank of each cell, for every set that deals samples out."""
    t = problem.tables
    share = np.zeros((len(t.size), len(t.kind)), np.int64)
    loops.prepared(t, *settled(problem, placement), placement.micros, placement.mode, share)
    return share


def memory(problem: Problem, placement: Placement) -> dict[int, float]:
    """Bytes of each rank at its fullest."""
    t, (sets, ways, served) = problem.tables, settled(problem, placement)
    hold = servers.standing(t, sets, ways, served)
    full = deal.peaks(t, sets, ways, hold, shares(problem, placement))
    cells = problem.fleet.cells
    return {r: float(full[c]) for c, cell in enumerate(cells) for r in cell.ranks}


def with_shares(problem: Problem, placement: Placement, share: Ints) -> float:
    """Seconds where samples are split as given; infinite where that does not fit."""
    t = problem.tables
    page = tasks.page(len(problem.groups), len(t.kind), placement.micros)
    chosen = settled(problem, placement)
    found = loops.score_with(t, *chosen, placement.micros, float(placement.fuse), share, page)
    return inf if found < 0 else float(found)


def graph(problem: Problem, placement: Placement) -> Graph:
    """The tasks of a placement as a graph that `foretell.simulate` simulates."""
    t = problem.tables
    page = tasks.page(len(problem.groups), len(t.kind), placement.micros)
    share, chosen = shares(problem, placement), settled(problem, placement)
    write.written(t, *chosen, placement.micros, float(placement.fuse), share, page)
    return _drawn(problem, page)


def _drawn(problem: Problem, page: Any) -> Graph:
    make, cells = Builder(), problem.fleet.cells
    for word in ("compute", "collectives"):
        kind = "compute" if word == "compute" else "comm"
        for cell in cells:
            make.lane(word, rank=cell.ranks[0], kind=kind, ordered=False)
    for box in range(1 + max(cell.box for cell in cells)):
        for word in ("out", "in", "bus"):
            make.link(f"{word} {box}", 1.0)
    tasks, _, _, edges = page.count.tolist()
    after: dict[int, list[int]] = {}
    for a, b in zip(page.edge_from[:edges].tolist(), page.edge_to[:edges].tolist(), strict=True):
        after.setdefault(b, []).append(a)
    for i in range(tasks):
        _task(make, problem, page, i, sorted(set(after.get(i, []))))
    return make.graph(workload=problem.workload.name, batch=float(problem.batch))


def _task(make: Builder, problem: Problem, page: Any, i: int, after: list[int]) -> None:
    what = _WHAT[page.what[i]]
    kinds = {"send": "send", "sync": "collective", "share": "collective"}
    used = slice(page.use_start[i], page.use_start[i + 1])
    demand: dict[int, float] = {}
    for link, share in zip(
        page.use_link[used].tolist(), page.use_demand[used].tolist(), strict=True
    ):
        demand[link] = demand.get(link, 0.0) + share
    make.task(
        kind=kinds.get(what, "kernel"),
        op="all_reduce" if kinds.get(what) == "collective" else what,
        name=what,
        layer=problem.groups[page.group[i]].name,
        seconds=float(page.seconds[i]),
        priority=int(page.priority[i]),
        rank=problem.fleet.cells[page.cell[i]].ranks[0],
        lanes=page.lane[page.lane_start[i] : page.lane_start[i + 1]].tolist(),
        uses=demand,
        after=after,
    )
