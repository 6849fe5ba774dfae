"""The tables of a graph besides its columns: names, edges, lanes, links, buffers.

`Names` keeps strings once, so that text columns are numbers. `Edges` are compressed rows: row i
lists what task i waits for; a `lag` is time that passes between the end of the one and the earliest
start of the other without holding anything (a launch, a link). A lane is held by one task at a
time; a link is shared by rate. All are immutable.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from foretell.errors import GraphError
from foretell.graph.columns import NONE, Array, LaneKind, fitted, frozen, owned


class Names:
    """An immutable list of different strings; number 0 is the empty one."""

    def __init__(self, texts: Iterable[str] = ("",)) -> None:
        self._texts = tuple(texts)
        assert self._texts[:1] == ("",)

    def __getitem__(self, number: int) -> str:
        return self._texts[number]

    def __len__(self) -> int:
        return len(self._texts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Names) and self._texts == other._texts

    def __hash__(self) -> int:
        return hash(self._texts)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {text: i for i, text in enumerate(self._texts)}

    def is_unique(self) -> bool:
        """Whether no string is here twice."""
        return len(self._numbers) == len(self._texts)

    def number(self, text: str) -> int:
        """The number of a string, -1 where it is not here."""
        return self._numbers.get(text, -1)

    def matching(self, text: str) -> npt.NDArray[np.int32]:
        """Numbers of all strings that equal `text` or, where it holds `*`, match it."""
        if "*" not in text:
            found = self.number(text)
            return np.array([found] if found >= 0 else [], dtype=np.int32)
        wanted = re.compile(".*".join(map(re.escape, text.split("*"))), re.DOTALL)
        hits = [i for i, t in enumerate(self._texts) if wanted.fullmatch(t)]
        return np.array(hits, dtype=np.int32)

    def adding(self, texts: Iterable[str]) -> Names:
        """These names and, after them, those of `texts` that are new; self where none is."""
        new = [t for t in dict.fromkeys(texts) if t not in self._numbers]
        return Names(self._texts + tuple(new)) if new else self

    def numbers(self, texts: Iterable[str]) -> npt.NDArray[np.int32]:
        """The numbers of strings that are all here."""
        return np.array([self._numbers[t] for t in texts], dtype=np.int32)


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
        """The tasks that one task waits for."""
        found: Array = self.after[self.start[task] : self.start[task + 1]]
        return found

    def equals(self, other: Edges) -> bool:
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
    lag, kind = _given(lag, "lag"), _given(kind, "kind")
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


def _given(values: npt.ArrayLike | None, name: str) -> Array | None:
    """The values as a new array; None where all are zero."""
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


@dataclass(frozen=True, eq=False)
class Table:
    """Equally long read-only columns, compared by value."""

    def __post_init__(self) -> None:
        whose = type(self).__name__.lower()
        for name, kind in self.types().items():
            values = owned(getattr(self, name), kind, f"`{name}` of {whose}")
            object.__setattr__(self, name, values)
        sizes = {name: c.shape for name, c in self.columns().items()}
        if len(set(sizes.values())) > 1 or any(len(shape) != 1 for shape in sizes.values()):
            raise GraphError(f"the columns of {whose} are not equally long: {sizes}")

    @classmethod
    def types(cls) -> dict[str, Any]:
        return {f.name: f.metadata.get("dtype", _TYPES[f.name]) for f in fields(cls)}

    @classmethod
    def empty(cls) -> Self:
        return cls(**{name: np.zeros(0, t) for name, t in cls.types().items()})

    def columns(self) -> dict[str, Array]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __len__(self) -> int:
        return len(next(iter(self.columns().values())))

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and all(
            np.array_equal(a, b)
            for a, b in zip(self.columns().values(), other.columns().values(), strict=True)
        )

    __hash__ = None  # type: ignore[assignment]

    def _repr_html_(self) -> str:
        """HTML for notebooks."""
        from foretell.graph.show import table_html

        return table_html(self)

    def take(self, rows: Array) -> Self:
        """The rows at those positions (or where a mask is true)."""
        return type(self)(**{name: _sealed(c[rows]) for name, c in self.columns().items()})

    def replace(self, **columns: Array) -> Self:
        """The same table with some columns instead of its own."""
        return type(self)(**{**self.columns(), **columns})

    @classmethod
    def stack(cls, tables: Sequence[Self]) -> Self:
        """One table after the other."""
        parts = [t.columns() for t in tables]
        return cls(
            **{name: _sealed(np.concatenate([p[name] for p in parts])) for name in cls.types()}
        )


def _sealed(fresh: Array) -> Array:
    """An array just made, read-only from now on, so that no table needs to copy it."""
    fresh.flags.writeable = False
    return fresh


_TYPES: dict[str, Any] = {
    "rank": np.int32,
    "name": np.int32,
    "kind": np.uint8,
    "ordered": np.bool_,
    "capacity": np.float64,
    "task": np.int32,
    "lane": np.int32,
    "link": np.int32,
    "demand": np.float64,
    "bytes": np.float64,
    "born": np.int32,
    "dies": np.int32,
}


@dataclass(frozen=True, eq=False)
class Lanes(Table):
    """Lanes that tasks occupy: a CPU thread, a stream, a channel. Ordered ones keep issue order."""

    rank: Array
    name: Array  # index into Names
    kind: Array  # LaneKind
    ordered: Array

    def find(self, rank: int, name: int) -> int:
        """The lane of that rank and name, NONE where there is none."""
        hits = np.flatnonzero((self.rank == rank) & (self.name == name))
        return int(hits[0]) if len(hits) else NONE

    def of_kind(self, *kinds: LaneKind) -> Array:
        """Numbers of the lanes of those kinds."""
        return np.flatnonzero(np.isin(self.kind, kinds))


@dataclass(frozen=True, eq=False)
class Links(Table):
    """Links that tasks share by rate: a wire, a memory. Capacity is in bytes/s (or any rate)."""

    name: Array
    capacity: Array


@dataclass(frozen=True, eq=False)
class Rows(Table):
    """A table whose rows belong to tasks: sorted by task and then by what it names, no repeats."""

    @property
    def named(self) -> Array:
        """The second column: the lane or link that a row names."""
        found: Array = getattr(self, fields(self)[1].name)
        return found

    def is_tidy(self) -> bool:
        """Whether rows ascend strictly."""
        task, named = self.columns()["task"], self.named
        step, further = np.diff(task), np.diff(named)
        return bool(((step > 0) | ((step == 0) & (further > 0))).all())

    def tidy(self) -> Self:
        """The same rows in their order, repeats once; itself where it is tidy."""
        if self.is_tidy():
            return self
        rows = self.take(np.lexsort((self.named, self.columns()["task"])))
        return rows.merged(rows.firsts())

    def firsts(self) -> Array:
        """Where, in sorted rows, one begins that is not the same as the one before."""
        is_first = np.ones(len(self), bool)
        is_first[1:] = (np.diff(self.columns()["task"]) != 0) | (np.diff(self.named) != 0)
        return is_first

    def merged(self, firsts: Array) -> Self:
        """The first of every run of equal rows."""
        return self.take(firsts)

    def of(self, task: int) -> slice:
        """Where the rows of one task are."""
        low, high = np.searchsorted(self.columns()["task"], [task, task + 1])
        return slice(int(low), int(high))


@dataclass(frozen=True, eq=False)
class Held(Rows):
    """Further lanes a task holds besides its own, sorted by task."""

    task: Array
    lane: Array


@dataclass(frozen=True, eq=False)
class Drained(Rows):
    """Lanes a task waits to be empty of all that was issued there before it, sorted by task."""

    task: Array
    lane: Array


@dataclass(frozen=True, eq=False)
class Used(Rows):
    """How much of a link's capacity a task takes at full speed, sorted by task."""

    task: Array
    link: Array
    demand: Array

    def merged(self, firsts: Array) -> Self:
        """Every run of equal rows as one; what they demand adds up."""
        begins = np.flatnonzero(firsts)
        whole = np.add.reduceat(self.demand, begins) if len(begins) else self.demand
        return self.take(begins).replace(demand=whole)


@dataclass(frozen=True, eq=False)
class Buffers(Table):
    """Memory that tasks take and give back.

    A buffer is there from the start of the task `born` (NONE: from the beginning)
    to the end of the task `dies` (NONE: for good).
    """

    bytes: Array
    rank: Array
    born: Array
    dies: Array
    name: Array  # index into Names
    kind: Array  # BufferKind
