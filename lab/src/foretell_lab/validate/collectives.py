"""How far collective prices are from measured collectives: every row, by system, op and size.

    python -m foretell_lab.validate.collectives [TRUTH]

prints one line a group and size class: the median and 90th percentile of |priced/measured − 1|, the
median of priced/measured − 1, the share of rows inside the stated 80 % interval, and the median
error when the constants were fitted without that group size, that range of sizes, or that system
(recorded by `benchmarks/fit_collectives.py`; a dash where the fit never saw the row at all).
"""

from __future__ import annotations

import csv
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretell.cost.collective import LARGE, TEN_TO_NINETY, price
from foretell.errors import InputError
from foretell_lab.validate.collective_runs import Run, read

Floats = NDArray[np.float64]
Key = tuple[str, str, str, int, int, str]  # source, system, op, ranks a node, nodes, size
SIZES = ("<1 MiB", "≥1 MiB")
FOLDS = ("ranks", "sizes", "system")


@dataclass(frozen=True)
class Clock:
    """What a source's way of timing adds to the collective itself."""

    floor: float = 0.0  # seconds
    delay: float = 0.0
    sigma: float = 0.0  # spread of ln(measured/priced) it adds; a floor's only below 1 MiB

    def reads(self, seconds: Floats) -> Floats:
        """What it shows for collectives that take `seconds`."""
        return np.maximum(seconds, self.floor) + self.delay

    def blurs(self, bytes: Floats) -> NDArray[np.bool_]:
        """Where its own spread counts."""
        return np.full(bytes.shape, True) if self.delay else bytes < LARGE


@dataclass(frozen=True)
class Accuracy:
    """Prices against measurements for one op of one group, in one size class."""

    source: str
    system: str
    op: str
    per_node: int
    nodes: int
    size: str
    errors: Floats  # priced/measured − 1, one a row
    covered: float  # share of rows inside the stated 80 % interval
    held_out: Mapping[
        str, float
    ]  # the median error of fits that did not see it, by what was left out

    @property
    def key(self) -> Key:
        return self.source, self.system, self.op, self.per_node, self.nodes, self.size

    @property
    def rows(self) -> int:
        return len(self.errors)

    @property
    def error(self) -> float:
        """The median of |priced/measured − 1|."""
        return float(np.median(np.abs(self.errors)))

    @property
    def high(self) -> float:
        """Its 90th percentile."""
        return float(np.quantile(np.abs(self.errors), 0.9))

    @property
    def bias(self) -> float:
        """The median of priced/measured − 1."""
        return float(np.median(self.errors))


def accuracy(truth: Path) -> list[Accuracy]:
    """The error of every group measured in `truth/comm`, below and from 1 MiB."""
    found = [part for run in measured(truth) for part in _parts(run)]
    return sorted(found, key=lambda a: a.key)


def measured(truth: Path) -> list[Run]:
    """The runs of a truth folder, or of its `comm` folder itself."""
    runs, _ = read(_folder(truth))
    if not runs:
        raise InputError(f"no measured collective in `{truth}`", hint="give the folder of truth")
    return runs


def _folder(truth: Path) -> Path:
    return truth / "comm" if (truth / "comm").is_dir() else truth


def _parts(run: Run) -> Iterator[Accuracy]:
    priced = price(run.op, run.bytes, run.levels, protocols=run.protocols)
    clock = clock_of(run, clocks())
    seconds = clock.reads(priced.seconds)
    sigma = np.hypot(priced.sigma, clock.sigma * clock.blurs(run.bytes))
    residual = np.log(run.seconds / seconds)
    for size, rows in zip(SIZES, (run.bytes < LARGE, run.bytes >= LARGE), strict=True):
        if rows.any():
            key = (run.source, run.system, run.op, run.per_node, run.nodes, size)
            inside = np.abs(residual[rows]) <= TEN_TO_NINETY * sigma[rows]
            errors = np.expm1(-residual[rows])
            yield Accuracy(*key, errors, float(inside.mean()), held_out().get(key, {}))


def clock_of(run: Run, known: Mapping[str, Clock]) -> Clock:
    """The clock a run was timed with; that of other machines of its kind where it has none."""
    return known.get(run.clock) or known[run.clock.partition("-")[0]]


@cache
def clocks() -> Mapping[str, Clock]:
    """The clocks of the sources, by name; `loop` adds nothing."""
    text = _table("collective_clocks.toml")
    return {"loop": Clock()} | {name: Clock(**c) for name, c in tomllib.loads(text).items()}


@cache
def held_out() -> Mapping[Key, Mapping[str, float]]:
    """The median errors of the fits that left something out."""
    found: dict[Key, dict[str, float]] = {}
    for row in csv.DictReader(_table("collective_held_out.csv").splitlines()):
        key = (row["source"], row["system"], row["op"], int(row["per_node"]), int(row["nodes"]))
        errors = {fold: row[f"without_{fold}"] for fold in FOLDS}
        found[*key, row["size"]] = {fold: float(e) for fold, e in errors.items() if e}
    return found


def _table(name: str) -> str:
    return (Path(__file__).parent / "tables" / name).read_text()


def lines(rows: Iterable[Accuracy]) -> Iterator[str]:
    """The table as text, one line a row."""
    head = ("source", "system", "op", "ranks", "size", "rows", "median", "90 %", "bias", "in 80 %")
    yield _line((*head, *(f"no {fold}" for fold in FOLDS)))
    for a in rows:
        group = f"{a.per_node}×{a.nodes}" if a.nodes > 1 else str(a.per_node)
        numbers = (f"{x:.1%}" for x in (a.error, a.high))
        others = (f"{a.held_out[f]:.1%}" if f in a.held_out else "–" for f in FOLDS)
        place = (a.source, a.system, a.op, group, a.size, str(a.rows))
        yield _line((*place, *numbers, f"{a.bias:+.1%}", f"{a.covered:.0%}", *others))


def _line(cells: Iterable[str]) -> str:
    widths = (14, 20, 14, 5, 6, 5, 7, 8, 8, 7, 8, 8, 9)
    pairs = enumerate(zip(cells, widths, strict=True))
    return " ".join(f"{c:<{w}}" if i < 5 else f"{c:>{w}}" for i, (c, w) in pairs).rstrip()


def summary(rows: Iterable[Accuracy]) -> Iterator[str]:
    """By system and size: the median error over all rows, and the share inside their interval."""
    pools: dict[tuple[str, ...], list[Accuracy]] = defaultdict(list)
    for a in rows:
        what = "all_reduce" if a.op == "all_reduce" else "other ops"
        pools[f"{a.source} {a.system}", what, a.size].append(a)
        pools["all", what, a.size].append(a)
    for (name, what, size), pool in sorted(pools.items()):
        errors = np.abs(np.concatenate([a.errors for a in pool]))
        covered = np.average([a.covered for a in pool], weights=[a.rows for a in pool])
        yield (
            f"{name:<34} {what:<10} {size} {len(errors):>6} rows"
            f"  median {np.median(errors):6.1%}  in 80 % {covered:4.0%}"
        )


def report(truth: Path) -> dict[str, Any]:
    """The rows, their summary, and what could not be priced: as values and as text."""
    found = accuracy(truth)
    passed = [
        f"not priced: {rows} rows of {what}" for what, rows in read(_folder(truth))[1].items()
    ]
    text = "\n".join([*lines(found), "", *summary(found), *passed])
    return {"rows": [row(a) for a in found], "text": text}


def row(a: Accuracy) -> dict[str, Any]:
    """One row as plain values."""
    return {
        "source": a.source, "system": a.system, "op": a.op, "per_node": a.per_node,
        "nodes": a.nodes, "size": a.size, "rows": a.rows, "median": a.error, "p90": a.high,
        "bias": a.bias, "covered": a.covered, "held_out": dict(a.held_out),
    }  # fmt: skip


def main(arguments: list[str]) -> None:
    """Print the report."""
    print(report(Path(arguments[0]) if arguments else Path("../shared/truth"))["text"])


if __name__ == "__main__":
    main(sys.argv[1:])
