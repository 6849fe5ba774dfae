"""What mixing devices gains: against the best part of the fleet that has one kind of device.

Both are searched alike. Mixing that gains less than `WORTH` is refused. Money is the price of the
nodes a placement touches for the time of a step; where a price is unknown, device-seconds stand
beside it and money is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from foretell.search.placement.anneal import polish
from foretell.search.placement.evaluate import Evaluator
from foretell.search.placement.problem import (
    ALL_REDUCE,
    Action,
    Placement,
    Problem,
    actions,
    uniform,
)

WORTH = 1.005  # times as fast that a mix has to be: less is within what prices can tell apart
HOUR = 3600.0


@dataclass(frozen=True)
class Part:
    """The best placement on devices of one kind."""

    problem: Problem
    kind: str
    ranks: int
    placement: Placement
    seconds: float


def parts(on: Evaluator, most: int) -> list[Part]:
    """The best placement on each kind of device alone; none where there is one kind."""
    problem = on.problem
    if len(problem.fleet.kinds) == 1:
        return []
    return [_part(on, k, most) for k in range(len(problem.fleet.kinds))]


def parts_of(problem: Problem, found: Mapping[int, tuple[Placement, float]]) -> list[Part]:
    """The same where the best placement on each set is known."""
    out = []
    for kind, device in enumerate(problem.fleet.kinds) if len(problem.fleet.kinds) > 1 else ():
        mine = _alike(problem, kind) & set(found)
        if mine:
            best = min(sorted(mine), key=lambda s: found[s][1])
            largest = max(int(problem.tables.size[s]) for s in mine)
            out.append(Part(problem, device.name, largest, *found[best]))
    return out


def _alike(problem: Problem, kind: int) -> set[int]:
    """Sets that have devices of one kind alone."""
    cells = problem.fleet.cells
    return {
        s for s, some in enumerate(problem.fleet.sets) if all(cells[c].kind == kind for c in some)
    }


def _part(on: Evaluator, kind: int, most: int) -> Part:
    problem = on.problem
    mine = _alike(problem, kind)
    starts = [
        uniform(problem, a, micros=micros)
        for a in actions(problem, problem.leaders[0])
        if a.devices in mine
        for micros in (1, 4)
    ]
    took = on.many(starts)
    ranked = sorted(range(len(starts)), key=lambda i: took[i])
    best, seconds = uniform(problem, Action(min(mine), ALL_REDUCE)), inf
    for i in ranked[:2]:
        found = polish(on, starts[i], most, lambda action: action.devices in mine)
        if found[1] < seconds:
            best, seconds = found
    largest = max(int(problem.tables.size[s]) for s in mine)
    return Part(problem, problem.fleet.kinds[kind].name, largest, best, seconds)


def ranks_of(problem: Problem, placement: Placement) -> tuple[int, ...]:
    """Ranks that have something to do."""
    used = {r for a in placement.actions for r in problem.fleet.ranks(a.devices)}
    return tuple(sorted(used))


def money(problem: Problem, placement: Placement, seconds: float) -> dict[str, Any]:
    """What a step costs: device-seconds, and money where the prices of all nodes are known."""
    ranks = ranks_of(problem, placement)
    price = problem.cluster.subset(ranks).price
    found: dict[str, Any] = {"ranks": len(ranks), "device_s": len(ranks) * seconds}
    found["money"] = price / HOUR * seconds if price else None
    return found


@dataclass(frozen=True)
class Verdict:
    """The mix against the best part of one kind."""

    part: Part
    gain: float  # times as fast
    mixes: bool  # whether the answer uses several kinds of device
    cost: dict[str, Any]
    part_cost: dict[str, Any]


def verdict(problem: Problem, mixed: tuple[Placement, float], found: list[Part]) -> Verdict | None:
    """What the answer gains and costs; None where there is nothing to compare with."""
    fit = [part for part in found if part.seconds < inf]
    if not fit:
        return None
    best = min(fit, key=lambda part: part.seconds)
    kinds = {problem.cluster.devices[r].name for r in ranks_of(problem, mixed[0])}
    return Verdict(
        best,
        best.seconds / mixed[1],
        len(kinds) > 1,
        money(problem, *mixed),
        money(best.problem, best.placement, best.seconds),
    )


def verdict_lines(problem: Problem, mixed: tuple[Placement, float], found: list[Part]) -> list[str]:
    """The verdict in words."""
    if len(problem.fleet.kinds) > 1 and found and all(part.seconds == inf for part in found):
        return ["no kind of device holds the model alone: only a mix does"]
    said = verdict(problem, mixed, found)
    if said is None:
        return []
    part = f"the best of one kind ({said.part_cost['ranks']} {said.part.kind})"
    if not said.mixes:
        return [f"mixing devices gains nothing here: {part} is the answer"]
    price = f"{_price(said.cost)} a step against {_price(said.part_cost)}"
    return [f"the mix is {said.gain:.2f} × as fast as {part}, and costs {price}"]


def _price(cost: dict[str, Any]) -> str:
    busy = f"{cost['device_s']:.3g} device-seconds"
    return busy if cost["money"] is None else f"{cost['money'] * 100:.3g} cents ({busy})"
