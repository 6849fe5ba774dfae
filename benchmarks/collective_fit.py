"""The fit behind `fit_collectives.py`: the constants each class of link has, and the best of them.

Each run is reduced to one point an octave of size (the median), so that a source with a thousand
sizes weighs no more than one with twenty, and every system weighs the same. Constants are fitted in
logarithms by robust least squares (soft L1) with a weak pull towards a prior, so that what no run
determines stays at a value with a source. Links are fitted from the inside out: a class uses the
runs it is the outermost link of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from foretell.cost.collective import Link, link_from, nearest, tiers_of, ways
from foretell_lab.validate.collective_runs import Run

Table = dict[str, Any]
Floats = NDArray[np.float64]
PULL = 0.03  # weight of one unit of ln(constant / prior) beside one octave's ln(priced / measured)
SOFT = 0.1  # errors beyond this count linearly
MEGA = 1 << 20


def mode(start: float, hop: float, efficiency: float, **others: float) -> dict[str, float]:
    return {"start": start, "hop": hop, "efficiency": efficiency, **others}


# Where the search begins and where a constant stays that no run determines. Hops of the network are
# those of NCCL's own tuner (graph/tuning.cc, 2.2x: hwLatencies NET, ring and tree, 2.7–14 µs).
NVLINK: Table = {
    "launch": 6e-6,
    "ll": mode(0.5e-6, 0.9e-6, 0.1),
    "ll128": mode(2e-6, 1.2e-6, 0.5, copy=1e11),
    "simple": mode(15e-6, 3.4e-6, 0.8, copy=6e11, fill=5e-6),
    "quick": mode(3e-6, 0.3e-6, 0.1),
    "direct": mode(8e-6, 0.3e-6, 0.75, copy=6e11, fill=5e-6),
    "send": mode(8e-6, 1e-6, 0.8),
}
NETWORK: Table = {
    "launch": 6e-6,
    "tree": 1.0,
    "ll": mode(2e-6, 5e-6, 0.1),
    "ll128": mode(4e-6, 8.5e-6, 0.5),
    "simple": mode(10e-6, 14e-6, 0.9, fill=5e-6),
    "quick": mode(2e-6, 5e-6, 0.1),
    "direct": mode(10e-6, 5e-6, 0.8),
    "send": mode(10e-6, 14e-6, 0.8),
}
# One topology cannot tell a network's start from its hops; more nodes add hops: those are fitted.
STARTS = ("ll.start", "ll128.start", "simple.start", "quick.start", "send.start", "tree")


@dataclass(frozen=True)
class Class:
    """One class of link to fit."""

    name: str
    kind: str
    bandwidth: float
    prior: Table
    source: str
    fixed: tuple[str, ...] = ()  # constants taken as given: `simple.efficiency`


CLASSES = (
    Class("nvswitch-3", "nvswitch", 300e9, NVLINK, "A100 of aiconfigurator, vTrain, vidur"),
    Class(
        "nvswitch-4",
        "nvswitch",
        450e9,
        NVLINK | {"multicast": mode(60e-6, 0.0, 0.65)},
        "H100 of aiconfigurator and vidur",
    ),
    Class("nvlink-2", "nvlink", 100e9, NVLINK, "V100 cube mesh of vTrain; its LL from the A100"),
    Class("nvlink-bridge", "nvlink", 300e9, NVLINK, "bridged A100 and H100 pairs of vidur"),
    Class("pcie", "pcie", 34e9, NVLINK, "two bridged pairs over PCIe 4 and 5, vidur"),
    Class("memory", "memory", 4.2e9, NVLINK, "RTX 2080 Ti without P2P (nccl-tests); A40 of vidur"),
    Class(
        "infiniband",
        "infiniband",
        200e9,
        NETWORK | {"simple": mode(10e-6, 14e-6, 0.98, fill=5e-6), "pair": 2.0},
        "send: H100 of vidur; ring: 192, 96 and 46-48 GB/s of NICs behind PCIe that bound 192, 96"
        " and 48 (NVIDIA/nccl issue 812, nccl-tests 119 and 290); hops: NCCL's tuner; pair: two"
        " nodes of DGX-1 and DGX A100 train at the pace of rings (DLPerf, LiBai, vTrain)",
        (*STARTS, "simple.efficiency"),
    ),
    Class(
        "ethernet",
        "ethernet",
        8e9,
        # Of the rate of one flow a ring makes 0.75 and trees all: vidur's nodes of one A100, and of
        # four and eight from 34 MB. Between those NCCL took the slower of the two over wide ranges
        # of size, so that no fit of the quickest could tell them apart.
        NETWORK | {"simple": mode(10e-6, 14e-6, 0.75, fill=5e-6), "tree": 1.33},
        "A100 nodes through host memory, vidur",
        (*STARTS, "simple.efficiency", "simple.fill"),
    ),
    Class(
        "ethernet-direct",
        "ethernet",
        200e9,
        NETWORK,
        "H100 over GPUDirect-TCPXO, nccl-tests",
        STARTS,
    ),
)


@dataclass(frozen=True)
class Points:
    """One run, one point an octave."""

    run: Run
    bytes: Floats
    seconds: Floats


def points(run: Run) -> Points:
    """The median of every octave of size; single calls only where the wait for others is hidden."""
    bins = np.round(np.log2(np.maximum(run.bytes, 1.0)))
    if run.clock.startswith("kernel") and run.nodes == 1:
        bins[run.bytes < 4 * MEGA] = np.nan
    keep = [bins == b for b in np.unique(bins[~np.isnan(bins)])]
    sizes = np.array([np.median(run.bytes[k]) for k in keep])
    return Points(run, sizes, np.array([np.median(run.seconds[k]) for k in keep]))


def is_well_chosen(run: Run) -> bool:
    """Whether no half octave from 1 MiB took longer than a later one by more than measuring can.

    Otherwise the library took the slower way at some sizes, and a price that takes the quickest
    cannot be fitted to it.
    """
    bins = np.floor(2 * np.log2(np.maximum(run.bytes, 1.0)))
    large = np.unique(bins[run.bytes >= MEGA])
    times = np.array([np.median(run.seconds[bins == b]) for b in large])
    later = np.minimum.accumulate(times[::-1])[::-1]
    return bool(np.all(later >= 0.85 * times))


def seconds(run: Run, sizes: Floats, known: Mapping[str, Link]) -> Floats:
    """What the links in `known` price a run at."""
    tiers = tiers_of(run.levels, lambda level: nearest(level, known))
    laws = ways(run.op, tiers, run.protocols)
    costs = [w.start + w.slope * sizes + w.root * np.sqrt(sizes) for w in laws]
    return np.asarray(np.min(costs, axis=0), np.float64)


def outermost(run: Run, known: Mapping[str, Link]) -> str:
    return tiers_of(run.levels, lambda level: nearest(level, known))[-1].link.name


def constants(spec: Class) -> list[str]:
    """The names of the constants of a class that are searched for."""
    names = []
    for part, value in spec.prior.items():
        inner = (
            [f"{part}.{key}" for key, v in value.items() if v] if isinstance(value, dict) else []
        )
        names += inner or [part]
    return [name for name in names if name not in spec.fixed]


def pack(table: Table, names: Iterable[str]) -> Floats:
    """The constants as numbers free to take any value."""
    return np.array([_free(name, _at(table, name)) for name in names])


def unpack(x: Floats, names: list[str], prior: Table) -> Table:
    """A table from such numbers."""
    table = {k: dict(v) if isinstance(v, dict) else v for k, v in prior.items()}
    for name, value in zip(names, x, strict=True):
        part, _, key = name.rpartition(".")
        (table[part] if part else table)[key] = _bound(name, float(value))
    return table


def _at(table: Table, name: str) -> float:
    part, _, key = name.rpartition(".")
    return float((table[part] if part else table)[key])


def _free(name: str, value: float) -> float:
    if name.endswith("efficiency"):
        return float(np.log(value / (1 - value)))
    return float(np.log(value))


def _bound(name: str, x: float) -> float:
    if name.endswith("efficiency"):
        return float(1 / (1 + np.exp(-x)))
    return float(np.exp(x))


def link(spec: Class, table: Table) -> Link:
    plain = {"kind": spec.kind, "bandwidth": spec.bandwidth, "source": spec.source}
    none = {"sigma": {"ring": (0.0, 0.0), "direct": (0.0, 0.0), "send": (0.0, 0.0)}}
    return link_from(spec.name, none | plain | table)


def weights(data: list[Points]) -> Floats:
    """Such that every system counts the same, and a point counts 1 on average."""
    systems = [(p.run.source, p.run.system) for p in data]
    each: Counter[tuple[str, str]] = Counter()
    for p, system in zip(data, systems, strict=True):
        each[system] += len(p.bytes)
    mean = sum(each.values()) / max(1, len(each))
    return np.sqrt([mean / each[system] for system in systems])


def fit_class(spec: Class, prior: Table, data: list[Points], known: dict[str, Link]) -> Table:
    """The constants of one class that suit its runs best, the other links being known."""
    names = constants(spec)
    begin = pack(prior, names)

    def misfit(x: Floats) -> Floats:
        trial = known | {spec.name: link(spec, unpack(x, names, prior))}
        priced = [seconds(p.run, p.bytes, trial) for p in data]
        errors = [w * np.log(t / p.seconds) for p, w, t in zip(data, weight, priced, strict=True)]
        return np.concatenate([*errors, PULL * (x - begin)])

    weight = weights(data)

    if not data:
        return prior
    is_hop = np.array([name.endswith("hop") for name in names])
    tries = [begin + np.log(times) * is_hop for times in (1.0, 10.0)]
    found = [least_squares(misfit, x, loss="soft_l1", f_scale=SOFT, max_nfev=200) for x in tries]
    return unpack(min(found, key=lambda f: f.cost).x, names, prior)


def fit(data: list[Points]) -> dict[str, Table]:
    """The constants of every class; those inside a node fall back on what nvswitch-3 was found."""
    tables: dict[str, Table] = {spec.name: spec.prior for spec in CLASSES}
    names = {id(p): outermost(p.run, links(tables)) for p in data}
    for spec in CLASSES:
        is_root = spec.prior is not NVLINK or spec is CLASSES[0]
        prior = spec.prior if is_root else tables[CLASSES[0].name]
        mine = [p for p in data if names[id(p)] == spec.name]
        tables[spec.name] = fit_class(spec, prior, mine, links(tables))
    return tables


def links(tables: Mapping[str, Table]) -> dict[str, Link]:
    """Classes of link from their tables."""
    return {spec.name: link(spec, tables[spec.name]) for spec in CLASSES}
