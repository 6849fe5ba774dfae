"""Who waits for whom: edges in compressed rows, with what each edge is for and how long it takes.

Row i lists what task i waits for. A `lag` is time that passes between the end of the one and the
earliest start of the other without holding anything (a launch, a wire).
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from foretell.errors import GraphError
from foretell.graph.columns import Array, fitted, frozen, owned


@dataclass(frozen=True, eq=False)
class Edges:
    """`after[start[i]:start[i+1]]` are the tasks that task i waits for."""

    start: Array  # int64, one more than tasks
    after: Array  # int32
    lag: Array | None = None  # float64 seconds, None where all are zero
    kind: Array | None = None  # uint8 WaitKind, None where all are DATA

    def __post_init__(self) -> None:
        for name, dtype in TYPES.items():
            array = getattr(self, name)
            if array is not None:
                object.__setattr__(self, name, frozen(array, dtype))

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


# What an array of edges is stored as.
TYPES = {"start": np.int64, "after": np.int32, "lag": np.float64, "kind": np.uint8}


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
    waiting = fitted(waiting, np.int64, "`waiting` of edges")
    after = fitted(after, np.int64, "`after` of edges")
    _check_ends(size, waiting, after)
    lag, kind = _told(lag, "lag"), _told(kind, "kind")
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


def _check_ends(size: int, waiting: Array, after: Array) -> None:
    """Refuse edges from or to tasks that are not there, before two of them look the same."""
    for ends in (waiting, after):
        if len(ends) and (ends.min() < 0 or ends.max() >= size):
            bad = (waiting < 0) | (waiting >= size) | (after < 0) | (after >= size)
            k = int(np.flatnonzero(bad)[0])
            raise GraphError(
                f"task %{waiting[k]} waits for %{after[k]}; tasks are %0 to %{size - 1} "
                f"({int(bad.sum())} such edges)",
                hint="an edge names a task that is not there",
            )


def _told(values: npt.ArrayLike | None, name: str) -> Array | None:
    """The values as an array of its own, None where they say nothing but zero."""
    if values is None:
        return None
    array = owned(values, TYPES[name], f"`{name}` of edges")
    return array if array.any() else None


def _sorted_unique(key: Array, lag: Array | None) -> Array:
    """Positions of the edges to keep, in order of their key."""
    if lag is None:
        order = np.argsort(key, kind="stable")
    else:  # what is not a number comes first, so that it stays to be found out
        order = np.lexsort((-np.nan_to_num(lag, nan=np.inf), key))
    ranked = key[order]
    first = np.ones(len(ranked), bool)
    first[1:] = ranked[1:] != ranked[:-1]
    return order[first]


NO_EDGES = Edges(frozen(np.zeros(1, np.int64)), frozen(np.zeros(0, np.int32)))
