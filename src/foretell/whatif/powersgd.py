"""PowerSGD: each gradient matrix is sent as two thin ones.

A gradient of shape n × … is the matrix M of n rows and m columns. With rank r, as torch's
`powerSGD_hook` does it, bucket by bucket and matrix by matrix:

    M += error;  Q orthogonal;  P = M·Q   4 passes over M   all-reduce P (r·n) and all vectors
    P orthogonal;  Q = Mᵀ·P               1 pass over M     all-reduce Q (r·m numbers)
    M' = P·Qᵀ;  error = M − M'            4 passes over M   the host waits for the device

With more than two columns a matrix is made orthogonal by `torch.linalg.qr`, with fewer column by
column. The wait (`torch.cuda.synchronize` in the hook) leaves no message beside the backward pass.

Vectors, and matrices of which P and Q hold more than half as much, are sent whole. Where the shapes
in a bucket are not known it is one square matrix, as in torch's `batched_powerSGD_hook`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from foretell.cost.kernel import passes
from foretell.errors import InputError
from foretell.graph.graph import Array, Graph
from foretell.memory.tape import Tape
from foretell.whatif.base import Setting, WhatIf
from foretell.whatif.bucket_copies import KERNEL, memory_rate
from foretell.whatif.calls import call_seconds
from foretell.whatif.collective_cost import Wires, wires
from foretell.whatif.exchange import exchanging_ranks, group_of
from foretell.whatif.memory_effect import with_gradients
from foretell.whatif.parameters import numbers as numbers_in
from foretell.whatif.stages import Stage, take_apart

LEAST = 2.0  # `min_compression_rate` of torch's hook: what is less is sent whole
STEPS = 4  # kernels to make one column orthogonal to those before it: norm, scale, dot, subtract
BY_COLUMN = 2  # most columns that torch's hook makes orthogonal one by one
PASSES = (4.0, 1.0, 4.0)  # over the matrices: before P is sent, before Q is sent, behind it


@dataclass(frozen=True)
class _Bucket:
    """What a bucket becomes, in numbers (not bytes)."""

    left: float = 0.0  # P, all matrices
    right: float = 0.0  # Q
    whole: float = 0.0  # what is not compressed
    matrices: float = 0.0  # what is
    count: int = 0  # how many matrices, each with matmuls of its own
    vectors: int = 0  # how many tensors are sent whole, each copied back by itself


@dataclass(frozen=True)
class PowerSgd(WhatIf):
    """Send gradients as products of two matrices of `rank` columns."""

    name = "powersgd"
    assumes = (
        "matmuls with so few columns take what reading the matrix takes; torch's hook and defaults",
        "the hook waits for the device once a bucket, so no message is beside the backward pass",
        "the model still learns as well with gradients of so low a rank",
    )
    source = "Vogels et al. 2019, PowerSGD (NeurIPS); torch powerSGD_hook"
    code = "model.register_comm_hook(PowerSGDState(None, rank), powerSGD_hook)"
    rank: int = 4  # columns of the thin matrices

    def apply(self, graph: Graph, setting: Setting) -> Graph:
        if self.rank < 1:
            raise InputError(f"`{self}` has rank {self.rank}", hint="use 1, 2, 4 …")
        old = exchanging_ranks(graph, op="all_reduce")
        group = group_of(graph, old)
        links, rate = wires(graph, setting, len(group)), memory_rate(graph, setting)
        size = graph.comm_bytes[old]
        shapes = [graph.text_of("shape", int(i)) for i in old]
        parts = [thin(text, s / 4, self.rank) for text, s in zip(shapes, size, strict=True)]
        each = np.array([(p.left, p.right, p.whole, p.matrices) for p in parts]) * 4.0
        count = np.array([(float(p.count), float(p.vectors)) for p in parts])
        with graph.edit(str(self)) as edit:
            call = call_seconds(graph)
            take_apart(edit, old, self._stages(each, count, links, group, rate, call))
        return edit.graph

    def hold(self, tape: Tape) -> Tape:
        return with_gradients(tape, 1.0)  # the error that is fed back

    def _stages(
        self,
        each: Array,
        count: Array,
        links: Wires,
        group: tuple[int, ...],
        rate: float,
        call: float,
    ) -> tuple[Stage, ...]:
        left, right, whole, matrices = each.T
        count, vectors = count.T
        known = passes()["powersgd"]
        by_column = self.rank <= BY_COLUMN
        kernels = STEPS * self.rank if by_column else known["kernels"]
        made = count * (kernels * call if by_column else known["qr"])
        row = 0.0 if by_column else known["row"] / (4.0 * self.rank)  # seconds a byte
        launches = ((kernels + 1) * count + 2, (kernels + 1) * count + vectors, count + 2)
        extra = (row * right, row * left, 0.0 * left)
        hosts = (made + (2 * count + 2) * call, made + (count + vectors) * call, (count + 2) * call)
        names = ("powersgd_p", "powersgd_q", "powersgd_back")
        first, middle, back = (
            Stage(
                n,
                k * KERNEL + p * matrices / rate + x,
                p * matrices,
                host=h,
                is_awaited=n == names[2],
            )
            for n, k, p, x, h in zip(names, launches, PASSES, extra, hosts, strict=True)
        )
        sent = np.where(whole > 0, links.seconds("all_reduce", whole, group), 0.0)
        sent = sent + np.where(left > 0, links.seconds("all_reduce", left, group), 0.0)
        one = Stage("all_reduce", sent, whole + left, True)
        took = np.where(right > 0, links.seconds("all_reduce", right, group), 0.0)
        return (first, one, middle, Stage("all_reduce", took, right, True), back)


def thin(shapes: str, numbers: float, rank: int) -> _Bucket:
    """What a bucket of so many numbers becomes: `in=1000x2048+1000` by shape."""
    dims = [d.split("x") for d in shapes.removeprefix("in=").split("+")]
    counted = sum(numbers_in("x".join(d)) for d in dims)
    if not numbers or not math.isclose(counted, numbers, rel_tol=0.01):  # not those of the tensors
        side = math.sqrt(numbers)
        dims = [[str(math.ceil(side)), str(max(1, int(numbers / math.ceil(side))))]]
    left = right = whole = matrices = 0.0
    count = vectors = 0
    for sizes in dims:
        rows = float(sizes[0])
        columns = float(np.prod([float(s) for s in sizes[1:]])) if len(sizes) > 1 else 0.0
        r = min(rank, rows, columns)
        if not columns or rows * columns < LEAST * (rows + columns) * r:
            whole, vectors = whole + rows * (columns or 1.0), vectors + 1
            continue
        left, right, matrices = left + rows * r, right + columns * r, matrices + rows * columns
        count += 1
    return _Bucket(left, right, whole, matrices, count, vectors)
