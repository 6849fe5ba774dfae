"""The formulas as links of the price chain: operators as their kernels, copies and collectives.

Each takes the pieces of work it understands, asks the formula once for all of one device or one
group of ranks, and passes on the rest. `Operators` lets a model that knows kernels answer for
PyTorch's operators: the price of one is the sum of its kernels' (→ `foretell.cost.aten`), and is
known where all of them are. Work that is no operator goes to the model as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from foretell.cluster import Device
from foretell.cost import collective, kernel, learned
from foretell.cost.aten import Kernel, kernels
from foretell.cost.price import Model, Work
from foretell.cost.shape import is_call
from foretell.graph.columns import COLLECTIVES, Array, Kind, Source
from foretell.graph.groups import ranks_of

COPY_START = 4e-6  # seconds before a copy over the host's bus moves anything: a DMA set-up
COPY_SIGMA = 0.25  # pinned memory reaches most of the bus, pageable half of it; nothing says which


class Operators:
    """A price model applied to the kernels of each operator."""

    def __init__(self, model: Model, *, plain: bool = False) -> None:
        self.model, self.plain = model, plain
        self.name: str = model.name
        self.source: Source = model.source

    def price(self, work: Work) -> tuple[Array, Array]:
        row, found = _spelled(work, self.plain)
        asked = replace(
            work.take(row),
            op=tuple(k.op for k in found),
            shape=tuple(k.shape for k in found),
            flops=np.array([k.flops for k in found]),
            bytes=np.array([k.bytes for k in found]),
        )
        seconds, sigma = self.model.price(asked)
        return _summed(row, seconds * np.array([k.times for k in found]), sigma, len(work))


def _spelled(work: Work, plain: bool) -> tuple[Array, list[Kernel]]:
    """Every operator as its kernels, and for each kernel the row it came from."""
    rows: list[int] = []
    found: list[Kernel] = []
    for r in range(len(work)):
        asked = work.op[r], work.shape[r], float(work.bytes[r]), float(work.flops[r])
        parts: tuple[Kernel, ...] = (Kernel(*asked),)
        if work.kind[r] == Kind.KERNEL and is_call(work.shape[r]):
            parts = kernels(*asked)
            parts = tuple(map(_without_layout, parts)) if plain else parts
        rows += [r] * len(parts)
        found += parts
    return np.array(rows, np.int64), found


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
        is_known = (work.kind == Kind.KERNEL) & self.knows(work)
        for device, rows in _by_device(work, np.flatnonzero(is_known)):
            found = self.formula(device, work.take(rows))()
            seconds[rows], sigma[rows] = found.seconds, np.nan_to_num(found.sigma)
        return seconds, sigma

    def knows(self, work: Work) -> Array:
        """Where something is known that a price can be made of."""
        found: Array = _has_shape(work) | (work.flops > 0) | (work.bytes > 0)
        return found

    def formula(self, device: Device, work: Work) -> Callable[[], kernel.Price]:
        """What prices work on one device."""
        formats = _formats(work.dtype)
        return partial(kernel.seconds, device, work.op, formats, work.shape, work.flops, work.bytes)


class LearnedKernel(KernelFormula):
    """A correction learned on devices that were measured densely; passes everywhere else."""

    name = "learned kernel"
    source = Source.LEARNED

    def knows(self, work: Work) -> Array:
        """Where there is a shape."""
        return _has_shape(work)

    def formula(self, device: Device, work: Work) -> Callable[[], kernel.Price]:
        """What prices work on one device."""
        return partial(learned.seconds, device, work.op, _formats(work.dtype), work.shape)


class CopyFormula:
    """Bytes over the host's bus, or over the device's own memory where the op says so."""

    name = "copy formula"
    source = Source.FORMULA

    def price(self, work: Work) -> tuple[Array, Array]:
        seconds, sigma = _unknown(work)
        moved = np.where(work.bytes > 0, work.bytes, work.comm_bytes)
        for r in np.flatnonzero((work.kind == Kind.COPY) & (moved > 0)).tolist():
            rank = int(work.rank[r])
            rate = work.cluster.host_bandwidth(rank)
            if work.op[r] in ("d2d", "memset", "copy"):  # inside a device it is read and written
                rate = work.cluster.devices[rank].memory_bandwidth / 2
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


def _has_shape(work: Work) -> Array:
    return np.array([bool(text) for text in work.shape], bool)


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
