"""Kernels predicted of measured regions (→ `foretell.cost.fused_kernels`), with what they took.

Where as many kernels were predicted as the compiler wrote, each is paired with the one that moves
and visits most nearly as much, and takes its reading; so is a region's only kernel with the
region's. Other regions are left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from foretell.cluster.node import Device
from foretell.cluster.read import devices
from foretell.cost.fused_kernels import Lowered, lowered
from foretell.cost.fused_regions import WALKED, Regions, walked
from foretell_lab.fused.data import Measured

_KNOWN = 0.5  # of a region's time at most, where the rest is taken for its only kernel's
_LATE = 0.02  # added for each place two kernels are apart in the order they run: it decides ties
_FAR = 1.5  # pairs further apart, by the sum of four logarithms, are no pairs


def of_sort(measured: Measured, sort: str) -> Measured:
    """What a sort is fitted to: kernels predicted or as written, or the regions of a CPU."""
    if sort == "gpu":
        return matched(devices()["h200"], measured)
    rows = np.flatnonzero(measured.regions.is_written == (sort == "kernel"))
    return replace(measured.take(rows), again=np.full(len(rows), -1))


def matched(device: Device, measured: Measured) -> Measured:
    """The kernels predicted that have a reading; `again` names a region's first kernel."""
    written = measured.regions.is_written
    rows = np.flatnonzero(~written)
    found = lowered(measured.regions.take(rows), float(device.units))
    seconds = _readings(device, measured, found)
    kept = np.flatnonzero(~np.isnan(seconds))
    of = found.of[kept]
    first = np.searchsorted(of, of)  # kernels come in the order of their regions
    again = np.where(first == np.arange(len(of)), -1, first)
    spread, family = measured.spread[rows][of], measured.family[rows][of]
    ones = np.ones(len(kept), np.int64)
    return Measured(found.regions.take(kept), seconds[kept], spread, ones, family, again)


def shares(measured: Measured) -> Any:
    """What share of its region's time each row takes; 1 where a row is a region's only one."""
    first = np.where(measured.again < 0, np.arange(len(measured)), measured.again)
    total = np.bincount(first, measured.seconds, len(measured))
    return measured.seconds / total[first]


def _readings(device: Device, measured: Measured, found: Lowered) -> Any:
    """Seconds of each kernel predicted; nan where it is unknown."""
    written, of, library = measured.regions.is_written, found.of, found.library
    regions = np.flatnonzero(~written)
    theirs = _figures(device, measured.regions.take(np.flatnonzero(written)))
    mine = _figures(device, found.regions)
    begins = np.searchsorted(of, np.arange(len(regions) + 1))
    wrote = np.searchsorted((np.cumsum(~written) - 1)[written], np.arange(len(regions) + 1))
    read, seconds = measured.seconds[written], np.full(len(of), np.nan)
    for r, row in enumerate(regions.tolist()):
        all_ = np.arange(begins[r], begins[r + 1])
        priced, known = all_[~library[all_]], found.known[all_[library[all_]]]
        true = np.arange(wrote[r], wrote[r + 1])
        if len(priced) == len(true) and len(true):
            a, b = _paired(mine[priced], theirs[true])
            seconds[priced[a]] = read[true[b]]
        elif len(priced) == 1 and not len(true) and _alone(measured, row, known):
            seconds[priced] = measured.seconds[row] - known.sum()
    return seconds


def _alone(measured: Measured, row: int, known: Any) -> bool:
    """Whether a region's time beside what is known of its library's kernels is one kernel's."""
    if not len(known):
        return bool(measured.kernels[row] == 1)
    return bool(known.min() > 0 and known.sum() < _KNOWN * measured.seconds[row])


def _figures(device: Device, kernels: Regions) -> Any:
    w = dict(zip(WALKED, walked(kernels, float(device.units)).region.T, strict=True))
    sizes = [np.log(w[name] + 64) for name in ("read", "written")]
    return np.stack([*sizes, np.log(w["places"] + 1), np.log(w["lone"] + 1) / 4], axis=1)


def _paired(mine: Any, theirs: Any) -> tuple[Any, Any]:
    """Numbers of kernels that belong together."""
    apart = np.abs(mine[:, None] - theirs[None]).sum(axis=2)
    apart += _LATE * np.abs(np.arange(len(mine))[:, None] - np.arange(len(theirs))[None])
    a, b = linear_sum_assignment(apart)
    near = apart[a, b] <= _FAR
    return a[near], b[near]
