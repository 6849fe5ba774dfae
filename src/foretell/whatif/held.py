"""What a changed step holds in memory: the tape of its trace, changed as its history says.

A graph carries the tape of the step that was traced. What-ifs leave it alone while they are made;
when a user asks, each spec of the graph's history is asked what it makes of it (`WhatIf.hold`).
"""

from __future__ import annotations

from functools import lru_cache

from foretell.graph.graph import Graph
from foretell.memory.play import Held, play
from foretell.memory.tape import FACT, Tape, decode

_MEASURED = "peak_bytes"  # a fact: the peak of the step as it was, without the profiler


def tape_of(graph: Graph) -> Tape | None:
    """What the step holds after all that was done to it; none where its trace did not tell."""
    text = graph.facts.get(FACT)
    return _changed(text, _made(graph)) if isinstance(text, str) else None


def _made(graph: Graph) -> tuple[str, ...]:
    """The what-ifs among what was done to a graph."""
    from foretell.whatif import WHATIFS

    return tuple(spec for spec in graph.history if spec.partition(":")[0] in WHATIFS)


@lru_cache(8)  # changes made together share what they begin with
def _changed(text: str, made: tuple[str, ...]) -> Tape:
    """A tape as text after what-ifs, the last of them on top of the others."""
    from foretell.whatif import parse

    return parse(made[-1]).hold(_changed(text, made[:-1])) if made else decode(text)


def held(graph: Graph) -> Held | None:
    """The memory of a step, op by op."""
    text = graph.facts.get(FACT)
    return _played(text, _made(graph)) if isinstance(text, str) else None


@lru_cache(4)
def _played(text: str, made: tuple[str, ...]) -> Held:
    return play(_changed(text, made))


def peak_bytes(graph: Graph, real: float | None = None) -> float | None:
    """The most a step holds; none where its trace did not tell the sizes of tensors.

    `real` is the peak that was measured of the step as it was: what it holds besides its own
    tensors (workspaces of libraries, other models) is then held by the changed step too.
    """
    now = held(graph)
    if now is None:
        return None
    known = graph.facts.get(_MEASURED) if real is None else real
    if not isinstance(known, (int, float)):
        return now.peak
    return max(now.peak + known - _played(graph.facts[FACT], ()).peak, 0.0)
