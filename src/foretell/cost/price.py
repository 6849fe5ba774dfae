"""How long tasks take on a cluster: models are asked in order, each answers or passes.

A model answers seconds and a relative standard error for every piece of work it knows, and NaN for
what it does not. The first answer counts, and where it came from is kept with the task.

    measured    a table that was measured on this kind of device
    learned     a regressor, inside the region it was trained on
    formula     roofline with efficiency curves; α–β by algorithm and topology for collectives
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from foretell.cluster import Cluster
from foretell.cost.work import Work, work_of
from foretell.errors import UnmodelledError
from foretell.graph.columns import Array, Ids, Kind, Source, word_of
from foretell.graph.graph import Graph

PRICED = (Kind.KERNEL, Kind.COPY, Kind.COLLECTIVE, Kind.SEND)


class Model(Protocol):
    """Something that knows what work costs."""

    name: str
    source: Source

    def price(self, work: Work) -> tuple[Array, Array]:
        """Seconds and relative standard error of each piece of work; NaN where it passes."""


def price(
    graph: Graph, cluster: Cluster, models: Sequence[Model] | None = None, *, again: bool = False
) -> Graph:
    """The graph with every device task priced on a cluster, and host tasks that have a shape.

    Tasks that were priced or measured before keep what they have, unless `again` is said.
    """
    mine = np.isin(graph.kind, PRICED) | ((graph.kind == Kind.HOST) & (graph.shape != 0))
    if not again:
        mine &= graph.source == Source.NONE
        mine &= graph.seconds == 0
    tasks = np.flatnonzero(mine)
    if not len(tasks):
        return graph
    with graph.edit(f"price:on={cluster.name}") as edit:
        seconds, sigma, source = prices(graph, tasks, cluster, models)
        edit.set(tasks, seconds=seconds, sigma=sigma, source=source)
    return edit.graph


def prices(
    graph: Graph, tasks: Ids, cluster: Cluster, models: Sequence[Model] | None = None
) -> tuple[Array, Array, Array]:
    """Seconds, relative standard error and source of some tasks on a cluster."""
    work, number = work_of(graph, tasks, cluster)
    seconds = np.full(len(work), np.nan)
    sigma, source = np.zeros(len(work)), np.zeros(len(work), np.uint8)
    chain = default_models() if models is None else models
    for model in chain:
        left = np.flatnonzero(np.isnan(seconds))
        if not len(left):
            break
        found, spread = model.price(work.take(left))
        known = left[~np.isnan(found)]
        seconds[left], sigma[left] = found, spread
        source[known] = model.source
    _check_all(work, seconds, chain)
    seconds *= _calibrated(work, cluster)
    return seconds[number], sigma[number], source[number]


def _calibrated(work: Work, cluster: Cluster) -> Array:
    """How many times as long as priced work takes on this cluster; messages know it themselves."""
    known = cluster.calibration
    on_device = np.isin(work.kind, (Kind.KERNEL, Kind.COPY))
    found: Array = np.where(on_device, known.compute, 1.0)
    found[work.kind == Kind.HOST] = known.host
    return found


def default_models() -> tuple[Model, ...]:
    """The chain everybody gets who asks for nothing else."""
    from foretell.cost.formulas import (
        CollectiveFormula,
        CopyFormula,
        KernelFormula,
        LearnedKernel,
    )
    from foretell.cost.host import HostCalls
    from foretell.cost.operators import Operators
    from foretell.cost.shipped import ShippedTables

    measured = Operators(ShippedTables(), plain=True)
    kernels = (measured, Operators(LearnedKernel()), Operators(KernelFormula()))
    return (*kernels, CopyFormula(), CollectiveFormula(), HostCalls())


def _check_all(work: Work, seconds: Array, chain: Sequence[Model]) -> None:
    left = np.flatnonzero(np.isnan(seconds))
    if not len(left):
        return
    r = int(left[0])
    kind = word_of(Kind, work.kind[r])
    asked = ", ".join(model.name for model in chain)
    raise UnmodelledError(
        f"no price for {kind} `{work.op[r]}` ({work.shape[r] or 'no shape'}); asked: {asked}",
        hint="give it flops and bytes (or a shape), or its seconds",
    )
