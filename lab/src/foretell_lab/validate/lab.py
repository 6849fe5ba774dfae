"""Steps on small networks of this project's own laboratory, compared with predictions.

The rows are shipped: measured by `foretell lab` on the machines that the text names, most of them
several times in mixed order. Predictions start from one rank by itself and what bench found of
links and cores; then again after `foretell fit` has seen a tenth of the configurations. Nothing was
fitted for the first, but the model was made while looking at `tables/lab` and mended while looking
at `tables/lab-quiet`; `tables/lab-crowded` was run when it stood as it was then. That messages
which meet stall, and by how much, was found in the half of `tables/lab-pinned` whose models are not
in `UNSEEN`: the other half says what it is worth. `tables/lab-warm` was run when all of it stood.

    lab          two cores with other work on them, a load of seven
    lab-later    an hour later, on networks that the model had not seen
    lab-quiet    sixteen cores with nothing else on them, two laboratories side by side
    lab-crowded  the two cores again, with twice as much other work
    lab-pinned   the sixteen cores, each rank kept to two of them, three laboratories side by side
    lab-warm     the same cores, two or four a rank; steps count once cores are awake, and one rank
                 by itself is clocked again with every round
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from statistics import mean
from typing import Any

from foretell_lab.emulation import accuracy, fit, table
from foretell_lab.emulation.predicted import Comparison, Known, compared
from foretell_lab.emulation.step import Knobs
from foretell_lab.emulation.table import Config, Row

FOLDER, LATER, CROWDED = "tables/lab", "tables/lab-later", "tables/lab-crowded"
QUIET = ("tables/lab-quiet-1", "tables/lab-quiet-2")
PINNED = ("tables/lab-pinned-1", "tables/lab-pinned-2", "tables/lab-pinned-3")
WARM = ("tables/lab-warm-1", "tables/lab-warm-2", "tables/lab-warm-3")
UNSEEN = frozenset(("wide", "rnn", "vgg", "bert"))  # chosen before the first look
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

    def of(self, models: frozenset[str]) -> Runs:
        """Those of some models."""
        return Runs(self.known, [row for row in self.rows if row.model in models])

    @property
    def stretch(self) -> float:
        """Wall over core seconds, the mean of all runs."""
        return mean(row.stretch for row in self.rows)

    def fitted(self) -> tuple[set[Config], Knobs]:
        """What a tenth of the configurations teach, and which."""
        chosen = set(fit.chosen(list(table.by_config(self.rows)), SHARE))
        return chosen, fit.fit(self.known, [row for row in self.rows if row.config in chosen])


def report(_: Path | None = None, folder: Path | None = None) -> dict[str, Any]:
    """Every figure as values and as text."""
    runs, later, crowded = (
        Runs.read(place) for place in (folder or shipped(FOLDER), shipped(LATER), shipped(CROWDED))
    )
    quiet, pinned, warm = (
        [Runs.read(shipped(name)) for name in names] for names in (QUIET, PINNED, WARM)
    )
    unseen = [part.of(UNSEEN) for part in pinned]
    plain = _compared([runs])
    chosen, knobs = runs.fitted()
    found = {
        "predicted": plain,
        "blind": _compared([runs], is_blind=True),
        "rest_before": [h for h in plain if h.config not in chosen],
        "rest_after": _compared([runs.but(chosen)], [knobs]),
        "later": _compared([later]),
        "later_after": _compared([later], [knobs]),
        "quiet": _compared(quiet, is_blind=True),
        **_before_and_after("quiet", quiet),
        "pinned": _compared(pinned, is_blind=True),
        "unseen": _compared(unseen, is_blind=True, like=pinned),
        "unseen_with_load": _compared(unseen, like=pinned),
        **_before_and_after("pinned", pinned),
        "warm": _compared(warm, is_blind=True),
        **_before_and_after("warm", warm),
        "crowded": _compared([crowded]),
        "crowded_blind": _compared([crowded], is_blind=True),
    }
    figures = {name: accuracy.summary(rows) for name, rows in found.items()}
    again = accuracy.again(runs.rows, plain)
    again_warm = accuracy.again([row for lab in warm for row in lab.rows], found["warm"])
    return {
        **figures,
        "again": again,
        "again_warm": again_warm,
        "machine": runs.known.machine["machine"],
        "fitted_on": len(chosen),
        "picks": accuracy.picks(plain),
        "rows": [vars(h) | {"config": vars(h.config), "error": h.error} for h in plain],
        "text": "\n".join(
            [
                *_lines(figures, [runs, quiet[0], pinned[0], warm[0], crowded], len(chosen)),
                *_picks(figures, (again, again_warm), plain),
                *_groups(plain, "on two busy cores"),
                *_groups(found["warm"], "on sixteen that are awake"),
            ]
        ),
    }


def shipped(name: str) -> Path:
    """A folder of rows that comes with the package."""
    return Path(str(files("foretell_lab.validate").joinpath(name)))


def _compared(
    labs: Sequence[Runs], knobs: Sequence[Knobs] = (), *, like: Sequence[Runs] = (),
    is_blind: bool = False,
) -> list[Comparison]:  # fmt: skip
    """What was predicted of several laboratories; runs made once have the spread of all others."""
    rows = [row for lab in like or labs for row in lab.rows]
    turned = list(knobs) or [Knobs()] * len(labs)
    return [
        one
        for lab, k in zip(labs, turned, strict=True)
        for one in compared(lab.known, lab.rows, k, is_blind=is_blind, like=rows)
    ]


def _before_and_after(name: str, labs: list[Runs]) -> dict[str, list[Comparison]]:
    """What each laboratory's own tenth was not fitted on, as predicted before and after that."""
    taught = [lab.fitted() for lab in labs]
    rest = [lab.but(seen) for lab, (seen, _) in zip(labs, taught, strict=True)]
    return {
        f"{name}_before": _compared(rest, like=labs),
        f"{name}_after": _compared(rest, [learned for _, learned in taught], like=labs),
    }


def _lines(figures: dict[str, Any], labs: Sequence[Runs], chosen: int) -> list[str]:
    """One line for each way to foretell, machine by machine."""
    busy, quiet, pinned, warm, crowded = labs
    names = (
        (_place(busy, "shared with other work", figures["predicted"]), ""),
        ("predicted", "one rank + bench"),
        ("blind", "  not given how busy"),
        ("rest_before", f"without {chosen} fitted on"),
        ("rest_after", "  after fit"),
        ("later", "later, other networks"),
        ("later_after", "  after that fit"),
        (_place(quiet, "with nothing else on them", figures["quiet"]), ""),
        ("quiet", "one rank + bench alone"),
        ("quiet_before", "without those fitted on"),
        ("quiet_after", "  after fit"),
        (_place(pinned, "with nothing else, two a rank", figures["pinned"]), ""),
        ("pinned", "one rank + bench alone"),
        ("unseen", "  models held back"),
        ("unseen_with_load", "  with their load given"),
        ("pinned_before", "without those fitted on"),
        ("pinned_after", "  after fit"),
        (_place(warm, "with nothing else, awake", figures["warm"]), ""),
        ("warm", "one rank + bench alone"),
        ("warm_before", "without those fitted on"),
        ("warm_after", "  after fit"),
        (_place(crowded, "with twice as much work", figures["crowded"]), ""),
        ("crowded", "one rank + bench"),
        ("crowded_blind", "  not given how busy"),
    )
    lines = [accuracy.text(figures[key], name) if name else f"\n{key}" for key, name in names]
    return "\n".join(lines).strip().splitlines()


def _place(lab: Runs, how: str, figures: dict[str, Any]) -> str:
    here = lab.known.machine["machine"]
    return (
        f"{here['cpu']}, {here['cores']} cores {how} (work takes {lab.stretch:.1f} times its core "
        f"seconds): runs of the same configuration lie {figures['spread']:.1%} from their median "
        f"(mean; a tenth of them more than {figures['spread_p90']:.1%})"
    )


def _picks(
    figures: dict[str, Any],
    again: tuple[dict[str, float], dict[str, float]],
    plain: list[Comparison],
) -> list[str]:
    """How often the best plan was picked, and how often measuring would have."""
    where = ", ".join(f"{name} {good} of {n}" for name, (good, n) in _picked(plain).items())
    ways = (
        ("two busy cores", "predicted"),
        ("  after fit", "rest_after"),
        ("sixteen quiet cores", "quiet"),
        ("two cores a rank", "pinned"),
        ("  models held back", "unseen"),
        ("  with their load given", "unseen_with_load"),
        ("sixteen awake", "warm"),
        ("two crowded cores", "crowded"),
    )
    near = f"{accuracy.NEAR:.0%}"
    return [
        "",
        f"best plan of each (model, network, ranks): picked, or within {near} of it as "
        f"measured, or within {near} beyond the spread of runs; the pick takes longer by",
        f"{'':22} {'groups':>6} {'as measured':>12} {'beyond the spread':>18} {'longer':>7}",
        *(_picked_line(name, figures[key]) for name, key in ways),
        f"two busy cores, as measured, by network: {where}",
        *(_again_line(name, one) for name, one in zip(("busy", "awake"), again, strict=True)),
    ]


def _again_line(name: str, again: dict[str, float]) -> str:
    return (
        f"{name} cores, in a single round: {again['predicted']:.0%} of {again['tries']:.0f}; the "
        f"plan that was best in the other rounds, measured: {again['measured']:.0%}"
    )


def _picked_line(name: str, found: dict[str, Any]) -> str:
    return (
        f"{name:22} {found['picks']:6} {found['picked']:12.0%} {found['picked_beyond']:18.0%} "
        f"{found['regret']:7.1%}"
    )


def _groups(rows: list[Comparison], where: str) -> list[str]:
    lines = []
    for field in ("network", "model", "plan", "ranks"):
        lines += ["", f"{field + ' ' + where:36} configured  spread  |error|  beyond it"]
        lines += [
            f"{name:36} {n:10} {spread:7.1%} {error:8.1%} {beyond:10.1%}"
            for name, (n, spread, error, beyond) in accuracy.by(rows, field).items()
        ]
    return lines


def _picked(rows: list[Comparison]) -> dict[str, tuple[int, int]]:
    """For each network how often the plan predicted best was, or was nearly, of how many."""
    found: dict[str, tuple[int, int]] = {}
    for pick in accuracy.picks(rows):
        good, n = found.get(pick["network"], (0, 0))
        found[pick["network"]] = (good + (pick["regret"] <= accuracy.NEAR), n + 1)
    return found
