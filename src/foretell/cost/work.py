"""Pieces of work to be priced: each different one once, however many tasks do it.

A graph of a hundred thousand tasks holds a few hundred different pieces of work; prices are asked
for those and passed back to all tasks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from foretell.cluster import Cluster
from foretell.errors import InputError
from foretell.graph.columns import Array, Dtype, Ids, word_of
from foretell.graph.graph import Graph

_TEXT = ("op", "shape", "group")
_NUMBERS = ("kind", "dtype", "flops", "bytes", "comm_bytes")


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
