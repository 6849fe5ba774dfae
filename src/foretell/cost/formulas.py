"""The formulas as links of the price chain: operators as their kernels, copies and collectives.

Each takes the pieces of work it understands, asks the formula once for all of one device or one
group of ranks, and passes on the rest.

Lets a price model that knows kernels answer for PyTorch operators.

An operator's price is the sum of its kernels' (→ `foretell.cost.aten`), and is known where all of
them are. Work that is no operator goes to the model as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from foretell.cluster import Device
from foretell.cost import collective, kernel, learned
from foretell.cost.aten import Kernel, is_call, kernels
from foretell.cost.price import Work
from foretell.graph.columns import COLLECTIVES, Array, Kind, Source
from foretell.graph.groups import ranks_of

COPY_START = 4e-6  # seconds before a copy over the host's bus moves anything: a DMA set-up
COPY_SIGMA = 0.25  # pinned memory reaches most of the bus, pageable half of it; nothing says which


class Model(Protocol):
    """What can be wrapped; → `foretell.cost.price.Model`."""

    name: str
    source: Source

    def price(self, work: Work) -> tuple[Array, Array]: ...


class Operators:
    """A price model applied to the kernels of each operator."""

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


class KernelFormula:
    """Roofline with efficiency curves, by op class, shape and number format."""

    name = "kernel formula"
    source = Source.FORMULA

    def price(self, work: Work) -> tuple[Array, Array]:
        seconds, sigma = _unknown(work)
        is_known = (work.kind == Kind.KERNEL) & _is_described(work)
        for device, rows in _by_device(work, np.flatnonzero(is_known)):
            part = work.take(rows)
            found = kernel.seconds(
                device, part.op, _formats(part.dtype), part.shape, part.flops, part.bytes
            )
            seconds[rows], sigma[rows] = found.seconds, found.sigma
        return seconds, sigma


class LearnedKernel:
    """A correction learned on devices that were measured densely; passes everywhere else."""

    name = "learned kernel"
    source = Source.LEARNED

    def price(self, work: Work) -> tuple[Array, Array]:
        seconds, sigma = _unknown(work)
        is_known = (work.kind == Kind.KERNEL) & np.array([bool(text) for text in work.shape], bool)
        for device, rows in _by_device(work, np.flatnonzero(is_known)):
            part = work.take(rows)
            found = learned.seconds(device, part.op, _formats(part.dtype), part.shape)
            seconds[rows], sigma[rows] = found.seconds, np.nan_to_num(found.sigma)
        return seconds, sigma


class CopyFormula:
    """Bytes over the host's bus, or over the device's own memory where the op says so."""

    name = "copy formula"
    source = Source.FORMULA

    def price(self, work: Work) -> tuple[Array, Array]:
        seconds, sigma = _unknown(work)
        moved = np.where(work.bytes > 0, work.bytes, work.comm_bytes)
        for r in np.flatnonzero((work.kind == Kind.COPY) & (moved > 0)).tolist():
            inside = work.op[r] in ("d2d", "memset", "copy")
            rate = (
                _memory_rate(work, r) if inside else work.cluster.host_bandwidth(int(work.rank[r]))
            )
            seconds[r], sigma[r] = COPY_START + moved[r] / rate, COPY_SIGMA
        return seconds, sigma


class CollectiveFormula:
    """α–β by algorithm, protocol and topology, the quickest way as NCCL would take it."""

    name = "collective formula"
    source = Source.FORMULA

    def price(self, work: Work) -> tuple[Array, Array]:
        seconds, sigma = _unknown(work)
        known = (*COLLECTIVES, "send", "gather", "scatter")
        for r in range(len(work)):
            if work.kind[r] in (Kind.COLLECTIVE, Kind.SEND) and work.op[r] in known:
                levels = work.cluster.levels(_ranks(work, r))
                found = collective.price(work.op[r], float(work.comm_bytes[r]), levels)
                seconds[r], sigma[r] = found.seconds, found.sigma
        return seconds, sigma


def _ranks(work: Work, r: int) -> Sequence[int]:
    """The ranks that communicate; all of the cluster where nothing says which."""
    return ranks_of(work.group[r]) or range(work.cluster.size)


def _unknown(work: Work) -> tuple[Array, Array]:
    return np.full(len(work), np.nan), np.zeros(len(work))


def _is_described(work: Work) -> Array:
    """Where something is known that a price can be made of."""
    has_shape = np.array([bool(text) for text in work.shape], bool)
    found: Array = has_shape | (work.flops > 0) | (work.bytes > 0)
    return found


def _by_device(work: Work, rows: Array) -> Iterator[tuple[Device, Array]]:
    """Rows grouped by the kind of device they run on."""
    devices = [work.cluster.devices[int(rank)] for rank in work.rank[rows]]
    names = np.array([device.name for device in devices])
    for name in dict.fromkeys(names.tolist()):
        mine = np.flatnonzero(names == name)
        yield devices[int(mine[0])], rows[mine]


def _formats(dtypes: tuple[str, ...]) -> tuple[str, ...]:
    """Number formats a formula knows; work without one is priced as fp32."""
    return tuple("fp32" if d in ("none", "complex64") else d for d in dtypes)


def _memory_rate(work: Work, r: int) -> float:
    """A copy inside a device reads and writes: half its bandwidth moves bytes."""
    return work.cluster.devices[int(work.rank[r])].memory_bandwidth / 2
