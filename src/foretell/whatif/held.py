"""What a changed step holds in memory: the tape of its trace, changed as its history says.

A graph carries the tape of the step that was traced. What-ifs leave it alone while they are made;
when somebody asks, each spec of the graph's history is asked what it makes of it (`WhatIf.hold`).
"""

from __future__ import annotations

from foretell.graph.graph import Graph
from foretell.memory.play import Held, play
from foretell.memory.tape import FACT, Tape, decode

_MEASURED = "peak_bytes"  # a fact: the peak of the step as it was, without the profiler


def tape_of(graph: Graph) -> Tape | None:
    """What the step holds after all that was done to it; none where its trace did not tell."""
    from foretell.whatif import WHATIFS, parse

    text = graph.facts.get(FACT)
    if not isinstance(text, str):
        return None
    tape = decode(text)
    for spec in graph.history:
        if spec.partition(":")[0] in WHATIFS:
            tape = parse(spec).hold(tape)
    return tape


def held(graph: Graph) -> Held | None:
    """The memory of a step, op by op."""
    tape = tape_of(graph)
    return None if tape is None else play(tape)


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
    return max(now.peak + known - play(decode(graph.facts[FACT])).peak, 0.0)
