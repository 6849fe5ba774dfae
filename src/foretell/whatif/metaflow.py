"""Substitutions of parts of the model by equal ones: joined matmuls, pointwise work in epilogues.

Matmuls that stand side by side and are asked the same (the three projections of an attention)
become one with an output as wide as all of them:

    seconds = Σ measured · price(one product) / Σ price(each)

and so do, in the backward pass, their gradients: of the input a matmul that sums over all of them,
of the weights one as tall as all. What only touches each number of a product's or convolution's
output (bias, activation) is done before that output is written, and its kernel goes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretell.cluster.node import Device
from foretell.cost import kernel as kernels
from foretell.cost.kernel import write_shape as write
from foretell.graph.edit import Edit
from foretell.graph.graph import Array, Dtype, Graph, Phase, word_of
from foretell.whatif.base import DoesNotApply, Setting, WhatIf
from foretell.whatif.calls import host_of, issued, kernels_of, ops_of
from foretell.whatif.kernel_request import sizes_of
from foretell.whatif.machine import device_of

PRODUCTS = ("mm", "addmm", "gemm")
BEFORE = (*PRODUCTS, "convolution", "conv")
BIASES = ("add_", "add")  # of the same layer as the product before
EPILOGUES = ("relu", "relu_", "clamp_min", "clamp_min_", "gelu", "silu", "hardtanh")


@dataclass(frozen=True)
class Metaflow(WhatIf):
    """Join matmuls of one input, and put activations into the kernels before them."""

    name = "metaflow"
    assumes = (
        "equal matmuls with no kernel between them have the same input",
        "an activation done in an epilogue costs nothing there; its gradient stays as it is",
    )
    source = "Jia et al., Optimizing DNN Computation with Relaxed Graph Substitutions, MLSys 2019"
    join: bool = True  # whether matmuls are joined
    epilogue: bool = True  # whether activations are put into epilogues

    def apply(self, graph: Graph, setting: Setting) -> Graph:
        runs = _parallel(graph) if self.join else []
        epilogues = _epilogues(graph) if self.epilogue else np.zeros(0, np.int64)
        if not runs and not len(epilogues):
            raise DoesNotApply("the step has nothing that a substitution knows")
        device = _device(graph, setting)
        with graph.edit(str(self)) as edit:
            for run in runs:
                _joined(edit, run, run[0], "n", device)
                _joined_backward(edit, run, device)
            edit.remove(epilogues)
            edit.remove(host_of(graph, epilogues))
        return edit.graph


def _device(graph: Graph, setting: Setting) -> Device | None:
    try:
        return device_of(graph, setting)
    except DoesNotApply:
        return None  # then joined matmuls take what they take apart


def _epilogues(graph: Graph) -> Array:
    """Bias and activation right behind a matmul or convolution of the forward pass."""
    found = []
    for rank in np.unique(graph.rank).tolist():
        tasks = kernels_of(graph, rank)
        tasks = tasks[graph.phase[tasks] == Phase.FORWARD]
        whose = 0  # the layer of the matmul that is still open for an epilogue
        for task, op in zip(tasks.tolist(), ops_of(graph, tasks), strict=True):
            is_bias = op in BIASES and whose != 0 and graph.layer[task] == whose
            if op in BEFORE:
                whose = int(graph.layer[task])
            elif whose and (is_bias or op in EPILOGUES):
                found.append(task)
                whose = whose if is_bias else 0
            else:
                whose = 0
    return np.array(found, np.int64)


def _parallel(graph: Graph) -> list[Array]:
    """Runs of equal matmuls of the forward pass with no other kernel between."""
    runs: list[Array] = []
    for rank in np.unique(graph.rank).tolist():
        tasks = kernels_of(graph, rank)
        tasks = tasks[graph.phase[tasks] == Phase.FORWARD]
        is_product = np.isin(ops_of(graph, tasks), PRODUCTS)
        same = np.zeros(len(tasks), bool)
        for column in ("op", "shape"):
            values = graph.column(column)[tasks]
            equal = values[1:] == values[:-1]
            same[1:] = equal if column == "op" else same[1:] & equal
        same &= is_product & (graph.layer[tasks] != np.roll(graph.layer[tasks], 1))
        breaks = np.flatnonzero(~same)
        runs += [run for run in np.split(tasks, breaks) if len(run) > 1]
    return runs


def _joined(edit: Edit, run: Array, stays: int, grows: str, device: Device | None) -> None:
    """Make several equal matmuls one; `grows` is the size that is now the sum of theirs."""
    graph = edit.before
    others = run[run != stays]
    ratio = _ratio(graph, int(stays), grows, len(run), device)
    edit.set(stays, seconds=float(graph.seconds[run].sum()) * ratio)
    for column in ("flops", "bytes"):
        if column in graph.columns:
            edit.set(stays, **{column: float(graph.column(column)[run].sum())})
    edit.remove(others)
    edit.remove(host_of(graph, others))


def _joined_backward(edit: Edit, run: Array, device: Device | None) -> None:
    """The gradients of joined matmuls: those asked the same, joined where the last of them is."""
    graph = edit.before
    rows = _sizes(graph, int(run[0])).get("m", 0.0)
    mine = np.isin(graph.layer, graph.layer[run]) & (graph.phase == Phase.BACKWARD)
    mine &= (graph.rank == graph.rank[run[0]]) & (graph.layer != 0)
    tasks = np.flatnonzero(mine)
    tasks = issued(graph, tasks[np.isin(ops_of(graph, tasks), PRODUCTS)])
    for shape in np.unique(graph.shape[tasks]).tolist():
        for group in _split(tasks[graph.shape[tasks] == shape], len(run)):
            is_of_weights = _sizes(graph, int(group[0])).get("k") == rows
            _joined(edit, group, group[-1], "m" if is_of_weights else "k", device)


def _split(tasks: Array, count: int) -> list[Array]:
    """Tasks split into groups of one from each product; none where they do not come out even."""
    if len(tasks) < count or len(tasks) % count:
        return []
    return list(tasks.reshape(count, -1).T)


def _ratio(graph: Graph, task: int, grows: str, count: int, device: Device | None) -> float:
    sizes = _sizes(graph, task)
    if device is None or not sizes:
        return 1.0
    dtype = word_of(Dtype, graph.dtype[task])
    shapes = [write(sizes), write({**sizes, grows: sizes[grows] * count})]
    apart, joined = kernels.seconds(device, "gemm", dtype if dtype != "none" else "fp32", shapes)[0]
    return min(1.0, float(joined / (count * apart)))


def _sizes(graph: Graph, task: int) -> dict[str, float]:
    return sizes_of(graph.text_of("op", task), graph.text_of("shape", task))
