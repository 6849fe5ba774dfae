"""Networks between local ranks as words: `loopback`, `100mbit`, `1gbit+100mbit`, `100mbit~5ms`.

Rates are those of each rank's own link, both ways at once, joined by `+` where they differ (the
last counts for all that follow); behind `~` stands the delay of every link, one way. `veth` is a
link of its own without a limit, `loopback` none at all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from foretell.errors import InputError

_RATE = {"kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8}  # bytes/s
_TIME = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
LOOPBACK, VETH = "loopback", "veth"


@dataclass(frozen=True)
class Network:
    """What every rank's link lets through."""

    name: str
    rates: tuple[float, ...] = ()  # bytes/s by rank; the last for all that follow; empty: no limit
    delay: float = 0.0  # seconds, one way

    @property
    def wires(self) -> str:
        """How it is built: `lo` not at all, `veth` by the kernel, `tap` by a switch of our own."""
        if self.name == LOOPBACK:
            return "lo"
        return "tap" if self.delay else "veth"

    def rate(self, rank: int) -> float:
        """Bytes/s of one rank's link, 0 where there is no limit."""
        return self.rates[min(rank, len(self.rates) - 1)] if self.rates else 0.0

    def __str__(self) -> str:
        return self.name


def network(text: str) -> Network:
    """The network that a text stands for."""
    name = text.strip().lower()
    if name in (LOOPBACK, VETH):
        return Network(name)
    rates, _, delay = name.partition("~")
    found = tuple(_amount(part, _RATE, text) for part in rates.split("+"))
    return Network(name, found, _amount(delay, _TIME, text) if delay else 0.0)


def _amount(part: str, units: dict[str, float], text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", part.strip())
    if match is None or match[2] not in units or not float(match[1]):
        raise InputError(
            f"`{part}` in the network `{text}` is none of {', '.join(units)}",
            hint="write loopback, veth, 100mbit, 1gbit+100mbit or 100mbit~5ms",
        )
    return float(match[1]) * units[match[2]]
