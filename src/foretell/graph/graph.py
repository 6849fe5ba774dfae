"""A graph's columns and tables, the graph, and ranks as text.

What a graph stores: the columns of its tasks, and tables of names, edges, lanes, links, buffers.

Only columns that differ from their default somewhere are stored; the others cost nothing. Text
columns (op, name, layer, shape, group) hold indices into the graph's `Names`, which keeps strings
once. `Edges` are compressed rows: row i lists what task i waits for; a `lag` is time that passes
between the end of the one and the earliest start of the other without holding anything (a launch,
a link). A lane is held by one task at a time; a link is shared by rate. All are immutable.

The task graph of one step: columns inside, tasks outside.

A `Graph` never changes. `graph[i]` is a small `Task` view for people; `graph.seconds` is the whole
column; `graph.edit()` makes the next graph from this one and shares what it does not touch.

Sets of ranks as short text: `0-7` a run, `0-56/8` every eighth, `0+3+5` one by one.

Parts are joined by `+`, so that any set can be written: `0-3+8-11`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from foretell.errors import GraphError, InputError, unknown

if TYPE_CHECKING:
    from foretell.graph.edit import Edit


Array = npt.NDArray[Any]
Ids = npt.NDArray[np.int64]
Tasks = npt.NDArray[Any] | Sequence[int] | int  # what a verb takes
NONE = -1  # no task, no lane


class Kind(IntEnum):
    """The kind of work of a task."""

    HOST = 0  # a call on a CPU thread: an operator, a launch, Python
    KERNEL = 1  # work on a device
    COPY = 2  # memory moved inside a rank: host to device, device to host, on the device
    COLLECTIVE = 3  # all ranks of a group together
    SEND = 4  # point to point, both ends
    LOAD = 5  # reading and preparing data
    SYNC = 6  # waits for others and does nothing itself


class Phase(IntEnum):
    """Which part of a training step a task belongs to."""

    NONE = 0
    LOAD = 1
    FORWARD = 2
    LOSS = 3
    BACKWARD = 4
    COMMUNICATE = 5
    UPDATE = 6


class Dtype(IntEnum):
    """The number format a task computes in."""

    NONE = 0
    FP64 = 1
    FP32 = 2
    TF32 = 3
    FP16 = 4
    BF16 = 5
    FP8 = 6
    INT64 = 7
    INT32 = 8
    INT8 = 9
    BOOL = 10
    COMPLEX64 = 11


class Source(IntEnum):
    """Where the price of a task comes from, most trusted first."""

    NONE = 0
    MEASURED = 1
    LEARNED = 2
    FORMULA = 3
    GUESSED = 4


class LaneKind(IntEnum):
    """The resource a lane stands for."""

    OTHER = 0
    HOST = 1  # a CPU thread
    COMPUTE = 2  # a stream of kernels
    COPY = 3  # a copy engine or stream
    COMM = 4  # a communication stream or channel
    LOADER = 5  # a data-loading worker


class BufferKind(IntEnum):
    """The purpose of a buffer."""

    OTHER = 0
    PARAMETER = 1
    GRADIENT = 2
    OPTIMIZER = 3
    ACTIVATION = 4
    INPUT = 5
    WORKSPACE = 6
    BUCKET = 7


class WaitKind(IntEnum):
    """Why one task waits for another."""

    DATA = 0  # it uses what the other made
    LAUNCH = 1  # a host call starts device work
    SYNC = 2  # a host call waits for device work
    EVENT = 3  # one stream waits for an event of another
    THREAD = 4  # one CPU thread hands over to another
    CONTROL = 5  # an order that was decided


# What people write for each collective and point-to-point op, here once for every room.
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce")


@dataclass(frozen=True)
class Column:
    """One column: its type, its default, and its meaning."""

    dtype: Any
    default: float
    means: str
    words: type[IntEnum] | None = None  # codes that print as words
    is_text: bool = False  # indices into Names
    low: float | None = None  # smallest value allowed


def _count(default: int, means: str, low: float | None = None) -> Column:
    return Column(np.int32, default, means, low=low)


def _number(means: str) -> Column:
    return Column(np.float64, 0.0, means, low=0.0)


def _text(means: str) -> Column:
    return Column(np.int32, 0, means, is_text=True, low=0)


def _code(words: type[IntEnum], means: str) -> Column:
    return Column(np.uint8, 0, means, words=words, low=0)


COLUMNS: Mapping[str, Column] = MappingProxyType(
    {
        "kind": _code(Kind, "what sort of work"),
        "op": _text("the kind of work: gemm, conv, all_reduce, cudaLaunchKernel"),
        "name": _text("what a person calls this task"),
        "rank": _count(0, "the process it belongs to", low=0),
        "lane": _count(NONE, "what it occupies; none for a pure wait", low=NONE),
        "seconds": _number("how long it runs when nothing disturbs it"),
        "gap": _number("how long its lanes stay taken after it has ended"),
        "flops": _number("floating-point operations"),
        "bytes": _number("bytes moved to and from device memory"),
        "comm_bytes": _number("bytes of the tensor communicated"),
        "layer": _text("the module it comes from"),
        "phase": _code(Phase, "which part of the step"),
        "dtype": _code(Dtype, "number format"),
        "priority": _count(0, "on free lanes, higher goes first"),
        "order": Column(np.int64, 0, "place in the issue order of its lanes"),
        "shape": _text("sizes a price needs, as key=value,key=value"),
        "group": _text("the ranks a collective spans: 0-7, 0-56/8, 0+3+5"),
        "micro_batch": _count(0, "which micro-batch", low=0),
        "source": _code(Source, "where `seconds` comes from"),
        "sigma": Column(np.float32, 0.0, "relative standard error of `seconds`", low=0.0),
    }
)


def column(name: str) -> Column:
    """The column of that name, or an error that offers the nearest."""
    if name not in COLUMNS:
        raise unknown("column", name, COLUMNS)
    return COLUMNS[name]


def code_of(words: type[IntEnum], text: str) -> int:
    """The code of a word: `kernel` → Kind.KERNEL."""
    try:
        return int(words[text.upper().replace("-", "_")])
    except KeyError:
        raise unknown(words.__name__.lower(), text, (w.name.lower() for w in words)) from None


def word_of(words: type[IntEnum], code: int) -> str:
    """The word of a code: Kind.KERNEL → `kernel`."""
    return words(int(code)).name.lower()


def coded(name: str, value: str, number: Callable[[str], int]) -> int:
    """The code of a word or string in a column; `number` numbers the strings."""
    spec = column(name)
    if spec.words:
        return code_of(spec.words, value)
    if spec.is_text:
        return number(value)
    raise InputError(f"column `{name}` holds numbers, not `{value}`")


def is_default(name: str, array: Array) -> bool:
    """Whether a column has its default everywhere."""
    if name == "order":
        return bool(np.array_equal(array, np.arange(len(array))))
    return bool((array == COLUMNS[name].default).all())


def frozen(array: npt.ArrayLike, dtype: Any = None) -> Array:
    """The same numbers as an array nothing can write to; for arrays that nothing else holds."""
    out = np.ascontiguousarray(array, dtype=dtype)
    if out.flags.writeable:
        out = out.view()
        out.flags.writeable = False
    return out


def owned(values: Any, dtype: Any, what: str) -> Array:
    """The same numbers, read-only and safe from other holders of `values`: copied where need be."""
    out = np.ascontiguousarray(fitted(values, dtype, what))
    is_fresh = isinstance(values, (list, tuple)) or (
        isinstance(values, np.ndarray) and not np.may_share_memory(out, values)
    )
    if not is_fresh and _is_open(out):
        out = out.copy()
    out.flags.writeable = False
    return out


def fitted(values: Any, dtype: Any, what: str) -> Array:
    """The values as an array of a type, or an error where that would change one of them."""
    array, kind = np.asarray(values), np.dtype(dtype)
    if array.dtype == kind:
        return array
    if array.size == 0:
        return array.astype(kind)
    if array.dtype.kind not in "iufb":
        raise GraphError(f"{what} holds {array.ravel()[0]!r}, which is not a {kind}")
    with np.errstate(all="ignore"):
        cast = array.astype(kind)
        is_same = kind.kind == "f" or np.array_equal(cast, array)
    if not is_same:
        raise GraphError(f"{what} holds {array[cast != array][0]}, which is not a {kind}")
    return cast


def _is_open(array: Array) -> bool:
    """Whether the memory of an array can still be written to from elsewhere."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        if owner.flags.writeable:
            return True
        owner = owner.base
    return not (owner is None or isinstance(owner, bytes))


# Tables beside the columns


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


@dataclass(frozen=True, eq=False)
class Graph:
    """The tasks of one training step, what they wait for and what they occupy."""

    size: int = 0
    columns: Mapping[str, Array] = field(default_factory=dict)  # those that are not all default
    edges: Edges = NO_EDGES
    names: Names = field(default_factory=Names)
    lanes: Lanes = field(default_factory=Lanes.empty)
    links: Links = field(default_factory=Links.empty)
    held: Held = field(default_factory=Held.empty)
    drained: Drained = field(default_factory=Drained.empty)
    used: Used = field(default_factory=Used.empty)
    buffers: Buffers = field(default_factory=Buffers.empty)
    history: tuple[str, ...] = ()  # the specs that made it, oldest first
    facts: Mapping[str, Any] = field(default_factory=dict)  # what is known of the whole step
    # Set by an edit: the graph this one was made from, and for each task its number there.
    parent: Graph | None = field(default=None, repr=False)
    origin: Array | None = field(default=None, repr=False)
    cache: dict[str, Any] = field(default_factory=dict, repr=False)  # derived from structure alone

    def __post_init__(self) -> None:
        columns = {k: frozen(v, column(k).dtype) for k, v in self.columns.items()}
        object.__setattr__(self, "columns", MappingProxyType(columns))
        if not isinstance(self.facts, MappingProxyType):
            object.__setattr__(self, "facts", MappingProxyType(dict(self.facts)))

    def __len__(self) -> int:
        return self.size

    def __getstate__(self) -> dict[str, Any]:
        """State for pickling: without its ancestor and without derived values."""
        state = {**self.__dict__, "parent": None, "origin": None, "cache": {}}
        return {**state, "columns": dict(self.columns), "facts": dict(self.facts)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    def __getattr__(self, name: str) -> Array:
        if name not in COLUMNS:
            raise AttributeError(f"a graph has no `{name}`")
        return self.column(name)

    def __getitem__(self, i: int) -> Task:
        if not -self.size <= i < self.size:
            raise IndexError(f"task {i} of {self.size}")
        return Task(self, int(i) % self.size)

    def __iter__(self) -> Iterator[Task]:
        return (Task(self, i) for i in range(self.size))

    def __str__(self) -> str:
        from foretell.graph.text import text

        return text(self)

    def __repr__(self) -> str:
        ranks = int(self.rank.max()) + 1 if self.size else 0
        return (
            f"<Graph: tasks {self.size}, edges {self.edges.size}, "
            f"lanes {len(self.lanes)}, ranks {ranks}>"
        )

    def _repr_html_(self) -> str:
        """HTML for notebooks."""
        from foretell.graph.show import graph_html

        return graph_html(self)

    def column(self, name: str) -> Array:
        """One value a task; read-only. A column that is all default takes no memory."""
        known = self.columns.get(name)
        if known is not None:
            return known
        spec = COLUMNS[name] if name in COLUMNS else column(name)
        if name == "order":  # tasks are issued in the order of their numbers by default otherwise
            numbers = np.arange(self.size, dtype=spec.dtype)
            numbers.flags.writeable = False
            return numbers
        return np.broadcast_to(np.array(spec.default, spec.dtype), self.size)

    def text_of(self, name: str, i: int) -> str:
        """The word or string that a text or code column holds for task i."""
        spec, value = column(name), self.column(name)[i]
        return word_of(spec.words, value) if spec.words else self.names[int(value)]

    def texts(self, name: str) -> list[str]:
        """A text or code column as strings."""
        words = column(name).words
        table = [word_of(words, w) for w in words] if words else list(self.names)
        return [table[v] for v in self.column(name).tolist()]

    def select(self, **wanted: Any) -> Ids:
        """Numbers of the tasks whose columns have the wanted values, ascending.

        A value may be a word, a string (`*` matches anything), a number, or several of them:
        `graph.select(kind="kernel", op=("gemm", "conv*"), phase="backward")`.
        """
        mask = np.ones(self.size, bool)
        for name, value in wanted.items():
            mask &= matches(self, name, value)
        return np.flatnonzero(mask)

    def edit(self, spec: str = "") -> Edit:
        """Start making the next graph; `spec` signs its history."""
        from foretell.graph.edit import Edit

        return Edit(self, spec)

    def fingerprint(self) -> str:
        """A hash of what is in the graph; equal graphs have equal ones, however they were made."""
        from foretell.graph.fingerprint import fingerprint

        return fingerprint(self)


@dataclass(frozen=True)
class Task:
    """One task of a graph, for people; reads the columns, copies nothing."""

    graph: Graph
    number: int

    def __getattr__(self, name: str) -> Any:
        if name not in COLUMNS:
            raise AttributeError(f"a task has no `{name}`")
        spec = column(name)
        if spec.words or spec.is_text:
            return self.graph.text_of(name, self.number)
        return self.graph.column(name)[self.number].item()

    @property
    def after(self) -> tuple[int, ...]:
        """The tasks it waits for."""
        return tuple(self.graph.edges.of(self.number).tolist())

    @property
    def lanes(self) -> tuple[int, ...]:
        """Every lane it holds, its own first."""
        own = int(self.graph.lane[self.number])
        more = self.graph.held.lane[self.graph.held.of(self.number)].tolist()
        return (own, *more) if own != NONE else tuple(more)

    def __str__(self) -> str:
        from foretell.graph.text import task_text

        return task_text(self.graph, self.number)


def matches(graph: Graph, name: str, wanted: Any) -> Array:
    """Where a column has a wanted value (or one of several)."""
    if isinstance(wanted, (tuple, list, set, frozenset, np.ndarray)):
        mask = np.zeros(graph.size, bool)
        for one in wanted:
            mask |= matches(graph, name, one)
        return mask
    spec, values = column(name), graph.column(name)
    if isinstance(wanted, str):
        if spec.words:
            wanted = code_of(spec.words, wanted)
        elif spec.is_text:
            return np.isin(values, graph.names.matching(wanted))
        else:
            raise InputError(f"column `{name}` holds numbers, not `{wanted}`")
    found: Array = values == wanted
    return found


def is_structure(name: str) -> bool:
    """Whether a column decides who waits for whom (rather than for how long)."""
    return name in ("lane", "order")


__all__ = ["Graph", "Kind", "Phase", "Task", "is_structure", "matches"]


_PART = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?:/([0-9]{1,9}))?)?")
_MOST = 1 << 20  # ranks in a group; more than any machine has, and still a list that fits


def ranks_of(text: str) -> tuple[int, ...]:
    """The ranks that a text names, in its order; none where it is empty."""
    ranks: list[int] = []
    for part in text.split("+") if text else ():
        found = _span(part)
        if not found or len(ranks) + len(found) > _MOST:
            raise InputError(
                f"`{part}` in the group `{text}` names {'too many' if found else 'no'} ranks",
                hint="write 0-7, 0-56/8 or 0+3+5",
            )
        ranks += found
    return tuple(ranks)


def _span(part: str) -> range:
    """The ranks of one part, none where it cannot be read."""
    found = _PART.fullmatch(part)
    if not found or (found[3] and int(found[3]) == 0):
        return range(0)
    first, last = int(found[1]), int(found[2] or found[1])
    return range(first, last + 1, int(found[3] or 1))


def group_text(ranks: Iterable[int]) -> str:
    """A short text that names those ranks in that order: equally spaced runs as one part."""
    left, parts = list(ranks), []
    while left:
        run = _run(left)
        parts.append(_part(left[:run]))
        left = left[run:]
    return "+".join(parts)


def _run(ranks: list[int]) -> int:
    """How many ranks from the first on are equally spaced."""
    if len(ranks) < 2 or ranks[1] <= ranks[0]:
        return 1
    step, count = ranks[1] - ranks[0], 2
    while count < len(ranks) and ranks[count] - ranks[count - 1] == step:
        count += 1
    return count if step == 1 or count > 2 else 1


def _part(run: list[int]) -> str:
    if len(run) == 1:
        return str(run[0])
    step = run[1] - run[0]
    return f"{run[0]}-{run[-1]}" + (f"/{step}" if step > 1 else "")
