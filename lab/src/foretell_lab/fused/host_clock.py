"""The clock of one core: regions and ops by turns, each from caches that hold other data.

Items (a compiled region, or one of its ops alone) are read in passes over many of them, so that
between two readings of one the others' data has gone through the caches, as in a step; where it is
less than the last cache holds, a buffer makes up for it. Just before a reading the item's first
tensor is written again and a tiny region runs: in a step the data that flows, the interpreter and
the way into a kernel are warm. What counts is the least reading of the thread's own clock: others
use the machine too, take the core away and only ever lengthen a reading.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from foretell_lab.fused.build import decoded, operator, real_entry
from foretell_lab.fused.measure import name_of, owns, value_of
from foretell_lab.fused.region import Entry, Op, Region, references

Tensor = Any
LONGEST = 2e-2  # seconds; longer items are read no further
_CACHE = 48 << 20  # bytes that evict the last cache: the one of the core measured has 32 MiB
_SURE = 0.01  # two least readings this near are enough
_POOL = 1 << 24  # random numbers that entering tensors are filled from
TINY = Region(
    "tiny", (Entry((64,), (1,), "float32"),), (Op("aten.relu.default", [["%", 0, -1]], {}),),
    ((1, -1),),
)  # fmt: skip


@dataclass
class Item:
    """Something to be read: how it runs, the tensor it finds fresh, and whose data it shares."""

    run: Callable[[], Any]
    fresh: Tensor | None
    moved: int  # bytes it reads and writes, at least
    home: int
    read: list[float] = field(default_factory=list)

    def is_sure(self, fewest: int) -> bool:
        """Whether further readings would change little, or it takes too long."""
        if len(self.read) < fewest:
            return False
        return self.read[1] < self.read[0] * (1 + _SURE) or self.read[0] > LONGEST


class Clock:
    """Reads items by turns."""

    def __init__(self) -> None:
        self.tiny: Callable[[list[Tensor]], Any] = lambda entries: None
        self._small = [torch.zeros(64)]
        self._sink, self._at = torch.zeros(2 * _CACHE // 4), 0
        self._touched, self._last = 0, dict[int, int]()
        self._pool = {torch.float32: torch.randn(_POOL)}
        self._pool[torch.bfloat16] = self._pool[torch.float32].bfloat16()

    def entry(self, entry: Entry) -> Tensor:
        """A tensor of random numbers, as it lies in memory."""
        pool = self._pool.get(getattr(torch, entry.dtype))
        extent = 1 + sum((n - 1) * s for n, s in zip(entry.shape, entry.stride, strict=True))
        if pool is None or extent > len(pool):
            return real_entry(entry, "cpu")
        return pool[:extent].clone().as_strided(entry.shape, entry.stride)

    def passes(self, items: Sequence[Item], fewest: int, most: int) -> None:
        """Read items by turns until each is sure."""
        for item in items:
            item.run()
        for _ in range(most):
            for item in items:
                if not item.is_sure(fewest):
                    self._take(item)

    def _take(self, item: Item) -> None:
        self._evict(_CACHE - self._touched + self._last.get(item.home, self._touched))
        if item.fresh is not None:
            item.fresh.mul_(1.0)
        self.tiny(list(self._small))
        start = time.thread_time()
        made = item.run()
        item.read.append(time.thread_time() - start)
        item.read.sort()
        del made
        self._touched += item.moved
        self._last[item.home] = self._touched

    def _evict(self, count: int) -> None:
        """Touch so many bytes of something else."""
        if count > 0:
            part = self._sink[self._at : self._at + count // 4]
            part.add_(1.0)
            self._at = (self._at + len(part)) % (len(self._sink) // 2)
            self._touched += part.numel() * 4


def region_item(
    home: int, run: Callable[[list[Tensor]], Any], entries: list[Tensor], made: Sequence[Any]
) -> Item:
    """A compiled region; `made` is what it gives."""
    fresh = entries[0] if entries and _is_writable(entries[0]) else None
    return Item(lambda: run(list(entries)), fresh, _bytes([*entries, *made]), home)


def op_items(home: int, region: Region, entries: list[Tensor]) -> list[tuple[str, Item]]:
    """Each op of a region alone, under the name that tells its cost."""
    values: list[Any] = list(entries)
    found = []
    for op in region.ops:
        args, kwargs = (
            decoded(a, lambda r: value_of(values, r), "cpu") for a in (op.args, op.kwargs)
        )
        run = partial(operator(op.name), *args, **kwargs)
        made = run()
        values.append(made)
        reads = [value_of(values, [0, v, r]) for v, r in references([op.args, op.kwargs])]
        fresh = next((t for t in reads if _is_writable(t)), None)
        many = made if isinstance(made, (tuple, list)) else [made]
        item = Item(run, fresh, _bytes([*reads, *many]), home)
        found.append((name_of(op.name, op.args, op.kwargs, values), item))
    return found


def _is_writable(t: Tensor) -> bool:
    return bool(t.is_floating_point() and owns(t))


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))
