"""How far what-ifs from a trace are off, and how many measurements their intervals hold.

    python benchmarks/fit_spread.py FOLDER... [--without MODEL]

A folder holds `truth.json` and one `MODEL.base.json.gz` a model, as `measure_variants.py` writes
them. For every model: errors, the share of its rows that its intervals hold, and the factor on all
widths that would hold 82 % of the rows of the *other* models, with what that factor holds of this
one. `--without` leaves a model out of everything. Widths are those of `whatif/spread.toml` and
`baseline.py`: change them there.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from foretell.advise import Step
from foretell.baseline import unprofiled
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


@dataclass(frozen=True)
class Case:
    """One measured variant and what was predicted of it, in seconds."""

    folder: str
    model: str
    low: float  # of two measurements
    high: float
    predicted: float
    bounds: tuple[float, float]

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
        mine = [r for r in rows if r["model"] == model and r["variant"] in SPECS]
        found += [c for r in mine if (c := _case(folder.name, step, r)) is not None]
    return found


def _case(folder: str, step: Step, row: dict[str, float | str]) -> Case | None:
    changes = [parse(spec) for spec in SPECS[str(row["variant"])].split()]
    try:
        after = applied(changes, step.graph, step.setting)
    except ForetellError:
        return None
    low, high = (float(row[k]) / 1e3 for k in ("low_ms", "high_ms"))
    bounds = step.interval(after, changes)
    return Case(folder, str(row["model"]), low, high, step.predicted(after), tuple(bounds))


def held(some: list[Case], factor: float = 1.0) -> float:
    """The share of cases that intervals hold."""
    return float(np.mean([c.is_held(factor) for c in some]))


def main() -> None:
    """Print the table."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("folders", nargs="+", type=Path)
    asked.add_argument("--without", action="append", default=[])
    given = asked.parse_args()
    found = [c for folder in given.folders for c in cases(folder, set(given.without))]
    left_out: list[bool] = []
    for key in dict.fromkeys((c.folder, c.model) for c in found):
        mine = [c for c in found if (c.folder, c.model) == key]
        rest = [c for c in found if c.model != key[1]] or mine
        factor = float(min(FACTORS, key=lambda f: abs(held(rest, f) - WANTED)))
        left_out += [c.is_held(factor) for c in mine]
        errors = [c.error for c in mine]
        print(
            f"{key[0]:8} {key[1]:20} {len(mine):3} rows, median {np.median(errors):5.1%}, worst "
            f"{max(errors):5.1%}, held {held(mine):4.0%}; by the others {factor:.2f} × as wide: "
            f"{held(mine, factor):4.0%}"
        )
    print(f"held {held(found):.1%}, each model left out {np.mean(left_out):.1%}")


if __name__ == "__main__":
    main()
