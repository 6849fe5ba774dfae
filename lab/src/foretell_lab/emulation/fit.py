"""Feeds measured runs back: what work, wires and messages cost here beyond what bench could see.

First the op table, from the core seconds of the thread that computes, which a run tells whatever it
waited for (→ `op_table`). Then what is turned one after another until nothing gets better
(coordinate descent over a grid that narrows):

    compute   a core's seconds beside other ranks                          the op table, of all
    wire      a message's seconds beside work; then of each network        α–β
    interference, launch, copy, wake, stretch                              what ranks cost others

so that this is least, over configurations i and knobs k (→ `loss`):

    Σ |log(predicted / measured)| / (spread + NOISE)  +  Σ (log k / PRIOR)² / 2

A configuration whose runs lie far apart says little, and a knob stays where bench has put it unless
the runs insist: a tenth of them is not much to learn seven numbers from.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any
from zlib import crc32

from foretell.errors import InputError
from foretell.graph import Kind
from foretell_lab.emulation import table
from foretell_lab.emulation.predicted import Busy, Known, graph, predict
from foretell_lab.emulation.step import Knobs
from foretell_lab.emulation.table import Config, Row

FITTED = "fitted.json"
PRIOR = 0.12  # a knob off by that much in logarithm is as odd as a run off by its own spread
OWN = 0.05  # likewise, of a network beside all others
NOISE = 0.08  # added to a spread, which few runs tell badly
FEW = 0.5  # runs that are nothing but work, to say that the profile is right
_PLAIN = ("compute", "wire", "interference", "launch", "copy", "wake", "stretch")
_GRIDS = (1.5, 1.2, 1.08)  # factors up and down, coarse to fine
_LIMITS = {"compute": (0.7, 2.0), "wire": (0.8, 2.0), "stretch": (0.5, 1.3)}
_LIMITS |= dict.fromkeys(("interference", "launch", "copy", "wake"), (0.25, 8.0))

Case = tuple[Config, Busy, float, float]  # what, how busy, measured, spread


def chosen(configs: list[Config], share: float) -> list[Config]:
    """A share of configurations, the same ones whenever they are asked for."""
    if not 0 < share <= 1:
        raise InputError(f"a share of {share} to fit on", hint="use more than 0, at most 1")
    ranked = sorted(configs, key=lambda c: crc32(str(c).encode()))
    return ranked[: max(1, round(share * len(ranked)))]


def fit(
    known: Known, rows: list[Row], start: Knobs | None = None,
    progress: Callable[[str, float], None] = lambda words, share: None,
) -> Knobs:  # fmt: skip
    """Knobs under which these runs are predicted best; `progress` is called with each knob."""
    cases = cases_of(rows)
    if not cases:
        raise InputError("there are no runs to fit to", hint="measure some: foretell lab")
    knobs = start or Knobs(models=op_table(known, rows))
    seen: dict[tuple[float, ...], float] = {}

    def cost(tried: Knobs) -> float:
        key = tuple(getattr(tried, name) for name in _PLAIN)
        if key not in seen:  # turned back and forth: most come again
            seen[key] = loss(known, cases, tried)
        return seen[key]

    turns = [(factor, name) for factor in _GRIDS for name in _PLAIN * 2]
    for k, (factor, name) in enumerate(turns):
        progress(f"{name}, {k + 1} of {len(turns)}", k / len(turns))
        knobs = min(_turned(knobs, name, factor), key=cost)
    return _by_network(known, cases, knobs)


def op_table(known: Known, rows: list[Row]) -> dict[str, float]:
    """Core seconds of each model's work over those predicted; none where not clocked.

    A run counts by the share of its step that is work: a core that has slept for long is slow at
    first, and tells little of one that has not. `FEW` draws what few runs say towards 1.
    """
    sums: dict[str, list[float]] = {}
    for row in rows:
        if row.main_s > 0:
            made = graph(known, row.config, Busy.of([row]))
            predicted = float(made.seconds[made.kind == Kind.HOST].sum()) / row.ranks
            weight = min(1.0, row.main_s / row.step_s)
            both = sums.setdefault(row.model, [0.0, FEW])
            both[0] += weight * math.log(row.main_s / predicted)
            both[1] += weight
    return {model: math.exp(total / weight) for model, (total, weight) in sums.items()}


def cases_of(rows: list[Row]) -> list[Case]:
    """Configurations with how busy the machine was, what they took, and how far runs lie apart."""
    return [
        (config, Busy.of(group), table.middle(group), table.spread(group))
        for config, group in table.by_config(rows).items()
    ]


def loss(known: Known, cases: list[Case], knobs: Knobs) -> float:
    """What is to be least."""
    odd = sum((math.log(getattr(knobs, name)) / PRIOR) ** 2 for name in _PLAIN)
    own = list(knobs.wires.values())
    odd += sum((math.log(value) / OWN) ** 2 for value in own)
    return sum(_off(known, case, knobs) for case in cases) + odd / 2


def _off(known: Known, case: Case, knobs: Knobs) -> float:
    config, busy, measured, spread = case
    predicted = predict(known, config, busy, knobs).seconds
    return abs(math.log(predicted / measured)) / (spread + NOISE)


def _turned(knobs: Knobs, name: str, factor: float) -> list[Knobs]:
    """A knob as it is, turned up, and turned down."""
    low, high = _LIMITS[name]
    value = getattr(knobs, name)
    choices = dict.fromkeys([value, min(high, value * factor), max(low, value / factor)])
    return [replace(knobs, **{name: choice}) for choice in choices]


def _by_network(known: Known, cases: list[Case], knobs: Knobs) -> Knobs:
    """Each network's own wire, drawn to what is common."""
    for name in sorted({case[0].network for case in cases}):
        mine = [case for case in cases if case[0].network == name]
        knobs = _own(known, mine, knobs, name)
    return knobs


def _own(known: Known, mine: list[Case], knobs: Knobs, name: str) -> Knobs:
    def turned(factor: float) -> Knobs:
        return replace(knobs, wires={**knobs.wires, name: factor})

    grid = [1.06**k for k in range(-4, 5)]
    return turned(min(grid, key=lambda factor: loss(known, mine, turned(factor))))


def save(path: Path, knobs: Knobs, accuracy: dict[str, Any]) -> None:
    """Write knobs, and what is known of how good they are."""
    table.write(path, {"knobs": asdict(knobs), **accuracy})


def load(path: Path) -> Knobs:
    """Knobs that were fitted."""
    found = table.read(path)
    known = {f.name for f in fields(Knobs)}
    if not isinstance(found, dict) or not set(found.get("knobs", {"": 0})) <= known:
        raise InputError(f"`{path}` holds nothing that was fitted", hint="make it: foretell fit")
    return Knobs(**found["knobs"])
