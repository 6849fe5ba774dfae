"""Fitted constants fitted again without one source, and that source predicted with them.

    foretell validate --refit --leave-out mosaic

`tables/refit.toml` names every constant that tables of whole runs, or steps measured in many
variants, set. Those the source had a part in are searched again over the sources that are left, one
after another, for the least mean error; where none is left a constant takes the value of its
nearest relative, or stays. Nothing is written.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import numpy as np

from foretell.cost import kernel
from foretell.cost.price import issued
from foretell.errors import InputError, unknown
from foretell.plan import framework
from foretell.report.words import table as text_table
from foretell_lab.validate import layouts, unseen, whatifs

FACTORS = (0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 2.0)  # of the shipped value, tried in a refit
MOST = 24  # rows of a source that a refit looks at, evenly over it


@dataclass(frozen=True)
class Constant:
    """One fitted number and where it stands."""

    file: str
    table: str
    key: str
    sources: tuple[str, ...]
    borrows: str = ""
    rows: str = "*"  # of steps in variants: which of those it has a say in
    place: int = -1  # in a list of numbers

    def __str__(self) -> str:
        return f"{self.file}.{self.table}.{self.key}" + (f"[{self.place}]" if self._listed else "")

    @property
    def _listed(self) -> bool:
        return self.place >= 0

    def value(self, table: str = "") -> float:
        """As it is now; of another table where one is named. What a profile leaves open is that
        of most kernels."""
        return self.written(table) or issued("other", False)

    def written(self, table: str = "") -> float:
        """As it stands in its file: 0 where a profile leaves it to the kind of kernel."""
        if self.file == "passes":
            found_one = kernel.passes()[self.table][self.key]
            return float(found_one[self.place] if self._listed else found_one)
        if self.file == "power":
            return float(kernel.table()[table or self.table][self.key])
        return float(getattr(framework.profiles()[table or self.table], self.key))

    def put(self, value: float) -> None:
        """Use another value in this process."""
        if self.file == "passes":
            owner: Any = kernel.passes()[self.table]
            if self._listed:
                owner[self.key][self.place] = value
            else:
                owner[self.key] = value
            return
        if self.file == "power":
            kernel.table()[self.table][self.key] = value
            return
        known, changes = framework.profiles(), cast("Any", {self.key: value})
        known[self.table] = replace(known[self.table], **changes)
        framework.clear_cache()


@cache
def constants() -> tuple[Constant, ...]:
    """Every constant that can be fitted again."""
    text = files("foretell_lab.validate").joinpath("tables", "refit.toml").read_text("utf-8")
    rows: list[dict[str, Any]] = tomllib.loads(text)["constant"]
    return tuple(Constant(**{**row, "sources": tuple(row["sources"])}) for row in rows)


STEPS = {"h200": "", "h200_2": "", "nine": "h200", "kinds": "kinds/h200", "further": "further/h200"}
STEPS |= {"papers": "papers/h200"}  # steps in variants: of the truth, or of MEASURED
MEASURED = Path("benchmarks/measured")  # from the root of the repository
EACH = 1  # rows of a model that a refit looks at


def errors(
    source: str, truth: Path, most: int = 0, rows: str = "*"
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Relative errors of a source's rows with the constants as they are now; evenly `most`."""
    if source in STEPS:
        folder = MEASURED / STEPS[source] if STEPS[source] else truth / source
        mine = whatifs.rows_of(folder, rows, EACH if most else 0)
        return np.array([row.error for row in mine if row.start == "base"])
    if source in unseen.SOURCES:
        found = [row.error for row in unseen.SOURCES[source](truth)]
        return np.array(found[:: max(len(found) // most, 1)] if most else found)
    if source not in layouts.SOURCES:
        raise unknown("source", source, [*unseen.SOURCES, *layouts.SOURCES, *STEPS])
    requests = list(layouts.SOURCES[source](truth))
    some = requests[:: max(len(requests) // most, 1)] if most else requests
    return np.array([row.error for row in layouts.predicted(some)])


def without(source: str, truth: Path) -> Iterator[tuple[Constant, float, float]]:
    """Constants the source had a part in: value before, and fitted to what is left."""
    mine = [c for c in constants() if source in c.sources]
    for constant in mine:
        before = constant.value()
        left = [s for s in constant.sources if s != source]
        borrowed = constant.value(constant.borrows) if constant.borrows else before
        after = _searched(constant, left, truth) if left else borrowed
        constant.put(after)
        yield constant, before, after


def _searched(constant: Constant, left: list[str], truth: Path) -> float:
    """The value of the least mean error over some sources: from what ships, while it falls."""
    shipped, found = constant.value(), dict[int, float]()

    def error(at: int) -> float:
        if at not in found:
            constant.put(shipped * FACTORS[at])
            every = np.concatenate([np.abs(errors(s, truth, MOST, constant.rows)) for s in left])
            found[at] = round(float(np.mean(every)), 4)
        return found[at]

    best = FACTORS.index(1.0)
    for step in (1, -1):
        while 0 <= best + step < len(FACTORS) and error(best + step) < error(best):
            best += step
    return shipped * FACTORS[best]


@contextmanager
def restored() -> Iterator[None]:
    """Constants as shipped again behind what is done inside."""
    shipped = [(c, c.written()) for c in constants()]
    try:
        yield
    finally:
        for constant, value in shipped:
            constant.put(value)


def report(truth: Path, leave_out: str = "") -> dict[str, Any]:
    """The left-out source with shipped constants and with those fitted without it."""
    known = sorted({s for c in constants() for s in c.sources})
    if leave_out not in {*unseen.SOURCES, *layouts.SOURCES, *STEPS}:
        raise InputError(
            f"no source `{leave_out}` to leave out",
            hint=f"--leave-out takes one of {', '.join(known)}",
        )
    with restored():
        shipped = errors(leave_out, truth)
        changed = [(str(c), before, after) for c, before, after in without(leave_out, truth)]
        blind = errors(leave_out, truth) if changed else shipped
    rows = [
        (name, str(len(e)), f"{100 * np.median(np.abs(e)):.1f} %", f"{100 * np.median(e):.1f} %")
        for name, e in (("as shipped", shipped), (f"without {leave_out}", blind))
    ]
    lines = [text_table((leave_out, "rows>", "median>", "bias>"), rows)]
    lines += [f"{name}: {before:.3g} shipped, {after:.3g}" for name, before, after in changed]
    if not changed:
        lines.append(f"no constant was fitted to {leave_out}: both lines are blind")
    return {
        "source": leave_out,
        "shipped": {"median": float(np.median(np.abs(shipped))), "bias": float(np.median(shipped))},
        "left_out": {"median": float(np.median(np.abs(blind))), "bias": float(np.median(blind))},
        "constants": {name: {"shipped": b, "refitted": a} for name, b, a in changed},
        "text": "\n".join(lines),
    }
