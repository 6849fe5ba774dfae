"""What one class of link does to a message: the few constants that measured runs leave free.

A level of a cluster says what its maker promises (kind, bytes/s, seconds); a `Link` says what NCCL
or gloo makes of it. The constants are data, `tables/collective.toml`, written by
`benchmarks/fit_collectives.py` with the source of each class beside it.
A level belongs to the class of its kind whose reference bandwidth is nearest (as a ratio), so that
NVLink of a new generation takes the constants of the last one it resembles, at its own speed.
PCIe and NICs behind it are rated as NCCL rates them, below the raw rate: 24 GB/s for PCIe 4 x16.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from foretell.cluster.level import Level
from foretell.errors import unknown

PROTOCOLS = ("ll", "ll128", "simple")


@dataclass(frozen=True)
class Mode:
    """One way to move bytes: `start + steps·hop + t + √(fill·t)`, t = bytes/(efficiency·speed)."""

    start: float  # seconds before the first byte moves, beyond the launch
    hop: float  # seconds added by each step of the algorithm
    efficiency: float  # share of the level's bandwidth reached by large messages, at most 1
    copy: float = math.inf  # bytes/s at which a rank passes on its own part; not overlapped
    fill: float = 0.0  # seconds; what it takes to fill and drain a pipeline of growing chunks


@dataclass(frozen=True)
class Link:
    """The constants of one class of link."""

    name: str
    kind: str  # of the levels it is for
    bandwidth: float  # bytes/s of the levels it was fitted on
    source: str
    launch: float  # seconds from the last rank's arrival to its kernel running
    simple: Mode
    direct: Mode  # all-to-all: everyone sends to everyone at once
    send: Mode  # one rank to one other
    # Spread of ln(measured/priced) below 1 MiB and from there, for `ring`, `direct` and `send`.
    sigma: Mapping[str, tuple[float, float]]
    ll: Mode | None = None  # None where the library has no such protocol
    ll128: Mode | None = None
    quick: Mode | None = None  # direct and send of small messages
    multicast: Mode | None = None  # the switch adds and copies by itself (NVLS)
    tree: float = 1.0  # what a tree reaches of the ring's efficiency


def link_of(level: Level) -> Link:
    """The class of link a level belongs to, among those that ship; as slow as it was measured."""
    found = nearest(level, links())
    return found if level.later == level.slower == 1 else _slowed(found, level)


def _slowed(link: Link, level: Level) -> Link:
    modes: dict[str, Any] = {
        f.name: replace(
            mode,
            start=mode.start * level.later,
            hop=mode.hop * level.later,
            copy=mode.copy / level.slower,
            fill=mode.fill * level.later,
        )
        for f in fields(link)
        if isinstance(mode := getattr(link, f.name), Mode)
    }
    return replace(link, launch=link.launch * level.later, **modes)


def nearest(level: Level, known: Mapping[str, Link]) -> Link:
    """The class of a level's kind that was fitted at the most similar bandwidth."""
    is_rdma = level.kind == "ethernet" and 0 < level.latency < _RDMA
    kind = "infiniband" if is_rdma else _ALIKE.get(level.kind, level.kind)
    same = [link for link in known.values() if link.kind == kind]
    if not same:
        raise unknown(
            "kind of link", level.kind, {link.kind for link in known.values()} | {*_ALIKE}
        )
    return min(same, key=lambda link: abs(math.log(link.bandwidth / level.bandwidth)))


# Ethernet that passes a message this quickly (RoCE, Slingshot) passes it as InfiniBand does.
_RDMA = 5e-6
# Kinds no measured run covers, and the one whose constants stand in for them.
_ALIKE = {"xgmi": "nvlink", "upi": "pcie"}


@cache
def links() -> Mapping[str, Link]:
    """Every class of link that ships, by name."""
    text = (Path(__file__).parent / "tables" / "collective.toml").read_text()
    return {name: link_from(name, table) for name, table in tomllib.loads(text)["link"].items()}


def link_from(name: str, table: Mapping[str, Any]) -> Link:
    """A class of link from its table."""
    values: dict[str, Any] = {**table, "name": name}
    for key, value in table.items():
        if key == "sigma":
            values[key] = {family: (low, high) for family, (low, high) in value.items()}
        elif isinstance(value, dict):
            values[key] = Mode(**value)
    return Link(**values)
