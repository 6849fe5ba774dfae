"""Make a graph by hand, one task at a time: for tests, examples and small readers.

Big readers fill columns at once and call `assemble`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from foretell.graph.columns import (
    COLUMNS,
    NONE,
    BufferKind,
    LaneKind,
    WaitKind,
    code_of,
    coded,
    column,
    is_default,
    owned,
)
from foretell.graph.edges import Edges, edges
from foretell.graph.graph import Graph
from foretell.graph.names import Names
from foretell.graph.tables import Buffers, Drained, Held, Lanes, Links, Rows, Used
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
