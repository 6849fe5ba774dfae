"""What an edit has collected so far, and the graph it makes of it.

Columns are copied when they are first written to; all else is kept as it was said, and put
together once by `compose`. What was not touched is shared with the graph before.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from foretell.errors import GraphError
from foretell.graph.columns import COLUMNS, NONE, Array, frozen, is_default
from foretell.graph.edges import Edges, edges
from foretell.graph.graph import Graph, is_structure
from foretell.graph.remove import without
from foretell.graph.tables import Lanes, Rows, Table

Waits = tuple[Array, Array, Array, Array]  # waiting, after, lag, kind
_STRUCTURE = ("lanes", "held", "drained")  # tables that decide who waits for whom


class Changes:
    """Changes to a graph, in terms of its own task numbers; inserted tasks follow."""

    def __init__(self, before: Graph) -> None:
        self.before = before
        self.size = before.size  # with what was inserted, before anything is removed
        self.columns: dict[str, Array] = {}  # written columns, always `size` long
        self.texts: dict[str, int] = {}  # strings the graph before does not have
        self.waits: list[Waits] = []
        self.released: list[tuple[Array, Array]] = []  # pairs (waiting, after)
        self.gone = np.zeros(before.size, bool)
        self.cut = np.zeros(before.size, bool)  # gone without a bridge
        self.places: list[tuple[Array, Array, Array]] = []  # task, next to whom, whether behind
        self.tables: dict[str, list[Any]] = {}  # rows to add
        self.facts: dict[str, Any] = {}

    @property
    def is_structural(self) -> bool:
        """Whether a task may wait for something else than before."""
        touched = bool(self.waits or self.released or self.places)
        moved = any(is_structure(name) for name in self.columns)
        beside = any(name in _STRUCTURE for name in self.tables)
        resized = self.size != self.before.size or bool(self.gone.any())
        return touched or moved or beside or resized

    def column(self, name: str) -> Array:
        """A column as it is now."""
        if name in self.columns:
            return self.columns[name]
        return _grown(name, self.before.column(name), self.size - self.before.size)

    def written(self, name: str) -> Array:
        """A column to write to."""
        if name not in self.columns:
            self.columns[name] = np.array(self.column(name))
        return self.columns[name]

    def grow(self, count: int) -> None:
        """Make room for so many tasks."""
        self.size += count
        none = np.zeros(count, bool)
        self.gone, self.cut = (np.concatenate([a, none]) for a in (self.gone, self.cut))
        self.columns = {name: _grown(name, a, count) for name, a in self.columns.items()}

    def name(self, text: str) -> int:
        """The number of a string, old or new."""
        known = self.before.names.number(text)
        if known >= 0:
            return known
        return self.texts.setdefault(text, len(self.before.names) + len(self.texts))

    def release(self, waiting: Array, after: Array) -> None:
        """Take back waits, those said so far among them."""
        self.released.append((waiting, after))
        self.waits = [_less(w, waiting, after, self.size) for w in self.waits]

    def add(self, name: str, rows: Table) -> None:
        """Add rows to a table."""
        parts = self.tables.setdefault(name, [])
        parts.append(rows)
        if isinstance(rows, Lanes):  # asked for again with every lane that is wanted
            self.tables[name] = [Lanes.stack(parts)]

    def table(self, name: str) -> Any:
        """A table as it is now."""
        own = getattr(self.before, name)
        if name not in self.tables:
            return own
        whole = type(own).stack([own, *self.tables[name]])
        return whole.tidy() if isinstance(whole, Rows) else whole


def compose(changes: Changes, spec: str) -> Graph:
    """The graph that the changes make, signed with a spec; not verified."""
    before = changes.before
    graph = replace(
        before,
        size=changes.size,
        columns=_columns(changes),
        edges=_edges(changes),
        names=before.names.adding(changes.texts),
        history=(*before.history, spec) if spec else before.history,
        facts={**before.facts, **changes.facts} if changes.facts else before.facts,
        parent=before,
        origin=None if changes.size == before.size else _origin(before.size, changes.size),
        cache={} if changes.is_structural else before.cache,
        **{name: changes.table(name) for name in changes.tables},
    )
    return without(graph, changes.gone, changes.cut) if changes.gone.any() else graph


def _columns(changes: Changes) -> dict[str, Array]:
    """Untouched columns as they are; those written or grown where they say something."""
    columns = dict(changes.before.columns)
    touched = {} if changes.size == changes.before.size else dict.fromkeys(columns)
    for name in touched | changes.columns:
        columns[name] = frozen(changes.column(name))
    if changes.places:
        columns["order"] = frozen(_order(changes))
    mine = changes.before.columns
    return {
        name: columns[name]
        for name in COLUMNS
        if name in columns
        and (columns[name] is mine.get(name) or not is_default(name, columns[name]))
    }


def _edges(changes: Changes) -> Edges:
    own = changes.before.edges
    if not changes.waits and not changes.released and changes.size == changes.before.size:
        return own
    waits: Waits = (own.waiting.astype(np.int64), own.after, own.lags, own.kinds)
    if changes.released:
        waiting, after = (np.concatenate(pair) for pair in zip(*changes.released, strict=True))
        waits = _less(waits, waiting, after, changes.size)
    stacked = [np.concatenate(column) for column in zip(waits, *changes.waits, strict=True)]
    return edges(changes.size, *stacked)


def _less(waits: Waits, tasks: Array, after: Array, size: int) -> Waits:
    """Waits less those between some pairs."""
    waiting, waited, lag, kind = waits
    stays = ~np.isin(waiting * size + waited, tasks * size + after)
    return waiting[stays], waited[stays], lag[stays], kind[stays]


def _order(changes: Changes) -> Array:
    """Places in the issue order: each moved task next to its anchor, ties as given."""
    from foretell.graph.loops import placed

    tasks, anchors, is_behind = (np.concatenate(c) for c in zip(*changes.places, strict=True))
    last = np.zeros(changes.size, np.int64)
    last[tasks] = np.arange(len(tasks))
    keep = last[tasks] == np.arange(len(tasks))  # what is said last of a task holds
    ranked = np.argsort(changes.column("order"), kind="stable")
    order = placed(ranked, tasks[keep], anchors[keep], is_behind[keep])
    if len(order) < changes.size:
        raise GraphError(
            "tasks are to be issued next to each other in a ring",
            hint="what a task is put next to cannot itself be put next to that task",
        )
    places = np.empty(changes.size, np.int64)
    places[order] = np.arange(changes.size)
    return places


def _grown(name: str, values: Array, count: int) -> Array:
    """A column and after it so many defaults; new tasks are issued last."""
    if not count:
        return values
    if name == "order":
        tail = np.arange(count) + max(len(values), int(values.max(initial=-1)) + 1)
    else:
        tail = np.full(count, COLUMNS[name].default)
    return np.concatenate([values, tail.astype(values.dtype)])


def _origin(before: int, size: int) -> Array:
    found = np.full(size, NONE, np.int64)
    found[:before] = np.arange(before)
    return frozen(found)
