"""Which parts of a trace are steps, and which of them to look at.

A step is a `ProfilerStep` range where there are any; otherwise what lies between the ends of two
calls of the optimizer; otherwise the whole trace.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretell.errors import InputError
from foretell.graph.columns import NONE, Array
from foretell.trace.events import Events, What
from foretell.trace.runs import distinct
from foretell.trace.step.device import Work
from foretell.trace.words import Tells, by_name, note_tells, step_number


@dataclass(frozen=True, eq=False)
class Steps:
    """When every step begins and ends on the host, and on which thread."""

    number: Array  # as the trace counts them
    start: Array
    end: Array
    thread: int
    found_by: str  # `ProfilerStep`, `optimizer` or `trace`

    def __len__(self) -> int:
        return len(self.number)


def find_steps(events: Events) -> Steps:
    """All steps of a trace, first to last, cut so that none overlaps the next."""
    tells = np.where(
        events.what == What.NOTE,
        by_name(events.texts, events.name, lambda text: int(note_tells(text))),
        0,
    )
    marked = np.flatnonzero(tells & Tells.STEP)
    steps = _by_notes(events, marked) if len(marked) else None
    if steps is not None and len(steps):
        return steps
    updates = np.flatnonzero(tells & Tells.UPDATE)
    updates = updates[_are_optimizer_steps(events, updates)]
    steps = _by_updates(events, updates) if len(updates) > 2 else None
    return steps if steps is not None and len(steps) else _whole(events)


def lengths(events: Events, work: Work, steps: Steps) -> Array:
    """How long each step took, measured from where the one before left the device.

    A step ends when its host and all device work that it launched are done; it could begin when its
    host began it and the device was done with what was launched before.
    """
    issued = np.where(work.call != NONE, events.start[work.call], -np.inf)
    ranked = np.argsort(issued, kind="stable")
    high = np.append(-np.inf, np.maximum.accumulate(work.end[ranked]))
    done = high[np.searchsorted(issued[ranked], steps.start, side="left")]
    owner = np.searchsorted(steps.start, issued, side="right") - 1
    own = (owner >= 0) & (issued < steps.end[owner])
    end = steps.end.copy()
    np.maximum.at(end, owner[own], work.end[own])
    found: Array = end - np.where(done < end, np.maximum(steps.start, done), steps.start)
    return found


def choose(events: Events, steps: Steps, seconds: Array, wanted: int | None) -> int:
    """The place of the wanted step, or of the one of median length (the shorter of two).

    Steps in which hardly anything happened (the last range of a profiler that was stopped) do not
    count for the median.
    """
    if wanted is None:
        full = np.flatnonzero(_is_full(events, steps))
        return int(full[np.argsort(seconds[full], kind="stable")[(len(full) - 1) // 2]])
    source = events.source
    places = np.flatnonzero(steps.number == wanted)
    if not len(places):
        known = ", ".join(map(str, steps.number.tolist()[:12]))
        raise InputError(f"`{source}` has no step {wanted}", hint=f"its steps are {known}")
    return int(places[0])


def _is_full(events: Events, steps: Steps) -> Array:
    """Which steps have at least half as many host events as the fullest."""
    host = events.start[events.is_(What.OP, What.CALL)]
    step = np.searchsorted(steps.start, host, side="right") - 1
    count = np.bincount(step[step >= 0], minlength=len(steps))
    found: Array = 2 * count >= count.max(initial=0)
    return found


def _by_notes(events: Events, marked: Array) -> Steps:
    thread = np.bincount(events.place[marked]).argmax()
    mine = marked[events.place[marked] == thread]
    mine = mine[np.argsort(events.start[mine], kind="stable")]
    start, end = events.start[mine], events.end[mine].copy()
    end[:-1] = np.minimum(end[:-1], start[1:])  # overlapping ranges: the next one begins anew
    number = np.array([step_number(events.texts[k]) for k in events.name[mine].tolist()])
    real = end > start
    return Steps(number[real], start[real], end[real], int(thread), "ProfilerStep")


def _are_optimizer_steps(events: Events, updates: Array) -> Array:
    return by_name(
        events.texts, events.name[updates], lambda text: int("step" in text.lower())
    ).astype(bool)


def _by_updates(events: Events, updates: Array) -> Steps:
    thread = np.bincount(events.place[updates]).argmax()
    mine = updates[events.place[updates] == thread]
    ends = distinct(events.end[mine])
    return Steps(np.arange(1, len(ends)), ends[:-1], ends[1:], int(thread), "optimizer")


def _whole(events: Events) -> Steps:
    """One step: from the first event on the host to the last, on the thread that spans most."""
    host = np.flatnonzero(events.is_(What.OP, What.CALL, What.NOTE))
    if not len(host):  # the device alone
        first, last = events.start.min(), events.end.max()
        return Steps(np.zeros(1, np.int64), first[None], last[None], 0, "trace")
    first = np.full(int(events.place[host].max()) + 1, np.inf)
    last = np.full(len(first), -np.inf)
    np.minimum.at(first, events.place[host], events.start[host])
    np.maximum.at(last, events.place[host], events.end[host])
    thread = int(np.argmax(last - first))
    return Steps(np.zeros(1, np.int64), first.min()[None], last.max()[None], thread, "trace")
