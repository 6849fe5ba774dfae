"""Joins what several runs measured into one table, sorted, with how well it repeats beside it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from foretell.errors import InputError
from foretell_lab.bench.case import Case, work
from foretell_lab.bench.table import Row, load, load_header, save
from foretell_lab.bench.words import ATEN

_SLOWED = 0.95  # of the usual clock
_HEAVY = 3e-5  # seconds of matrix work at the full rate: ten calls of it pull the clock down


def merge(paths: Sequence[Path], out: Path) -> None:
    """One table of all rows of several; the machines must be of one kind."""
    headers = [load_header(path) for path in paths]
    names = {header.get("device", {}).get("name") for header in headers}
    if len(names) > 1:
        raise InputError(f"tables of different devices: {', '.join(map(str, sorted(names)))}")
    rows = [row for path in paths for row in load(path)]
    kept = at_full_clock(rows, headers[0].get("ceilings", {}))
    joined = sorted(join(kept), key=_place)
    header = {key: value for key, value in headers[0].items() if key not in ("shard", "ended")}
    header |= {"rows": len(joined), "repeat": repeatability(kept), "clock": _clock(rows)}
    header["left_out"] = {"at a clock the case before pulled down": len(rows) - len(kept)}
    header |= {"ceilings": _highest([h.get("ceilings", {}) for h in headers]), "aten": ATEN}
    save(joined, header, out)


def at_full_clock(rows: Sequence[Row], rates: Mapping[str, float]) -> list[Row]:
    """Rows without those that ran at a clock the case before had pulled down.

    Large matmuls on matrix units draw more power than the board may for long, and the clock
    recovers over tens of milliseconds. That slows them in training too, so they themselves stay.
    """
    clocks = [row.clock for row in rows if not math.isnan(row.clock)]
    if not clocks:
        return list(rows)
    usual = statistics.median(clocks)
    return [row for row in rows if not row.clock < _SLOWED * usual or _draws_power(row, rates)]


def _draws_power(row: Row, rates: Mapping[str, float]) -> bool:
    rate = rates.get(row.case.dtype, math.inf)
    return row.case.dtype != "fp32" and work(row.case).flops / rate > _HEAVY


def join(rows: Sequence[Row]) -> list[Row]:
    """One row a case: the fastest time on the device, the median time of the host.

    What disturbs a kernel (a lower clock, a cold page table) only slows it down, so of several
    measurements the fastest is the kernel's own; the host's noise is part of every step.
    """
    by_case: dict[Case, list[Row]] = {}
    for row in rows:
        by_case.setdefault(row.case, []).append(row)
    return [_joined(several) for several in by_case.values()]


def _joined(several: Sequence[Row]) -> Row:
    timed = [row for row in several if not math.isnan(row.seconds)]
    best = min(timed, key=lambda row: row.seconds) if timed else several[0]
    hosts = [row.host for row in several if not math.isnan(row.host)]
    return replace(best, host=statistics.median(hosts) if hosts else math.nan)


def _highest(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The best rate any run saw, by format."""
    return {name: max(rates.get(name, 0.0) for rates in each) for name in each[0]}


def _clock(rows: Sequence[Row]) -> dict[str, float]:
    """Hertz the device ran at behind each measurement."""
    clocks = [row.clock for row in rows if not math.isnan(row.clock)]
    return (
        {f"p{p}": float(f"{np.percentile(clocks, p):.4g}") for p in (1, 10, 50)} if clocks else {}
    )


def repeatability(rows: Sequence[Row]) -> dict[str, Any]:
    """How far apart two measurements of one case lie, as shares of their mean."""
    times: dict[str, list[float]] = {}
    for row in rows:
        if not math.isnan(row.seconds):
            times.setdefault(str(row.case), []).append(row.seconds)
    apart = [
        abs(t[0] - t[1]) / (t[0] + t[1]) * 2 for t in times.values() if len(t) > 1 and t[0] > 0
    ]
    if not apart:
        return {"cases": 0}
    return {"cases": len(apart), **_percentiles(apart, (50, 75, 90, 99))}


def _percentiles(values: Sequence[float], shares: Sequence[int]) -> dict[str, float]:
    return {f"p{p}": float(f"{np.percentile(values, p):.3g}") for p in shares}


def _place(row: Row) -> tuple[str, str, str, str, str]:
    c = row.case
    return c.op, c.direction, str([(k, f"{v:>12}") for k, v in c.shape]), c.dtype, c.layout
