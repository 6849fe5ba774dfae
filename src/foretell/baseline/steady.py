"""How long a step takes when steps follow one another.

A step is simulated several times in a row on the same lanes: the host runs ahead of the device or
waits for it as it would, and the time from the end of one to the end of the next settles.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from foretell.graph.combine import replicate
from foretell.graph.graph import Graph
from foretell.simulate import simulate

COPIES = 3  # the first fills the queues, the last two are steady
TIMES = ("seconds", "gap", "priority")  # what an edit may change and the structure still holds


@lru_cache(4)  # a step is asked for its time, its interval and the reason in a row
def steady_seconds(step: Graph, copies: int = COPIES) -> float:
    """Seconds from the end of one step to the end of the next."""
    if not step.size:
        return 0.0
    row = _in_a_row(step, copies)
    ends = simulate(row, engine="compiled").end.reshape(copies, step.size).max(axis=1)
    return float(ends[-1] - ends[-2])


def _in_a_row(step: Graph, copies: int) -> Graph:
    """The step several times over; its structure is made once, for all edits that leave it alone.

    An interval simulates one step five times with other times: laying it out takes longer.
    """
    row: Graph | None = step.cache.get(f"row of {copies}")
    if row is None:
        row = step.cache[f"row of {copies}"] = replicate(step, copies, over="micro_batch")
        return row
    with row.edit() as edit:
        known = {name: np.tile(step.column(name), copies) for name in TIMES}
        edit.set(np.arange(row.size), **known)
    return edit.graph
