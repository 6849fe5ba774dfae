"""Steps on small networks of this project's own laboratory, held against what was foretold of them.

The rows are shipped: measured by `foretell lab` on the machines that the text names, most of them
several times in mixed order. Predictions start from one rank by itself and what bench found of
links and cores; then again after `foretell fit` has seen a tenth of the configurations. Nothing was
fitted for the first, but the model was made while looking at `tables/lab` and mended while looking
at `tables/lab-quiet`; `tables/lab-crowded` was run when it stood as it is.

    lab          two cores with other work on them, a load of seven
    lab-later    an hour later, on networks that the model had not seen
    lab-quiet    sixteen cores with nothing else on them, two laboratories side by side
    lab-crowded  the two cores again, with twice as much other work
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from foretell.pytorch.lab import fit, judge, table
from foretell.pytorch.lab.foretold import Held, Known, held
from foretell.pytorch.lab.step import Knobs
from foretell.pytorch.lab.table import Config, Row

FOLDER, LATER, CROWDED = "tables/lab", "tables/lab-later", "tables/lab-crowded"
QUIET = ("tables/lab-quiet-1", "tables/lab-quiet-2")
SHARE = 0.1  # of the configurations to fit on


@dataclass(frozen=True, eq=False)
class Runs:
    """What one laboratory left behind."""

    known: Known
    rows: list[Row]

    @classmethod
    def read(cls, place: Path) -> Runs:
        return cls(Known.read(place), table.rows(place))

    def but(self, configs: set[Config]) -> Runs:
        """All but some configurations."""
        return Runs(self.known, [row for row in self.rows if row.config not in configs])

    def fitted(self) -> tuple[set[Config], Knobs]:
        """What a tenth of the configurations teach, and which."""
        chosen = set(fit.chosen(list(table.by_config(self.rows)), SHARE))
        return chosen, fit.fit(self.known, [row for row in self.rows if row.config in chosen])


def report(_: Path | None = None, folder: Path | None = None) -> dict[str, Any]:
    """Every figure as values and as text."""
    runs, later, crowded = (
        Runs.read(place) for place in (folder or shipped(FOLDER), shipped(LATER), shipped(CROWDED))
    )
    quiet = [Runs.read(shipped(name)) for name in QUIET]
    plain = _held([runs])
    chosen, knobs = runs.fitted()
    taught = [half.fitted() for half in quiet]
    rest = [half.but(seen) for half, (seen, _) in zip(quiet, taught, strict=True)]
    found = {
        "foretold": plain,
        "blind": _held([runs], is_blind=True),
        "rest_before": [h for h in plain if h.config not in chosen],
        "rest_after": _held([runs.but(chosen)], [knobs]),
        "later": _held([later]),
        "later_after": _held([later], [knobs]),
        "quiet": _held(quiet, is_blind=True),
        "quiet_before": _held(rest, like=quiet),
        "quiet_after": _held(rest, [learned for _, learned in taught], like=quiet),
        "crowded": _held([crowded]),
        "crowded_blind": _held([crowded], is_blind=True),
    }
    figures = {name: judge.judged(rows) for name, rows in found.items()}
    again = judge.again(runs.rows, plain)
    return {
        **figures,
        "again": again,
        "machine": runs.known.machine["machine"],
        "fitted_on": len(chosen),
        "picks": judge.picks(plain),
        "rows": [vars(h) | {"config": vars(h.config), "error": h.error} for h in plain],
        "text": "\n".join(
            [
                *_lines(figures, [runs.known, quiet[0].known, crowded.known], len(chosen)),
                *_picks(figures, again, plain),
                *_groups(plain, "on two busy cores"),
                *_groups(found["quiet"], "on sixteen quiet ones"),
            ]
        ),
    }


def shipped(name: str) -> Path:
    """A folder of rows that comes with the package."""
    return Path(str(files("foretell.validate").joinpath(name)))


def _held(
    labs: Sequence[Runs], knobs: Sequence[Knobs] = (), *, like: Sequence[Runs] = (),
    is_blind: bool = False,
) -> list[Held]:  # fmt: skip
    """What was foretold of several laboratories; runs made once have the spread of all others."""
    rows = [row for lab in like or labs for row in lab.rows]
    turned = list(knobs) or [Knobs()] * len(labs)
    return [
        one
        for lab, k in zip(labs, turned, strict=True)
        for one in held(lab.known, lab.rows, k, is_blind=is_blind, like=rows)
    ]


def _lines(figures: dict[str, Any], known: Sequence[Known], chosen: int) -> list[str]:
    """One line for each way to foretell, machine by machine."""
    busy, quiet, crowded = (one.machine["machine"] for one in known)
    names = (
        (_place(busy, "shared with other work", figures["foretold"]), ""),
        ("foretold", "one rank + bench"),
        ("blind", "  not told how busy"),
        ("rest_before", f"without {chosen} fitted on"),
        ("rest_after", "  after fit"),
        ("later", "later, other networks"),
        ("later_after", "  after that fit"),
        (_place(quiet, "with nothing else on them", figures["quiet"]), ""),
        ("quiet", "one rank + bench alone"),
        ("quiet_before", "without those fitted on"),
        ("quiet_after", "  after fit"),
        (_place(crowded, "with twice as much work", figures["crowded"]), ""),
        ("crowded", "one rank + bench"),
        ("crowded_blind", "  not told how busy"),
    )
    lines = [judge.text(figures[key], name) if name else f"\n{key}" for key, name in names]
    return "\n".join(lines).strip().splitlines()


def _place(told: dict[str, Any], how: str, figures: dict[str, Any]) -> str:
    return (
        f"{told['cpu']}, {told['cores']} cores {how} (load {told['load']}): runs of the same "
        f"configuration lie {figures['spread']:.1%} from their median (mean; a tenth of them more "
        f"than {figures['spread_p90']:.1%})"
    )


def _picks(figures: dict[str, Any], again: dict[str, float], plain: list[Held]) -> list[str]:
    """How often the best plan was picked, and how often measuring would have."""
    all_, after, quiet = (figures[key] for key in ("foretold", "rest_after", "quiet"))
    where = ", ".join(f"{name} {good} of {n}" for name, (good, n) in _picked(plain).items())
    return [
        "",
        f"best plan picked or within {judge.NEAR:.0%}: {all_['picked']:.0%} of {all_['picks']} "
        f"(model, network, ranks); or within the spread: {all_['picked_in_spread']:.0%}",
        f"  after fit: {after['picked']:.0%} of {after['picks']}; "
        f"or within the spread: {after['picked_in_spread']:.0%}",
        f"  by network: {where}",
        f"  in a single round: {again['foretold']:.0%} of {again['tries']:.0f}; the plan that was "
        f"best in the other rounds, measured: {again['measured']:.0%}",
        f"  on quiet cores: {quiet['picked']:.0%} of {quiet['picks']}",
    ]


def _groups(rows: list[Held], where: str) -> list[str]:
    lines = []
    for field in ("network", "model", "plan", "ranks"):
        lines += ["", f"{field + ' ' + where:38} configurations  spread  |error|  beyond it"]
        lines += [
            f"{name:38} {n:14} {spread:7.1%} {error:8.1%} {beyond:10.1%}"
            for name, (n, spread, error, beyond) in judge.by(rows, field).items()
        ]
    return lines


def _picked(rows: list[Held]) -> dict[str, tuple[int, int]]:
    """For each network how often the plan foretold best was, or was nearly, of how many."""
    found: dict[str, tuple[int, int]] = {}
    for pick in judge.picks(rows):
        good, n = found.get(pick["network"], (0, 0))
        found[pick["network"]] = (good + (pick["regret"] <= judge.NEAR), n + 1)
    return found
