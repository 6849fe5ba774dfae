"""What it costs to sum a message of gradients over all ranks, as laws that a compiled loop reads.

    seconds(bytes) = least over the ways of  start + slope · bytes + root · √bytes

The ways are those of `foretell.cost.collective`: algorithm and protocol. The quickest is taken for
every message by itself. Where gradients are reduced to one owner each and parameters gathered
again, each half has laws of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretell.cluster import Cluster
from foretell.cost import collective

Array = npt.NDArray[np.float64]
ALONE = "alone"  # the name of the way where there is nothing to communicate with


@dataclass(frozen=True, eq=False)
class Wire:
    """The laws of one group of ranks."""

    names: tuple[str, ...]  # algorithm and protocol of each way
    laws: Array  # one row a way: start, slope, root
    ranks: int = 1
    scatter: Array | None = None  # laws of a reduce-scatter; half an all-reduce where not known
    gather: Array | None = None  # of an all-gather

    @property
    def halves(self) -> tuple[Array, Array]:
        """The laws of the two halves of an all-reduce: reduce-scatter and all-gather."""
        half = self.laws * np.array([1.0, 0.5, 0.5**0.5])  # each has a start of its own
        return (
            half if self.scatter is None else self.scatter,
            half if self.gather is None else self.gather,
        )

    def seconds(self, sizes: npt.ArrayLike) -> Array:
        """Time of messages."""
        return np.asarray(self._costs(sizes).min(axis=0))

    def way(self, size: float) -> str:
        """The quickest way for a message."""
        return self.names[int(self._costs([size]).argmin())]

    def _costs(self, sizes: npt.ArrayLike) -> Array:
        size = np.asarray(sizes, float)
        start, slope, root = (self.laws[:, k, None] for k in range(3))
        return np.asarray(start + slope * size + root * np.sqrt(size))


def wire_of(cluster: Cluster) -> Wire:
    """The wire between all ranks of a cluster."""
    levels, one = cluster.levels(range(cluster.size)), np.array([1.0])
    names, laws = _ways(collective.price("all_reduce", one, levels))
    scatter = _ways(collective.price("reduce_scatter", one, levels))[1]
    gather = _ways(collective.price("all_gather", one, levels))[1]
    return Wire(names, laws, cluster.size, scatter, gather)


def _ways(found: collective.PricedMany) -> tuple[tuple[str, ...], Array]:
    """Names and laws of the ways a collective can go."""
    if not found.ways:
        return (ALONE,), np.zeros((1, 3))
    laws = np.array([(w.start, w.slope, w.root) for w in found.ways])
    return tuple(f"{w.algorithm} {w.protocol}" for w in found.ways), laws


def measured_wire(sizes: npt.ArrayLike, seconds: npt.ArrayLike, ranks: int) -> Wire:
    """One law, start + slope · bytes: the slope of the two largest messages, the start of others.

    A fit to all would believe what lets small messages pass for free: buffers, a shaped link's
    burst. It is the large ones that gradients travel in.
    """
    order = np.argsort(np.asarray(sizes, float))
    x, y = np.asarray(sizes, float)[order], np.asarray(seconds, float)[order]
    slope = (y[-1] - y[-2]) / (x[-1] - x[-2])
    if slope <= 0:  # noise: the largest by itself
        slope = y[-1] / x[-1]
    left = (y - slope * x)[: max(len(x) // 2, 1)]
    start = max(float(np.median(left)), float(left[0]), 0.0)
    return Wire(("measured",), np.array([[start, float(slope), 0.0]]), ranks)
