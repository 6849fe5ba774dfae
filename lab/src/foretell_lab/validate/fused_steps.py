"""How far whole compiled steps are from their prices, under several fusion plans of a compiler.

    step = Σ price of each kernel the compiler wrote + Σ own time of each library call + gaps

Measured is what the device needs where the host has issued every kernel before the first begins. A
library call's own time is what it took in the model's other plans, as a profile would tell it; a
call met in no other plan keeps its own. A gap is what the device rests between two kernels of one
stream. `order` is the share of pairs of plans of one model whose order is given right, pairs that
measure within 2 % of one another left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import combinations
from math import isnan, nan
from statistics import median
from typing import Any

import numpy as np

from foretell.cluster.read import devices
from foretell.cost.fused import fused_price
from foretell_lab.fused import data as fused_data

GAP = 1.1e-6  # seconds: the median between kernels of the steps measured on an H200
_TIE = 0.02


@dataclass(frozen=True)
class Step:
    """One model under one plan: measured and priced seconds."""

    model: str
    plan: str
    kernels: int
    measured: float
    priced: float
    compiled: float = nan  # priced seconds of the compiler's kernels over measured; nan if unknown

    @property
    def error(self) -> float:
        return abs(self.priced / self.measured - 1)


def steps(*, learned: bool = True) -> list[Step]:
    """Every measured step of the package, priced."""
    text = files("foretell_lab.fused").joinpath("tables", "fused_steps.json")
    if not text.is_file():
        return []
    rows = json.loads(text.read_text("utf-8"))
    kernels = fused_data.shipped("steps")
    seconds = fused_price(kernels.regions, devices()["h200"], learned=learned).seconds
    found = []
    for row in rows:
        mine = kernels.family == _name(row)
        priced, took = float(np.sum(seconds[mine])), float(np.sum(kernels.seconds[mine]))
        found.append(replace(_step(row, rows, priced), compiled=priced / took))
    return found


def _name(row: dict[str, Any]) -> str:
    return f"{row['model']}/{row['plan']}"


def _step(row: dict[str, Any], rows: Sequence[dict[str, Any]], compiled: float) -> Step:
    others: dict[str, list[float]] = {}
    for other in rows:
        if other["model"] == row["model"] and other["plan"] != row["plan"]:
            for key, seconds in other["extern"]:
                if seconds is not None:
                    others.setdefault(key, []).append(seconds)
    library = sum(median(others.get(key, [seconds])) for key, seconds in row["extern"])
    priced = compiled + library + GAP * row["kernels"]
    return Step(row["model"], row["plan"], row["kernels"], float(row["seconds"]), priced)


def order(found: Sequence[Step]) -> tuple[int, int]:
    """Pairs of plans of one model told in the right order, and all of them."""
    right = total = 0
    for a, b in combinations(found, 2):
        apart = abs(a.measured / b.measured - 1)
        if a.model == b.model and apart > _TIE:
            total += 1
            right += (a.measured < b.measured) == (a.priced < b.priced)
    return right, total


def lines(found: Sequence[Step]) -> Iterator[str]:
    """The report, line by line."""
    for s in found:
        took = f"{s.measured * 1e3:8.3f} ms, priced {s.priced * 1e3:8.3f} ms"
        yield f"step {s.model:10} {s.plan:8} {s.kernels:4d} kernels {took} {s.error:6.1%}"
    if found:
        right, total = order(found)
        models = len({s.model for s in found})
        mean = float(np.mean([s.error for s in found]))
        own = [abs(s.compiled - 1) for s in found if not isnan(s.compiled)]
        if own:
            text = f"mean {np.mean(own):.1%} off, worst {max(own):.1%}"
            yield f"the compiler's kernels alone, {len(own)} steps: {text}"
        text = f"mean {mean:.1%} off, {right} of {total} pairs in order"
        yield f"{len(found)} steps of {models} models: {text}"
