"""Steps on small networks of this project's own laboratory, held against what was foretold of them.

The rows are shipped: measured by `foretell lab` on the machine that the text names, several runs of
each configuration in mixed order. Predictions start from one rank by itself and what bench found of
links and cores; then again after `foretell fit` has seen a tenth of the configurations. Nothing was
fitted to `tables/lab` for the first, but the model was made while looking at it; `tables/lab-later`
was run when the model stood as it is, on networks that it had not seen.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from foretell.pytorch.lab import fit, judge, table
from foretell.pytorch.lab.foretold import Held, Known, held

FOLDER, LATER = "tables/lab", "tables/lab-later"
SHARE = 0.1  # of the configurations to fit on


def report(_: Path | None = None, folder: Path | None = None) -> dict[str, Any]:
    """Every figure as values and as text."""
    known, rows = _read(folder or _shipped(FOLDER))
    plain = held(known, rows)
    chosen = set(fit.chosen([h.config for h in plain], SHARE))
    knobs = fit.fit(known, [row for row in rows if row.config in chosen])
    after = held(known, [row for row in rows if row.config not in chosen], knobs)
    later, unseen = _read(_shipped(LATER))
    figures = {
        "later": judge.judged(held(later, unseen)),
        "later_after": judge.judged(held(later, unseen, knobs)),
        "foretold": judge.judged(plain),
        "blind": judge.judged(held(known, rows, is_blind=True)),
        "rest_before": judge.judged([h for h in plain if h.config not in chosen]),
        "rest_after": judge.judged(after),
    }
    return {
        **figures,
        "machine": known.machine["machine"],
        "fitted_on": len(chosen),
        "picks": judge.picks(plain),
        "rows": [vars(h) | {"config": vars(h.config), "error": h.error} for h in plain],
        "text": _text(known, plain, figures, len(chosen)),
    }


def _shipped(name: str) -> Path:
    return Path(str(files("foretell.validate").joinpath(name)))


def _read(place: Path) -> tuple[Known, list[table.Row]]:
    return Known.read(place), table.rows(place)


def _text(known: Known, plain: list[Held], figures: dict[str, Any], chosen: int) -> str:
    told, all_, after = known.machine["machine"], figures["foretold"], figures["rest_after"]
    lines = [
        f"{told['cpu']}, {told['cores']} cores shared with other work (load {told['load']})",
        f"runs of the same configuration lie {all_['spread']:.1%} from their median "
        f"(mean; a tenth of them more than {all_['spread_p90']:.1%})",
        "",
        judge.text(all_, "one rank + bench"),
        judge.text(figures["blind"], "  not told how busy"),
        judge.text(figures["rest_before"], f"without {chosen} fitted on"),
        judge.text(after, "  after fit"),
        judge.text(figures["later"], "later, other networks"),
        judge.text(figures["later_after"], "  after that fit"),
        f"best plan picked or within {judge.NEAR:.0%}: {all_['picked']:.0%} of {all_['picks']} "
        f"(model, network, ranks); or within the spread: {all_['picked_in_spread']:.0%}",
        f"  after fit: {after['picked']:.0%} of {after['picks']}; "
        f"or within the spread: {after['picked_in_spread']:.0%}",
        "  by network: "
        + ", ".join(f"{name} {good} of {n}" for name, (good, n) in _picked(plain).items()),
    ]
    for field in ("network", "model", "plan", "ranks"):
        lines += ["", f"{field:16} configurations  spread  |error|  beyond the spread"]
        lines += [
            f"{name:16} {n:14} {spread:7.1%} {error:8.1%} {beyond:18.1%}"
            for name, (n, spread, error, beyond) in judge.by(plain, field).items()
        ]
    return "\n".join(lines)


def _picked(rows: list[Held]) -> dict[str, tuple[int, int]]:
    """For each network how often the plan foretold best was, or was nearly, of how many."""
    found: dict[str, tuple[int, int]] = {}
    for pick in judge.picks(rows):
        good, n = found.get(pick["network"], (0, 0))
        found[pick["network"]] = (good + (pick["regret"] <= judge.NEAR), n + 1)
    return found
