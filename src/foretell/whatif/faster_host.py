"""A faster CPU: all that the host does takes less time, the device the same."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretell.errors import InputError
from foretell.graph.graph import Graph, Kind
from foretell.whatif.base import DoesNotApply, Setting, WhatIf

ON_HOST = (Kind.HOST, Kind.LOAD, Kind.SYNC)


@dataclass(frozen=True)
class FasterHost(WhatIf):
    """Let the host do everything `times` as fast: Python, operators, launches, reading data."""

    name = "faster-host"
    source = "ours: every host task alike"
    assumes = (
        "every host task and the untraced time behind it shrink alike; waiting for the device "
        "stays what it is",
    )
    times: float = 2.0  # how many times as fast

    def apply(self, graph: Graph, setting: Setting) -> Graph:
        if not 0 < self.times < float("inf"):
            raise InputError(f"`{self}` runs {self.times} times as fast", hint="use more than 0")
        tasks = np.flatnonzero(np.isin(graph.kind, ON_HOST))
        if not len(tasks):
            raise DoesNotApply("the step has no tasks on a host")
        with graph.edit(str(self)) as edit:
            for column in ("seconds", "gap"):
                edit.scale(tasks, 1 / self.times, column)
        return edit.graph
