"""The task graph of one step: columns inside, tasks outside.

A `Graph` never changes. `graph[i]` is a small `Task` view for people; `graph.seconds` is the whole
column; `graph.edit()` makes the next graph from this one and shares what it does not touch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from foretell.errors import InputError
from foretell.graph.columns import (
    COLUMNS,
    NO_EDGES,
    NONE,
    Array,
    Buffers,
    Drained,
    Edges,
    Held,
    Ids,
    Kind,
    Lanes,
    Links,
    Names,
    Phase,
    Used,
    code_of,
    column,
    frozen,
    word_of,
)

if TYPE_CHECKING:
    from foretell.graph.edit import Edit


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
