"""Bytes a rank holds where stages are placed freely: for good, and as its actions go by.

    forward    what backward will need is taken at its start; what only forward needs goes after it
    backward   what was dropped is made again for its time; what forward kept goes at its end

Where backward is split, what is kept goes with the weight gradient, its last reader. A stage
without backward keeps nothing. Offloaded, it is there only while forward or backward runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from foretell.plan.place_costs import PlacedStageCost, Prices, bill
from foretell.plan.stage_placement import Action, StagePlacement
from foretell.workload import Workload


class Change(NamedTuple):
    """Bytes that a block adds on its ranks when it starts, and when it ends."""

    start: float
    end: float


def change(
    kind: str, paid: PlacedStageCost, ways: Sequence[str], *, trains: bool, split: bool
) -> Change:
    """What one block of a stage does to the memory of its ranks."""
    away = "offload" in ways and trains
    kept = paid.kept if trains else 0.0
    if kind == "F":
        return Change(kept + paid.brief, -paid.brief - (kept if away else 0.0))
    back = paid.moment + (kept if away else 0.0)
    if kind == "W":
        return Change(0.0, -kept)
    if kind == "I" and split:
        return Change(back, -paid.moment)
    return Change(back, -kept - paid.moment)


def constant(prices: Prices, found: Sequence[StagePlacement], rank: int, *, trains: bool) -> float:
    """Bytes of weights, and of what training keeps beside them, on one rank."""
    mine = [place for place in found if rank in place.ranks]
    total = 0.0
    for place in mine:
        paid = bill(prices, place)
        total += paid.parameters + (paid.trained if trains else 0.0)
    return total - _twice(prices, mine, trains)


def _twice(prices: Prices, mine: Sequence[StagePlacement], trains: bool) -> float:
    """What counts twice where tied weights meet on a rank, split alike."""
    workload, total = prices.workload, 0.0
    for kept, other in workload.tied:
        first, last = (_layer(workload, name) for name in (kept, other))
        for a in mine:
            for b in mine:
                if a.times[first] and b.times[last] and a.ranks == b.ranks:
                    r = prices.rates(b.ranks)
                    held = r.parameters[last] + (r.trained[last] if trains else 0.0)
                    share = tied_elements(workload, other) / len(b.ranks) / r.elements[last]
                    total += float(held * min(share, 1.0))
    return total


def tied_elements(workload: Workload, name: str) -> float:
    """How many numbers a tied weight has."""
    return workload.weights.get(name, 0.0)


def _layer(workload: Workload, weight: str) -> int:
    names = [layer.name for layer in workload.layers]
    return names.index(weight.split("/")[0])


def peaks(
    prices: Prices, found: Sequence[StagePlacement], rows: Sequence[Sequence[Action]]
) -> list[float]:
    """The most bytes each rank holds, in the order of its actions."""
    trains = any(act.kind != "F" for row in rows for act in row)
    back = {act.stage for row in rows for act in row if act.kind != "F"}
    split = {act.stage for row in rows for act in row if act.kind == "W"}
    bills = [bill(prices, place) for place in found]
    out = []
    for rank, row in enumerate(rows):
        now = most = constant(prices, found, rank, trains=trains) if row else 0.0
        for act in row:
            s = act.stage
            by = change(act.kind, bills[s], found[s].ways, trains=s in back, split=s in split)
            most = max(most, now + by.start, now + by.start + by.end)
            now += by.start + by.end
        out.append(most)
    return out
