"""The 80 % interval of a predicted step.

Three things are not known exactly and are varied one by one, both ways: how fast the host is
without the profiler, what changed kernels really take, and what the what-ifs themselves leave out.
Their effects on the step add up as independent errors do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from foretell import portable
from foretell.graph.columns import Kind
from foretell.graph.graph import Graph

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
