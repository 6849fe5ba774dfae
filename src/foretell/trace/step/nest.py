"""How the host events of a step lie in each other, and what each inherits from what it lies in."""

from __future__ import annotations

from dataclasses import dataclass

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
        _told(parent, levels, tells),
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


def _told(parent: Array, levels: list[Array], tells: Array) -> Array:
    """What each event tells together with all that it lies in."""
    found = tells.copy()
    for rows in levels:
        found[rows] |= found[parent[rows]] & ~int(Tells.UNIT)
    return found
