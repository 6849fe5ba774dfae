"""Memory over time as a curve a page can draw, and the largest buffers at its peak."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from foretell.graph.graph import Array, BufferKind, Phase, word_of
from foretell.report import words
from foretell.simulate.memory import Memory, held_by_kind, held_of, memory
from foretell.simulate.timeline import DEVICE, Timeline

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
            **curve(*_to_the_end(timeline, m)),
            "peak": m.peak,
            "kinds": held_by_kind(timeline, m),
            "explained": _explained(timeline, m),
            "holders": _holders(timeline, m),
        }
        for m in fullest
    ]


def _to_the_end(timeline: Timeline, m: Memory) -> tuple[Array, Array, dict[str, Array]]:
    """Instants, bytes held from each on, and those by kind; the last is the end of the step."""
    parts = {kind: np.append(held, held[-1:]) for kind, held in _by_kind(timeline, m).items()}
    return np.append(m.time, timeline.seconds), np.append(m.held, m.held[-1:]), parts


def _explained(timeline: Timeline, m: Memory) -> str:
    """When the peak is reached, and in which task."""
    graph = timeline.graph
    runs = (timeline.start <= m.at) & (timeline.end >= m.at) & (graph.rank == m.rank)
    running = np.flatnonzero(runs & np.isin(graph.kind, DEVICE))
    text = f"reached {words.seconds(m.at)} into the step"
    if not len(running):
        return text
    first = int(running[np.argmax(timeline.start[running])])
    phase, layer = word_of(Phase, graph.phase[first]), graph.text_of("layer", first)
    where = f" of {layer}" if layer else ""
    during = "" if phase == "none" else f" in {phase}"
    return f"{text}, at `{graph.text_of('op', first)}`{where}{during}"


def curve(at: Array, held: Array, kinds: Mapping[str, Array]) -> dict[str, Any]:
    """A curve of so many points that no peak is lost: the highest of each group stays.

    `kinds` are the parts of what is held, by what they are for; the largest comes first.
    """
    tops = np.arange(len(at))
    if len(at) > POINTS:
        edges = np.linspace(0, len(at), POINTS + 1).astype(int)
        pairs = itertools.pairwise(edges)
        tops = np.array([a + int(np.argmax(held[a:b])) for a, b in pairs])
    ranked = sorted(kinds.items(), key=lambda item: (-float(item[1].max(initial=0.0)), item[0]))
    stacked = {name: np.asarray(part, float)[tops] for name, part in ranked if part.any()}
    whole = np.asarray(held, float)[tops]
    return {"at": np.asarray(at, float)[tops], "held": whole, "stacked": stacked}


def _by_kind(timeline: Timeline, m: Memory) -> dict[str, Array]:
    """Bytes held by a rank at each instant, by kind of buffer."""
    buffers = timeline.graph.buffers
    parts = {}
    for kind in np.unique(buffers.kind[buffers.rank == m.rank]).tolist():
        at, held = held_of(
            timeline, np.flatnonzero((buffers.rank == m.rank) & (buffers.kind == kind))
        )
        place = np.searchsorted(at, m.time, "right")
        parts[word_of(BufferKind, kind)] = np.append(0.0, held)[place]
    return parts


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
