"""A step from what a person names: a graph file, priced where a cluster is named, or a trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from foretell.cluster import Cluster
from foretell.graph.graph import Graph

if TYPE_CHECKING:
    from foretell.advise import Step


def load_step(file: Path, cluster: str | None, real: float | None = None) -> Step:
    """The step in a file; `real` is the time of an un-profiled step, for traces."""
    from foretell.advise import Step
    from foretell.graph.file import is_graph_file, load

    machines = _machines(cluster)
    if not file.is_dir() and is_graph_file(file):
        graph = load(file)
        return Step(_priced(graph, machines), machines)
    from foretell.baseline import unprofiled
    from foretell.cli.progress import reading
    from foretell.trace import read

    with reading(file):
        trace = read(file)
        if "measured" not in trace.graph.facts:  # it tells what depends on what, as a graph does
            return Step(_priced(trace.graph, machines), machines)
        found = unprofiled(trace, real)
    return Step(found.graph, machines, found)


def _machines(cluster: str | None) -> Cluster | None:
    if cluster is None:
        return None
    from foretell.cluster import load

    return load(cluster)


def _priced(graph: Graph, machines: Cluster | None) -> Graph:
    if machines is None:
        return graph
    from foretell.cost import price

    return price(graph, machines)
