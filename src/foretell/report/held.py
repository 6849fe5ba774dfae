"""Memory over time as a curve a page can draw, and the largest buffers at its peak."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from foretell.graph.columns import Array, BufferKind, word_of
from foretell.simulate.memory import Memory, held_by_kind, memory
from foretell.simulate.timeline import Timeline

POINTS = 1200  # of a curve: more than a screen has columns
HOLDERS = 12


def curves(name: str, timeline: Timeline, ranks: int = 2) -> list[dict[str, Any]]:
    """The memory of the ranks that hold most."""
    fullest = sorted(memory(timeline), key=lambda m: (-m.peak, m.rank))[:ranks]
    several = len(np.unique(timeline.graph.buffers.rank)) > 1
    return [
        {
            "name": f"{name}, rank {m.rank}" if several else name,
            "x": "seconds",
            **curve(m.time, m.held),
            "peak": m.peak,
            "kinds": held_by_kind(timeline, m),
            "holders": _holders(timeline, m),
        }
        for m in fullest
    ]


def curve(at: Array, held: Array) -> dict[str, Array]:
    """A curve of so many points that no peak is lost: the highest of each group stays."""
    if len(at) <= POINTS:
        return {"at": np.asarray(at, float), "held": np.asarray(held, float)}
    edges = np.linspace(0, len(at), POINTS + 1).astype(int)
    tops = [a + int(np.argmax(held[a:b])) for a, b in itertools.pairwise(edges)]
    return {"at": np.asarray(at, float)[tops], "held": np.asarray(held, float)[tops]}


def _holders(timeline: Timeline, m: Memory) -> list[dict[str, Any]]:
    b, names = timeline.graph.buffers, timeline.graph.names
    return [
        {
            "name": names[int(b.name[k])],
            "kind": word_of(BufferKind, b.kind[k]),
            "bytes": float(b.bytes[k]),
        }
        for k in m.holders[:HOLDERS].tolist()
    ]
