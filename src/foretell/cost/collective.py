"""What a collective costs: seconds, the way it is run, and how far to trust the figure.

`price(op, bytes, levels)` takes the quickest of the ways in `foretell.cost.nccl`, as NCCL's own
tuner means to do, and answers from the moment the last rank arrives. What `bytes` counts, per rank:

    all_reduce, broadcast, reduce   the tensor every rank holds
    all_gather, reduce_scatter      the whole tensor, gathered from or scattered to all ranks
    all_to_all                      everything one rank sends, its own part included
    gather, scatter                 the whole tensor at the root
    send                            what goes from one rank to one other

Prices never fall as bytes grow, and a group of one rank costs nothing. `bytes` may be an array.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from foretell.cluster.level import Level
from foretell.cost.link import PROTOCOLS, link_of
from foretell.cost.nccl import Tier, Way, tiers_of, ways
from foretell.errors import InputError, unknown

LARGE = 1 << 20  # bytes from which a message counts as large: where simple usually takes over
TEN_TO_NINETY = 1.2815515594457831  # the 90th percentile of a normal distribution


@dataclass(frozen=True, slots=True)
class Priced:
    """The price of one message."""

    seconds: float
    way: Way | None  # None where there is nothing to communicate with
    sigma: float  # standard deviation of ln(measured / seconds)

    def interval(self) -> tuple[float, float]:
        """The seconds between which 80 % of measurements fall."""
        factor = math.exp(TEN_TO_NINETY * self.sigma)
        return self.seconds / factor, self.seconds * factor


@dataclass(frozen=True, slots=True)
class PricedMany:
    """The prices of many messages of one group."""

    seconds: NDArray[np.float64]
    choice: NDArray[np.intp]  # into `ways`
    ways: tuple[Way, ...]
    sigma: NDArray[np.float64]


@overload
def price(
    op: str, bytes: float, levels: tuple[Level, ...], *, protocols: tuple[str, ...] = ...
) -> Priced: ...
@overload
def price(
    op: str, bytes: NDArray[Any], levels: tuple[Level, ...], *, protocols: tuple[str, ...] = ...
) -> PricedMany: ...
def price(
    op: str,
    bytes: float | NDArray[Any],
    levels: tuple[Level, ...],
    *,
    protocols: tuple[str, ...] = PROTOCOLS,
) -> Priced | PricedMany:
    """What `op` on `bytes` costs the group of ranks that `levels` describes, innermost first.

    `protocols` leaves out what the library is told not to use (`NCCL_PROTO`).
    """
    table = _recall(op, levels, protocols)
    if isinstance(bytes, np.ndarray):
        return _many(table, bytes)
    return _one(table, bytes)


def push(bytes: float, levels: tuple[Level, ...], workers: int) -> Priced:
    """What it costs `workers` ranks to send `bytes` each to one server at once, or to pull them."""
    return price("send", bytes * workers, levels)


@dataclass(frozen=True, slots=True)
class _Table:
    """The ways of one group, ready to be priced at any size."""

    ways: tuple[Way, ...]
    laws: tuple[tuple[float, float, float], ...]  # start, slope, root of each way
    sigma: tuple[float, float]  # below LARGE, and from there
    tree_bytes: float = math.inf  # messages above it do not go by trees

    def costs(self, size: float) -> list[float]:
        """Seconds of a message by each way; infinite where the library would not take it."""
        root = math.sqrt(size)
        return [
            start + slope * size + bend * root
            if size <= self.tree_bytes or way.algorithm != "tree"
            else math.inf
            for (start, slope, bend), way in zip(self.laws, self.ways, strict=True)
        ]


def _recall(op: str, levels: tuple[Level, ...], protocols: tuple[str, ...]) -> _Table:
    """The table of levels seen before, by identity: to hash a thousand nodes takes too long."""
    key = (id(levels), op, protocols)
    seen = _RECENT.get(key)
    if seen is not None and seen[0] is levels:
        return seen[1]
    table = _table(op, levels, protocols)
    if len(_RECENT) >= 4096:
        _RECENT.clear()
    _RECENT[key] = (levels, table)
    return table


_RECENT: dict[tuple[int, str, tuple[str, ...]], tuple[tuple[Level, ...], _Table]] = {}


@lru_cache(maxsize=4096)
def _table(op: str, levels: tuple[Level, ...], protocols: tuple[str, ...]) -> _Table:
    for protocol in protocols:
        if protocol not in PROTOCOLS:
            raise unknown("protocol", protocol, PROTOCOLS)
    tiers = tiers_of(levels, link_of)
    found = _timed(op, levels) or ways(op, tiers, protocols)
    if tiers and not found:
        raise InputError(f"no protocol is left to run `{op}` with", hint="name ll, ll128 or simple")
    laws = tuple((way.start, way.slope, way.root) for way in found)
    most = min((level.tree_bytes for level in levels), default=math.inf)
    return _Table(found, laws, _sigma(op, tiers), most)


def _timed(op: str, levels: tuple[Level, ...]) -> tuple[Way, ...]:
    """The law that was measured for this op and number of ranks, where there is one."""
    ranks = math.prod(max(level.sizes) for level in levels)
    rows = [m for m in (levels[-1].timed if levels else ()) if (m.op, m.ranks) == (op, ranks)]
    at = levels[-1] if levels else None
    return tuple(
        Way("measured", "simple", m.start * at.later, m.slope * at.slower) for m in rows if at
    )


def _sigma(op: str, tiers: tuple[Tier, ...]) -> tuple[float, float]:
    """The spread of the least certain link on the way."""
    family = {"send": "send", "all_to_all": "direct", "gather": "direct", "scatter": "direct"}
    spreads = [tier.link.sigma[family.get(op, "ring")] for tier in tiers] or [(0.0, 0.0)]
    return max(small for small, _ in spreads), max(large for _, large in spreads)


def _one(table: _Table, size: float) -> Priced:
    if size < 0:
        raise InputError(f"a message of {size} bytes")
    if not table.ways:
        return Priced(0.0, None, 0.0)
    costs = table.costs(size)
    best = min(range(len(costs)), key=costs.__getitem__)
    return Priced(costs[best], table.ways[best], table.sigma[size >= LARGE])


def _many(table: _Table, sizes: NDArray[Any]) -> PricedMany:
    size = np.asarray(sizes, np.float64)
    if size.size and size.min() < 0:
        raise InputError(f"a message of {size.min()} bytes")
    if not table.ways:
        nothing = np.zeros(size.shape)
        return PricedMany(nothing, nothing.astype(np.intp), (), nothing)
    root = np.sqrt(size)
    costs = np.stack([start + slope * size + bend * root for start, slope, bend in table.laws])
    if table.tree_bytes < math.inf:
        trees = np.array([way.algorithm == "tree" for way in table.ways])
        costs[trees] = np.where(size > table.tree_bytes, np.inf, costs[trees])
    choice = costs.argmin(axis=0)
    seconds = np.take_along_axis(costs, choice[None], axis=0)[0]
    return PricedMany(seconds, choice, table.ways, np.asarray(table.sigma)[(size >= LARGE) * 1])
