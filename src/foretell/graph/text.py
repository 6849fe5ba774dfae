"""A graph as text that people read and `parse` turns back into the same graph, to the last bit.

    foretell graph 1
    history "faster:op=gemm"
    fact measured 0.0123
    lane 0 = compute "stream 7" of rank 0 ordered
    link 0 = "ib" capacity 25000000000.0
    %0 = kernel gemm "fc1" on 0 for 0.00125 flops=1e9 phase=forward
    %1 = collective all_reduce on 1,3 for 0.002 after %0+1e-05:launch uses 0*12.5e9 group="0-1"
    buffer 4096.0 activation "x" of rank 0 from %0 to %1

Numbers are written so that reading gives the same bits; columns at their default are left out.
Strings are written as in JSON, in ASCII, so that a line is always one line.

Whatever cannot be read is named by its line. People may leave out what `text` always writes (op,
`for`), add blank lines, and lines that begin with `#`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from foretell.errors import GraphError, InputError, unknown
from foretell.graph.build import Builder
from foretell.graph.graph import (
    COLUMNS,
    NONE,
    Array,
    BufferKind,
    Graph,
    LaneKind,
    Rows,
    WaitKind,
    word_of,
)
from foretell.io import checked

VERSION = 1
HEAD = f"foretell graph {VERSION}"
# columns with a place of their own in a line
POSITIONAL = ("kind", "op", "name", "lane", "seconds")
CLAUSES = ("on", "for", "after", "drains", "uses")  # words that begin a part of a line
_WORD = re.compile(r"[A-Za-z_][\w.:/-]*")


def text(graph: Graph) -> str:
    """The whole graph as text."""
    return "\n".join(_lines(graph)) + "\n"


def task_text(graph: Graph, i: int) -> str:
    """One task as a line of text."""
    return next(_task_lines(graph, i, i + 1))


def as_json(value: Any, what: str) -> str:
    """A value as JSON on one line; numbers of numpy are numbers too."""
    try:
        return json.dumps(value, default=lambda number: number.tolist())
    except (AttributeError, TypeError, ValueError, RecursionError):
        raise GraphError(
            f"{what} is a {type(value).__name__} that cannot be written",
            hint="facts are numbers, strings, and lists and dictionaries of them",
        ) from None


def _lines(graph: Graph) -> Iterator[str]:
    yield HEAD
    yield from (f"history {json.dumps(spec)}" for spec in graph.history)
    for key, value in graph.facts.items():
        yield f"fact {_word(key)} {as_json(value, f'fact `{key}`')}"
    yield from _lane_lines(graph)
    links = graph.links
    for k in range(len(links)):
        yield f"link {k} = {_quoted(graph, links.name[k])} capacity {links.capacity[k].item()!r}"
    yield from _task_lines(graph, 0, graph.size)
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
        yield f"buffer {b.bytes[k].item()!r} {kind} {name} of rank {b.rank[k]}{born}{dies}"


# Lines of tasks: each part of a line is made for all selected tasks, then the parts are joined.


def _task_lines(graph: Graph, first: int, last: int) -> Iterator[str]:
    span = slice(first, last)
    parts = [
        (f"%{i} =" for i in range(first, last)),
        _texts(graph, "kind", span),
        map(_word, _texts(graph, "op", span)),
        (json.dumps(name) if name else "" for name in _texts(graph, "name", span)),
        _lanes(graph, first, last),
        (f"for {seconds!r}" for seconds in graph.seconds[span].tolist()),
        _waits(graph, first, last),
        _named(graph.drained, "drains", first, last),
        _uses(graph, first, last),
        *(_column(graph, c, span) for c in COLUMNS if c in graph.columns and c not in POSITIONAL),
    ]
    return (" ".join(filter(None, row)) for row in zip(*parts, strict=True))


def _texts(graph: Graph, name: str, span: slice) -> list[str]:
    """A text or code column as words and strings, each made once."""
    codes, words = graph.column(name)[span].tolist(), COLUMNS[name].words
    known = {c: word_of(words, c) if words else graph.names[c] for c in set(codes)}
    return [known[c] for c in codes]


def _lanes(graph: Graph, first: int, last: int) -> Iterator[str]:
    own = graph.lane[first:last].tolist()
    for lane, more in zip(own, _rows(graph.held, first, last), strict=True):
        lanes = [str(lane) if lane != NONE else "-", *map(str, graph.held.lane[more])]
        yield "on " + ",".join(lanes) if lanes != ["-"] else ""


def _waits(graph: Graph, first: int, last: int) -> Iterator[str]:
    e = graph.edges
    start = e.start[first : last + 1].tolist()
    for i in range(last - first):
        waits = [
            f"%{e.after[k]}{_lag(e.lag, k)}{_kind(e.kind, k)}"
            for k in range(start[i], start[i + 1])
        ]
        yield "after " + " ".join(waits) if waits else ""


def _lag(lag: Array | None, k: int) -> str:
    return f"+{lag[k].item()!r}" if lag is not None and _is_given(lag[k]) else ""


def _kind(kind: Array | None, k: int) -> str:
    return f":{word_of(WaitKind, kind[k])}" if kind is not None and kind[k] else ""


def _named(rows: Rows, word: str, first: int, last: int) -> Iterator[str]:
    for mine in _rows(rows, first, last):
        yield f"{word} " + ",".join(map(str, rows.named[mine])) if mine.stop > mine.start else ""


def _uses(graph: Graph, first: int, last: int) -> Iterator[str]:
    used = graph.used
    for mine in _rows(used, first, last):
        pairs = zip(used.link[mine].tolist(), used.demand[mine].tolist(), strict=True)
        uses = ",".join(f"{link}*{demand!r}" for link, demand in pairs)
        yield f"uses {uses}" if uses else ""


def _rows(rows: Rows, first: int, last: int) -> Iterable[slice]:
    """Where the rows of each task are."""
    starts = np.searchsorted(rows.columns()["task"], np.arange(first, last + 1)).tolist()
    return (slice(starts[i], starts[i + 1]) for i in range(last - first))


def _column(graph: Graph, name: str, span: slice) -> Iterator[str]:
    """A column where it differs from its default, which is zero (the number of the task: order)."""
    spec, values = COLUMNS[name], graph.columns[name][span]
    is_order = name == "order"
    given = values != np.arange(span.start, span.stop) if is_order else _is_given(values)
    if spec.words or spec.is_text:
        shown = _texts(graph, name, span)
        shown = [json.dumps(s) for s in shown] if spec.is_text else shown
    else:
        shown = [repr(v) for v in values.tolist()]
    return (f"{name}={s}" if t else "" for s, t in zip(shown, given.tolist(), strict=True))


def _is_given(values: Any) -> Any:
    """Where a number is not plain zero: minus zero is another number of bits."""
    return (values != 0) | np.signbit(values)


def _word(word: str) -> str:
    return word if _WORD.fullmatch(word) and word not in CLAUSES else json.dumps(word)


def _quoted(graph: Graph, name: Any) -> str:
    return json.dumps(graph.names[int(name)])


_QUOTED = r'"(?:[^"\\]|\\.)*+"'
# A token is a string, a column with a string, or anything without spaces and quotation marks.
_TOKEN = re.compile(rf'(?:[A-Za-z_]\w*=)?{_QUOTED}(?!\S)|[^\s"]++(?!\S)')
_LINE = re.compile(rf"(?>\s*+(?:{_TOKEN.pattern}))*+")
_FACT = re.compile(rf"fact\s+({_QUOTED}|[^\s\"]+)\s+(.+)")
_LANE = 'lane N = KIND "NAME" of rank R ordered|free'
_LINK = 'link N = "NAME" capacity C'
_BUFFER = 'buffer BYTES KIND "NAME" of rank R [from %N] [to %N]'


def parse(source: str, *, where: str = "text", check: bool = True) -> Graph:
    """The graph that a text describes."""
    lines = source.split("\n")
    if lines[0].strip() != HEAD:
        raise InputError(
            f"{where}, line 1: does not begin with `{HEAD}`", hint=_version_hint(lines[0].strip())
        )
    reader = _Reader()
    for number, line in enumerate(lines[1:], start=2):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        try:
            reader.read(stripped)
        except InputError as error:
            raise InputError(f"{where}, line {number}: {error.message}", hint=error.hint) from None
        except (ValueError, IndexError, RecursionError):
            raise InputError(
                f"{where}, line {number}: cannot read `{stripped[:80]}`",
                hint="the words of a line are those that `foretell show --text` writes",
            ) from None
    try:
        return reader.builder.made(reader.facts, history=tuple(reader.history), check=check)
    except GraphError as error:
        raise GraphError(f"{where}: {error.message}", hint=error.hint) from None


def _version_hint(head: str) -> str:
    if head.startswith("foretell graph"):
        return f"it is of another version: `{head[:40]}`; this foretell reads version {VERSION}"
    return "is it a graph? `foretell show FILE` says what a file is"


class _Reader:
    """Feeds lines of text to a Builder."""

    def __init__(self) -> None:
        self.builder = Builder()
        self.history: list[str] = []
        self.facts: dict[str, Any] = {}
        self.tasks = 0
        self.words: dict[str, Callable[[list[str]], None]] = {
            "history": self._history,
            "lane": self._lane,
            "link": self._link,
            "buffer": self._buffer,
        }

    def read(self, line: str) -> None:
        """Read one line."""
        if line.startswith("fact "):
            return self._fact(line)
        tokens = _tokens(line)
        if tokens[0].startswith("%"):
            return self._task(tokens)
        if tokens[0] not in self.words:
            raise unknown("beginning of a line", tokens[0], ["%N", "fact", *self.words])
        return self.words[tokens[0]](tokens)

    def _history(self, t: list[str]) -> None:
        _expect(len(t) == 2, 'history "SPEC"')
        self.history.append(_string(t[1]))

    def _fact(self, line: str) -> None:
        found = _FACT.fullmatch(line)
        if not found:
            raise InputError("expected `fact NAME JSON`")
        key = _string(found[1]) if found[1].startswith('"') else found[1]
        if key in self.facts:
            raise InputError(f"fact `{key}` is given twice")
        self.facts[key] = checked(json.loads(found[2]), f"fact `{key[:40]}`", finite=False)

    def _lane(self, t: list[str]) -> None:
        _expect(len(t) == 9 and (t[2], *t[5:7]) == ("=", "of", "rank"), _LANE)
        _expect(t[8] in ("ordered", "free"), _LANE)
        made = self.builder.lane(
            _string(t[4]), rank=_count(t[7], "rank"), kind=t[3], ordered=t[8] == "ordered"
        )
        if made != int(t[1]):
            raise InputError(f"lanes are numbered in order: this is lane {made}")

    def _link(self, t: list[str]) -> None:
        _expect(len(t) == 6 and (t[2], t[4]) == ("=", "capacity"), _LINK)
        made = self.builder.link(_string(t[3]), float(t[5]))
        if made != int(t[1]):
            raise InputError(f"links are numbered in order: this is link {made}")

    def _buffer(self, t: list[str]) -> None:
        _expect(len(t) in (7, 9, 11) and t[4:6] == ["of", "rank"], _BUFFER)
        ends = dict(zip(t[7::2], t[8::2], strict=True))
        _expect(tuple(t[7::2]) in ((), ("from",), ("to",), ("from", "to")), _BUFFER)
        self.builder.buffer(
            float(t[1]),
            kind=t[2],
            name=_string(t[3]),
            rank=_count(t[6], "rank"),
            born=_task_number(ends["from"]) if "from" in ends else NONE,
            dies=_task_number(ends["to"]) if "to" in ends else NONE,
        )

    def _task(self, t: list[str]) -> None:
        if t[1:2] != ["="] or _task_number(t[0]) != self.tasks:
            raise InputError(f"tasks are numbered in order: expected `%{self.tasks} = KIND …`")
        columns: dict[str, Any] = {"kind": t[2]}
        rest = t[:2:-1]  # what is left, the next word last
        if rest and rest[-1] not in CLAUSES and not _is_column(rest[-1]):
            token = rest.pop()
            columns["op"] = _string(token) if token.startswith('"') else token
        if rest and rest[-1].startswith('"'):
            columns["name"] = _string(rest.pop())
        waits = _clauses(rest, columns)
        i = self.builder.task(**columns)
        self.tasks += 1
        for after, lag, kind in waits:
            self.builder.wait(i, after, lag=lag, kind=kind)


def _clauses(rest: list[str], columns: dict[str, Any]) -> list[tuple[int, float, str]]:
    """Read what follows the name of a task: fill its columns and return its waits."""
    waits: list[tuple[int, float, str]] = []
    seen: set[str] = set()
    while rest:
        word = rest.pop()
        name = word if word in CLAUSES else word.partition("=")[0]
        if name in seen:
            raise InputError(f"`{name}` is given twice")
        seen.add(name)
        if word == "for":
            columns["seconds"] = float(rest.pop())
        elif word == "on":
            columns.update(_read_lanes(rest.pop()))
        elif word == "drains":
            columns["drains"] = _different([_count(k, "lane") for k in rest.pop().split(",")])
        elif word == "uses":
            columns["uses"] = _read_uses(rest.pop())
        elif word == "after":
            waits += _read_waits(rest)
        else:
            columns.update([_read_column(word)])
    return waits


def _tokens(line: str) -> list[str]:
    whole = _LINE.match(line)
    read = whole.end() if whole else 0
    if read != len(line):
        raise InputError(
            f"cannot read from `{line[read:].strip()[:40]}` on", hint="is a quote open?"
        )
    return _TOKEN.findall(line)


def _expect(holds: bool, form: str) -> None:
    if not holds:
        raise InputError(f"expected `{form}`")


def _string(token: str) -> str:
    found = json.loads(token)
    if not isinstance(found, str):
        raise InputError(f"`{token}` is not a string", hint="put it between quotation marks")
    return found


def _whole(token: str, low: int, high: int, what: str) -> int:
    """A whole number that fits; nothing that only looks like one."""
    digits = token.removeprefix("-")
    is_number = digits.isdigit() and digits.isascii() and len(digits) < 20
    if not is_number or not low <= int(token) <= high:
        raise InputError(f"`{token[:40]}` is not a {what}")
    return int(token)


def _count(token: str, what: str) -> int:
    return _whole(token, 0, 2**31 - 1, what)


def _task_number(token: str) -> int:
    if not token.startswith("%"):
        raise InputError(f"`{token}` is not a task", hint="write %N")
    return _count(token[1:], "task")


def _read_lanes(token: str) -> dict[str, Any]:
    lanes = [NONE if k == "-" else _count(k, "lane") for k in token.split(",")]
    return {"lane": lanes[0], "lanes": _different(lanes)}


def _read_uses(token: str) -> dict[int, float]:
    pairs = [use.split("*") for use in token.split(",")]
    links = _different([_count(link, "link") for link, _ in pairs])
    return {link: float(demand) for link, (_, demand) in zip(links, pairs, strict=True)}


def _different(numbers: list[int]) -> list[int]:
    if len(set(numbers)) < len(numbers):
        raise InputError(f"{','.join(map(str, numbers))} names one twice")
    return numbers


def _read_waits(rest: list[str]) -> list[tuple[int, float, str]]:
    found = []
    while rest and rest[-1].startswith("%"):
        head, _, kind = rest.pop().partition(":")
        task, _, lag = head.partition("+")
        found.append((_task_number(task), float(lag or 0), kind or "data"))
    if not found:
        raise InputError("`after` names no task", hint="write `after %N`")
    return found


def _is_column(token: str) -> bool:
    return not token.startswith('"') and "=" in token


def _read_column(token: str) -> tuple[str, Any]:
    name, equals, value = token.partition("=")
    if not equals:
        raise InputError(f"`{token[:40]}` is not column=value")
    if name not in COLUMNS or name in POSITIONAL:
        raise unknown("column", name, (c for c in COLUMNS if c not in POSITIONAL))
    spec = COLUMNS[name]
    if spec.is_text:
        return name, _string(value)
    if spec.words:
        return name, value
    if not np.issubdtype(spec.dtype, np.integer):
        return name, float(value)
    limits = np.iinfo(spec.dtype)
    return name, _whole(value, int(limits.min), int(limits.max), f"value of `{name}`")
