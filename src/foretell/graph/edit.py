"""The next graph from this one: select, scale, set, insert, remove, wait, release, reorder.

Verbs take whole arrays of tasks. Task numbers stay as they are until `commit`, where inserted tasks
come last and removed ones leave; columns are copied when they are first written to, and those that
were not touched are shared with the graph before.

    with graph.edit("faster:op=gemm") as edit:
        edit.scale(edit.select(op="gemm"), 0.5)
    quicker = edit.graph

Who waited for a task that goes waits for what that task waited for (`bridged`, lags added up); a
buffer whose last user goes dies with what that user waited for; one whose maker goes was never
made.
"""

from __future__ import annotations

from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from foretell.errors import GraphError, InputError
from foretell.graph.build import verify
from foretell.graph.graph import (
    COLUMNS,
    NONE,
    Array,
    BufferKind,
    Buffers,
    Drained,
    Edges,
    Graph,
    Held,
    Ids,
    LaneKind,
    Lanes,
    Links,
    Rows,
    Table,
    Tasks,
    Used,
    WaitKind,
    code_of,
    coded,
    column,
    edges,
    fitted,
    frozen,
    is_default,
    is_structure,
)

Waits = tuple[Array, Array, Array, Array]  # waiting, after, lag, kind
_STRUCTURE = ("lanes", "held", "drained")  # tables that decide dependencies


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
        self.cut = np.zeros(before.size, bool)  # removed without a bridge
        self.places: list[tuple[Array, Array, Array]] = []  # task, its neighbour, whether behind it
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
        """The current values of a column."""
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
        """Remove waits, those added by this edit among them."""
        self.released.append((waiting, after))
        self.waits = [_less(w, waiting, after, self.size) for w in self.waits]

    def add(self, name: str, rows: Table) -> None:
        """Add rows to a table."""
        parts = self.tables.setdefault(name, [])
        parts.append(rows)
        if isinstance(rows, Lanes):  # requested again with every lane that is needed
            self.tables[name] = [Lanes.stack(parts)]

    def table(self, name: str) -> Any:
        """The current rows of a table."""
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
    from foretell.graph.build import placed

    tasks, anchors, is_behind = (np.concatenate(c) for c in zip(*changes.places, strict=True))
    last = np.zeros(changes.size, np.int64)
    last[tasks] = np.arange(len(tasks))
    keep = last[tasks] == np.arange(len(tasks))  # the last value set for a task counts
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


class Edit:
    """Collects changes to a graph and commits them once."""

    def __init__(self, before: Graph, spec: str = "") -> None:
        self.before = before
        self.spec = spec
        self._changes = Changes(before)
        self._made: Graph | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        if kind is None:
            self.commit()

    @property
    def graph(self) -> Graph:
        """The graph that was made."""
        if self._made is None:
            raise GraphError("the edit is not committed yet")
        return self._made

    # What is there

    @property
    def size(self) -> int:
        """How many tasks there are, with those inserted and before any is removed."""
        return self._changes.size

    def select(self, **wanted: Any) -> Ids:
        """Tasks of the graph before, as `Graph.select`."""
        return self.before.select(**wanted)

    def column(self, name: str) -> Array:
        """The current values of a column, inserted tasks included; read-only."""
        return frozen(self._changes.column(name))

    # Verbs on columns

    def scale(self, tasks: Tasks, times: npt.ArrayLike, column: str = "seconds") -> None:
        """Multiply one column of some tasks; a task named twice is scaled once."""
        values = self._open().written(column)
        if values.dtype.kind != "f":
            raise InputError(f"column `{column}` holds no amounts that could be scaled")
        values[self._known(tasks)] *= times

    def set(self, tasks: Tasks, **values: Any) -> None:
        """Give columns of some tasks new values: words, strings or numbers, one or one each."""
        known = self._known(tasks)
        for name, value in values.items():
            self._open().written(name)[known] = self._coded(name, value)

    # Verbs on tasks

    def insert(
        self,
        count: int | None = None,
        *,
        after: npt.ArrayLike | None = None,
        before: Tasks | None = None,
        issued_after: npt.ArrayLike | None = None,
        issued_before: npt.ArrayLike | None = None,
        **columns: Any,
    ) -> Ids:
        """Add tasks and return their numbers.

        Each new task waits for its `after`, and its `before` waits for it (one task each, or one
        for all). On ordered lanes it is issued right behind `issued_after` or right ahead of
        `issued_before`; where neither is given, behind `after`, else ahead of `before`, else last.
        """
        if count is None:
            count = _longest(after, before, issued_after, issued_before, *columns.values())
        new = np.arange(self.size, self.size + count)
        self._open().grow(count)
        self.set(new, **columns)
        if after is not None:
            self.wait(new, after)
        if before is not None:
            self.wait(before, new)
        if issued_before is not None or issued_after is not None:
            self._place(new, issued_before, issued_after)
        elif "order" not in columns and (after is not None or before is not None):
            self._place(new, before if after is None else None, after)
        return new

    def remove(self, tasks: Tasks, *, bridge: bool = True) -> None:
        """Remove tasks; with `bridge`, their successors wait for their predecessors."""
        known, changes = self._known(tasks), self._open()
        changes.gone[known] = True
        changes.cut[known] = not bridge

    # Verbs on order

    def wait(
        self,
        tasks: Tasks,
        after: npt.ArrayLike,
        *,
        lag: npt.ArrayLike = 0.0,
        kind: str = "data",
    ) -> None:
        """Let tasks wait for others, pair by pair or one for all."""
        t, a, w = np.broadcast_arrays(
            self._known(tasks), self._known(after), fitted(lag, np.float64, "the lag of a wait")
        )
        kinds = np.full(t.size, code_of(WaitKind, kind), np.uint8)
        self._open().waits.append((t.copy(), a.copy(), w.copy(), kinds))

    def release(self, tasks: Tasks, after: npt.ArrayLike) -> None:
        """Let tasks no longer wait for others; pairs that never waited are passed over."""
        t, a = np.broadcast_arrays(self._known(tasks), self._known(after))
        self._open().release(t.copy(), a.copy())

    def reorder(
        self,
        tasks: Tasks,
        *,
        after: npt.ArrayLike | None = None,
        before: npt.ArrayLike | None = None,
    ) -> None:
        """Issue tasks right behind others, or right ahead of them, in the order given."""
        if (after is None) == (before is None):
            raise InputError("reorder takes either `after` or `before`")
        self._place(self._known(tasks), before, after)

    # Verbs on the tables beside

    def lane(self, name: str, *, rank: int = 0, kind: str = "other", ordered: bool = True) -> int:
        """The lane of that rank and name, made where there is none."""
        changes = self._open()
        number, lanes = changes.name(name), changes.table("lanes")
        found: int = lanes.find(rank, number)
        if found != NONE:
            return found
        changes.add("lanes", Lanes([rank], [number], [code_of(LaneKind, kind)], [ordered]))  # type: ignore[arg-type]
        return len(lanes)

    def link(self, name: str, capacity: float) -> int:
        """A new link; its number."""
        changes = self._open()
        number = len(changes.table("links"))
        changes.add("links", Links([changes.name(name)], [capacity]))  # type: ignore[arg-type]
        return number

    def hold(self, tasks: Tasks, lanes: npt.ArrayLike) -> None:
        """Let tasks hold further lanes, pair by pair."""
        self._open().add("held", Held(*_pairs(self._known(tasks), lanes)))

    def drain(self, tasks: Tasks, lanes: npt.ArrayLike) -> None:
        """Let tasks wait until lanes are empty of what was issued before them."""
        self._open().add("drained", Drained(*_pairs(self._known(tasks), lanes)))

    def use(self, tasks: Tasks, links: npt.ArrayLike, demand: npt.ArrayLike) -> None:
        """Let tasks take `demand` of the capacity of links while they run; repeats add up."""
        self._open().add("used", Used(*_pairs(self._known(tasks), links, demand)))

    def buffer(
        self,
        bytes: npt.ArrayLike,
        *,
        rank: npt.ArrayLike = 0,
        born: npt.ArrayLike = NONE,
        dies: npt.ArrayLike = NONE,
        name: str = "",
        kind: str = "other",
    ) -> None:
        """Add memory that is there from the start of `born` to the end of `dies`."""
        changes, code = self._open(), code_of(BufferKind, kind)
        self._known_or_none(born)
        self._known_or_none(dies)
        changes.add("buffers", Buffers(*_pairs(bytes, rank, born, dies, changes.name(name), code)))

    def fact(self, **facts: Any) -> None:
        """Set a fact of the whole step."""
        self._open().facts.update(facts)

    # Making it

    def commit(self, *, check: bool = True) -> Graph:
        """Make the graph, verify what changed, and sign its history; once."""
        if self._made is not None:
            return self._made
        changes = self._changes
        made = compose(changes, self.spec)
        if check:
            verify(
                made,
                columns=changes.columns,
                structure=changes.is_structural,
                tables=bool(changes.tables),
            )
        self._made = made
        return made

    # Small things the verbs share

    def _open(self) -> Changes:
        """The changes, while there can be more."""
        if self._made is not None:
            raise GraphError(
                "the edit is committed and cannot change any more",
                hint="start another from the graph it made: `edit.graph.edit()`",
            )
        return self._changes

    def _known(self, tasks: npt.ArrayLike) -> Ids:
        """Task numbers, or a mask, as an array of numbers that exist."""
        given = np.atleast_1d(np.asarray(tasks)).ravel()
        if given.dtype == bool:
            if len(given) not in (self.size, self.before.size):
                raise GraphError(f"a mask of {len(given)} tasks for {self.size}")
            return np.flatnonzero(given)
        known = fitted(given, np.int64, "the tasks of a verb")
        if known.size and (known.min() < 0 or known.max() >= self.size):
            bad = known[(known < 0) | (known >= self.size)]
            raise GraphError(f"task {bad[0]} is not there ({self.size} tasks)")
        return known

    def _known_or_none(self, tasks: npt.ArrayLike) -> None:
        given = np.atleast_1d(np.asarray(tasks))
        self._known(given[given != NONE])

    def _place(self, tasks: Array, before: Any, after: Any) -> None:
        """Put tasks right ahead of others or, by default, right behind others."""
        anchors = np.broadcast_to(self._known(after if before is None else before), tasks.shape)
        is_behind = np.full(len(tasks), before is None)
        self._open().places.append((tasks, anchors.copy(), is_behind))

    def _coded(self, name: str, value: Any) -> Array:
        """Words, strings and numbers as what a column holds."""
        number = self._changes.name
        if isinstance(value, np.ndarray) and value.dtype.kind in "UO":
            value = value.tolist()
        if isinstance(value, str):
            value = coded(name, value, number)
        elif isinstance(value, (list, tuple)):
            value = [coded(name, v, number) if isinstance(v, str) else v for v in value]
        return fitted(value, column(name).dtype, f"column `{name}`")


def _longest(*values: Any) -> int:
    """How many tasks are meant: as many as the arrays have, one where all are single values."""
    shapes = [np.shape(v) for v in values if v is not None and not isinstance(v, str)]
    return int(np.broadcast_shapes((1,), *shapes)[0])


def _pairs(*values: npt.ArrayLike) -> list[Array]:
    return [np.array(v, ndmin=1) for v in np.broadcast_arrays(*values)]


def without(graph: Graph, gone: Array, cut: Array) -> Graph:
    """The graph less the tasks `gone`; those that are `cut` too leave no waits behind."""
    keep = ~gone
    number = np.cumsum(keep) - 1
    origin = graph.origin if graph.origin is not None else np.arange(graph.size)
    e = _uncut(graph.edges, cut)
    order = _sorted_tasks(graph, e)
    return replace(
        graph,
        size=int(keep.sum()),
        columns=_kept_columns(graph, keep),
        edges=_kept_edges(e, keep, number, order),
        held=_kept_rows(graph.held, keep, number),
        drained=_kept_rows(graph.drained, keep, number),
        used=_kept_rows(graph.used, keep, number),
        buffers=_kept_buffers(graph, keep, number, order),
        origin=frozen(origin[keep]),
        cache={},
    )


def _uncut(e: Edges, cut: Array) -> Edges:
    """Edges less those of tasks that leave no waits behind."""
    if not cut.any():
        return e
    stays = ~(cut[e.waiting] | cut[e.after])
    columns = (c[stays] for c in (e.waiting, e.after, e.lags, e.kinds))
    return edges(len(cut), *columns)


def _sorted_tasks(graph: Graph, less: Edges) -> Array:
    """All tasks, each after those it waits for; at least by the edges that do not just vanish."""
    order = _sorted(graph.edges)
    if len(order) < graph.size and less is not graph.edges:
        order = _sorted(less)
    if len(order) < graph.size:
        verify(replace(graph, edges=less, cache={}))  # says which tasks wait on each other
    return order


def _sorted(e: Edges) -> Array:
    if (e.after < e.waiting).all():
        return np.arange(len(e.start) - 1, dtype=np.int32)  # as the loop's: it is compiled for one
    from foretell.graph.build import topological

    no_order = frozen(np.zeros(len(e.start), np.int64))
    return topological(e.start, e.after, no_order, e.after[:0])


def _kept_columns(graph: Graph, keep: Array) -> dict[str, Array]:
    columns = {name: values[keep] for name, values in graph.columns.items()}
    if "order" in columns:  # places close ranks; what shared a place still does
        columns["order"] = np.unique(columns["order"], return_inverse=True)[1].reshape(-1)
    return {name: frozen(v) for name, v in columns.items() if not is_default(name, v)}


def _kept_rows(table: Any, keep: Array, number: Array) -> Any:
    if not len(table):
        return table
    rows = table.take(keep[table.task])
    return rows.replace(task=number[rows.task])


def _kept_edges(e: Edges, keep: Array, number: Array, order: Array) -> Edges:
    from foretell.graph.build import bridged

    stays = keep[e.waiting] & keep[e.after]
    columns = [c[stays] for c in (e.waiting, e.after, e.lags, e.kinds)]
    more = bridged(e.start, e.after, e.lags, ~keep, order)
    kinds = np.full(len(more[0]), WaitKind.DATA, np.uint8)
    waiting, after, lag, kind = (
        np.concatenate(pair) for pair in zip(columns, [*more, kinds], strict=True)
    )
    return edges(int(keep.sum()), number[waiting], number[after], lag, kind)


def _kept_buffers(graph: Graph, keep: Array, number: Array, order: Array) -> Buffers:
    b = graph.buffers
    if not len(b):
        return b
    b = b.take((b.born == NONE) | keep[b.born])
    dies = _heirs(graph.edges, b, keep, order)
    renumber = np.append(number, NONE)  # NONE stays NONE
    return b.replace(born=renumber[b.born], dies=renumber[dies])


def _heirs(e: Edges, b: Buffers, keep: Array, order: Array) -> Array:
    """The task each buffer dies with: the nearest kept one that its last user waited for.

    Nearest is latest in `order`; never one before its maker, which is the heir where there is none.
    """
    place = np.empty(len(order) + 1, np.int64)
    place[order] = np.arange(len(order))
    place[NONE] = -1
    latest = _latest_wait(e, place, order)
    dies = b.dies.astype(np.int64)
    while True:  # ends: every round goes back in the order, or to the maker
        lost = np.flatnonzero((dies != NONE) & ~keep[dies])
        if not len(lost):
            return dies
        born, heir = b.born[lost], latest[dies[lost]]
        is_heir = (place[heir] >= place[born]) & (place[heir] < place[dies[lost]])
        dies[lost] = np.where(is_heir, heir, born)


def _latest_wait(e: Edges, place: Array, order: Array) -> Array:
    """Of each task, the wait that is last in an order; NONE where it waits for nothing."""
    latest = np.full(len(order), -1, np.int64)
    has = np.flatnonzero(np.diff(e.start))
    if len(has):
        latest[has] = np.maximum.reduceat(place[e.after], e.start[has])
    return np.where(latest < 0, NONE, order[latest])
