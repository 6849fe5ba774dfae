"""A training step to ask about: its graph, its cluster, and its time without the profiler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foretell.baseline import Baseline, Interval, interval
from foretell.cluster import Cluster
from foretell.graph.graph import Graph
from foretell.simulate import simulate
from foretell.whatif import Setting, WhatIf
from foretell.whatif.registry import together


@dataclass(frozen=True, eq=False)
class Step:
    """A step, the cluster it runs on, and its time without the profiler."""

    graph: Graph
    cluster: Cluster | None
    baseline: Baseline | None = None  # of a trace: steps in a row, without the profiler

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.baseline.seconds if self.baseline else self.predicted(self.graph)

    @property
    def notes(self) -> list[str]:
        """What a person should know about that time."""
        return [self.baseline.note] if self.baseline else []

    @property
    def setting(self) -> Setting:
        """What a what-if may know besides the graph."""
        return Setting(self.cluster)

    def predicted(self, after: Graph) -> float:
        """How long it would take as another graph."""
        return self.baseline.predicted(after) if self.baseline else simulate(after).seconds

    def interval(self, after: Graph, changes: Sequence[WhatIf]) -> Interval:
        """The 80 % interval of its time as a graph that changes made."""
        host = self.baseline.sigma if self.baseline else 0.0
        return interval(after, self.predicted, host=host, spread=together(changes))
