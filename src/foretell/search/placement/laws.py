"""Prices of collectives on candidate sets and of messages between cells, as laws.

    seconds(bytes) = min over ways of  start + slope·bytes + root·√bytes

from `foretell.cost.collective`, which is asked once for each set and pair of cells.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.cost import collective
from foretell.search.placement.fleet import Fleet

Array = npt.NDArray[np.float64]
OPS = ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather")
MOST_LAWS = 12  # ways kept of one collective


def laws_of(machines: Fleet) -> Array:
    out = np.zeros((len(machines.sets), len(OPS), MOST_LAWS, 3))
    out[:, :, :, 0] = np.inf
    for s in range(len(machines.sets)):
        ranks = machines.ranks(s)
        levels = machines.cluster.levels(ranks) if len(ranks) > 1 else ()
        for o, op in enumerate(OPS):
            _write(out[s, o], op, levels)
    return _trimmed(out)


def _trimmed(laws: Array) -> Array:
    """Without the rows that no law needs: every price looks at all of them."""
    used = np.isfinite(laws[..., 0]).reshape(-1, MOST_LAWS).any(axis=0)
    return np.ascontiguousarray(laws[..., : max(1, int(used.sum())), :])


def _write(to: Array, op: str, levels: Any) -> None:
    """The laws of one collective; zero where there is nothing to communicate with."""
    if not levels:
        to[0] = 0.0
        return
    found = collective.price(op, np.array([1.0, 1e9]), levels).ways
    ways = sorted(found, key=lambda way: (way.slope, way.start))[:MOST_LAWS]
    for i, way in enumerate(ways):
        to[i] = (way.start, way.slope, way.root)


def sends_of(machines: Fleet) -> tuple[Array, Array]:
    """Laws of a message between two cells, and how many go side by side."""
    n = len(machines.cells)
    laws, streams = np.zeros((n, n, MOST_LAWS, 3)), np.ones((n, n))
    laws[:, :, :, 0] = np.inf
    for a, one in enumerate(machines.cells):
        for b, other in enumerate(machines.cells):
            to = other.ranks[-1]
            if to == one.ranks[0]:
                laws[a, b, 0] = 0.0
                continue
            _write(laws[a, b], "send", machines.cluster.levels((one.ranks[0], to)))
            if one.box != other.box or one.nodes > 1:
                streams[a, b] = min(one.nodes, other.nodes)
    return _trimmed(laws), streams


def spans(machines: Fleet, chosen: tuple[int, ...]) -> int:
    """Machines a set stands on."""
    return sum({machines.cells[c].box: machines.cells[c].nodes for c in chosen}.values())


def law(rows: Array, size: Array) -> Array:
    """The least of some laws at each of some sizes."""
    every = rows[:, :1] + rows[:, 1:2] * size + rows[:, 2:] * np.sqrt(size)
    found: Array = every.min(axis=0)
    return found
