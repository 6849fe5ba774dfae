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
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from foretell.errors import GraphError
from foretell.graph.columns import COLUMNS, NONE, Array, BufferKind, LaneKind, WaitKind, word_of
from foretell.graph.graph import Graph
from foretell.graph.tables import Rows

VERSION = 1
HEAD = f"foretell graph {VERSION}"
SPOKEN = ("kind", "op", "name", "lane", "seconds")  # columns with a place of their own in a line
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
        *(_column(graph, c, span) for c in COLUMNS if c in graph.columns and c not in SPOKEN),
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
