"""Who waits for whom: edges in compressed rows, with what each edge is for and how long it takes.

Row i lists what task i waits for. A `lag` is time that passes between the end of the one and the
earliest start of the other without holding anything (a launch, a wire).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.graph.columns import Array, frozen


@dataclass(frozen=True, eq=False)
class Edges:
    """`after[start[i]:start[i+1]]` are the tasks that task i waits for."""

    start: Array  # int64, one more than tasks
    after: Array  # int32
    lag: Array | None = None  # float64 seconds, None where all are zero
    kind: Array | None = None  # uint8 WaitKind, None where all are DATA

    @property
    def size(self) -> int:
        return len(self.after)

    @cached_property
    def waiting(self) -> Array:
        """The task each edge belongs to: the one that waits."""
        counts = np.diff(self.start)
        return frozen(np.repeat(np.arange(len(counts), dtype=np.int32), counts))

    @cached_property
    def lags(self) -> Array:
        return self.lag if self.lag is not None else frozen(np.zeros(self.size))

    @cached_property
    def kinds(self) -> Array:
        return self.kind if self.kind is not None else frozen(np.zeros(self.size, np.uint8))

    def of(self, task: int) -> Array:
        """What one task waits for."""
        found: Array = self.after[self.start[task] : self.start[task + 1]]
        return found

    def equals(self, other: "Edges") -> bool:
        return (
            np.array_equal(self.start, other.start)
            and np.array_equal(self.after, other.after)
            and np.array_equal(self.lags, other.lags)
            and np.array_equal(self.kinds, other.kinds)
        )


def edges(
    size: int,
    waiting: npt.ArrayLike,
    after: npt.ArrayLike,
    lag: npt.ArrayLike | None = None,
    kind: npt.ArrayLike | None = None,
) -> Edges:
    """Rows from pairs (waiting, after), each row sorted and without repeats.

    Of two edges between the same tasks the one with the longer lag stays.
    """
    waiting, after = np.asarray(waiting, np.int64), np.asarray(after, np.int64)
    lag = _told(lag, np.float64)
    kind = _told(kind, np.uint8)
    key = waiting * max(size, 1) + after
    if len(key) > 1 and not np.all(key[1:] > key[:-1]):
        keep = _sorted_unique(key, lag)
        waiting, after = waiting[keep], after[keep]
        lag = None if lag is None else lag[keep]
        kind = None if kind is None else kind[keep]
    start = np.zeros(size + 1, np.int64)
    np.cumsum(np.bincount(waiting, minlength=size), out=start[1:])
    return Edges(
        frozen(start),
        frozen(after, np.int32),
        None if lag is None else frozen(lag),
        None if kind is None else frozen(kind),
    )


def _told(values: npt.ArrayLike | None, dtype: Any) -> Array | None:
    """The values as an array, None where they say nothing but zero."""
    array = None if values is None else np.asarray(values, dtype)
    return array if array is not None and array.any() else None


def _sorted_unique(key: Array, lag: Array | None) -> Array:
    """Positions of the edges to keep, in order of their key."""
    order = np.argsort(key, kind="stable") if lag is None else np.lexsort((-lag, key))
    ranked = key[order]
    first = np.ones(len(ranked), bool)
    first[1:] = ranked[1:] != ranked[:-1]
    return order[first]


NO_EDGES = Edges(frozen(np.zeros(1, np.int64)), frozen(np.zeros(0, np.int32)))
