"""What CPU threads did in one step: pieces of operator time, and the calls that cut them.

A thread's time is cut at every call that starts or waits for device work; what is left of each
outermost operator between two cuts is one piece. Time outside all operators (Python, mostly) is no
piece: it becomes the gap behind the piece before it. Reading data is one piece however many
operators run inside. Calls that only ask (attributes, errors, event queries) stay in their piece.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretell.graph.columns import NONE, Array
from foretell.trace.events import Events, What
from foretell.trace.step.nest import Nest

_LEAST = 1e-9  # seconds: what is shorter than the finest stamp is rounding
_Row = tuple[int, float, float, int, int, bool]  # thread, start, end, label, unit, is_call


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
    rows: list[_Row] = []
    cutter = _Cutter(events, n, rows)
    for i, is_cut in zip(marks.tolist(), cuts[marks].tolist(), strict=True):
        cutter.meet(i, is_cut)
    cutter.close()
    thread, start, end, label, unit, is_call = zip(*rows, strict=True) if rows else [()] * 6
    return Pieces(
        np.array(thread, np.int64), np.array(start, np.float64), np.array(end, np.float64),
        np.array(label, np.int64), np.array(unit, np.int64), np.array(is_call, bool),
    )  # fmt: skip


class _Cutter:
    """Goes along the units and cutting calls of a nest and notes the pieces between them.

    A piece works for the operator of the call behind it, or else of the call before it in the same
    unit; without any call for the unit itself.
    """

    def __init__(self, events: Events, n: Nest, rows: list[_Row]) -> None:
        self.thread = events.place[n.event].tolist()
        self.start, self.end = events.start[n.event].tolist(), events.end[n.event].tolist()
        self.unit, self.op = n.unit.tolist(), n.op.tolist()
        self.rows = rows
        self.current = self.worker = NONE  # the open unit, and the operator that works in it
        self.at, self.cursor = NONE, -np.inf  # the thread, and how far it is cut

    def meet(self, i: int, is_cut: bool) -> None:
        if self.unit[i] != self.current:
            self.close()
        if self.thread[i] != self.at:
            self.at, self.cursor = self.thread[i], -np.inf
        if self.unit[i] == i:
            self.current = self.worker = i
            self.cursor = max(self.cursor, self.start[i])
        if is_cut:
            self.cut(i)

    def cut(self, i: int) -> None:
        if self.current != NONE:
            self.worker = self.op[i] if self.op[i] != NONE else self.current
            self.note(self.start[i])
        begin = max(self.start[i], self.cursor)
        self.cursor = max(self.end[i], begin)
        self.rows.append((self.at, begin, self.cursor, i, self.current, True))

    def close(self) -> None:
        if self.current != NONE:
            self.note(self.end[self.current])
            self.cursor = max(self.cursor, self.end[self.current])
            self.current = NONE

    def note(self, until: float) -> None:
        """A piece of operator time up to a moment, if there is any."""
        if until > self.cursor + _LEAST:
            self.rows.append((self.at, self.cursor, until, self.worker, self.current, False))


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
