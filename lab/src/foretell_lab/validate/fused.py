"""How far prices of fused ops are from measured ones, on models no fit has seen.

    foretell validate --fused

prints, for the regions measured on an H200 that belong to the models kept out (`HELD_OUT`): how
many, the median and 90th percentile of |priced/measured − 1|, the share within 14 %, and the share
inside the stated 80 % interval; for the network with each op's own time known and not, and for the
formula. Then the same by model and by size, for single kernels as the compiler wrote them, how well
the measurements repeat, the regions of a CPU, and whole compiled steps (→ `fused_steps`). Of the
models trained on, which are many, every fourth region is priced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.cluster.read import devices
from foretell.cost import fused
from foretell.cost.fused import fused_price
from foretell.cost.fused_regions import KIND_CODE, KINDS
from foretell.cost.kernel import Price
from foretell_lab.fused import data as fused_data
from foretell_lab.fused.data import HELD_OUT, Measured
from foretell_lab.fused.tuning import one_core
from foretell_lab.validate import fused_steps

Array = npt.NDArray[np.float64]
Rows = npt.NDArray[np.bool_]
_BLIND = "own times unknown"
NEAR = 0.14  # the bar of the DisCo paper: nine in ten of its fused ops within 14 %
_EIGHTY = 1.2816  # standard deviations that hold 80 % of a normal distribution
_TEMPLATE = KINDS.index("template")
_EVERY = 4  # the share of regions of models trained on that are priced, one in so many
_SIZES = ((0.0, 5e-6, "under 5 µs"), (5e-6, 3e-5, "5 to 30 µs"), (3e-5, 1e9, "30 µs and more"))


@dataclass(frozen=True)
class Figures:
    """Prices against readings."""

    what: str
    by: str  # who priced
    readings: int
    median: float
    p90: float
    near: float  # share within 14 %
    covered: float  # share inside the 80 % interval


def figures(what: str, by: str, measured: Measured, price: Price, rows: Rows) -> Figures:
    """The errors of some rows."""
    error = np.abs(price.seconds / measured.seconds - 1)[rows]
    apart = np.abs(np.log(measured.seconds / price.seconds))[rows]
    inside = apart <= _EIGHTY * price.sigma[rows]
    return Figures(
        what, by, len(error), float(np.median(error)), float(np.quantile(error, 0.9)),
        float(np.mean(error <= NEAR)), float(np.mean(inside)),
    )  # fmt: skip


def accuracy(measured: Measured | None = None) -> list[Figures]:
    """Every figure of the H200 set, models kept out first."""
    m = measured or fused_data.shipped("h200")
    device = devices()["h200"]
    blind = replace(m.regions, seconds=np.full(len(m.regions.seconds), np.nan))
    priced = {
        "network": fused_price(m.regions, device),
        f"network, {_BLIND}": fused_price(blind, device),
        "formula": fused_price(m.regions, device, learned=False),
    }
    return [
        figures(what, by, m, price, rows)
        for what, rows in _groups(m)
        if rows.any()
        for by, price in priced.items()
    ]


def sampled(m: Measured) -> Measured:
    """All of the models kept out, and of the others one region in four, with its kernels."""
    of = np.cumsum(~m.regions.is_written) - 1
    return m.take(np.flatnonzero(m.held_out | (of % _EVERY == 0)))


def _groups(m: Measured) -> Iterator[tuple[str, Rows]]:
    kernel = m.regions.is_written
    out = m.held_out & ~kernel
    yield "regions of models kept out", out
    yield "of them, one kernel", out & (m.kernels == 1)
    for name in HELD_OUT:
        yield name, out & (m.family == name)
    for low, high, name in _SIZES:
        yield f"kept out, {name}", out & (m.seconds >= low) & (m.seconds < high)
    yield "regions of models trained on", ~m.held_out & ~kernel
    yield "kernels of models kept out", m.held_out & kernel
    products = np.bincount(m.regions.region, KIND_CODE[m.regions.op] == _TEMPLATE, len(m)) > 0
    yield "of them, matmuls fused", m.held_out & kernel & products
    yield "kernels of models trained on", ~m.held_out & kernel


def by_kernels(m: Measured, price: Price) -> Figures:
    """Regions of models kept out, priced as the sum of the kernels the compiler made of them.

    The kernels of a region are the rows after it; a region some of whose kernels are a library's,
    or were not noted, is left out.
    """
    kernel = m.regions.is_written
    of = np.cumsum(~kernel) - 1  # the region each row belongs to
    regions = np.flatnonzero(~kernel)
    count = np.bincount(of[kernel], minlength=len(regions))
    total = np.bincount(of[kernel], price.seconds[kernel], len(regions))
    square = np.bincount(of[kernel], (price.seconds * price.sigma)[kernel] ** 2, len(regions))
    chosen = (count == m.kernels[regions]) & (count > 1) & m.held_out[regions]
    seconds, sigma, rows = np.ones(len(m)), np.ones(len(m)), np.zeros(len(m), bool)
    rows[regions[chosen]] = True
    seconds[rows], sigma[rows] = total[chosen], np.sqrt(square[chosen]) / total[chosen]
    return figures("kept out, by their kernels", "network", m, Price(seconds, sigma), rows)


@dataclass(frozen=True)
class Exactness:
    """How often the number of kernels is predicted, and what that is worth to the price."""

    trained_on: float  # share of regions with the right number
    kept_out: float
    near_if_right: float  # share of those kept out within 14 %
    near_if_wrong: float

    def __str__(self) -> str:
        return (
            f"number of kernels right: {self.kept_out:.1%} of regions kept out, "
            f"{self.trained_on:.1%} trained on\n"
            f"priced within 14 %: {self.near_if_right:.1%} of those kept out where it is right, "
            f"{self.near_if_wrong:.1%} of the others"
        )


def exactness(m: Measured, price: Price) -> Exactness:
    """Kernels as lowered (→ `cost.fused_kernels`) beside those that ran, a library's among them."""
    rows = np.flatnonzero(~m.regions.is_written)
    made = fused.kernels_of(devices()["h200"], m.regions.take(rows))
    counts = np.bincount(made.of, minlength=len(rows)) if made else np.zeros(len(rows))
    right, out = counts == m.kernels[rows], m.held_out[rows]
    near = np.abs(price.seconds / m.seconds - 1)[rows] <= NEAR
    shares = (right[~out], right[out], near[out & right], near[out & ~right])
    return Exactness(*(float(np.mean(share)) for share in shares))


def repeated(m: Measured) -> tuple[int, float, float]:
    """How many regions were measured twice, and the median and 90th percentile they lie apart."""
    rows = np.flatnonzero((m.again >= 0) & ~m.regions.is_written)
    apart = np.abs(m.seconds[rows] / m.seconds[m.again[rows]] - 1)
    return len(rows), float(np.median(apart)), float(np.quantile(apart, 0.9))


def on_cpu() -> list[Figures]:
    """The CPU set, one core with Inductor C++: models kept out, each of them, and the rest."""
    m, core = fused_data.shipped("cpu"), one_core()
    blind = replace(m.regions, seconds=np.full(len(m.regions.seconds), np.nan))
    priced = {
        "network": fused_price(m.regions, core),
        f"network, {_BLIND}": fused_price(blind, core),
        "formula": fused_price(m.regions, core, learned=False),
    }
    groups = [("CPU, models kept out", m.held_out)]
    groups += [(f"CPU, {name}", m.family == name) for name in HELD_OUT]
    groups += [("CPU, models trained on", ~m.held_out)]
    return [
        figures(what, by, m, price, rows)
        for what, rows in groups
        if rows.any()
        for by, price in priced.items()
    ]


def lines(found: list[Figures], again: tuple[int, float, float]) -> Iterator[str]:
    """The report, line by line."""
    yield "within 14 %, inside the 80 % interval; blind: each op's own time is not given"
    yield f"{'':29} {'priced by':15}  rows median    p90   14 %   80 %"
    for f in found:
        numbers = f"{f.median:6.1%} {f.p90:6.1%} {f.near:6.1%} {f.covered:6.1%}"
        yield f"{f.what:29} {f.by.replace(_BLIND, 'blind'):15} {f.readings:5d} {numbers}"
    yield twice(again)


def twice(again: tuple[int, float, float]) -> str:
    """How well measurements repeat, as a sentence."""
    return f"{again[0]} regions measured twice lie {again[1]:.1%} apart (p50), {again[2]:.1%} (p90)"


def report(truth: Path) -> dict[str, Any]:
    """The figures as values and as text; the measured regions ship with the package."""
    whole_set = fused_data.shipped("h200")
    m, again = sampled(whole_set), repeated(whole_set)
    price = fused_price(m.regions, devices()["h200"])
    found = [*accuracy(m), by_kernels(m, price), *on_cpu()]
    rows = [f.__dict__ for f in found]
    whole = fused_steps.steps()
    core = "on a CPU " + twice(repeated(fused_data.shipped("cpu")))
    exact = exactness(m, price)
    text = "\n".join([*lines(found, again), core, str(exact), *fused_steps.lines(whole)])
    steps = [s.__dict__ for s in whole]
    return {"rows": rows, "repeat": again, "exact": asdict(exact), "steps": steps, "text": text}
