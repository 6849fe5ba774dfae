"""Columns of a graph while it is written: blocks of tasks at once, never one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.graph import COLUMNS, BufferKind, Buffers, Graph, Lanes, Names, assemble, edges
from foretell.graph.columns import LaneKind, code_of, coded

Ids = npt.NDArray[np.int64]


class Draft:
    """Tasks, waits, lanes and buffers that become one graph."""

    def __init__(self) -> None:
        self.size = 0
        self._texts: dict[str, int] = {"": 0}
        self._columns: dict[str, list[tuple[int, Any]]] = {}
        self._waits: list[tuple[Ids, Ids]] = []
        self._lanes: list[tuple[int, int, int, bool]] = []
        self._buffers: list[dict[str, Any]] = []

    def lane(self, name: str, rank: int, kind: str) -> int:
        """A new ordered lane; its number."""
        self._lanes.append((rank, self.text(name), code_of(LaneKind, kind), True))
        return len(self._lanes) - 1

    def text(self, text: str) -> int:
        """The number of a text."""
        return self._texts.setdefault(text, len(self._texts))

    def tasks(self, count: int, **columns: Any) -> Ids:
        """New tasks; a column is one value for all or one each. Their numbers."""
        first = self.size
        self.size += count
        for name, value in columns.items():
            number = coded(name, value, self.text) if isinstance(value, str) else value
            values = np.broadcast_to(np.asarray(number), (count,))
            self._columns.setdefault(name, []).append((first, values))
        return np.arange(first, first + count)

    def wait(self, tasks: Any, after: Any) -> None:
        """Let tasks wait for others, pair by pair."""
        pair = np.broadcast_arrays(np.asarray(tasks, np.int64), np.asarray(after, np.int64))
        self._waits.append((pair[0].reshape(-1), pair[1].reshape(-1)))

    def buffers(self, count: int, kind: str, name: str, **columns: Any) -> None:
        """New buffers: bytes, rank, born, dies."""
        given = {"born": -1, "dies": -1, "rank": 0, **columns}
        given |= {"kind": code_of(BufferKind, kind), "name": self.text(name)}
        self._buffers.append({k: np.broadcast_to(v, (count,)) for k, v in given.items()})

    def graph(self, history: tuple[str, ...] = (), **facts: Any) -> Graph:
        """All of it, verified."""
        columns = {name: self._filled(name, parts) for name, parts in self._columns.items()}
        empty = (np.zeros(0, np.int64), np.zeros(0, np.int64))
        task, after = (
            np.concatenate([pair[side] for pair in self._waits or [empty]]) for side in (0, 1)
        )
        names = ("bytes", "rank", "born", "dies", "name", "kind")
        held = {n: np.concatenate([b[n] for b in self._buffers] or [[]]) for n in names}
        return assemble(
            self.size,
            columns,
            edges(self.size, task, after),
            names=Names(self._texts),
            lanes=Lanes(*(np.array(column) for column in zip(*self._lanes, strict=True))),
            buffers=Buffers(**held),
            facts=facts,
            history=history,
        )

    def _filled(self, name: str, parts: list[tuple[int, Any]]) -> Any:
        out = np.full(self.size, COLUMNS[name].default, COLUMNS[name].dtype)
        if name == "order":
            out = np.arange(self.size)
        for first, values in parts:
            out[first : first + len(values)] = values
        return out
