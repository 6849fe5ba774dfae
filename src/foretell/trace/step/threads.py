"""One thread that hands over to another: backward runs on a thread of its own, and is waited for.

Nothing in a trace says so. A thread takes up work behind a pause in which the main thread worked;
the main thread waited in an idle stretch if the other one ran a backward pass in it, or filled most
of it. Neither the pause nor the stretch is then a gap: they last as long as the other side needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretell.graph.columns import NONE, Array
from foretell.trace.runs import distinct
from foretell.trace.step.draft import NOISE, Draft
from foretell.trace.words import Tells

_OWN_TIME = 0.5  # share of an idle stretch that another thread fills if it was waited for
_SAME = NOISE / 10  # seconds by which stamps of two threads may contradict each other


@dataclass(frozen=True, eq=False)
class HandOvers:
    """Waits between host tasks of different threads, and idle time that is no gap."""

    waiting: Array
    after: Array
    lag: Array
    idle_behind: Array  # tasks
    idle: Array  # seconds


def hand_overs(d: Draft) -> HandOvers:
    """All hand-overs between the main thread and the others."""
    main = np.flatnonzero(d.host.thread == d.thread)
    none = np.zeros(0, np.int64)
    rows: list[tuple[Array, ...]] = [(none, none, np.zeros(0), none, np.zeros(0))]
    for thread in distinct(d.host.thread).tolist():
        if thread != d.thread and len(main):
            mine = np.flatnonzero(d.host.thread == thread)
            rows += [_taken_up(d, main, mine), _waited_for(d, main, mine)]
    return HandOvers(*(np.concatenate([r[k] for r in rows]) for k in range(5)))


def _taken_up(d: Draft, main: Array, mine: Array) -> tuple[Array, ...]:
    """The other thread's first task behind each pause waits for the main one's last before it.

    Backward work of the main thread does not break a pause: while it waits, it stores gradients
    for the other thread.
    """
    h = d.host
    busy = main[~_is_backward(d, main)]
    a = np.searchsorted(h.start[busy], h.end[mine[:-1]], side="left")
    b = np.searchsorted(h.start[busy], h.start[mine[1:]], side="left")
    breaks = np.flatnonzero(b > a)
    first = mine[np.append(0, breaks + 1)]
    at = np.searchsorted(h.end[main], h.start[first] + _SAME, side="right") - 1
    first, giver = first[at >= 0], main[at[at >= 0]]
    lag = np.maximum(h.start[first] - h.end[giver], 0.0)
    pause = h.start[mine[breaks + 1]] - h.end[mine[breaks]]
    return first, giver, lag, mine[breaks], pause


def _waited_for(d: Draft, main: Array, mine: Array) -> tuple[Array, ...]:
    """The main thread's task behind each idle stretch waits for the other's last task in it."""
    h = d.host
    begin, end = h.end[main[:-1]], h.start[main[1:]]
    a = np.searchsorted(h.start[mine], begin - _SAME, side="left")
    b = np.searchsorted(h.end[mine], end + _SAME, side="right")
    worked = np.append(0.0, np.cumsum(h.end[mine] - h.start[mine]))
    backward = np.append(0, np.cumsum(_is_backward(d, mine)))
    some = np.flatnonzero((b > a) & (end - begin > NOISE))
    fills = worked[b[some]] - worked[a[some]] >= _OWN_TIME * (end - begin)[some]
    waited = some[fills | (backward[b[some]] > backward[a[some]])]
    taker, last = main[waited + 1], mine[b[waited] - 1]
    lag = np.maximum(h.start[taker] - h.end[last], 0.0)
    return taker, last, lag, main[waited], (end - begin)[waited]


def _is_backward(d: Draft, tasks: Array) -> Array:
    label = d.host.label[tasks]
    if not len(d.nest.tells):
        return np.zeros(len(tasks), bool)
    found: Array = (label != NONE) & ((d.nest.tells[label] & Tells.BACKWARD) > 0)
    return found
