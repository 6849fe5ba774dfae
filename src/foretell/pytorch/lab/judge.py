"""How good the laboratory's predictions are: errors beyond the spread of runs, and plans picked.

The spread of runs comes first: nobody can foretell a step closer than it repeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from foretell.pytorch.lab.foretold import Held

NEAR = 0.03  # a plan that close to the best is as good
WITHIN = 0.15


def judged(rows: Sequence[Held]) -> dict[str, Any]:
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
        "picked_in_spread": (
            float(np.mean([p["regret"] <= max(NEAR, p["spread"]) for p in picked]))
            if picked
            else 1.0
        ),
    }


def picks(rows: Sequence[Held]) -> list[dict[str, Any]]:
    """For each model, network and number of ranks: the plan foretold best, and what that costs."""
    groups: dict[tuple[str, str, int], list[Held]] = {}
    for row in rows:
        c = row.config
        if c.threads == "1":
            groups.setdefault((c.model, c.network, c.ranks), []).append(row)
    return [_pick(key, group) for key, group in groups.items() if len(group) > 1]


def _pick(key: tuple[str, str, int], group: list[Held]) -> dict[str, Any]:
    ours = min(group, key=lambda row: row.predicted)
    best = min(group, key=lambda row: row.measured)
    return {
        "model": key[0],
        "network": key[1],
        "ranks": key[2],
        "picked": ours.config.plan,
        "best": best.config.plan,
        "regret": ours.measured / best.measured - 1,
        "spread": max(ours.spread, best.spread),
    }


def by(rows: Sequence[Held], field: str) -> dict[str, tuple[int, float, float, float]]:
    """Configurations, mean spread, mean |error| and mean beyond the spread of each value."""
    groups: dict[str, list[Held]] = {}
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
