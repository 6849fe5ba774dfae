"""The next graph from this one: select, scale, set, insert, remove, wait, release, reorder.

Verbs take whole arrays of tasks. Task numbers stay as they are until `commit`, where inserted tasks
come last and removed ones leave; columns nobody touched are shared with the graph before.

    with graph.edit("faster:op=gemm") as edit:
        edit.scale(edit.select(op="gemm"), 0.5)
    quicker = edit.graph
"""

from __future__ import annotations

from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from foretell.errors import GraphError, InputError
from foretell.graph.build import is_default
from foretell.graph.columns import (
    COLUMNS,
    NONE,
    Array,
    BufferKind,
    Ids,
    LaneKind,
    Tasks,
    WaitKind,
    code_of,
    column,
    frozen,
)
from foretell.graph.edges import Edges, edges
from foretell.graph.graph import Graph, is_structure
from foretell.graph.names import Names
from foretell.graph.tables import Buffers, Drained, Held, Lanes, Links, Table, Used
from foretell.graph.verify import verify


class Edit:
    """Collects changes to a graph and commits them once."""

    def __init__(self, before: Graph, spec: str = "") -> None:
        self.before = before
        self.spec = spec
        self.size = before.size  # with what was inserted, before anything is removed
        self._columns: dict[str, Array] = {}  # written columns, always `size` long
        self._names: Names = before.names
        self._waits: list[tuple[Array, Array, Array, Array]] = []
        self._released: list[tuple[Array, Array]] = []
        self._gone = np.zeros(before.size, bool)
        self._bridge = True
        self._places: list[tuple[Array, Array, int]] = []
        self._tables: dict[str, list[Any]] = {}
        self._facts: dict[str, Any] = {}
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

    def select(self, **wanted: Any) -> Ids:
        """Tasks of the graph before, as `Graph.select`."""
        return self.before.select(**wanted)

    def column(self, name: str) -> Array:
        """A column as it is now, inserted tasks included; read-only."""
        if name in self._columns:
            return self._columns[name].view()
        return self._extended(name)

    # Verbs on columns

    def scale(self, tasks: Tasks, times: npt.ArrayLike, column: str = "seconds") -> None:
        """Multiply one column of some tasks."""
        self._written(column)[tasks] *= times

    def set(self, tasks: Tasks, **values: Any) -> None:
        """Give columns of some tasks new values: words, strings or numbers, one or one each."""
        for name, value in values.items():
            self._written(name)[tasks] = self._coded(name, value)

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
        `issued_before`; where neither is said, behind `after`, or else last.
        """
        if count is None:
            count = _longest(after, before, issued_after, issued_before, *columns.values())
        new = np.arange(self.size, self.size + count)
        self._grow(count)
        for name, value in columns.items():
            self._written(name)[new] = self._coded(name, value)
        if after is not None:
            self.wait(new, after)
        if before is not None:
            self.wait(before, new)
        if issued_before is not None:
            self._place(new, issued_before, -1)
        elif issued_after is not None or after is not None:
            self._place(new, issued_after if issued_after is not None else after, 1)
        return new

    def remove(self, tasks: Tasks, *, bridge: bool = True) -> None:
        """Take tasks away; with `bridge`, who waited for them waits for what they waited for."""
        self._gone[tasks] = True
        self._bridge = self._bridge and bridge

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
            np.asarray(tasks, np.int64), np.asarray(after, np.int64), np.asarray(lag, np.float64)
        )
        if t.size and (min(t.min(), a.min()) < 0 or max(t.max(), a.max()) >= self.size):
            raise GraphError(f"a wait names a task that is not there ({self.size} tasks)")
        kinds = np.full(t.size, code_of(WaitKind, kind), np.uint8)
        self._waits.append((t.ravel(), a.ravel(), w.ravel(), kinds))

    def release(self, tasks: Tasks, after: npt.ArrayLike) -> None:
        """Let tasks no longer wait for others; pairs that never waited are passed over."""
        t, a = np.broadcast_arrays(np.asarray(tasks, np.int64), np.asarray(after, np.int64))
        self._released.append((t.ravel(), a.ravel()))

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
        where = after if after is not None else before
        self._place(np.asarray(tasks, np.int64), where, 1 if after is not None else -1)

    # Verbs on the tables beside

    def lane(self, name: str, *, rank: int = 0, kind: str = "other", ordered: bool = True) -> int:
        """The lane of that rank and name, made where there is none."""
        number = self._name(name)
        lanes: Lanes = self._table("lanes")
        found = lanes.find(rank, number)
        if found != NONE:
            return found
        self._append("lanes", Lanes([rank], [number], [code_of(LaneKind, kind)], [ordered]))  # type: ignore[arg-type]
        return len(lanes)

    def link(self, name: str, capacity: float) -> int:
        """A new link; its number."""
        number = len(self._table("links"))
        self._append("links", Links([self._name(name)], [capacity]))  # type: ignore[arg-type]
        return number

    def hold(self, tasks: Tasks, lanes: npt.ArrayLike) -> None:
        """Let tasks hold further lanes, pair by pair."""
        self._append("held", Held(*_pairs(tasks, lanes)))

    def drain(self, tasks: Tasks, lanes: npt.ArrayLike) -> None:
        """Let tasks wait until lanes are empty of what was issued before them."""
        self._append("drained", Drained(*_pairs(tasks, lanes)))

    def use(self, tasks: Tasks, links: npt.ArrayLike, demand: npt.ArrayLike) -> None:
        """Let tasks take `demand` of the capacity of links while they run."""
        self._append("used", Used(*_pairs(tasks, links, demand)))

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
        code = code_of(BufferKind, kind)
        self._append("buffers", Buffers(*_pairs(bytes, rank, born, dies, self._name(name), code)))

    def fact(self, **facts: Any) -> None:
        """Say something of the whole step."""
        self._facts.update(facts)

    # Making it

    def commit(self, *, check: bool = True) -> Graph:
        """Make the graph, verify what changed, and sign its history."""
        made = self._made = self._compose()
        if check:
            verify(made, columns=list(self._columns), structure=self._is_structural)
        return made

    @property
    def _is_structural(self) -> bool:
        touched = bool(self._waits or self._released or self._places or self._tables)
        moved = any(is_structure(name) for name in self._columns)
        return touched or moved or self.size != self.before.size or bool(self._gone.any())

    def _compose(self) -> Graph:
        before, keep = self.before, ~self._gone
        columns = dict(before.columns)
        for name in set(self._columns) | (set(columns) if self.size != before.size else set()):
            columns[name] = self.column(name)
        if self._places or ("order" in columns and self.size != before.size):
            columns["order"] = self._ordered()
        waits = self._edges()
        parts = {name: self._table(name) for name in self._tables}
        parts["names"] = self._names
        graph = replace(
            before,
            size=self.size,
            columns={k: frozen(v) for k, v in columns.items() if not is_default(k, v)},
            edges=waits,
            history=(*before.history, self.spec) if self.spec else before.history,
            facts={**before.facts, **self._facts} if self._facts else before.facts,
            parent=before,
            origin=None if self.size == before.size else _origin(before.size, self.size),
            cache={} if self._is_structural else before.cache,
            **parts,
        )
        return graph if keep.all() else _without(graph, keep, self._bridge)

    def _edges(self) -> Edges:
        own = self.before.edges
        if not self._waits and not self._released and self.size == self.before.size:
            return own
        columns = [own.waiting, own.after, own.lags, own.kinds]
        if self._released:
            stays = _not_released(own, self._released, self.size)
            columns = [c[stays] for c in columns]
        stacked = [np.concatenate(c) for c in zip(columns, *self._waits, strict=True)]
        return edges(self.size, *stacked)

    def _ordered(self) -> Array:
        """New places in the issue order: each moved task next to its anchor, ties as given."""
        near = self.column("order").astype(np.int64) if "order" in self.before.columns else None
        near = np.arange(self.size, dtype=np.int64) if near is None else near.copy()
        fresh = np.arange(self.before.size, self.size)
        near[fresh] = near.max(initial=0) + 1 + np.arange(len(fresh))
        side = np.zeros(self.size, np.int8)
        turn = np.zeros(self.size, np.int64)
        for batch, (tasks, anchors, where) in enumerate(self._places):
            near[tasks] = near[anchors]
            side[tasks] = side[anchors] + where
            turn[tasks] = batch * self.size + np.arange(len(tasks))
        ranked = np.lexsort((np.arange(self.size), turn, side, near))
        places = np.empty(self.size, np.int64)
        places[ranked] = np.arange(self.size)
        return places

    # Small things the verbs share

    def _written(self, name: str) -> Array:
        if name not in self._columns:
            array = np.array(self._extended(name))
            array.flags.writeable = True
            self._columns[name] = array
        return self._columns[name]

    def _extended(self, name: str) -> Array:
        """A column of the graph before, with defaults for what was inserted."""
        known = self.before.column(name)
        extra = self.size - len(known)
        if not extra:
            return known
        if name == "order":
            tail = np.arange(len(known), self.size) + max(
                0, int(known.max(initial=-1)) + 1 - len(known)
            )
        else:
            tail = np.full(extra, COLUMNS[name].default, known.dtype)
        return np.concatenate([known, tail.astype(known.dtype)])

    def _grow(self, count: int) -> None:
        self.size += count
        self._gone = np.concatenate([self._gone, np.zeros(count, bool)])
        for name, array in self._columns.items():
            tail = np.full(count, COLUMNS[name].default, array.dtype)
            self._columns[name] = np.concatenate([array, tail])

    def _place(self, tasks: Array, anchors: Any, where: int) -> None:
        anchors = np.broadcast_to(np.asarray(anchors, np.int64), tasks.shape)
        self._places.append((tasks, anchors, where))

    def _coded(self, name: str, value: Any) -> Any:
        """Words and strings as the numbers a column holds."""
        spec = column(name)
        if isinstance(value, str):
            return code_of(spec.words, value) if spec.words else self._name(value)
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], str):
            if spec.words:
                return [code_of(spec.words, v) for v in value]
            self._names = self._names.adding(value)
            return self._names.numbers(value)
        return value

    def _name(self, text: str) -> int:
        self._names = self._names.adding((text,))
        return self._names.number(text)

    def _table(self, name: str) -> Any:
        parts = self._tables.get(name)
        own = getattr(self.before, name)
        if not parts:
            return own
        whole = type(own).stack([own, *parts])
        is_by_task = "task" in whole.columns()
        return whole.take(np.argsort(whole.task, kind="stable")) if is_by_task else whole

    def _append(self, name: str, rows: Table) -> None:
        self._tables.setdefault(name, []).append(rows)


def _longest(*values: Any) -> int:
    sizes = [np.size(v) for v in values if v is not None and not isinstance(v, str)]
    return max(sizes, default=1)


def _pairs(*values: npt.ArrayLike) -> list[Array]:
    return [np.atleast_1d(v) for v in np.broadcast_arrays(*values)]


def _origin(before: int, size: int) -> Array:
    found = np.full(size, NONE, np.int64)
    found[:before] = np.arange(before)
    return frozen(found)


def _not_released(own: Edges, released: list[tuple[Array, Array]], size: int) -> Array:
    key = own.waiting.astype(np.int64) * size + own.after
    free = np.concatenate([t * size + a for t, a in released])
    return ~np.isin(key, free)


def _without(graph: Graph, keep: Array, bridge: bool) -> Graph:
    """The graph less the tasks not kept, numbered anew."""
    number = np.cumsum(keep) - 1
    origin = graph.origin if graph.origin is not None else np.arange(graph.size)
    return replace(
        graph,
        size=int(keep.sum()),
        columns={k: frozen(v[keep]) for k, v in _kept_columns(graph, keep).items()},
        edges=_kept_edges(graph, keep, number, bridge),
        held=_kept_rows(graph.held, keep, number),
        drained=_kept_rows(graph.drained, keep, number),
        used=_kept_rows(graph.used, keep, number),
        buffers=_kept_buffers(graph, keep, number),
        origin=frozen(origin[keep]),
        cache={},
    )


def _kept_columns(graph: Graph, keep: Array) -> dict[str, Array]:
    columns = dict(graph.columns)
    if "order" in columns:
        ranked = np.argsort(np.argsort(columns["order"][keep], kind="stable"), kind="stable")
        if np.array_equal(ranked, np.arange(len(ranked))):
            del columns["order"]
        else:
            whole = np.zeros(graph.size, np.int64)
            whole[keep] = ranked
            columns["order"] = whole
    return columns


def _kept_rows(table: Any, keep: Array, number: Array) -> Any:
    rows = table.take(keep[table.task])
    return rows.replace(task=number[rows.task])


def _kept_edges(graph: Graph, keep: Array, number: Array, bridge: bool) -> Edges:
    e = graph.edges
    stays = keep[e.waiting] & keep[e.after]
    columns = [e.waiting[stays], e.after[stays], e.lags[stays], e.kinds[stays]]
    if bridge:
        from foretell.graph.loops import bridged, topological

        none = np.zeros(graph.size + 1, np.int64)
        order = topological(e.start, e.after, none, e.after[:0])
        if len(order) < graph.size:
            verify(graph)  # says which tasks wait on each other
        more = bridged(e.start, e.after, e.lags, ~keep, order)
        kinds = np.full(len(more[0]), WaitKind.DATA, np.uint8)
        columns = [np.concatenate(pair) for pair in zip(columns, [*more, kinds], strict=True)]
    waiting, after, lag, kind = columns
    return edges(int(keep.sum()), number[waiting], number[after], lag, kind)


def _kept_buffers(graph: Graph, keep: Array, number: Array) -> Buffers:
    """Buffers whose maker stays; one whose last user leaves dies with what that user waited for."""
    b = graph.buffers
    if not len(b):
        return b
    b = b.take((b.born == NONE) | keep[b.born])
    dies = b.dies.copy()
    orphans = np.flatnonzero((dies != NONE) & ~keep[dies])
    for k in orphans:
        dies[k] = _heir(graph, int(dies[k]), keep, int(b.born[k]))
    renumber = np.append(number, NONE)  # NONE stays NONE
    return b.replace(born=renumber[b.born], dies=renumber[dies])


def _heir(graph: Graph, task: int, keep: Array, born: int) -> int:
    while not keep[task]:
        waits = graph.edges.of(task)
        if not len(waits):
            return born
        task = int(waits.max())
    return max(task, born) if born != NONE else task
