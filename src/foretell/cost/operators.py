"""Lets a price model that knows kernels answer for PyTorch operators.

An operator's price is the sum of its kernels' (→ `foretell.cost.aten`), and is known where all of
them are. Work that is no operator goes to the model as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from foretell.cost.aten import Kernel, is_call, kernels
from foretell.cost.work import Work
from foretell.graph.columns import Array, Kind, Source


class Model(Protocol):
    """What can be wrapped; → `foretell.cost.price.Model`."""

    name: str
    source: Source

    def price(self, work: Work) -> tuple[Array, Array]: ...


class Operators:
    """A model asked about the kernels of each operator."""

    def __init__(self, model: Model, *, plain: bool = False) -> None:
        self.model, self.plain = model, plain
        self.name: str = model.name
        self.source: Source = model.source

    def price(self, work: Work) -> tuple[Array, Array]:
        spelled = _spelled(work, self.plain)
        seconds, sigma = self.model.price(spelled.work)
        return _summed(spelled.row, seconds * spelled.times, sigma, len(work))


@dataclass(frozen=True, eq=False)
class _Spelled:
    """Work with every operator as its kernels, and for each kernel the row it came from."""

    work: Work
    row: Array
    times: Array


def _spelled(work: Work, plain: bool) -> _Spelled:
    found: list[tuple[int, Kernel]] = []
    for r in range(len(work)):
        if work.kind[r] == Kind.KERNEL and is_call(work.shape[r]):
            parts = kernels(work.op[r], work.shape[r], float(work.bytes[r]), float(work.flops[r]))
            parts = tuple(map(_without_layout, parts)) if plain else parts
        else:
            parts = (_as_it_is(work, r),)
        found += [(r, kernel) for kernel in parts]
    row = np.array([r for r, _ in found], np.int64)
    taken = work.take(row)
    return _Spelled(
        Work(
            cluster=work.cluster,
            kind=taken.kind,
            op=tuple(k.op for _, k in found),
            shape=tuple(k.shape for _, k in found),
            group=taken.group,
            dtype=taken.dtype,
            flops=np.array([k.flops for _, k in found]),
            bytes=np.array([k.bytes for _, k in found]),
            comm_bytes=taken.comm_bytes,
            rank=taken.rank,
        ),
        row,
        np.array([k.times for _, k in found]),
    )


def _as_it_is(work: Work, r: int) -> Kernel:
    return Kernel(work.op[r], work.shape[r], float(work.bytes[r]), float(work.flops[r]))


def _without_layout(kernel: Kernel) -> Kernel:
    """A product's sizes alone: tables of linear layers do not say how operands lie in memory."""
    sizes = [p for p in kernel.shape.split(",") if not p.startswith(("ta=", "tb="))]
    return replace(kernel, shape=",".join(sizes))


def _summed(row: Array, seconds: Array, sigma: Array, size: int) -> tuple[Array, Array]:
    """Sums by row; the spread of a sum of parts that err together."""
    total = np.zeros(size)
    spread = np.zeros(size)
    np.add.at(total, row, seconds)
    np.add.at(spread, row, np.where(np.isnan(seconds), 0.0, seconds * sigma))
    known = total > 0
    return total, np.divide(spread, total, out=np.zeros(size), where=known)
