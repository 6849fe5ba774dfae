"""Boosted trees in plain numpy: squared error, histograms of quantiles, complete trees.

`train` fits ln(measured/formula); `trained` does it for every device that was measured densely and
keeps a model only where it beats the formula on ranges of shape that neither training saw.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from kernel_fit import take
from kernel_knobs import State
from numpy.typing import NDArray

from foretell.cost import kernel
from foretell.cost.price import SIZES, Trees, features, logs
from foretell_lab.validate import kernel_clocks
from foretell_lab.validate.kernel_devices import device_named
from foretell_lab.validate.kernel_truth import Measured
from foretell_lab.validate.kernels import EIGHTY

Floats = NDArray[np.float64]
DEPTH, TREES, RATE, BINS, LEAST = 5, 80, 0.1, 48, 20
ENOUGH = 1500  # readings a device needs
VISIBLE = 4.0  # times the host's part a reading must last, or the clock's error is learned instead


def train(rows: Floats, target: Floats, box: tuple[Floats, Floats]) -> Trees:
    """Trees that add up to `target`; each corrects what those before left."""
    edges = [_edges(column) for column in rows.T]
    bins = np.stack(
        [np.searchsorted(e, c, side="left") for e, c in zip(edges, rows.T, strict=True)], 1
    )
    left = target.copy()
    grown = []
    for _ in range(TREES):
        feature, cut, node = _grow(bins, left)
        leaf = _leaves(left, node)
        left -= leaf[node]
        above = np.array(
            [
                edges[f][c] if c < len(edges[f]) else np.inf
                for f, c in zip(feature, cut, strict=True)
            ]
        )
        grown.append((feature, above, leaf))
    parts = [np.stack(x) for x in zip(*grown, strict=True)]
    return Trees(
        parts[0].astype(np.int16),
        parts[1].astype(np.float32),
        parts[2].astype(np.float32),
        *box,
        0.0,
    )


def _edges(column: Floats) -> Floats:
    """Cuts between quantiles, at values that are exact as float32."""
    cuts = np.unique(np.quantile(column, np.linspace(0, 1, BINS + 1)[1:-1]))
    return np.unique(cuts.astype(np.float32).astype(float))


def _grow(
    bins: NDArray[np.intp], left: Floats
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
    """One tree: feature and cut of every inner node, and the leaf of every row."""
    features_, cuts = [], []
    node = np.zeros(len(left), np.intp)
    for level in range(DEPTH):
        width = 1 << level
        feature, cut = _splits(bins, left, node, width)
        features_.append(feature)
        cuts.append(cut)
        node = 2 * node + (bins[np.arange(len(left)), feature[node]] > cut[node])
    return np.concatenate(features_), np.concatenate(cuts), node


def _splits(
    bins: NDArray[np.intp], left: Floats, node: NDArray[np.intp], width: int
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The best cut of each node of a level: the one that takes most from the squared error."""
    best = np.zeros(width)
    feature, cut = np.zeros(width, np.intp), np.full(width, BINS, np.intp)
    for f in range(bins.shape[1]):
        slot = node * BINS + bins[:, f]
        count = np.bincount(slot, minlength=width * BINS).reshape(width, BINS).cumsum(1)
        total = np.bincount(slot, left, width * BINS).reshape(width, BINS).cumsum(1)
        n, s = count[:, -1:], total[:, -1:]
        with np.errstate(divide="ignore", invalid="ignore"):
            gain = total**2 / count + (s - total) ** 2 / (n - count) - s**2 / n
        gain = np.where((count >= LEAST) & (n - count >= LEAST), gain, 0.0)
        at = gain.argmax(1)
        value = gain[np.arange(width), at]
        better = value > best
        best[better], feature[better], cut[better] = value[better], f, at[better]
    return feature, cut


def _leaves(left: Floats, node: NDArray[np.intp]) -> Floats:
    count = np.bincount(node, minlength=1 << DEPTH)
    total = np.bincount(node, left, 1 << DEPTH)
    return (RATE * total / (count + 5.0)).astype(np.float32).astype(float)


def trained(
    state: State, found: Sequence[Measured]
) -> Iterator[tuple[str, Trees, dict[str, object]]]:
    """Name, trees and figures of every device, op and format with enough readings."""
    groups: dict[str, list[Measured]] = {}
    for m in found:
        device = device_named(m.device)
        if device is not None and m.op in SIZES and m.ops is None and len(m) == len(m.reading):
            groups.setdefault(f"{device.name} {m.op} {m.dtype}", []).append(m)
    for name, mine in sorted(groups.items()):
        seen = [take(m, np.flatnonzero(m.seconds > VISIBLE * _hosted(state, m))) for m in mine]
        seen = [m for m in seen if len(m) >= ENOUGH]
        if seen:
            yield name, *_one(state, name, seen)


def _hosted(state: State, m: Measured) -> float:
    """Seconds of each reading that are the host's, not the kernel's."""
    if m.source != "neusight":
        return 0.0
    return state[1][f"share_{m.call}"] * kernel_clocks.floor(state[1], m)


def _one(state: State, name: str, mine: Sequence[Measured]) -> tuple[Trees, dict[str, object]]:
    parts = [_columns(state, m) for m in mine]
    rows, target, formula, sizes = (np.concatenate(x) for x in zip(*parts, strict=True))
    box = sizes.min(0), sizes.max(0)
    before, after = [], []
    for band in _bands(sizes):
        trees = train(rows[~band], target[~band], box)
        before.append(formula[band])
        after.append(target[band] - trees.predict(rows[band]))
    figures: dict[str, object] = {"name": name, "readings": len(target)}
    figures["left_out"] = sum(map(len, after))
    for key, log in (("formula", np.concatenate(before)), ("learned", np.concatenate(after))):
        errors = np.abs(np.expm1(-log))
        figures[key] = round(float(np.median(errors)), 4)
        figures[f"{key}_p90"] = round(float(np.quantile(errors, 0.9)), 4)
    sigma = float(np.quantile(np.abs(np.concatenate(after)), 0.8)) / EIGHTY
    return replace(train(rows, target, box), sigma=max(0.05, sigma)), figures


def _columns(state: State, m: Measured) -> tuple[Floats, Floats, Floats, Floats]:
    """Features, what to learn, the formula's own error (as timed, cold) and the sizes."""
    device = device_named(m.device)
    assert device is not None
    took = m.seconds - _hosted(state, m)
    warm, cold = (
        kernel.seconds(device, m.op, m.dtype, m.shape, constants=state[0], burst=burst).seconds
        for burst in (0.0, kernel_clocks.burst(state[1], m))
    )
    rows = features(device, m.op, m.shape, warm)
    return rows, np.log(took / warm), np.log(took / cold), logs(m.op, m.shape)


def _bands(sizes: Floats) -> Iterator[NDArray[np.bool_]]:
    """Ranges of one size after another, inside what remains: a tenth of the readings each."""
    for column in sizes.T:
        if np.unique(column).size < 8:
            continue
        for low in (0.3, 0.6):
            first, last = np.quantile(column, (low, low + 0.1))
            band = (column >= first) & (column <= last)
            if 0.02 < band.mean() < 0.4:
                yield band
