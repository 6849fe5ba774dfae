"""Fits the formula of `foretell.cost.fused` to regions measured on one core.

Constants and the operations each op counts for are found together by descent on the Huber loss of
ln(priced/measured); both are held near their first guesses, so that an op met rarely keeps its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foretell.cluster.node import Device
from foretell.cost.fused import host_terms, total_seconds
from foretell.cost.fused_regions import HOST_WEIGHT, NESTED, WORDS, Regions, is_busy, nested
from foretell_lab.fused import data as fused_data
from foretell_lab.fused.data import Measured
from foretell_lab.fused.tuning import one_core

_OFTEN = 2  # regions an op must be met in for its fitted operations to ship
_EIGHTY = 1.2816  # standard deviations that hold 80 % of a normal distribution

# First guess, least and most of each constant, in the order a fit packs them: shares of the
# device's rates; `start` and `more` of its floor, `row` in cycles.
GUESS = {
    "start": (0.8, 0.1, 4.0), "more": (0.05, 0.001, 1.0), "stream": (0.7, 0.2, 2.0),
    "latency": (0.2, 0.01, 4.0), "ramp": (2e-3, 1e-5, 1e-1), "near": (0.1, 0.02, 0.6),
    "mid": (0.3, 0.05, 0.9), "keep": (0.6, 0.1, 2.0), "steep": (2.0, 1.0, 6.0),
    "store": (1.5, 0.3, 4.0), "turned": (0.4, 0.01, 10.0), "mapped": (2.0, 0.01, 20.0),
    "rate": (8.0, 0.5, 60.0), "half": (0.5, 0.01, 20.0), "odd": (1.0, 0.01, 20.0),
    "asked": (30.0, 0.1, 400.0), "told": (80.0, 0.1, 1000.0), "joined": (8.0, 0.1, 400.0),
    "given": (0.1, 0.001, 1.0),
    "columns": (1.0, 0.01, 40.0), "chained": (2.0, 0.01, 40.0), "row": (10.0, 0.1, 200.0),
    "overlap": (1.6, 1.0, 6.0),
}  # fmt: skip


def fit(
    device: Device, measured: Measured, rows: Any, steps: int = 500
) -> tuple[dict[str, float], dict[str, float]]:
    """Constants and operations by op that price the rows best."""
    regions = measured.regions.take(rows)
    walk = torch.tensor(nested(regions, HOST_WEIGHT).region)
    counts = torch.tensor(places_by_op(regions))
    target = torch.tensor(measured.seconds[rows])
    guess, low, high = (torch.tensor(np.log(v)) for v in zip(*GUESS.values(), strict=True))
    first = torch.tensor(np.log(HOST_WEIGHT))
    values, heavy = torch.nn.Parameter(guess.clone()), torch.nn.Parameter(first.clone())
    optimizer = torch.optim.Adam([values, heavy], lr=0.04)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.04 * (1 - step / steps) + 0.002
        apart = torch.log(_seconds(device, walk, counts @ torch.exp(heavy), values) / target)
        loss = 100 * torch.nn.functional.huber_loss(apart, torch.zeros_like(apart), delta=0.1)
        loss = loss + 0.001 * ((heavy - first) ** 2).sum() + 0.005 * ((values - guess) ** 2).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            values.clamp_(low, high)
    often = (counts > 0).sum(0) >= _OFTEN
    found = zip(GUESS, torch.exp(values).tolist(), strict=True)
    by_op = zip(WORDS, torch.exp(heavy).tolist(), often, strict=True)
    return {n: float(f"{v:.4g}") for n, v in found}, {w: round(v, 3) for w, v, o in by_op if o}


def places_by_op(regions: Regions) -> Any:
    """How many places each op visits in each region."""
    visits = nested(regions, HOST_WEIGHT).node[:, 0] * is_busy(regions)
    counts = np.zeros((len(regions), len(WORDS)))
    np.add.at(counts, (regions.region, regions.op), regions.looped * visits)
    return counts


def _seconds(device: Device, walk: Any, work: Any, values: Any) -> Any:
    c = dict(zip(GUESS, torch.exp(values), strict=True))
    w = dict(zip(NESTED, walk.T, strict=True)) | {"work": work}
    return total_seconds(host_terms(device, w, c), c, True)


def write(path: Path, measured: Measured | None = None) -> str:
    """Fit the CPU set of the package and write the constants that ship; what was found."""
    torch.set_num_threads(1)
    found, device = measured or fused_data.shipped("cpu"), one_core()
    rows = np.flatnonzero(~found.held_out)
    constants, weights = fit(device, found, rows)
    by_op = np.array([weights.get(w, g) for w, g in zip(WORDS, HOST_WEIGHT, strict=True)])
    w = dict(zip(NESTED, nested(found.regions.take(rows), by_op).region.T, strict=True))
    priced = total_seconds(host_terms(device, w, constants), constants, True)
    apart = np.abs(np.log(priced / found.seconds[rows]))
    sigma = float(np.quantile(apart, 0.8) / _EIGHTY)
    text = f'{_HEAD}[constants]\n{_pairs(constants)}\n[sigma]\nfitted_on = "{device.name}"\n'
    path.write_text(f"{text}seen = {sigma:.3f}\n\n[weights]\n{_pairs(weights)}")
    return f"cpu: {len(rows)} regions, sigma {sigma:.3f}, median {np.median(np.expm1(apart)):.1%}"


_HEAD = """# Constants of `foretell.cost.fused`, fitted to the regions in
# fused_cpu.npz (models kept out not used); see docs/concepts/fused.md.
# Made by `python -m foretell_lab.fused fit --cpu`.
# `weights` are elementary operations of one place, against an addition.

"""


def _pairs(values: Mapping[str, float]) -> str:
    return "".join(f"{name} = {float(value)!r}\n" for name, value in values.items())
