"""A step from what a person names: a graph file, priced on a cluster where one is named."""

from __future__ import annotations

from pathlib import Path

from foretell.cluster import Cluster
from foretell.graph.graph import Graph


def load_step(file: Path, cluster: str | None) -> tuple[Graph, Cluster | None]:
    """The step in a file and the machines it runs on."""
    from foretell.graph.file import load

    step = load(file)
    if cluster is None:
        return step, None
    from foretell.cluster import load as load_cluster
    from foretell.cost import price

    machines = load_cluster(cluster)
    return price(step, machines), machines
