"""How good the laboratory's predictions are: errors beyond the spread of runs, and plans picked.

The spread of runs comes first: no prediction can be closer than a step repeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from foretell_lab.emulation.predicted import Comparison
from foretell_lab.emulation.table import Row

NEAR = 0.03  # a plan that close to the best is as good
WITHIN = 0.15


def summary(rows: Sequence[Comparison]) -> dict[str, Any]:
    """Figures over configurations."""
    errors = np.array([row.error for row in rows])
    spread = np.array([row.spread for row in rows])
    beyond = np.array([row.beyond for row in rows])
    picked = picks(rows)
    return {
        "configs": len(rows),
        "spread": float(spread.mean()),
        "spread_p90": float(np.quantile(spread, 0.9)),
        "error": float(np.abs(errors).mean()),
        "median_error": float(np.median(np.abs(errors))),
        "bias": float(np.median(errors)),
        "beyond": float(beyond.mean()),
        "within": float((beyond <= WITHIN).mean()),
        "picks": len(picked),
        "picked": float(np.mean([p["regret"] <= NEAR for p in picked])) if picked else 1.0,
        "picked_beyond": float(np.mean([p["beyond"] <= NEAR for p in picked])) if picked else 1.0,
        "regret": float(np.mean([p["regret"] for p in picked])) if picked else 0.0,
    }


def picks(rows: Sequence[Comparison]) -> list[dict[str, Any]]:
    """For each model, network and number of ranks: the plan predicted best, and what that costs.

    Plans that come to the same step are one, measured more often.
    """
    groups: dict[tuple[str, str, int], list[Comparison]] = {}
    for row in rows:
        c = row.config
        if c.threads == "1":
            groups.setdefault((c.model, c.network, c.ranks), []).append(row)
    found = {key: _joined(group) for key, group in groups.items()}
    return [_pick(key, group) for key, group in found.items() if len(group) > 1]


def _joined(rows: list[Comparison]) -> list[Comparison]:
    """One row for all plans that come to the same step, under the name of the first."""
    groups: dict[str, list[Comparison]] = {}
    for row in rows:
        groups.setdefault(row.same or row.config.plan, []).append(row)
    return [_mean(group) for group in groups.values()]


def _mean(group: list[Comparison]) -> Comparison:
    runs = [row.runs for row in group]

    def mean(name: str) -> float:
        return float(np.average([getattr(row, name) for row in group], weights=runs))

    return replace(
        group[0],
        predicted=mean("predicted"),
        measured=mean("measured"),
        spread=mean("spread"),
        runs=sum(runs),
    )


def _pick(key: tuple[str, str, int], group: list[Comparison]) -> dict[str, Any]:
    ours = min(group, key=lambda row: row.predicted)
    best = min(group, key=lambda row: row.measured)
    regret, spread = ours.measured / best.measured - 1, max(ours.spread, best.spread)
    return {
        "model": key[0],
        "network": key[1],
        "ranks": key[2],
        "picked": ours.config.plan,
        "best": best.config.plan,
        "regret": regret,
        "spread": spread,
        "beyond": max(0.0, regret - spread),
    }


def again(runs: Sequence[Row], rows: Sequence[Comparison]) -> dict[str, float]:
    """How often the plan predicted best, and the best of the other rounds, are near the best.

    What measuring itself reaches is as much as anybody can: runs of the same lie apart.
    """
    ours = {(p["model"], p["network"], p["ranks"]): p["picked"] for p in picks(rows)}
    tries = [
        (_near(plans, number, ours[key]), _near(plans, number, _best_but(plans, number)))
        for key, plans in _rounds(runs).items()
        if key in ours
        for number in sorted(set.intersection(*map(set, plans.values())))
        if all(len(steps) > 1 for steps in plans.values())
    ]
    if not tries:
        return {"tries": 0, "predicted": 1.0, "measured": 1.0}
    predicted, measured = np.array(tries, float).mean(axis=0)
    return {"tries": len(tries), "predicted": float(predicted), "measured": float(measured)}


Plans = dict[str, dict[int, float]]  # plan, round: seconds


def _rounds(runs: Sequence[Row]) -> dict[tuple[str, str, int], Plans]:
    """Seconds of every plan and round, for each model, network and number of ranks."""
    groups: dict[tuple[str, str, int], Plans] = {}
    for row in runs:
        if row.threads == "1":
            plans = groups.setdefault((row.model, row.network, row.ranks), {})
            plans.setdefault(row.plan, {})[row.round] = row.step_s
    return groups


def _best_but(plans: Plans, number: int) -> str:
    """The plan that was best in all rounds but one."""
    others = {p: [s for n, s in steps.items() if n != number] for p, steps in plans.items()}
    return min(others, key=lambda plan: float(np.median(others[plan])))


def _near(plans: Plans, number: int, plan: str) -> bool:
    return plans[plan][number] <= (1 + NEAR) * min(steps[number] for steps in plans.values())


def by(rows: Sequence[Comparison], field: str) -> dict[str, tuple[int, float, float, float]]:
    """Configurations, mean spread, mean |error| and mean beyond the spread of each value."""
    groups: dict[str, list[Comparison]] = {}
    for row in rows:
        groups.setdefault(str(getattr(row.config, field)), []).append(row)
    return {
        name: (
            len(group),
            float(np.mean([r.spread for r in group])),
            float(np.mean([abs(r.error) for r in group])),
            float(np.mean([r.beyond for r in group])),
        )
        for name, group in sorted(groups.items())
    }


def text(found: dict[str, Any], name: str) -> str:
    """One line of figures."""
    return (
        f"{name:24} {found['configs']:4} configurations  mean |error| {found['error']:5.1%}  "
        f"median {found['median_error']:5.1%}  beyond the spread {found['beyond']:5.1%}  "
        f"within {WITHIN:.0%}: {found['within']:4.0%}"
    )
