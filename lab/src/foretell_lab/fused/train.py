"""Trains the network of `foretell.cost.fused` on measured regions and exports it as arrays.

    python -m foretell_lab.fused train --minutes 10

Several networks are trained, each without some families of the training set; what each says of
the families it did not see tells how far the answers err, and the stated spread is scaled to that;
then it is shown those too.
Whole models (`HELD_OUT`) are kept from all of it. In two of five looks a region's own op times are
hidden, so that the network also answers where nothing was measured. On a CPU there are few samples
and they scatter: its networks are held back, and their corrections scaled by what was worth most on
the families each had not seen (→ `shrunk`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foretell.cluster.node import Device
from foretell.cluster.read import devices
from foretell.cost.fused import Features, features, networks
from foretell.cost.fused_regions import WORDS, Regions
from foretell_lab.fused.data import Measured, shipped
from foretell_lab.fused.matched import of_sort, shares
from foretell_lab.fused.network import Network
from foretell_lab.fused.tuning import one_core

Tensor = Any
HIDDEN = 0.4
OTHER = WORDS.index("other")
LEAST = 0.15  # the least a kernel counts, against one that is a region by itself
EIGHTY = 1.2816  # standard deviations that hold 80 % of a normal distribution


@dataclass(frozen=True)
class Recipe:
    """How networks are trained."""

    members: int = 8
    folds: int = 8  # the parts of the training families one of which each network leaves out
    dropout: float = 0.1
    forget: float = 0.1  # the share of ops whose name is hidden at each look: it meets new ones
    decay: float = 0.02
    batch: int = 256
    rate: float = 4e-3
    steps: int = 0  # where not as many as the time allows
    whole: int = 7000  # steps at the end, in which a network sees the families it had left out
    shrinks: bool = False


WRITTEN = Recipe(members=3, folds=6)  # kernels as the compiler wrote them
CPU = Recipe(
    members=4,
    folds=4,
    dropout=0.3,
    forget=0.0,
    decay=0.1,
    batch=128,
    steps=300,
    whole=0,
    shrinks=True,
)


@dataclass(frozen=True)
class Table:
    """All regions as tensors, with and without their ops' own times."""

    regions: Regions
    op: Tensor
    edge: Tensor
    node: tuple[Tensor, Tensor]
    whole: tuple[Tensor, Tensor]
    target: tuple[Tensor, Tensor]  # ln(measured/formula)
    weight: Tensor  # what a kernel's error counts: by its share of its region's time
    start: Any  # first edge of each region


def table(device: Device, measured: Measured) -> Table:
    """The features of a data set."""
    known = measured.regions
    blind = replace(known, seconds=np.full(len(known.seconds), np.nan))
    both = [features(device, r) for r in (known, blind)]
    of = np.searchsorted(known.first, known.target, "right") - 1
    return Table(
        known,
        torch.tensor(both[0].op, device=_where()),
        _float(both[0].edge),
        (_float(both[0].node), _float(both[1].node)),
        (_float(both[0].whole), _float(both[1].whole)),
        (_target(measured, both[0]), _target(measured, both[1])),
        _weight(measured),
        np.searchsorted(of, np.arange(len(known) + 1)),
    )


def _float(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=_where())


def _where() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _target(measured: Measured, given: Features) -> Tensor:
    return _float(np.log(measured.seconds / given.formula))


def _weight(measured: Measured) -> Tensor:
    some = np.maximum(shares(measured), LEAST)
    return _float(some / some.mean())


def batch(t: Table, rows: Any, hidden: Any) -> tuple[tuple[Tensor, ...], Tensor]:
    """Some regions as one graph, and what is to be said; `hidden` is 1 without own times."""
    first = t.regions.first
    count, edges = np.diff(first)[rows], np.diff(t.start)[rows]
    at, edge_at = (np.concatenate([[0], np.cumsum(c)]) for c in (count, edges))
    nodes = np.repeat(first[rows] - at[:-1], count) + np.arange(at[-1])
    chosen = np.repeat(t.start[rows] - edge_at[:-1], edges) + np.arange(edge_at[-1])
    shift = np.repeat(at[:-1] - first[rows], edges)
    ends = np.stack([t.regions.source[chosen] + shift, t.regions.target[chosen] + shift])
    where, blind = t.op.device, torch.tensor(hidden, device=t.op.device) > 0
    of = torch.tensor(np.repeat(np.arange(len(rows)), count), device=where)
    node = torch.where(blind[of][:, None], t.node[1][nodes], t.node[0][nodes])
    whole = torch.where(blind[:, None], t.whole[1][rows], t.whole[0][rows])
    target = torch.where(blind, t.target[1][rows], t.target[0][rows])
    wired = torch.tensor(ends, device=where)
    return (t.op[nodes], node, wired, t.edge[chosen], whole, of), target


def loss_of(said: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """How unlikely the targets are under a Laplace law, and how far off the middle is."""
    spread = said[:, 1].clamp(-5.0, 1.0)
    apart = (target - said[:, 0]).abs()
    middle = torch.nn.functional.huber_loss(said[:, 0], target, delta=0.1, reduction="none")
    return (weight * (apart * torch.exp(-spread) + spread + 3 * middle)).mean()


def train(
    t: Table, rows: Any, seed: int, seconds: float, before: Mapping[str, Any] | None = None,
    recipe: Recipe | None = None,
) -> Network:  # fmt: skip
    """One network, trained for so long; from weights of an earlier one where there are any."""
    torch.manual_seed(seed)
    chance, recipe = np.random.default_rng(seed), recipe or Recipe()
    net = Network(t.whole[0].shape[1], dropout=recipe.dropout)
    net.to(t.op.device).scale(t.node[0], t.whole[0][rows])
    if before:
        net.begin_from(before)
    optimizer = torch.optim.AdamW(net.parameters(), recipe.rate, weight_decay=recipe.decay)
    order = np.zeros(0, int)
    for done in _progress(seconds, recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = (recipe.rate / 3 if before else recipe.rate) * _rate(done)
        if len(order) < recipe.batch:
            order = chance.permutation(rows)
        some, order = order[: recipe.batch], order[recipe.batch :]
        (op, *rest), target = batch(t, some, (chance.random(len(some)) < HIDDEN).astype(int))
        op = torch.where(torch.rand(len(op), device=op.device) < recipe.forget, OTHER, op)
        loss = loss_of(net(op, *rest), target, t.weight[some])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 2.0)
        optimizer.step()
    net.eval()
    return net


def _progress(seconds: float, steps: int) -> Iterator[float]:
    """The share that is done before each step: of the steps, or of the time."""
    if steps:
        yield from (step / steps for step in range(steps))
        return
    begun = time.time()
    while (done := (time.time() - begun) / seconds) < 1:
        yield done


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
    found = torch.cat(parts).cpu().numpy()
    return found[:, 0], np.exp(found[:, 1].clip(-5.0, 1.0)), found[:, 2]


def folds(measured: Measured, rows: Any, recipe: Recipe | None = None) -> list[Any]:
    """Rows each network does not see: whole families, and a share of what was drawn."""
    families = sorted(set(measured.family[rows]) - {"drawn"})
    drawn = np.flatnonzero(measured.family == "drawn")
    found, how = [], recipe or Recipe()
    for member in range(how.members):
        out = np.isin(measured.family, families[member :: how.folds])
        out[drawn[member :: how.folds]] = True
        found.append(rows[out[rows]])
    return found


def trained(
    device: Device, measured: Measured, minutes: float, note: Callable[[str], None],
    before: tuple[Mapping[str, Any], ...] = (), recipe: Recipe | None = None,
) -> tuple[dict[str, Any], dict[str, float]]:  # fmt: skip
    """Arrays to ship, and the figures found on the way."""
    t, how = table(device, measured), recipe or Recipe()
    made = []
    for number in range(how.members):
        start = before[number % len(before)] if before else None
        made.append(member(t, measured, number, 60 * minutes / how.members, start, how))
        note(f"network {number}: {_errors(made[-1][1][0])}, on families not seen")
    return together(made, how, note)


def member(
    t: Table, measured: Measured, number: int, seconds: float,
    start: Mapping[str, Any] | None, how: Recipe,
) -> tuple[dict[str, Any], dict[int, Any]]:  # fmt: skip
    """One network's weights, and of families it did not see middle, spread and target."""
    rows = np.flatnonzero(~measured.held_out)
    out = folds(measured, rows, how)[number]
    net = train(t, np.setdiff1d(rows, out), number, seconds, start, how)
    predictions = {hidden: np.stack(said(net, t, out, hidden)) for hidden in (0, 1)}
    if how.whole:
        net = train(t, rows, number, seconds, net.exported(), replace(how, steps=how.whole))
    return {f"{number}/{name}": value for name, value in net.exported().items()}, predictions


def together(
    made: Sequence[tuple[dict[str, Any], dict[int, Any]]], how: Recipe, note: Callable[[str], None]
) -> tuple[dict[str, Any], dict[str, float]]:
    """The arrays of all networks, their spreads scaled to what they err on families not seen."""
    arrays = {name: value for weights, _ in made for name, value in weights.items()}
    both = [
        np.concatenate([predictions[hidden] for _, predictions in made], 1) for hidden in (0, 1)
    ]
    share = shrunk(both[0]) if how.shrinks else 1.0
    _scale(arrays, share)
    note(f"a share of {share:.2f} of each: {_errors(both[0], share)}; none: {_errors(both[0], 0)}")
    scales = [
        np.quantile(np.abs((target - share * middle) / spread), 0.8) / EIGHTY
        for middle, spread, target in both
    ]
    arrays |= {"scale": np.array(scales, np.float32), "words": np.array(WORDS)}
    return arrays, {"scale_known": float(scales[0]), "scale_blind": float(scales[1])}


def _errors(predictions: Any, share: float = 1.0) -> str:
    middle, _, target = predictions
    error = np.abs(np.exp(share * middle - target) - 1)
    return f"{np.median(error):.1%}, {np.mean(error <= 0.14):.1%} near"


def shrunk(predictions: Any) -> float:
    """The share of the corrections that leaves the least error on families not seen."""
    middle, _, target = predictions
    shares = np.linspace(0.0, 1.0, 21)
    return float(shares[np.argmin([np.abs(target - s * middle).mean() for s in shares])])


def _scale(arrays: dict[str, Any], share: float) -> None:
    """Have networks correct by a share of what they learned."""
    for name, value in arrays.items():
        if name.endswith(("/out.weight", "/out.bias")):
            value[0] *= share


def write(
    path: Path, sort: str, minutes: float, steps: int, note: Callable[[str], None], begin: str
) -> None:
    """Train on a set of the package and write what ships: large arrays in half precision.

    `begin` names the sort of networks whose weights are taken over; none where it is empty.
    Each network takes so many `steps`, or where none are named as many as the time allows.
    """
    torch.set_num_threads(1)
    before = networks(begin)[0] if begin else ()
    device = one_core() if sort == "cpu" else devices()["h200"]
    mine = of_sort(shipped("cpu" if sort == "cpu" else "h200"), sort)
    recipe = {"cpu": CPU, "kernel": WRITTEN}.get(sort, Recipe())
    recipe = replace(recipe, steps=steps or recipe.steps)
    arrays, found = trained(device, mine, minutes, note, before, recipe)
    note(", ".join(f"{name} {value:.3f}" for name, value in found.items()))
    save(arrays, path)


def save(arrays: Mapping[str, Any], path: Path) -> None:
    """What ships: large arrays in half precision."""
    small = {
        n: v.astype(np.float16) if v.size > 200 and n != "words" else v for n, v in arrays.items()
    }
    np.savez_compressed(path, **small)
