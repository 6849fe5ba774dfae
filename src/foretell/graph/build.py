"""Graphs made by hand, one task at a time, and graphs put together from others.

`Builder` is for tests, examples and small readers; big readers fill columns at once and call
`assemble`. `concat` puts graphs after or beside each other, `replicate` copies one over ranks or
micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from foretell.errors import InputError
from foretell.graph.columns import (
    COLUMNS,
    NONE,
    Array,
    BufferKind,
    Buffers,
    Drained,
    Edges,
    Held,
    LaneKind,
    Lanes,
    Links,
    Names,
    Rows,
    Used,
    WaitKind,
    code_of,
    coded,
    column,
    edges,
    fitted,
    frozen,
    is_default,
    owned,
)
from foretell.graph.graph import Graph
from foretell.graph.groups import group_text, ranks_of
from foretell.graph.verify import verify


def assemble(
    size: int, columns: Mapping[str, Any], edges: Edges, *, check: bool = True, **parts: Any
) -> Graph:
    """A verified graph from whole columns.

    Columns that are all default are dropped; rows of tables may come in any order. What the caller
    could still write to is copied.
    """
    kept = {}
    for name, values in columns.items():
        array = owned(values, column(name).dtype, f"column `{name}`")
        if len(array) != size or not is_default(name, array):
            kept[name] = array
    parts = {k: v.tidy() if isinstance(v, Rows) else v for k, v in parts.items()}
    graph = Graph(size=size, columns=kept, edges=edges, **parts)
    return verify(graph) if check else graph


class Builder:
    """Collects tasks and lanes as Python values and makes one graph of them."""

    def __init__(self) -> None:
        self._texts: dict[str, int] = {"": 0}
        self._tasks: list[dict[str, Any]] = []
        self._waits: list[tuple[int, int, float, int]] = []
        self._lanes: list[tuple[int, int, int, bool]] = []
        self._links: list[tuple[int, float]] = []
        self._held: list[tuple[int, int]] = []
        self._drained: list[tuple[int, int]] = []
        self._used: list[tuple[int, int, float]] = []
        self._buffers: list[tuple[float, int, int, int, int, int]] = []

    def lane(self, name: str, *, rank: int = 0, kind: str = "other", ordered: bool = True) -> int:
        """A new lane; its number."""
        row = (rank, self._number(name), code_of(LaneKind, kind), ordered)
        self._lanes.append(row)
        return len(self._lanes) - 1

    def link(self, name: str, capacity: float) -> int:
        """A new link; its number."""
        self._links.append((self._number(name), capacity))
        return len(self._links) - 1

    def task(
        self,
        *,
        after: Iterable[int] = (),
        lanes: Sequence[int] = (),
        drains: Iterable[int] = (),
        uses: Mapping[int, float] | None = None,
        **columns: Any,
    ) -> int:
        """A new task; its number. Further `lanes` are held besides `lane`."""
        i = len(self._tasks)
        if lanes:
            columns.setdefault("lane", lanes[0])
            self._held += [(i, lane) for lane in lanes if lane != columns["lane"]]
        self._tasks.append({k: self._value(k, v) for k, v in columns.items()})
        for other in after:
            self.wait(i, other)
        self._drained += [(i, lane) for lane in drains]
        self._used += [(i, link, demand) for link, demand in (uses or {}).items()]
        return i

    def wait(self, task: int, after: int, *, lag: float = 0.0, kind: str = "data") -> None:
        """Let one task wait for another."""
        self._waits.append((task, after, lag, code_of(WaitKind, kind)))

    def buffer(
        self,
        bytes: float,
        *,
        rank: int = 0,
        born: int = NONE,
        dies: int = NONE,
        name: str = "",
        kind: str = "other",
    ) -> None:
        """Memory that is there from the start of `born` to the end of `dies`."""
        code = code_of(BufferKind, kind)
        self._buffers.append((bytes, rank, born, dies, self._number(name), code))

    def graph(self, *, check: bool = True, **facts: Any) -> Graph:
        """All that was collected, verified."""
        return self.made(facts, check=check)

    def made(
        self, facts: Mapping[str, Any], *, history: tuple[str, ...] = (), check: bool = True
    ) -> Graph:
        """All that was collected, with facts of any name."""
        size, waits = len(self._tasks), _transposed(self._waits, 4)
        return assemble(
            size,
            self._columns(),
            edges(size, *waits),
            check=check,
            names=Names(self._texts),
            lanes=Lanes(*_transposed(self._lanes, 4)),
            links=Links(*_transposed(self._links, 2)),
            held=Held(*_transposed(self._held, 2)),
            drained=Drained(*_transposed(self._drained, 2)),
            used=Used(*_transposed(self._used, 3)),
            buffers=Buffers(*_transposed(self._buffers, 6)),
            facts=facts,
            history=history,
        )

    def _columns(self) -> dict[str, Any]:
        given = {name for task in self._tasks for name in task}
        columns = {
            name: [task.get(name, COLUMNS[name].default) for task in self._tasks]
            for name in COLUMNS
            if name in given and name != "order"
        }
        if "order" in given:
            columns["order"] = [task.get("order", i) for i, task in enumerate(self._tasks)]
        return columns

    def _number(self, text: str) -> int:
        return self._texts.setdefault(text, len(self._texts))

    def _value(self, name: str, value: Any) -> Any:
        if isinstance(value, str):
            return coded(name, value, self._number)
        column(name)  # says so where there is no such column
        return value


def _transposed(rows: Sequence[tuple[Any, ...]], width: int) -> list[Any]:
    return list(zip(*rows, strict=True)) if rows else [[] for _ in range(width)]


def concat(graphs: Sequence[Graph], *, spec: str = "") -> Graph:
    """All tasks of several graphs in one, in that order.

    Lanes of the same rank and name become one lane, as do links of the same name (of several in
    one graph the first with the first, and so on); nothing waits across graphs unless an edge is
    added so. On a shared ordered lane earlier graphs go first.
    """
    if not graphs:
        return Graph()
    names = Names().adding(text for g in graphs for text in g.names)
    graphs = [_renamed(g, names) for g in graphs]
    lanes, lane_of = _merged(Lanes, [g.lanes for g in graphs], ("rank", "name"))
    links, link_of = _merged(Links, [g.links for g in graphs], ("name",))
    _check_same("lane", "ordered", lanes, [g.lanes for g in graphs], lane_of, names)
    _check_same("link", "capacity", links, [g.links for g in graphs], link_of, names)
    starts = np.cumsum([0] + [g.size for g in graphs])
    return Graph(
        size=int(starts[-1]),
        columns=_stacked_columns(graphs, lane_of, starts),
        edges=_stacked_edges(graphs, starts),
        names=names,
        lanes=lanes,
        links=links,
        held=_shifted(Held, [g.held for g in graphs], starts, lane=lane_of),
        drained=_shifted(Drained, [g.drained for g in graphs], starts, lane=lane_of),
        used=_shifted(Used, [g.used for g in graphs], starts, link=link_of),
        buffers=_stacked_buffers(graphs, starts),
        history=(*graphs[0].history, spec) if spec else graphs[0].history,
        facts=graphs[0].facts,
    )


def replicate(graph: Graph, copies: int, *, over: str = "rank", stride: int | None = None) -> Graph:
    """So many copies of a graph, on further ranks or as further micro-batches.

    Over ranks each copy has lanes of its own, `stride` ranks further (as many as the graph has).
    Over micro-batches the copies share their lanes, and on ordered lanes earlier copies go first.
    """
    if copies < 1:
        raise InputError(f"{copies} copies of a graph", hint="ask for one or more")
    if over not in ("rank", "micro_batch"):
        raise InputError(f"a graph is replicated over `rank` or `micro_batch`, not `{over}`")
    if stride is None:
        stride = 1 if over == "micro_batch" else _ranks(graph)
    if stride < 0:
        raise InputError(f"copies of a graph {stride} apart", hint="a stride is zero or more")
    move = _moved_rank if over == "rank" else _moved_micro_batch
    spec = f"replicate:copies={copies},over={over},stride={stride}"
    return concat([move(graph, k * stride) for k in range(copies)], spec=spec)


def _ranks(graph: Graph) -> int:
    known = [graph.rank, graph.lanes.rank, graph.buffers.rank]
    return 1 + max(int(r.max(initial=0)) for r in known)


def _moved_rank(graph: Graph, by: int) -> Graph:
    if by == 0:
        return graph
    graph = _moved_groups(graph, by)
    columns = {**graph.columns, "rank": _further(graph, "rank", by)}
    lanes = graph.lanes.replace(rank=graph.lanes.rank + np.int64(by))
    buffers = graph.buffers.replace(rank=graph.buffers.rank + np.int64(by))
    return replace(graph, columns=columns, lanes=lanes, buffers=buffers)


def _further(graph: Graph, name: str, by: int) -> Array:
    """A column that much higher, or an error where it has no room for that."""
    return frozen(
        fitted(graph.column(name) + np.int64(by), COLUMNS[name].dtype, f"column `{name}`")
    )


def _moved_groups(graph: Graph, by: int) -> Graph:
    """The graph with the ranks of its collectives that much further."""
    if "group" not in graph.columns:
        return graph
    old, place = np.unique(graph.group, return_inverse=True)
    texts = [group_text(r + by for r in ranks_of(graph.names[int(g)])) for g in old]
    names = graph.names.adding(texts)
    moved = frozen(names.numbers(texts)[place])
    return replace(graph, names=names, columns={**graph.columns, "group": moved})


def _moved_micro_batch(graph: Graph, by: int) -> Graph:
    if by == 0:
        return graph
    moved = _further(graph, "micro_batch", by)
    # What was there from the beginning is there once, whatever the number of micro-batches.
    own = graph.buffers.take(graph.buffers.born != NONE)
    return replace(graph, columns={**graph.columns, "micro_batch": moved}, buffers=own)


def _renamed(graph: Graph, names: Names) -> Graph:
    """The graph with its text columns as numbers of other names."""
    if graph.names == names:
        return graph
    new = names.numbers(graph.names)
    columns = {k: frozen(new[v]) if COLUMNS[k].is_text else v for k, v in graph.columns.items()}
    tables: dict[str, Any] = {
        part: getattr(graph, part).replace(name=new[getattr(graph, part).name])
        for part in ("lanes", "links", "buffers")
    }
    return replace(graph, names=names, columns=columns, **tables)


def _merged(kind: Any, tables: list[Any], keys: tuple[str, ...]) -> tuple[Any, list[Array]]:
    """One table without repeats of a key, and for each old table its rows' new numbers."""
    whole = kind.stack(tables)
    key = np.concatenate([_keys(t, keys) for t in tables])
    _, first, number = np.unique(key, axis=0, return_index=True, return_inverse=True)
    ranked = np.argsort(first, kind="stable")  # keep the order in which they first appear
    place = np.empty(len(first), np.int64)
    place[ranked] = np.arange(len(first))
    numbers = place[number.reshape(-1)]
    ends = np.cumsum([len(t) for t in tables])[:-1]
    return whole.take(np.sort(first)), np.split(numbers, ends)


def _keys(table: Any, keys: tuple[str, ...]) -> Array:
    """The key of each row, and as its last part how many rows before it have the same."""
    key = np.stack([table.columns()[k].astype(np.int64) for k in keys], axis=1)
    number = np.unique(key, axis=0, return_inverse=True)[1].reshape(-1)
    ranked = np.argsort(number, kind="stable")
    sorted_number = number[ranked]
    begins = np.searchsorted(sorted_number, sorted_number)
    repeat = np.empty(len(number), np.int64)
    repeat[ranked] = np.arange(len(number)) - begins
    return np.column_stack([key, repeat])


def _check_same(
    noun: str, column: str, whole: Any, tables: list[Any], numbers: list[Array], names: Names
) -> None:
    """Refuse to make one of two lanes or links that are not alike."""
    for table, number in zip(tables, numbers, strict=True):
        ours, theirs = whole.columns()[column][number], table.columns()[column]
        if (ours != theirs).any():
            k = int(np.flatnonzero(ours != theirs)[0])
            raise InputError(
                f"{noun} `{names[int(table.name[k])]}` has {column} {ours[k]} in one graph "
                f"and {theirs[k]} in another",
                hint="give it one of the two in both, or another name",
            )


def _stacked_columns(
    graphs: Sequence[Graph], lane_of: list[Array], starts: Array
) -> dict[str, Array]:
    present = {name for g in graphs for name in g.columns}
    columns = {
        name: np.concatenate([g.column(name) for g in graphs])
        for name in COLUMNS
        if name in present and name not in ("lane", "order")
    }
    if "lane" in present:
        columns["lane"] = np.concatenate(
            [np.append(m, NONE)[g.lane] for g, m in zip(graphs, lane_of, strict=True)]
        ).astype(np.int32)
    if "order" in present:
        columns["order"] = _stacked_order(graphs)
    return {k: frozen(v) for k, v in columns.items()}


def _stacked_order(graphs: Sequence[Graph]) -> Array:
    """The places of each graph moved behind all those of the graphs before it."""
    places, end = [], 0
    for order in (g.order for g in graphs if g.size):
        places.append(order - order.min() + end)
        end = int(places[-1].max()) + 1
    return np.concatenate(places)


def _stacked_edges(graphs: Sequence[Graph], starts: Array) -> Edges:
    offsets = np.cumsum([0] + [g.edges.size for g in graphs])
    rows = [g.edges.start[:-1] + o for g, o in zip(graphs, offsets, strict=False)]
    after = [g.edges.after + np.int32(s) for g, s in zip(graphs, starts, strict=False)]
    has_lag = any(g.edges.lag is not None for g in graphs)
    has_kind = any(g.edges.kind is not None for g in graphs)
    return Edges(
        frozen(np.append(np.concatenate(rows), offsets[-1])),
        frozen(np.concatenate(after), np.int32),
        frozen(np.concatenate([g.edges.lags for g in graphs])) if has_lag else None,
        frozen(np.concatenate([g.edges.kinds for g in graphs])) if has_kind else None,
    )


def _shifted(kind: Any, tables: list[Any], starts: Array, **numbers: list[Array]) -> Any:
    (column, maps), parts = next(iter(numbers.items())), []
    for table, start, new in zip(tables, starts, maps, strict=False):
        renumbered = {"task": table.task + start, column: new[table.columns()[column]]}
        parts.append(table.replace(**renumbered) if len(table) else table)
    return kind.stack(parts).tidy()


def _stacked_buffers(graphs: Sequence[Graph], starts: Array) -> Buffers:
    parts = []
    for g, start in zip(graphs, starts, strict=False):
        b = g.buffers
        born = np.where(b.born == NONE, NONE, b.born + start)
        dies = np.where(b.dies == NONE, NONE, b.dies + start)
        parts.append(b.replace(born=born, dies=dies))
    return Buffers.stack(parts)
