"""How far what-ifs from a trace are off, and how many measurements their intervals hold.

    python benchmarks/fit_spread.py FOLDER... [--without MODEL] [--fit] [--judge FOLDER]

A folder holds `truth.json` and one `MODEL.base.json.gz` a model, as `measure_variants.py` writes
them. For every model: errors, the share of its rows that its intervals hold, and the factor on all
widths that would hold 82 % of the rows of the *other* models, with what that factor holds of this
one. `--without` leaves a model out of everything. Widths are those of `whatif/spread.toml` and of
`cost/tables/passes.toml`: change them there. `--fit` finds them: those for which the width of all
intervals and `BEYOND` times what measurements lie beyond them is least, each folder counting alike,
and says what each folder's intervals then hold, and what they hold with that folder left out of the
search. `--judge FOLDER` adds folders that no search sees. `together` stays as it is: what-ifs of
other devices rest on it, and none of these steps tells of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from foretell.advise import Step
from foretell.baseline import AGAIN, FOUR_IN_FIVE, SPREAD, TOGETHER, effects, unprofiled
from foretell.errors import ForetellError
from foretell.trace import read
from foretell.whatif import applied, parse

SPECS = {
    "tf32": "tf32", "amp_bf16": "amp:dtype=bf16", "amp_fp16": "amp:dtype=fp16",
    "opt_foreach": "foreach-optimizer", "opt_fused": "fused-optimizer",
    "batch_x2": "batch:times=2", "batch_half": "batch:times=0.5", "checkpoint": "checkpoint",
    "cudagraph": "cuda-graph", "nhwc": "channels-last", "compile": "compile",
    "amp_bf16+fused": "amp:dtype=bf16 fused-optimizer",
    "amp_bf16+cudagraph": "amp:dtype=bf16 cuda-graph",
    "amp_bf16+nhwc": "amp:dtype=bf16 channels-last", "amp_bf16+compile": "amp:dtype=bf16 compile",
}  # fmt: skip
WANTED = 0.82
FACTORS = np.arange(0.4, 2.5, 0.05)
BEYOND = 14.0  # of 12, 14 and 16 the one with which folders left out hold 82.5 % most nearly
HOST = 0.15  # spread of ln of the host's speed with which effects are found
STEPS = (0.5, 0.7, 0.85, 0.93, 1.08, 1.18, 1.4, 2.0)  # by which a width is tried
LEAST = 0.004


@dataclass(frozen=True)
class Case:
    """One measured variant and what was predicted of it, in seconds."""

    folder: str
    model: str
    low: float  # of two measurements
    high: float
    predicted: float
    bounds: tuple[float, float]
    changes: tuple[str, ...]
    is_told: bool  # the un-profiled step tells how fast the host is
    host: float  # what the host and prices make of the step, each by one in ln of its own,
    prices: float  # on the side on which the measurement lies

    @property
    def off(self) -> float:
        """ln of the prediction over the nearer of two measurements."""
        return float(np.log(self.predicted / min(max(self.predicted, self.low), self.high)))

    @property
    def error(self) -> float:
        """From the nearer of two measurements."""
        return abs(self.predicted / min(max(self.predicted, self.low), self.high) - 1)

    def is_held(self, factor: float = 1.0) -> bool:
        """Whether the interval, so many times as wide, holds what was measured."""
        low, high = (self.predicted * (b / self.predicted) ** factor for b in self.bounds)
        return bool(low <= self.high and self.low <= high)


def cases(folder: Path, without: set[str]) -> list[Case]:
    """Every variant of every model that has a trace."""
    rows = json.loads((folder / "truth.json").read_text())["rows"]
    base = {r["model"]: r["median_ms"] / 1e3 for r in rows if r["variant"] == "base"}
    found = []
    for model, real in base.items():
        trace = folder / f"{model}.base.json.gz"
        if model in without or not trace.exists():
            continue
        known = unprofiled(read(trace), real)
        step = Step(known.graph, None, known)
        mine = [r for r in rows if r["model"] == model and r["variant"] in SPECS and "low_ms" in r]
        found += [c for r in mine if (c := _case(label(folder), step, r)) is not None]
    return found


def label(folder: Path) -> str:
    """A folder by its last two names."""
    return "/".join(folder.resolve().parts[-2:])


def _case(folder: str, step: Step, row: dict[str, float | str]) -> Case | None:
    changes = [parse(spec) for spec in SPECS[str(row["variant"])].split()]
    try:
        after = applied(changes, step.graph, step.setting)
    except ForetellError:
        return None
    low, high = (float(row[k]) / 1e3 for k in ("low_ms", "high_ms"))
    bounds = step.interval(after, changes)
    predicted, baseline = step.predicted(after), step.baseline
    side = effects(after, step.predicted, HOST)[int(predicted < low)]
    return Case(
        folder, str(row["model"]), low, high, predicted, tuple(bounds),
        tuple(c.name for c in changes), baseline is not None and baseline.sigma != SPREAD,
        abs(side[0]) / HOST, abs(side[1]) / TOGETHER,
    )  # fmt: skip


def held(some: list[Case], factor: float = 1.0) -> float:
    """The share of cases that intervals hold."""
    return float(np.mean([c.is_held(factor) for c in some]))


class Fit:
    """The search for widths: host, host that the step tells, prices together, each what-if."""

    def __init__(self, some: Sequence[Case]) -> None:
        self.some = some
        self.names = sorted({name for c in some for name in c.changes})
        self.parts = np.array([[n in c.changes for n in self.names] for c in some], float)
        self.off = np.abs([c.off for c in some])
        self.host, self.prices = (np.array([getattr(c, k) for c in some]) for k in ("host", "prices"))  # noqa: E501  # fmt: skip
        self.is_told = np.array([c.is_told for c in some])
        folders = [c.folder for c in some]
        self.weight = np.array([1 / folders.count(f) for f in folders])
        self.model = np.array([c.model for c in some])

    def widths(self, found: np.ndarray) -> np.ndarray:
        """Half the interval of each case, in ln."""
        host = np.where(self.is_told, found[1], found[0]) * self.host
        squares = self.parts @ found[3:] ** 2 + host**2 + (found[2] * self.prices) ** 2
        return FOUR_IN_FIVE * np.sqrt(squares)

    def loss(self, found: np.ndarray, mine: np.ndarray) -> float:
        """Widths, and what lies beyond them, of some cases."""
        widths = self.widths(found)
        each = 2 * widths + BEYOND * np.maximum(self.off - widths, 0)
        return float((self.weight * each)[mine].sum() / self.weight[mine].sum())

    def best(self, mine: np.ndarray, rounds: int = 8) -> np.ndarray:
        """The widths of least loss, found one at a time."""
        found = np.array([SPREAD, AGAIN, TOGETHER, *[0.03] * len(self.names)])
        least = self.loss(found, mine)
        for k in [0, 1, *range(3, len(found))] * rounds:
            for step in STEPS:
                tried = found.copy()
                tried[k] = max(tried[k] * step, LEAST)
                if (loss := self.loss(tried, mine)) < least - 1e-9:
                    least, found = loss, tried
        return found


def fit(some: Sequence[Case], judges: Sequence[Case] = ()) -> None:
    """Print the widths found, and what intervals of each folder hold with it and without it."""
    search = Fit([*some, *judges])
    folder = np.array([c.folder for c in search.some])
    source = np.arange(len(folder)) < len(some)
    found = search.best(source)
    for name, value in zip(["spread", "again", "together", *search.names], found, strict=True):
        print(f"{name} = {value:.3f}")
    for each in dict.fromkeys(folder.tolist()):
        mine = folder == each
        blind = search.best(source & ~mine)
        held = [np.mean((search.off <= search.widths(w))[mine]) for w in (found, blind)]
        print(f"{each:20} {int(mine.sum()):4} rows, held {held[0]:.1%}, left out {held[1]:.1%}")


def main() -> None:
    """Print the table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folders", nargs="+", type=Path)
    options.add_argument("--without", action="append", default=[])
    options.add_argument("--fit", action="store_true")
    options.add_argument("--judge", action="append", default=[], type=Path)
    given = options.parse_args()
    found = [c for folder in given.folders for c in cases(folder, set(given.without))]
    if given.fit:
        fit(found, [c for folder in given.judge for c in cases(folder, set(given.without))])
    else:
        table(found)


def table(found: Sequence[Case]) -> None:
    """Print errors and what intervals hold, of every model."""
    left_out: list[bool] = []
    for key in dict.fromkeys((c.folder, c.model) for c in found):
        mine = [c for c in found if (c.folder, c.model) == key]
        rest = [c for c in found if c.model != key[1]] or mine
        factor = float(min(FACTORS, key=lambda f: abs(held(rest, f) - WANTED)))
        left_out += [c.is_held(factor) for c in mine]
        errors = [c.error for c in mine]
        print(
            f"{key[0]:13} {key[1]:20} {len(mine):3} rows, median {np.median(errors):5.1%}, worst "
            f"{max(errors):5.1%}, held {held(mine):4.0%}; by the others {factor:.2f} × as wide: "
            f"{held(mine, factor):4.0%}"
        )
    print(f"held {held(found):.1%}, each model left out {np.mean(left_out):.1%}")


if __name__ == "__main__":
    main()
