"""The gradient of an embedding's table: how it is made jumps with the number of indices.

    nn.Embedding      up to 3072 indices   one kernel adds rows, index after index        ADDED
                      more                 indices are sorted first, equal ones added up  SWEPT
    nn.EmbeddingBag   up to 2304 indices   sorted too, by one kernel                      TILED
                      more                                                                SWEPT

The limits are PyTorch's (`ATen/native/cuda/Embedding.cu`) and cub's (one tile is 256 threads of
nine pairs of 64-bit numbers). Past one tile a sort of 64-bit indices is twenty calls: two memsets,
a histogram, its sums, then a memset and a pass for each of eight bytes. A model with many tables
pays for that on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from foretell.graph.columns import NONE, Array, Kind
from foretell.graph.edit import Edit
from foretell.graph.graph import Graph
from foretell.whatif.calls import issued, launch_of, operators, usual_launch
from foretell.whatif.parameters import inputs_of, numbers

PLAIN, BAG = "embedding_dense_backward", "_embedding_bag_dense_backward"
ADDED_UP_TO, TILE = 3072, 2304  # indices
ROW_RATE = 0.28e12  # bytes of looked-up rows a second, where runs of equal indices are added up
LAUNCH = 7e-6  # seconds of the host for one, where the step shows none


@dataclass(frozen=True)
class Way:
    """How a table's gradient is made: medians of nine traces of an H200 and its host."""

    launches: float  # host time of the operator, in launches of one kernel
    seconds: float  # on the device, apart from rows and indices
    by_index: float = 0.0  # seconds
    by_byte: float = 0.0  # seconds, of rows looked up


ADDED = Way(10, 1e-6, by_index=33e-9)
TILED = Way(43, 41e-6, by_byte=1 / ROW_RATE)
SWEPT = Way(65, 116e-6, by_byte=1 / ROW_RATE)


@dataclass(frozen=True)
class Gathered:
    """One table's gradient in a step."""

    op: str
    indices: float
    row: float  # bytes looked up by one index
    kernels: Array
    host: Array  # tasks of the operator

    def way(self, times: float = 1.0) -> Way:
        """How it is made with so many times the indices."""
        many = self.indices * times
        if self.op == PLAIN:
            return ADDED if many <= ADDED_UP_TO else SWEPT
        return TILED if many <= TILE else SWEPT

    def seconds(self, times: float = 1.0) -> float:
        """What it takes on the device with so many times the indices."""
        way, many = self.way(times), self.indices * times
        return way.seconds + many * (way.by_index + self.row * way.by_byte)


def remade(edit: Edit, graph: Graph, times: float) -> None:
    """Make gradients of tables as so many times the indices would have it."""
    launch = usual_launch(graph, LAUNCH)
    for one in gathered(graph):
        before, after = one.way(), one.way(times)
        if before is after:
            continue
        edit.scale(one.kernels, one.seconds(times) / one.seconds() / times)
        host = graph.seconds[one.host].sum()
        more = (after.launches - before.launches) * launch
        edit.scale(one.host, max(0.0, 1 + more / host) if host else 1.0)


def gathered(graph: Graph) -> Iterator[Gathered]:
    """The gradients of tables whose number of indices the step tells."""
    ops = np.concatenate([graph.names.matching(op) for op in (PLAIN, BAG)])
    tasks = issued(graph, np.flatnonzero(np.isin(graph.op, ops) & (graph.kind != Kind.HOST)))
    keys = np.stack([graph.rank[tasks], graph.layer[tasks], graph.shape[tasks]])
    cuts = np.flatnonzero((keys[:, 1:] != keys[:, :-1]).any(axis=0)) + 1
    number = operators(graph)
    for some in np.split(tasks, cuts) if len(tasks) else ():
        rows, indices, *_ = (*inputs_of(graph.text_of("shape", int(some[0]))), "", "")
        launch = launch_of(graph, some)
        if (many := numbers(indices)) and (launch != NONE).all():
            host = np.flatnonzero(np.isin(number, number[launch]))
            op = graph.names[int(graph.op[some[0]])]
            yield Gathered(op, many, 4 * numbers(rows) / many, some, host)
