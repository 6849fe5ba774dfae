"""Trains the network of `foretell.cost.fused` on measured regions and exports it as arrays.

    python -m foretell.pytorch.fused train --minutes 10

Several networks are trained, each without some families of the training set; what each says of
the families it did not see tells how far the answers err, and the stated spread is scaled to that.
Whole models (`HELD_OUT`) are kept from all of it. In two of five looks a region's own op times are
hidden, so that the network also answers where nobody measured them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foretell.cluster.device import Device
from foretell.cluster.preset import devices
from foretell.cost.fused import networks
from foretell.cost.fused_data import Measured, shipped
from foretell.cost.fused_features import Features, features
from foretell.cost.fused_regions import Regions
from foretell.cost.fusion_class import WORDS
from foretell.pytorch.fused.network import Network

Tensor = Any
BATCH, HIDDEN, RATE = 256, 0.4, 4e-3
# Networks, and the parts of the training families one of which each leaves out.
MEMBERS, FOLDS = 3, 8
EIGHTY = 1.2816  # standard deviations that hold 80 % of a normal distribution


@dataclass(frozen=True)
class Table:
    """All regions as tensors, with and without their ops' own times."""

    regions: Regions
    op: Tensor
    edge: Tensor
    node: tuple[Tensor, Tensor]
    whole: tuple[Tensor, Tensor]
    target: tuple[Tensor, Tensor]  # ln(measured/formula)
    start: Any  # first edge of each region


def table(device: Device, measured: Measured) -> Table:
    """The features of a data set."""
    known = measured.regions
    blind = replace(known, seconds=np.full(len(known.seconds), np.nan))
    both = [features(device, r) for r in (known, blind)]
    of = np.searchsorted(known.first, known.target, "right") - 1
    return Table(
        known,
        torch.tensor(both[0].op),
        _float(both[0].edge),
        (_float(both[0].node), _float(both[1].node)),
        (_float(both[0].whole), _float(both[1].whole)),
        (_target(measured, both[0]), _target(measured, both[1])),
        np.searchsorted(of, np.arange(len(known) + 1)),
    )


def _float(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def _target(measured: Measured, given: Features) -> Tensor:
    return _float(np.log(measured.seconds / given.formula))


def batch(t: Table, rows: Any, hidden: Any) -> tuple[tuple[Tensor, ...], Tensor]:
    """Some regions as one graph, and what is to be said; `hidden` is 1 without own times."""
    first = t.regions.first
    count, edges = np.diff(first)[rows], np.diff(t.start)[rows]
    at, edge_at = (np.concatenate([[0], np.cumsum(c)]) for c in (count, edges))
    nodes = np.repeat(first[rows] - at[:-1], count) + np.arange(at[-1])
    chosen = np.repeat(t.start[rows] - edge_at[:-1], edges) + np.arange(edge_at[-1])
    shift = np.repeat(at[:-1] - first[rows], edges)
    ends = torch.tensor(
        np.stack([t.regions.source[chosen] + shift, t.regions.target[chosen] + shift])
    )
    blind = torch.tensor(hidden) > 0
    node = torch.where(
        torch.tensor(np.repeat(hidden, count))[:, None] > 0, t.node[1][nodes], t.node[0][nodes]
    )
    whole = torch.where(blind[:, None], t.whole[1][rows], t.whole[0][rows])
    of = torch.tensor(np.repeat(np.arange(len(rows)), count))
    target = torch.where(blind, t.target[1][rows], t.target[0][rows])
    return (t.op[nodes], node, ends, t.edge[chosen], whole, of), target


def loss_of(said: Tensor, target: Tensor) -> Tensor:
    """How unlikely the targets are under a Laplace law, and how far off the middle is."""
    spread = said[:, 1].clamp(-5.0, 1.0)
    apart = (target - said[:, 0]).abs()
    middle = torch.nn.functional.huber_loss(said[:, 0], target, delta=0.1)
    return (apart * torch.exp(-spread) + spread).mean() + 3 * middle


def train(
    t: Table, rows: Any, seed: int, seconds: float, before: Mapping[str, Any] | None = None
) -> Network:
    """One network, trained for so long; from weights of an earlier one where there are any."""
    torch.manual_seed(seed)
    chance = np.random.default_rng(seed)
    net = Network(t.whole[0].shape[1])
    net.scale(t.node[0], t.whole[0][rows])
    if before:
        net.begin_from(before)
    optimizer = torch.optim.AdamW(net.parameters(), RATE, weight_decay=0.02)
    begun, order = time.time(), np.zeros(0, int)
    while (done := (time.time() - begun) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = (RATE / 3 if before else RATE) * _rate(done)
        if len(order) < BATCH:
            order = chance.permutation(rows)
        some, order = order[:BATCH], order[BATCH:]
        given, target = batch(t, some, (chance.random(len(some)) < HIDDEN).astype(int))
        loss = loss_of(net(*given), target)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 2.0)
        optimizer.step()
    net.eval()
    return net


def _rate(done: float) -> float:
    """The share of the learning rate after a share of the time: up in a tenth, down by a cosine."""
    return min(done / 0.1, 0.5 + 0.5 * math.cos(math.pi * done)) + 1e-3


@torch.no_grad()
def said(net: Network, t: Table, rows: Any, hidden: int) -> tuple[Any, Any, Any]:
    """Middle, spread and target of some regions."""
    parts = []
    for i in range(0, len(rows), 256):
        some = rows[i : i + 256]
        given, target = batch(t, some, np.full(len(some), hidden))
        parts.append(torch.cat([net(*given), target[:, None]], 1))
    found = torch.cat(parts).numpy()
    return found[:, 0], np.exp(found[:, 1].clip(-5.0, 1.0)), found[:, 2]


def of_sort(measured: Measured, sort: str) -> Measured:
    """The regions of a data set, or its kernels as written."""
    rows = np.flatnonzero(measured.regions.is_written == (sort == "kernel"))
    return Measured(
        measured.regions.take(rows),
        measured.seconds[rows],
        measured.spread[rows],
        measured.kernels[rows],
        measured.family[rows],
        np.full(len(rows), -1),
    )


def folds(measured: Measured, rows: Any) -> list[Any]:
    """Rows each network does not see: whole families, and a share of what was drawn."""
    families = sorted(set(measured.family[rows]) - {"drawn"})
    drawn = np.flatnonzero(measured.family == "drawn")
    found = []
    for member in range(MEMBERS):
        out = np.isin(measured.family, families[member::FOLDS])
        out[drawn[member::FOLDS]] = True
        found.append(rows[out[rows]])
    return found


def trained(
    device: Device, measured: Measured, minutes: float, note: Callable[[str], None],
    before: tuple[Mapping[str, Any], ...] = (),
) -> tuple[dict[str, Any], dict[str, float]]:  # fmt: skip
    """Arrays to ship, and the figures found on the way."""
    t, rows = table(device, measured), np.flatnonzero(~measured.held_out)
    arrays: dict[str, Any] = {}
    apart = []
    for member, out in enumerate(folds(measured, rows)):
        start = before[member % len(before)] if before else None
        net = train(t, np.setdiff1d(rows, out), member, 60 * minutes / MEMBERS, start)
        for hidden in (0, 1):
            middle, spread, target = said(net, t, out, hidden)
            apart.append(
                np.stack(
                    [np.full(len(out), hidden), (target - middle) / spread, target - middle], 1
                )
            )
        arrays |= {f"{member}/{name}": value for name, value in net.exported().items()}
        error = np.abs(np.exp(apart[-2][:, 2]) - 1)
        near = np.mean(error <= 0.14)
        note(f"network {member}: {np.median(error):.1%}, {near:.1%} near, on families not seen")
    found = np.concatenate(apart)
    scales = [np.quantile(np.abs(found[found[:, 0] == h, 1]), 0.8) / EIGHTY for h in (0, 1)]
    arrays["scale"] = np.array(scales, np.float32)
    arrays["words"] = np.array(WORDS)
    return arrays, {"scale_known": float(scales[0]), "scale_blind": float(scales[1])}


def write(
    path: Path, sort: str, minutes: float, note: Callable[[str], None], *, onward: bool
) -> None:
    """Train on the H200 set of the package and write what ships: large arrays in half precision."""
    torch.set_num_threads(1)
    before = networks(sort)[0] if onward else ()
    mine = of_sort(shipped("h200"), sort)
    arrays, found = trained(devices()["h200"], mine, minutes, note, before)
    note(", ".join(f"{name} {value:.3f}" for name, value in found.items()))
    small = {
        n: v.astype(np.float16) if v.size > 200 and n != "words" else v for n, v in arrays.items()
    }
    np.savez_compressed(path, **small)
