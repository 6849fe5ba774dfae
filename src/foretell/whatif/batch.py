"""More or fewer samples a step: the device and the loader do more or less work.

Only the gradient of an embedding's table jumps with the number of indices:

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

from foretell import portable
from foretell.errors import InputError
from foretell.graph.edit import Edit
from foretell.graph.graph import NONE, Array, Graph, Kind, Phase
from foretell.memory.tape import Tape, resized
from foretell.whatif.base import DoesNotApply, Setting, WhatIf
from foretell.whatif.calls import issued, launch_of, operators, usual_launch
from foretell.whatif.parameters import inputs_of, numbers, treats_parameters

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


FLOOR = 1.5e-6  # seconds of a kernel with next to no work, on an H200: the part batch cannot change
# Larger kernels fill the device better: the median of ln(time ratio)/ln(batch ratio) of steps held
# up by the device at half, once and twice the batch, thirteen models on an H200.
POWER = 0.96
# A step of time of a recurrent layer multiplies all its weights by as many rows as there are
# samples: it is held up by the weights. From a GRU and an LSTM on an H200.
RECURRENT, STEPWISE = 0.75, "_cudnn_rnn*"


@dataclass(frozen=True)
class Batch(WhatIf):
    """Use `times` as many samples a step."""

    name = "batch"
    source = "ours: how kernels of each sort grow with their samples"
    assumes = (
        f"the host issues the same calls; forward and backward kernels take batch^{POWER} as long, "
        f"those of recurrent layers batch^{RECURRENT}",
        "the batch changes neither the optimizer's work nor what fills, casts or adds whole "
        "parameters",
        "the gradient of an embedding is made as PyTorch makes it for so many indices",
    )
    code = "DataLoader(…, batch_size=…)"
    times: float = 2.0  # how many times as many

    def apply(self, graph: Graph, setting: Setting) -> Graph:
        if not 0 < self.times < float("inf"):
            raise InputError(
                f"`{self}` uses {self.times} times the samples", hint="use more than 0"
            )
        phases = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD)
        is_mine = np.isin(graph.kind, (Kind.KERNEL, Kind.COPY)) & np.isin(graph.phase, phases)
        tasks = np.flatnonzero(is_mine & ~treats_parameters(graph))
        if not len(tasks):
            raise DoesNotApply("the step has no kernels of a forward or backward pass")
        floor = np.minimum(graph.seconds[tasks], FLOOR)
        is_stepwise = np.isin(graph.op[tasks], graph.names.matching(STEPWISE))
        grown = portable.power(self.times, np.where(is_stepwise, RECURRENT, POWER))
        with graph.edit(str(self)) as edit:
            edit.scale(np.flatnonzero(graph.kind == Kind.LOAD), self.times)
            edit.set(tasks, seconds=floor + (graph.seconds[tasks] - floor) * grown)
            for column in ("flops", "bytes"):
                if column in graph.columns:
                    edit.scale(tasks, self.times, column)
            remade(edit, graph, self.times)
        return edit.graph

    def hold(self, tape: Tape) -> Tape:
        return resized(tape, self.times)
