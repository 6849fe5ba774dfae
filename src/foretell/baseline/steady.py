"""How long a step takes when steps follow one another.

A step is played several times in a row on the same lanes: the host runs ahead of the device or
waits for it as it would, and the time from the end of one to the end of the next settles.
"""

from __future__ import annotations

from foretell.graph.combine import replicate
from foretell.graph.graph import Graph
from foretell.simulate import simulate

COPIES = 3  # the first fills the queues, the last two are steady


def steady_seconds(step: Graph, copies: int = COPIES) -> float:
    """Seconds from the end of one step to the end of the next."""
    if not step.size:
        return 0.0
    row = replicate(step, copies, over="micro_batch")
    ends = simulate(row, engine="compiled").end.reshape(copies, step.size).max(axis=1)
    return float(ends[-1] - ends[-2])
