"""The small tables beside a graph's tasks: lanes, links, lanes held and drained, buffers.

A lane is held by one task at a time; a link is shared by rate. Tables are immutable columns too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np

from foretell.errors import GraphError
from foretell.graph.columns import NONE, Array, LaneKind, owned


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
        """What a notebook shows."""
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
    """What tasks occupy: a CPU thread, a stream, a channel. Ordered ones keep the issue order."""

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
    """What tasks share by rate: a wire, a memory. Capacity is in bytes/s (or any unit of rate)."""

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
