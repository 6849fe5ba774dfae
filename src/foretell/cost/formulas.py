"""The formulas as links of the price chain: kernels, copies and collectives.

Each takes the pieces of work it understands, asks the formula once for all of one device or one
group of ranks, and passes on the rest.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from foretell.cluster import Device
from foretell.cost import collective, kernel, learned
from foretell.cost.work import Work
from foretell.graph.columns import COLLECTIVES, Array, Kind, Source
from foretell.graph.groups import ranks_of

COPY_START = 4e-6  # seconds before a copy over the host's bus moves anything: a DMA set-up
COPY_SIGMA = 0.25  # pinned memory reaches most of the bus, pageable half of it; nothing says which


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
                levels = work.cluster.levels(ranks_of(work.group[r]))
                found = collective.price(work.op[r], float(work.comm_bytes[r]), levels)
                seconds[r], sigma[r] = found.seconds, found.sigma
        return seconds, sigma


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
