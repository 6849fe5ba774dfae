"""How long tasks take on a cluster: price models are tried in order, each answers or passes.

A model answers seconds and a relative standard error for every piece of work it knows, and NaN for
what it does not. The first answer counts, and where it came from is kept with the task.

    measured    a table that was measured on this kind of device
    learned     a regressor, inside the region it was trained on
    formula     roofline with efficiency curves; α–β by algorithm and topology for collectives

Pieces of work to be priced: each different one once, however many tasks do it. A graph of a hundred
thousand tasks holds a few hundred different pieces of work; prices are asked for those and passed
back to all tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from foretell.cluster import Cluster
from foretell.errors import InputError, UnmodelledError
from foretell.graph.columns import Array, Dtype, Ids, Kind, Source, word_of
from foretell.graph.graph import Graph

_TEXT = ("op", "shape", "group")
_NUMBERS = ("kind", "dtype", "flops", "bytes", "comm_bytes")


PRICED = (Kind.KERNEL, Kind.COPY, Kind.COLLECTIVE, Kind.SEND)


@dataclass(frozen=True, eq=False)
class Work:
    """Different pieces of work, one row each."""

    cluster: Cluster
    kind: Array
    op: tuple[str, ...]
    shape: tuple[str, ...]
    group: tuple[str, ...]  # the ranks of a collective
    dtype: tuple[str, ...]
    flops: Array
    bytes: Array
    comm_bytes: Array
    rank: Array  # a rank that does it; others on the same kind of device cost the same

    def __len__(self) -> int:
        return len(self.kind)

    def take(self, rows: Array) -> Work:
        """Some of the rows."""
        chosen = rows.tolist()
        texts: dict[str, Any] = {
            name: tuple(getattr(self, name)[r] for r in chosen)
            for name in ("op", "shape", "group", "dtype")
        }
        numbers = {n: getattr(self, n)[rows] for n in ("kind", "flops", "bytes", "comm_bytes")}
        return Work(cluster=self.cluster, rank=self.rank[rows], **texts, **numbers)


def work_of(graph: Graph, tasks: Ids, cluster: Cluster) -> tuple[Work, Array]:
    """The different pieces of work among some tasks, and for each task which one it is."""
    ranks = graph.rank[tasks]
    if len(tasks) and ranks.max() >= cluster.size:
        raise InputError(
            f"the graph has rank {ranks.max()}, the cluster only {cluster.size} ranks",
            hint="name a larger cluster, such as one with `nodes=` or `gpus=` raised",
        )
    columns = [graph.column(name)[tasks] for name in (*_NUMBERS, *_TEXT)]
    place = _place_of_rank(graph, tasks, cluster)
    first, number = _different([*columns, place])
    row = tasks[first]
    names = graph.names
    texts = {name: tuple(names[k] for k in graph.column(name)[row]) for name in _TEXT}
    return Work(
        cluster=cluster,
        kind=graph.kind[row],
        dtype=tuple(word_of(Dtype, d) for d in graph.dtype[row]),
        flops=graph.flops[row],
        bytes=graph.bytes[row],
        comm_bytes=graph.comm_bytes[row],
        rank=graph.rank[row],
        **texts,
    ), number


def _place_of_rank(graph: Graph, tasks: Ids, cluster: Cluster) -> Array:
    """The kind of device a task runs on, as a number."""
    numbers: dict[str, int] = {}
    kinds = [numbers.setdefault(d.name, len(numbers)) for d in cluster.devices]
    found: Array = np.array(kinds)[graph.rank[tasks]]
    return found


def _different(columns: list[Array]) -> tuple[Array, Array]:
    """Rows that differ: the first of each, and for every row which one it is like."""
    number = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        values, code = np.unique(column, return_inverse=True)
        if len(values) > 1:
            # Pair by pair, so that the codes never grow beyond the number of rows.
            _, number = np.unique(number * len(values) + code.reshape(-1), return_inverse=True)
            number = number.reshape(-1)
    _, first, number = np.unique(number, return_index=True, return_inverse=True)
    return first, number.reshape(-1)


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

    Tasks that were priced or measured before keep what they have, unless `again` is set.
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


def priced(graph: Graph, cluster: Cluster | None, name: str) -> Graph:
    """A graph priced on a cluster, where one is named; one in which nothing has a time needs it."""
    if cluster is not None:
        return price(graph, cluster)
    return timed(graph, name, "name the cluster to price it on: --on h100")


def timed(graph: Graph, name: str, hint: str) -> Graph:
    """The graph unchanged; refused where no kernel (without kernels: no task) takes time."""
    kernels = graph.kind == Kind.KERNEL
    work = graph.seconds[kernels] if kernels.any() else graph.seconds
    if len(work) and not work.any():
        raise InputError(f"the tasks of `{name}` have no times", hint=hint)
    return graph


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
    """The default chain of price models."""
    from foretell.cost.formulas import (
        CollectiveFormula,
        CopyFormula,
        KernelFormula,
        LearnedKernel,
        Operators,
    )
    from foretell.cost.host import HostCalls
    from foretell.cost.measured import ShippedTables

    measured = Operators(ShippedTables(), plain=True)
    kernels = (measured, Operators(LearnedKernel()), Operators(KernelFormula()))
    return (*kernels, CopyFormula(), CollectiveFormula(), HostCalls())


def _check_all(work: Work, seconds: Array, chain: Sequence[Model]) -> None:
    left = np.flatnonzero(np.isnan(seconds))
    if not len(left):
        return
    r = int(left[0])
    kind = word_of(Kind, work.kind[r])
    tried = ", ".join(model.name for model in chain)
    raise UnmodelledError(
        f"no price for {kind} `{work.op[r]}` ({work.shape[r] or 'no shape'}); tried: {tried}",
        hint="give it flops and bytes (or a shape), or its seconds",
    )
