"""Regions lowered to the kernels Inductor would make of them, each a region of its own.

    found = lowered(regions, units)
    found.regions, found.of         # kernels as regions, and the region each belongs to

Ops become loop nests (→ `fused_place`), nests are joined to kernels (→ `fused_join`), kernels run
in an order (→ `fused_order`) and are written down one by one (→ `fused_kernel`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foretell.compiled import I1, compiled
from foretell.cost.fused_codes import PREPARED, SIZE
from foretell.cost.fused_join import joined
from foretell.cost.fused_kernel import Made, Rest, touched_before, write_down
from foretell.cost.fused_levels import live, settle
from foretell.cost.fused_library import finished
from foretell.cost.fused_order import ordered
from foretell.cost.fused_place import nests
from foretell.cost.fused_regions import Regions
from foretell.cost.fused_values import LIBRARY, Array, Flags, Ops, Whole
from foretell.cost.fusion_class import KIND_CODE, codes_of

_ZEROS, _CASTS = codes_of(["zeros", "cast"]).tolist()
_SMALL = 8e-7  # seconds of a kernel that hardly does anything: medians of 204 fills, of 72 casts


class Lowered(NamedTuple):
    """Kernels as regions; the region each is of, and whether a library has it ready."""

    regions: Regions
    of: Whole
    library: Flags
    known: Array  # seconds of a library's kernel that no product is; 0 for all else


def lowered(regions: Regions, units: float) -> Lowered:
    """The kernels of all regions, on a device of so many units."""
    start = np.searchsorted(regions.target, np.arange(len(regions.op) + 1))
    rest = Rest(regions.dtype, regions.last, regions.flops, regions.seconds)
    room = 2
    while True:
        o = Ops(
            start, regions.source, regions.pattern, KIND_CODE[regions.op], regions.op,
            SIZE[regions.dtype], regions.elements, regions.looped, regions.inner, regions.across,
            regions.writes.copy(), regions.last, regions.flops,
        )  # fmt: skip
        made = _empty(room * (len(regions.op) + 64), room * (len(regions.source) + 128))
        if _lower(o, rest, regions.first, units, made):
            return _found(made)
        room *= 2


def _empty(nodes: int, edges: int) -> Made:
    whole = (np.zeros(nodes, np.int64) for _ in range(4))
    return Made(
        np.zeros(3, np.int64), np.zeros(nodes + 1, np.int64), next(whole), np.zeros(nodes, bool),
        np.zeros(nodes), next(whole), next(whole), next(whole), np.zeros((nodes, 8)),
        np.zeros((edges, 3), np.int64),
    )  # fmt: skip


def _found(made: Made) -> Lowered:
    kernels, nodes, edges = made.used.tolist()
    elements, looped, inner, last, writes, flops, seconds, since = made.numbers[:nodes].T.copy()
    source, target, pattern = made.edges[:edges].T.copy()
    regions = Regions(
        made.first[: kernels + 1], made.op[:nodes], made.dtype[:nodes], elements, looped, inner,
        made.across[:nodes], last, writes, flops, seconds, source, target, pattern,
        np.ones(kernels, bool), since, lowered=True,
    )  # fmt: skip
    return Lowered(regions, made.of[:kernels], made.library[:kernels], made.known[:kernels])


@compiled
def _lower(o: Ops, rest: Rest, first: I1, units: float, made: Made) -> bool:
    """Write down the kernels of all regions; False where there is too little room."""
    for r in range(len(first) - 1):
        low, high = first[r], first[r + 1]
        settle(low, high, o.start, o.source, o.kind, o.writes)
        alive = live(low, high, o.start, o.source, o.kind, o.op, o.writes)
        k, v = nests(o, low, high, alive, units)
        group = joined(k, o.elements, o.size, low)
        count, edges = k.used[0], o.start[high] - o.start[low]
        touched = touched_before(o, low, high, count)
        for g in ordered(k, group, o.size, low):
            if made.used[1] + 3 * (high - low + count) + 2 > len(made.op):
                return False
            if made.used[2] + 4 * (edges + 2 * count) + count * count > len(made.edges):
                return False
            known, counted = finished(k, group, g, units)
            n = low + k.node[g]
            if counted:
                _small(made, r, _ZEROS, rest.dtype[n])
            write_down(o, rest, low, high - low, k, v, group, g, touched, made)
            _close(made, r, known, k.part[g] == LIBRARY or known > 0)
            if known > 0 and o.size[n] == 2:
                _small(made, r, _CASTS, rest.dtype[n])
            if PREPARED[o.op[n]] and k.part[g] == LIBRARY:
                made.known[made.used[0] - 1] = _own(rest.seconds[n])
                _small(made, r, _ZEROS, rest.dtype[n])
    return True


@compiled
def _own(seconds):  # type: ignore[no-untyped-def]
    """What a library's kernel took by itself, without the one that prepares it; 0 for unknown."""
    return max(seconds - _SMALL, _SMALL) if seconds > 0 else 0.0


@compiled
def _close(made, r, known, library):  # type: ignore[no-untyped-def]
    """The nodes written down since the last kernel are one of region r."""
    at = made.used[0]
    made.of[at], made.known[at], made.library[at] = r, known, library
    made.used[0] += 1
    made.first[at + 1] = made.used[1]


@compiled
def _small(made, r, op, dtype):  # type: ignore[no-untyped-def]
    """A kernel that a library starts beside its own, too small to be told more of."""
    at = made.used[1]
    made.op[at], made.dtype[at], made.across[at] = op, dtype, 0
    row = made.numbers[at]
    row[:] = 1.0
    row[4], row[5], row[6], row[7] = SIZE[dtype], 0.0, np.nan, 0.0
    made.used[1] += 1
    _close(made, r, _SMALL, True)
