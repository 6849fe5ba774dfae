"""What CPU threads did in one step: pieces of operator time, and the calls that cut them.

A thread's time is cut at every call that starts or waits for device work; what is left of each
outermost operator between two cuts is one piece. Time outside all operators (Python, mostly) is no
piece: it becomes the gap behind the piece before it. Reading data is one piece however many
operators run inside. Calls that only ask (attributes, errors, event queries) stay in their piece.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import numpy as np

from foretell.graph.columns import NONE, Array
from foretell.trace.events import Events, What
from foretell.trace.step.nest import Nest

_LEAST = 1e-9  # seconds: what is shorter than the finest stamp is rounding
_Row = tuple[int, float, float, int, int, bool]  # thread, start, end, label, unit, is_call
# Place in the nest, thread, start, end, unit, op, is_cut; and a mark that ends what is open.
_Mark = tuple[int, int, float, float, int, int, bool]
_LAST: list[_Mark] = [(NONE, NONE, 0.0, 0.0, NONE - 1, NONE, False)]


@dataclass(frozen=True, eq=False)
class Pieces:
    """The host tasks of a step, in order of thread and start."""

    thread: Array
    start: Array
    end: Array
    label: Array  # place in the nest: a call, or the operator that the piece works for
    unit: Array  # place in the nest of the outermost operator, NONE outside of all
    is_call: Array

    def __len__(self) -> int:
        return len(self.start)


def pieces(events: Events, n: Nest, cuts: Array) -> Pieces:
    """The pieces of every thread; `cuts` marks the calls of the nest that cut."""
    is_unit = n.unit == np.arange(len(n.event))
    marks = np.flatnonzero(is_unit | cuts)
    event = n.event[marks]
    columns = (
        marks, events.place[event], events.start[event], events.end[event],
        n.unit[marks], n.op[marks], cuts[marks],
    )  # fmt: skip
    rows = _cut(zip(*(c.tolist() for c in columns), strict=True))
    thread, start, end, label, unit, is_call = zip(*rows, strict=True) if rows else [()] * 6
    return Pieces(
        np.array(thread, np.int64), np.array(start, np.float64), np.array(end, np.float64),
        np.array(label, np.int64), np.array(unit, np.int64), np.array(is_call, bool),
    )  # fmt: skip


def _cut(marks: Iterable[_Mark]) -> list[_Row]:
    """The calls among some marks, in order of thread and start, and the pieces between them.

    A piece works for the operator of the call behind it, or else of the call before it in the same
    unit; without any call for the unit itself.
    """
    rows: list[_Row] = []
    current = worker = here = NONE  # the open unit, the operator that works in it, the thread
    until = cursor = -np.inf  # the end of the open unit, and how far the thread is cut
    for i, thread, start, end, unit, op, is_cut in chain(marks, _LAST):
        if current not in (unit, NONE):
            if until > cursor + _LEAST:
                rows.append((here, cursor, until, worker, current, False))
            cursor, current = max(cursor, until), NONE
        if thread != here:
            here, cursor = thread, -np.inf
        if unit == i:
            current, worker, until, cursor = i, i, end, max(cursor, start)
        if is_cut:
            if current != NONE:
                worker = op if op != NONE else current
                if start > cursor + _LEAST:
                    rows.append((here, cursor, start, worker, current, False))
            begin = max(start, cursor)
            cursor = max(end, begin)
            rows.append((here, begin, cursor, i, current, True))
    return rows


def recorded(events: Events, n: Nest, p: Pieces) -> Array:
    """How many operators and notes (first column) and calls (second) began in each piece.

    What began between two pieces counts for the one before: there its cost is a gap.
    """
    found = np.zeros((len(p), 2), np.int32)
    if not len(p):
        return found
    e = n.event
    span = max(float(p.end.max()), float(events.start[e].max(initial=0.0))) + 1.0
    at = np.searchsorted(
        p.thread * span + p.start, events.place[e] * span + events.start[e], side="right"
    )
    at = np.clip(at - 1, 0, None)
    np.add.at(found, (at, (events.what[e] == What.CALL).astype(np.int64)), 1)
    return found
