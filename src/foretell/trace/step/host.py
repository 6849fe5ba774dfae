"""CPU threads in one step: how host events nest, pieces of operator time, calls that cut them.

A thread's time is cut at every call that starts or waits for device work; what is left of each
outermost operator between two cuts is one piece. Time outside all operators (Python, mostly) is no
piece: it becomes the gap behind the piece before it. Reading data is one piece however many
operators run inside. Calls that only query (attributes, errors, event queries) stay in their piece.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import numpy as np

from foretell.graph.columns import NONE, Array
from foretell.trace.events import Events, What
from foretell.trace.words import Does, Tells, by_name, does, note_tells, op_tells

_HOST = (What.OP, What.CALL, What.NOTE, What.MODULE)
# At the same instant the longer lies around the shorter, and of equally long ones a note around a
# module, a module around an operator, an operator around a call.
_DEPTH = np.zeros(len(What), np.int8)
_DEPTH[What.MODULE], _DEPTH[What.OP], _DEPTH[What.CALL] = 1, 2, 3


@dataclass(frozen=True, eq=False)
class Nest:
    """The host events of a step in order of thread and start, and what each lies in.

    All columns but `event` hold places in this order, NONE where there is nothing.
    """

    event: Array  # numbers in Events
    parent: Array
    unit: Array  # the outermost operator (or data load) around it
    op: Array  # the innermost operator around it, itself where it is one
    layer: Array  # the innermost module or layer note around it
    note: Array  # the innermost note around it
    tells: Array  # what all that lies around it tells
    does: Array  # what a call does
    outer_call: Array  # the outermost call around it, itself where it is one


def nest(events: Events, begin: float, end: float) -> Nest:
    """How the host events that begin in [begin, end) lie in each other."""
    chosen = np.flatnonzero(events.is_(*_HOST) & (events.start >= begin) & (events.start < end))
    tells = _tells(events, chosen)
    keep = (tells & Tells.STEP) == 0
    chosen, tells = chosen[keep], tells[keep]
    what, place = events.what[chosen], events.place[chosen]
    ranked = np.lexsort((_DEPTH[what], -events.end[chosen], events.start[chosen], place))
    chosen, tells, what = chosen[ranked], tells[ranked], what[ranked]
    parent = _parents(events, chosen)
    is_layer = (what == What.MODULE) | ((tells & Tells.LAYER) > 0)
    is_call = what == What.CALL
    calls = by_name(events.texts, events.name[chosen], lambda text: int(does(text)))
    levels = _levels(parent)
    return Nest(
        chosen,
        parent,
        _outermost(parent, levels, (tells & Tells.UNIT) > 0),
        _innermost(parent, levels, what == What.OP),
        _innermost(parent, levels, is_layer),
        _innermost(parent, levels, what == What.NOTE),
        _inherited(parent, levels, tells),
        np.where(is_call, calls, Does.NOTHING),
        _joined(parent, levels, is_call),
    )


def _tells(events: Events, chosen: Array) -> Array:
    """What each event tells of itself and of what lies in it."""
    what, name = events.what[chosen], events.name[chosen]
    found = np.zeros(len(chosen), np.int64)
    for kind, meaning in ((What.NOTE, note_tells), (What.OP, op_tells)):
        mine = what == kind
        found[mine] = by_name(events.texts, name[mine], lambda text: int(meaning(text)))  # noqa: B023
    is_backward = (what == What.OP) & (events.forward_thread[chosen] > 0)
    found[is_backward] |= Tells.BACKWARD
    return found


def _parents(events: Events, chosen: Array) -> Array:
    """What each event lies in: the last before it on its thread that has not ended."""
    place, start = events.place[chosen].tolist(), events.start[chosen].tolist()
    end = events.end[chosen].tolist()
    parent: list[int] = []
    stack: list[int] = []
    here = NONE
    for i, (at, begin) in enumerate(zip(place, start, strict=True)):
        if at != here:
            stack.clear()
            here = at
        while stack and end[stack[-1]] <= begin:
            stack.pop()
        parent.append(stack[-1] if stack else NONE)
        stack.append(i)
    return np.array(parent, np.int64)


def _levels(parent: Array) -> list[Array]:
    """The events that lie in others, by how many these are: fewest first."""
    found, inside = [], np.flatnonzero(parent != NONE)
    above = parent[inside]  # of each, the one at the level that is looked at
    while len(inside):
        outer = parent[above]
        found.append(inside[outer == NONE])
        inside, above = inside[outer != NONE], outer[outer != NONE]
    return found


def _innermost(parent: Array, levels: list[Array], wanted: Array) -> Array:
    """The nearest wanted event at or around each."""
    found = np.where(wanted, np.arange(len(parent)), NONE)
    for rows in levels:
        rows = rows[~wanted[rows]]
        found[rows] = found[parent[rows]]
    return found


def _outermost(parent: Array, levels: list[Array], wanted: Array) -> Array:
    """The farthest wanted event at or around each."""
    found = np.where(wanted, np.arange(len(parent)), NONE)
    for rows in levels:
        above = found[parent[rows]]
        found[rows] = np.where(above != NONE, above, found[rows])
    return found


def _joined(parent: Array, levels: list[Array], wanted: Array) -> Array:
    """For each wanted event the outermost around it that has none but wanted ones in between."""
    found = np.where(wanted, np.arange(len(parent)), NONE)
    for rows in levels:
        rows = rows[wanted[rows] & wanted[parent[rows]]]
        found[rows] = found[parent[rows]]
    return found


def _inherited(parent: Array, levels: list[Array], tells: Array) -> Array:
    """What each event tells together with all that it lies in."""
    found = tells.copy()
    for rows in levels:
        found[rows] |= found[parent[rows]] & ~int(Tells.UNIT)
    return found


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
