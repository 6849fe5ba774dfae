"""What binds a step, why a change helps or not, and the 80 % interval of a predicted step.

For the interval three unknowns are varied one by one, both ways: how fast the host is without the
profiler, what changed kernels really take, and what the what-ifs themselves leave out. Their
effects on the step add up as independent errors do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from foretell import portable
from foretell.baseline.deprofile import steady_seconds
from foretell.graph.columns import Kind
from foretell.graph.graph import Graph

BUSY = 0.97  # share of the step from which on a busy device is the bottleneck
DEVICE = (Kind.KERNEL, Kind.COPY)
WIRE = (Kind.COLLECTIVE, Kind.SEND)


@dataclass(frozen=True)
class Shares:
    """What one rank does in a step, steps in a row; seconds, and shares of the step."""

    seconds: float
    kernels: float  # seconds of device work
    host: float  # seconds of host work
    wire: float  # seconds of communication
    idle: float  # share of the step in which the device is idle

    @property
    def bottleneck(self) -> str:
        """The bottleneck: host, device or network."""
        if not self.kernels:
            return "host"
        if self.idle < 1 - BUSY:
            return "device"
        if self.wire > self.idle * self.seconds and self.wire > self.host:
            return "network"
        return "host" if self.host > 0.9 * self.seconds or self.idle > 0.15 else "device"


def shares(graph: Graph, seconds: float | None = None) -> Shares:
    """Where a step goes when steps follow one another; `seconds` is its time where it is known."""
    if not graph.size:
        return Shares(0.0, 0.0, 0.0, 0.0, 0.0)
    seconds = steady_seconds(graph) if seconds is None else seconds
    mine = graph.rank == graph.rank[0]
    work = {
        name: float(graph.seconds[mine & np.isin(graph.kind, kinds)].sum())
        for name, kinds in (("kernels", DEVICE), ("wire", WIRE))
    }
    host = mine & np.isin(graph.kind, (Kind.HOST, Kind.LOAD))
    spent = float(graph.seconds[host].sum() + graph.gap[host].sum())
    idle = max(0.0, 1 - work["kernels"] / seconds) if seconds else 0.0
    return Shares(seconds, work["kernels"], spent, work["wire"], idle)


def why(before: Graph, after: Graph, seconds: tuple[float, float] | None = None) -> str:
    """What happened to the step, as a sentence; `seconds` are its times where they are known."""
    known = seconds or (None, None)
    first, second = shares(before, known[0]), shares(after, known[1])
    gain = 1 - second.seconds / first.seconds if first.seconds else 0.0
    moved = _moved(first, second)
    bound = f"{_bound(first)}, then {_bound(second)}"
    if abs(gain) < 0.02 and moved:
        return f"no gain: {bound}; {moved}, off the critical path"
    return f"{bound}; {moved}" if moved else bound


def _bound(found: Shares) -> str:
    if found.bottleneck == "device":
        return f"GPU-bound (GPU busy {100 * (1 - found.idle):.0f} %)"
    if found.bottleneck == "network":
        return f"communication-bound ({100 * found.wire / found.seconds:.0f} % of the step)"
    return f"CPU-bound (GPU idle {100 * found.idle:.0f} %)"


def _moved(first: Shares, second: Shares) -> str:
    """Which work grew or shrank, by more than a hundredth of the step."""
    words = []
    for name, a, b in (
        ("kernels", first.kernels, second.kernels),
        ("host work", first.host, second.host),
        ("communication", first.wire, second.wire),
    ):
        if abs(b - a) > 0.01 * first.seconds:
            words.append(f"{name} {_milli(a)} → {_milli(b)}")
    return ", ".join(words)


def _milli(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


FOUR_IN_FIVE = 1.2816  # standard deviations either side
TOGETHER = 0.5  # of the errors of different kernels in a step: some cancel, some do not


class Interval(NamedTuple):
    """Seconds between which a step lies in 80 % of cases."""

    low: float
    high: float


def interval(
    after: Graph, seconds: Callable[[Graph], float], *, host: float = 0.0, spread: float = 0.0
) -> Interval:
    """The interval of a step that `seconds` predicts.

    `host` is the spread of ln of the host's speed, `spread` what the what-ifs leave open.
    """
    predicted = seconds(after)
    if not predicted:
        return Interval(0.0, 0.0)
    widths = []
    for sign in (-1.0, 1.0):
        varied = (_host(after, sign * host), _device(after, sign))
        effects = [float(portable.log(seconds(g) / predicted)) for g in varied if g is not None]
        widths.append(FOUR_IN_FIVE * float(np.sqrt(spread**2 + sum(e**2 for e in effects))))
    return Interval(
        predicted * float(portable.exp(-widths[0])), predicted * float(portable.exp(widths[1]))
    )


def _host(after: Graph, sigma: float) -> Graph | None:
    """The step with a host faster or slower by so much."""
    host = np.flatnonzero(np.isin(after.kind, (Kind.HOST, Kind.LOAD)))
    if not len(host) or not sigma:
        return None
    with after.edit("host") as edit:
        factor = portable.exp(sigma)
        edit.set(host, seconds=after.seconds[host] * factor, gap=after.gap[host] * factor)
    return edit.graph


def _device(after: Graph, sign: float) -> Graph | None:
    """The step with tasks shorter or longer by their own spread."""
    unsure = np.flatnonzero(after.sigma > 0)
    if not len(unsure):
        return None
    with after.edit("prices") as edit:
        factor = portable.exp(sign * TOGETHER * np.minimum(after.sigma[unsure], 1.0))
        edit.set(unsure, seconds=after.seconds[unsure] * factor)
    return edit.graph
