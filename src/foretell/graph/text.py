"""A graph as text that people read and `parse` turns back into the same graph, to the last bit.

    foretell graph 1
    lane 0 = compute "stream 7" of rank 0 ordered
    link 0 = "ib" capacity 25000000000.0
    %0 = kernel gemm "fc1" on 0 for 0.00125 flops=1e9 phase=forward
    %1 = collective all_reduce on 1,3 for 0.002 after %0+1e-05:launch uses 0*12.5e9 group="0-1"
    buffer 4096.0 activation "x" of rank 0 from %0 to %1
    fact measured 0.0123

Numbers are written so that reading gives the same bits; columns at their default are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from foretell.errors import InputError
from foretell.graph.build import Builder
from foretell.graph.columns import COLUMNS, NONE, BufferKind, Kind, LaneKind, WaitKind, word_of
from foretell.graph.graph import Graph

VERSION = 1
_HEAD = f"foretell graph {VERSION}"
_SPOKEN = ("kind", "op", "name", "lane", "seconds")  # columns with a place of their own in a line


def text(graph: Graph) -> str:
    """The whole graph as text."""
    return "\n".join(_lines(graph)) + "\n"


def task_text(graph: Graph, i: int) -> str:
    """One task as a line of text."""
    return _TaskLines(graph).line(i)


def _lines(graph: Graph) -> Iterator[str]:
    yield _HEAD
    yield from (f"history {json.dumps(spec)}" for spec in graph.history)
    yield from (f"fact {key} {json.dumps(value)}" for key, value in graph.facts.items())
    yield from _lane_lines(graph)
    links = graph.links
    for k in range(len(links)):
        yield f"link {k} = {_quoted(graph, links.name[k])} capacity {_number(links.capacity[k])}"
    lines = _TaskLines(graph)
    yield from (lines.line(i) for i in range(graph.size))
    yield from _buffer_lines(graph)


def _lane_lines(graph: Graph) -> Iterator[str]:
    lanes = graph.lanes
    for k in range(len(lanes)):
        kind, name = word_of(LaneKind, lanes.kind[k]), _quoted(graph, lanes.name[k])
        order = "ordered" if lanes.ordered[k] else "free"
        yield f"lane {k} = {kind} {name} of rank {lanes.rank[k]} {order}"


def _buffer_lines(graph: Graph) -> Iterator[str]:
    b = graph.buffers
    for k in range(len(b)):
        kind, name = word_of(BufferKind, b.kind[k]), _quoted(graph, b.name[k])
        born = f" from %{b.born[k]}" if b.born[k] != NONE else ""
        dies = f" to %{b.dies[k]}" if b.dies[k] != NONE else ""
        yield f"buffer {_number(b.bytes[k])} {kind} {name} of rank {b.rank[k]}{born}{dies}"


class _TaskLines:
    """Writes tasks as lines; keeps what a line needs at hand."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.written = [c for c in COLUMNS if c in graph.columns and c not in _SPOKEN]

    def line(self, i: int) -> str:
        g = self.graph
        name = g.text_of("name", i)
        parts = [f"%{i} = {g.text_of('kind', i)} {_word(g.text_of('op', i))}"]
        parts += [json.dumps(name)] if name else []
        parts += self._lanes(i)
        parts += [f"for {_number(g.seconds[i])}"]
        parts += self._waits(i)
        parts += self._pairs("drains", g.drained.task, g.drained.lane, i)
        parts += self._uses(i)
        parts += [f"{c}={self._value(c, i)}" for c in self.written if self._differs(c, i)]
        return " ".join(parts)

    def _lanes(self, i: int) -> list[str]:
        lanes = self.graph[i].lanes if 0 <= i < self.graph.size else ()
        if lanes and self.graph.lane[i] == NONE:
            return ["on -," + ",".join(map(str, lanes))]
        return ["on " + ",".join(map(str, lanes))] if lanes else []

    def _waits(self, i: int) -> list[str]:
        e = self.graph.edges
        span = range(int(e.start[i]), int(e.start[i + 1]))
        waits = [f"%{e.after[k]}{self._lag(k)}{self._kind(k)}" for k in span]
        return ["after " + " ".join(waits)] if waits else []

    def _lag(self, k: int) -> str:
        lag = self.graph.edges.lag
        return f"+{_number(lag[k])}" if lag is not None and lag[k] else ""

    def _kind(self, k: int) -> str:
        kind = self.graph.edges.kind
        return f":{word_of(WaitKind, kind[k])}" if kind is not None and kind[k] else ""

    def _pairs(self, word: str, task: Any, other: Any, i: int) -> list[str]:
        low, high = np.searchsorted(task, [i, i + 1])
        return [f"{word} " + ",".join(map(str, other[low:high]))] if high > low else []

    def _uses(self, i: int) -> list[str]:
        used = self.graph.used
        low, high = np.searchsorted(used.task, [i, i + 1])
        uses = [f"{used.link[k]}*{_number(used.demand[k])}" for k in range(low, high)]
        return ["uses " + ",".join(uses)] if uses else []

    def _differs(self, name: str, i: int) -> bool:
        default = i if name == "order" else COLUMNS[name].default
        return bool(self.graph.column(name)[i] != default)

    def _value(self, name: str, i: int) -> str:
        spec = COLUMNS[name]
        if spec.words:
            return self.graph.text_of(name, i)
        return (
            json.dumps(self.graph.text_of(name, i))
            if spec.is_text
            else _number(self.graph.column(name)[i])
        )


def _number(value: Any) -> str:
    return repr(value.item())


def _word(op: str) -> str:
    return op if re.fullmatch(r"[A-Za-z_][\w.:/-]*", op) else json.dumps(op)


def _quoted(graph: Graph, name: Any) -> str:
    return json.dumps(graph.names[int(name)])


def parse(source: str, *, where: str = "text", check: bool = True) -> Graph:
    """The graph that a text describes."""
    lines = source.splitlines()
    if not lines or lines[0].strip() != _HEAD:
        raise InputError(
            f"{where} does not begin with `{_HEAD}`",
            hint=_version_hint(lines[0] if lines else ""),
        )
    reader = _Reader()
    for number, line in enumerate(lines[1:], start=2):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        try:
            reader.read(_tokens(stripped))
        except InputError as error:
            raise InputError(f"{where}, line {number}: {error.message}", hint=error.hint) from None
        except (ValueError, IndexError, TypeError):
            raise InputError(f"{where}, line {number}: cannot read `{stripped[:80]}`") from None
    return reader.graph(check)


def _version_hint(head: str) -> str:
    if head.startswith("foretell graph"):
        return f"it is of another version: `{head}`; this foretell reads version {VERSION}"
    return "is it a graph? `foretell show FILE` says what a file is"


_TOKEN = re.compile(
    r'[A-Za-z_]\w*="(?:[^"\\]|\\.)*"|"(?:[^"\\]|\\.)*"|\[[^\]]*\]|\{[^}]*\}|[^\s"]+'
)


def _tokens(line: str) -> list[str]:
    return _TOKEN.findall(line)


class _Reader:
    """Feeds lines of text to a Builder."""

    def __init__(self) -> None:
        self.builder = Builder()
        self.history: list[str] = []
        self.facts: dict[str, Any] = {}
        self.tasks = 0
        self.words: dict[str, Callable[[list[str]], None]] = {
            "history": lambda t: self.history.append(json.loads(t[1])),
            "fact": lambda t: self.facts.update({t[1]: json.loads(" ".join(t[2:]))}),
            "lane": self._lane,
            "link": self._link,
            "buffer": self._buffer,
        }

    def read(self, tokens: list[str]) -> None:
        if tokens[0].startswith("%"):
            return self._task(tokens)
        if tokens[0] not in self.words:
            raise InputError(f"a line cannot begin with `{tokens[0]}`")
        return self.words[tokens[0]](tokens)

    def graph(self, check: bool) -> Graph:
        made = self.builder.graph(check=check, **self.facts)
        object.__setattr__(made, "history", tuple(self.history))
        return made

    def _lane(self, t: list[str]) -> None:
        _expect(len(t) == 9 and t[7].lstrip("-").isdigit(), "lane N = KIND NAME of rank R ordered")
        made = self.builder.lane(
            json.loads(t[4]), rank=int(t[7]), kind=t[3], ordered=t[8] == "ordered"
        )
        _expect(made == int(t[1]), f"lanes are numbered in order: this is lane {made}")

    def _link(self, t: list[str]) -> None:
        made = self.builder.link(json.loads(t[3]), float(t[5]))
        _expect(made == int(t[1]), f"links are numbered in order: this is link {made}")

    def _buffer(self, t: list[str]) -> None:
        ends = dict(zip(t[7::2], t[8::2], strict=True))
        self.builder.buffer(
            float(t[1]),
            kind=t[2],
            name=json.loads(t[3]),
            rank=int(t[6]),
            born=_task_number(ends.get("from", "%-1")),
            dies=_task_number(ends.get("to", "%-1")),
        )

    def _task(self, t: list[str]) -> None:
        _expect(t[1] == "=" and _task_number(t[0]) == self.tasks, f"expected `%{self.tasks} = …`")
        columns: dict[str, Any] = {"kind": t[2]}
        rest = t[3:]
        if rest and rest[0] not in ("on", "for"):
            columns["op"] = _unquoted(rest.pop(0))
        if rest and rest[0].startswith('"'):
            columns["name"] = json.loads(rest.pop(0))
        waits = self._clauses(rest, columns)
        i = self.builder.task(**columns)
        self.tasks += 1
        for after, lag, kind in waits:
            self.builder.wait(i, after, lag=lag, kind=kind)

    def _clauses(self, rest: list[str], columns: dict[str, Any]) -> list[tuple[int, float, str]]:
        waits: list[tuple[int, float, str]] = []
        while rest:
            word = rest.pop(0)
            if word == "for":
                columns["seconds"] = float(rest.pop(0))
            elif word == "on":
                columns.update(_lanes(rest.pop(0)))
            elif word == "drains":
                columns["drains"] = [int(k) for k in rest.pop(0).split(",")]
            elif word == "uses":
                columns["uses"] = _uses(rest.pop(0))
            elif word == "after":
                while rest and rest[0].startswith("%"):
                    waits.append(_wait(rest.pop(0)))
            else:
                columns.update([_column(word)])
        return waits


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise InputError(what)


def _unquoted(token: str) -> str:
    return str(json.loads(token)) if token.startswith('"') else token


def _task_number(token: str) -> int:
    _expect(token.startswith("%"), f"`{token}` is not a task: write %N")
    return int(token[1:])


def _lanes(token: str) -> dict[str, Any]:
    lanes = [NONE if k == "-" else int(k) for k in token.split(",")]
    return {"lane": lanes[0], "lanes": lanes}


def _uses(token: str) -> dict[int, float]:
    pairs: Iterable[list[str]] = (use.split("*") for use in token.split(","))
    return {int(link): float(demand) for link, demand in pairs}


def _wait(token: str) -> tuple[int, float, str]:
    head, _, kind = token.partition(":")
    task, _, lag = head.partition("+")
    return _task_number(task), float(lag or 0), kind or "data"


def _column(token: str) -> tuple[str, Any]:
    name, equals, value = token.partition("=")
    _expect(bool(equals), f"`{token}` is not column=value")
    if name not in COLUMNS or name in _SPOKEN:
        from foretell.errors import unknown

        raise unknown("column", name, (c for c in COLUMNS if c not in _SPOKEN))
    spec = COLUMNS[name]
    if spec.is_text:
        return name, json.loads(value)
    if spec.words:
        return name, value
    return name, int(value) if np.issubdtype(spec.dtype, np.integer) else float(value)


__all__ = ["Kind", "parse", "task_text", "text"]
