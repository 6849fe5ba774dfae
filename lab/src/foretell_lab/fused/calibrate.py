"""Fits the formula of `foretell.cost.fused` to measured regions.

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
from foretell.cluster.read import devices
from foretell.cost.fused import terms, total_seconds
from foretell.cost.fused_regions import WALKED, WEIGHT, WORDS, Regions, is_busy, walked
from foretell_lab.fused import data as fused_data
from foretell_lab.fused.data import Measured
from foretell_lab.fused.matched import of_sort

# First guess, least and most of each constant: shares of the device's own rates.
GUESS = {
    "start": (0.6, 0.1, 8.0), "more": (0.8, 0.1, 2.0), "stream": (0.9, 0.3, 1.0),
    "latency": (0.5, 0.02, 4.0), "ramp": (0.06, 0.005, 0.5), "keep": (0.8, 0.1, 2.0),
    "keep_written": (0.5, 0.1, 2.0), "again": (0.8, 0.1, 2.0), "steep": (2.5, 1.2, 6.0),
    "cache": (2.2, 1.2, 6.0), "join": (3.0, 1.2, 8.0), "rate": (50.0, 0.2, 400.0),
    "half": (1.0, 0.01, 20.0), "odd": (8.0, 0.1, 100.0), "turned": (0.4, 0.01, 5.0),
    "lone": (0.1, 0.001, 5.0), "overlap": (1.8, 1.2, 6.0), "peak": (0.6, 0.2, 1.0),
}  # fmt: skip
_MOST = 5000  # rows that are fitted to, drawn at random: more change nothing and take longer


def fit(
    device: Device, measured: Measured, rows: Any, steps: int = 400
) -> tuple[dict[str, float], dict[str, float]]:
    """Constants and operations by op that price the rows best."""
    regions = measured.regions.take(rows)
    walk = torch.tensor(walked(regions, float(device.units)).region)
    counts = torch.tensor(places_by_op(regions, device))
    target = torch.tensor(measured.seconds[rows])
    guess, low, high = (torch.tensor(np.log(v)) for v in zip(*GUESS.values(), strict=True))
    values, heavy = (
        torch.nn.Parameter(guess.clone()),
        torch.nn.Parameter(torch.tensor(np.log(WEIGHT))),
    )
    first = heavy.detach().clone()
    optimizer = torch.optim.Adam([values, heavy], lr=0.03)
    for _ in range(steps):
        priced = _seconds(device, walk, counts @ torch.exp(heavy), values)
        apart = torch.log(priced / target)
        loss = 100 * torch.nn.functional.huber_loss(apart, torch.zeros_like(apart), delta=0.08)
        loss = loss + 0.002 * ((heavy - first) ** 2).sum() + 0.01 * ((values - guess) ** 2).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            values.clamp_(low, high)
    constants = {
        n: float(f"{v:.4g}") for n, v in zip(GUESS, torch.exp(values).tolist(), strict=True)
    }
    often = (counts > 0).sum(0) >= 10
    heavies = {
        w: round(v, 2) for w, v, o in zip(WORDS, torch.exp(heavy).tolist(), often, strict=True) if o
    }
    return constants, heavies


def places_by_op(regions: Regions, device: Device) -> Any:
    """How many places each op visits in each region."""
    visits = walked(regions, float(device.units)).node[:, 0]
    counts = np.zeros((len(regions), len(WORDS)))
    np.add.at(counts, (regions.region, regions.op), regions.looped * visits * is_busy(regions))
    return counts


def _seconds(device: Device, walk: Any, work: Any, values: Any) -> Any:
    """The formula on tensors; a test holds it equal to the shipped one."""
    c: Mapping[str, Any] = dict(zip(GUESS, torch.exp(values), strict=True))
    w = dict(zip(WALKED, walk.T, strict=True))
    stream, l2 = device.memory_bandwidth * c["stream"], device.l2

    def missed(size: Any, kept: Any) -> Any:
        return 1 - 1 / (1 + (size / kept) ** c["steep"])

    fresh = w["fresh"] * missed(w["fresh"] + 0.5 * w["written"] + 1, c["keep"] * l2)
    written = w["written"] * missed(w["written"] + 0.5 * w["fresh"] + 1, c["keep_written"] * l2)
    again = w["reread"] * missed(w["read"] + w["written"] + 1, c["again"] * l2)
    cold = w["read"] - w["fresh"] + fresh + written + again + c["turned"] * w["turned"] + 1
    moved = w["read"] + w["written"] + w["reread"] + 1
    both = (cold / stream) ** c["join"] + (moved / (stream * c["cache"])) ** c["join"]
    memory = device.floor * c["latency"] * (1 - torch.exp(-moved / (c["ramp"] * l2)))
    memory = memory + both ** (1 / c["join"])
    compute = work + c["half"] * w["halves"] + c["odd"] * w["odd"]
    compute = compute / (device.units * device.clock * c["rate"]) + 1e-12
    lone = w["lone"] * c["lone"] / device.clock + 1e-12
    p = c["overlap"]
    busy = (memory**p + compute**p + lone**p) ** (1 / p)
    kernels = torch.clamp(w["kernels"], min=1.0)
    start = device.floor * c["start"] * (1 + c["more"] * (kernels - 1)) * (w["kernels"] > 0)
    plain = {name: float(value) for name, value in c.items()}
    product = terms(device, dict(zip(WALKED, walk.numpy().T, strict=True)), plain)["product"]
    return start + busy + torch.tensor(product)


def write(path: Path) -> list[str]:
    """Fit the H200 set of the package and write the constants that ship; what was found."""
    torch.set_num_threads(1)
    measured, device = fused_data.shipped("h200"), devices()["h200"]
    text, lines = _HEAD, []
    for kind in ("gpu", "kernel"):
        mine = of_sort(measured, kind)
        rows = np.flatnonzero(~mine.held_out)
        few = np.random.default_rng(0).choice(rows, min(_MOST, len(rows)), replace=False)
        constants, weights = fit(device, mine, few)
        sigma = _sigma(device, mine, rows, constants, weights)
        lines.append(f"{kind}: {len(rows)} kernels, sigma {sigma:.3f}")
        text += f"[{kind}.constants]\n" + _pairs(constants)
        text += f'\n[{kind}.sigma]\nfitted_on = "{device.name}"\nseen = {sigma:.3f}\n'
        text += f"\n[{kind}.weights]\n" + _pairs(weights) + "\n"
    path.write_text(text.rstrip() + "\n")
    return lines


_HEAD = """# Constants of `foretell.cost.fused`, fitted to the
# regions in fused_h200.xz (models kept out not used); see
# docs/concepts/fused.md. Made by `python -m foretell_lab.fused fit`.
# `weights` are elementary operations of one place, against an addition.

"""


def _pairs(values: Mapping[str, float]) -> str:
    return "".join(f"{name} = {float(value)!r}\n" for name, value in values.items())


def _sigma(
    device: Device, measured: Measured, rows: Any, constants: Mapping[str, float],
    weights: Mapping[str, float],
) -> float:  # fmt: skip
    """The spread whose 80 % interval holds 80 % of the rows."""
    by_op = np.array([weights.get(w, g) for w, g in zip(WORDS, WEIGHT, strict=True)])
    walk = walked(measured.regions.take(rows), float(device.units), by_op)
    parts = terms(device, dict(zip(WALKED, walk.region.T, strict=True)), constants)
    priced = total_seconds(parts, constants, False)
    return float(np.quantile(np.abs(np.log(priced / measured.seconds[rows])), 0.8) / 1.2816)
